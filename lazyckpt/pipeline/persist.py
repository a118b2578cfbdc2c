"""Takes one save through the durability protocol (storage/commit.py), on one thread.

``create_files`` and ``prepare`` make the files durable under a temporary name. ``agree`` waits until every earlier save
is decided and the verdict on this snapshot is known. Then ``commit`` decides; if any step fails, ``abort`` does.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lazyckpt import _engine, waits
from lazyckpt.capture.eager import Copied
from lazyckpt.capture.snapshot import Snapshot
from lazyckpt.errors import LazyCkptError, SaveError, TornSnapshotError, save_error
from lazyckpt.gate.gate import gate
from lazyckpt.metrics import ChunkEvent
from lazyckpt.observe.trace import Traced
from lazyckpt.pipeline import readback
from lazyckpt.pipeline.handle import SaveHandle
from lazyckpt.pipeline.request import Request
from lazyckpt.storage.commit import Staging
from lazyckpt.storage.manifest import FileEntry
from lazyckpt.warn import warn_in_background


@dataclass
class Flight:
    """A save that the engine has."""

    handle: SaveHandle
    request: Request
    files: list[str]  # names relative to the staged folder
    nbytes: list[int]  # of each file
    snapshot: Snapshot
    job: _engine.Job
    begin: float  # time.perf_counter() when save() was called
    copied: Copied | None = None  # eagerly; see eager.py
    traced: Traced | None = None
    staging: Staging | None = None
    earlier: Sequence[SaveHandle] = ()  # the saves that are published before this one

    def __post_init__(self) -> None:
        self.created = (time.perf_counter(),) * 2  # begin and end of ``create_files``
        self.out_of_memory = SaveError(MemoryError.__name__, path=self.handle.path, step=self.handle.step)
        """Made in advance: there may be no memory for an error later."""


def create_files(flight: Flight) -> Staging:
    """Creates the files, so that the engine can write its copies. Raises OSError."""
    flight.staging = staging = flight.request.stage()
    begin = time.perf_counter()
    for number, (name, nbytes) in enumerate(zip(flight.files, flight.nbytes, strict=True)):
        # Never the staged folder itself: another rank may have aborted, and moved it away.
        for folder in reversed(Path(name).parents[:-1]):
            (staging.path / folder).mkdir(exist_ok=True)
        flight.request.open(flight.job, number, staging.path / name, nbytes)
    flight.request.opened()
    flight.created = begin, time.perf_counter()
    return staging


def prepare(flight: Flight, staging: Staging, *, read_back: bool) -> list[FileEntry]:
    """Returns when the files are durable and, with ``read_back``, compared with the copy. Drops the references
    to the training state as soon as it is copied.

    Raises TornSnapshotError if the snapshot is known to be torn, OSError, and RankError if another rank has aborted."""
    job, snapshot = flight.job, flight.snapshot
    while not job.wait_released(waits.ABORT_LOOK_S):
        flight.request.check()
    snapshot.verify_pages()
    snapshot.verify_frozen()
    if flight.copied is not None:
        flight.copied.fill_in(snapshot.sources, job)
    if not snapshot.verdict.owed:
        snapshot.verify()
        _let_go(snapshot)
    while not job.wait_settled(waits.ABORT_LOOK_S):
        flight.request.check()
    _raise_torn(flight)
    job.raise_error()
    if read_back:
        begin = time.perf_counter()
        readback.compare(job, staging.path, flight.files)
        flight.handle.metrics.readback_s = time.perf_counter() - begin
    return [FileEntry(name, *facts) for name, facts in zip(flight.files, job.files(), strict=True)]


def agree(flight: Flight, files: list[FileEntry]) -> None:
    """Returns when every earlier save is published or has failed, this snapshot is known not to be torn, and
    the other ranks, if there are any, have agreed for their parts.

    Raises TornSnapshotError; SaveError if the process ends before the verdict is known; RankError."""
    handle, snapshot = flight.handle, flight.snapshot
    concurrent.futures.wait(flight.earlier)
    begin = time.perf_counter()
    snapshot.verdict.awaited = True
    if not snapshot.await_verdict():
        what = (
            f"is not published: the process ended, and thread {snapshot.verdict.thread.name!r}, which called save(), "
            "did not say whether it wrote to the tensors. Call result() there, or close() at the end"
        )
        error = SaveError(what, path=handle.path, step=handle.step)
        warn_in_background(str(error))  # no later call of this Saver would raise it
        raise error
    handle.metrics.verdict_s = time.perf_counter() - begin
    _let_go(snapshot)
    _raise_torn(flight)
    flight.request.agree(files)


def commit(flight: Flight, staging: Staging, files: list[FileEntry]) -> Path | None:
    """Gives the files their final names. Returns the folder that the checkpoint replaced, under another name, or None.
    Raises OSError."""
    flight.request.describe(staging, files)
    replaced = flight.request.publish(staging)
    flight.request.published()
    return replaced


@contextlib.contextmanager
def aborted_on_error(flight: Flight) -> Iterator[None]:
    """Aborts the save if a step raises. The error of that step is raised, even if ``abort`` raises another."""
    try:
        yield
    except BaseException as error:
        told: BaseException = error
        try:
            told = flight.request.failed(error)  # first, since other ranks wait
            abort(flight)
        finally:
            raise told


def abort(flight: Flight) -> None:
    """Stops the engine and removes the staged files."""
    flight.job.fail(errno.ECANCELED, "another part of the checkpoint failed")
    flight.job.wait_settled()
    _let_go(flight.snapshot)
    if flight.staging is not None:
        flight.staging.discard()


def as_save_error(cause: BaseException, handle: SaveHandle) -> SaveError:
    """The SaveError to tell the user, caused by ``cause``."""
    if isinstance(cause, SaveError):
        cause.__context__ = None  # its text says everything; the frames of the background would hide it
        return cause.with_traceback(None)
    if isinstance(cause, OSError):
        error = save_error(cause, path=handle.path, step=handle.step)
    else:
        what = str(cause) if isinstance(cause, LazyCkptError) else f"{type(cause).__name__}: {cause}"
        error = SaveError(what, path=handle.path, step=handle.step)
    error.__cause__ = cause
    return error


def measure(flight: Flight) -> None:
    """Fills in the measurements of the engine, on the clock of ``save()``."""
    metrics, stats = flight.handle.metrics, flight.job.stats()
    metrics.durable_s = time.perf_counter() - flight.begin
    metrics.save_blocked_s = metrics.save_blocked_s or metrics.durable_s  # if save() has not returned yet
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
    metrics.timeline = [ChunkEvent(*event) for event in flight.job.timeline()]


def _raise_torn(flight: Flight) -> None:
    if flight.snapshot.torn is not None:
        raise TornSnapshotError(flight.snapshot.torn, path=flight.handle.path, step=flight.handle.step)


def _let_go(snapshot: Snapshot) -> None:
    if snapshot.durable is None:  # otherwise optimizer steps still wait for the disk
        gate.discard(snapshot)
    snapshot.release()
