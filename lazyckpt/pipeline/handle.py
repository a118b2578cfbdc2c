"""The handle that ``save()`` returns: a future of the durable path."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lazyckpt import waits
from lazyckpt.capture.snapshot import Snapshot
from lazyckpt.capture.verdict import Verdict
from lazyckpt.errors import ClosedError, ConfigError, SaveError
from lazyckpt.gate.standing import inside_operation
from lazyckpt.metrics import CheckpointMetrics, ChunkEvent
from lazyckpt.pipeline.reentry import refuse
from lazyckpt.pipeline.wait_bar import WaitBar
from lazyckpt.pipeline.workers import Condition

if TYPE_CHECKING:
    from lazyckpt.tiers.arrival import Arrivals

# The register of the saves in flight: those of all Savers of this process, in the order of the saves, each with the
# Saver's ``Background``. Copying a dict is atomic. A save is here once a thread will end it, so Ctrl-C leaves none
# behind.
_register: dict[SaveHandle, object] = {}


if sys.version_info >= (3, 11):
    NotDurableYet = TimeoutError
else:

    class NotDurableYet(concurrent.futures.TimeoutError, TimeoutError):
        """In Python 3.10 these are two classes."""


class _Event(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        _refuse_inside_operation()
        return super().wait(timeout)


class _Waiters(list[Any]):
    """The waiters of ``concurrent.futures.wait`` and ``as_completed``, which are refused inside an operation."""

    def append(self, waiter: Any) -> None:
        waiter.event = _Event()
        super().append(waiter)


class SaveHandle(Future[Path]):
    """One checkpoint on its way: a Future of the folder's path, done when the folder is durable.

    ``result(timeout=None)`` returns the path or raises the SaveError; ``metrics`` is final when it is done.
    """

    def __init__(self, step: int | None, path: Path) -> None:
        super().__init__()
        self._condition = Condition()
        self.set_running_or_notify_cancel()  # a save under way cannot be cancelled
        self._waiters = _Waiters()
        self.step = step
        self.path = path
        self.metrics = CheckpointMetrics(step)
        self.in_training = False
        """Whether an optimizer that stepped since the save before owns some of it. If none does, no training may be
        running that the save could overlap with."""
        self._handed_over = False  # to the background
        self._snapshot: Snapshot | None = None  # while the background has it
        self._reported = False
        self.arrivals: Arrivals | None = None  # in mirrors

    def mirrored(self) -> Future[Path]:
        """A Future of the path, done when the checkpoint is durable and in all mirrors that take it.

        It fails with the SaveError of the checkpoint, or with a MirrorError: the place belongs to another run, or a
        newer checkpoint went there instead. An upload that fails otherwise is tried again."""
        from lazyckpt.tiers.arrival import everywhere

        return everywhere(self, self.arrivals)

    def wait_captured(self, timeout: float | None = None) -> bool:
        """Wait until nothing reads the training state any more; False if ``timeout`` (seconds) ran out first.

        ``result()`` tells whether the checkpoint succeeds.
        """
        self._refuse("wait_captured()", timeout)
        snapshot = self._snapshot
        if snapshot is None:
            return True  # failed before the engine had it, or done
        released = snapshot.job.wait_released(timeout)
        if released:
            snapshot.verify_soon()  # now: after this call the caller may change everything
        return released

    @property
    def progress(self) -> float:
        """The part of the bytes that is written, from 0.0 to 1.0; 1.0 only when the checkpoint is durable."""
        if self.done():
            return 1.0 if Future.exception(self, 0) is None else 0.0
        if (snapshot := self._snapshot) is None:
            return 0.0
        events = [ChunkEvent(*event) for event in snapshot.job.timeline()]
        written = sum(event.nbytes for event in events if event.write_end_s > 0)
        return min(0.99, written / max(1, sum(event.nbytes for event in events)))

    def __repr__(self) -> str:
        what = f"step {self.step}, {self.path}" if self.step is not None else str(self.path)
        if not self.done():
            state = f"{self.progress:.0%} written"
        elif (error := Future.exception(self, 0)) is None:
            state = f"durable after {self.metrics.durable_s:.2f} s"
        else:
            state = f"failed: {error}"
        return f"<SaveHandle {what}: {state}>"

    @property
    def awaits_verdict(self) -> bool:
        """Whether the files are durable and only their final name is missing, because the thread that called
        ``save()`` has not yet reached a point at which it is known to write nothing. Only without a page witness; see
        docs/consistency.md."""
        snapshot = self._snapshot
        return snapshot is not None and snapshot.verdict.awaited and snapshot.verdict.owed != 0 and not self.done()

    def _refuse(self, call: str, timeout: float | None) -> None:
        """Raises ConfigError if this thread is inside the save that it might wait for."""
        if timeout is None and not self.done():
            refuse(call)

    def _wait(self, timeout: float | None) -> None:
        """Waits until the handle is done. Raises TimeoutError if ``timeout`` (seconds) runs out first."""
        wait_for([self], timeout)
        if not self.done():
            what = f"is not durable after {timeout:g} s ({self.progress:.0%} written); the save goes on"
            raise NotDurableYet(f"{self.path} {what}")

    def result(self, timeout: float | None = None) -> Path:
        self._refuse("result()", timeout)
        self._wait(timeout)
        try:
            return super().result(0)
        except SaveError:
            self._reported = True
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._refuse("exception()", timeout)
        self._wait(timeout)
        error = super().exception(0)
        self._reported = self._reported or error is not None
        return error

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the SaveHandle of {self.path} cannot be copied or pickled, since only this process knows of the save; "
            "pass on its path or its metrics after result() has returned"
        )

    def _disown(self) -> None:
        """Fails the handle in a forked child. Callbacks are for the process that saves."""
        self._condition = Condition()  # another thread may have held the lock at the fork
        self._done_callbacks.clear()  # type: ignore[attr-defined]
        self._waiters = _Waiters()
        self._snapshot = None
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # done, and about to leave the register
            self.set_exception(ClosedError(f"{self.path} is saved by the parent of this process; wait for it there"))

    def _impatience(self, verdict: Verdict) -> SaveError:
        what = (
            "is durable but not published: it is not known yet whether its tensors were written to, since thread "
            f"{verdict.thread.name!r}, which called save(), has been in one call for "
            f"{waits.VERDICT_PATIENCE_S:.0f} s. It is published when that thread goes on: call result() there before "
            "it waits for this thread"
        )
        return SaveError(what, path=self.path, step=self.step)


# What the pipeline asks of handles; users call none of these.


def in_flight(background: object = None) -> list[SaveHandle]:
    """Returns the saves that are not durable yet, in the order of the saves: all, or those of one ``background``."""
    saves = _register.copy().items()
    return [handle for handle, its in saves if background in (None, its) and not handle.done()]


def hand_over(handle: SaveHandle, snapshot: Snapshot) -> None:
    """Notes that the background takes over. Call it before that has the save, and ``enter`` after."""
    handle._snapshot = snapshot
    handle._handed_over = True


def is_handed_over(handle: SaveHandle) -> bool:
    return handle._handed_over


def let_go(handle: SaveHandle) -> None:
    """Drops the snapshot of a save that is over, and with it the engine's job: a user may keep the handle."""
    handle._snapshot = None


def enter(handle: SaveHandle, background: object) -> None:
    """Enters a save into the register, until it is done. ``background`` publishes it, after those it entered before."""
    _register[handle] = background
    if handle.done():  # already
        _register.pop(handle, None)


def finish(handle: SaveHandle, error: BaseException | None) -> None:
    """Makes the handle done: durable, or failed with ``error``. The first call counts."""
    try:
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            if error is None:
                handle.set_result(handle.path)
            else:
                handle.set_exception(error)
    finally:
        _register.pop(handle, None)


def give_up(handle: SaveHandle, why: str) -> None:
    """Stops writing. The checkpoint fails unless all of it was written before."""
    if (snapshot := handle._snapshot) is not None:
        snapshot.job.fail(errno.ECANCELED, why)


def error_of(handle: SaveHandle) -> BaseException | None:
    """Waits until the handle is done. Returns its error, which this does not report to the user."""
    return Future.exception(handle)


def is_reported(handle: SaveHandle) -> bool:
    """Whether the user has heard of the failure."""
    return handle._reported


def mark_reported(handle: SaveHandle) -> None:
    handle._reported = True


def obstacle(handle: SaveHandle) -> tuple[SaveHandle, Verdict] | None:
    """Returns the first save, of this one and those published before it, that lacks only the verdict of another
    thread; with the verdict."""
    background = _register.get(handle)
    for save in in_flight(background) if background is not None else ():
        snapshot = save._snapshot
        if snapshot is not None and snapshot.verdict.awaited and snapshot.verdict.is_owed_by_another():
            return save, snapshot.verdict
        if save is handle:
            break
    return None


def wait_durable(handle: SaveHandle) -> None:
    """Waits until the handle is done, or lacks only a verdict of another thread, which may be waiting for this one.
    Inside an operation it does not wait if this thread owes a verdict."""
    while not handle.done() and obstacle(handle) is None and _owed_inside_operation() is None:
        with contextlib.suppress(concurrent.futures.TimeoutError):
            Future.exception(handle, waits.VERDICT_LAST_LOOK_S)  # does not report a failure


def wait_for(futures: Iterable[Future[Any]], timeout: float | None = None, *, saves: Iterable[SaveHandle] = ()) -> None:
    """Waits until the futures are done, at most ``timeout`` seconds. The thread shows that it waits, which gives the
    verdicts that it owes (gate/standing.py). Raises ConfigError if it owes one inside an operation of torch.

    ``saves``: the saves that the futures wait for. Without a timeout, raises SaveError if one of them has lacked only
    another thread's verdict for long: that thread may be waiting for this one."""
    end = None if timeout is None else time.monotonic() + timeout
    saves = list(saves)
    with WaitBar() as bar:
        for future in futures:
            patient_until = None
            while not future.done() and (end is None or time.monotonic() < end):
                _refuse_inside_operation()
                candidates = [future] if isinstance(future, SaveHandle) else saves
                stuck = next(filter(None, map(obstacle, candidates)), None)
                if end is None and stuck is not None:
                    patient_until = patient_until or time.monotonic() + waits.VERDICT_PATIENCE_S
                    if time.monotonic() > patient_until:
                        late, verdict = stuck
                        raise late._impatience(verdict)
                for save in candidates[:1]:
                    bar.show(f"saving {save.path.name}", functools.partial(getattr, save, "progress"))
                with contextlib.suppress(concurrent.futures.TimeoutError):
                    left_s = math.inf if end is None else max(0.0, end - time.monotonic())
                    Future.exception(future, min(waits.HANDLE_LOOK_S, left_s))


def _owed_inside_operation() -> SaveHandle | None:
    """Returns a save whose verdict this thread owes, and cannot give here, since it is inside an operation."""
    for save in in_flight() if inside_operation() else ():
        snapshot = save._snapshot
        if snapshot is not None and snapshot.verdict.owed and not snapshot.verdict.is_owed_by_another():
            return save
    return None


def _refuse_inside_operation() -> None:
    """Raises ConfigError where this thread cannot give a verdict that it owes: it would wait for itself."""
    if (save := _owed_inside_operation()) is not None:
        raise ConfigError(
            f"a wait for {save.path} inside an operation of torch (a __torch_dispatch__, a kernel) is in vain: "
            "only after the operation does torch tell whether it has written. Wait outside of it"
        )


def _disown() -> None:
    """Fails the handles in a forked child: the threads that would finish them exist in the parent only."""
    for handle in list(_register):
        handle._disown()
    _register.clear()


os.register_at_fork(after_in_child=_disown)
