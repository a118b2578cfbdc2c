"""Removes the checkpoints that retention would remove, and the remains of dead processes; pins those to keep."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lazyckpt.config import Config
from lazyckpt.errors import LoadError
from lazyckpt.storage import folders, manifest, removal, retention
from lazyckpt.storage.manifest import Checkpoint
from lazyckpt.storage.retention import Best
from lazyckpt.tools.listing import Leftover, catalog_of, leftovers


@dataclass(frozen=True)
class Pruning:
    """The checkpoints that ``prune`` removed or would remove, each with the reason, and the remains of dead
    processes."""

    doomed: dict[Checkpoint, str]
    kept: dict[Checkpoint, str]
    leftovers: list[Leftover]

    @property
    def bytes(self) -> int:
        """The bytes of ``doomed`` and ``leftovers``."""
        return sum(c.nbytes for c in self.doomed) + sum(leftover.bytes for leftover in self.leftovers)


def prune(
    directory: Path,
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
    checkpoint, pinned or broken ones, or one that a process is writing. Raises ConfigError and LoadError.
    """
    # raises ConfigError
    Config(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best, best=best, mode=mode)
    known = catalog_of(directory).scan()
    verdicts = retention.retention(
        known, keep_last, keep_every, best=None if best is None else Best(best, mode, keep_best or 0)
    )
    trash = [leftover for leftover in leftovers(directory) if leftover.state == "abandoned"]
    if remove:
        for checkpoint in known:
            if not verdicts[checkpoint].stays and not _remove(checkpoint):
                verdicts[checkpoint] = retention.Fate(True, "saved again, removed or pinned meanwhile")
        swept = {path.name for path in removal.sweep(directory)}
        trash = [leftover for leftover in trash if leftover.name in swept]
        folders.sync_path(directory)
    doomed = {c: verdicts[c].why for c in known if not verdicts[c].stays}
    kept = {c: verdicts[c].why for c in known if verdicts[c].stays}
    return Pruning(doomed, kept, trash)


def _remove(checkpoint: Checkpoint) -> bool:
    """Removes it unless a running job has saved its step again or removed it, or a user has pinned it, meanwhile."""

    def is_the_same(folder: Path) -> bool:
        try:
            found = manifest.read_checkpoint(folder).sequence
        except LoadError:
            return False
        return found == checkpoint.sequence and not os.path.lexists(manifest.pin_of(checkpoint.path))

    return removal.remove(checkpoint.path, is_the_same)


def pin(directory: Path, step: int) -> Path:
    """Makes every retention keep the checkpoint of ``step``; returns its folder. Raises LoadError."""
    checkpoint = catalog_of(directory).root / manifest.folder_name(step)
    if manifest.is_missing(checkpoint):
        raise LoadError("no such checkpoint", path=checkpoint)
    manifest.read_checkpoint(checkpoint)
    retention.pin(checkpoint)
    return checkpoint


def unpin(directory: Path, step: int) -> Path:
    """Undoes ``pin``; returns the folder of the checkpoint. Raises LoadError."""
    checkpoint = catalog_of(directory).root / manifest.folder_name(step)
    if manifest.is_missing(checkpoint) and manifest.is_missing(manifest.pin_of(checkpoint)):
        raise LoadError("no such checkpoint", path=checkpoint)
    retention.unpin(checkpoint)
    return checkpoint
