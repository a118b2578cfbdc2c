"""Keeps ModelCheckpoint's files in order while saves are pending: ``last``, links, and removals.

This wraps methods of the class. Hooks do not suffice: Lightning looks for the last checkpoint before it calls any hook,
and saves on an exception after our callback has let go.
"""

from __future__ import annotations

import functools
import os
import weakref
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lazyckpt

try:
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.utilities.rank_zero import rank_zero_warn
except ImportError as error:
    raise ImportError('lazyckpt.integrations.lightning needs Lightning: pip install "lightning>=2.6"') from error


class PendingFiles(ABC):
    """A CheckpointIO that knows files which do not exist yet."""

    @abstractmethod
    def exists(self, path: str | Path) -> bool:
        """Whether the file would exist now if saves and removals took no time."""

    @abstractmethod
    def link(self, path: str | Path, link: str | Path) -> None:
        """Makes ``link`` a durable symbolic link to ``path`` once ``path`` is durable."""


def local_path(path: str | Path) -> Path | None:
    """Returns an absolute path, or None if ``path`` is not on a local file system."""
    fs, name = url_to_fs(str(path))
    return Path(name) if isinstance(fs, LocalFileSystem) else None


_superseded: weakref.WeakKeyDictionary[ModelCheckpoint, list[str]] = weakref.WeakKeyDictionary()


def _lazy_io(trainer: Trainer) -> PendingFiles | None:
    io = trainer.strategy.checkpoint_io
    return io if isinstance(io, PendingFiles) else None


def _wrap(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Puts the decorated ``function(original, callback, trainer, …)`` in front of the method ``name`` of
    ModelCheckpoint, for Trainers with a LazyCheckpointIO."""

    def install(function: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(ModelCheckpoint, name)

        @functools.wraps(original)
        def method(self: ModelCheckpoint, trainer: Trainer, *args: Any) -> Any:
            if _lazy_io(trainer) is None:
                return original(self, trainer, *args)
            return function(original, self, trainer, *args)

        setattr(ModelCheckpoint, name, method)
        return function

    return install


@_wrap("_remove_checkpoint")
def _remove_behind_last(original: Any, callback: ModelCheckpoint, trainer: Trainer, filepath: str) -> None:
    """ModelCheckpoint removes a file before it saves or links ``last``, which may still need that file."""
    if callback.save_last:
        _superseded.setdefault(callback, []).append(filepath)
    else:
        original(callback, trainer, filepath)


@_wrap("_save_last_checkpoint")
def _save_last(original: Any, callback: ModelCheckpoint, trainer: Trainer, monitor_candidates: Any) -> None:
    """Removes what ``_remove_behind_last`` held back, unless the save of ``last`` failed."""
    try:
        original(callback, trainer, monitor_candidates)
    finally:
        superseded = _superseded.pop(callback, [])
    for path in superseded:
        trainer.strategy.remove_checkpoint(path)


@_wrap("_find_last_checkpoints")
def _find_last(original: Any, callback: ModelCheckpoint, trainer: Trainer) -> set[str]:
    """Falls back to the newest whole checkpoint of the folder if ``last`` dangles or is missing."""
    found: set[str] = original(callback, trainer)
    if not (callback.save_last or found) or any(map(os.path.exists, found)):
        return found
    folder = local_path(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))
    if folder is None or not os.path.isdir(folder):
        return found
    files = [p for p in folder.glob(f"*{callback.FILE_EXTENSION}") if os.path.isfile(p) and not os.path.islink(p)]
    newest = next(filter(_is_whole, sorted(files, key=os.path.getmtime, reverse=True)), None)
    if newest is None:
        return found
    rank_zero_warn(f"{folder} has no checkpoint {callback.CHECKPOINT_NAME_LAST!r}: its newest, {newest.name}, is taken")
    return {str(newest)}


def _is_whole(path: Path) -> bool:
    """Whether training can go on from a file: every checksum matches, and it holds the optimizers."""
    try:
        checkpoint = lazyckpt.load(path, "cpu", weights_only=True)
        return isinstance(checkpoint, dict) and "optimizer_states" in checkpoint
    except lazyckpt.UnsupportedFormatError:  # the checksums match, but a type is not allowed: fit() may allow it
        return zipfile.is_zipfile(path)
    except lazyckpt.LoadError as error:
        rank_zero_warn(f"{path} is passed over: {error}")
        return False


_link_at_once = ModelCheckpoint._link_checkpoint


def _link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
    io = _lazy_io(trainer)
    if io is None:
        _link_at_once(trainer, filepath, linkpath)
        return
    if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
        io.link(filepath, linkpath)
    trainer.strategy.barrier()


ModelCheckpoint._link_checkpoint = staticmethod(_link_checkpoint)

_file_exists_now = ModelCheckpoint.file_exists


def _file_exists(self: ModelCheckpoint, filepath: str, trainer: Trainer) -> bool:
    io = _lazy_io(trainer)
    if io is None:
        return bool(_file_exists_now(self, filepath, trainer))
    exists = trainer.is_global_zero and io.exists(filepath)
    return bool(trainer.strategy.reduce_boolean_decision(exists, all=False))


ModelCheckpoint.file_exists = _file_exists
