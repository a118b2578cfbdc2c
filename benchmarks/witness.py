"""What the page witness adds to a training, over the version counters.

Pages are small or huge for a whole process, so each kind is measured in a process of its own. Inside of one, the two
witnesses and a cycle without a checkpoint take turns over the same training.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.latency import TIMEOUT_S, Case
from benchmarks.paired import Progress, differences, interleaved, spread, worse
from benchmarks.report import Table
from benchmarks.settings import Settings
from benchmarks.workload import Training

NONE, VERSIONS, PAGES = "no checkpoint", "versions", "pages"
ROUNDS_PER_PAIR = 3  # a round takes seconds
MIN_COMPUTE_S = 0.5
PAGE_KINDS = {"small pages": False, "huge pages": True}
TENSORS = {
    "10,000 tensors of 10 KB": Case("10,000 tensors of 10 KB", ((3_334, 10_000),)),
    "10,000 tensors of 50 KB": Case("10,000 tensors of 50 KB", ((3_334, 50_000),)),
}
STATE = "state"  # of a Gpt, beside the names of TENSORS
# glibc asks for huge pages behind every large allocation; where the system gives them to all, it does nothing.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
PR_SET_THP_DISABLE = 41


class Job(Protocol):
    """A training: a model, its optimizer, forward and backward."""

    @property
    def model(self) -> torch.nn.Module: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    def compute(self) -> None: ...


class ManyTensors:
    """Forward and backward over each tensor by itself."""

    def __init__(self, case: Case) -> None:
        self.model: torch.nn.Module
        self.optimizer: torch.optim.Optimizer
        self.model, self.optimizer = case.build()

    def compute(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        torch.autograd.backward([parameter.square().sum() for parameter in self.model.parameters()])


@dataclass
class Times:
    """Milliseconds of one arm, one value a round."""

    save: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)  # forward and backward
    step: list[float] = field(default_factory=list)  # from there until the optimizer is done: gate and step
    gate: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)


@dataclass
class Result:
    times: dict[str, Times]
    failures: dict[str, str]
    state_bytes: int
    eager_bytes: dict[str, int]
    huge_bytes: int  # of all memory, at the end


def measure(settings: Settings, progress: Progress) -> Iterator[Table]:
    """The training's state in small and in huge pages, then many small tensors."""
    for name, job, huge in [
        *((kind, STATE, huge) for kind, huge in PAGE_KINDS.items()),
        *((case, case, False) for case in TENSORS),
    ]:
        progress(name)
        yield _table(name, _in_child(job, huge, settings))


def _in_child(job: str, huge: bool, settings: Settings) -> Result:
    command = [sys.executable, "-m", "benchmarks.witness", job, "--directory", str(settings.directory)]
    command += ["--state-bytes", str(settings.state_bytes), "--rounds", str(ROUNDS_PER_PAIR * settings.pairs)]
    command += ["--compute-s", str(settings.compute.get("min_compute_s", MIN_COMPUTE_S))]
    environment = {**os.environ, **(HUGE_PAGES if huge else {})}
    command += [] if huge else ["--small-pages"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found = json.loads(done.stdout.splitlines()[-1])
    return Result(**{**found, "times": {name: Times(**times) for name, times in found["times"].items()}})


def _table(name: str, result: Result) -> Table:
    columns = ["witness", "save(), ms", "forward + backward, ms", "gate + step, ms", "of it gate, ms", "durable, ms"]
    table = Table(f"The page witness: {name}", columns)
    figures = ("save", "compute", "step", "gate", "durable")
    for arm, times in result.times.items():
        if arm in result.failures:
            table.missing(arm, result.failures[arm])
        else:
            table.add(arm, *(spread(getattr(times, figure), 1) for figure in figures))
    if not result.failures:
        pages, versions, none = (result.times[arm] for arm in (PAGES, VERSIONS, NONE))
        table.add(
            "pages minus versions",
            *(spread(differences(getattr(pages, f), getattr(versions, f)), 1) for f in figures),
        )
        table.add("longer in", *(worse(getattr(pages, f), getattr(versions, f)) for f in figures))
        step = spread(differences(pages.step, none.step), 1)
        table.add("pages minus no checkpoint", "-", spread(differences(pages.compute, none.compute), 1), step, "-", "-")
    eager = ", ".join(f"{arm} {nbytes / 1e6:.1f} MB" for arm, nbytes in result.eager_bytes.items())
    table.notes += [
        f"{result.state_bytes / 1e9:.2f} GB of AdamW state; copied inside save(): {eager}. "
        f"{result.huge_bytes / 1e9:.2f} GB of the process lay in huge pages at the end.",
        "A cycle is save(), forward and backward, the optimizer's step; each checkpoint is awaited before the next.",
    ]
    return table


def compare(job: Job, rounds: int, directory: Path, progress: Progress) -> Result:
    """Cycles of each arm, by turns, in this process."""
    import lazyckpt

    times = {arm: Times() for arm in (NONE, VERSIONS, PAGES)}
    eager_bytes: dict[str, int] = {}

    def cycle(arm: str, checkpointer: lazyckpt.Checkpointer | None) -> float:
        begin = time.perf_counter()
        handle = None if checkpointer is None else checkpointer.save(len(times[arm].save) + 1)
        saved = time.perf_counter()
        job.compute()
        computed = time.perf_counter()
        job.optimizer.step()
        stepped = time.perf_counter()
        if handle is not None:
            handle.result(timeout=TIMEOUT_S)
            eager_bytes[arm] = handle.metrics.eager_bytes
        waited_s, durable_s = (
            (0.0, 0.0) if handle is None else (handle.metrics.gate_blocked_s, handle.metrics.durable_s)
        )
        values = saved - begin, computed - saved, stepped - computed, waited_s, durable_s
        for column, seconds in zip(vars(times[arm]).values(), values, strict=True):
            column.append(1e3 * seconds)
        return stepped - begin

    arms: dict[str, Callable[[], float]] = {NONE: partial(cycle, NONE, None)}
    refused: dict[str, str] = {}
    with ExitStack() as stack:
        for arm in (VERSIONS, PAGES):
            try:
                checkpointer = stack.enter_context(lazyckpt.Checkpointer(directory / arm, keep_last=1, witness=arm))
            except lazyckpt.ConfigError as error:
                refused[arm] = str(error)
                continue
            checkpointer.track(model=job.model, optimizer=job.optimizer)
            arms[arm] = partial(cycle, arm, checkpointer)
        job.compute()
        job.optimizer.step()  # parameters earn lazy copies by the gradients that the gate sees
        # The first save grows the ring, the second protects nothing ahead yet.
        _, failures = interleaved(arms, rounds, progress, prepare=os.sync, warm_up=2)
        huge_bytes = _huge_bytes()
    for arm in times:  # without the rounds that warm up
        times[arm] = Times(*([*column[2:]] for column in vars(times[arm]).values()))
    state_bytes = 3 * sum(parameter.nbytes for parameter in job.model.parameters())
    return Result(times, refused | failures, state_bytes, eager_bytes, huge_bytes)


def _huge_bytes() -> int:
    match = re.search(r"^AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _main() -> None:
    parser = argparse.ArgumentParser(description="Both witnesses over one job; the result on the last line, as JSON.")
    parser.add_argument("job", choices=[STATE, *TENSORS])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--state-bytes", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--compute-s", type=float, required=True)
    parser.add_argument("--small-pages", action="store_true")
    arguments = parser.parse_args()
    if arguments.small_pages:  # also where the system gives huge ones to all
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    job: Job
    if arguments.job == STATE:
        job = training = Training(arguments.state_bytes)
        training.calibrate(arguments.compute_s)
    else:
        job = ManyTensors(TENSORS[arguments.job])
    directory = arguments.directory / arguments.job.replace(" ", "-")
    print(json.dumps(asdict(compare(job, arguments.rounds, directory, lambda text: None))))


if __name__ == "__main__":
    _main()
