"""Whether a thread writes nothing just now, so that version counters prove something there (verdict.py)."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future
from types import FrameType

import torch


def waits_for_future(thread: int | None) -> tuple[FrameType, int] | None:
    """Where a thread waits for a future or an event, ours or not; None if it does not.

    As long as the answer stays the same, the thread writes nothing. Our own waits are such waits, and begin only
    outside of operations: a kernel in Python shows on no stack, and may have written."""
    frame = None if thread is None else sys._current_frames().get(thread)
    if frame is None or frame.f_code is not threading.Condition.wait.__code__ or frame.f_back is None:
        return None
    if frame.f_back.f_code not in _OF_FUTURES or _runs_dispatch(frame):
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
