"""Keeps ModelCheckpoint's files in order while saves are pending: ``last``, links, and removals.

This wraps methods of the class. Hooks do not suffice: Lightning looks for the last checkpoint before it calls any hook,
and saves on an exception after our callback has ended the run.
"""

from __future__ import annotations

import os
import weakref
import zipfile
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

import lazyckpt
from lazyckpt.integrations import wrap
from lazyckpt.integrations.lightning_mirrors import pull_newest

META = "meta.pt"  # the rest of a sharded checkpoint, beside the state of model and optimizers
_LATEST = "latest"  # DeepSpeed's, which it writes last


def is_sharded(path: Path) -> bool:
    """Whether a folder is a sharded checkpoint. Lightning writes META last, lazyckpt all of it at once."""
    return (path / META).is_file() or (path / _LATEST).is_file()


def local_path(path: str | Path) -> Path | None:
    """Returns an absolute path, or None if ``path`` is not on a local file system."""
    fs, name = url_to_fs(str(path))
    return Path(name) if isinstance(fs, LocalFileSystem) else None


_superseded: weakref.WeakKeyDictionary[ModelCheckpoint, list[str]] = weakref.WeakKeyDictionary()


def _remove_behind_last(io: Any, original: Any, callback: ModelCheckpoint, trainer: Trainer, filepath: str) -> None:
    """ModelCheckpoint removes a file before it saves or links ``last``, which may still need that file."""
    if callback.save_last:
        _superseded.setdefault(callback, []).append(filepath)
    else:
        original(trainer, filepath)


def _save_last(io: Any, original: Any, callback: ModelCheckpoint, trainer: Trainer, monitor_candidates: Any) -> None:
    """Removes the files that ``_remove_behind_last`` held back, unless the save of ``last`` failed."""
    try:
        original(trainer, monitor_candidates)
    finally:
        io.reports.release()
        superseded = _superseded.pop(callback, [])
    for path in superseded:
        trainer.strategy.remove_checkpoint(path)


# Methods with which a ModelCheckpoint saves and removes. Code that overrides one may read the file right behind it.
_SAVING = (
    *("on_train_batch_end", "on_train_epoch_end", "on_validation_end", "on_train_end", "_save_topk_checkpoint"),
    *("_save_none_monitor_checkpoint", "_save_monitor_checkpoint", "_update_best_and_save", "_save_checkpoint"),
    *("_save_last_checkpoint", "_remove_checkpoint"),
)


def _save_for_readers(io: Any, original: Any, callback: ModelCheckpoint, trainer: Trainer, filepath: str) -> None:
    if getattr(callback, "save_last", None):
        io.reports.hold()  # until _save_last
    original(trainer, filepath)
    if any(getattr(type(callback), name) is not getattr(ModelCheckpoint, name) for name in _SAVING):
        io.wait()


def _find_last(io: Any, original: Any, callback: ModelCheckpoint, trainer: Trainer) -> set[str]:
    """Falls back to the newest whole checkpoint of the folder if ``last`` dangles or is missing, and where no callback
    has one to the newest of the mirrors."""
    found: set[str] = original(trainer)
    if not (callback.save_last or found or io.mirrors) or any(map(os.path.exists, found)):
        return found
    folder = local_path(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))
    if folder is None:
        return found
    if not _holds_any(callback, trainer):
        elsewhere = any(_holds_any(c, trainer) for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint))
        copy = pull_newest(io.mirrors, folder) if io.mirrors and not elsewhere else None
        return found if copy is None else {str(copy)}
    found_there = folder.glob(f"*{callback.FILE_EXTENSION}")
    files = [p for p in found_there if (os.path.isfile(p) or is_sharded(p)) and not os.path.islink(p)]
    newest = next(filter(_is_whole, sorted(files, key=os.path.getmtime, reverse=True)), None)
    if newest is None:
        return found
    rank_zero_warn(f"{folder} has no checkpoint {callback.CHECKPOINT_NAME_LAST!r}: its newest, {newest.name}, is taken")
    return {str(newest)}


def _holds_any(callback: ModelCheckpoint, trainer: Trainer) -> bool:
    """Whether there is a checkpoint in the folder of a callback."""
    folder = local_path(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))
    return folder is not None and os.path.isdir(folder) and any(folder.glob(f"*{callback.FILE_EXTENSION}"))


def _is_whole(path: Path) -> bool:
    """Whether training can resume from a file: every checksum matches, and it holds the optimizers."""
    if is_sharded(path):  # too large to read twice; it appears whole
        return True
    try:
        checkpoint = lazyckpt.load(path, "cpu", weights_only=True)
        return isinstance(checkpoint, dict) and "optimizer_states" in checkpoint
    except lazyckpt.UnsupportedFormatError:  # the checksums match, but a type is not allowed: fit() may allow it
        return zipfile.is_zipfile(path)
    except lazyckpt.LoadError as error:
        rank_zero_warn(f"{path} is passed over: {error}")
        return False


def _file_exists(io: Any, original: Any, callback: ModelCheckpoint, filepath: str | Path, trainer: Trainer) -> bool:
    target = local_path(filepath)
    if target is None:
        return bool(original(filepath, trainer))
    return bool(trainer.strategy.reduce_boolean_decision(trainer.is_global_zero and io.exists(target), all=False))


def install(io_type: type) -> None:
    """Wraps the methods, for Trainers whose CheckpointIO is an ``io_type``."""

    def find(trainer: Trainer) -> Any:
        io = trainer.strategy.checkpoint_io
        return io if isinstance(io, io_type) else None

    def find_among(callback: ModelCheckpoint, *args: Any) -> Any:
        return next((find(arg) for arg in args if isinstance(arg, Trainer)), None)

    link_at_once = ModelCheckpoint._link_checkpoint

    def link(trainer: Trainer, filepath: str, linkpath: str) -> None:
        io = find(trainer)
        if io is None:
            link_at_once(trainer, filepath, linkpath)
            return
        if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
            io.link(filepath, linkpath)
        trainer.strategy.barrier()

    ModelCheckpoint._link_checkpoint = staticmethod(link)
    wrap(ModelCheckpoint, "_save_checkpoint", find_among)(_save_for_readers)
    wrap(ModelCheckpoint, "_remove_checkpoint", find_among)(_remove_behind_last)
    wrap(ModelCheckpoint, "_save_last_checkpoint", find_among)(_save_last)
    wrap(ModelCheckpoint, "_find_last_checkpoints", find_among)(_find_last)
    wrap(ModelCheckpoint, "file_exists", find_among)(_file_exists)
