"""When a checkpoint is in all the mirrors that take it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from lazyckpt.errors import MirrorError


class Arrivals:
    """Of one checkpoint. Its handle holds this, and the mirrors fill it when the checkpoint is committed."""

    def __init__(self) -> None:
        self.futures: Sequence[Future[None]] = ()  # one for each mirror that takes it
        self.refused: MirrorError | None = None  # why this process cannot tell
        self.is_held_back = False  # until ``go`` is called
        self.go: Callable[[], None] = lambda: None
        self._begun: Future[None] = Future()

    def begin(self, futures: Sequence[Future[None]]) -> None:
        """Notes that the checkpoint is on its way. Later calls change nothing."""
        if not self._begun.done():
            self.futures = futures
            self._begun.set_result(None)

    def when_begun(self, then: Callable[[], None]) -> None:
        self._begun.add_done_callback(lambda _: then())

    def when_done(self, then: Callable[[], None]) -> None:
        """Calls ``then`` once every mirror has it, or has failed. Call this once, when it has begun."""
        left = len(self.futures)
        lock = threading.Lock()

        def one(_: Future[None]) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                then()

        for future in self.futures:
            future.add_done_callback(one)
        if not self.futures:
            then()


class _Whole(Future[Path]):
    """Its callbacks run on the thread of an upload, which survives what they raise."""

    def add_done_callback(self, fn: Callable[[Future[Path]], object]) -> None:
        adding = threading.get_ident()

        def guarded(_: Future[Path]) -> None:
            try:
                fn(self)
            except Exception:
                raise  # a Future logs it
            except BaseException:
                if threading.get_ident() == adding:  # it was done before
                    raise
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))

        super().add_done_callback(guarded)


def everywhere(committed: Future[Path], arrivals: Arrivals | None) -> Future[Path]:
    """Done when a checkpoint is committed and in all mirrors that take it. Fails as the first of these fails."""
    whole = _Whole()
    whole.set_running_or_notify_cancel()

    def begin(_: Future[Path]) -> None:
        if (error := Future.exception(committed)) is not None:
            whole.set_exception(error)
        elif arrivals is None:
            whole.set_result(Future.result(committed))
        elif arrivals.refused is not None:
            whole.set_exception(arrivals.refused)
        else:
            arrivals.when_begun(lambda: arrivals.when_done(settle))

    def settle() -> None:
        futures = [] if arrivals is None else arrivals.futures
        if (failed := next((error for future in futures if (error := future.exception())), None)) is not None:
            whole.set_exception(failed)
        else:
            whole.set_result(Future.result(committed))

    committed.add_done_callback(begin)
    return whole
