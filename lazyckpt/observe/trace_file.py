"""The file of a timeline: Chrome trace events, appended by any thread.

It is a JSON array with one event per line, and readers of that format do without its end: what a killed run leaves can
be read. Whoever opens the file again adds to it; the first event of each is ``process_name``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
import warnings
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

from lazyckpt.errors import ConfigError
from lazyckpt.storage import commit

MAX_BYTES = 256 << 20
"""Of a trace file; what comes after that is not recorded."""

BEGIN = b'[\n{"ph": "M", "name": "lazyckpt trace", "pid": 0, "args": {"version": 1}}'
SEPARATOR = b",\n"
END = b"\n]\n"
OPENING = "process_name"

TRAINING, SAVES, RING, COPIES, WRITES, COMMITS = 1, 100, 200, 300, 400, 500  # ids of the first track of each kind

_FLUSH_S = 1.0  # so old may be what a killed run has not written yet
_LONGEST_EVENT_BYTES = 1 << 20


class TraceWriter:
    """Any thread may call; nothing but the opening fails.

    ConfigError if the file cannot be written to, is no trace, or is being written to by somebody else.
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
        """Whether this is a forked process: the file is its parent's."""
        return self._pid != os.getpid()

    def span(self, name: str, track: int, begin: float, end: float, args: dict[str, Any] | None = None) -> None:
        """Something that took a while; ``begin`` and ``end`` as ``time.perf_counter()`` tells them."""
        self.put("X", name, track, begin, dur=end - begin, args=args)

    def put(
        self,
        phase: str,
        name: str,
        track: int,
        at: float = 0.0,
        *,
        dur: float = 0.0,
        args: dict[str, Any] | None = None,
    ) -> None:
        event: dict[str, Any] = {"ph": phase, "name": name, "pid": self._pid, "tid": track}
        if phase != "M":
            event["ts"] = round((self._epoch + at) * 1e6, 1)
        if phase == "X":
            event["dur"] = round(dur * 1e6, 1)
        if args:
            event["args"] = args
        self._pending.append(event)

    def flush_if_due(self) -> None:
        if time.perf_counter() - self._flushed >= _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        with self._lock:
            self._write()

    def close(self) -> None:
        """Writes what is left, and the end of the array."""
        with self._lock:
            self._write(end=True)

    def _write(self, *, end: bool = False) -> None:
        """Called with the lock held."""
        self._flushed = time.perf_counter()
        events = [self._pending.popleft() for _ in range(len(self._pending))]
        file = self._file
        if file is None or self.inherited:
            return
        text = b"".join(SEPARATOR + json.dumps(event).encode() for event in events)
        try:
            if len(text) > self._room:
                text, end = b"", True
                _warn(f"{self._path} has {MAX_BYTES} bytes; no more is recorded")
            self._room -= len(text)
            file.write(text + (END if end else b""))
        except OSError as error:
            end = True
            _warn(f"{self._path} is not recorded any more: {error.strerror}")
        if end:
            self._file = None
            _flock(file, fcntl.LOCK_UN)  # also of what forked processes inherited
            file.close()


def _warn(message: str) -> None:
    with contextlib.suppress(Warning):
        warnings.warn(message, stacklevel=2)


def _open(path: Path) -> BinaryIO:
    """Ready for what follows the events in it, of which the last may be torn."""
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
            raise ConfigError(f"trace={str(path)!r}: the file is there, and is no trace of lazyckpt")
        file.seek(0, os.SEEK_END)
        return file
    except BlockingIOError as error:
        file.close()
        raise ConfigError(f"trace={str(path)!r}: another Checkpointer is writing to it") from error
    except OSError as error:
        file.close()
        raise ConfigError(f"trace={str(path)!r}: {error.strerror}") from error
    except BaseException:
        file.close()
        raise


def _flock(file: BinaryIO, operation: int) -> None:
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in commit.NO_LOCKS:
            raise


def _end_of_events(file: BinaryIO, size: int) -> int:
    """Where the last whole event ends: the process that wrote it may have been killed."""
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
