"""Background threads that run tasks in the order in which they were put."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from operator import attrgetter
from queue import SimpleQueue

from lazyckpt import private_names

private_names.check("python")


class Condition(threading.Condition):
    """A condition whose lock Ctrl-C cannot leave locked.

    ``with`` calls the methods of the lock, which are written in C. Those of threading's own class are Python functions,
    and a signal handler may raise as they begin or end."""

    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))


class Task(Future[None]):
    """A function for a background thread. The future is done when the function has returned or raised."""

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__()
        self._condition = Condition()
        self.run: Callable[[], None] | None = run

    def do(self) -> None:
        """Calls the function. The thread survives an exception, which goes to ``threading.excepthook``."""
        try:
            assert self.run is not None
            self.run()
        except BaseException:
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        finally:
            self.run = None  # a task that is kept must hold nothing alive
            self.set_result(None)


class Workers:
    """Daemon threads that share one queue. All start at once, so that no save waits for a thread to start.

    They are daemons because the interpreter joins other threads before it runs exit handlers; ``stop`` is one.
    Raises RuntimeError if the system refuses a thread."""

    def __init__(self, count: int, name: str) -> None:
        queue: SimpleQueue[Task | None] = SimpleQueue()
        threads: list[threading.Thread] = []
        self.put = queue.put
        self.stop = weakref.finalize(self, _stop, queue, threads)
        """Finishes all tasks, then joins the threads. Also runs at exit, and when this object is garbage."""
        try:
            for number in range(count):
                thread = threading.Thread(target=_work, args=(queue,), name=f"{name}_{number}", daemon=True)
                thread.start()
                threads.append(thread)
        except RuntimeError:
            self.stop()
            raise


def _work(queue: SimpleQueue[Task | None]) -> None:
    while (task := queue.get()) is not None:
        task.do()
        del task  # or the thread would hold it while it waits for the next one


def _stop(queue: SimpleQueue[Task | None], threads: list[threading.Thread]) -> None:
    for _ in threads:
        queue.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # which dropped the last reference to the Workers
            thread.join()
