"""When a checkpoint is in all the mirrors that take it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from lazyckpt.errors import MirrorError


class Arrivals:
    """Of one checkpoint. Its handle holds this, and the mirrors fill it when the checkpoint is committed."""

    def __init__(self) -> None:
        self.futures: Sequence[Future[None]] = ()  # one for each mirror that takes it
        self.refused: MirrorError | None = None  # why this process cannot tell


def everywhere(committed: Future[Path], arrivals: Arrivals | None) -> Future[Path]:
    """Done when a checkpoint is committed and in all mirrors that take it. Fails as the first of these fails."""
    whole: Future[Path] = Future()
    whole.set_running_or_notify_cancel()
    lock = threading.Lock()

    def begin(_: Future[Path]) -> None:
        if (error := Future.exception(committed)) is not None:
            whole.set_exception(error)
        elif arrivals is not None and arrivals.refused is not None:
            whole.set_exception(arrivals.refused)
        elif arrivals is None or not arrivals.futures:
            whole.set_result(Future.result(committed))
        else:
            left = len(futures := arrivals.futures)

            def one(_: Future[None]) -> None:
                nonlocal left
                with lock:
                    left -= 1
                    last = left == 0
                if last:
                    settle(futures)

            for future in futures:
                future.add_done_callback(one)

    def settle(futures: Sequence[Future[None]]) -> None:
        if (failed := next((error for future in futures if (error := future.exception())), None)) is not None:
            whole.set_exception(failed)
        else:
            whole.set_result(Future.result(committed))

    committed.add_done_callback(begin)
    return whole
