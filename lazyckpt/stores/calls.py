"""Calls that may hang, since another machine answers them: Ctrl-C ends the wait for them, and so does the end of the
process.

Python acts on a signal only between two instructions of its main thread, and the libraries wait inside one. So threads
of ours make these calls, and the main thread waits for them. They are daemon threads: those of a ThreadPoolExecutor
would hold up Ctrl-C and the end until the last answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def begun(call: Callable[[], Answer]) -> Future[Answer]:
    """Makes the call on a thread of its own; here, if the interpreter is ending and starts no more threads."""
    future: Future[Answer] = Future()
    future.set_running_or_notify_cancel()
    _on_thread(partial(_settle, future, call))
    return future


def interruptible(call: Callable[[], Answer]) -> Answer:
    """Returns what the call returns. On the main thread, Ctrl-C ends the wait; the call itself may go on."""
    is_main = threading.get_ident() == threading.main_thread().ident  # current_thread() would note the engine's threads
    return begun(call).result() if is_main else call()


def each(call: Callable[[Item], Answer], items: Iterable[Item], threads: int) -> list[Answer]:
    """Returns what the call returns for each item, on so many threads. Raises the first error, in the order of the
    items, and begins no call after it."""
    todo: list[tuple[Item, Future[Answer]]] = [(item, Future()) for item in items]
    left, lock, over = iter(todo), threading.Lock(), threading.Event()

    def work() -> None:
        while not over.is_set():
            with lock:
                item, future = next(left, (None, None))
            if future is None:
                return
            _settle(future, partial(call, item))  # type: ignore[arg-type]

    for _ in range(min(threads, len(todo))):
        _on_thread(work)
    try:
        return [future.result() for _, future in todo]
    finally:
        over.set()


def _on_thread(work: Callable[[], None]) -> None:
    try:
        threading.Thread(target=work, name="lazyckpt-call", daemon=True).start()
    except RuntimeError:
        work()


def _settle(future: Future[Answer], call: Callable[[], Answer]) -> None:
    try:
        answer = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(answer)
