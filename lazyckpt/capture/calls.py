"""Tells whether a function call is still on the stack of its thread.

A call that raised leaves no other trace than that its frame is gone.
"""

from __future__ import annotations

import inspect
import threading
from types import CodeType, FrameType

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Call:
    """A function call, known by its frame. It keeps neither the frame nor its locals alive."""

    __slots__ = ("_code", "frame", "thread")

    def __init__(self, frame: FrameType) -> None:
        self.thread = threading.get_ident()
        self.frame = id(frame)
        self._code: CodeType = frame.f_code

    def under_way(self, stack: FrameType | None) -> bool:
        """Whether the call is on ``stack``, the innermost frame of its thread; also True if that cannot be told."""
        end = stack
        while stack is not None:
            if id(stack) == self.frame and stack.f_code is self._code:
                return True
            end, stack = stack, stack.f_back
        # The other thread runs while this one looks. A generator that was suspended meanwhile has lost its caller.
        return end is not None and bool(end.f_code.co_flags & _SUSPENDABLE)

    @property
    def thread_name(self) -> str:
        names = [thread.name for thread in threading.enumerate() if thread.ident == self.thread]
        return names[0] if names else str(self.thread)
