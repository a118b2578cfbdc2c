"""Automatic intervals: in simulated time, where costs are known, and in a small real run."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.metrics import CheckpointMetrics
from lazyckpt.observe.interval import AutoInterval


class Simulation:
    """Simulates a training and its clock. save() takes ``save_s``; each of the next ``slowed`` iterations takes
    ``slowdown_s`` more; then the checkpoint is durable."""

    def __init__(self, max_overhead: float, *, iteration_s: float = 0.1, seed: int = 0, jitter: float = 0.0) -> None:
        self.now = 1000.0
        self.interval = AutoInterval(max_overhead, clock=lambda: self.now)
        self.iteration_s, self.jitter = iteration_s, jitter
        self.save_s, self.slowdown_s, self.slowed = 0.01, 0.0, 2
        self.first_save_s = self.save_s
        self.validate_every, self.validation_s = 200, 0.0
        self.saves: list[int] = []
        self.spent = 0.0
        self._random = random.Random(seed)
        self._left = 0
        self._step = 0
        self._metrics = CheckpointMetrics()
        self._saved_at = 0.0

    def run(self, iterations: int) -> None:
        for _ in range(iterations):
            self._step += 1
            self.now += self.iteration_s * (1 + self.jitter * self._random.uniform(-1, 1))
            if self._left:
                self._left -= 1
                self.now += self.slowdown_s
                self.spent += self.slowdown_s
                self._metrics.durable_s = self.now - self._saved_at
            if self.validation_s and self._step % self.validate_every == 0:
                self.now += self.validation_s
                self._left = 0  # it is durable long before the validation is over
            if self.interval.due(self._step, in_flight=self._left > 0):
                seconds = self.save_s if self.saves else self.first_save_s
                self._saved_at = self.now
                self.now += seconds
                self.spent += seconds
                self.saves.append(self._step)
                self._left = self.slowed
                self._metrics = CheckpointMetrics()
                self.interval.saved(self._metrics)

    @property
    def gaps(self) -> list[int]:
        return [b - a for a, b in pairwise(self.saves)]


@pytest.mark.parametrize(("save_s", "slowdown_s"), [(0.05, 0.0), (0.0, 0.02), (0.03, 0.05)])
def test_the_overhead_is_what_was_asked_for(save_s: float, slowdown_s: float) -> None:
    simulation = Simulation(0.02)
    simulation.save_s = simulation.first_save_s = save_s
    simulation.slowdown_s = slowdown_s
    simulation.run(5000)
    cost = save_s + simulation.slowed * slowdown_s
    expected = cost / (0.02 * simulation.iteration_s)
    assert set(simulation.gaps[1:]) <= {round(expected), round(expected) + 1}  # rounded up
    assert 0.018 < simulation.spent / (5000 * simulation.iteration_s) <= 0.0201


def test_it_follows_costs_that_change() -> None:
    simulation = Simulation(0.05)
    simulation.save_s = simulation.first_save_s = 0.1
    simulation.run(1000)
    assert simulation.gaps[-1] in (20, 21)  # rounded up
    simulation.save_s = 0.4  # a slower disk
    simulation.run(2000)
    assert simulation.gaps[-1] in (80, 81)
    simulation.iteration_s = 0.4  # larger batches
    simulation.run(500)
    assert simulation.gaps[-1] in (20, 21)  # rounded up
    simulation.save_s = 0.1
    simulation.run(500)
    assert simulation.gaps[-1] < 10


def test_it_waits_for_the_disk_and_leaves_iterations_to_compare_with() -> None:
    simulation = Simulation(0.5)
    simulation.slowed = 30
    simulation.save_s = simulation.first_save_s = 0.0001
    simulation.run(500)
    assert min(simulation.gaps) > 30 and max(simulation.gaps) <= 40


def test_the_first_checkpoint_costs_more_and_does_not_count_for_long() -> None:
    simulation = Simulation(0.05)
    simulation.first_save_s = 1.0
    simulation.save_s = 0.1
    simulation.run(3000)
    assert simulation.gaps[0] == 200 and set(simulation.gaps[2:]) <= {20, 21}


def test_jitter_and_rare_slow_iterations_do_not_matter_much(trials: Any) -> None:
    worst = 0.0
    for seed in range(trials.count(3, 50)):
        simulation = Simulation(0.05, seed=seed, jitter=0.2)
        simulation.save_s = simulation.first_save_s = 0.1
        for _ in range(20):
            simulation.run(200)
            simulation.now += 5.0  # a validation
        worst = max(worst, simulation.spent / (4000 * simulation.iteration_s))
    assert 0.01 < worst < 0.075


@pytest.mark.parametrize("validate_every", [50, 200, 1000])
def test_a_validation_is_not_taken_for_the_cost_of_a_checkpoint(validate_every: int) -> None:
    simulation = Simulation(0.02, jitter=0.1)
    simulation.validate_every, simulation.validation_s = validate_every, 60.0
    simulation.run(20_000)
    # A checkpoint is durable after two iterations: at worst they seem lost, 10 ms of them were.
    assert max(simulation.gaps) <= 0.21 / (0.02 * simulation.iteration_s) * 1.1
    assert simulation.spent / (20_000 * simulation.iteration_s) <= 0.021


def test_a_real_run(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    with lazyckpt.Checkpointer(tmp_path, save_every="auto", max_overhead=0.2, keep_last=2) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        saved, intervals = [], set()
        for step in range(1, 10_000):  # on a busy machine the first checkpoint makes a long interval
            model(torch.ones(200, 300)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if (handle := ckpt.maybe_save(step)) is not None:
                saved.append(handle)
            intervals.add(ckpt.interval)
            if step >= 150 and len(saved) >= 2 and len(intervals) >= 2:
                break
    assert len(saved) < step * 2 / 3 and len(intervals) >= 2
    assert saved[0].step == 8  # as soon as there is something to compare with
    assert all(later.step > before.step for before, later in pairwise(saved))
    assert lazyckpt.load(saved[-1].result())["model"]["weight"].shape == (300, 300)


def test_a_fixed_interval(tmp_path: Path) -> None:
    with lazyckpt.Checkpointer(tmp_path, save_every=3) as ckpt:
        ckpt.track(x=torch.ones(2))
        handles = [ckpt.maybe_save(step) for step in range(10, 20)]
        assert [handle.step for handle in handles if handle is not None] == [12, 15, 18] and ckpt.interval == 3


def test_wrong_uses(tmp_path: Path) -> None:
    for wrong in ({"save_every": 0}, {"save_every": "often"}, {"save_every": True}, {"save_every": 1.5}):
        with pytest.raises(lazyckpt.ConfigError, match="save_every"):
            lazyckpt.Checkpointer(tmp_path / "run", **wrong)  # type: ignore[arg-type]
    for part in (0, 1, -0.1, float("nan"), "2 %"):
        with pytest.raises(lazyckpt.ConfigError, match="max_overhead"):
            lazyckpt.Checkpointer(tmp_path / "run", save_every="auto", max_overhead=part)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
    with lazyckpt.Checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.interval is None
        with pytest.raises(lazyckpt.ConfigError, match="save_every"):
            ckpt.maybe_save(1)
    with lazyckpt.Checkpointer(tmp_path / "run", save_every="auto") as ckpt:
        pass
    with pytest.raises(lazyckpt.ClosedError):
        ckpt.maybe_save(1)
