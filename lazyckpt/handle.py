"""What ``save()`` returns."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from lazyckpt.errors import ClosedError, SaveError
from lazyckpt.metrics import CheckpointMetrics
from lazyckpt.reentry import refuse
from lazyckpt.snapshot import Snapshot
from lazyckpt.tasks import Condition, LastingFuture


class SaveHandle(LastingFuture[Path]):
    """One checkpoint on its way: a Future of the folder's path, done when the folder is durable.

    ``result(timeout=None)`` returns the path or raises the SaveError; ``metrics`` is final when it is done.
    """

    def __init__(self, step: int | None, path: Path) -> None:
        super().__init__()
        self.step = step
        self.path = path
        self.metrics = CheckpointMetrics(step)
        self.in_training = False
        """Whether some of it belongs to an optimizer that has stepped since the save before: if not, there may be no
        training to overlap with."""
        self._snapshot: Snapshot | None = None
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
            snapshot.verify()  # now, since the caller is free to change everything
        return released

    def _refuse(self, call: str, timeout: float | None) -> None:
        """Raises ConfigError if the save that this thread is inside of might be waited for."""
        if timeout is None and not self.done():
            refuse(call)

    def result(self, timeout: float | None = None) -> Path:
        self._refuse("result()", timeout)
        try:
            return super().result(timeout)
        except SaveError:
            self._reported = True
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._refuse("exception()", timeout)
        error = super().exception(timeout)
        self._reported = self._reported or error is not None
        return error

    def _give_up(self, why: str) -> None:
        """No more of it is written, and it fails, unless all of it was written before."""
        job = None if self._snapshot is None else self._snapshot.job
        if job is not None:
            job.fail(errno.ECANCELED, why)

    def _disown(self) -> None:
        # Another thread may have held the lock at the fork; callbacks are for the process that saved.
        self._condition = Condition()
        self._done_callbacks.clear()  # type: ignore[attr-defined]
        self._waiters.clear()
        self._snapshot = None
        self.set_exception(ClosedError(f"{self.path} is saved by the parent of this process; wait for it there"))


# Of all Savers of this process, in the order of the saves; the keys of a dict, since copying these is atomic.
in_flight: dict[SaveHandle, None] = {}


def _disown() -> None:
    """In a forked child: the threads that would finish these are the parent's."""
    for handle in list(in_flight):
        handle._disown()
    in_flight.clear()


os.register_at_fork(after_in_child=_disown)
