"""End to end: a training job with a checkpoint at every step, over the same job with none.

A block is N cycles of (save, forward and backward, optimizer step) and the final drain: every arm saves as
often, and nothing is left dirty when its clock stops. A pair is a block of the arm next to a block without
checkpoints, in alternating order; the arms take turns in one process. Blocks that warm up are dropped. Where arms are
compared with each other, one block without serves all of a round.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.arms import NONE, Arm, ArmKind
from benchmarks.floor import Floor
from benchmarks.paired import Countdown, Progress, differences, median, ratios, reason, spread
from benchmarks.pictures import Picture
from benchmarks.report import Table
from benchmarks.settings import Settings
from benchmarks.workload import Mark, Training, seconds_between

WARM_UP_STEPS = 3
COMPUTE_OVER_WRITE = 2.0  # forward + backward last this many times the raw write of the state
MIN_COMPUTE_S = 0.5


@dataclass
class Block:
    seconds: float
    blocked_s: list[float]  # per checkpoint
    step_s: list[float]  # of each step, without what blocked it


@dataclass
class Series:
    """One arm's pairs so far, or why it has none."""

    name: str
    ratio: list[float] = field(default_factory=list)  # of block times, over the neighbouring block without
    step_s: list[float] = field(default_factory=list)  # block time by steps, the drain included
    none_step_s: list[float] = field(default_factory=list)  # of the neighbouring block without
    blocked_s: list[float] = field(
        default_factory=list
    )  # mean of the block, per pair: waits at every other save count too
    durable: list[float] = field(default_factory=list)  # GB/s of one checkpoint with nothing beside it
    durable_s: list[float] = field(default_factory=list)  # its seconds
    ceiling: list[float] = field(default_factory=list)  # GB/s of the raw write just before
    failure: str = ""


def run_block(training: Training, arm: Arm, steps: int, first: int, every: int = 1) -> Block:
    """Train `steps` steps, a checkpoint in the first and in each `every`th after it; numbers begin at `first`."""
    begun = training.mark()

    def optimizer_begins(*_: object) -> None:
        nonlocal begun
        begun = training.mark()

    # Runs after the global pre-hooks, where lazyckpt's gate stands.
    hook = training.optimizer.register_step_pre_hook(optimizer_begins)
    waits: list[tuple[Mark, Mark]] = []
    step_s: list[float] = []
    training.synchronize()
    start = time.perf_counter()
    for step in range(first, first + steps):
        step_begun = time.perf_counter()
        called = training.mark()
        if (step - first) % every == 0:
            arm.save(step)
        waits.append((called, training.mark()))
        training.compute()
        called = training.mark()
        arm.before_step()
        training.optimizer.step()
        arm.after_step()
        waits.append((called, begun))
        training.synchronize()
        step_s.append(time.perf_counter() - step_begun)
    arm.drain()
    seconds = time.perf_counter() - start
    hook.remove()
    blocked = [seconds_between(*wait) for wait in waits]
    by_step = [saving + gated for saving, gated in zip(blocked[::2], blocked[1::2], strict=True)]
    step_s = differences(step_s, by_step)
    # What a step waits for belongs to the checkpoint before it.
    return Block(seconds, [sum(by_step[at : at + every]) for at in range(0, steps, every)], step_s)


def durable_seconds(arm: Arm, step: int) -> float:
    """One checkpoint, begun and awaited, with nothing else going on."""
    start = time.perf_counter()
    arm.save(step)
    arm.before_step()
    arm.after_step()
    arm.drain()
    return time.perf_counter() - start


class Contest:
    """The arms, the one training job they share, and their results.

    Forward and backward are made to last `compute_over_write` times the raw write of the state, and no less than
    `min_compute_s`; or, if both are 0, what they last with the batch that `training` has.
    """

    def __init__(
        self,
        kinds: Sequence[ArmKind],
        training: Training,
        steps: int,
        directory: Path,
        *,
        every: int = 1,
        none_in_every_pair: bool = False,
        compute_over_write: float = COMPUTE_OVER_WRITE,
        min_compute_s: float = MIN_COMPUTE_S,
    ) -> None:
        self.steps = steps
        self.every = every
        self.none_in_every_pair = none_in_every_pair
        self.directory = directory
        directory.mkdir(parents=True)
        self.training = training
        self.state_bytes = sum(t.nbytes for t in training.tensors().values())
        self._raw = Floor(self.state_bytes // 4, copy_threads=0)
        self.write_s = median([self._raw_write_s() for _ in range(3)])
        self.compute_s = training.calibrate(max(min_compute_s, compute_over_write * self.write_s))
        self._none = self._make(NONE)
        self._arms: dict[str, Arm] = {}
        self._next_step = 1
        self.series = {kind.name: Series(kind.name) for kind in kinds}
        for kind in kinds:
            self._guarded(kind.name, self._set_up, kind)

    def run(self, pairs: int, progress: Progress) -> None:
        """`pairs` pairs of every arm, in turns."""
        tell = Countdown(progress, pairs * len(self._arms))
        for number in range(pairs):
            self.round(number, tell)

    def restart(self, every: int) -> None:
        """The same arms, with another interval and no results yet."""
        self.every = every
        self.series = {name: Series(name, failure=one.failure) for name, one in self.series.items()}

    def round(self, number: int, progress: Progress) -> None:
        """One pair of every living arm, beginning with another arm each time."""
        names = list(self._arms)
        turn = number % len(names) if names else 0
        none = None if self.none_in_every_pair else self._block(self._none)
        for name in names[turn:] + names[:turn]:
            progress(name)
            self._guarded(name, self._pair, name, none, number % 2 == 0)

    def close(self) -> None:
        for arm in self._arms.values():
            arm.close()
        self._raw.close()

    def _pair(self, name: str, none: Block | None, none_first: bool) -> None:
        arm, series = self._arms[name], self.series[name]
        if none is not None:
            blocks = {self._none: none, arm: self._block(arm)}
        else:
            blocks = {a: self._block(a) for a in ((self._none, arm) if none_first else (arm, self._none))}
        ceiling = self.state_bytes / self._raw_write_s() / 1e9
        durable_s = durable_seconds(arm, self._step())
        self._settle(arm)
        blocked_s = blocks[arm].blocked_s
        series.ratio.append(blocks[arm].seconds / blocks[self._none].seconds)
        series.step_s.append(blocks[arm].seconds / self.steps)
        series.none_step_s.append(blocks[self._none].seconds / self.steps)
        series.blocked_s.append(sum(blocked_s) / len(blocked_s))
        series.ceiling.append(ceiling)
        series.durable_s.append(durable_s)
        series.durable.append(self.state_bytes / durable_s / 1e9)

    def _block(self, arm: Arm) -> Block:
        block = run_block(self.training, arm, self.steps, self._step(self.steps), self.every)
        self._settle(arm)
        return block

    def _settle(self, arm: Arm) -> None:
        """Leave no write-back of one arm to the next."""
        arm.discard()
        os.sync()

    def _set_up(self, kind: ArmKind) -> None:
        arm = self._make(kind)
        try:
            run_block(self.training, arm, WARM_UP_STEPS, self._step(WARM_UP_STEPS))
        except BaseException:
            arm.close()
            raise
        self._settle(arm)
        self._arms[kind.name] = arm

    def _make(self, kind: ArmKind) -> Arm:
        directory = self.directory / kind.name.replace("/", "-")
        directory.mkdir()
        return kind.make(self.training, directory)

    def _guarded(self, name: str, call: Callable[..., None], *arguments: object) -> None:
        """An arm that fails is out, with its reason; the others go on."""
        try:
            call(*arguments)
        except Exception as error:
            self.series[name].failure = reason(error)
            self._arms.pop(name, None)

    def _step(self, count: int = 1) -> int:
        first, self._next_step = self._next_step, self._next_step + count
        return first

    def _raw_write_s(self) -> float:
        path = self.directory / "raw"
        seconds = self._raw.raw_write(path, self.state_bytes)
        path.unlink()
        os.sync()
        return seconds


@contextmanager
def contest(*arguments: Any, **options: Any) -> Iterator[Contest]:
    """A Contest that is closed, however it ends."""
    one = Contest(*arguments, **options)
    try:
        yield one
    finally:
        one.close()


def measure(settings: Settings, progress: Progress) -> Iterator[Table]:
    training = Training(settings.state_bytes, device=settings.device)
    directory = settings.directory / "arms"
    with contest(
        settings.kinds, training, settings.steps, directory, none_in_every_pair=True, **settings.compute
    ) as one:
        one.run(settings.pairs, progress)
    yield _table(one, settings.pairs)


def _table(contest: Contest, pairs: int) -> Table:
    table = Table(
        f"Training with a checkpoint at every step ({contest.state_bytes / 1e9:.2f} GB of AdamW state)",
        [
            "arm",
            "time over none",
            "minus floor",
            "blocked, ms",
            "minus floor",
            "durable, GB/s",
            "of raw",
        ],
    )
    table.picture = Picture("", "time over no checkpoints")
    series = contest.series
    for one in series.values():
        if one.failure:
            table.missing(one.name, one.failure)
            continue
        floor = series.get("floor-quarter" if one.name.endswith("-quarter") else "floor")
        above, waited = [], []
        if floor and floor is not one:
            above = differences(one.ratio, floor.ratio)
            waited = differences([1e3 * s for s in one.blocked_s], [1e3 * s for s in floor.blocked_s])
        table.add(
            one.name,
            spread(one.ratio),
            spread(above) if above else "-",
            spread([1e3 * s for s in one.blocked_s], 1),
            spread(waited, 1) if waited else "-",
            spread(one.durable),
            f"{median(ratios(one.durable, one.ceiling)):.0%}",
        )
        table.picture.add("", one.name, one.ratio)
    ceilings = [gbps for one in series.values() for gbps in one.ceiling]
    table.notes += [
        f"{pairs} pairs; a block is {contest.steps} cycles of save, forward + backward "
        f"({contest.compute_s:.2f} s, {contest.training.sequences} sequences) and step, then drain and sync. "
        f"Writing the state raw took {contest.write_s:.2f} s when the batch was chosen.",
        f"Raw O_DIRECT write beside each pair: {spread(ceilings)} GB/s. "
        "Durable: one checkpoint with nothing beside it, from the call until it is on the disk.",
        "Blocked: the call, what it waits for, the wait before the optimizer begins; mean per checkpoint.",
    ]
    return table
