"""Futures, and threads that do what is to be done in the background: nothing is lost where there is no memory.

A ThreadPoolExecutor may drop the task that it has taken then, and concurrent.futures.wait() keeps the locks of what it
waits for.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, TypeVar

NO_MEMORY = (MemoryError, RuntimeError, TypeError, SystemError)  # what CPython and pybind11 say where there is none
_NO_MEMORY_S = 0.02  # until it is asked for again
_BORN_S = 10.0  # a thread that has not begun by then never will
_DOUBTS = 250  # times that it may be another reason; to count further takes memory
T = TypeVar("T")


def lacks_memory(error: Exception, doubts: int) -> bool:
    """Whether to try again; a moment has passed then. A lack of memory ends some time; what CPython and pybind11 say
    beside MemoryError might be a mistake, and nobody is to wait for ever."""
    again = isinstance(error, MemoryError) or (isinstance(error, NO_MEMORY) and doubts < _DOUBTS)
    if again:
        time.sleep(_NO_MEMORY_S)
    return again


class Condition(threading.Condition):
    """Lets go of its lock although there is no memory. ``__exit__`` of threading's own is Python, which needs some to
    be called; this one is the lock's, as ``__enter__`` is, and so Ctrl-C does not come in between either."""

    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))


class LastingFuture(Future[T]):
    """Becomes done although there is no memory, at the latest when there is some again."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()
        self.set_running_or_notify_cancel()  # on its way from the start: cancel() is too late

    def _settle(self, result: T, error: BaseException | None = None) -> None:
        """Done. To be called again if there was no memory: who waits is woken once more."""
        if self.done():
            with self._condition:
                self._condition.notify_all()
                for waiter in self._waiters:  # in concurrent.futures.wait()
                    waiter.event.set()
        elif error is None:
            self.set_result(result)
        else:
            self.set_exception(error)


class Task(LastingFuture[None]):
    """Something for a thread of the background to do. If it raises MemoryError, it is called again."""

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__()
        self.run = run


class _Born(threading.Event):
    """Set by a thread when it begins. Where there is no memory it may end before that, and ``start()`` of threading's
    own waits for ever."""

    def wait(self, timeout: float | None = None) -> bool:
        """Raises RuntimeError, as ``start()`` does where the system refuses a thread."""
        if not super().wait(_BORN_S if timeout is None else timeout):
            raise RuntimeError("can't start new thread: there is no memory for it")
        return True


class Workers:
    """Threads that take tasks in the order in which they are put; all are started now, so that no task waits for one.

    Raises RuntimeError if the system refuses a thread."""

    def __init__(self, count: int, name: str) -> None:
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        threads: list[threading.Thread] = []
        self.stop = weakref.finalize(self, _end, self._queue, threads)
        """Returns when all that was put is done. Called at exit, too, and when nobody can put anything any more."""
        try:
            for number in range(count):
                # Daemons, since the interpreter would wait for others before it calls _end().
                thread = threading.Thread(target=_work, args=(self._queue,), name=f"{name}_{number}", daemon=True)
                thread._started = _Born()  # type: ignore[attr-defined]
                thread.start()
                threads.append(thread)
        except RuntimeError:
            self._queue.put(None)  # for one that begins after all
            self.stop()
            raise

    def put(self, task: Task) -> None:
        self._queue.put(task)


def _work(queue: SimpleQueue[Task | None]) -> None:
    """One of the threads. A get() that raises has taken nothing."""
    task: Task | None = None
    error: BaseException | None = None
    while True:
        try:
            if task is None and (task := queue.get()) is None:
                return
            if error is None:
                task.run()
            task._settle(None, error)
            task.run = _nothing  # who keeps the task keeps none of what it held
            task = error = None
        except MemoryError:
            time.sleep(_NO_MEMORY_S)
        except BaseException as raised:  # which nobody expects here
            error = raised


def _nothing() -> None:
    pass


def _end(queue: SimpleQueue[Task | None], threads: list[threading.Thread]) -> None:
    """Returns when all that is in the queue is done."""
    for _ in threads:
        queue.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # on which the Workers were dropped
            thread.join()


def wait_for(handles: Iterable[Future[Any]], timeout: float | None = None) -> None:
    """Returns when they are done, or after so many seconds."""
    end = None if timeout is None else time.monotonic() + timeout
    for handle in handles:
        with contextlib.suppress(concurrent.futures.TimeoutError):
            Future.exception(handle, None if end is None else max(0.0, end - time.monotonic()))
