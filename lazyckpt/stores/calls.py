"""Calls that may hang, since another machine answers them: Ctrl-C ends the wait for them, so does a CancelScope, and so
does the end of the process.

Python acts on a signal only between two instructions of its main thread, and the libraries wait inside one. So threads
of ours make these calls, and the main thread waits for them. They are daemon threads: those of a ThreadPoolExecutor
would hold up Ctrl-C and the end until the last answer.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from typing import Any, TypeVar

from lazyckpt import waits

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class CancelScope:
    """What another thread does for this one. An exception that leaves the scope cancels it: the calls of the other
    thread then raise CancelledError at once."""

    _entered = threading.local()

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._cancelled = False
        self._cancels: list[Callable[[], None]] = []

    def __enter__(self) -> CancelScope:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._cancel()

    def run(self, work: Callable[..., Answer], *args: Any) -> Answer:
        """Works in the scope; called on the other thread."""
        self._entered.scope = self
        try:
            return work(*args)
        finally:
            self._entered.scope = None

    @classmethod
    def current(cls) -> CancelScope | None:
        """The one that this thread works in."""
        return getattr(cls._entered, "scope", None)

    def _cancel(self) -> None:
        with self._changed:
            self._cancelled = True
            cancels = list(self._cancels)
            self._changed.notify_all()
        for cancel in cancels:
            cancel()

    def result(self, future: Future[Answer]) -> Answer:
        """Returns the result when there is one."""
        future.add_done_callback(self._notify)
        with self._changed:
            self._changed.wait_for(lambda: future.done() or self._cancelled)
        if not future.done():
            raise CancelledError
        return future.result()

    def _notify(self, _: Future[Any]) -> None:
        with self._changed:
            self._changed.notify_all()

    @contextlib.contextmanager
    def ending(self, cancel: Callable[[], None]) -> Iterator[None]:
        """``cancel`` ends a call that is made inside."""
        with self._changed:
            if self._cancelled:
                raise CancelledError
            self._cancels.append(cancel)
        try:
            yield
        finally:
            with self._changed:
                self._cancels.remove(cancel)


def begun(call: Callable[[], Answer]) -> Future[Answer]:
    """Makes the call on a thread of its own; here, if the interpreter is ending and starts no more threads."""
    future: Future[Answer] = Future()
    future.set_running_or_notify_cancel()
    _on_thread(partial(_settle, future, call))
    return future


def interruptible(call: Callable[[], Answer]) -> Answer:
    """Returns what the call returns. On the main thread, Ctrl-C ends the wait, and in a CancelScope its end does; the
    call itself may go on."""
    is_main = threading.get_ident() == threading.main_thread().ident  # current_thread() would note the engine's threads
    return _result(begun(call)) if is_main or CancelScope.current() else call()


def awaited(future: Future[Answer]) -> Future[Answer]:
    """Waits until a call has ended. In turns: a signal that comes just before a wait does not end that wait."""
    while wait([future], waits.HANDLE_LOOK_S).not_done:
        pass
    return future


def _result(future: Future[Answer]) -> Answer:
    scope = CancelScope.current()
    return awaited(future).result() if scope is None else scope.result(future)


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
        return [_result(future) for _, future in todo]
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
