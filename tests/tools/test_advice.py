"""The papers' formulas against their definitions and a simulation, and the command that applies them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lazyckpt
from commands import fails, run, run_json
from lazyckpt.observe.trace_file import SAVES, TRAINING
from lazyckpt.tools.advice import optimal_interval_s
from lazyckpt.tools.trace import TraceFile, measure_trace
from lazyckpt.tools.units import parse_duration, parse_size

GIB = 1 << 30
KNOWN: dict[str, Any] = {"state_bytes": 3_500_000_000, "iteration_s": 0.8, "write_bytes_per_s": 1.2e9}

durations = st.floats(1e-4, 1e4)


@settings(max_examples=40, deadline=None)
@given(
    state_bytes=st.integers(1, 1 << 45),
    iteration_s=durations,
    write_bytes_per_s=st.floats(1e6, 1e12),
    share=st.floats(0, 0.9),
    cost_s=st.floats(0, 100),
    max_overhead=st.floats(1e-3, 0.5),
    gpus=st.integers(1, 10_000),
    failure_s=st.none() | st.floats(60, 1e7),
)
def test_what_each_number_promises(
    share: float, gpus: int, max_overhead: float, failure_s: float | None, **known: Any
) -> None:
    overlap_s = known["iteration_s"] * (1 - share)
    a = lazyckpt.advise(
        **known, optimizer_s=known["iteration_s"] * share, gpus=gpus, max_overhead=max_overhead, failure_s=failure_s
    )
    # FastPersist, 1: at that speed the write takes as long as forward and backward.
    assert a.state_bytes / a.hide_bytes_per_s == pytest.approx(overlap_s)
    assert a.hidden == (a.write_s <= overlap_s) or math.isclose(a.write_s, overlap_s)
    # FastPersist, 2
    assert a.redo_s == pytest.approx(a.every / 2 * gpus * a.iteration_s)
    # The least intervals: they hold, and one less does not.
    for every, needed_s in ((a.disk_every, a.write_s), (a.overhead_every, a.cost_s / max_overhead)):
        assert every * a.iteration_s >= needed_s * (1 - 1e-6)
        assert every == 1 or (every - 1) * a.iteration_s < needed_s * (1 + 1e-6)
    assert a.every == max(a.disk_every, a.overhead_every, a.failure_every or 1)
    assert a.overhead <= max_overhead * (1 + 1e-6)
    # The ring holds two chunks and the bytes not yet written at the end of backward.
    chunk = lazyckpt.Config.chunk_bytes
    rest = max(a.state_bytes - a.write_bytes_per_s * overlap_s, 0)
    assert rest + 2 * chunk <= a.ring_bytes * (1 + 1e-9) <= rest + 3 * chunk + 1 + rest * 1e-6
    lazyckpt.Config(chunk_bytes=4096, host_buffer_bytes=min(a.ring_bytes, 1 << 20))


@pytest.mark.parametrize(("cost_s", "failure_s"), [(0.02, 600.0), (2.0, 3600.0), (30.0, 3600.0), (60.0, 86400.0)])
def test_no_other_interval_loses_less_when_failures_come_at_random(cost_s: float, failure_s: float) -> None:
    """Simulates a training: iterations take a second, a checkpoint is durable after two; a failure loses the rest."""
    a = lazyckpt.advise(
        state_bytes=10**9, iteration_s=1.0, write_bytes_per_s=5e8, cost_s=cost_s, failure_s=failure_s, max_overhead=0.5
    )
    generator = torch.Generator().manual_seed(0)
    # As long as it runs from one failure to the next.
    runs = torch.empty(100_000, dtype=torch.float64).exponential_(1 / failure_s, generator=generator)

    def lost(every: int) -> float:
        """Checkpoint k begins after k intervals and the k - 1 checkpoints before."""
        durable = ((runs - a.write_s + cost_s) / (every * a.iteration_s + cost_s)).floor().clamp(min=0)
        return 1 - float((durable * every * a.iteration_s).sum() / runs.sum())

    assert a.failure_every is not None and a.every == max(a.failure_every, a.disk_every)
    best = min(lost(every) for every in range(a.disk_every, 4 * a.every, max(a.every // 50, 1)))
    assert lost(a.every) <= 1.01 * best
    assert lost(2 * a.every) > 1.02 * best and (a.every == a.disk_every or lost(a.every // 2) > 1.02 * best)
    assert a.loss == pytest.approx(lost(a.every), rel=0.15)


def test_daly_has_an_end() -> None:
    assert optimal_interval_s(100.0, 10.0) == 10.0
    assert optimal_interval_s(0.0, 10.0) == 0.0


def test_nonsense_is_refused_by_name() -> None:
    wrong: list[tuple[str, Any]] = [("state_bytes", 0), ("state_bytes", True), ("iteration_s", -1.0), ("gpus", 0)]
    wrong += [("iteration_s", math.nan), ("write_bytes_per_s", math.inf), ("write_bytes_per_s", "fast")]
    wrong += [("cost_s", -0.1), ("optimizer_s", 0.8), ("max_overhead", 0), ("max_overhead", 2), ("failure_s", 0.0)]
    for name, value in [*wrong, ("chunk_bytes", 0)]:
        with pytest.raises(lazyckpt.ConfigError, match=name):
            lazyckpt.advise(**{**KNOWN, name: value})


# the command


FLAGS = ("--state", "3.5GB", "--iteration", "800ms", "--bandwidth", "1.2GB/s")


def test_it_explains_every_number() -> None:
    given = ["--cost", "20ms", "--mtbf", "2h", "--gpus", "8", "--optimizer", "0.1s"]
    told = run_json("advise", *FLAGS, *given)
    expected = lazyckpt.advise(**KNOWN, cost_s=0.02, failure_s=7200, gpus=8, optimizer_s=0.1)
    assert {name: told[name] for name in vars(expected)} == pytest.approx(vars(expected))
    lines = run("advise", *FLAGS, *given).stdout.splitlines()
    for what in ("save every", "for the disk", "for the overhead", "for failures", "a failure repeats", "ring"):
        (line,) = [line for line in lines if line.strip().startswith(what)]
        assert len(line.split("  ")) >= 3 and line.split("  ")[-1].strip()


def test_units() -> None:
    for state, bandwidth in (("2GiB", "512 MiB"), ("2TiB", "512GiB"), ("2TB", "500GB/s")):
        assert parse_size(state) == 4 * parse_size(bandwidth)
    assert [parse_duration(text) for text in ("800ms", "1.5s", "2min", "1h", "2d")] == [0.8, 1.5, 120, 3600, 172_800]
    for wrong in ("many", "1e400GB", "1.2.3GB", "3 parsecs", ""):
        with pytest.raises(lazyckpt.ConfigError, match="expected a size such as"):
            parse_size(wrong)
    told = run("advise", *FLAGS, "--mtbf", "3 parsecs")
    assert told.exit_code == 2 and "--mtbf" in told.stderr and "expected a time such as" in told.stderr


def test_errors_are_one_line() -> None:
    for arguments, expected in (
        ([], "give --state, --iteration, --bandwidth"),
        (["--state", "3GB"], "give --iteration, --bandwidth"),
        ([*FLAGS, "--iteration", "0"], "iteration_s"),
        ([*FLAGS, "--max-overhead", "200"], "--max-overhead 200: expected a percentage"),
        ([*FLAGS, "--max-overhead", "nan"], "--max-overhead nan: expected a percentage"),
        (["nowhere.json"], "nowhere.json"),
    ):
        assert expected in fails(2, "advise", *arguments)


def traced(*iterations: tuple[float, float]) -> TraceFile:
    """Iterations (begin, length), and a checkpoint from 0.2 s to 0.45 s that blocked the training for 0.01 s."""
    metrics = {"bytes": 10, "write_s": 0.1, "durable_s": 0.25, "save_blocked_s": 0.008, "gate_blocked_s": 0.002}
    checkpoint = {"name": "step-1", "tid": SAVES, "dur": 0.25e6, "args": {"error": None, "metrics": metrics}}
    events = [checkpoint | {"ts": 0.2e6}]
    for begin_s, seconds in iterations:
        events.append({"name": "iteration", "tid": TRAINING, "ts": begin_s * 1e6, "dur": seconds * 1e6})
    return TraceFile(Path("trace.json"), [event | {"ph": "X", "run": 1} for event in events])


def test_a_validation_in_a_trace_is_not_taken_for_the_cost_of_a_checkpoint() -> None:
    assert measure_trace(traced((0.0, 0.1), (0.1, 0.1), (0.2, 60.0), (60.2, 0.1)))["cost_s"] == 0.25


@pytest.mark.parametrize("iterations", [[(0.2, 0.1), (0.3, 0.1)], [(0.0, 0.1), (0.1, 0.1)], []])
def test_with_nothing_to_compare_a_checkpoint_costs_what_it_blocked(iterations: list[tuple[float, float]]) -> None:
    """Every iteration overlaps a checkpoint, or none does."""
    assert measure_trace(traced(*iterations))["cost_s"] == pytest.approx(0.01)


def test_a_trace_without_an_iteration_to_measure_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyckpt.tools.trace.read_trace", lambda path: traced((0.2, 0.1)))
    line = fails(2, "advise", tmp_path / "t.json")
    assert line.endswith("t.json: there is no iteration without a checkpoint in it; give --iteration")
    assert run_json("advise", tmp_path / "t.json", "--iteration", "10ms")["cost_s"] == pytest.approx(0.01)


def test_numbers_come_from_a_trace_or_a_folder(tmp_path: Path) -> None:
    model = torch.nn.Linear(400, 400)
    optimizer = torch.optim.AdamW(model.parameters())
    handles = []
    with lazyckpt.Checkpointer(tmp_path / "run", trace=tmp_path / "trace.json") as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        for step in range(1, 31):
            model(torch.ones(256, 400)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                handles.append(ckpt.save(step))
                handles[-1].result(30)  # in this iteration: its cost is at least that
    told = run_json("advise", tmp_path / "trace.json")
    speeds = sorted(h.metrics.bytes / h.metrics.write_s for h in handles)
    assert told["state_bytes"] == handles[-1].metrics.bytes
    assert told["write_bytes_per_s"] == pytest.approx(speeds[1], rel=1e-6)
    waited = [h.metrics.durable_s for h in handles[1:]]  # the last iteration ends with the next step, which never came
    assert waited[0] * 0.5 < told["cost_s"] < 60 and 0 < told["optimizer_s"] < told["iteration_s"]
    given = run_json("advise", tmp_path / "trace.json", "--state", "1GB")
    assert given["state_bytes"] == 10**9 and given["iteration_s"] == told["iteration_s"]
    folder = run_json("advise", tmp_path / "run", "--iteration", "1s", "--bandwidth", "1GB")
    assert folder["state_bytes"] == told["state_bytes"]
    (tmp_path / "empty").mkdir()
    assert "no checkpoints" in fails(2, "advise", tmp_path / "empty")
