"""When a checkpoint is everywhere."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lazyckpt.tiers.mirrors import Mirrors


def arrival(committed: Future[Path], mirrors: Mirrors | None, path: Path) -> Future[Path]:
    """Done when a checkpoint is committed and in all mirrors that take it. Fails as the first of these fails."""
    whole: Future[Path] = Future()
    whole.set_running_or_notify_cancel()

    lock = threading.Lock()

    def settle(futures: list[Future[None]]) -> None:
        if (failed := next((error for future in futures if (error := future.exception())), None)) is not None:
            whole.set_exception(failed)
        else:
            whole.set_result(path)

    def begin(_: Future[Path]) -> None:
        if (error := Future.exception(committed)) is not None:
            return whole.set_exception(error)
        futures = [] if mirrors is None else mirrors.arrivals(path)
        left = len(futures)
        if not futures:
            return whole.set_result(path)

        def one(_: Future[None]) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                settle(futures)

        for future in futures:
            future.add_done_callback(one)

    committed.add_done_callback(begin)
    return whole
