"""What ``save()`` returns."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

from lazyckpt.capture.gate import gate
from lazyckpt.capture.snapshot import Snapshot
from lazyckpt.errors import ClosedError, SaveError
from lazyckpt.metrics import CheckpointMetrics
from lazyckpt.pipeline.reentry import refuse
from lazyckpt.pipeline.tasks import Condition, LastingFuture

_PATIENCE_S = 30.0  # with another thread's verdict, once nothing else is missing
_LOOK_S = 1.0


class _StandingEvent(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        with gate.standing():
            return super().wait(timeout)


class _Waiters(list[Any]):
    """Those of ``concurrent.futures.wait`` and ``as_completed``, which wait for an event of theirs."""

    def append(self, waiter: Any) -> None:
        waiter.event = _StandingEvent()
        super().append(waiter)


class SaveHandle(LastingFuture[Path]):
    """One checkpoint on its way: a Future of the folder's path, done when the folder is durable.

    ``result(timeout=None)`` returns the path or raises the SaveError; ``metrics`` is final when it is done.
    """

    def __init__(self, step: int | None, path: Path) -> None:
        super().__init__()
        self._waiters = _Waiters()
        self.step = step
        self.path = path
        self.metrics = CheckpointMetrics(step)
        self.in_training = False
        """Whether some of it belongs to an optimizer that has stepped since the save before: if not, there may be no
        training to overlap with."""
        self._snapshot: Snapshot | None = None
        self._previous: SaveHandle | None = None  # is published before this one, until that is done
        self._reported = False

    def wait_captured(self, timeout: float | None = None) -> bool:
        """Wait until nothing reads the training state any more; False if ``timeout`` (seconds) ran out first.

        Whether the checkpoint succeeds, ``result()`` tells.
        """
        self._refuse("wait_captured()", timeout)
        snapshot = self._snapshot
        if snapshot is None or snapshot.job is None:
            return True  # failed before anything was to be copied
        released = snapshot.job.wait_released(timeout)
        if released:
            snapshot.verify_soon()  # now, since the caller is free to change everything
        return released

    @property
    def awaits_verdict(self) -> bool:
        """Whether the files are durable and only their final name is missing: the thread that called ``save()`` has
        not come to a point since then at which it is known to write nothing. Only without a page witness; see
        docs/consistency.md."""
        snapshot = self._snapshot
        return snapshot is not None and snapshot.verdict.awaited and snapshot.verdict.owed != 0 and not self.done()

    def _refuse(self, call: str, timeout: float | None) -> None:
        """Raises ConfigError if the save that this thread is inside of might be waited for."""
        if timeout is None and not self.done():
            refuse(call)

    def result(self, timeout: float | None = None) -> Path:
        self._refuse("result()", timeout)
        wait_for([self], timeout)
        try:
            return super().result(0)
        except SaveError:
            self._reported = True
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._refuse("exception()", timeout)
        wait_for([self], timeout)
        error = super().exception(0)
        self._reported = self._reported or error is not None
        return error

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the SaveHandle of {self.path} cannot be copied or pickled, since only this process knows of the save; "
            "pass on its path or its metrics after result() has returned"
        )

    def _obstacle(self) -> SaveHandle | None:
        """The save that lacks nothing but the verdict of another thread, and is to be published first; if there is
        one."""
        handle: SaveHandle | None = self
        while handle is not None and not handle.done():
            snapshot = handle._snapshot
            if snapshot is not None and snapshot.verdict.awaited and snapshot.verdict.is_owed_by_another():
                return handle
            handle = handle._previous
        return None

    def _impatience(self) -> SaveError:
        assert self._snapshot is not None
        what = (
            "is durable but not published: nobody knows yet whether its tensors were written to, since thread "
            f"{self._snapshot.verdict.thread.name!r}, which called save(), has been in one call for {_PATIENCE_S:.0f} "
            "s. It is published when that thread goes on: call result() there before it waits for this thread"
        )
        return SaveError(what, path=self.path, step=self.step)

    def _give_up(self, why: str) -> None:
        """No more of it is written, and it fails, unless all of it was written before."""
        job = None if self._snapshot is None else self._snapshot.job
        if job is not None:
            job.fail(errno.ECANCELED, why)

    def _disown(self) -> None:
        # Another thread may have held the lock at the fork; callbacks are for the process that saved.
        self._condition = Condition()
        self._done_callbacks.clear()  # type: ignore[attr-defined]
        self._waiters = _Waiters()
        self._snapshot = None
        self.set_exception(ClosedError(f"{self.path} is saved by the parent of this process; wait for it there"))


def wait_for(futures: Iterable[Future[Any]], timeout: float | None = None, *, saves: Iterable[SaveHandle] = ()) -> None:
    """Returns when they are done, or after so many seconds; the calling thread writes nothing meanwhile.

    ``saves``: those that the futures wait for. Raises SaveError, without a timeout, rather than wait for ever for
    another thread's verdict: that thread may be waiting for this one."""
    end = None if timeout is None else time.monotonic() + timeout
    saves = list(saves)
    with gate.standing():
        for future in futures:
            patient_until = None
            while not future.done() and (end is None or time.monotonic() < end):
                candidates = [future] if isinstance(future, SaveHandle) else saves
                obstacle = next(filter(None, (save._obstacle() for save in candidates)), None)
                if end is None and obstacle is not None:
                    patient_until = patient_until or time.monotonic() + _PATIENCE_S
                    if time.monotonic() > patient_until:
                        raise obstacle._impatience()
                with contextlib.suppress(concurrent.futures.TimeoutError):
                    Future.exception(future, _LOOK_S if end is None else max(0.0, min(_LOOK_S, end - time.monotonic())))


# Of all Savers of this process, in the order of the saves; the keys of a dict, since copying these is atomic.
in_flight: dict[SaveHandle, None] = {}


def _disown() -> None:
    """In a forked child: the threads that would finish these are the parent's."""
    for handle in list(in_flight):
        handle._disown()
    in_flight.clear()


os.register_at_fork(after_in_child=_disown)
