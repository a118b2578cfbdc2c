"""The checkpoints in flight of one Saver: persists them, settles their handles, reports failures, removes old ones."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import TracebackType

from lazyckpt.config import Config
from lazyckpt.errors import ClosedError, ConfigError, LoadError, SaveError, TornSnapshotError
from lazyckpt.gate.gate import gate
from lazyckpt.observe.trace import Trace
from lazyckpt.pipeline import persist
from lazyckpt.pipeline.handle import (
    SaveHandle,
    enter,
    error_of,
    finish,
    hand_over,
    in_flight,
    is_reported,
    let_go,
    mark_reported,
    wait_for,
)
from lazyckpt.pipeline.persist import Flight
from lazyckpt.pipeline.workers import Task, Workers
from lazyckpt.storage import removal
from lazyckpt.warn import warn_in_background

_logger = logging.getLogger("lazyckpt")
_logger.addHandler(logging.NullHandler())  # a failure reaches the user as an exception or a warning, not on stderr


class Background:
    """One thread persists each checkpoint. The thread that saves calls all public methods, except ``settle``."""

    def __init__(self, config: Config, trace: Trace | None) -> None:
        self._config = config
        self._trace = trace
        if trace is not None:
            weakref.finalize(self, trace.close)  # also at exit, after the workers: finalizers run last in, first out
        # One thread more than checkpoints in flight, for removals.
        threads = config.max_in_flight + 1
        try:
            self._workers = Workers(threads, "lazyckpt-commit")
        except RuntimeError as error:
            what = f"max_in_flight={config.max_in_flight} takes {threads} threads, which the system refuses: {error}"
            raise ConfigError(what) from error
        self.finish: Callable[[], object] = self._workers.stop  # all tasks, and the threads; does not keep this alive
        self._tasks: list[Task] = []  # those that are not done: saves, cleaning up after saves, removals
        self._failed: list[SaveHandle] = []  # not reported yet
        self._last: SaveHandle | None = None  # the last save, launched or failed
        self._doomed: set[Path] = set()  # paths to remove, unless they are saved again before
        self._removal = threading.Lock()
        self.let_go: Callable[[Path, Callable[[], None]], None] | None = None
        """If there are mirrors: calls back once they do not need a path that is to be removed."""
        self._naming = threading.Lock()  # held while checkpoints get their names or lose them

    # calls of the thread that saves

    @property
    def pending(self) -> list[SaveHandle]:
        """The launched saves that are not durable yet, in the order of the saves."""
        return in_flight(self)

    def launch(self, flight: Flight) -> None:
        """Hands a save over to a background thread, which settles the handle."""
        handle = flight.handle
        with self._removal:
            self._doomed.discard(handle.path)
        flight.earlier = self.pending
        self._submit(partial(self._run, flight), flight)
        enter(handle, self)  # last: after Ctrl-C between the two, nothing waits for a save without a task
        self._last = handle

    def remove(self, path: Path, inside: Path | None = None) -> None:
        """Removes a file or folder once every save launched so far is durable and its done-callbacks have returned.
        Keeps it if the last save fails, or if it is saved again. ``inside``: as in ``removal.hide``."""
        with self._removal:
            self._doomed.add(path)
        handles = [*self.pending, *([self._last] if self._last else [])]
        self._submit(partial(self._remove_behind, path, inside, handles, self._tasks))

    def wait_for_room(self) -> None:
        """Waits until fewer than ``max_in_flight`` checkpoints are in flight."""
        while len(pending := self.pending) >= self._config.max_in_flight:
            wait_for(pending[:1])  # usually the first to be done, since they are published in order

    def has_failed(self) -> bool:
        """Whether an unreported failure is left. Call it before a save: a torn snapshot becomes a warning, because this
        save copies everything at once."""
        while self._failed:
            handle = self._failed[0]
            if not is_reported(handle) and (error := error_of(handle)) is not None:
                if not isinstance(error, TornSnapshotError):
                    return True
                mark_reported(handle)
                warn_in_background(str(error))
            with contextlib.suppress(ValueError):  # no lock, see raise_failed()
                self._failed.remove(handle)
        return False

    def raise_failed(self, saving: SaveHandle | None = None) -> None:
        """Raises the oldest failure that was not reported yet; the next call raises the next one. ``saving``: the save
        whose call raises it; that save goes on, and the error says so."""
        while True:
            try:  # no lock: a signal handler that saves may interrupt this thread while it holds one
                handle = self._failed.pop(0)
            except IndexError:
                return
            if is_reported(handle) or (error := handle.exception()) is None:
                continue
            if saving is not None and handle is not saving and isinstance(error, SaveError):
                failed = saving.done() and error_of(saving) is not None
                error.raised_by(saving.path, saving.step, failed=failed)
            raise error

    def drain(self) -> None:
        """Waits until nothing is in flight and all replaced checkpoints are removed."""
        wait_for(self._tasks, saves=self.pending)
        self._tasks = [task for task in self._tasks if not task.done()]

    def close(self) -> None:
        self.drain()
        self._workers.stop()

    def _submit(self, run: Callable[[], None], flight: Flight | None = None) -> None:
        if not threading.main_thread().is_alive():  # soon nothing waits for the background threads
            raise ClosedError("the interpreter is ending; save before its exit handlers run")
        task = Task(run)
        tasks = [*(task for task in self._tasks if not task.done()), task]
        if flight is not None:
            hand_over(flight.handle, flight.snapshot)
        self._workers.put(task)
        self._tasks = tasks

    # settling: the one place where a save ends

    def settle(self, handle: SaveHandle, error: SaveError | None) -> None:
        """Ends a save: calls ``on_done``, keeps a failure for the next call, and makes the handle done, whatever
        ``on_done`` raises. Any thread; the first call for a handle counts."""
        if handle.done():
            return
        try:
            self._tell(handle, error)
            if error is not None and self._config.on_error == "warn":
                warn_in_background(str(error))
        finally:
            if error is not None and self._config.on_error == "raise":
                self._failed.append(handle)
            finish(handle, error)  # last: who waits for the handle finds everything said

    def fail(self, handle: SaveHandle, error: SaveError) -> None:
        """Settles a save that failed before it was launched."""
        self._last = handle  # later removals see that it failed
        self.settle(handle, error)

    def _tell(self, handle: SaveHandle, error: SaveError | None) -> None:
        m = handle.metrics
        if error is None:
            what = f"{m.bytes / 1e6:.1f} MB after {m.durable_s:.2f} s; training blocked for {m.blocked_s * 1e3:.1f} ms"
            _logger.info("%s is durable: %s", handle.path, what)
        else:
            _logger.warning("%s", str(error))  # as text: handlers keep records, and the error refers to the engine
        if self._config.on_done is not None:
            try:
                self._config.on_done(m, error)
            except Exception as cause:
                warn_in_background(f"on_done raised {type(cause).__name__}: {cause}")

    # one checkpoint, on a background thread

    def _run(self, flight: Flight) -> None:
        """Persists a checkpoint, then clears the frames of its failure: a user may keep the error and its traceback,
        but these must not keep the tensors and the staging buffer alive."""
        where = self._persist(flight)
        del flight
        traceback.clear_frames(where)

    def _persist(self, flight: Flight) -> TracebackType | None:
        """Takes the steps of persist.py and settles the handle, whatever they raise. Returns where they failed."""
        replaced: Path | None = None
        error: SaveError | None = None
        where: TracebackType | None = None
        try:
            with persist.aborted_on_error(flight):
                staging = persist.create_files(flight)
                files = persist.prepare(flight, staging, read_back=self._config.verify_after_write)
                persist.agree(flight, files)
                with self._naming:
                    replaced = persist.commit(flight, staging, files)
        except BaseException as cause:  # no other thread would report it
            error, where = flight.out_of_memory, cause.__traceback__
            with contextlib.suppress(MemoryError):
                error = persist.as_save_error(cause, flight.handle)
        self._end(flight, error)
        self._clean_up(flight, replaced, error)
        if self._trace is not None and flight.traced is not None:
            self._trace.end(
                flight.traced,
                flight.handle.metrics,
                path=flight.handle.path,
                begin=flight.begin,
                created=flight.created,
                engine_begin=flight.job.stats()["begin"],
                error=error,
            )
        return where

    def _end(self, flight: Flight, error: SaveError | None) -> None:
        """Settles the handle and drops the engine's job, which must not live as long as the user's handle."""
        try:
            try:
                persist.measure(flight)
            finally:
                self.settle(flight.handle, error)
        except BaseException as raised:  # SystemExit in on_done, for example, must not end this thread
            warn_in_background(f"on_done or a done-callback raised {type(raised).__name__}: {raised}")
        gate.discard(flight.snapshot)
        let_go(flight.handle)

    # removals

    def _clean_up(self, flight: Flight, replaced: Path | None, error: SaveError | None) -> None:
        """Removes the checkpoint that this one replaced, and those that retention drops. A failure is only a warning,
        since the new checkpoint is committed."""
        try:
            if replaced is not None:
                removal.remove(replaced)
            if error is None:
                self._remove_all(flight.request.superfluous)
        except (OSError, LoadError, SaveError) as refused:
            warn_in_background(f"old checkpoints could not be removed from {flight.handle.path.parent}: {refused}")

    def _remove_all(self, superfluous: Callable[[], Iterable[Path]]) -> None:
        """Hides all of them before the next checkpoint gets its name, which may be the name of one of them."""
        hidden: list[Path | None] = []
        try:
            with self._naming:
                hidden.extend(map(removal.hide, superfluous()))
        finally:
            for trash in filter(None, hidden):
                removal.unlink(trash)

    def _remove_behind(self, path: Path, inside: Path | None, handles: list[SaveHandle], earlier: list[Task]) -> None:
        # A handle is done before its callbacks run, and a callback may move a link away from the path. So wait for the
        # tasks. A worker has already taken each earlier one, so this wait ends.
        concurrent.futures.wait(earlier)
        failed = [h for h in handles if error_of(h) is not None and h.path != path]
        if failed:
            warn_in_background(f"{path} is kept, since the checkpoint after it was not saved ({failed[-1].path})")
            return
        remove = partial(self._remove_doomed, path, inside)
        if self.let_go is None:
            remove()
        else:
            self.let_go(path, remove)

    def _remove_doomed(self, path: Path, inside: Path | None) -> None:
        try:
            with self._removal:
                trash = removal.hide(path, inside=inside) if path in self._doomed else None
                self._doomed.discard(path)
            if trash is not None:
                removal.unlink(trash, path.parent)
        except OSError as cause:
            warn_in_background(f"{path} could not be removed: {cause}")
