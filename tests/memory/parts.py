"""Parts of a save with too little memory: ``python parts.py NAME FOLDER``, with scarce.cc preloaded.

Every allocation of the part fails in turn. Prints how many there are; an exit code other than 0 says that something
was lost.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import scarce

from lazyckpt import _engine
from lazyckpt.pipeline.handle import SaveHandle
from lazyckpt.storage import commit


def each(part: Callable[[], Any], *refused: type[Exception], count: int = 1) -> Iterator[int]:
    """Calls ``part`` again and again, with the first, the second, … allocation failing and ``count - 1`` after it,
    until it has no more."""
    refused = (MemoryError, *refused)
    for number in itertools.count(1):
        scarce.arm(number, count)
        try:  # noqa: SIM105  # suppress() needs memory
            part()
        except refused:
            pass
        scarce.stop()
        if scarce.seen() < number:
            return
        yield number


def handle(folder: Path) -> Iterator[int]:
    """Nothing that asks a handle keeps its lock; whatever Python says of its own."""
    asked = SaveHandle(1, folder)
    got: list[bool] = []
    for number in each(lambda: asked.exception(0), concurrent.futures.TimeoutError, RuntimeError, SystemError):
        lock = asked._condition._lock  # type: ignore[attr-defined]
        thread = threading.Thread(target=lambda lock=lock: got.append(lock.acquire(timeout=5) and not lock.release()))
        thread.start()
        thread.join()
        assert got.pop(), f"allocation {number}: the lock is held"
        yield number


def job(folder: Path) -> Iterator[int]:
    """A checkpoint that cannot begin ends no process, nor does one that cannot open its file."""
    engine = _engine.Engine(ring_bytes=1 << 16, chunk_bytes=1 << 12, io_depth=1, copy_threads=1)
    pointers, sizes, owners = (array("Q", [number]) for number in (1, 0, 0))
    yield from each(lambda: engine.begin(pointers, sizes, owners, 1, True, None, None), OSError)
    begun = engine.begin(pointers, sizes, owners, 1)
    yield from each(lambda: begun.open(1, folder / "x", 0), OSError, TypeError, RuntimeError, count=20)


def staging(folder: Path) -> Iterator[int]:
    """A folder that cannot be staged holds no descriptor."""
    open_files = scarce.open_files()
    for number in each(lambda: commit.Staging(folder / "x").discard(), OSError, TypeError):
        assert scarce.open_files() == open_files, f"allocation {number}: left open, of {scarce.open_files()}"
        assert not commit._locks, number
        yield number


if __name__ == "__main__":
    print(len(list({"handle": handle, "job": job, "staging": staging}[sys.argv[1]](Path(sys.argv[2])))))
