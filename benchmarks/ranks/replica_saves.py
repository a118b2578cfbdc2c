"""What `save()` costs ranks that hold one state (DistributedDataParallel) when all of them write it, beside one process
that writes it alone.

The ranks are gloo processes on this machine with a thread each, and each has its own share of the cores in all arms:
that is what it has when every rank trains. All arms take turns in every round, in shuffled order, and save the same
state. While the one process saves, the other ranks wait; in another arm each process saves alone, all of them at once,
which tells what the machine makes of so many processes.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

import lazyckpt
from benchmarks.latency import TIMEOUT_S
from benchmarks.paired import Progress, interleaved, median, ratios, reason, spread
from benchmarks.ranks.member import Member, run_ranks
from benchmarks.ranks.replicas import Replica, Task
from benchmarks.report import Table
from benchmarks.settings import Settings

RANKS = (2, 4)
LEAST_PAIRS = 9
WARM_UP = 3  # at first rank 0 writes all
TOLERANCE = 0.2
ALONE, EACH, TOGETHER = "one process alone", "each process alone, at once", "all ranks together"


@dataclass(frozen=True)
class Saved:
    """By one rank."""

    blocked_ms: float
    gate_ms: float
    copied_bytes: int


def measure(settings: Settings, progress: Progress) -> Iterator[Table]:
    for ranks in RANKS:
        pairs = max(LEAST_PAIRS, settings.pairs)
        task = Task(settings.directory / str(ranks), settings.state_bytes, pairs)
        yield _table(ranks, task, progress)


def _save(member: Member, task: Task) -> tuple[dict[str, list[list[Saved]]], dict[str, str]]:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[member.rank :: member.size] or [cores[member.rank % len(cores)]])
    replica = Replica(task.state_bytes)
    model = DistributedDataParallel(replica.model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with ExitStack() as stack:
        arms = {}
        for name, writers in ((ALONE, None), (EACH, None), (TOGETHER, "all")):
            checkpointer = None
            if name != ALONE or member.rank == 0:
                folder = task.directory / (f"alone-{member.rank}" if name == EACH else name.replace(" ", "-"))
                checkpointer = stack.enter_context(lazyckpt.Checkpointer(folder, keep_last=1, writers=writers))
                checkpointer.track(model=model, optimizer=replica.optimizer)
            arms[name] = partial(_sample, member, replica.optimizer, checkpointer, itertools.count(1))
        return interleaved(arms, task.pairs, member.tell, prepare=os.sync, warm_up=WARM_UP)


def _sample(
    member: Member,
    optimizer: torch.optim.Optimizer,
    checkpointer: lazyckpt.Checkpointer | None,
    numbers: Iterator[int],
) -> list[Saved]:
    """One save of each rank that has a checkpointer. All take a step before it and behind it."""

    def save() -> Saved | None:
        if checkpointer is None:
            return None
        start = time.perf_counter()
        handle = checkpointer.save(next(numbers))
        blocked_s = time.perf_counter() - start
        optimizer.step()
        handle.result(timeout=TIMEOUT_S)
        return Saved(1e3 * blocked_s, 1e3 * handle.metrics.gate_blocked_s, handle.metrics.copied_bytes)

    optimizer.step()
    saved = member.gather(member.together(save))
    if checkpointer is None:
        optimizer.step()
    return [of_rank for of_rank in saved if of_rank is not None]


def _table(ranks: int, task: Task, progress: Progress) -> Table:
    columns = ["saved by", "save() returns, ms", "over one process", "gate, ms", "copied, MB", "goal"]
    table = Table(f"{ranks} ranks that hold one state of {task.state_bytes / 1e9:.2f} GB", columns)
    try:
        samples, failures = run_ranks(_save, ranks, task, progress)
    except Exception as error:
        table.missing("all", reason(error))
        return table
    blocked = {name: [max(of.blocked_ms for of in saved) for saved in rounds] for name, rounds in samples.items()}
    for name, rounds in samples.items():
        if name in failures:
            table.missing(name, failures[name])
            continue
        over = ratios(blocked[name], blocked[ALONE])
        table.add(
            name,
            spread(blocked[name], 1),
            spread(over),
            spread([max(of.gate_ms for of in saved) for saved in rounds], 1),
            " + ".join(f"{median(of_rank) / 1e6:.1f}" for of_rank in _copied(rounds)),
            _goal(median(over), ranks) if name == TOGETHER and not failures else "-",
        )
    table.notes += [
        f"{task.pairs} rounds; each rank computes on one thread, and has its share of the cores. Of ranks, the "
        "slowest. Gate: what the optimizer waited for copies; it steps as soon as save() returns, so nothing hides "
        "them.",
        "Copied: by each rank, rank 0 first.",
    ]
    return table


def _copied(rounds: list[list[Saved]]) -> Iterator[list[int]]:
    """By each rank."""
    for of_rank in zip(*rounds, strict=True):
        yield [saved.copied_bytes for saved in of_rank]


def _goal(over: float, ranks: int) -> str:
    if len(os.sched_getaffinity(0)) < ranks:
        return f"needs {ranks} cores"
    found = "met" if abs(over - 1) <= TOLERANCE else "slower" if over > 1 else "faster"
    return f"1 ± {TOLERANCE:g}: {found}"
