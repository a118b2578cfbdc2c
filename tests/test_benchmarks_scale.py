"""The model of many ranks: its closed forms, its limits, and the simulations that agree with it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from benchmarks.scale.failures import Saving, goodput, simulate
from lazyckpt.tools.advice import optimal_interval_s

HOUR = 3600.0
ASYNCHRONOUS = Saving(interval_s=100.0, cost_s=0.5, durable_s=30.0, restart_s=60.0)


# Failures


def test_without_failures_only_the_cost_is_lost() -> None:
    assert goodput(ASYNCHRONOUS, 1e12) == pytest.approx(100 / 100.5, rel=1e-6)


def test_a_save_that_blocks_until_durable_gives_the_formula_of_daly() -> None:
    one = replace(ASYNCHRONOUS, cost_s=20.0, durable_s=20.0)
    segment_s = HOUR * math.exp(one.restart_s / HOUR) * math.expm1(120.0 / HOUR)  # to complete one, with its failures
    assert goodput(one, HOUR) == pytest.approx(100.0 / segment_s, rel=1e-12)


def test_rare_failures_lose_half_an_interval_the_write_and_the_restart() -> None:
    """What ``lazyckpt.advise`` adds up."""
    one, mtbf_s = ASYNCHRONOUS, 1000 * HOUR
    lost = one.cost_s / 100.5 + (100.5 / 2 + one.durable_s - one.cost_s + one.restart_s) / mtbf_s
    assert 1 - goodput(one, mtbf_s) == pytest.approx(lost, rel=0.01)


@pytest.mark.parametrize(
    "saving",
    [
        ASYNCHRONOUS,
        replace(ASYNCHRONOUS, cost_s=20.0, durable_s=20.0),
        replace(ASYNCHRONOUS, durable_s=150.0),  # two in flight
        replace(ASYNCHRONOUS, restart_s=1800.0),  # which fail, too
    ],
    ids=["asynchronous", "blocking", "in flight", "long restart"],
)
def test_the_simulation_agrees_with_the_closed_form(saving: Saving) -> None:
    assert simulate(saving, HOUR, failures=6000) == pytest.approx(goodput(saving, HOUR), rel=0.015)


def test_a_save_that_waits_for_an_earlier_one_delays_training() -> None:
    """The closed form knows nothing of that; the disk then sets the pace."""
    slow = replace(ASYNCHRONOUS, durable_s=400.0, in_flight=1)
    assert simulate(slow, 1e6, failures=1) == pytest.approx(100.0 / 400.0, rel=0.01)
    assert simulate(replace(slow, in_flight=8), 1e6, failures=1) == pytest.approx(100 / 100.5, rel=0.01)


def test_a_straggler_in_some_saves_costs_about_what_its_mean_does() -> None:
    mean = simulate(ASYNCHRONOUS, HOUR, 3000, durable_s=lambda draw: draw.choice([20.0, 40.0]))
    assert mean == pytest.approx(goodput(ASYNCHRONOUS, HOUR), rel=0.015)


def test_more_of_everything_bad_is_worse() -> None:
    for name in ("cost_s", "durable_s", "restart_s"):
        values = [goodput(replace(ASYNCHRONOUS, **{name: value}), HOUR) for value in (1.0, 10.0, 100.0)]
        assert values == sorted(values, reverse=True)
    by_failures = [goodput(ASYNCHRONOUS, mtbf_s) for mtbf_s in (HOUR / 10, HOUR, 10 * HOUR)]
    assert by_failures == sorted(by_failures)


@pytest.mark.parametrize("cost_s", [0.1, 5.0, 60.0])
def test_the_interval_of_advise_is_nearly_the_best(cost_s: float) -> None:
    """Daly's formula is for saves that block; the time until one is durable moves the loss, not the best interval."""

    def at(interval_s: float) -> float:
        return goodput(replace(ASYNCHRONOUS, interval_s=interval_s, cost_s=cost_s, durable_s=cost_s + 30.0), HOUR)

    advised = optimal_interval_s(cost_s, HOUR)
    best = max(at(advised * factor / 20) for factor in range(4, 100))
    assert best - at(advised) < 0.001


def test_the_simulation_is_the_same_in_every_run() -> None:
    draws = {simulate(ASYNCHRONOUS, HOUR, 50, seed=3, durable_s=random.Random.random) for _ in range(2)}
    assert len(draws) == 1
