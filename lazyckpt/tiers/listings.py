"""Lists the mirrors of a run at the same time, and does not wait long for one that is silent."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lazyckpt import waits
from lazyckpt.errors import ConfigError, LoadError, MirrorError, ReadError, load_error
from lazyckpt.storage.manifest import Checkpoint
from lazyckpt.stores.calls import begun
from lazyckpt.tiers.mirror import Mirror
from lazyckpt.tiers.tier import Tier
from lazyckpt.tiers.words import run_of
from lazyckpt.warn import warn


class Listing(NamedTuple):
    """The checkpoints in a mirror."""

    mirror: Mirror
    found: list[Checkpoint]
    broken: list[LoadError]  # why others there cannot be read
    run: str | None = None  # asked only if there are checkpoints
    unread: LoadError | None = None  # why the mirror cannot be read


def listings(
    readers: Mapping[Mirror, Tier],
    directory: Path,
    local: list[Checkpoint],
    suffice: Callable[[Iterable[Checkpoint]], bool],
) -> list[Listing]:
    """The listings of all mirrors of the run in ``directory``, where the checkpoints ``local`` are. Passes over those
    of another run, with a warning.

    Waits for each mirror. Once the known ones ``suffice``, it waits for a silent one only ``MIRROR_SILENCE_S``; that is
    a ReadError then. Raises ConfigError if a folder of no run has mirrors of several."""
    own = run_of(directory)
    began = time.monotonic()
    asked = {mirror: begun(partial(_list, mirror, tier)) for mirror, tier in readers.items()}

    def done() -> list[Listing]:
        there = [future.result() for future in asked.values() if future.done()]
        return [listing for listing in there if not (local and own is None) and own in (None, listing.run)]

    def silent_s(mirror: Mirror) -> float:
        return time.monotonic() - max(began, readers[mirror].heard)

    while left := {mirror: future for mirror, future in asked.items() if not future.done()}:
        pause_s = None
        if suffice([*local, *(checkpoint for listing in done() for checkpoint in listing.found)]):
            pause_s = waits.MIRROR_SILENCE_S - min(map(silent_s, left))
            if pause_s <= 0:
                break
        futures.wait(left.values(), pause_s, futures.FIRST_COMPLETED)
    found = [future.result() if future.done() else _silent(mirror) for mirror, future in asked.items()]
    return _of_one_run(found, own, directory if local else None)


def _list(mirror: Mirror, tier: Tier) -> Listing:
    try:
        found = [checkpoint for checkpoint in tier.checkpoints() if checkpoint.layout == "state"]  # no trainer's
        return Listing(mirror, found, tier.broken, tier.run() if found else None)
    except LoadError as error:
        return Listing(mirror, [], [], unread=error)
    except OSError as error:
        return Listing(mirror, [], [], unread=load_error("cannot be read", error, path=os.fspath(mirror.url)))


def _silent(mirror: Mirror) -> Listing:
    what = f"it did not answer within {waits.MIRROR_SILENCE_S:g} s"
    return Listing(mirror, [], [], unread=ReadError(what, path=str(mirror), errno=errno.ETIMEDOUT))


def _of_one_run(found: list[Listing], own: str | None, holds: Path | None) -> list[Listing]:
    """Those without checkpoints of another run than ``own``. ``holds``: the folder of the run, if it has checkpoints:
    without an id, no mirror has got any of them."""
    runs = {listing.run: listing.mirror for listing in found if listing.run is not None}
    if own is None and holds is None and len(runs) > 1:
        told = ", ".join(f"{mirror} holds run {run}" for run, mirror in runs.items())
        raise ConfigError(f"mirrors: {told}; give those of one run")
    kept = []
    for listing in found:
        if listing.found and (holds is not None or own is not None) and listing.run != own:
            what = f"it holds the checkpoints of another run ({listing.run})"
            if own is None:
                what += f", since none of those in {holds} was ever uploaded"
            warn(f"passed over: {MirrorError(what, mirror=str(listing.mirror))}")
        else:
            kept.append(listing)
    return kept
