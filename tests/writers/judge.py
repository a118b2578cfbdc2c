"""Decides whether a save in the presence of a writer ended in one of the two allowed ways.

A save may commit exactly the state of the moment of ``save()``. Or it may fail with a SaveError that names a tensor
that was written and the call that helps. After a failure the next save commits. Everything else is a ``Violation``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import pytest
import torch

import lazyckpt
from lazyckpt import _engine

ALL_OWNERS = (1 << 64) - 1
CURES = ("guard", "wait_captured")
Outcome = Literal["committed", "named"]
Flat = dict[str, Any]


class Violation(AssertionError):
    """A save ended in a way that is not allowed."""


class Hang(BaseException):
    """A case that took longer than its limit. Not an Exception: nothing may swallow it."""


# States


def flat(state: Any, name: str = "") -> Flat:
    """The leaves of a state by their dotted names, which are those in lazyckpt's messages."""
    if isinstance(state, dict):
        pairs: Iterable[tuple[Any, Any]] = state.items()
    elif isinstance(state, list | tuple):
        pairs = enumerate(state)
    else:
        return {name: state}
    found: Flat = {}
    for key, value in pairs:
        found |= flat(value, f"{name}.{key}" if name else str(key))
    return found


def clone(leaves: Flat) -> Flat:
    """Copies all tensors: the oracle."""
    return {name: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for name, leaf in leaves.items()}


def same(a: Any, b: Any) -> bool:
    """Whether two leaves are equal, bit for bit."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and a == b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def different(found: Flat, expected: Flat) -> list[str]:
    """The names of leaves that differ, are missing, or are too many."""
    names = [name for name in expected if name not in found or not same(found[name], expected[name])]
    return names + [name for name in found if name not in expected]


# Verdicts


def judge(
    handle: lazyckpt.SaveHandle,
    read: Callable[[Any], Flat],
    expected: Flat,
    now: Callable[[], Flat],
    *,
    must_commit: bool = False,
    wrong: Callable[[Flat, Flat], list[str]] = different,
) -> tuple[Outcome, list[str]]:
    """Returns the outcome of a save, and the tensors that its error names. Raises Violation if it is not allowed.

    ``expected`` is the oracle. ``now`` returns the state after the write, ``wrong`` the leaves of a file that are not
    of the instant of ``save()``.
    """
    try:
        path = handle.result(timeout=60)
    except lazyckpt.SaveError as error:
        if must_commit:
            raise Violation(f"the save must commit, but it failed: {error}") from error
        return "named", named_in(error, expected, now())
    except TimeoutError as error:
        raise Violation("the save never ended") from error
    mixed = wrong(read(path), expected)
    if mixed:
        count = f"{len(mixed)} of {len(expected)} leaves"
        raise Violation(f"committed, but {count} are not of the instant of save(): {', '.join(mixed[:5])}")
    return "committed", []


def named_in(error: lazyckpt.SaveError, expected: Flat, now: Flat) -> list[str]:
    """The tensors that an error names. Raises Violation if it names none, one that was not written to, or no cure."""
    text = rest = str(error)
    names = []
    tensors = (name for name, leaf in expected.items() if isinstance(leaf, torch.Tensor))
    for name in sorted(tensors, key=len, reverse=True):  # the name of one may end with the name of another
        rest, found = re.subn(rf"(?<!\w){re.escape(name)}(?!\.?\w)", "", rest)
        if found:
            names.append(name)
    if not names:
        raise Violation(f"the error names no tensor of the state: {text}") from error
    if not any(cure in text for cure in CURES):
        raise Violation(f"the error does not say what helps ({' or '.join(CURES)}): {text}") from error
    for name in names:
        if same(now.get(name), expected[name]):
            raise Violation(f"the error blames {name}, which was not written to: {text}") from error
    return names


# Instants


class Copies:
    """Holds copies back: a job creates its files late, so what does not fit into the ring waits."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._free = threading.Event()
        self._free.set()
        self._timers: list[threading.Timer] = []
        create = _engine.Job.open

        def create_late(job: _engine.Job, *args: Any, **kwargs: Any) -> None:
            self._free.wait(30)
            create(job, *args, **kwargs)

        patch.setattr(_engine.Job, "open", create_late)

    def hold(self, at_most_s: float = 30.0) -> None:
        self.cancel()
        self._free.clear()
        self.release(after_s=at_most_s)

    def release(self, after_s: float = 0.0) -> None:
        if not after_s:
            self._free.set()
            return
        timer = threading.Timer(after_s, self._free.set)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def cancel(self) -> None:
        """Forgets releases that have not happened."""
        for timer in self._timers:
            timer.cancel()
            timer.join()
        self._timers.clear()


def pending(handle: lazyckpt.SaveHandle) -> int:
    """Counts the lazy chunks that are not copied yet."""
    snapshot = handle._snapshot
    return 0 if snapshot is None else snapshot.job.pending_chunks(ALL_OWNERS)


def wait_until(copied: Callable[[], bool], limit_s: float = 5.0) -> None:
    """Spins until ``copied()``, and lets other threads run; a real sleep would miss the instant."""
    end = time.perf_counter() + limit_s
    while not copied() and time.perf_counter() < end:
        time.sleep(0)


# Hangs


@contextlib.contextmanager
def limit(seconds: float, what: object, on_hang: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Raises Hang if the block takes longer, and prints the stacks of all threads.

    If the main thread does not react to the signal, the process ends some seconds later and prints them, too.
    """
    begin = time.monotonic()

    def ring(*_: object) -> None:
        os.write(2, f"\nHANG after {seconds} s: {what}\n".encode())
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=False)  # this one first: of all it prints 100
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        on_hang()
        raise Hang(f"after {seconds} s: {what}")

    handler = signal.signal(signal.SIGALRM, ring)
    remaining, _ = signal.setitimer(signal.ITIMER_REAL, seconds)  # pytest-timeout's
    faulthandler.dump_traceback_later(seconds + 20, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:
            signal.setitimer(signal.ITIMER_REAL, max(remaining - (time.monotonic() - begin), 0.01))
