"""Commits pending saves when a signal announces the end of the process."""

from __future__ import annotations

import _thread
import logging
import os
import signal
import sys
import threading
import time
import weakref
from types import FrameType
from typing import Any, NoReturn

from lazyckpt import waits
from lazyckpt.errors import ConfigError
from lazyckpt.pipeline.handle import SaveHandle, error_of, give_up, in_flight, wait_for

_log = logging.getLogger("lazyckpt")
_late: weakref.WeakSet[SaveHandle] = weakref.WeakSet()  # saves that missed a deadline


def _give_up_the_late() -> None:
    for handle in _late:
        give_up(handle, "not committed within the deadline of a signal")


# Called when the main thread has ended, before exit handlers wait for the background threads. Those may wait for a
# stalled disk longer than the sender of the signal waits for this process.
threading._register_atexit(_give_up_the_late)  # type: ignore[attr-defined]


def commit_on(*signals: int, deadline: float = 25.0, mirror_timeout: float = 0.0) -> CommitOnSignal:
    """At these signals, wait until every save is durable, at most ``deadline`` seconds, and until mirrors have what
    they take, at most ``mirror_timeout`` seconds more; then let the signal act.

        lazyckpt.commit_on(signal.SIGTERM)

    The signal then does what it did before: it calls the earlier handler, kills the process, or is ignored. A second
    signal acts at once. Training goes on during the wait. SLURM, Kubernetes and torchrun kill 30 s after SIGTERM by
    default; the default deadline leaves a margin.

    A handler installed later replaces this one. If it calls this one, as Lightning's does, the later handler ends the
    process, and this one only reports; closing a Checkpointer waits for its saves.

    One line in the log ``lazyckpt`` says which saves were committed in time and which were not. ``close()`` of the
    returned object, or the end of its ``with``, restores the earlier handlers.

    Only the main thread may call. Raises ConfigError on other threads, and for a signal that cannot be handled.
    """
    return CommitOnSignal(signals, deadline, mirror_timeout)


class CommitOnSignal:
    """The handlers of ``commit_on``, until they are closed.

    The handler only starts a thread. It runs between two lines of the main thread, which may hold a lock that a
    checkpoint needs, so the main thread must go on until the checkpoint is durable. The thread then sends the signal
    again.
    """

    def __init__(self, signals: tuple[int, ...], deadline: float, mirror_timeout: float = 0.0) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("commit_on: only the main thread may handle signals; call it there")
        if not signals:
            raise ConfigError("commit_on: name a signal, signal.SIGTERM for instance")
        for name, value in (("deadline", deadline), ("mirror_timeout", mirror_timeout)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ConfigError(f"commit_on: {name}={value!r}: expected seconds, at least 0")
        self._deadline = min(float(deadline), threading.TIMEOUT_MAX)
        self._mirror_timeout = min(float(mirror_timeout), threading.TIMEOUT_MAX)
        self._pid = os.getpid()
        self._main = threading.get_ident()
        self._former: dict[int, Any] = {}
        self._committing: set[int] = set()  # signals that arrived once
        self._closed = False
        try:
            for number in signals:
                former = signal.getsignal(number)
                if former is None:
                    raise ValueError("its handler was not installed by Python")
                self._former.setdefault(number, former)
                signal.signal(number, self._handle)
        except (ValueError, OSError, TypeError) as error:
            self.close()
            raise ConfigError(f"commit_on: {number!r} cannot be handled: {error}") from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Bound methods are equal if their objects are the same. In a forked child there is nothing to commit.
        on_top = signal.getsignal(number) == self._handle
        first = number not in self._committing and not self._closed and os.getpid() == self._pid
        if first:
            self._committing.add(number)
            try:  # not threading.Thread: its start() takes locks that the main thread may hold here
                _thread.start_new_thread(self._commit, (number, on_top))
            except RuntimeError:  # no more threads, or the interpreter is shutting down
                first = False
        if first and on_top:
            return
        if on_top:
            self._committing.discard(number)
        former = self._former[number]
        if callable(former):
            former(number, frame)
        elif former == signal.SIG_DFL and on_top:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            signal.signal(number, self._handle)  # a signal that does not end the process

    def _commit(self, number: int, on_top: bool) -> None:
        """Waits for the saves, then sends the signal again; on a thread of its own."""
        handles = in_flight()
        wait_for(handles, self._deadline)
        _late.update(handle for handle in handles if not handle.done())
        try:
            _report(number, handles, self._deadline)
            if self._mirror_timeout and (lacking := _await_mirrors(self._mirror_timeout)):
                _log.warning("not uploaded within %g s: %s", self._mirror_timeout, "; ".join(lacking))
        finally:
            if not on_top:
                self._committing.discard(number)
            else:
                self._send(number)

    def _send(self, number: int) -> None:
        """Sends the signal until the main thread notices it. One that arrives just before the main thread enters a
        system call does not end that call."""
        pause_s = waits.SIGNAL_FIRST_LOOK_S
        while number in self._committing:
            signal.pthread_kill(self._main, number)
            if signal.getsignal(number) != self._handle:
                break  # a later handler has taken over
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, waits.SIGNAL_LAST_LOOK_S)

    def close(self) -> None:
        """Restore the earlier handlers, except where a later handler has replaced these."""
        self._closed = True
        if threading.get_ident() != self._main or os.getpid() != self._pid:
            return  # from now on these handlers only call the earlier ones
        for number, former in self._former.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, former)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "what commit_on returns cannot be copied or pickled, since signal handlers belong to one process; call "
            "lazyckpt.commit_on in the other process"
        )

    def __enter__(self) -> CommitOnSignal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _await_mirrors(timeout_s: float) -> list[str]:
    """Waits until the mirrors of this process have what they take. Returns those that lack something."""
    tiers = sys.modules.get("lazyckpt.tiers.outgoing")  # not imported without mirrors
    return [] if tiers is None else tiers.await_uploads(timeout_s)


def _report(number: int, handles: list[SaveHandle], deadline: float) -> None:
    known = {each.value for each in signal.Signals}  # most real-time signals have no name
    name = signal.Signals(number).name if number in known else f"signal {number}"
    states: dict[str, list[str]] = {}
    for handle in handles:
        if not handle.done():
            state = f"not committed within {deadline:g} s"
        elif error_of(handle) is None:
            state = "committed"
        else:
            state = "failed"
        states.setdefault(state, []).append(str(handle.path))
    said = "; ".join(f"{state}: {', '.join(paths)}" for state, paths in states.items())
    _log.warning("%s: %s", name, said or "nothing was in flight")
