"""The model of many ranks: its closed forms, its limits, and the simulations that agree with it."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ranks_simulation
from benchmarks.scale import __main__ as scale
from benchmarks.scale import ranks as scale_ranks
from benchmarks.scale.constants import OURS
from benchmarks.scale.failures import Saving, goodput, simulate
from benchmarks.scale.model import (
    Job,
    best_in_flight,
    commit_s,
    cost_s,
    durable_s,
    engines,
    iteration_with_save_s,
    load_s,
    mtbf_s,
    plan,
    rate_gbps,
    recovery_s,
    shortest_interval_s,
    slowest,
    throughput_gbps,
)
from benchmarks.scale.ranks import RANKS, straggling
from lazyckpt.tools.advice import optimal_interval_s

DOCS = Path(__file__).parent.parent / "docs"

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


# Many ranks


def job(ranks: int, **changes: float) -> Job:
    return replace(Job(ranks, 10.0 * ranks, 5.0, ranks), **changes)


@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_the_commit_takes_as_long_as_in_the_simulation_of_the_real_code(ranks: int) -> None:
    assert 1e3 * commit_s(ranks, OURS) == pytest.approx(ranks_simulation.commit(ranks).milliseconds, rel=0.15)


def test_a_rate_is_that_of_the_narrowest_place() -> None:
    *_, ours = engines(OURS)
    one = job(64)  # 8 nodes
    assert rate_gbps(one, ours, OURS) == 8 * OURS.node_gbps
    assert rate_gbps(one, ours, OURS, writers=1) == ours.writer_gbps
    assert rate_gbps(one, ours, replace(OURS, link_gbps=0.1)) == pytest.approx(64 * 0.1)
    assert rate_gbps(one, ours, replace(OURS, shared_gbps=20.0)) == 20.0
    assert rate_gbps(one, ours, OURS, in_flight=4) == 8 * OURS.node_gbps / 4


def test_more_writers_are_never_slower_and_gain_nothing_once_the_storage_is_busy() -> None:
    even = replace(OURS, straggler=0.0)
    *_, ours = engines(even)
    seconds = [durable_s(job(64), ours, even, writers=writers) for writers in (1, 2, 8, 33, 48, 64)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-3] == seconds[-2] == seconds[-1]
    assert [slowest(nodes, even) for nodes in (1, 1000)] == [1.0, 1.0]


def test_more_nodes_have_a_slower_slowest_one() -> None:
    factors = [slowest(nodes, OURS) for nodes in (1, 2, 16, 2048)]
    assert factors[0] == pytest.approx(1.0) and factors == sorted(set(factors))
    draw = straggling(1.0, 16, OURS)
    source = random.Random(0)
    drawn = sorted(draw(source) for _ in range(2001))
    assert drawn[1000] == pytest.approx(1.0, rel=0.02), "the median"


def test_an_iteration_waits_for_the_storage_or_for_the_blocked_time() -> None:
    torch_save, _, ours = engines(OURS)
    slow, fast = job(64, iteration_s=0.01), job(64, iteration_s=100.0)
    assert iteration_with_save_s(slow, ours, OURS) == pytest.approx(durable_s(slow, ours, OURS), rel=0.05)
    assert iteration_with_save_s(fast, ours, OURS) == 100.0 + cost_s(fast, ours, OURS)
    assert iteration_with_save_s(fast, torch_save, OURS) == 100.0 + durable_s(fast, torch_save, OURS)
    assert throughput_gbps(fast, ours, OURS) > 100 * throughput_gbps(fast, torch_save, OURS)


def test_copies_that_an_iteration_does_not_hide_delay_the_step() -> None:
    *_, ours = engines(OURS)
    hidden, late = (cost_s(job(8, iteration_s=iteration_s), ours, OURS) for iteration_s in (1.0, 0.0))
    assert late - hidden == pytest.approx(10.0 / OURS.link_gbps)


def test_in_flight_are_the_fewest_that_keep_the_storage_busy() -> None:
    *_, ours = engines(OURS)
    assert best_in_flight(job(64), ours, OURS) == 1
    narrow = replace(ours, writer_gbps=OURS.node_gbps / 8 / 3)  # a third of the share of a rank
    assert best_in_flight(job(64), narrow, OURS) == 3
    assert shortest_interval_s(job(64), narrow, OURS, 3) < shortest_interval_s(job(64), narrow, OURS, 1) / 2
    assert best_in_flight(job(64), engines(OURS)[0], OURS) == 1, "a call that blocks"


def test_replicas_read_each_byte_once_with_lazyckpt_alone() -> None:
    torch_save, _, ours = engines(OURS)
    few, many = Job(8, 10.0, 5.0, 1), Job(16_384, 10.0, 5.0, 1)
    assert load_s(few, ours, OURS) == 10.0 / OURS.node_gbps + 10.0 / OURS.network_gbps
    assert load_s(many, ours, OURS) < load_s(few, ours, OURS)
    assert load_s(few, torch_save, OURS) == 10.0 / torch_save.reader_gbps
    assert load_s(many, torch_save, OURS) == 10.0 * 2048 / OURS.shared_gbps, "once for each node"
    assert load_s(job(64), ours, OURS) == 8 * 10.0 / OURS.node_gbps, "shards are read by those that hold them"


@pytest.mark.parametrize("number", range(3))
def test_more_ranks_fail_more_often_and_lose_more(number: int) -> None:
    engine = engines(OURS)[number]
    lost = [1 - goodput(plan(scale_ranks.job(ranks), engine, OURS), mtbf_s(job(ranks), OURS)) for ranks in RANKS]
    assert lost == sorted(lost)
    intervals = [plan(scale_ranks.job(ranks), engine, OURS).interval_s for ranks in RANKS]
    assert intervals == sorted(intervals, reverse=True)
    assert all(recovery_s(plan(scale_ranks.job(ranks), engine, OURS)) > OURS.restart_s for ranks in RANKS)


def test_the_interval_is_never_shorter_than_the_storage_allows() -> None:
    *_, ours = engines(OURS)
    crowded = replace(OURS, rank_mtbf_h=OURS.rank_mtbf_h / 1000, node_gbps=0.5)
    saving = plan(job(512), ours, crowded)
    assert saving.interval_s >= saving.durable_s / saving.in_flight


# The page


def test_the_page_has_the_tables_of_the_model() -> None:
    """``python -m benchmarks.scale`` prints them."""
    page = (DOCS / "scale.md").read_text()
    assert [title for title, table in scale.tables().items() if table not in page] == []


def test_the_page_shows_the_pictures_of_the_model() -> None:
    page = (DOCS / "scale.md").read_text()
    for name, (title, picture) in scale.pictures().items():
        assert f"(img/{name}.svg)" in page
        text = (DOCS / "img" / f"{name}.svg").read_text()
        assert [words for words in (title, *picture.lines) if f">{words}<" not in text] == []


def test_every_constant_has_a_source_and_is_an_argument(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert all(one.metadata["source"] and one.metadata["kind"] for one in fields(OURS))
    monkeypatch.setattr(sys, "argv", ["scale", "--restart-s", "20"])
    before = {path: path.read_bytes() for path in (DOCS / "img").glob("scale-*.svg")}
    monkeypatch.setattr(scale_ranks, "SAVES", 100)
    monkeypatch.setattr(scale_ranks, "RANKS", RANKS[-1:])
    scale.main()
    assert "| `restart_s` | 20 |" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in before}
