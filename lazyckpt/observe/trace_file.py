"""Appends Chrome trace events to the file of a timeline.

The file is a JSON array with one event per line. Readers of the format accept a missing end, so they can read the file
of a killed run. Opening the file again appends to it; each writer begins with the event ``process_name``. Each rank of
a job has a file of its own: rank 0 the one that was named, and rank 3 ``runs/a.rank-3.json`` for ``runs/a.json``.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

from lazyckpt import waits
from lazyckpt.errors import ConfigError
from lazyckpt.storage import locks
from lazyckpt.warn import warn_in_background

MAX_BYTES = 256 << 20
"""The largest size of a trace file; recording stops there."""

BEGIN = b'[\n{"ph": "M", "name": "lazyckpt trace", "pid": 0, "args": {"version": 1}}'
SEPARATOR = b",\n"
END = b"\n]\n"
OPENING = "process_name"

TRAINING, SAVES, RING, COPIES, WRITES, COMMITS = 1, 100, 200, 300, 400, 500  # ids of the first track of each kind

_LONGEST_EVENT_BYTES = 1 << 20


def file_of(path: Path, rank: int) -> Path:
    """The file of a rank, for the name that all ranks are given."""
    return path if rank == 0 else path.with_name(f"{path.stem}.rank-{rank}{path.suffix}")


def files_of_ranks(path: Path) -> dict[int, Path]:
    """The existing files of ranks 1 and higher, by rank."""
    named = re.compile(rf"{re.escape(path.stem)}\.rank-([0-9]+){re.escape(path.suffix)}")
    try:
        found = [(named.fullmatch(name), path.with_name(name)) for name in os.listdir(path.parent)]
    except OSError:
        return {}
    return dict(sorted((int(match[1]), file) for match, file in found if match is not None))


class TraceWriter:
    """Writes events. Any thread may call; after the constructor a failure only warns and ends the recording.

    Raises ConfigError if the file cannot be written, is no trace, or has another writer.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._file: BinaryIO | None = _open(self._path)
        self._room = MAX_BYTES - self._file.tell()
        self._epoch = time.time() - time.perf_counter()
        self._flushed = 0.0
        self._pending: deque[dict[str, Any]] = deque()
        self.put("M", OPENING, 0, args={"name": f"lazyckpt {self._pid}"})

    @property
    def inherited(self) -> bool:
        """Whether this is a forked process, whose parent owns the file."""
        return self._pid != os.getpid()

    def span(self, name: str, track: int, begin: float, end: float, **more: Any) -> None:
        """Adds an event with a duration. ``begin`` and ``end`` are ``time.perf_counter()`` seconds."""
        self.put("X", name, track, begin, dur=round((end - begin) * 1e6, 1), **more)

    def put(self, phase: str, name: str, track: int, at: float | None = None, **more: Any) -> None:
        event = {"ph": phase, "name": name, "pid": self._pid, "tid": track, **more}
        if at is not None:
            event["ts"] = round((self._epoch + at) * 1e6, 1)
        self._pending.append(event)

    def flush_if_due(self) -> None:
        if time.perf_counter() - self._flushed >= waits.TRACE_FLUSH_S:
            self.flush()

    def flush(self) -> None:
        with self._lock:
            self._write()

    def close(self) -> None:
        """Writes the remaining events and the end of the array."""
        with self._lock:
            self._write(end=True)

    def _write(self, *, end: bool = False) -> None:
        """Writes all pending events. The caller holds the lock."""
        self._flushed = time.perf_counter()
        events = [self._pending.popleft() for _ in range(len(self._pending))]
        file = self._file
        if file is None or self.inherited:
            return
        text = b"".join(SEPARATOR + json.dumps(event).encode() for event in events)
        try:
            if len(text) > self._room:
                text, end = b"", True
                warn_in_background(f"{self._path} has {MAX_BYTES} bytes; no more is recorded")
            self._room -= len(text)
            file.write(text + (END if end else b""))
        except OSError as error:
            end = True
            warn_in_background(f"{self._path} is not recorded any more: {error.strerror}")
        if end:
            self._file = None
            _flock(file, fcntl.LOCK_UN)  # for forked processes, too, which share it
            file.close()


def _open(path: Path) -> BinaryIO:
    """Opens and locks the file, and drops its end and an event that a killed writer left torn."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab+", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"trace={str(path)!r}: {error.strerror}") from error
    try:
        _flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = os.fstat(file.fileno()).st_size
        file.seek(0)
        if not size:
            file.write(BEGIN)
        elif file.read(len(BEGIN)) == BEGIN:
            file.truncate(_end_of_events(file, size))
        else:
            raise ConfigError(f"trace={str(path)!r}: the file exists and is no trace of lazyckpt; use another name")
        file.seek(0, os.SEEK_END)
        return file
    except (OSError, ConfigError) as error:
        file.close()
        if isinstance(error, ConfigError):
            raise
        busy = "another Checkpointer writes to it; use another name"
        what = busy if isinstance(error, BlockingIOError) else error.strerror
        raise ConfigError(f"trace={str(path)!r}: {what}") from error


def _flock(file: BinaryIO, operation: int) -> None:
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in locks.NO_LOCKS:
            raise


def _end_of_events(file: BinaryIO, size: int) -> int:
    """Returns where the last whole event ends; its writer may have been killed in the middle of the next."""
    begin = max(size - _LONGEST_EVENT_BYTES, 0)
    file.seek(begin)
    tail = file.read()
    if tail.endswith(END):
        return size - len(END)
    last = tail.rfind(SEPARATOR)
    try:
        json.loads(tail[last + 2 :])
        return size
    except ValueError:
        return begin + max(last, 0)
