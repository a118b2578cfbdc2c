"""Ctrl-C wherever the training thread runs code of ours: it gets through, and the next save works."""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from interrupts import (
    Interrupt,
    Training,
    check,
    gated_step,
    points_of,
    restore,
    result,
    save,
    save_blocking,
    wait_captured_and_step,
)
from lazyckpt.gate.gate import gate
from trials import TORTURE, Trials

# A hang ends the run, with the stack of every thread.
pytestmark = [
    pytest.mark.timeout(600 if TORTURE else 150, method="thread"),
    pytest.mark.usefixtures("small_tensors_are_lazy"),
]
WAYS = [save, save_blocking, wait_captured_and_step, gated_step, restore, result]


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_ctrl_c_anywhere_and_the_next_save_works(
    way: Callable[[Training], None], tmp_path: Path, trials: Trials
) -> None:
    """Regressions: close() and later saves hung after Ctrl-C between the copy of the eager bytes and the hand-over to
    the background."""
    training = Training(tmp_path)
    points = points_of(way, training)
    last = range(max(1, points - 60), points + 1) if way is save else ()  # the hand-over
    chosen = sorted({*last, *trials.random.sample(range(1, points + 1), min(points, trials.count(12, points)))})
    interrupted = 0
    for at in chosen:
        interrupt = Interrupt(at)
        try:
            with interrupt:
                way(training)
        except KeyboardInterrupt:
            interrupted += 1
        check(training, f"point {at} of {points}: {interrupt.where}")
    training.ckpt.close()
    assert gate._pending == ()
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert interrupted >= len(chosen) * 0.8, "the points were not met"
    trials.report(f"Ctrl-C at any point of {way.__name__}", interrupted, tmp_path)


@pytest.mark.usefixtures("nothing_is_learnt")
def test_ctrl_c_while_a_torn_snapshot_is_found(tmp_path: Path, disk: Any) -> None:
    """Regression: between noting that a storage was looked at and saying what was found, and it was published."""
    training = Training(tmp_path, host_buffer_bytes=1 << 20, witness="versions")
    points, at = 1, 0
    while at < points:
        training.step()
        disk.hold()  # so that the step is who looks first
        handle = training.save()
        with torch.no_grad():
            training.model[1].weight.add_(1)
        interrupt = Interrupt(at)
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            training.optimizer.step()
        disk.release()
        assert isinstance(handle.exception(timeout=60), lazyckpt.TornSnapshotError), interrupt.where
        points = max(points, interrupt.points)
        at += 1
    assert points > 20, "the points were not met"
    training.ckpt.close()


def test_ctrl_c_while_handles_are_asked(tmp_path: Path) -> None:
    """Regression: a signal came between taking a handle's lock and the block that gives it back."""
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    random.seed(1)
    try:
        with lazyckpt.Saver() as saver, concurrent.futures.ThreadPoolExecutor(1) as other:
            for _ in range(60):
                handle = saver.save({"x": torch.zeros(100_000)}, tmp_path / "a.pt")
                with contextlib.suppress(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0003, 0.004))
                    while True:
                        handle.done()
                assert other.submit(handle.result, 10).result(20) == tmp_path / "a.pt"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
