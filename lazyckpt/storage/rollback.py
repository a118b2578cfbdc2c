"""The note of a rollback: which checkpoint ``restore()`` takes although there are newer ones.

The note holds until a checkpoint is committed after it. docs/format.md describes the file.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import NamedTuple

from lazyckpt.errors import CorruptFileError, LoadError
from lazyckpt.formats.reader import FileReader, unique_keys
from lazyckpt.storage import commit, folders
from lazyckpt.storage.manifest import Checkpoint, checksum, is_missing

NOTE = "rollback.json"
_MAX_BYTES = 4096


def note(run: Path, target: Checkpoint, newest: int) -> None:
    """Makes ``target`` the checkpoint to continue from; durable when this returns. ``newest`` is the highest sequence
    in the folder. Raises OSError."""
    told = {"format": 1, "step": target.step, "sequence": target.sequence, "newest": newest}
    staging = commit.FileStaging(run / NOTE)
    try:
        with folders.create(staging.path / NOTE) as file:
            json.dump({**told, "crc32": checksum(told)}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        staging.publish()
    except BaseException:
        staging.discard()
        raise


def forget(run: Path) -> None:
    """Removes the note after a later checkpoint. A power cut may bring it back without effect, since later checkpoints
    have a sequence above its ``newest``."""
    with contextlib.suppress(OSError):
        (run / NOTE).unlink()


class Note(NamedTuple):
    sequence: int  # of the checkpoint that the rollback chose
    newest: int  # the highest sequence in the folder then


def read(run: Path) -> Note | None:
    """The note of the last rollback; None if there is none. Raises LoadError if it cannot be read."""
    path = run / NOTE
    if is_missing(path):
        return None
    try:
        with FileReader(path) as file:
            if file.size > _MAX_BYTES:
                raise file.corrupt("too large for the note of a rollback")
            text = file.read(0, file.size)
        told = json.loads(text, object_pairs_hook=unique_keys)
        if told["crc32"] != checksum(told):
            raise CorruptFileError("checksum does not match", path=path)
        return Note(int(told["sequence"]), int(told["newest"]))
    except LoadError:
        if is_missing(path):
            return None  # another process has saved meanwhile
        raise
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise CorruptFileError(f"not the note of a rollback ({type(error).__name__}: {error})", path=path) from error
