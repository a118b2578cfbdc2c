"""Removes the checkpoints that retention would remove, and what dead processes left; pins those to keep."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from lazyckpt.config import Config
from lazyckpt.errors import LoadError
from lazyckpt.storage import catalog, commit
from lazyckpt.storage.catalog import Checkpoint, Verdict, retention
from lazyckpt.tools.listing import Leftover, catalog_of, leftovers


@dataclass(frozen=True)
class JudgedCheckpoint:
    """A checkpoint of ``bytes`` bytes, and ``why`` retention keeps it or lets it go."""

    name: str
    step: int
    sequence: int
    created: datetime
    bytes: int
    pinned: bool
    why: str


@dataclass(frozen=True)
class Pruning:
    """What ``prune`` removed, or would remove.

    Attributes:
        directory: The run's folder.
        removed: Whether ``checkpoints`` and ``leftovers`` are gone.
        bytes: Their bytes.
        checkpoints: The checkpoints that retention lets go.
        kept: The others.
        leftovers: What dead processes left.
    """

    directory: Path
    removed: bool
    bytes: int
    checkpoints: tuple[JudgedCheckpoint, ...]
    kept: tuple[JudgedCheckpoint, ...]
    leftovers: tuple[Leftover, ...]


def prune(
    directory: Path, *, keep_last: int | None = None, keep_every: int | None = None, remove: bool = False
) -> Pruning:
    """Applies retention to a run's folder; without ``remove`` it only tells what would go.

    The rules are those of a Checkpointer. Without ``keep_last`` only leftovers go. Never removes the newest
    checkpoint, pinned or broken ones, and what a process is writing. Raises ConfigError and LoadError.
    """
    Config(keep_last=keep_last, keep_every=keep_every)  # raises ConfigError
    known = catalog_of(directory).scan()
    verdicts = retention(known, keep_last, keep_every)
    trash = [leftover for leftover in leftovers(directory) if leftover.state == "abandoned"]
    if remove:
        for checkpoint in known:
            if not verdicts[checkpoint].stays and not _remove(checkpoint):
                verdicts[checkpoint] = Verdict(True, "saved again, removed or pinned meanwhile")
        swept = {path.name for path in commit.sweep(directory)}
        trash = [leftover for leftover in trash if leftover.name in swept]
        commit.sync_path(directory)
    doomed = tuple(_judged(c, verdicts[c]) for c in known if not verdicts[c].stays)
    return Pruning(
        directory=directory,
        removed=remove,
        bytes=sum(c.bytes for c in doomed) + sum(leftover.bytes for leftover in trash),
        checkpoints=doomed,
        kept=tuple(_judged(c, verdicts[c]) for c in known if verdicts[c].stays),
        leftovers=tuple(trash),
    )


def _judged(c: Checkpoint, verdict: Verdict) -> JudgedCheckpoint:
    return JudgedCheckpoint(c.path.name, c.step, c.sequence, c.created, c.nbytes, c.pinned, verdict.why)


def _remove(checkpoint: Checkpoint) -> bool:
    """Removes it unless a running job saved its step again or removed it, or somebody pinned it, meanwhile."""

    def is_the_same(folder: Path) -> bool:
        try:
            found = catalog.read_checkpoint(folder).sequence
        except LoadError:
            return False
        return found == checkpoint.sequence and not os.path.lexists(catalog.pin_of(checkpoint.path))

    return commit.remove(checkpoint.path, is_the_same)


def pin(directory: Path, step: int) -> Path:
    """Makes every retention keep the checkpoint of ``step``; returns its folder. Raises LoadError."""
    checkpoint = catalog_of(directory).root / catalog.folder_name(step)
    if catalog.is_missing(checkpoint):
        raise LoadError("no such checkpoint", path=checkpoint)
    catalog.read_checkpoint(checkpoint)
    catalog.pin(checkpoint)
    return checkpoint


def unpin(directory: Path, step: int) -> Path:
    """Undoes ``pin``; returns the folder of the checkpoint. Raises LoadError."""
    checkpoint = catalog_of(directory).root / catalog.folder_name(step)
    if catalog.is_missing(checkpoint) and catalog.is_missing(catalog.pin_of(checkpoint)):
        raise LoadError("no such checkpoint", path=checkpoint)
    catalog.unpin(checkpoint)
    return checkpoint
