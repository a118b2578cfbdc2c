"""Goodput: the useful steps of a training that is killed again and again, by engine.

A trial lasts a fixed time. A process trains and saves. SIGKILL ends it at exponential intervals, also while it
restarts, and the next process resumes from the newest checkpoint that loads. At the end of the trial the last process
is killed, too. Useful are the steps that a restart then finds. Each engine saves as often as `lazyckpt.advise` tells
for its own cost, measured before. All engines meet the same kills.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import lazyckpt
from benchmarks.arms import KINDS, NONE, ArmKind
from benchmarks.paired import ArmFailed, Countdown, Progress, median, reason, rounds, spread
from benchmarks.report import Table
from benchmarks.scale.failures import Saving, goodput
from benchmarks.settings import Settings
from benchmarks.train import durable_seconds, run_block
from benchmarks.workload import Training

TRIAL_S = 36.0
MTBF_S = 9.0
COMPUTE_S = 0.25  # forward and backward
STATE_BYTES = 150_000_000  # at most; a restart makes and loads them
STEPS, EVERY = 12, 3  # of a block that measures what a checkpoint costs
KEPT = 4  # checkpoints of an engine that removes none itself
LOOK_S = 0.1

ENGINES = ("lazyckpt", "torch.save", "dcp-async-thread", "lightning", "lightning-async")
ARMS = {name: KINDS[name] for name in ENGINES}
MODULES = [
    "benchmarks.goodput",
    "lazyckpt.checkpointer",
    "torch.distributed.checkpoint",
    "lightning.pytorch.plugins.io",
]
_FORKS: Any = multiprocessing.get_context("forkserver")  # a restart need not import torch


class Told(ctypes.Structure):
    """What the process that trains tells, in shared memory."""

    _fields_ = (
        ("step", ctypes.c_longlong),  # of the training; what it resumed from, before the first one of a life
        ("steps", ctypes.c_longlong),  # of all lives
        ("resumed", ctypes.c_double),  # when; time.monotonic(), 0 before
    )


@dataclass(frozen=True)
class Job:
    """What the lives of one trial have in common."""

    arm: str
    directory: Path
    state_bytes: int
    sequences: int
    every: int = 1  # steps from checkpoint to checkpoint
    threads: int = field(default_factory=torch.get_num_threads)

    def live(self, told: Told, train: bool) -> None:
        """Resumes, and trains until it is killed; runs in a process of its own."""
        parent = os.getppid()
        torch.set_num_threads(self.threads)
        training = Training(self.state_bytes, self.sequences)
        arm = KINDS[self.arm].make(training, self.directory)
        step = arm.resume()
        counted = {int(state["step"]) for state in training.optimizer.state.values()}
        if counted != {step + 1}:  # Training has made a step itself
            raise RuntimeError(f"resumed at step {step}, and the optimizer at {counted}")
        told.step = step
        told.resumed = time.monotonic()
        while train and os.getppid() == parent:
            torch.manual_seed(step)
            training.compute()
            arm.before_step()
            training.optimizer.step()
            arm.after_step()
            step += 1
            told.step, told.steps = step, told.steps + 1
            if step % self.every == 0:
                arm.save(step)


@dataclass
class Trial:
    """The lives of one job, one after the other."""

    job: Job
    told: Told = field(default_factory=lambda: _FORKS.RawValue(Told))
    restarts_s: list[float] = field(default_factory=list)  # of lives that trained

    def live(self, over: Callable[[], bool]) -> None:
        """Starts a process, and kills it when it is ``over``."""
        begun = time.monotonic()
        self.told.resumed = 0.0
        process = self._start(train=True)
        try:
            while not over():
                process.join(LOOK_S)
                if process.exitcode is not None:
                    raise ArmFailed(f"{self.job.arm} ended by itself with {process.exitcode}, at step {self.told.step}")
                self._remove_old()
        finally:
            process.kill()
            process.join()
        if self.told.resumed:
            self.restarts_s.append(self.told.resumed - begun)

    def useful_steps(self) -> int:
        """The step that a restart finds."""
        process = self._start(train=False)
        process.join()
        if process.exitcode:
            raise ArmFailed(f"{self.job.arm} cannot resume: its process ended with {process.exitcode}")
        return int(self.told.step)

    def _start(self, train: bool) -> BaseProcess:
        process: BaseProcess = _FORKS.Process(target=self.job.live, args=(self.told, train), daemon=True)
        process.start()
        return process

    def _remove_old(self) -> None:
        if self.job.arm == "lazyckpt":
            return
        for path in sorted(self.job.directory.glob("step-*"))[:-KEPT]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


@dataclass
class Engine:
    """One engine: what a checkpoint costs it, and its trials."""

    kind: ArmKind
    blocked_s: list[float] = field(default_factory=list)  # per checkpoint
    slower_s: list[float] = field(default_factory=list)  # by which the steps took longer, per checkpoint
    durable_s: list[float] = field(default_factory=list)
    useful: list[int] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)
    restarts_s: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def cost_s(self) -> float:
        slower_s = min(max(0.0, median(self.slower_s)), median(self.durable_s))  # no longer than anything runs
        return median(self.blocked_s) + slower_s

    def every(self, state_bytes: int, step_s: float, mtbf_s: float) -> int:
        """Steps from checkpoint to checkpoint, as advised for this cost."""
        advice = lazyckpt.advise(
            state_bytes=state_bytes,
            iteration_s=step_s,
            write_bytes_per_s=state_bytes / median(self.durable_s),
            cost_s=self.cost_s,
            max_overhead=0.99,  # failures decide
            failure_s=mtbf_s,
        )
        return advice.every


def measure(settings: Settings, progress: Progress) -> Iterator[Table]:
    trial_s, mtbf_s = TRIAL_S, MTBF_S
    training = Training(min(STATE_BYTES, settings.state_bytes))
    compute_s = training.calibrate(COMPUTE_S)
    engines = [Engine(kind) for kind in settings.kinds]
    step_s = _costs(engines, training, settings.directory, settings.pairs, progress)
    state_bytes = sum(t.nbytes for t in training.tensors().values())
    _begin_server()
    tell = Countdown(progress, settings.pairs * len(engines))
    for number, names in enumerate(rounds([engine.kind.name for engine in engines], settings.pairs)):
        moments = _kills(random.Random(number), mtbf_s, trial_s)
        for engine in sorted(engines, key=lambda one: names.index(one.kind.name)):
            tell(engine.kind.name)
            if engine.failure:
                continue
            every = engine.every(state_bytes, step_s, mtbf_s)
            directory = settings.directory / "trial"
            directory.mkdir()
            trial = Trial(Job(engine.kind.name, directory, training.state_bytes, training.sequences, every))
            try:
                _run(trial, moments)
                engine.useful.append(trial.useful_steps())
                engine.repeated.append(trial.told.steps)
            except Exception as error:
                engine.failure = reason(error)
            engine.restarts_s += trial.restarts_s
            shutil.rmtree(directory)
            os.sync()
    yield _table(engines, state_bytes, step_s, compute_s, mtbf_s, trial_s)


def _costs(engines: list[Engine], training: Training, directory: Path, pairs: int, progress: Progress) -> float:
    """Measures what a checkpoint costs each engine; returns the seconds of a step without."""
    none = NONE.make(training, directory)
    plain_s: list[float] = []
    numbers = count(1)
    arms = {}
    for turn in range(pairs + 1):  # the first one warms up
        plain = run_block(training, none, STEPS, 0).step_s
        plain_s += plain if turn else []
        for engine in engines:
            name = engine.kind.name
            progress(f"what a checkpoint costs {name}")
            if engine.failure:
                continue
            try:
                if turn == 0:
                    (directory / name).mkdir()
                    arms[name] = engine.kind.make(training, directory / name)
                first = next(numbers) * STEPS
                block = run_block(training, arms[name], STEPS, first, EVERY)
                durable_s = durable_seconds(arms[name], first + STEPS - 1)
                arms[name].discard()
                os.sync()
            except Exception as error:
                engine.failure = reason(error)
                continue
            if turn:
                engine.blocked_s.append(sum(block.blocked_s) / len(block.blocked_s))
                engine.slower_s.append(
                    EVERY * (fmean(block.step_s) - fmean(plain))
                )  # a median misses the step that is slow
                engine.durable_s.append(durable_s)
    for arm in arms.values():
        arm.close()
    return median(plain_s)


def _begin_server() -> None:
    """The first process waits until the server of forks has imported everything; that belongs to no engine."""
    _FORKS.set_forkserver_preload(MODULES)
    first = _FORKS.Process(target=os.getpid)
    first.start()
    first.join()


def _kills(draw: random.Random, mtbf_s: float, trial_s: float) -> list[float]:
    """Seconds after the begin of the trial; the last is its end."""
    moments = [draw.expovariate(1 / mtbf_s)]
    while moments[-1] < trial_s:
        moments.append(moments[-1] + draw.expovariate(1 / mtbf_s))
    return [*moments[:-1], trial_s]


def _run(trial: Trial, moments: Sequence[float]) -> None:
    begun = time.monotonic()
    for moment in moments:
        trial.live(lambda moment=moment: time.monotonic() - begun >= moment)  # type: ignore[misc]


def _table(
    engines: list[Engine], state_bytes: int, step_s: float, compute_s: float, mtbf_s: float, trial_s: float
) -> Table:
    table = Table(
        f"Useful steps of a training that is killed every {mtbf_s:.0f} s on the mean "
        f"({state_bytes / 1e9:.2f} GB of AdamW state)",
        [
            "engine",
            "saves every, steps",
            "cost, ms",
            "durable, s",
            "restart, s",
            "useful steps an hour",
            "of undisturbed",
            "in closed form",
            "steps repeated",
        ],
    )
    for engine in engines:
        if engine.failure:
            table.missing(engine.kind.name, engine.failure)
            continue
        every = engine.every(state_bytes, step_s, mtbf_s)
        saving = Saving(every * step_s, engine.cost_s, median(engine.durable_s), median(engine.restarts_s))
        share = [useful * step_s / trial_s for useful in engine.useful]
        lost = [done - useful for done, useful in zip(engine.repeated, engine.useful, strict=True)]
        table.add(
            engine.kind.name,
            str(every),
            f"{1e3 * engine.cost_s:.0f}",
            f"{median(engine.durable_s):.2f}",
            f"{median(engine.restarts_s):.2f}",
            spread([useful * 3600 / trial_s for useful in engine.useful], 0),
            spread(share),
            f"{goodput(saving, mtbf_s):.2f}",
            spread(lost, 0),
        )
    table.notes += [
        f"{len(max((engine.useful for engine in engines), key=len))} trials of {trial_s:.0f} s, in turns; forward and "
        f"backward {compute_s:.2f} s, a step {step_s:.2f} s without checkpoints. SIGKILL at exponential intervals, at "
        "the same moments for all engines of a round, and at the end. Useful: the step that a restart then finds.",
        "Saves every: as lazyckpt.advise computes it for the engine's cost, its durable time and these failures. Cost: "
        "blocked time per checkpoint, and the time by which steps became longer.",
        "Restart: from the start of a process until it has resumed. It is a fork that has imported all engines. "
        "In closed form: what benchmarks/scale/failures.py expects of these figures.",
    ]
    return table
