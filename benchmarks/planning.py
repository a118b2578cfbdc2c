"""What `save()` plans before it returns, beside the two calls of `state_dict()` that a training would make itself.

Each state has a process of its own, so that the first save of a process is seen, too. A save and the two calls take
turns, and each comes after an optimizer step of its own: a step leaves the processor's caches without the objects that
`save()` walks, and a loop without steps would measure warm ones. The garbage collector runs as in any training.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import isqrt
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch

from benchmarks.latency import ACTIVATION_BYTES, TIMEOUT_S, Case
from benchmarks.paired import ArmFailed, Progress, interleaved, median, ratios, reason, spread
from benchmarks.ranks.tables import calls
from benchmarks.report import Table
from benchmarks.settings import Settings
from benchmarks.ways_in import CHECKPOINTER, WAYS, Ways
from lazyckpt.metrics import PLAN_PHASES, CheckpointMetrics

SAVES = 20
SMALL_BYTES = 8192
LAYERS = 9  # of a block, which is a module, too
SAVE, PLAN, STATE_DICTS = "save()", "plan", "two state_dict()"
RATIO = "plan / state_dict()"
RANKS_GOAL_MS = 5


class State(Protocol):
    """A model and its optimizer, which has stepped."""

    def build(self, device: torch.device) -> tuple[torch.nn.Module, torch.optim.Optimizer]: ...


@dataclass(frozen=True)
class Nested:
    """AdamW over blocks of layers, each a small weight and its bias."""

    blocks: int

    def build(self, device: torch.device) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        width = isqrt(SMALL_BYTES // 4)
        model = torch.nn.Sequential(
            *(
                torch.nn.Sequential(*(torch.nn.Linear(width, width, device=device) for _ in range(LAYERS)))
                for _ in range(self.blocks)
            )
        )
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        optimizer.step()
        return model, optimizer


@dataclass(frozen=True)
class Row:
    """A state, and which medians should be at most how much: milliseconds of `SAVE` and `PLAN`, `RATIO` as it is."""

    state: State
    goals: dict[str, float] = field(default_factory=dict)
    witness: str = "auto"
    full: bool = False  # only with --full
    ways: bool = False  # whether it is saved in other ways, too


def _flat(parameters: int, nbytes: int = SMALL_BYTES) -> Case:
    return Case("", ((parameters, nbytes),))


ROWS = {
    "402 of 0.5 MB": Row(_flat(134, 1 << 19), {RATIO: 4, SAVE: 3}, ways=True),
    "402 of 0.5 MB, no page witness": Row(_flat(134, 1 << 19), {SAVE: 1.5}, witness="versions"),
    "402 of 8 KB": Row(_flat(134), {RATIO: 4}),
    "300 modules": Row(Nested(30)),
    "10,002 of 8 KB": Row(_flat(3_334), {RATIO: 2.5}),
    "100,000 of 8 KB": Row(_flat(33_334), {PLAN: 80}, full=True),
}


@dataclass
class Save:
    """One call of `save()`, in milliseconds."""

    wall: float
    processor: float  # of the thread that calls
    collector: float  # garbage collections inside of it
    collector_after: float  # and in the step before the next save
    plan: float
    phases: dict[str, float]

    @property
    def planned(self) -> float:
        """What Python and the engine compute, without the kernel's part and the bytes."""
        return self.plan - self.phases["watch_s"] - self.phases["eager_copy_s"]


@dataclass
class Result:
    first: Save
    saves: list[Save]
    state_dicts: list[float]  # milliseconds, in the same rounds as the saves
    ways: dict[str, list[float]]  # milliseconds of each of WAYS, in rounds of their own
    state_bytes: int
    eager_bytes: int
    storages: int


def measure(settings: Settings, progress: Progress) -> Iterator[Table]:
    """Every state in a process of its own, then as many ranks as the settings say."""
    results: dict[str, Result] = {}
    failures: dict[str, str] = {}
    for name, row in ROWS.items():
        if row.full and not settings.full:
            continue
        progress(name)
        try:
            results[name] = in_child(name, settings.directory, settings.device)
        except Exception as error:
            failures[name] = reason(error)
    yield _cost(results, failures)
    yield _phases(results)
    yield _other_ways(results)
    yield calls(settings, progress, goal_ms=RANKS_GOAL_MS)


def in_child(name: str, directory: Path, device: torch.device) -> Result:
    command = [sys.executable, "-m", "benchmarks.planning", name, "--directory", str(directory)]
    done = subprocess.run([*command, "--device", str(device)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ArmFailed(f"its process exited with {done.returncode}")
    return told(done.stdout.splitlines()[-1])


def told(line: str) -> Result:
    """What a process told in JSON."""
    found: dict[str, Any] = json.loads(line)
    first, saves = Save(**found["first"]), [Save(**save) for save in found["saves"]]
    return Result(**{**found, "first": first, "saves": saves})


def _cost(results: dict[str, Result], failures: dict[str, str]) -> Table:
    columns = ["state", SAVE, PLAN, STATE_DICTS, RATIO, "first save()", "goal"]
    table = Table(f"What save() plans, ms (medians of {SAVES} saves)", columns)
    for name, result in results.items():
        plans = [save.planned for save in result.saves]
        walls = [save.wall for save in result.saves]
        figures = {SAVE: walls, PLAN: plans, RATIO: ratios(plans, result.state_dicts)}
        goals = [
            f"{figure} ≤ {limit:g}: {'met' if median(figures[figure]) <= limit else 'missed'}"
            for figure, limit in ROWS[name].goals.items()
        ]
        table.add(
            name,
            spread(walls),
            spread(plans),
            spread(result.state_dicts),
            spread(figures[RATIO], 1),
            f"{result.first.wall:.1f}",
            ", ".join(goals) or "-",
        )
    for name, why in failures.items():
        table.missing(name, why)
    storages = "; ".join(
        f"{name}: {one.storages}, {one.state_bytes / 1e6:.1f} MB, {one.eager_bytes / one.state_bytes:.1%} eager"
        for name, one in results.items()
    )
    table.notes += [
        "A save and the two calls, model.state_dict() and optimizer.state_dict(), take turns, each after an optimizer "
        "step of its own. Each checkpoint is durable before the next step. Each state has a process of its own.",
        "The plan is `metrics.plan_s` without `watch_s` and `eager_copy_s`, which save() contains. With a page "
        "witness storages of at most 16 KiB are eager, so save() copies all of the small ones.",
        f"Storages, with AdamW's step counters and random states: {storages}.",
    ]
    return table


def _phases(results: dict[str, Result]) -> Table:
    names = [phase.removesuffix("_s").replace("_", " ") for phase in PLAN_PHASES]
    columns = ["state", *names, "outside the plan", "processor", "collector", "collector after"]
    table = Table("Where the time of save() goes, ms (medians)", columns)
    for name, result in results.items():
        saves = result.saves
        columns_of = [[save.phases[phase] for save in saves] for phase in PLAN_PHASES]
        columns_of += [[save.wall - save.plan for save in saves], [save.processor for save in saves]]
        means = fmean(save.collector for save in saves), fmean(save.collector_after for save in saves)
        table.add(name, *(f"{median(values):.2f}" for values in columns_of), *(f"{mean:.2f}" for mean in means))
    table.notes += [
        "The phases are those of `CheckpointMetrics`. Outside the plan: before it, and the wait for eager copies. "
        "Processor: the time of the calling thread on a core, of all of save().",
        "Collector: garbage collections inside of save(), the mean, since few saves have a long one; after: from then "
        "until the next step has ended.",
    ]
    return table


def _other_ways(results: dict[str, Result]) -> Table:
    table = Table("The same state by other ways in, ms", ["state", *WAYS])
    for name, result in results.items():
        if result.ways:
            table.add(name, *(spread(result.ways[way], 1) for way in WAYS))
    table.notes.append(
        f"{SAVES} rounds; the ways take turns, each after an optimizer step of its own. Each contains two state_dict() "
        f"but builds no other state. {CHECKPOINTER} also saves random states. torch's part of dcp.async_save is left "
        "out: its planner works on another thread."
    )
    return table


class Collections:
    """Milliseconds that the garbage collector took in this process."""

    def __init__(self) -> None:
        self._total, self._begin = 0.0, 0.0

    def take(self) -> float:
        """Those since the last call."""
        taken, self._total = self._total, 0.0
        return taken

    @contextmanager
    def counted(self) -> Iterator[None]:
        gc.callbacks.append(self._note)
        try:
            yield
        finally:
            gc.callbacks.remove(self._note)

    def _note(self, phase: str, about: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "stop":
            self._total += 1e3 * (now - self._begin)
        self._begin = now


class Job:
    """A state that is saved and stepped."""

    def __init__(self, row: Row, directory: Path, device: torch.device) -> None:
        import lazyckpt

        self.saves: list[Save] = []
        self._model, self._optimizer = row.state.build(device)
        self._device, self._directory = device, directory
        self._other_ways = row.ways
        self._collections = Collections()
        self._saved = False  # since the last step
        self._checkpointer = lazyckpt.Checkpointer(directory, keep_last=1, witness=row.witness)
        self._checkpointer.track(model=self._model, optimizer=self._optimizer)
        self._newest = CheckpointMetrics()

    def measure(self, saves: int) -> Result:
        """Rounds of a save and the two calls, after a first save; then of other ways in."""
        with self._checkpointer, self._collections.counted():
            self._step()
            self._save()
            arms = {SAVE: self._save, STATE_DICTS: self._state_dicts}
            times, failures = interleaved(arms, saves, lambda text: None, prepare=self._step)
        if failures:
            raise ArmFailed("; ".join(failures.values()))
        first, _, *others = self.saves  # one warms up
        newest, ways = self._newest, {}
        if self._other_ways:
            ways = Ways(self._model, self._optimizer, self._directory / "ways").measure(saves, self._step)
        return Result(first, others, times[STATE_DICTS], ways, newest.bytes, newest.eager_bytes, newest.storages)

    def _step(self) -> None:
        # Training allocates and frees activations in every step, which teaches malloc to keep freed memory.
        torch.empty(ACTIVATION_BYTES, dtype=torch.uint8)
        self._optimizer.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        after = self._collections.take()
        if self._saved:
            self.saves[-1].collector_after = after
        self._saved = False

    def _save(self) -> float:
        number = len(self.saves) + 1
        self._collections.take()
        begin, thread_begin = time.perf_counter(), time.thread_time()
        handle = self._checkpointer.save(number)
        processor, wall = 1e3 * (time.thread_time() - thread_begin), 1e3 * (time.perf_counter() - begin)
        collector = self._collections.take()
        handle.result(timeout=TIMEOUT_S)
        metrics = self._newest = handle.metrics
        phases = {phase: 1e3 * getattr(metrics, phase) for phase in PLAN_PHASES}
        self.saves.append(Save(wall, processor, collector, 0.0, 1e3 * metrics.plan_s, phases))
        self._saved = True
        return wall

    def _state_dicts(self) -> float:
        begin = time.perf_counter()
        state = self._model.state_dict(), self._optimizer.state_dict()
        wall = 1e3 * (time.perf_counter() - begin)
        del state
        return wall


def _main() -> None:
    parser = argparse.ArgumentParser(description="One state in this process; the result on the last line, as JSON.")
    parser.add_argument("row", choices=list(ROWS))
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    arguments = parser.parse_args()
    folder = arguments.directory / f"planning-{list(ROWS).index(arguments.row)}"
    print(json.dumps(asdict(Job(ROWS[arguments.row], folder, arguments.device).measure(SAVES))))


if __name__ == "__main__":
    _main()
