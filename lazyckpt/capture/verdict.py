"""Decides when version counters prove that a lazy copy is of the moment of ``save()``.

torch moves a version counter after the write, and the write may run without the GIL. So the counters prove something
only at a point of program order: where the thread that called ``save()`` is known to write nothing. Such points are the
gate in front of a step, every call of lazyckpt on this thread, and, on the main thread, the moments between two
bytecodes in which the interpreter runs pending calls. Until then the checkpoint is durable, but not published.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from lazyckpt import _engine, waits


def custom_functions() -> frozenset[int] | None:
    """Returns the ids of the codes that run a custom ``autograd.Function``, whose writes torch counts when it is over.

    From torch 2.15 on ``apply`` has no code in Python: then they are the codes of all such functions. None if one has
    no code.
    """
    function = torch.autograd.Function
    apply = getattr(getattr(function.apply, "__func__", None), "__code__", None)
    if apply is not None:
        return frozenset([id(apply)])
    codes: set[Any] = set()
    kinds: list[type[Any]] = [function.__mro__[1]]  # also of those that torch makes under a transform
    for kind in kinds:  # which grows
        kinds += type.__subclasses__(kind)
        methods = (getattr(kind, name, None) for name in ("forward", "setup_context", "vmap", "jvp"))
        codes.update(getattr(method, "__code__", None) for method in methods if method is not None)
    return None if None in codes else frozenset(map(id, codes))


class Verdict:
    """The verdict on one snapshot, which the thread that called ``save()`` owes. Any thread may call."""

    def __init__(self, owed: int, tensors: list[torch.Tensor]) -> None:
        """``owed``: the owners, as bits, whose storages only the versions of ``tensors`` protect."""
        self.owed = owed
        self.thread = threading.current_thread()  # which owes it
        self.awaited = False  # nothing else is missing
        self._given = threading.Event()
        self._reading = _engine.VersionReading(tensors) if owed and self.thread is threading.main_thread() else None
        asyncio = sys.modules.get("asyncio")
        self._loop: Any = asyncio._get_running_loop() if owed and asyncio is not None else None
        self._pause_s = waits.VERDICT_FIRST_LOOK_S

    def is_owed_by_another(self) -> bool:
        return self.owed != 0 and threading.get_ident() != self.thread.ident

    def give(self, owners: int) -> None:
        """Notes that the storages of these owners were checked."""
        self.owed &= ~owners
        if not self.owed:
            self._given.set()
            self._reading = None

    def ask(self) -> list[int] | None:
        """Waits a moment for the verdict, on a background thread.

        Returns the versions if the main thread owes the verdict and has reached a point of program order since the
        last call."""
        reading = self._reading
        if reading is not None:
            reading.request(custom_functions())
            if self._loop is not None:  # which may sleep in a system call, in a notebook
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(int)  # anything that returns at once
        self._given.wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, waits.VERDICT_LAST_LOOK_S)
        return None if reading is None else reading.versions()

    def is_thread_alive(self) -> bool:
        """Whether the thread that owes the verdict still runs, also if Python did not start it."""
        if not isinstance(self.thread, threading._DummyThread):
            return self.thread.is_alive()
        return Path(f"/proc/self/task/{self.thread.native_id}").exists()
