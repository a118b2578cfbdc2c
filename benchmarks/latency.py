"""What lazyckpt costs the training thread: how soon `save()` returns, how long a fork during a save takes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.paired import Progress, differences, reason, spread
from benchmarks.report import Table
from benchmarks.settings import Settings
from benchmarks.workload import HOST
from lazyckpt import CheckpointMetrics

FORKS = 4
TIMEOUT_S = 600
LEAST_SAVES = 7


@dataclass(frozen=True)
class Case:
    """AdamW over groups of equal parameters; each one is three tensors of its size, and a scalar step."""

    name: str
    parameters: tuple[tuple[int, int], ...]  # (count, bytes of one)

    def build(self, device: torch.device = HOST) -> tuple[torch.nn.ParameterList, torch.optim.Optimizer]:
        model = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(nbytes // 4, device=device))
            for count, nbytes in self.parameters
            for _ in range(count)
        )
        for parameter in model:
            parameter.grad = torch.zeros_like(parameter)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        optimizer.step()
        return model, optimizer


GIGABYTE = Case("1 GB in 300 tensors", ((100, 10_000_000 // 3 // 4 * 4),))
CASES = (
    GIGABYTE,
    Case("the same + 1,000 tensors of 10 KB", (*GIGABYTE.parameters, (334, 10_000))),
    Case("10,000 tensors of 10 KB and less", ((2_500, 10_000),)),
)


ACTIVATION_BYTES = 16 << 20


def measure(settings: Settings, progress: Progress) -> Iterator[Table]:
    """Some saves of every case after the first, and as many rounds of forks; each save is awaited."""
    saves = max(LEAST_SAVES, settings.pairs)
    table = Table("save() returns, ms", ["state", "first save", "later saves", "blocked at the gate"])
    for case in CASES:
        progress(case.name)
        try:
            saved, gated = save_times(case, saves, settings.directory / "saves", settings.device)
        except Exception as error:
            table.missing(case.name, reason(error))
            continue
        table.add(case.name, f"{saved[0]:.1f}", spread(saved[1:], 1), spread(gated[1:], 1))
    table.notes.append("The optimizer steps as soon as save() returns: the gate then costs the copy that nothing hid.")
    yield table
    yield _fork_table(saves, settings.directory / "forks", progress)


def save_times(case: Case, saves: int, directory: Path, device: torch.device = HOST) -> tuple[list[float], list[float]]:
    """Milliseconds in `save()` and from then until the optimizer begins; the first save and `saves` more."""
    import lazyckpt

    model, optimizer = case.build(device)
    begun = 0.0

    def optimizer_begins(*_: object) -> None:
        nonlocal begun
        begun = time.perf_counter()

    optimizer.register_step_pre_hook(optimizer_begins)
    saved, gated = [], []
    with lazyckpt.Checkpointer(directory / case.name.replace(" ", "-"), keep_last=1) as checkpointer:
        checkpointer.track(model=model, optimizer=optimizer)
        optimizer.step()
        for step in range(1, saves + 2):
            # Training allocates and frees activations in every step, which teaches malloc to keep freed memory. Without
            # them, the Python objects of each save are paged in anew.
            torch.empty(ACTIVATION_BYTES, dtype=torch.uint8)
            start = time.perf_counter()
            handle = checkpointer.save(step)
            returned = time.perf_counter()
            optimizer.step()
            saved.append(1e3 * (returned - start))
            gated.append(1e3 * (begun - returned))
            handle.result(timeout=TIMEOUT_S)
    return saved, gated


class DurableSave:
    """Called, takes a step and saves once with nothing beside it: the seconds until that is durable. A context manager
    for its checkpointer, whose knobs are `knobs`."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path, **knobs: Any) -> None:
        import lazyckpt

        self.metrics: list[CheckpointMetrics] = []  # of every save
        self._optimizer = optimizer
        self._checkpointer = lazyckpt.Checkpointer(directory, keep_last=1, **knobs)
        self._checkpointer.track(model=model, optimizer=optimizer)

    def __call__(self) -> float:
        self._optimizer.step()
        start = time.perf_counter()
        handle = self._checkpointer.save(len(self.metrics) + 1)
        handle.result(timeout=TIMEOUT_S)
        seconds = time.perf_counter() - start
        self.metrics.append(handle.metrics)
        return seconds

    def __enter__(self) -> DurableSave:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()


def _fork_table(rounds: int, directory: Path, progress: Progress) -> Table:
    table = Table(f"{FORKS} forks, children alive together, ms each", ["process", "fork() returns", "slowest"])
    progress("forks")
    try:
        idle, busy = _fork_times(rounds, directory)
    except Exception as error:
        table.missing("during a save of 1 GB", reason(error))
        return table
    for name, times in (
        ("with nothing in flight", idle),
        ("during a save of 1 GB", busy),
        ("added by the save", differences(busy, idle)),
    ):
        table.add(name, spread(times, 1), f"{max(times, default=float('nan')):.1f}")
    table.notes += [
        "A fork copies the page tables of all memory, here 1 GB of tensors and their gradients: the first row.",
        f"Rounds in which the save was over before the last fork are dropped: {len(busy)} forks count.",
    ]
    return table


def _fork_times(rounds: int, directory: Path) -> tuple[list[float], list[float]]:
    """Milliseconds of each fork, with no save in flight and, just after, with one."""
    import lazyckpt

    model, optimizer = GIGABYTE.build()
    idle: list[float] = []
    busy: list[float] = []
    with lazyckpt.Checkpointer(directory, keep_last=1) as checkpointer:
        checkpointer.track(model=model, optimizer=optimizer)
        optimizer.step()
        for step in range(1, rounds + 1):
            without = _fork_milliseconds()
            handle = checkpointer.save(step)
            during = _fork_milliseconds()
            if not handle.done():
                idle += without
                busy += during
            handle.result(timeout=TIMEOUT_S)
            optimizer.step()
    return idle, busy


def _fork_milliseconds() -> list[float]:
    """As a DataLoader starts its workers: one after the other, all alive until the last has started."""
    read_end, write_end = os.pipe()
    times, children = [], []
    for _ in range(FORKS):
        start = time.perf_counter()
        child = os.fork()
        if child == 0:
            os.close(write_end)
            os.read(read_end, 1)  # until the parent closes its end
            os._exit(0)
        times.append(1e3 * (time.perf_counter() - start))
        children.append(child)
    os.close(write_end)
    for child in children:
        os.waitpid(child, 0)
    os.close(read_end)
    return times
