"""What each part of the pipeline is worth: everything on, and one part switched off (DataStates-LLM, contribution 5;
FastPersist, figure 11).

A part that lazyckpt has no knob for is switched off inside lazyckpt by this file, in the one arm that goes without it.
Copying and checksumming in one pass is switched off in the floor arm, whose copy is the same: the engine has no other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

from benchmarks.arms import KINDS, ArmKind
from benchmarks.arms.floor import FloorArm
from benchmarks.arms.lazy import LazyCkpt
from benchmarks.latency import Case, DurableSave
from benchmarks.paired import Progress, differences, interleaved, median, ratios, spread, worse
from benchmarks.pictures import Picture
from benchmarks.report import Table
from benchmarks.settings import HASTE, Settings
from benchmarks.train import Contest, contest
from benchmarks.workload import Training
from lazyckpt import _engine
from lazyckpt.capture.ownership import Ownership
from lazyckpt.pipeline.persist import Flight

ALL_ON, FLOOR = "everything on", "floor"
ACCUMULATION = (1, 4, 16, 64)  # micro-batches in a step
SMALL = Case("10,000 tensors of 10 KB", ((3_334, 10_000),))
SMALL_CHUNK_BYTES = 16 << 10


class _AllEager(Ownership):
    """Nobody is trusted to leave its storages alone until it steps."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.lazy_owners = dict.fromkeys(self.lazy_owners, 0)


class NotLazy(LazyCkpt):
    def save(self, step: int) -> None:
        with mock.patch("lazyckpt.pipeline.launch.Ownership", _AllEager):
            super().save(step)


class NotStreamed(LazyCkpt):
    """The first write begins when the last byte is copied."""

    def __init__(self, *arguments: Any, **knobs: Any) -> None:
        super().__init__(*arguments, **knobs)
        background = self._checkpointer._saver._background
        persist = background._persist

        def persist_when_copied(flight: Flight) -> None:
            flight.job.wait_released()
            persist(flight)

        background._persist = persist_when_copied  # type: ignore[method-assign]


class NewRing(LazyCkpt):
    """A staging buffer of its own for every checkpoint, as if nobody kept one."""

    def save(self, step: int) -> None:
        saver = self._checkpointer._saver
        config, used = saver.config, saver.engine
        saver._buffer.engine = _engine.Engine(
            ring_bytes=int(config.host_buffer_bytes),
            chunk_bytes=config.chunk_bytes,
            io_depth=config.io_depth,
            copy_threads=config.copy_threads,
        )
        saver.engine.reserve(int(config.host_buffer_bytes))
        super().save(step)
        # The one before the last checkpoint is durable by now; of the last, the engine must live.
        self._used = used

    _used: _engine.Engine | None = None


WITHOUT = {
    kind.name: kind
    for kind in [
        ArmKind("lazy copies: all is copied in save()", partial(NotLazy, ring=1.0)),
        ArmKind("one ring for all: a new one each time", partial(NewRing, ring=1.0)),
        ArmKind("streaming: written when all is copied", partial(NotStreamed, ring=1.0)),
        ArmKind("direct I/O: buffered", partial(LazyCkpt, ring=1.0, direct_io=False)),
        ArmKind("io_uring: a thread pool", partial(LazyCkpt, ring=1.0, io_backend="posix")),
        ArmKind("writes in flight: one", partial(LazyCkpt, ring=1.0, io_depth=1)),
        ArmKind("checkpoints in flight: one", partial(LazyCkpt, ring=1.0, max_in_flight=1)),
        ArmKind("copy threads: one", partial(LazyCkpt, ring=1.0, copy_threads=1)),
        ArmKind("floor, CRC in a second pass", partial(FloorArm, ring=1.0, fused=False)),
    ]
}


def measure(settings: Settings, progress: Progress) -> Iterator[Table]:
    """Once with forward and backward long enough to hide the write, once too short."""
    on = [ArmKind(ALL_ON, partial(LazyCkpt, ring=1.0)), KINDS[FLOOR]]
    training = Training(settings.state_bytes // 2, device=settings.device)
    for name, compute in (("the write can hide", settings.compute), ("the write cannot hide", HASTE)):
        directory = settings.directory / name.replace(" ", "-")
        training.sequences = 1
        with contest([*on, *WITHOUT.values()], training, settings.steps, directory, **compute) as one:
            one.run(settings.pairs, lambda text, name=name: progress(f"{name}: {text}"))
        yield _table(one, name)
    yield _small_tensors(settings, progress)
    yield _accumulation(settings, progress)


def _table(one: Contest, name: str) -> Table:
    columns = ["without", "time over none", "minus all on", "blocked, ms", "durable, GB/s", "of all on", "worse in"]
    table = Table(f"One part off: {name}", columns, picture=Picture("without", "time over no checkpoints"))
    assert table.picture is not None
    for series in one.series.values():
        on = one.series[FLOOR if series.name.startswith(FLOOR) else ALL_ON]
        if series.failure:
            table.missing(series.name, series.failure)
            continue
        compared = ["-", "-", "-"]
        if series is not on:
            compared = [
                spread(differences(series.ratio, on.ratio)),
                f"{median(ratios(series.durable, on.durable)):.0%}",
                f"time {worse(series.ratio, on.ratio)}, blocked {worse(series.blocked_s, on.blocked_s)}, "
                f"durable {worse(series.durable_s, on.durable_s)}",
            ]
        table.add(
            series.name,
            spread(series.ratio),
            compared[0],
            spread([1e3 * s for s in series.blocked_s], 1),
            spread(series.durable),
            *compared[1:],
        )
        table.picture.add("", series.name, series.ratio)
    table.notes += [
        f"{one.state_bytes / 1e9:.2f} GB of AdamW state, a checkpoint in each of {one.steps} steps; forward + backward "
        f"{one.compute_s:.2f} s, raw write of the state {one.write_s:.2f} s.",
        "The floor arm without fusion is compared with the floor arm, all others with everything on.",
        "Worse in: pairs of a round in which it was; a part that gives nothing is worse in about half of them.",
    ]
    return table


def _small_tensors(settings: Settings, progress: Progress) -> Table:
    """Coalescing, in the other sense: neighbouring small tensors are one write."""
    model, optimizer = SMALL.build(settings.device)
    table = Table(f"{SMALL.name}: written together or each by itself", ["writes", "durable, ms", "save(), ms"])
    table.picture = Picture("", "ms until durable")
    chunks = {"together, in chunks of 8 MiB": 8 << 20, "each by itself": SMALL_CHUNK_BYTES}
    with ExitStack() as stack:
        arms = {
            name: stack.enter_context(DurableSave(model, optimizer, settings.directory / name, chunk_bytes=chunk_bytes))
            for name, chunk_bytes in chunks.items()
        }
        seconds, failures = interleaved(arms, settings.pairs, progress, prepare=os.sync)
        for name, values in seconds.items():
            if name in failures:
                table.missing(name, failures[name])
                continue
            blocked_ms = [1e3 * metrics.save_blocked_s for metrics in arms[name].metrics[1:]]
            table.add(name, spread([1e3 * s for s in values], 0), spread(blocked_ms, 1))
            table.picture.add("", name, [1e3 * s for s in values])
    table.notes.append("Nothing runs beside the checkpoint; of its time, save() is the same work in both.")
    return table


def _accumulation(settings: Settings, progress: Progress) -> Table:
    """The more micro-batches in a step, the more time to hide a checkpoint behind (FastPersist, figure 11a)."""
    names = ("lazyckpt", "torch.save")
    table = Table(
        "A checkpoint at every step, over gradient accumulation",
        ["micro-batches", "forward + backward, s", *(f"{name}: time over none" for name in names)],
        picture=Picture("micro-batches in a step", "time over no checkpoints", log_x=True),
    )
    assert table.picture is not None
    for count in ACCUMULATION if settings.full else ACCUMULATION[:3]:
        training = Training(settings.state_bytes // 5, sequences=1, device=settings.device, micro_batches=count)
        steps = max(2, settings.steps // count)
        directory = settings.directory / f"accumulation-{count}"
        kinds = [KINDS[name] for name in names]
        with contest(kinds, training, steps, directory, compute_over_write=0.0, min_compute_s=0.0) as one:
            one.run(settings.pairs, lambda text, count=count: progress(f"{count} micro-batches: {text}"))
        table.add(str(count), f"{one.compute_s:.2f}", *(spread(one.series[name].ratio) for name in names))
        for name in names:
            table.picture.add(name, count, one.series[name].ratio)
    table.notes.append(f"{one.state_bytes / 1e9:.2f} GB of AdamW state.")
    return table
