"""Ctrl-C at every line of ours that the training thread runs: it gets through, and the next save works."""

from __future__ import annotations

import concurrent.futures
import gc
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.background import in_flight
from lazyckpt.gate import gate
from trials import Trials

PACKAGE = str(Path(lazyckpt.__file__).parent)
TINY = {"chunk_bytes": 16 << 10, "host_buffer_bytes": 64 << 10, "copy_threads": 1, "io_depth": 2}


class Interrupt:
    """Raises ``error`` in this thread before the n-th line of the package, as a signal handler would."""

    def __init__(self, at: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.at, self.error, self.lines, self.where = at, error, 0, ""

    def __enter__(self) -> Interrupt:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        # Not where a lock is taken or let go: Python runs no signal handler there, and would lose the lock if it did.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith("with "):
            self.lines += 1
            if self.lines == self.at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                raise self.error
        return self._line


class Training:
    """As little of it as has lazy and eager storages, in a ring that they do not fit into."""

    def __init__(self, folder: Path) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(80, 80), torch.nn.Linear(80, 80))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6, momentum=0.9)
        self.ckpt = lazyckpt.Checkpointer(folder, keep_last=2, max_in_flight=2, **TINY)
        self.ckpt.track(model=self.model, optimizer=self.optimizer)
        self.number = 0
        self.step()
        self.save().result()  # something to restore

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 80)).square().sum().backward()
        self.optimizer.step()

    def save(self) -> lazyckpt.SaveHandle:
        self.number += 1
        return self.ckpt.save(self.number)


def save(training: Training) -> None:
    training.save()


def save_blocking(training: Training) -> None:
    training.number += 1
    training.ckpt.save(training.number, blocking=True)


def wait_captured_and_step(training: Training) -> None:
    handle = training.save()
    handle.wait_captured()
    training.step()


def gated_step(training: Training) -> None:
    training.save()
    training.step()


def restore(training: Training) -> None:
    training.ckpt.restore()


def result(training: Training) -> None:
    training.save().result()


WAYS = [save, save_blocking, wait_captured_and_step, gated_step, restore, result]


def lines_of(way: Callable[[Training], None], training: Training) -> int:
    for _ in range(2):  # the first builds what the others reuse
        with Interrupt(-1) as counted:
            way(training)
        training.ckpt._saver.drain()
        training.step()
    return counted.lines


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_ctrl_c_at_any_line_and_the_next_save_works(
    way: Callable[[Training], None], tmp_path: Path, trials: Trials
) -> None:
    """Regression: at the instant at which the background was given the checkpoint, close() and later saves hung."""
    training = Training(tmp_path)
    lines = lines_of(way, training)
    chosen = range(1, lines + 1)
    chosen = sorted(trials.random.sample(chosen, min(lines, trials.count(25, lines))))
    interrupted = 0
    for at in chosen:
        interrupt = Interrupt(at)
        try:
            with interrupt:
                way(training)
        except KeyboardInterrupt:
            interrupted += 1
        check(training, f"line {at} of {lines}: {interrupt.where}")
    training.ckpt.close()
    assert gate._pending == ()
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert interrupted >= len(chosen) * 0.8, "the lines were not met"
    trials.report(f"Ctrl-C at a line of {way.__name__}", interrupted, tmp_path)


def check(training: Training, where: str) -> None:
    """All that was saved lands within seconds, the ring is empty then, and a save holds what it should."""
    __tracebackhide__ = True
    saver = training.ckpt._saver
    done = concurrent.futures.wait(saver._background._in_flight, timeout=5)
    assert not done.not_done, f"{where}: a save that never ends"
    done = concurrent.futures.wait(saver._background._tasks, timeout=5)
    assert not done.not_done, f"{where}: a task that never ends"
    before = training.model[0].weight.detach().clone()
    try:
        handle = training.save()
    except lazyckpt.SaveError as error:
        raise AssertionError(f"{where}: {error}") from error
    training.step()
    path = handle.result(timeout=5)
    assert torch.equal(torch.load(path / "state.pt")["model"]["0.weight"], before), where
    assert not torch.equal(training.model[0].weight, before), where
    saver.drain()
    assert gc.isenabled(), where
    assert not in_flight, where
    assert saver.engine.ring_used_bytes == 0, where
    assert gate._pending == (), where
    assert not gate._open, where
