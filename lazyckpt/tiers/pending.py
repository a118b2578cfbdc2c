"""A checkpoint on its way to one mirror, and its bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from lazyckpt import _engine, waits
from lazyckpt.errors import CorruptFileError, LazyCkptError, LoadError
from lazyckpt.storage import direct
from lazyckpt.storage.manifest import Checkpoint, FileEntry, is_missing, read_checkpoint
from lazyckpt.tiers.described import Saved
from lazyckpt.tiers.mirror import Mirror

if TYPE_CHECKING:
    from lazyckpt.ranks.board import SharedSave


class Pending:
    """A checkpoint on its way to one mirror."""

    def __init__(self, path: Path, step: int | None, saved: Saved | None, save: SharedSave | None = None) -> None:
        """``saved``: of a trainer's, which has no manifest yet. ``save``: if other ranks upload their files."""
        self.path = path
        self.step = step
        self.saved = saved
        self.save = save
        self.failures = 0
        self.is_leaving = False  # it is to be removed here
        self.sequence: int | None = None  # once the upload has begun
        self.durable_at = time.monotonic()
        self.done: Future[None] = Future()
        self.done.set_running_or_notify_cancel()
        self.nbytes = self.sent = 0


def told(pending: Pending) -> str:
    """What to call it in a message."""
    return f"step {pending.step}" if pending.step is not None else pending.path.name


def gone(pending: Pending) -> str | None:
    """Why a checkpoint cannot be uploaded any more, without anything being wrong: it was removed, or saved again."""
    try:
        if is_missing(pending.path):
            return "was removed before it was uploaded"
        if pending.saved is not None:
            return "was saved again before it was uploaded" if pending.saved.is_replaced() else None
        if pending.sequence is not None and read_checkpoint(pending.path).sequence != pending.sequence:
            return "was saved again before it was uploaded"
    except (LoadError, OSError):
        pass
    return None


def reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) if isinstance(error, LazyCkptError) else f"{type(error).__name__}: {error}"


def parts_of(path: Path, file: FileEntry, *, reuse: bool) -> Iterator[memoryview]:
    """The bytes of a durable file in parts; ``reuse``: each is overwritten by the next one. Raises CorruptFileError,
    instead of the last part, if they are not those that were saved."""
    crc = done = 0
    for part in direct.parts_in(path, file.nbytes, reuse=reuse):
        crc = _engine.crc32(part, crc)
        done += len(part)
        if done == file.nbytes and crc != file.crc32:
            raise CorruptFileError("checksum does not match: it has changed since it was saved", path=path)
        yield part
    if done < file.nbytes:
        raise CorruptFileError("truncated", path=path)


def paced(parts: Iterator[memoryview], mirror: Mirror) -> Iterator[memoryview]:
    """The parts of a file, as fast as the mirror may get them."""
    began, sent = time.monotonic(), 0
    for part in parts:
        yield part
        sent += len(part)
        end = began + sent / mirror.max_bytes_per_s if mirror.max_bytes_per_s is not None else 0.0
        if (left := end - time.monotonic()) > 0:
            waits.pause(left)


def newest_due(found: list[Checkpoint], mirror: Mirror) -> Checkpoint | None:
    """The newest of these checkpoints that goes to the mirror; ``found``: the newest first."""
    return next((checkpoint for checkpoint in found if mirror.takes(checkpoint.step)), None)
