"""What it costs to publish a checkpoint only after a verdict on its lazy copies: how long it waits, in situations in
which the training thread comes to no point of program order for seconds, and how many checkpoints `kill -9` would lose.

The page witness owes no verdict. The arm "at once" lets the background judge whenever it likes, as if versions moved
before the bytes: it waits for nothing, and misses a write that is under way.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from unittest import mock

import torch

from benchmarks.latency import TIMEOUT_S
from benchmarks.paired import Progress, interleaved, spread
from benchmarks.report import Table
from benchmarks.settings import Settings
from benchmarks.workload import CONTEXT, Training
from lazyckpt import Checkpointer, CheckpointMetrics, SaveHandle
from lazyckpt.capture.verdict import Verdict

ARMS = {"pages": "pages", "versions": "versions", "at once (unsound)": "versions"}
UNSOUND = "at once (unsound)"
SECONDS = 2.0  # that a situation lasts
STATE_BYTES = 100_000_000
STEP_S = 0.5  # forward and backward of the training whose unpublished checkpoints are counted
MATRIX = 1024
SAMPLE_S = 0.005


class _GivenAtOnce(Verdict):
    def __init__(self, owed: int, tensors: list[torch.Tensor]) -> None:
        super().__init__(0, [])


@dataclass
class Arm:
    """Saves as one of ARMS, after a step."""

    name: str
    checkpointer: Checkpointer
    training: Training
    saved: int = 0

    def save(self) -> SaveHandle:
        self.saved += 1
        if self.name != UNSOUND:
            return self.checkpointer.save(self.saved)
        with mock.patch("lazyckpt.capture.snapshot.Verdict", _GivenAtOnce):
            return self.checkpointer.save(self.saved)


def _loss(training: Training, sequences: int) -> torch.Tensor:
    tokens = torch.randint(training.model.embed.num_embeddings, (sequences, CONTEXT + 1))
    return training.model.loss(tokens)


# Situations: each saves and then lasts `seconds`.


def forward_and_backward(arm: Arm, seconds: float) -> SaveHandle:
    handle = arm.save()
    arm.training.compute()
    return handle


def backward(arm: Arm, seconds: float) -> SaveHandle:
    loss = _loss(arm.training, arm.training.sequences)
    handle = arm.save()
    torch.autograd.backward(loss)
    return handle


def evaluation_loop(arm: Arm, seconds: float) -> SaveHandle:
    handle = arm.save()
    end = time.perf_counter() + seconds
    with torch.no_grad():
        while time.perf_counter() < end:
            _loss(arm.training, 1)
    return handle


def one_call(arm: Arm, seconds: float) -> SaveHandle:
    matrix = torch.eye(MATRIX)
    begin = time.perf_counter()
    torch.linalg.multi_dot([matrix] * 8)
    count = max(3, int(8 * seconds / (time.perf_counter() - begin)))
    handle = arm.save()
    torch.linalg.multi_dot([matrix] * count)
    return handle


def asleep(arm: Arm, seconds: float) -> SaveHandle:
    handle = arm.save()
    time.sleep(seconds)
    return handle


def prompt(arm: Arm, seconds: float) -> SaveHandle:
    """A read that the trial answers later."""
    read_end, write_end = os.pipe()
    answer = threading.Timer(seconds, os.write, (write_end, b"\n"))
    handle = arm.save()
    answer.start()
    os.read(read_end, 1)
    answer.join()
    os.close(read_end)
    os.close(write_end)
    return handle


def event_loop(arm: Arm, seconds: float) -> SaveHandle:
    """As in a notebook, whose cells run inside of a loop that then waits for the next cell."""

    async def cell() -> SaveHandle:
        handle = arm.save()
        await asyncio.sleep(seconds)
        return handle

    return asyncio.run(cell())


def other_thread(arm: Arm, seconds: float) -> SaveHandle:
    """Forward and backward on a thread that trains, while the main thread waits for it."""
    handles: list[SaveHandle] = []

    def train() -> None:
        arm.training.optimizer.step()
        handles.append(arm.save())
        arm.training.compute()
        arm.training.optimizer.step()

    _on_thread(train)
    return handles[0]


def awaited(arm: Arm, seconds: float) -> SaveHandle:
    handle = arm.save()
    handle.result(timeout=TIMEOUT_S)
    return handle


Situation = Callable[[Arm, float], SaveHandle]
SITUATIONS: dict[str, Situation] = {
    "result() at once": awaited,
    "forward and backward": forward_and_backward,
    "backward alone": backward,
    "evaluation: a Python loop": evaluation_loop,
    "evaluation: one C++ call": one_call,
    "idle: time.sleep": asleep,
    "idle: a read, as input()": prompt,
    "idle: an asyncio loop": event_loop,
    "training on another thread": other_thread,
}


def measure(settings: Settings, progress: Progress) -> Iterator[Table]:
    seconds = min(SECONDS, settings.compute.get("min_compute_s", SECONDS))
    training = Training(min(STATE_BYTES, settings.state_bytes))
    with ExitStack() as stack:
        arms = []
        for name, witness in ARMS.items():
            directory = settings.directory / name.split()[-1].strip("()")
            checkpointer = stack.enter_context(Checkpointer(directory, keep_last=1, witness=witness))
            checkpointer.track(model=training.model, optimizer=training.optimizer)
            arms.append(Arm(name, checkpointer, training))
        yield _unpublished(arms, min(STEP_S, seconds), settings.steps, progress)
        yield _until_durable(arms, seconds, settings.pairs, progress)


def _until_durable(arms: list[Arm], seconds: float, pairs: int, progress: Progress) -> Table:
    table = Table(
        f"Until a checkpoint is durable and has its name, with {seconds:.1f} s of other work behind save()",
        ["situation", "witness", "durable, s", "waited for a verdict, s"],
    )
    training = arms[0].training
    compute_s = training.calibrate(seconds)
    for situation, run in SITUATIONS.items():
        found: dict[str, list[CheckpointMetrics]] = {arm.name: [] for arm in arms}

        def once(
            arm: Arm,
            run: Situation = run,
            found: dict[str, list[CheckpointMetrics]] = found,
        ) -> float:
            arm.training.compute()
            arm.training.optimizer.step()
            handle = run(arm, seconds)
            arm.training.optimizer.step()
            handle.result(timeout=TIMEOUT_S)
            found[arm.name].append(handle.metrics)
            return handle.metrics.durable_s

        rounds = {arm.name: partial(once, arm) for arm in arms}
        tell = partial(_tell, progress, situation)
        durable_s, failures = interleaved(rounds, pairs, tell, prepare=os.sync, warm_up=0)
        for name, values in durable_s.items():
            if name in failures:
                table.missing(situation, failures[name])
            else:
                verdicts = [metrics.verdict_s for metrics in found[name]]
                table.add(situation, name, spread(values, 3), spread(verdicts, 3))
    table.notes += [
        f"{3 * sum(p.nbytes for p in training.model.parameters()) / 1e9:.2f} GB of AdamW state; forward and backward "
        f"{compute_s:.2f} s. The optimizer steps when the situation is over.",
        "At once: the background judges by itself, which waits for nothing and misses a write that is under way.",
    ]
    return table


def _unpublished(arms: list[Arm], step_s: float, steps: int, progress: Progress) -> Table:
    table = Table(
        f"Checkpoints that a kill -9 would lose, at a moment of {steps} steps with a save at each",
        ["training", "witness", "lost, on the mean", "at most", "of them waiting for a verdict only, at most"],
    )
    compute_s = arms[0].training.calibrate(step_s)
    for where, run in (("on the main thread", _call), ("on another thread", _on_thread)):
        for arm in arms:
            progress(f"{where}: {arm.name}")
            handles: list[SaveHandle] = []

            def train(arm: Arm = arm, handles: list[SaveHandle] = handles) -> None:
                arm.training.compute()
                arm.training.optimizer.step()
                for _ in range(steps):
                    handles.append(arm.save())
                    arm.training.compute()
                    arm.training.optimizer.step()

            with _Sampler(handles) as sampler:
                run(train)
            for handle in handles:
                handle.result(timeout=TIMEOUT_S)
            lost, waiting = sampler.unpublished, sampler.waiting
            table.add(where, arm.name, f"{fmean(lost):.2f}", str(max(lost)), str(max(waiting)))
    table.notes.append(
        f"Forward and backward {compute_s:.2f} s. Asked every {1e3 * SAMPLE_S:.0f} ms: saves that have returned and "
        "whose files have no final name yet; at most max_in_flight, here 2."
    )
    return table


def _tell(progress: Progress, about: str, text: str) -> None:
    progress(f"{about}: {text}")


def _call(function: Callable[[], None]) -> None:
    function()


def _on_thread(function: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(function).result()


class _Sampler(threading.Thread):
    """Counts, now and then, which of some handles are not done."""

    def __init__(self, handles: list[SaveHandle]) -> None:
        super().__init__(daemon=True)
        self.unpublished: list[int] = []
        self.waiting: list[int] = []
        self._handles = handles
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(SAMPLE_S):
            if pending := [handle for handle in list(self._handles) if not handle.done()]:
                waiting = sum(handle.awaits_verdict for handle in pending)
            self.unpublished.append(len(pending))
            self.waiting.append(waiting if pending else 0)

    def __enter__(self) -> _Sampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.join()
