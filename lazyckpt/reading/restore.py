"""From a committed checkpoint back into the live training state."""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from pathlib import Path

import torch

from lazyckpt import _engine
from lazyckpt.capture import devices
from lazyckpt.errors import LoadError, ReadError, RestoreError, UnsupportedFormatError
from lazyckpt.providers.base import Landing, Provider
from lazyckpt.reading.archive import Archive
from lazyckpt.storage.catalog import SCANS, Catalog
from lazyckpt.storage.manifest import STATE, Checkpoint, read_checkpoint
from lazyckpt.storage.retry import patiently


def restore_newest(catalog: Catalog, provider: Provider, engine: _engine.Engine) -> Checkpoint | None:
    """Restores the newest checkpoint that is whole; damaged ones are passed over with a warning.

    One that cannot be read just now is not damaged: it is tried again for three seconds. If one is gone by then,
    another process has removed it, and has newer ones: the catalog is read anew, up to ``SCANS`` times in all. Returns
    None for an empty catalog. Raises ReadError; RestoreError if none is whole, or if one does not fit; and
    UnsupportedFormatError for one that holds types which the user has not allowed.
    """
    return patiently(lambda: _restore_newest(catalog, provider, engine, SCANS))


def _restore_newest(catalog: Catalog, provider: Provider, engine: _engine.Engine, scans: int) -> Checkpoint | None:
    candidates = catalog.scan()
    reasons: list[LoadError] = list(catalog.broken)
    for error in reasons:
        if isinstance(error, ReadError):
            raise error  # it may be the newest
        warnings.warn(f"checkpoint passed over: {error}", stacklevel=6)
    if not candidates and not reasons:
        return None
    touched = False
    for checkpoint in candidates:
        archive = None
        try:
            with _open(checkpoint.path, engine) as archive:
                restore_archive(archive, provider, checkpoint.path)
            return checkpoint
        except ReadError as error:
            raise _refused(error, archive) from error
        except UnsupportedFormatError:
            raise  # not damaged: to go back to an older one would lose training for want of a word with the user
        except LoadError as error:
            if scans > 1 and not os.path.exists(checkpoint.path):
                return _restore_newest(catalog, provider, engine, scans - 1)
            touched = touched or archive is not None
            catalog.damaged.add((checkpoint.step, checkpoint.sequence))
            reasons.append(error)
            warnings.warn(f"checkpoint passed over, trying the one before: {error}", stacklevel=6)
    state = "; the tracked state is undefined now" if touched else "; the tracked state was not touched"
    lines = "\n".join(f"  {reason}" for reason in reasons)
    raise RestoreError(f"no checkpoint in {catalog.root} can be restored{state}:\n{lines}")


def restore_one(path: Path, provider: Provider, engine: _engine.Engine) -> Checkpoint:
    """Restores the checkpoint folder ``path``. Raises LoadError or RestoreError, ReadError after some more attempts."""
    return patiently(lambda: _restore_one(path, provider, engine))


def _restore_one(path: Path, provider: Provider, engine: _engine.Engine) -> Checkpoint:
    checkpoint = read_checkpoint(path)
    archive = None
    try:
        with _open(path, engine) as archive:
            restore_archive(archive, provider, path)
    except ReadError as error:
        raise _refused(error, archive) from error
    except LoadError as error:
        if archive is None:
            raise  # nothing was touched
        raise RestoreError(f"{error}; the tracked state is undefined now") from error
    return checkpoint


def _refused(error: ReadError, archive: Archive | None) -> ReadError:
    touched = "; the tracked state is undefined now" if archive is not None else ""
    return ReadError(error.what + touched, path=error.path, errno=error.errno)


def _open(path: Path, engine: _engine.Engine) -> Archive:
    return Archive(path / STATE, "cpu", weights_only=True, engine=engine, lands=True)


def restore_archive(archive: Archive, provider: Provider, path: Path) -> None:
    """Checks, reads, hands over, in this order: nothing is touched unless everything fits."""
    try:
        landings = provider.landings(archive.tree)
    except RestoreError as error:
        lines = "\n".join(f"  {line}" for line in str(error).splitlines())
        raise RestoreError(f"{path} does not fit the tracked state; nothing was restored:\n{lines}") from None
    except Exception as error:  # a state that nothing of ours has written may make a provider raise nearly anything
        what = f"{type(error).__name__}: {error}"
        raise RestoreError(f"{path} does not fit the tracked state; nothing was restored:\n  {what}") from error
    try:
        elsewhere, landed = _choose(archive, landings)
    except OSError as error:  # a device cannot be used
        raise RestoreError(f"{path} was not restored, nothing was touched: {error.strerror}") from error
    archive.fill(elsewhere)
    try:
        provider.load(archive.tree, landed)
    except RestoreError as error:
        what = f"{path} was not restored, the tracked state is undefined now: {error}"
        raise RestoreError(what) from error.__cause__ or error


def _choose(archive: Archive, landings: list[Landing]) -> tuple[dict[str, tuple[int, int]], dict[int, torch.Tensor]]:
    """Which storages may be read straight into live memory, on the host or a device: those that are seen only
    through tensors that land, whole, in one and the same place, in which nothing else lands."""
    by_key: dict[str, list[Landing]] = defaultdict(list)
    for landing in landings if not archive.filled else ():
        if (slot := archive.slot_of(landing.saved)) is not None:
            by_key[slot.record.name.removeprefix("data/")].append(landing)
    lives = [landing.live for group in by_key.values() for landing in group]
    storages = [live.untyped_storage() for live in lives]
    located = devices.locate(storages, [s.device for s in storages], archive.engine) or [devices.HOST] * len(lives)
    place_of = {id(live): (devices.address(live), device) for live, device in zip(lives, located, strict=True)}
    claims: dict[tuple[int, int], int] = defaultdict(int)
    for group in by_key.values():
        for place in {place_of[id(landing.live)] for landing in group}:
            claims[place] += 1
    elsewhere = {}
    landed = {}
    for key, group in by_key.items():
        slot = archive.slots[key]
        place = place_of[id(group[0].live)]
        if (
            len(group) == slot.references
            and slot.record.nbytes > 0
            and claims[place] == 1
            and place[1] != devices.ELSEWHERE
            and all(
                place_of[id(landing.live)] == place
                and landing.live.is_contiguous()
                and landing.saved.is_contiguous()
                and landing.saved.is_conj() == landing.live.is_conj()
                and landing.saved.is_neg() == landing.live.is_neg()
                and landing.saved.numel() * landing.saved.element_size() == slot.record.nbytes
                for landing in group
            )
        ):
            elsewhere[key] = place
            landed.update({id(landing.saved): landing.live for landing in group})
    return elsewhere, landed
