"""Records a timeline of checkpoints beside training, as Chrome trace events: ``Checkpointer(trace="trace.json")``.

Open the file in https://ui.perfetto.dev, or draw one checkpoint of it with ``lazyckpt trace``.

There are tracks for the training threads (iterations, optimizer steps, save() and its parts, waits at the gate), for
checkpoints in flight, for copies and writes of chunks, and for commits; each kind has as many tracks as events overlap.
Counters show the bytes in the ring and the memory of the process.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import os
import threading
import time
import weakref
from array import array
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lazyckpt.config import PAGE_BYTES
from lazyckpt.formats.program import SOURCE, Extent
from lazyckpt.metrics import PLAN_PHASES, CheckpointMetrics, ChunkEvent
from lazyckpt.observe.trace_file import COMMITS, COPIES, RING, SAVES, TRAINING, WRITES, TraceWriter, file_of
from lazyckpt.providers.base import TensorView, TensorViews

LARGEST = 5  # tensors that get names, as in DataStates-LLM, figure 15
_SHORTEST_S = 10e-6  # a shorter call of the gate did not wait
_SYSTEM_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_KINDS = {SAVES: "checkpoint", RING: "wait for the ring", COPIES: "copy", WRITES: "write", COMMITS: "commit"}

_numbers = itertools.count(1)  # for the checkpoints of this process


class Traced(NamedTuple):
    """The trace's notes on a checkpoint in flight."""

    number: int  # in this process
    files: list[str]
    programs: list[list[Extent]]
    largest: list[dict[int, str]]  # for each program: number -> name of its storages among the largest


class Trace:
    """Records into a trace file, each rank of a job into its own (``trace_file.file_of``). Any thread may call; no
    failure here fails a checkpoint or the training.

    Raises ConfigError if the file cannot be written, is no trace, or has another writer.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = TraceWriter(file_of(Path(path), _rank()))
        self._lock = threading.Lock()
        self._facts: list[tuple[list[str], array[int]]] = []  # keys and sizes of the last checkpoint's storages
        self._largest: list[dict[int, str]] = []  # their names, as in Traced
        self._threads: dict[int, int] = {threading.get_ident(): TRAINING}
        self._busy_until: dict[int, list[float]] = {}  # kind -> for each track
        self._ring: list[tuple[float, int]] = []  # a heap of times and changes of bytes
        self._ring_bytes = 0
        self._newest = 0  # checkpoint
        self._in_flight: dict[int, float] = {}  # checkpoint -> when save() was called
        self._optimizer: weakref.ref[Any] | None = None  # the first to step; its steps end iterations
        self._step_begin: float | None = None  # of the open step
        self._step_end: float | None = None  # of the step before
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._name_track(TRAINING, "training")

    def close(self) -> None:
        if self._file.inherited:
            return
        for hook in self._hooks:
            hook.remove()
        with self._lock:
            self._flush_ring(math.inf)
        self._file.close()

    def begin(
        self,
        begin: float,
        files: list[str],
        programs: list[list[Extent]],
        views: list[TensorViews],
        name_of: Callable[[TensorView], str],
    ) -> Traced:
        """Begins a checkpoint, before its first copy; ``end`` or ``forget`` must follow. Calls ``name_of``, which is
        slow, only if the storages differ from those of the checkpoint before."""
        facts = [(file.keys, file.sizes) for file in views]
        if facts != self._facts:
            self._facts, self._largest = facts, [{} for _ in views]
            places = ((nbytes, file, at) for file, (_, sizes) in enumerate(facts) for at, nbytes in enumerate(sizes))
            for _, file, at in heapq.nlargest(LARGEST, places, key=itemgetter(0)):
                self._largest[file][at] = name_of(views[file][at])
        with self._lock:
            number = self._newest = next(_numbers)
            self._in_flight[number] = begin
            return Traced(number, files, programs, self._largest)

    def forget(self, traced: Traced) -> None:
        """Drops a checkpoint that failed before the background took it."""
        with self._lock:
            self._in_flight.pop(traced.number, None)

    def saved(self, metrics: CheckpointMetrics, begin: float) -> None:
        """Records a save() that returns now and was called at ``begin``."""
        track = self._thread_track()
        args = {"checkpoint": self._newest, "step": metrics.step}
        self._file.span("save()", track, begin, begin + metrics.save_blocked_s, args=args)
        parts = {"wait for a place": metrics.in_flight_wait_s, "plan": metrics.plan_s}
        for name, seconds in (parts | {"eager copy": metrics.eager_wait_s}).items():
            self._file.span(name, track, begin, begin + seconds, args=args)
            begin += seconds
        begin -= metrics.eager_wait_s + metrics.plan_s
        for phase in PLAN_PHASES:
            seconds = getattr(metrics, phase)
            name = f"plan: {phase.removesuffix('_s').replace('_', ' ')}"
            self._file.span(name, track, begin, begin + seconds, args=args)
            begin += seconds
        self._sample_memory()

    def gate(self, traced: Traced, step: int | None, begin: float) -> None:
        """Records the wait of an optimizer step from ``begin`` until now."""
        end = time.perf_counter()
        if end - begin > _SHORTEST_S:
            args = {"checkpoint": traced.number, "step": step}
            self._file.span("gate", self._thread_track(), begin, end, args=args)

    def end(
        self,
        traced: Traced,
        metrics: CheckpointMetrics,
        *,
        path: Path,
        begin: float,
        created: tuple[float, float],
        engine_begin: float,
        error: Exception | None,
    ) -> None:
        """Records a checkpoint that is durable or has failed. ``begin`` is when save() was called, ``created`` the span
        in which the files were created, ``engine_begin`` the zero of ``metrics.timeline``."""
        args = {"checkpoint": traced.number, "step": metrics.step}
        facts = {f.name: getattr(metrics, f.name) for f in dataclasses.fields(metrics) if f.name != "timeline"}
        end = begin + metrics.durable_s
        whole = {**args, "path": str(path), "metrics": facts, "error": error and str(error)}
        spans: list[tuple[int, str, float, float, dict[str, Any]]] = [(SAVES, path.name, begin, end, whole)]
        spans.append((COMMITS, "create", *created, args))
        if error is None:
            synced = begin + metrics.synced_s
            spans.append((COMMITS, "fsync", begin + metrics.written_s, synced, args))
            spans.append((COMMITS, "commit", synced, end, args))
        ring: list[tuple[float, int]] = []
        tensor_of = _tensors_in(traced)
        for chunk in metrics.timeline:
            if not chunk.copy_end_s:
                continue  # the checkpoint failed before this copy
            copy_begin, copy_end = engine_begin + chunk.copy_begin_s, engine_begin + chunk.copy_end_s
            about = {**args, "file": traced.files[chunk.file], "offset": chunk.offset, "bytes": chunk.nbytes}
            tensor = tensor_of(chunk)
            if tensor is not None:
                about["tensor"] = tensor
            if chunk.ring_wait_s:
                spans.append((RING, "wait for the ring", copy_begin - chunk.ring_wait_s, copy_begin, about))
            spans.append((COPIES, tensor or "copy", copy_begin, copy_end, about))
            if chunk.write_end_s:
                write_begin, write_end = engine_begin + chunk.write_begin_s, engine_begin + chunk.write_end_s
                spans.append((WRITES, tensor or "write", write_begin, write_end, about))
            taken = -(-chunk.nbytes // PAGE_BYTES) * PAGE_BYTES
            ring += (copy_begin, taken), (engine_begin + (chunk.write_end_s or chunk.copy_end_s), -taken)
        self._sample_memory()
        with self._lock:
            for kind, name, first, last, about in sorted(spans, key=lambda span: span[2]):
                self._file.span(name, self._free_track(kind, first, last), first, last, args=about)
            for change in ring:
                heapq.heappush(self._ring, change)
            self._in_flight.pop(traced.number, None)
            self._flush_ring(min(self._in_flight.values(), default=math.inf))
        self._file.flush()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
            self._step_end = None
        if self._optimizer() is optimizer:
            self._step_begin = time.perf_counter()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._step_begin is None or self._optimizer is None or self._optimizer() is not optimizer:
            return  # another optimizer, or a step that called super().step()
        if self._file.inherited:
            return
        begin, self._step_begin = self._step_begin, None
        before, self._step_end = self._step_end, time.perf_counter()
        track = self._thread_track()
        if before is not None:
            self._file.span("iteration", track, before, self._step_end)
        self._file.span("optimizer.step", track, begin, self._step_end)
        self._sample_memory()
        self._file.flush_if_due()

    def _sample_memory(self) -> None:
        try:
            with open("/proc/self/statm", "rb") as file:
                resident = int(file.read().split()[1]) * _SYSTEM_PAGE_BYTES
        except OSError:  # out of file descriptors
            return
        self._file.put("C", "memory", 0, time.perf_counter(), args={"resident bytes": resident})

    def _thread_track(self) -> int:
        ident = threading.get_ident()
        if ident not in self._threads:
            with self._lock:
                track = self._threads[ident] = TRAINING + len(self._threads)
            self._name_track(track, f"training, thread {track}")
        return self._threads[ident]

    def _free_track(self, kind: int, begin: float, end: float) -> int:
        """Takes the first track of a kind that is free at ``begin``; makes one if none is."""
        tracks = self._busy_until.setdefault(kind, [])
        at = next((at for at, busy_until in enumerate(tracks) if busy_until <= begin), len(tracks))
        if at == len(tracks):
            self._name_track(kind + at, f"{_KINDS[kind]} {at + 1}")
        tracks[at : at + 1] = [end]
        return kind + at

    def _name_track(self, track: int, name: str) -> None:
        self._file.put("M", "thread_name", track, args={"name": name})
        self._file.put("M", "thread_sort_index", track, args={"sort_index": track})

    def _flush_ring(self, until: float) -> None:
        """Writes the counter up to ``until``: checkpoints in flight add nothing from before their save()."""
        while self._ring and self._ring[0][0] < until:
            at, change = heapq.heappop(self._ring)
            self._ring_bytes += change
            if not self._ring or self._ring[0][0] != at:
                self._file.put("C", "ring", 0, at, args={"bytes": self._ring_bytes})


def _rank() -> int:
    """The rank of this process in its job; that of the launcher, as long as the ranks have not met."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    rank = os.environ.get("RANK", "0") if "WORLD_SIZE" in os.environ else "0"
    return int(rank) if rank.isdecimal() else 0


def _tensors_in(traced: Traced) -> Callable[[ChunkEvent], str | None]:
    """Returns a function that names the large tensor with most bytes in a chunk, if there is one."""
    ranges: list[tuple[int, int, int, str]] = []  # file, begin, end, name
    for file, (extents, largest) in enumerate(zip(traced.programs, traced.largest, strict=True)):
        for extent in extents:
            at, rows = extent.offset, extent.rows
            for kind, nbytes, arg in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
                if kind == SOURCE and arg in largest:
                    ranges.append((file, at, at + nbytes, largest[arg]))
                at += nbytes

    def tensor_of(chunk: ChunkEvent) -> str | None:
        overlaps = [
            (min(end, chunk.offset + chunk.nbytes) - max(begin, chunk.offset), name)
            for file, begin, end, name in ranges
            if file == chunk.file and begin < chunk.offset + chunk.nbytes and end > chunk.offset
        ]
        return max(overlaps)[1] if overlaps else None

    return tensor_of
