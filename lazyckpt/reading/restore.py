"""Restores a committed checkpoint into the live training state."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lazyckpt import _engine, devices
from lazyckpt.collector import collector_paused
from lazyckpt.errors import LoadError, RankError, ReadError, RestoreError, UnsupportedFormatError
from lazyckpt.formats.reader import FileReader
from lazyckpt.providers.base import Landing
from lazyckpt.providers.composite import CompositeProvider
from lazyckpt.providers.fsdp import reshard
from lazyckpt.providers.global_state import holds_shards, is_dtensor, is_own
from lazyckpt.providers.module import ModuleProvider
from lazyckpt.providers.objects import StateProvider
from lazyckpt.ranks.team import ALONE, Team
from lazyckpt.reading.archive import Archive, Place
from lazyckpt.reading.fit import Fit, Fitting, hand_over, misfit
from lazyckpt.reading.hint import hint
from lazyckpt.reading.own import own_state
from lazyckpt.reading.restored import Restored
from lazyckpt.reading.sharded.restore import Shards
from lazyckpt.reading.sharded.tensors import scatter
from lazyckpt.reading.together import Described, Filling
from lazyckpt.storage import unfinished
from lazyckpt.storage.catalog import SCANS, Catalog, patiently
from lazyckpt.storage.manifest import MANIFEST, STATE, Checkpoint, check_labels, is_missing, read_checkpoint
from lazyckpt.storage.retention import Best
from lazyckpt.stores.store import AnyPath
from lazyckpt.warn import warn


@patiently
def restore_newest(
    catalog: Catalog,
    tracked: CompositeProvider,
    engine: _engine.Engine,
    fit: Fit,
    best: Best | None = None,
    team: Team = ALONE,
) -> tuple[Checkpoint, Restored] | None:
    """Restores the newest checkpoint that is whole, or the ``best``. Skips damaged ones with a warning.

    Retries for three seconds if a checkpoint cannot be read; that does not make it damaged. If a checkpoint has gone,
    another process has removed it and has newer ones: the catalog is scanned again, up to ``SCANS`` times in all.

    Returns None for an empty catalog. Raises ReadError; RestoreError if no checkpoint is whole, or if one does not fit;
    UnsupportedFormatError for one with types that the user has not allowed.
    """
    return _restore_newest(catalog, tracked, engine, fit, best, team, SCANS)


def _restore_newest(
    catalog: Catalog,
    tracked: CompositeProvider,
    engine: _engine.Engine,
    fit: Fit,
    best: Best | None,
    team: Team,
    scans: int,
) -> tuple[Checkpoint, Restored] | None:
    candidates, reasons = team.follow(lambda: _candidates(catalog, best))
    if not candidates and not reasons:
        return None
    touched = False
    for at, checkpoint in enumerate(candidates):
        attempt = _Attempt(tracked, engine, fit, team)
        try:
            return checkpoint, attempt.restore(checkpoint)
        except ReadError as error:
            if not any(other.sequence == checkpoint.sequence for other in candidates[at + 1 :]):
                raise attempt.refused(error) from error
            touched = touched or attempt.touches
            warn(f"cannot be read now, trying its copy: {error}")
        except UnsupportedFormatError:
            raise  # not damaged: an older one would lose training that the user can save by allowing a type
        except LoadError as error:
            if scans > 1 and team.follow(lambda: is_missing(checkpoint.path / MANIFEST)):  # noqa: B023
                return _restore_newest(catalog, tracked, engine, fit, best, team, scans - 1)
            touched = touched or attempt.touches
            if isinstance(checkpoint.path, Path):
                catalog.damaged.add((checkpoint.step, checkpoint.sequence))
            reasons.append(error)
            warn(f"checkpoint passed over, trying the one before: {error}")
    state = "; the tracked state is undefined now" if touched else "; the tracked state was not touched"
    lines = "\n".join(f"  {reason}" for reason in reasons)
    raise RestoreError(f"no checkpoint in {catalog.root} can be restored{state}:\n{lines}")


def _candidates(catalog: Catalog, best: Best | None) -> tuple[list[Checkpoint], list[LoadError]]:
    """The checkpoints to try, in this order, and why others are not tried."""
    candidates = catalog.scan()
    reasons: list[LoadError] = list(catalog.broken)
    for error in reasons:
        if isinstance(error, ReadError):
            raise error  # it may be the newest
        warn(f"checkpoint passed over: {error}")
    if best is not None and (candidates or reasons):
        known = sorted({name for checkpoint in candidates for name in checkpoint.metrics})
        if not (candidates := best.of(candidates)):
            there = f"there is: {', '.join(known)}" if known else "give save() metrics"
            raise RestoreError(f"no checkpoint in {catalog.root} has the metric {best.metric!r}: {there}")
    return candidates, reasons


@patiently
def restore_one(
    path: AnyPath, tracked: CompositeProvider, engine: _engine.Engine, fit: Fit, team: Team = ALONE
) -> tuple[Checkpoint, Restored]:
    """Restores the checkpoint folder ``path``. Raises LoadError or RestoreError; ReadError after retries."""
    checkpoint = team.follow(lambda: _read(path))
    attempt = _Attempt(tracked, engine, fit, team)
    try:
        return checkpoint, attempt.restore(checkpoint)
    except ReadError as error:
        raise attempt.refused(error) from error
    except LoadError as error:
        if not attempt.touches:
            raise
        raise RestoreError(f"{error}; the tracked state is undefined now") from error


def _read(path: AnyPath) -> Checkpoint:
    if isinstance(path, Path):
        unfinished.refuse(path)
    return read_checkpoint(path)


class _Attempt:
    """One checkpoint on its way into the tracked state of this rank."""

    def __init__(self, tracked: CompositeProvider, engine: _engine.Engine, fit: Fit, team: Team) -> None:
        self._tracked = tracked
        self._engine = engine
        self._fit = fit
        self._team = team
        self.touches = False  # the tracked state may be overwritten in part

    def restore(self, checkpoint: Checkpoint) -> Restored:
        for part in self._tracked.parts.values():
            if isinstance(part, ModuleProvider):
                reshard(part.obj)
        try:
            return self._restore(checkpoint)
        except RankError as error:
            if self.touches:
                error.args = (f"{error}; the tracked state is undefined now",)
            raise

    def _restore(self, checkpoint: Checkpoint) -> Restored:
        self._team.follow(lambda: check_labels(checkpoint))
        fitting = self._team.agree(lambda: Fitting(self._tracked, self._fit, checkpoint))
        if checkpoint.is_sharded:
            shards = self._team.agree(lambda: Shards(checkpoint.path, fitting, self._team))
            self.touches = True
            shards.restore(self._engine, self._team)
        else:
            self._restore_file(checkpoint, fitting)
        return fitting.restored()

    def _restore_file(self, checkpoint: Checkpoint, fitting: Fitting) -> None:
        team = self._team
        with contextlib.ExitStack() as stack:
            arrivals: list[Arrival] = []

            def opened() -> Described:
                archive = stack.enter_context(self._opened(checkpoint, fitting))
                arrivals.append(Arrival(archive, fitting.provider, checkpoint.path, fitting))
                stack.callback(arrivals[0].filling.close)
                return arrivals[0].filling.described(team)

            described = team.gather(opened)
            self.touches = True
            arrivals[0].filling.fill(team, described)
            team.agree(arrivals[0].hand_over)

    def _opened(self, checkpoint: Checkpoint, fitting: Fitting) -> Archive:
        path, team = checkpoint.path, self._team
        own = own_state(checkpoint, fitting, team, self._engine) if checkpoint.has_own_state else {}
        try:
            return _open(path, self._engine, fitting, own, team)
        except RestoreError as error:
            raise misfit(path, error, hint(fitting, fitting.saved)) from None

    def refused(self, error: ReadError) -> ReadError:
        touched = "; the tracked state is undefined now" if self.touches else ""
        return ReadError(error.what + touched, path=error.path, errno=error.errno)


def _open(path: AnyPath, engine: _engine.Engine, fitting: Fitting, own: dict[str, Any], team: Team) -> Archive:
    """``own`` takes the place of the parts of these names in the file."""
    choose = fitting.choose
    if own:

        def choose(tree: Any, then: Callable[[Any], Any] | None = choose) -> Any:
            tree = {**tree, **own} if isinstance(tree, dict) else tree
            return tree if then is None else then(tree)

    with FileReader(path / STATE) as file:
        return Archive(file, "cpu", weights_only=True, engine=engine, lands=True, ahead=team is ALONE, choose=choose)


def restore_archive(archive: Archive, provider: CompositeProvider | StateProvider, path: AnyPath) -> None:
    """Checks, then reads, then hands over. Touches nothing unless everything fits."""
    arrival = Arrival(archive, provider, path)
    arrival.filling.fill(ALONE, [])
    arrival.hand_over()


class Arrival:
    """An archive that fits, on its way into the tracked state of this rank."""

    def __init__(
        self,
        archive: Archive,
        provider: CompositeProvider | StateProvider,
        path: AnyPath,
        fitting: Fitting | None = None,
    ) -> None:
        """Checks, and touches nothing. Raises RestoreError."""
        self._archive, self._provider, self._path = archive, provider, path
        with collector_paused():
            try:
                landings = (fitting or provider).landings(archive.tree)
            except Exception as error:  # a provider may raise any error for a state that we have not written
                told = None if fitting is None else hint(fitting, fitting.saved)
                raise misfit(path, error, told) from (None if isinstance(error, RestoreError) else error)
            self._shards = []
            if "torch.distributed.tensor" in sys.modules:
                self._shards = [landing for landing in landings if is_dtensor(landing.live)]
                landings = [landing for landing in landings if not is_dtensor(landing.live)]
            try:
                live, self._landed = _choose(archive, landings)
            except OSError as error:  # a device cannot be used
                raise RestoreError(f"{path} was not restored, nothing was touched: {error.strerror}") from error
        self._parts = provider.parts if isinstance(provider, CompositeProvider) else {}
        self.filling = Filling(archive, live, {name for name, part in self._parts.items() if is_own(part)})

    def hand_over(self) -> None:
        """Gives the tracked objects their state, once the archive is filled. Raises RestoreError."""
        if self._shards or any(map(holds_shards, self._parts.values())):
            self._landed |= scatter(self._archive.tree, self._shards, self._provider)
        hand_over(self._provider, self._archive.tree, self._landed, self._path)


def _choose(archive: Archive, landings: list[Landing]) -> tuple[dict[str, Place], dict[int, torch.Tensor]]:
    """Chooses the storages that are read straight into live memory, on the host or on a device.

    Returns the place of each one by key, and the live tensors by the id of their saved ones. Such a storage is seen
    only through tensors that land, whole, in one and the same place, and nothing else lands in that place.
    """
    if archive.filled:
        return {}, {}
    keys = {slot.final._cdata: key for key, slot in archive.slots.items() if slot.final is not None}
    saved, live = [landing.saved for landing in landings], [landing.live for landing in landings]
    identities, storages, offsets, whole = _engine.look_at_landings(saved, live)
    found = list(map(keys.get, identities))
    where = [tensor.device for tensor in live]
    located = devices.locate(storages, where, archive.engine) or [devices.HOST] * len(live)
    places: dict[str, tuple[int, int]] = {}
    memory: dict[str, Place] = {}
    owners: dict[tuple[int, int], str] = {}
    refused = set()
    for key, storage, offset, is_whole, device in zip(found, storages, offsets, whole, located, strict=True):
        if key is None:
            continue
        place = devices.data_ptr(storage) + offset, device
        owner = owners.setdefault(place, key)
        if not is_whole or device == devices.ELSEWHERE:
            refused.add(key)
        if owner != key or places.setdefault(key, place) != place:
            refused |= {owner, key}
        memory[key] = Place(storage, offset, device)
    times = Counter(found)
    elsewhere = {
        key: place
        for key, place in memory.items()
        if key not in refused and archive.slots[key].references == times[key]  # every tensor that views it lands
    }
    return elsewhere, {id(tensor): to for key, tensor, to in zip(found, saved, live, strict=True) if key in elsewhere}
