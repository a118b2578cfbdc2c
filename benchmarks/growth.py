"""How the cost of a checkpoint grows: with the number of tensors, the size of the state, and each knob."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.arms import Arm, ArmKind
from benchmarks.arms.lazy import LazyCkpt
from benchmarks.disk import RAW, timed
from benchmarks.floor import CHUNK_BYTES, Floor
from benchmarks.latency import Case, DurableSave
from benchmarks.paired import Progress, interleaved, ratios, spread
from benchmarks.pictures import Picture
from benchmarks.report import Table
from benchmarks.settings import HASTE, Compute, Settings
from benchmarks.train import contest
from benchmarks.workload import Training
from lazyckpt import CheckpointMetrics

TENSORS = (10, 100, 1_000, 10_000, 100_000)
FIRST_BYTES, FACTOR = 10_000_000, 4  # of the states, and from one to the next
STATE_TENSORS = 300
TENSOR_BYTES = (1 << 20, 8 << 20, 64 << 20, 256 << 20, 1 << 30)
CHUNK_MIB = (1, 2, 4, 8, 16, 32, 64)
RING_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
RING_CHUNK_BYTES = 2 << 20  # small, so that the smallest ring still holds several
IN_FLIGHT = (1, 2, 3, 4)
LAZY, TORCH = "lazyckpt", "torch.save"
ATOMIC = "torch.save, fsync, rename, fsync"


@dataclass
class Saves:
    """Of one state: seconds until a save was durable, by the name of the arm; and what lazyckpt's own metrics say."""

    seconds: dict[str, list[float]]
    metrics: list[CheckpointMetrics]  # those of the first save, too
    failure: str = ""

    def blocked_ms(self) -> list[float]:
        """Of save(), without the first."""
        return [1e3 * m.save_blocked_s for m in self.metrics[1:]]


def _save(case: Case, settings: Settings, progress: Progress, *arms: str) -> Saves:
    """Rounds of `arms` and lazyckpt, with nothing beside them."""
    gc.collect()  # the state before this one
    path = settings.directory / "file"

    def prepare() -> None:
        path.unlink(missing_ok=True)
        os.sync()

    def tell(text: str) -> None:
        progress(f"{case.name}: {text}")

    tell("made")
    model, optimizer = case.build(settings.device)
    nbytes = 3 * sum(parameter.nbytes for parameter in model.parameters())
    directory = settings.directory / case.name.replace(" ", "-")
    with Floor(2 * CHUNK_BYTES, copy_threads=0) as floor, DurableSave(model, optimizer, directory) as save:
        known: dict[str, Callable[[], float]] = {
            LAZY: save,
            TORCH: lambda: _torch_save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path),
            RAW: lambda: floor.raw_write(path, nbytes),
        }
        chosen = {name: known[name] for name in (LAZY, *arms)}
        seconds, failures = interleaved(chosen, settings.pairs, tell, prepare=prepare)
    shutil.rmtree(directory)
    prepare()
    return Saves(seconds, save.metrics, "; ".join(failures.values()))


def _torch_save(state: object, path: Path) -> float:
    with timed() as seconds, open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return seconds[0]


def _torch_save_atomically(state: object, path: Path) -> float:
    """What lazyckpt.save promises: the file is whole and durable under its name, or not there."""
    staged = path.with_name(f".{path.name}.tmp")
    with timed() as seconds:
        _torch_save(state, staged)
        staged.rename(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(folder)
        os.close(folder)
    return seconds[0]


def over_tensors(settings: Settings, progress: Progress) -> Iterator[Table]:
    """The same bytes, in ever more tensors."""
    total = settings.disk_bytes // 2
    columns = ["tensors", "of, KB", "first save(), ms", "save(), ms", "durable, ms", "torch.save + fsync, ms"]
    table = Table(f"{total / 1e9:.2f} GB of AdamW state in ever more tensors", columns)
    table.picture = Picture("tensors", "ms", log_x=True, log_y=True)
    for count in TENSORS if settings.full else TENSORS[:-1]:
        nbytes = total // count // 4 * 4
        case = Case(f"{count} tensors", ((max(1, round(count / 3)), nbytes),))
        found = _save(case, settings, progress, TORCH)
        if found.failure:
            table.missing(f"{count:,}", found.failure)
            continue
        durable_ms, torch_ms = ([1e3 * s for s in found.seconds[name]] for name in (LAZY, TORCH))
        table.add(
            f"{count:,}",
            f"{nbytes / 1e3:,.0f}",
            f"{1e3 * found.metrics[0].save_blocked_s:.1f}",
            spread(found.blocked_ms(), 1),
            spread(durable_ms, 0),
            spread(torch_ms, 0),
        )
        table.picture.add("save() returns", count, found.blocked_ms())
        table.picture.add("durable", count, durable_ms)
        table.picture.add("torch.save + fsync", count, torch_ms)
    table.notes.append("Besides, a scalar step for every third tensor. Nothing runs beside the checkpoint.")
    yield table


def over_sizes(settings: Settings, progress: Progress) -> Iterator[Table]:
    """The same number of tensors, ever larger; then one tensor alone."""
    columns = ["state, GB", "save(), ms", "durable, GB/s", "of raw", "torch.save + fsync, of raw"]
    table = Table(f"A growing AdamW state of {STATE_TENSORS} tensors", columns)
    table.picture = Picture("state, GB", "GB/s, durable", log_x=True)
    for nbytes in _sizes(settings.largest_bytes):
        gigabytes = nbytes / 1e9
        case = Case(f"{gigabytes:.2g} GB", ((STATE_TENSORS // 3, nbytes // STATE_TENSORS // 4 * 4),))
        found = _save(case, settings, progress, RAW, TORCH)
        if found.failure:
            table.missing(f"{gigabytes:.2g}", found.failure)
        else:
            ours, theirs = (_percent(found.seconds[RAW], found.seconds[name]) for name in (LAZY, TORCH))
            rates = {name: [gigabytes / s for s in values] for name, values in found.seconds.items()}
            table.add(f"{gigabytes:.2g}", spread(found.blocked_ms(), 1), spread(rates[LAZY]), ours, theirs)
            for name, values in rates.items():
                table.picture.add(name, gigabytes, values)
    table.notes.append(
        f"At most {settings.largest_bytes / 1e9:.2g} GB: AdamW needs a third more for gradients, and the ring up to "
        "a quarter of the memory that is free. Nothing runs beside the checkpoint."
    )
    yield table
    yield _over_tensor_size(settings, progress)


def _sizes(largest: int) -> Iterator[int]:
    """In bytes, up to the largest."""
    nbytes = FIRST_BYTES
    while nbytes < largest:
        yield nbytes
        nbytes *= FACTOR
    yield largest


def _over_tensor_size(settings: Settings, progress: Progress) -> Table:
    """001 fig. 14: one tensor."""
    import lazyckpt

    table = Table("Durable write of one tensor, GB/s", ["tensor, MiB", RAW, LAZY, TORCH, ATOMIC, f"{LAZY}, of raw"])
    table.picture = Picture("tensor, MiB", "GB/s, durable", log_x=True)
    path = settings.directory / "tensor.pt"

    def prepare() -> None:
        path.unlink(missing_ok=True)
        os.sync()

    with Floor(4 * CHUNK_BYTES, copy_threads=0) as floor:
        for nbytes in TENSOR_BYTES:
            if nbytes > settings.largest_bytes:
                break
            state = {"tensor": torch.randn(nbytes // 4, device=settings.device)}
            arms: dict[str, Callable[[], float]] = {
                RAW: partial(floor.raw_write, path, nbytes),
                LAZY: partial(_timed_call, partial(lazyckpt.save, state, path)),
                TORCH: partial(_torch_save, state, path),
                ATOMIC: partial(_torch_save_atomically, state, path),
            }
            mib = nbytes >> 20
            seconds, failures = interleaved(
                arms, settings.pairs, lambda text, mib=mib: progress(f"{mib} MiB: {text}"), prepare=prepare
            )
            rates = {name: [nbytes / s / 1e9 for s in values] for name, values in seconds.items()}
            table.add(str(mib), *(spread(rates[name]) for name in arms), _percent(seconds[RAW], seconds[LAZY]))
            table.notes += [f"{name} is missing at {mib} MiB: {why}" for name, why in failures.items()]
            for name, values in rates.items():
                table.picture.add(name, mib, values)
    return table


def _timed_call(call: Callable[[], object]) -> float:
    with timed() as seconds:
        call()
    return seconds[0]


def _percent(raw_s: list[float], seconds: list[float]) -> str:
    return f"{spread([100 * ratio for ratio in ratios(raw_s, seconds)], 0)} %"


def over_knobs(settings: Settings, progress: Progress) -> Iterator[Table]:
    """In a training, over none: each knob alone, the others as `benchmarks/arms/lazy.py` has them."""
    chunks = [(mib, partial(LazyCkpt, ring=1.0, chunk_bytes=mib << 20)) for mib in CHUNK_MIB]
    yield _knob("chunk, MiB", chunks, settings, progress, settings.compute)
    rings = [(share, partial(LazyCkpt, ring=share, chunk_bytes=RING_CHUNK_BYTES)) for share in RING_SHARES]
    yield _knob("ring, part of the state", rings, settings, progress, settings.compute)
    # Where the write cannot hide: otherwise none is in flight any more when the next begins.
    flights = [(n, partial(LazyCkpt, ring=1.0, max_in_flight=n)) for n in IN_FLIGHT]
    yield _knob("checkpoints in flight", flights, settings, progress, HASTE)


def _knob(
    knob: str, arms: list[tuple[float, Callable[..., Arm]]], settings: Settings, progress: Progress, compute: Compute
) -> Table:
    kinds = {value: ArmKind(f"{value:g}", make) for value, make in arms}
    training = Training(settings.state_bytes // 2, sequences=1, device=settings.device)
    directory = settings.directory / knob.replace(" ", "-")
    with contest(list(kinds.values()), training, settings.steps, directory, **compute) as one:
        one.run(settings.pairs, lambda text: progress(f"{knob} {text}"))
    table = Table(f"Over {knob}", [knob, "time over none", "blocked, ms", "durable, GB/s"])
    table.picture = Picture(knob, "time over no checkpoints", log_x=True)
    for value, kind in kinds.items():
        series = one.series[kind.name]
        if series.failure:
            table.missing(kind.name, series.failure)
            continue
        blocked = spread([1e3 * s for s in series.blocked_s], 1)
        table.add(kind.name, spread(series.ratio), blocked, spread(series.durable))
        table.picture.add("", value, series.ratio)
    table.notes.append(
        f"{one.state_bytes / 1e9:.2f} GB of AdamW state, a checkpoint at every step; forward + backward "
        f"{one.compute_s:.2f} s, raw write of the state {one.write_s:.2f} s."
    )
    return table
