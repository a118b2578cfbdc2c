"""Checkpoints in flight: what happens to one after ``save()`` has returned, and what the training thread hears of it.

commit.py has the steps of the durability protocol; here they are taken, in order, by one thread for each checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from lazyckpt import _engine
from lazyckpt.capture.gate import gate
from lazyckpt.capture.snapshot import Snapshot
from lazyckpt.config import Config
from lazyckpt.errors import ClosedError, ConfigError, LazyCkptError, LoadError, SaveError, TornSnapshotError, save_error
from lazyckpt.metrics import CheckpointMetrics, ChunkEvent
from lazyckpt.observe.trace import Trace, Traced
from lazyckpt.pipeline import readback, tasks
from lazyckpt.pipeline.handle import SaveHandle, in_flight, wait_for
from lazyckpt.pipeline.plan import FilePlan
from lazyckpt.pipeline.tasks import NO_MEMORY, Task, Workers, lacks_memory
from lazyckpt.storage import commit, removal

_logger = logging.getLogger("lazyckpt")
_logger.addHandler(logging.NullHandler())  # a failure reaches the user as an exception or a warning, not on stderr


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is to be saved, and what makes it a committed checkpoint (commit.py)."""

    files: dict[str, FilePlan]  # by name, under the final path; a lone file has that path's name
    stage: Callable[[], commit.Staging]
    # On a background thread, in the order of the saves: what the manifest says of the files (name, bytes, CRC-32), and
    # what follows when they are published; and, once the handle is done, which checkpoints are no longer kept.
    manifest: Callable[[list[tuple[str, int, int]]], dict[str, Any] | None] = lambda files: None
    published: Callable[[], None] = lambda: None
    superfluous: Callable[[], Iterable[Path]] = tuple


@dataclass(frozen=True)
class Flight:
    """All that the background needs to know of a checkpoint."""

    handle: SaveHandle
    target: Target
    snapshot: Snapshot
    job: _engine.Job
    nbytes: list[int]  # of each file
    begin: float  # time.perf_counter() when save() was called
    previous: SaveHandle | None  # is published before this one
    traced: Traced | None


class Background:
    """The checkpoints in flight of one Saver."""

    def __init__(self, config: Config, trace: Trace | None) -> None:
        self._config = config
        self._trace = trace
        # One thread more than checkpoints in flight: for what is to be removed behind them.
        threads = config.max_in_flight + 1
        try:
            self._workers = Workers(threads, "lazyckpt-commit")
        except RuntimeError as error:
            what = f"max_in_flight={config.max_in_flight} takes {threads} threads, which the system refuses: {error}"
            raise ConfigError(what) from error
        self._lock = threading.Lock()
        self._in_flight: list[SaveHandle] = []
        self._tasks: list[Task] = []  # of the handles in flight, and of those that still clean up
        self._failed: list[SaveHandle] = []
        self._last: SaveHandle | None = None  # launched
        self._doomed: set[Path] = set()  # to be removed, unless they are saved again before
        self._removal = threading.Lock()
        self._naming = threading.Lock()  # of checkpoints: they get their names, and lose them

    @property
    def newest(self) -> SaveHandle | None:
        return self._in_flight[-1] if self._in_flight else None

    @property
    def pending(self) -> list[SaveHandle]:
        """Launched and not durable yet, in the order of the saves."""
        return [handle for handle in self._in_flight if not handle.done()]

    def launch(self, flight: Flight) -> None:
        with self._removal:
            self._doomed.discard(flight.handle.path)
        in_flight[flight.handle] = None
        flight.handle._previous = flight.previous
        # Then this: who waits for a handle waits for the task, and Ctrl-C may come between any two lines.
        self._submit(partial(self._run, flight))
        self._in_flight.append(flight.handle)
        self._last = flight.handle

    def remove(self, path: Path) -> None:
        """Removes a file or folder once every save launched so far is durable and its done-callbacks have returned.
        Keeps it if the last save fails, or if it is saved again."""
        with self._removal:
            self._doomed.add(path)
        handles = [*self.pending, *([self._last] if self._last else [])]
        self._submit(partial(self._remove_behind, path, handles, self._tasks))

    def _submit(self, run: Callable[[], None]) -> None:
        if not threading.main_thread().is_alive():  # soon nobody waits for what is begun now
            raise ClosedError("the interpreter is ending; save before its exit handlers run")
        task = Task(run)
        tasks = [*(task for task in self._tasks if not task.done()), task]
        self._workers.put(task)
        self._tasks = tasks

    def _remove_behind(self, path: Path, handles: list[SaveHandle], earlier: list[Task]) -> None:
        # A handle is done before its callbacks run, and one of them may move a link away from the path. A worker has
        # already taken each earlier task, so this wait ends.
        tasks.wait_for(earlier)
        # Waits. Not handle.exception(): nobody has been told of a failure by this.
        failed = [h for h in handles if Future.exception(h) is not None and h.path != path]
        if failed:
            warn(f"{path} is kept, since the checkpoint after it was not saved ({failed[-1].path})")
            return
        try:
            with self._removal:
                trash = removal.hide(path) if path in self._doomed else None
                self._doomed.discard(path)
            if trash is not None:
                removal.unlink(trash)
        except OSError as cause:
            warn(f"{path} could not be removed: {cause}")

    def _remove_all(self, superfluous: Callable[[], Iterable[Path]]) -> None:
        """All of it is out of sight before the next checkpoint gets its name, which may be one of theirs."""
        hidden: list[Path | None] = []
        try:
            with self._naming:
                hidden.extend(map(removal.hide, superfluous()))
        finally:
            for trash in filter(None, hidden):
                removal.unlink(trash)

    def fail(self, handle: SaveHandle, error: SaveError) -> None:
        """Finishes a save that failed before it was launched. Later removals see that it failed."""
        self._last = handle
        self.finish(handle, error)

    def finish(self, handle: SaveHandle, error: SaveError | None) -> None:
        """Tells whoever holds the handle, and, of a failure, whoever does not."""
        try:
            self._tell(handle, error)
        finally:  # whatever on_done raises, somebody waits for this handle
            self._settle(handle, error)
            if error is not None and self._config.on_error == "warn":
                warn(str(error))

    def _settle(self, handle: SaveHandle, error: SaveError | None) -> None:
        """To be called again if there was no memory."""
        in_flight.pop(handle, None)
        handle._previous = None
        if error is not None and self._config.on_error == "raise":
            with self._lock:
                if handle not in self._failed:
                    self._failed.append(handle)
        handle._settle(handle.path, error)

    def _tell(self, handle: SaveHandle, error: SaveError | None) -> None:
        m = handle.metrics
        if error is None:
            _logger.info(
                "%s is durable: %.1f MB after %.2f s; training blocked for %.1f ms",
                handle.path,
                m.bytes / 1e6,
                m.durable_s,
                m.blocked_s * 1e3,
            )
        else:
            _logger.warning("%s", str(error))  # the error itself holds the engine, and handlers keep records
        if self._config.on_done is not None:
            try:
                self._config.on_done(m, error)
            except Exception as cause:
                warn(f"on_done raised {type(cause).__name__}: {cause}")

    def raise_failed(self, *, before_save: bool = False) -> None:
        """Raises the first failure that nobody has seen yet; the next call the next one. ``before_save``: a torn
        snapshot is a warning. The save that follows is not torn, and the run shall have it."""
        while True:
            try:  # no lock: a signal handler that saves may come here while this thread has it
                handle = self._failed.pop(0)
            except IndexError:
                return
            if handle._reported or (error := handle.exception()) is None:
                continue
            if before_save and isinstance(error, TornSnapshotError):
                warn(str(error))
                continue
            raise error

    def wait_for_room(self) -> None:
        """Returns when fewer than ``max_in_flight`` checkpoints are not durable."""
        self._in_flight = [h for h in self._in_flight if not h.done()]
        while len(self._in_flight) >= self._config.max_in_flight:
            wait_for(self._in_flight[:1])  # most often the first to be done, since they are published in order
            self._in_flight = [h for h in self._in_flight if not h.done()]

    def drain(self) -> None:
        """Returns when nothing is in flight and what they replaced is gone."""
        wait_for(self._tasks, saves=self._in_flight)
        self._tasks = [task for task in self._tasks if not task.done()]
        self._in_flight = []

    def close(self) -> None:
        self.drain()
        self._workers.stop()

    def _run(self, flight: Flight) -> None:
        """Whoever keeps the error of a checkpoint keeps its traceback: that must not hold the tensors and the ring."""
        where = self._persist(flight)
        del flight
        traceback.clear_frames(where)

    def _persist(self, flight: Flight) -> TracebackType | None:
        """Returns where it failed."""
        handle, target, job, snapshot = flight.handle, flight.target, flight.job, flight.snapshot
        if snapshot.job is None:  # called again, for lack of memory: the next sweep takes care of what is left
            return None
        cause: BaseException | None = None
        where: TracebackType | None = None  # without the frames of those whom the handle tells
        error: SaveError | None = None
        staging = replaced = None
        created = (0.0, 0.0)
        try:
            created = (time.perf_counter(),) * 2
            staging = target.stage()
            for number, (name, nbytes) in enumerate(zip(target.files, flight.nbytes, strict=True)):
                file = staging.path / name
                file.parent.mkdir(parents=True, exist_ok=True)
                job.open(number, file, nbytes)
            created = created[0], time.perf_counter()
            job.wait_released()
            snapshot.verify_pages()
            snapshot.verify_frozen()
            snapshot.note_copied()
            if not snapshot.verdict.owed:
                snapshot.verify()
                _let_go(snapshot)
            job.wait_settled()
            _raise_torn(snapshot, handle)
            job.raise_error()
            if self._config.verify_after_write:
                settled = time.perf_counter()
                readback.compare(job, staging.path, list(target.files))
                handle.metrics.readback_s = time.perf_counter() - settled
            files = [(name, *facts) for name, facts in zip(target.files, job.files(), strict=True)]
            if flight.previous is not None:
                tasks.wait_for([flight.previous])
            settled = time.perf_counter()
            snapshot.verdict.awaited = True
            if not snapshot.await_verdict():
                what = (
                    f"is not published: the process ended, and thread {snapshot.verdict.thread.name!r}, which called "
                    "save(), did not say whether it wrote to the tensors. Call result() there, or close() at the end"
                )
                error = SaveError(what, path=handle.path, step=handle.step)
                warn(str(error))  # nobody calls this Saver any more
                raise error
            handle.metrics.verdict_s = time.perf_counter() - settled
            _let_go(snapshot)
            _raise_torn(snapshot, handle)
            staging.describe(target.manifest(files), target.files)
            with self._naming:
                replaced = staging.publish()
            target.published()
        except BaseException as caught:  # nothing may be lost on this thread
            cause, where = caught, caught.__traceback__
        doubts = 0  # counted by hand, since an iterator takes memory
        while True:
            try:
                if cause is not None:
                    error = _as_save_error(cause, handle)
                    job.fail(errno.ECANCELED, "another part of the checkpoint failed")
                    job.wait_settled()
                    _let_go(snapshot)
                    if staging is not None:
                        staging.discard()
                engine_begin = _fill_in(handle.metrics, job, flight)
                break
            except Exception as lack:  # somebody waits for the handle
                if not lacks_memory(lack, doubts):
                    error, engine_begin = error or _as_save_error(lack, handle), flight.begin
                    break
                doubts += not isinstance(lack, MemoryError)
        try:
            self.finish(handle, error)
        except BaseException as raised:  # SystemExit, say: it ends no process from here, and must not end this either
            try:  # noqa: SIM105  # suppress() would need some itself
                warn(f"on_done or a done-callback raised {type(raised).__name__}: {raised}")
            except MemoryError:
                pass
        doubts = 0
        while True:
            try:
                gate.discard(snapshot)
                snapshot.job = None  # a handle may be kept for its metrics; the engine and its ring must not
                self._settle(handle, error)  # for lack of memory it may not have been
                break
            except NO_MEMORY as lack:
                if not lacks_memory(lack, doubts):
                    raise
                doubts += not isinstance(lack, MemoryError)
        try:
            if replaced is not None:
                removal.remove(replaced)
            if error is None:
                self._remove_all(target.superfluous)
        except (OSError, LoadError) as refused:  # the new checkpoint stands all the same
            warn(f"old checkpoints could not be removed from {handle.path.parent}: {refused}")
        if self._trace is not None and flight.traced is not None:
            self._trace.end(
                flight.traced,
                handle.metrics,
                path=handle.path,
                begin=flight.begin,
                created=created,
                engine_begin=engine_begin,
                error=error,
            )
        return where


def _as_save_error(cause: BaseException, handle: SaveHandle) -> SaveError:
    if isinstance(cause, SaveError):
        return cause
    if isinstance(cause, OSError):
        error = save_error(cause, path=handle.path, step=handle.step)
    else:
        what = str(cause) if isinstance(cause, LazyCkptError) else f"{type(cause).__name__}: {cause}"
        error = SaveError(what, path=handle.path, step=handle.step)
    error.__cause__ = cause
    return error


def _raise_torn(snapshot: Snapshot, handle: SaveHandle) -> None:
    if snapshot.torn is not None:
        raise TornSnapshotError(snapshot.torn, path=handle.path, step=handle.step)


def warn(message: str) -> None:
    """From a thread on which nobody would see an exception."""
    with contextlib.suppress(Warning):  # a filter may make an error of it, which nobody could handle here
        warnings.warn(message, stacklevel=2)


def _let_go(snapshot: Snapshot) -> None:
    if snapshot.durable is None:  # otherwise steps still wait for the disk
        gate.discard(snapshot)
    snapshot.release()


def _fill_in(metrics: CheckpointMetrics, job: _engine.Job, flight: Flight) -> float:
    """What the engine measured, on the clock of save(). Returns when the engine was given the checkpoint."""
    stats = job.stats()
    metrics.durable_s = time.perf_counter() - flight.begin
    metrics.save_blocked_s = metrics.save_blocked_s or metrics.durable_s  # save() has not returned yet
    handed_over = stats["begin"] - flight.begin
    metrics.bytes = int(stats["bytes"])
    metrics.eager_bytes = int(stats["eager_bytes"])
    metrics.chunks = int(stats["chunks"])
    metrics.copy_s = stats["copy_s"]
    metrics.ring_wait_s = stats["ring_wait_s"]
    metrics.captured_s = handed_over + stats["captured_s"]
    metrics.written_s = handed_over + stats["written_s"]
    metrics.synced_s = handed_over + stats["synced_s"]
    metrics.write_s = stats["written_s"] - stats["first_write_s"]
    metrics.commit_s = metrics.durable_s - metrics.written_s
    metrics.timeline = [ChunkEvent(*event) for event in job.timeline()]
    return stats["begin"]
