"""The experiments of the papers behind lazyckpt, scaled to the machine.

001 is DataStates-LLM with state providers, 002 the report on PCcheck, 003 FastPersist, 004 DataStates-LLM (HPDC 2024).
The arms are each engine's best, or those asked for.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO
from unittest import mock

import torch

from benchmarks.arms import KINDS, ArmKind
from benchmarks.arms.lazy import LazyCkpt
from benchmarks.disk import timed
from benchmarks.paired import Progress, interleaved, median, spread
from benchmarks.pictures import Picture
from benchmarks.report import Table
from benchmarks.settings import Settings
from benchmarks.timeline import timeline
from benchmarks.train import Contest, Series, contest
from benchmarks.workload import Training

MODEL_SHARES = (0.1, 0.3, 1.0)  # of the state of `train`; --full adds twice that
INTERVALS = (1, 2, 5, 10)
BUFFER_MIB = (1, 2, 4, 8, 16, 32, 64, 128)
BUFFERED_BYTES = (16 << 20, 512 << 20)
COPY_THREADS = (1, 2, 4)
ACCUMULATION = (1, 4, 16, 64)  # micro-batches in a step
IO_DEPTH = 8


def over_models(settings: Settings, progress: Progress) -> Iterator[Table]:
    """001 fig. 7 to 9, 004 fig. 7 and 8."""
    title = "a checkpoint at every step, over model size"
    columns = ["state, GB", "without"]
    names = [kind.name for kind in settings.kinds]
    tables = [
        Table(f"Effective checkpoint throughput, bytes over blocked time, GB/s: {title}", ["state, GB", *names]),
        Table(f"A step, s: {title}", [*columns, *names]),
        Table(f"End to end over no checkpoints, the last drain included: {title}", ["state, GB", *names]),
    ]
    pictures = [
        Picture("state, GB", "bytes / blocked time, GB/s", log_x=True, log_y=True),
        Picture("state, GB", "s per step", log_x=True, log_y=True),
        Picture("state, GB", "time over no checkpoints", log_x=True),
    ]
    for share in (*MODEL_SHARES, 2.0) if settings.full else MODEL_SHARES:
        training = Training(int(share * settings.state_bytes), device=settings.device)
        directory = settings.directory / f"{share}"
        with contest(settings.kinds, training, settings.steps, directory, **settings.compute) as one:
            one.run(settings.pairs, lambda text, share=share: progress(f"{share} of the state: {text}"))
        gigabytes = one.state_bytes / 1e9
        for table, picture, figure in zip(tables, pictures, (_effective, _step, _ratio), strict=True):
            without = [s for series in one.series.values() for s in series.none_step_s]
            cells = [spread(without)] if "without" in table.columns else []
            for series in one.series.values():
                values = [] if series.failure else figure(series, one)
                cells.append(spread(values))
                picture.add(series.name, round(gigabytes, 2), values)
            table.add(f"{gigabytes:.2f}", *cells)
        _note_failures(tables[0], one)
    for table, picture in zip(tables, pictures, strict=True):
        table.picture = picture
        yield table


def _effective(series: Series, one: Contest) -> list[float]:
    return [one.state_bytes / s / 1e9 for s in series.blocked_s]


def _step(series: Series, _: Contest) -> list[float]:
    return series.step_s


def _ratio(series: Series, _: Contest) -> list[float]:
    return series.ratio


def _note_failures(table: Table, one: Contest) -> None:
    table.notes += [f"{series.name} is missing: {series.failure}" for series in one.series.values() if series.failure]


def over_interval(settings: Settings, progress: Progress) -> Iterator[Table]:
    """001 fig. 13, 004 fig. 11: with forward and backward as long as the raw write, not twice that."""
    table = Table(
        "Time over no checkpoints, over the interval between them",
        ["steps between checkpoints", *(kind.name for kind in settings.kinds)],
        picture=Picture("steps between checkpoints", "time over no checkpoints", log_x=True),
    )
    assert table.picture is not None
    training = Training(settings.state_bytes // 2, device=settings.device)
    compute = {"min_compute_s": 0.0, "compute_over_write": 1.0}
    steps = max(INTERVALS)
    with contest(settings.kinds, training, steps, settings.directory / "interval", **compute) as one:
        for every in INTERVALS:
            one.restart(every)
            one.run(settings.pairs, lambda text, every=every: progress(f"every {every} steps: {text}"))
            table.add(str(every), *(spread(series.ratio) for series in one.series.values()))
            for series in one.series.values():
                table.picture.add(series.name, every, series.ratio)
    table.notes.append(
        f"{one.state_bytes / 1e9:.2f} GB of AdamW state, {steps} steps; forward + backward {one.compute_s:.2f} s, raw "
        f"write of the state {one.write_s:.2f} s."
    )
    _note_failures(table, one)
    yield table


def phases(settings: Settings, progress: Progress) -> Iterator[Table]:
    """001 table III: of each checkpoint of a training, by lazyckpt's own metrics; of torch.save, by the time inside of
    its writes. And fig. 15."""
    training = Training(settings.state_bytes, device=settings.device)
    ours = LazyCkpt(training, _made(settings.directory / "lazyckpt"), ring=1.0)
    theirs = _made(settings.directory / "torch.save") / "state.pt"
    serializing, writing = [], []
    try:
        for number in range(1, settings.pairs + 2):
            progress(f"{number}/{settings.pairs + 1}")
            ours.save(number)
            training.compute()
            training.optimizer.step()
            ours.drain()
            with timed() as seconds, open(theirs, "wb") as file:
                out = _Timed(file)
                torch.save(training.state(), out)
                out.sync()
            serializing.append(seconds[0] - out.seconds)
            writing.append(out.seconds)
            theirs.unlink()
            os.sync()
    finally:
        ours.close()
    table = Table("Where the time of a checkpoint goes, ms", ["", "lazyckpt", "torch.save + fsync"])
    metrics = ours.metrics[1:]

    def of(field: str) -> str:
        return spread([1e3 * getattr(m, field) for m in metrics], 1)

    table.add("waits: walk the state, pickle, lay out", of("plan_s"), spread([1e3 * s for s in serializing[1:]], 1))
    table.add("waits: eager bytes", of("eager_wait_s"), "-")
    table.add("waits: gate", of("gate_blocked_s"), "-")
    table.add("background: copy and CRC, all threads added", of("copy_s"), "-")
    table.add("background: no room in the ring", of("ring_wait_s"), "-")
    table.add("background: first byte to last byte written", of("write_s"), spread([1e3 * s for s in writing[1:]], 1))
    table.add("background: sync and commit", of("commit_s"), "-")
    table.notes += [
        f"{metrics[0].bytes / 1e9:.2f} GB, {metrics[0].storages} storages, {len(metrics)} checkpoints after the first.",
        "Training waits for all of torch.save. Its writes and its fsync stand in the line of writing, all else in the "
        "first line.",
        timeline(training, settings.directory / "timeline", settings.output / "phases-timeline"),
    ]
    yield table


class _Timed(io.RawIOBase):
    """Knows how long it took to write to ``file``."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seconds = 0.0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        with timed() as seconds:
            written = self._file.write(data)
        self.seconds += seconds[0]
        return written

    def sync(self) -> None:
        with timed() as seconds:
            self._file.flush()
            os.fsync(self._file.fileno())
        self.seconds += seconds[0]


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


def over_buffers(settings: Settings, progress: Progress) -> Iterator[Table]:
    """003 fig. 7. Single: the ring is one chunk, which is filled, written, filled again. Double: two."""
    from lazyckpt import _engine, functional

    for nbytes in BUFFERED_BYTES if settings.full else BUFFERED_BYTES[:1]:
        state = {"tensor": torch.randn(nbytes // 4, device=settings.device)}
        path = settings.directory / "buffered.pt"

        def save_with(engine: _engine.Engine, state: object = state, path: Path = path) -> float:
            with mock.patch.object(functional, "process_engine", lambda: engine), timed() as seconds:
                functional.save(state, path)
            return seconds[0]

        def save_torch(state: object = state, path: Path = path) -> float:
            with timed() as seconds, open(path, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            return seconds[0]

        arms: dict[str, Callable[[], float]] = {"torch.save": save_torch}
        sizes = [mib for mib in BUFFER_MIB if mib << 20 <= nbytes]
        for mib in sizes:
            for name, chunks in (("single", 1), ("double", 2)):
                engine = _engine.Engine(
                    ring_bytes=chunks * (mib << 20), chunk_bytes=mib << 20, io_depth=IO_DEPTH, copy_threads=1
                )
                engine.reserve(chunks * (mib << 20))
                arms[f"{name} {mib}"] = partial(save_with, engine)
        seconds, failures = interleaved(
            arms, settings.pairs, progress, prepare=lambda path=path: (path.unlink(missing_ok=True), os.sync())[1]
        )
        yield _buffers_table(nbytes, sizes, seconds, failures)


def _buffers_table(nbytes: int, sizes: list[int], seconds: dict[str, list[float]], failures: dict[str, str]) -> Table:
    table = Table(
        f"Durable write of one tensor of {nbytes >> 20} MiB over the I/O buffer, over torch.save + fsync",
        ["buffer, MiB", "single", "double", "double, GB/s"],
        picture=Picture("I/O buffer, MiB", "bandwidth over torch.save + fsync", log_x=True),
    )
    assert table.picture is not None
    base = seconds["torch.save"]
    for mib in sizes:
        cells = []
        for name in ("single", "double"):
            gains = [other / own for own, other in zip(seconds[f"{name} {mib}"], base, strict=False)]
            cells.append(spread(gains))
            table.picture.add(name, mib, gains)
        table.add(str(mib), *cells, spread([nbytes / s / 1e9 for s in seconds[f"double {mib}"]]))
    table.notes += [f"torch.save + fsync: {spread([nbytes / s / 1e9 for s in base])} GB/s."]
    table.notes += [f"{name} is missing: {why}" for name, why in failures.items()]
    return table


def over_threads(settings: Settings, progress: Progress) -> Iterator[Table]:
    """002 fig. 5 and 6."""
    kinds = [KINDS["torch.save"]] + [
        ArmKind(f"lazyckpt, {n} copy thread{'s' * (n > 1)}", partial(LazyCkpt, ring=1.0, copy_threads=n))
        for n in COPY_THREADS
    ]
    table = Table(
        "Time per checkpoint and of the training, over copy threads",
        ["arm", "dtype", "a checkpoint, s", "a step, s", "time over none"],
        picture=Picture("", "s per checkpoint, until durable"),
    )
    assert table.picture is not None
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        training = Training(settings.state_bytes // 2, device=settings.device, dtype=dtype)
        with contest(kinds, training, settings.steps, settings.directory / name, **settings.compute) as one:
            one.run(settings.pairs, lambda text, name=name: progress(f"{name}: {text}"))
        for series in one.series.values():
            if series.failure:
                table.missing(series.name, series.failure)
                continue
            table.add(series.name, name, spread(series.durable_s), spread(series.step_s), spread(series.ratio))
            table.picture.add(name, series.name, series.durable_s)
        table.notes.append(
            f"{name}: {one.state_bytes / 1e9:.2f} GB of AdamW state in that type, forward + backward "
            f"{one.compute_s:.2f} s, a step without checkpoints "
            f"{median([s for series in one.series.values() for s in series.none_step_s]):.2f} s."
        )
    yield table


def over_accumulation(settings: Settings, progress: Progress) -> Iterator[Table]:
    """003 fig. 11a: the more micro-batches in a step, the more time to hide a checkpoint behind."""
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
    yield table
