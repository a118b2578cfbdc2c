"""Removes the checkpoints that retention would remove, and the remains of dead processes; pins those to keep."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lazyckpt.config import Config
from lazyckpt.errors import ConfigError, LoadError
from lazyckpt.storage import folders, manifest, removal, retention
from lazyckpt.storage.manifest import Checkpoint
from lazyckpt.storage.retention import Best, Fate
from lazyckpt.stores.store import AnyPath, StorePath
from lazyckpt.tools import deepspeed
from lazyckpt.tools.deepspeed import Tag
from lazyckpt.tools.listing import Leftover, catalog_of, leftovers


@dataclass(frozen=True)
class Pruning:
    """The checkpoints that ``prune`` removed or would remove, each with the reason, and the remains of dead
    processes."""

    doomed: dict[Checkpoint | Tag, str]
    kept: dict[Checkpoint | Tag, str]
    leftovers: list[Leftover]

    @property
    def bytes(self) -> int:
        """The bytes of ``doomed`` and ``leftovers``."""
        return sum(c.nbytes for c in self.doomed) + sum(leftover.bytes for leftover in self.leftovers)


def prune(
    directory: AnyPath,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: int | None = None,
    best: str | None = None,
    mode: Literal["min", "max"] = "min",
    remove: bool = False,
) -> Pruning:
    """Applies retention to a run's folder; without ``remove`` it only lists them.

    The rules are those of a Checkpointer. Without ``keep_last`` only leftovers go. Never removes the newest
    checkpoint, pinned or broken ones, or one that a process is writing. Of the tags of DeepSpeed it never removes the
    newest complete one, an incomplete one, or the one that ``latest`` names. Raises ConfigError, and LoadError, also if
    ``latest`` names a tag that is missing.
    """
    # raises ConfigError
    Config(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best, best=best, mode=mode)
    chosen = None if best is None else Best(best, mode, keep_best or 0)
    if isinstance(directory, StorePath):
        return _prune_url(directory, keep_last, keep_every, chosen, remove)
    fates = _fates(directory, keep_last, keep_every, chosen)
    if not fates and (copies := _copies_in(directory)):
        return _prune_copies(directory, copies, keep_last, keep_every, chosen, remove)
    trash = [leftover for leftover in leftovers(directory) if leftover.state == "abandoned"]
    if remove:
        for checkpoint, fate in fates.items():
            if not fate.stays and not _remove(checkpoint):
                fates[checkpoint] = Fate(True, "saved again, removed or pinned meanwhile")
        swept = {path.name for path in removal.sweep(directory)}
        trash = [leftover for leftover in trash if leftover.name in swept]
        folders.sync_path(directory)
    doomed = {c: fate.why for c, fate in fates.items() if not fate.stays}
    kept = {c: fate.why for c, fate in fates.items() if fate.stays}
    return Pruning(doomed, kept, trash)


def _prune_url(
    url: StorePath, keep_last: int | None, keep_every: int | None, best: Best | None, remove: bool
) -> Pruning:
    """Leaves checkpoints without a manifest: one may be on its way."""
    from lazyckpt.tools import remote

    return _prune_copies(url, remote.scan(url)[0], keep_last, keep_every, best, remove)


def _copies_in(directory: Path) -> list[Checkpoint]:
    from lazyckpt.tools import remote

    return remote.copies_in(directory)


def _prune_copies(
    place: AnyPath,
    found: list[Checkpoint],
    keep_last: int | None,
    keep_every: int | None,
    best: Best | None,
    remove: bool,
) -> Pruning:
    """Applies retention to checkpoints in a mirror."""
    from lazyckpt.tools import remote

    fates = retention.retention(found, keep_last, keep_every, best=best)
    doomed: dict[Checkpoint | Tag, str] = {c: fate.why for c, fate in fates.items() if not fate.stays}
    for checkpoint in found if remove else ():
        if checkpoint in doomed:
            remote.remove(place, checkpoint)
    return Pruning(doomed, {c: fate.why for c, fate in fates.items() if fate.stays}, [])


def _fates(
    directory: Path, keep_last: int | None, keep_every: int | None, best: Best | None
) -> dict[Checkpoint | Tag, Fate]:
    """The fate of each checkpoint, the newest first."""
    known = catalog_of(directory).scan()
    if known or not deepspeed.is_save_dir(directory):
        return {c: fate for c, fate in retention.retention(known, keep_last, keep_every, best=best).items()}
    if best is not None:
        raise ConfigError("keep_best: DeepSpeed saves no metrics with its checkpoints")
    return _fates_of_tags(directory, keep_last, keep_every)


def _fates_of_tags(directory: Path, keep_last: int | None, keep_every: int | None) -> dict[Checkpoint | Tag, Fate]:
    """The fate of each tag, the newest first. Raises LoadError if ``latest`` names a tag that is missing."""
    loaded = _loaded(directory)
    fates: dict[Checkpoint | Tag, Fate] = {}
    complete = 0
    for tag in deepspeed.tags(directory):
        complete += not tag.faults
        if keep_last is None:
            fates[tag] = Fate(True, "no keep_last")
        elif tag.path.is_symlink():
            fates[tag] = Fate(True, "a link")
        elif tag.faults:
            fates[tag] = Fate(True, f"incomplete, or being written: {tag.faults[0]}")
        elif complete <= keep_last:
            fates[tag] = Fate(True, f"within keep_last={keep_last}")
        elif os.path.realpath(tag.path) == loaded:
            fates[tag] = Fate(True, "latest names it")
        elif keep_every is not None and tag.step is not None and tag.step % keep_every == 0:
            fates[tag] = Fate(True, f"a multiple of keep_every={keep_every}")
        else:
            fates[tag] = Fate(False, f"beyond keep_last={keep_last}")
    return fates


def _loaded(directory: Path) -> str | None:
    """The folder of the tag that DeepSpeed would load, without links."""
    folder = deepspeed.named(directory)
    return None if folder is None else os.path.realpath(folder)


def _remove(checkpoint: Checkpoint | Tag) -> bool:
    """Removes it unless a running job has saved its step again or removed it, or a user has pinned it, meanwhile."""
    there = checkpoint.path if isinstance(checkpoint, Tag) else checkpoint.folder

    def is_the_same(folder: Path) -> bool:
        try:
            if isinstance(checkpoint, Tag):
                unchanged = deepspeed.open_tag(folder).created == checkpoint.created
                return unchanged and deepspeed.latest(checkpoint.path.parent) != checkpoint.path.name
            found = manifest.read_checkpoint(folder).sequence
        except LoadError:
            return False
        return found == checkpoint.sequence and not os.path.lexists(manifest.pin_of(there))

    return removal.remove(there, is_the_same)


def pin(directory: AnyPath, step: int) -> AnyPath:
    """Makes every retention keep the checkpoint of ``step``; returns its folder. Raises LoadError."""
    if isinstance(directory, StorePath):
        from lazyckpt.tools import remote

        return remote.pin(directory, step, True)
    checkpoint = _folder_of(directory, step)
    if manifest.is_missing(checkpoint):
        raise LoadError("no such checkpoint", path=checkpoint)
    manifest.read_described(checkpoint)
    retention.pin(checkpoint)
    return checkpoint


def _folder_of(directory: Path, step: int) -> Path:
    """The path of a checkpoint, or of a trainer's copy in a mirror. Raises LoadError."""
    path = catalog_of(directory).root / manifest.folder_name(step)
    if manifest.is_missing(path) and manifest.is_missing(manifest.pin_of(path)):
        path = next((copy.folder for copy in _copies_in(directory) if copy.step == step), path)
    return path


def unpin(directory: AnyPath, step: int) -> AnyPath:
    """Undoes ``pin``; returns the folder of the checkpoint. Raises LoadError."""
    if isinstance(directory, StorePath):
        from lazyckpt.tools import remote

        return remote.pin(directory, step, False)
    checkpoint = _folder_of(directory, step)
    if manifest.is_missing(checkpoint) and manifest.is_missing(manifest.pin_of(checkpoint)):
        raise LoadError("no such checkpoint", path=checkpoint)
    retention.unpin(checkpoint)
    return checkpoint
