"""Notices code that interrupts ``save()`` on its own thread, such as a signal handler, while the state is collected.

The engine takes the bytes of tensors at one moment, in one call. ``save()`` has pickled everything else before that. So
code that runs in between, and writes, may leave a number in the pickle that is older than the tensors.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from array import array
from itertools import chain
from types import TracebackType

import torch

from lazyckpt.capture.versions import versions_of

_DEFAULTS = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler, None)


class Instant:
    """A context, from the first look at the state until its bytes are copied or guarded. Belongs to its thread."""

    def __init__(self) -> None:
        self._tensors: list[list[torch.Tensor]] = []  # of each file
        self._versions: list[array[int]] = []
        self._listens = False  # to signals
        self._hears_all = False  # other code listens, so any signal may have come
        self._pipe = _pipe

    def __enter__(self) -> Instant:
        if threading.current_thread() is threading.main_thread():  # where handlers run
            self._pipe.empty()
            before = signal.set_wakeup_fd(self._pipe.end, warn_on_full_buffer=False)
            self._listens = before in (-1, self._pipe.end)
            if not self._listens:  # an event loop
                signal.set_wakeup_fd(before)
                self._hears_all = any(signal.getsignal(s) not in _DEFAULTS for s in signal.valid_signals())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._listens:
            self._listens = False
            if (now := signal.set_wakeup_fd(-1)) not in (-1, self._pipe.end):
                signal.set_wakeup_fd(now)  # code inside save() has set it, and keeps it

    def collected(self, tensors: list[list[torch.Tensor]]) -> None:
        """Notes the tensors of the state, of each file, once only the engine needs to read them."""
        self._tensors, self._versions = tensors, list(map(versions_of, tensors))

    def moved(self) -> list[torch.Tensor]:
        """The tensors that were written to since ``collected``, as far as their versions tell."""
        now = list(map(versions_of, self._tensors))
        if now == self._versions:
            return []
        columns = zip(chain(*self._tensors), chain(*self._versions), chain(*now), strict=True)
        return [tensor for tensor, before, version in columns if version != before]

    def forget(self) -> None:
        """Drops the references to the noted tensors."""
        self._tensors, self._versions = [], []

    def was_interrupted(self) -> bool:
        """Whether the handler of a signal may have run since the context began."""
        return self._hears_all or self._pipe.empty()


class _Pipe:
    """The pipe to which the interpreter writes the number of each signal that has a handler in Python."""

    def __init__(self) -> None:
        self._begin, self.end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def empty(self) -> bool:
        """Empties it; returns whether it held anything."""
        with contextlib.suppress(BlockingIOError):
            return bool(os.read(self._begin, 1 << 16))
        return False


_pipe = _Pipe()


def _renew() -> None:
    """Gives a forked child a pipe of its own."""
    global _pipe
    _pipe = _Pipe()


os.register_at_fork(after_in_child=_renew)
