"""The trial can fail: it finds torn checkpoints once lazyckpt is blinded, and no third outcome passes the judge."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
import writers.trial
from lazyckpt import _engine
from lazyckpt.capture import laziness
from lazyckpt.capture.snapshot import Snapshot
from lazyckpt.storage import commit
from writers import registry
from writers.judge import Hang, Violation, flat, judge, limit
from writers.trial import HELD, Case, Plan, Round, Trial, witnesses

pytestmark = pytest.mark.filterwarnings("ignore:checkpoint not saved")
WITNESSES = witnesses()
CURE = "; call wait_captured() before"


def blind(patch: pytest.MonkeyPatch) -> None:
    """Takes away every verdict: no snapshot is found torn. The gate and the eager copies stay."""
    patch.setattr(Snapshot, "_changed", lambda *_: None)
    patch.setattr(Snapshot, "verify_frozen", lambda *_: None)
    # The write comes first, also on a busy machine: the copies are held until after it.
    patch.setattr(Case, "_reach", lambda *_: None)
    patch.setattr(writers.trial, "HOLD_S", 0.5)
    make = _engine.Engine
    patch.setattr(_engine, "Engine", lambda **knobs: make(**{k: v for k, v in knobs.items() if k != "watch_pages"}))


@pytest.mark.parametrize("witness", WITNESSES)
@pytest.mark.parametrize("way", sorted(registry.ALL_WAYS))
def test_without_its_verdict_the_trial_finds_torn_checkpoints(
    way: str, witness: str, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    blind(monkeypatch)
    for name in ("normal_", "numpy"):
        with pytest.raises(Violation, match="are not of the instant of save"):
            trial.run(Plan(name, witness, way, rounds=(Round(1, HELD),)))


@pytest.mark.parametrize("witness", WITNESSES)
def test_without_the_gate_the_trial_finds_steps(witness: str, trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    blind(monkeypatch)
    monkeypatch.setattr(Snapshot, "wait", lambda *_, **__: None)
    monkeypatch.setattr(Snapshot, "wait_all", lambda *_, **__: None)
    for name in ("fused step", "foreach step", "load_state_dict of a module"):
        with pytest.raises(Violation, match="are not of the instant of save"):
            trial.run(Plan(name, witness, rounds=(Round(1, HELD),)))


@pytest.mark.parametrize("witness", WITNESSES)
def test_a_run_in_which_every_save_fails_is_a_violation(
    witness: str, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish(staging: commit.Staging) -> None:
        raise lazyckpt.TornSnapshotError("model.0.weight was written to" + CURE, path=staging.target)

    monkeypatch.setattr(commit.Staging, "publish", publish)
    with pytest.raises(Violation, match="the save must commit"):
        trial.run(Plan("normal_", witness, rounds=(Round(1, None),)))


def test_with_nothing_lazy_every_writer_comes_too_late(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial raises no false alarm."""
    monkeypatch.setattr(laziness, "LAZY_MIN_BYTES", 1 << 60)
    monkeypatch.setattr(laziness, "FROZEN_MIN_BYTES", 1 << 60)
    for name in ("normal_", "numpy, thread", "fused step", "EMA by swap", "SWA", "SAM", "momentum encoder, in place"):
        assert trial.run(Plan(name, rounds=(Round(1, HELD), Round(0, None)))) == {"committed": 2}


class Handle:
    """A save that has ended."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def result(self, timeout: float) -> Path:
        if self._error is not None:
            raise self._error
        return Path("saved")


BEFORE = flat({"model": {"weight": torch.zeros(3), "bias": torch.zeros(1)}, "weight": torch.zeros(2), "lr": 0.1})
AFTER = {**BEFORE, "model.weight": torch.ones(3), "weight": torch.ones(2)}


def failed(what: str) -> Handle:
    return Handle(lazyckpt.TornSnapshotError(what, path="saved"))


def verdict(handle: Any, found: Any = BEFORE, **how: Any) -> Any:
    return judge(handle, lambda _: found, BEFORE, lambda: AFTER, **how)


def test_the_two_allowed_outcomes() -> None:
    assert verdict(Handle()) == ("committed", [])
    assert verdict(failed("model.weight was written to" + CURE)) == ("named", ["model.weight"])
    assert verdict(failed("archive.pt.model.weight, it" + CURE)) == ("named", ["model.weight"])
    assert verdict(failed("weight, model.weight" + CURE)) == ("named", ["model.weight", "weight"])


@pytest.mark.parametrize(
    ("handle", "found", "how", "says"),
    [
        (Handle(), AFTER, {}, "2 of 4 leaves"),
        (Handle(), {**BEFORE, "lr": 0.2}, {}, "lr"),
        (Handle(), {k: v for k, v in BEFORE.items() if k != "lr"}, {}, "lr"),
        (Handle(), {**BEFORE, "more": 1}, {}, "more"),
        (Handle(), {**BEFORE, "model.bias": torch.tensor([-0.0])}, {}, "model.bias"),
        (Handle(), {**BEFORE, "model.bias": torch.zeros(1, dtype=torch.float16)}, {}, "model.bias"),
        (failed("model.weight was written to" + CURE), BEFORE, {"must_commit": True}, "must commit"),
        (failed("something was written to" + CURE), BEFORE, {}, "names no tensor"),
        (failed("model.weight.grad was written to" + CURE), BEFORE, {}, "names no tensor"),
        (failed("data/0 was written to" + CURE), BEFORE, {}, "names no tensor"),
        (failed("model.weight was written to"), BEFORE, {}, "what helps"),
        (failed("model.bias was written to" + CURE), BEFORE, {}, "was not written to"),
        (failed("model.weight, model.bias were written to" + CURE), BEFORE, {}, "was not written to"),
        (Handle(TimeoutError()), BEFORE, {}, "never ended"),
    ],
)
def test_every_third_outcome_is_a_violation(handle: Any, found: Any, how: Any, says: str) -> None:
    with pytest.raises(Violation, match=says):
        verdict(handle, found, **how)


def test_a_hang_is_a_violation_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Hang, match="the plan"), limit(0.05, "the plan"):
        time.sleep(30)
    stacks = capfd.readouterr().err
    assert "HANG after 0.05 s: the plan" in stacks and "test_a_hang_is_a_violation_of_its_own" in stacks
    with limit(0.05, "a quick one"):
        pass
    time.sleep(0.1)  # no signal comes any more
