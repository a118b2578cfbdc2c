"""On every rank: a training job, the arms that save it in turns, and their results.

All ranks go through the same arms in the same order. An arm that fails on one rank is out on all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from benchmarks.arms import NONE, Arm, ArmKind
from benchmarks.floor import Floor
from benchmarks.paired import ArmFailed, interleaved, median
from benchmarks.ranks.arms import ALONE, ARMS, make
from benchmarks.ranks.member import Member
from benchmarks.ranks.phases import Phase, Phases, Traffic
from benchmarks.ranks.sharded import ShardedTraining
from benchmarks.ranks.task import Task
from benchmarks.train import COMPUTE_OVER_WRITE, MIN_COMPUTE_S, Block, durable_seconds, run_block


@dataclass(frozen=True)
class Sample:
    """One block of an arm. Of ranks that differ, the slowest; of saves, the mean; of steps, the median."""

    seconds: float
    blocked_s: float
    step_s: float  # of a step that begins with a save, without what blocked it
    collectives: float  # per save, besides those of the training; of the rank with most of them
    store_calls: float
    plan_s: float | None  # None: not seen from this process
    commit_s: float | None  # from the last rank's durable files until every rank knows
    eager: float | None  # share of the bytes, if lazy
    durable_s: float  # one checkpoint with nothing beside it
    alone_s: float | None  # one save() while the other ranks wait; None: it talks to them


@dataclass(frozen=True)
class Interval:
    """The samples of each arm with a checkpoint every so many steps, NONE among them; and why arms are missing."""

    every: int
    samples: dict[str, list[Sample]]
    failures: dict[str, str]


@dataclass(frozen=True)
class Results:
    intervals: list[Interval]
    state_bytes: int
    compute_s: float
    write_s: float  # all ranks, each its part, raw


class Contest:
    def __init__(self, member: Member, task: Task) -> None:
        self._member = member
        self._task = task
        self._phases, self._traffic = Phases(), Traffic()
        self._training = ShardedTraining(task.state_bytes, sequences=1, member=member, phases=self._phases)
        own_bytes = sum(t.nbytes for t in self._training.tensors().values())
        self.state_bytes = sum(member.gather(own_bytes))
        with Floor(own_bytes // 4, copy_threads=0) as raw:
            self.write_s = median([self._raw_write_s(raw, own_bytes) for _ in range(3)])
        over_write = task.compute.get("compute_over_write", COMPUTE_OVER_WRITE)
        least_s = task.compute.get("min_compute_s", MIN_COMPUTE_S)
        self.compute_s = self._training.calibrate(max(least_s, over_write * self.write_s))
        self._observed = ExitStack()
        self._observed.enter_context(self._phases.of_dcp())
        self._observed.enter_context(self._traffic.of_stores())
        self._next_step = 1
        self._arms = {NONE.name: self._make(NONE)}
        _, self._own_talk = self._block(self._arms[NONE.name], 1)
        self._failures: dict[str, str] = {}
        for name in task.arms:
            member.tell(f"{name} is made")
            try:
                self._arms[name] = member.together(partial(self._make, ARMS[name]))
            except ArmFailed as failed:
                self._failures[name] = str(failed)

    def run(self, every: int) -> Interval:
        """Rounds of all arms that are left."""
        arms = {n: partial(self._sample, n, every) for n in self._arms if n not in self._failures}
        samples, failures = interleaved(arms, self._task.pairs, self._member.tell)
        self._failures |= failures
        return Interval(every, samples, dict(self._failures))

    def close(self) -> None:
        self._observed.close()
        for name, arm in self._arms.items():
            with suppress(Exception) if name in self._failures else nullcontext():
                arm.close()

    def _make(self, kind: ArmKind) -> Arm:
        self._traffic.turn = kind.name
        return make(kind, self._training, self._task.directory / "contest")

    def _sample(self, name: str, every: int) -> Sample:
        arm, gather, together = self._arms[name], self._member.gather, self._member.together
        self._traffic.turn = name
        self._phases.take()
        block, talk = together(lambda: self._block(arm, every))
        phases, eager = self._phases.take()
        self._settle(arm)
        durable_s = together(lambda: durable_seconds(arm, self._numbers(1)))
        self._settle(arm)
        alone_s = None
        if name in ALONE:
            alone_s = together(lambda: self._alone_s(arm))
            self._settle(arm)
        blocks, saves = gather(block), list(zip(*gather(phases), strict=True))
        shares = [share for of_rank in gather(eager) for share in of_rank]
        count = len(block.blocked_s)
        collectives, store_calls = (
            (max(of_ranks) - own) / count for *of_ranks, own in zip(*gather(talk), self._own_talk, strict=True)
        )
        return Sample(
            seconds=max(one.seconds for one in blocks),
            blocked_s=fmean(max(of_save) for of_save in zip(*(one.blocked_s for one in blocks), strict=True)),
            step_s=max(median(one.step_s[::every]) for one in blocks),
            collectives=collectives,
            store_calls=store_calls,
            plan_s=fmean(max(one.plan_s for one in of_save) for of_save in saves) if saves else None,
            commit_s=fmean(_commit_s(of_save) for of_save in saves) if saves else None,
            eager=fmean(shares) if shares else None,
            durable_s=max(gather(durable_s)),
            alone_s=None if alone_s is None else max(gather(alone_s)),
        )

    def _block(self, arm: Arm, every: int) -> tuple[Block, list[int]]:
        """Also the collectives and store calls in it."""
        steps, before = self._task.steps, self._traffic.count()
        block = run_block(self._training, arm, steps, self._numbers(steps), every)
        return block, [now - then for now, then in zip(self._traffic.count(), before, strict=True)]

    def _alone_s(self, arm: Arm) -> float:
        """A checkpoint after a training step; the ranks call save() one after the other."""
        self._training.compute()
        self._training.optimizer.step()
        step, seconds = self._numbers(1), 0.0
        for rank in range(self._member.size):
            self._member.barrier()
            if rank == self._member.rank:
                begin = time.perf_counter()
                arm.save(step)
                seconds = time.perf_counter() - begin
                time.sleep(self.compute_s)  # until its part is written
        self._member.barrier()
        arm.drain()
        return seconds

    def _settle(self, arm: Arm) -> None:
        """Leaves no files and no write-back of one arm to the next."""
        self._member.barrier()
        if self._member.rank == 0:
            arm.discard()
            os.sync()
        self._member.barrier()

    def _numbers(self, count: int) -> int:
        first, self._next_step = self._next_step, self._next_step + count
        return first

    def _raw_write_s(self, raw: Floor, nbytes: int) -> float:
        """Every rank writes its part at the same time."""
        path = self._task.directory / f"raw-{self._member.rank}"
        self._member.barrier()
        seconds = raw.raw_write(path, nbytes)
        path.unlink()
        return max(self._member.gather(seconds))


def compete(member: Member, task: Task) -> Results:
    contest = Contest(member, task)
    try:
        intervals = [contest.run(every) for every in task.intervals]
    finally:
        contest.close()
    return Results(intervals, contest.state_bytes, contest.compute_s, contest.write_s)


def _commit_s(saves: Sequence[Phase]) -> float:
    """`saves`: one of every rank."""
    return max(save.committed_at for save in saves) - max(save.files_at for save in saves)
