"""Finds the committed checkpoints of a folder, and orders them by sequence.

The newest checkpoint has the highest sequence, not the highest step: after a rollback from step 200 to step 100 and
twenty steps of training, step 120 is the newest. Before it is saved, step 100 is the newest if ``rollback`` chose it.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from lazyckpt import waits
from lazyckpt.errors import LoadError, ReadError, load_error
from lazyckpt.storage import rollback
from lazyckpt.storage.manifest import Checkpoint, is_folder_name, read_checkpoint
from lazyckpt.stores.store import AnyPath
from lazyckpt.warn import warn, warn_in_background

SCANS = 10  # at most, while another process removes checkpoints that were just listed
P = ParamSpec("P")
Read = TypeVar("Read")


class Catalog:
    """The checkpoints of one folder. Each ``scan`` reads the folder again."""

    def __init__(self, root: Path, *, missing_ok: bool = False) -> None:
        """``missing_ok``: a folder that is missing is empty."""
        self.root = root
        self._missing_ok = missing_ok
        self.broken: list[LoadError] = []  # checkpoints that the last scan could not read
        self.unread: list[LoadError] = []  # mirrors that the last scan could not read
        self.damaged: set[tuple[int, int]] = set()  # step and sequence of those whose files restore() found damaged
        self._sequences: dict[tuple[str, int], int] = {}  # by name and inode: nothing is written into a final name

    def scan(self) -> list[Checkpoint]:
        """Returns all committed checkpoints, newest first: the one that a rollback chose and those before it precede
        those that it gave up. Raises LoadError if the folder itself cannot be read."""
        for _ in range(SCANS):
            found = self._read_all()
            if all(isinstance(error, ReadError) or os.path.lexists(error.path) for error in self.broken):
                break  # otherwise another process removes checkpoints while we read, and may have committed one since
        if not found:
            return []  # without the note: its error would hide those of the checkpoints
        chosen = self._chosen_by_rollback(max(c.sequence for c in found))
        return sorted(found, key=lambda c: (c.sequence <= chosen, c.sequence), reverse=True)

    def folder_of(self, step: int) -> AnyPath | None:
        """The folder of this step elsewhere than in the folder of the run."""
        return None

    def holds_any(self) -> bool:
        """Whether the folder holds a checkpoint, even a broken one. Raises ReadError if it cannot be read."""
        try:
            return bool(self.scan() or self.broken)
        except ReadError:
            raise
        except LoadError:
            return False  # there is no such folder

    def _chosen_by_rollback(self, newest: int) -> int:
        """The sequence of the checkpoint to continue from; ``newest`` unless a rollback chose another."""
        note = self._note(warn)
        return newest if note is None or newest > note.newest else note.sequence

    def _note(self, warn: Callable[[str], None]) -> rollback.Note | None:
        try:
            return rollback.read(self.root)
        except ReadError:
            raise
        except LoadError as error:
            warn(f"{error}; restore() takes the checkpoint that was saved last")
            return None

    def given_up(self) -> int:
        """The highest sequence when a rollback was noted, 0 if there is no note. The next checkpoint is numbered above
        it, also if those that the rollback gave up were removed: the note must not hide it. Raises ReadError."""
        note = self._note(warn_in_background)
        return 0 if note is None else note.newest

    def _read_all(self) -> list[Checkpoint]:
        found = []
        self.broken = []
        try:
            entries = list(os.scandir(self.root))
        except OSError as error:
            if self._missing_ok and isinstance(error, FileNotFoundError):
                return []
            raise load_error("cannot be read", error, path=self.root) from error
        for entry in entries:
            try:
                if not is_folder_name(entry.name) or not entry.is_dir():
                    continue
                if entry.is_symlink():
                    raise LoadError("a symbolic link, which is not followed; restore(path=…) does", path=entry.path)
                found.append(self._read(Path(entry.path)))
                self._sequences[entry.name, entry.inode()] = found[-1].sequence
            except LoadError as error:
                self.broken.append(error)
            except OSError as error:
                self.broken.append(load_error("cannot be read", error, path=entry.path))
        return found

    def _read(self, checkpoint: Path) -> Checkpoint:
        return read_checkpoint(checkpoint)

    def last_sequence(self) -> int:
        """Returns the highest sequence of a committed checkpoint, 0 if there is none.

        Reads only manifests that neither the last call nor ``scan`` has read, since every save asks. A damaged one
        counts as 0: nothing restores it. Raises LoadError if the folder cannot be read, and ReadError if a manifest
        cannot, since its sequence may be the highest."""
        found = {}
        try:
            entries = [e for e in os.scandir(self.root) if is_folder_name(e.name)]
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    continue
                key = entry.name, entry.inode()
                found[key] = self._sequences[key] if key in self._sequences else _sequence_of(Path(entry.path))
        except OSError as error:
            raise load_error("cannot be read", error, path=self.root) from error
        self._sequences = found
        return max(found.values(), default=0)


def _sequence_of(checkpoint: Path) -> int:
    try:
        return read_checkpoint(checkpoint).sequence
    except ReadError as error:
        what = f"{error.what}; it may be the newest checkpoint, so none can follow it. If it is lost, move it away"
        raise ReadError(what, path=error.path, errno=error.errno) from error
    except LoadError:
        return 0


def patiently(read: Callable[P, Read], warn: Callable[[str], None] = warn) -> Callable[P, Read]:
    """Returns ``read`` as a function that tries again after each ReadError for three seconds, and then raises it. Warns
    of each retry.

    A file that the operating system cannot read just now is not damaged."""

    @functools.wraps(read)
    def patient(*args: P.args, **kwargs: P.kwargs) -> Read:
        for pause_s in waits.READ_RETRIES_S:
            try:
                return read(*args, **kwargs)
            except ReadError as error:
                warn(f"tried again: {error}")
                time.sleep(pause_s)
        return read(*args, **kwargs)

    return patient
