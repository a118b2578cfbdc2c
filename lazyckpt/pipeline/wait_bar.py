"""A progress bar for people who wait for a checkpoint at a terminal or in a notebook."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from lazyckpt import waits


class WaitBar:
    """Shows how far a save is once the wait takes long. ``show`` draws it, on the main thread, at a terminal or in a
    notebook; elsewhere it does nothing. The bar disappears when the wait is over."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._bar: Any = None  # rich.progress.Progress
        self._task: Any = None

    def __enter__(self) -> WaitBar:
        return self

    def show(self, what: str, progress: Callable[[], float]) -> None:
        """``progress`` goes from 0 to 1."""
        if self._bar is None:
            if time.monotonic() < self._begin + waits.PROGRESS_BAR_AFTER_S or not _is_watched():
                return
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

            columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(what, total=1.0)
        self._bar.update(self._task, description=what, completed=progress())

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _is_watched() -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False
    return "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
