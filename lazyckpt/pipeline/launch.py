"""Launches a save: from Python objects to the engine, and on to the background.

    wait_for_room     until fewer than ``max_in_flight`` saves are in flight
    gather            the storages of the state; pickles everything else
    _sources          decides which storages are lazy, and which optimizers must wait for them
    lay_out           each file, as a program for the engine
    capture           one call of the engine: it watches the lazy storages, lays out the files, copies the eager bytes
    gate.add          makes optimizer steps wait for the lazy storages
    one_moment.check  looks for what wrote since ``gather``
    background.launch hands over to a background thread, which settles the handle
    wait_eager        for the eager bytes for which the ring had no room; then raises what failed before

A failure in the background is raised last, because a call that raised it first would save nothing. With several ranks
the others would then fail, and their next calls would save nothing in turn, without end.

save_now.py does the same for ``lazyckpt.save``, all eager, and then the work of the background on the same thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Hashable, Iterator, Mapping
from functools import partial

import torch

from lazyckpt import _engine, devices
from lazyckpt.capture.decision import Decisions
from lazyckpt.capture.eager import EagerShare
from lazyckpt.capture.instant import Instant
from lazyckpt.capture.owners import Owners
from lazyckpt.capture.snapshot import Snapshot
from lazyckpt.capture.sources import Sources
from lazyckpt.collector import collector_paused
from lazyckpt.config import Config
from lazyckpt.errors import (
    ClosedError,
    ConfigError,
    NoSpaceError,
    SaveError,
    SerializationError,
    described,
    save_error,
)
from lazyckpt.gate import averages
from lazyckpt.gate.gate import gate
from lazyckpt.metrics import CheckpointMetrics
from lazyckpt.observe.trace import Trace, Traced
from lazyckpt.pipeline import one_moment
from lazyckpt.pipeline.background import Background
from lazyckpt.pipeline.handle import SaveHandle, is_handed_over, mark_reported, wait_durable, wait_for
from lazyckpt.pipeline.persist import Flight, as_save_error
from lazyckpt.pipeline.plan import FilePlan, unsavable
from lazyckpt.pipeline.request import Request
from lazyckpt.pipeline.staging_buffer import StagingBuffer
from lazyckpt.pipeline.to_engine import Program, capture
from lazyckpt.providers.base import TensorView, TensorViews
from lazyckpt.providers.sharded import ShardedTensorError
from lazyckpt.storage import folders

Plans = Mapping[str, FilePlan]  # by name, under the final path; a lone file has that path's name


class Launcher:
    """Launches the saves of one Saver. One thread at a time may call."""

    def __init__(self, config: Config, buffer: StagingBuffer, background: Background, trace: Trace | None) -> None:
        # Calls in progress, of the Saver and of all objects that launch through it; see reentry.py.
        self.callers: dict[str, int] = {}
        self.modules: list[torch.nn.Module] = []  # whose frozen (requires_grad=False) parameters may become lazy
        self.label = "this Saver"  # the object that users call, for messages
        self.closed = False  # to new saves
        self._config = config
        self._pid = os.getpid()
        self._buffer = buffer
        self._background = background
        self._trace = trace
        assert buffer.engine is not None
        self.decisions = Decisions(buffer.engine, self.modules, watched=buffer.watched)
        self._eager_share = EagerShare()
        # How often each optimizer had stepped at the last save, and at the last one of an earlier training step.
        self._steps: dict[int, int] = {}
        self._steps_before: dict[int, int] = {}
        self._training_step: Hashable = None  # of the last save

    def check_usable(self) -> None:
        """Raises ClosedError when the Saver is closed, and in a forked child."""
        self.check_process()
        if self.closed:
            raise ClosedError(f"{self.label} is closed")

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(f"{self.label} belongs to the parent of this process; make one here")

    def launch(self, request: Request, plans: Plans, *, blocking: bool, training_step: Hashable = None) -> SaveHandle:
        """Starts a save. Returns when everything is copied or guarded; with ``blocking``, when it is durable.

        Saves of one ``training_step`` stay lazy, although no optimizer has stepped between them. Raises the
        errors of ``Saver.save``. A request that does not reach the background is abandoned."""
        begin = time.perf_counter()
        handle = SaveHandle(request.step, request.path)
        handle.arrivals = request.arrivals
        why = ""  # as text, because the error refers to this frame
        try:
            self.check_usable()
            gate.give_verdicts()
            raises = self._background.has_failed()
            if devices.capturing():
                raise ConfigError("save() inside a CUDA graph capture; save before or after it")
            self._background.wait_for_room()
            handle.metrics.in_flight_wait_s = time.perf_counter() - begin
            try:
                with gate.arming(handle.path, handle.step):
                    self._launch(handle, request, plans, begin, training_step)
            except (SaveError, OSError) as error:
                why = described(error)
                self._background.fail(handle, as_save_error(error, handle))
                raises = True  # it has failed already, so this call raises, not the next
        except BaseException as error:
            why = why or f"save() raised {type(error).__name__}: {described(error)}"
            raise
        finally:
            if not is_handed_over(handle):
                request.abandon(why)
        if blocking:
            wait_for([handle])
        handle.metrics.save_blocked_s = time.perf_counter() - begin
        if self._trace is not None and is_handed_over(handle):
            self._trace.saved(handle.metrics, begin)
        if blocking or raises:
            self._background.raise_failed(handle)
        return handle

    def _launch(
        self, handle: SaveHandle, request: Request, plans: Plans, begin: float, training_step: Hashable
    ) -> None:
        """From ``gather`` to ``wait_eager``. When this returns, every eager byte is copied and every lazy one
        guarded."""
        started = time.perf_counter()
        assert self._buffer.engine is not None
        job: _engine.Job | None = None
        snapshot: Snapshot | None = None
        traced: Traced | None = None
        name_of = partial(_name_of, plans)
        try:
            # No collection from ``gather`` to ``capture``: it runs destructors, which may write. ``capture`` copies
            # every eager byte for which the ring has room: more only when the background has created the files.
            with Instant() as instant, collector_paused():
                views = gather(plans, handle)
                instant.collected([file.tensors for file in views])
                gathered = time.perf_counter()
                sources = self._sources(views, plans, training_step)
                decided = time.perf_counter()
                programs = lay_out(plans, sources.files, handle)
                gate.collected(handle.path, handle.step)
                sizes = [nbytes for _, nbytes in programs]
                check_space(sum(sizes), handle)
                copied = self._eager_share.look(sources, self.modules, name_of)
                self._buffer.reserve_for_save(sum(sizes))
                job = capture(self._buffer.engine, sources, programs, [plan.ranges() for plan in plans.values()])
                captured = time.perf_counter()
                waited = None
                if self._trace is not None:
                    layout = [extents for extents, _ in programs]
                    traced = self._trace.begin(begin, list(plans), layout, sources.files, name_of)
                    waited = partial(self._trace.gate, traced, handle.step)
                snapshot = Snapshot(
                    sources,
                    job,
                    handle.metrics,
                    frozen=self.decisions.frozen,
                    torn=self.decisions.torn,
                    durable=partial(wait_durable, handle) if self._config.durability == "before_step" else None,
                    waited=waited,
                    name_of=name_of,
                )
                flight = Flight(handle, request, list(plans), sizes, snapshot, job, begin, copied, traced)
                gate.add(snapshot)
                one_moment.check(instant, plans, sources, programs, handle)
                handle.in_training = sources.in_training
                handle.metrics.storages = len(sources.sizes)
                written = [file for file, plan in zip(sources.files, plans.values(), strict=True) if plan.is_written]
                handle.metrics.copied_bytes = sum(sum(file.sizes) for file in written)
                handle.metrics.bytes = sum(sizes)
                eager_copied = job.wait_eager(0)
                # Here, before the collector would count them. Freeing a tensor may release the GIL, and this thread
                # would wait until the background gives it back.
                del views, sources, programs
                if eager_copied:
                    instant.forget()
            self._background.launch(flight)
            request.reached()
            _tell_phases(handle.metrics, job, started, gathered, decided, captured)
            job.go()
            if not eager_copied:
                job.wait_eager()
                snapshot.verify_eager(instant.moved())
            snapshot.eager_copied = True
        except BaseException as error:  # at Ctrl-C, for example
            self._withdraw(handle, job, snapshot, traced)
            if not isinstance(error, OSError | SaveError):  # launch() reports these
                mark_reported(handle)
            raise
        if snapshot.sources.devices is not None:
            self._buffer.warn_if_unpinned()
        handle.metrics.eager_wait_s = time.perf_counter() - started - handle.metrics.plan_s

    def _sources(self, views: list[TensorViews], plans: Plans, training_step: Hashable) -> Sources:
        """Decides which storages are lazy. Raises OSError if the engine cannot use one of their devices."""
        if training_step is None or training_step != self._training_step:
            self._steps_before = self._steps
        self._training_step = training_step
        averages.guard_imported()
        owners = Owners(gate, self._steps_before, watched=self._buffer.watched)
        self._steps = owners.steps
        orders, choices = [plan.order for plan in plans.values()], [plan.choice for plan in plans.values()]
        decision, frozen = self.decisions.decide(views, orders, owners, choices)
        tensors = owners.tensors + frozen.tensors if decision.frozen else owners.tensors
        return Sources(decision, decision.bind(views), tensors, audit=self._config.audit)

    def _withdraw(
        self, handle: SaveHandle, job: _engine.Job | None, snapshot: Snapshot | None, traced: Traced | None
    ) -> None:
        """Abandons a save, for example at Ctrl-C: training may go on and change storages that are half copied."""
        if job is not None:
            job.fail(errno.ECANCELED, "save() was interrupted")
        if snapshot is not None:
            gate.discard(snapshot)
        if self._trace is not None and traced is not None:
            self._trace.forget(traced)


def check_space(nbytes: int, handle: SaveHandle) -> None:
    """Raises NoSpaceError if the disk is full now. ``fallocate`` notices later writes of other programs."""
    try:
        free = folders.free_bytes(handle.path if handle.path.is_dir() else handle.path.parent)
    except OSError as error:
        raise save_error(error, path=handle.path, step=handle.step) from error
    if free < nbytes:
        what = f"needs {nbytes} bytes, {free} are free; free some space, or keep fewer checkpoints (keep_last)"
        raise NoSpaceError(what, path=handle.path, step=handle.step)


def gather(plans: Plans, handle: SaveHandle) -> list[TensorViews]:
    with _serialization_errors(handle):
        return [plan.gather() for plan in plans.values()]


def lay_out(plans: Plans, files: list[TensorViews], handle: SaveHandle) -> list[Program]:
    with _serialization_errors(handle):
        return [plan.lay_out(file) for plan, file in zip(plans.values(), files, strict=True)]


def _tell_phases(
    metrics: CheckpointMetrics, job: _engine.Job, started: float, gathered: float, decided: float, captured: float
) -> None:
    """Fills in ``plan_s``, which ends now, and its phases."""
    ended = time.perf_counter()
    metrics.plan_s = ended - started
    metrics.gather_s = gathered - started
    metrics.decide_s = decided - gathered
    metrics.watch_s = job.watch_s
    metrics.eager_copy_s = job.eager_copy_s
    metrics.layout_s = captured - decided - job.watch_s - job.eager_copy_s
    metrics.hand_over_s = ended - captured


def _name_of(plans: Plans, view: TensorView) -> str:
    """The name of a tensor in a message. Asking for it may run code of the user's, which may raise."""
    with contextlib.suppress(Exception):  # the message matters more than the name
        for plan in plans.values():
            if found := plan.name_of_view(view):
                return found
    return f"data/{view.key}"


@contextlib.contextmanager
def _serialization_errors(handle: SaveHandle) -> Iterator[None]:
    try:
        yield
    except (ShardedTensorError, SaveError):
        raise
    except Exception as error:
        what = unsavable(error)
        raise SerializationError(what, path=handle.path, step=handle.step) from error.__cause__ or error
