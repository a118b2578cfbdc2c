"""Lets another thread judge a thread that only waits.

A thread that *stands* writes nothing, so version counters prove something there (verdict.py).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType

import torch

from lazyckpt import waits
from lazyckpt.gate.exclusion import Call

_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_WAITS = frozenset(
    function.__code__.co_filename for function in (threading.Event.wait, Future.exception, contextlib.suppress.__init__)
)


class Standing:
    """The threads that stand. Any thread may call."""

    def __init__(self) -> None:
        self._calls: dict[Call, None] = {}  # a dict, since adding or removing one entry is atomic
        self._judged: list[int] = []  # threads that must not leave their wait just now
        self._operating: list[int] = []  # threads that wait inside an operation, and do not stand

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """The calling thread only waits inside this context. Inside an operation it does not stand."""
        frame = sys._getframe(2)  # behind that of contextlib
        if inside_operation():
            self._operating.append(threading.get_ident())
            try:
                yield
            finally:
                self._operating.remove(threading.get_ident())
            return
        call = Call(frame)
        self._calls[call] = None
        try:
            yield
        finally:
            self._calls.pop(call, None)
            # No lock: a signal handler may come here, too, and wait for the thread that judges.
            while call.thread in self._judged:
                time.sleep(waits.STANDING_LOOK_S)

    def judge(self, thread: int | None, act: Callable[[], None]) -> None:
        """Calls ``act`` if this thread stands; it does not go on meanwhile."""
        if thread is None:
            return
        self._judged.append(thread)
        try:
            stack = sys._current_frames().get(thread)
            mine = [call for call in list(self._calls) if call.thread == thread]
            for call in mine:
                if not call.under_way(stack):  # Ctrl-C came before it could say that it is over
                    self._calls.pop(call, None)
            if any(_only_waits(stack, call) for call in mine):
                act()
        finally:
            self._judged.remove(thread)

    def waits_for_future(self, thread: int | None) -> tuple[FrameType, int] | None:
        """Where a thread waits for a future that is not ours, or for an event; None if it does not.

        As long as the answer stays the same, the thread writes nothing."""
        frame = None if thread is None else sys._current_frames().get(thread)
        if frame is None or frame.f_code is not threading.Condition.wait.__code__ or frame.f_back is None:
            return None
        if frame.f_back.f_code not in _OF_FUTURES or _runs_dispatch(frame) or thread in self._operating:
            return None
        return frame, frame.f_lasti


def inside_operation() -> bool:
    """Whether the calling thread is in the middle of an operation of torch: it runs code of a dispatch mode, of a
    subclass, or of a kernel in Python. The operation may have written, and moves the version later."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(_MOVES_VERSIONS) or _runs_dispatch(sys._getframe(1))


def _runs_dispatch(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back
    return frame is not None


_MOVES_VERSIONS = torch._C.DispatchKey.ADInplaceOrView
_OF_FUTURES = (Future.result.__code__, Future.exception.__code__, threading.Event.wait.__code__)


def _only_waits(stack: FrameType | None, call: Call) -> bool:
    """Whether a thread with this stack runs nothing but waiting code inside ``call``: a user's signal handler may
    write."""
    while stack is not None and (stack.f_code.co_filename in _WAITS or stack.f_code.co_filename.startswith(_PACKAGE)):
        if id(stack) == call.frame:
            return call.under_way(stack)
        stack = stack.f_back
    return False
