"""The trial of trainings that are killed: what survives a kill, and the report."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import goodput, workload
from benchmarks.goodput import ARMS, Job, Trial
from benchmarks.report import load_section

EVERY = 2
SLOW = {arm: pytest.mark.slow for arm in ARMS if "lightning" in arm}  # each life imports it anew


@pytest.mark.long(first=2)
@pytest.mark.parametrize("arm", [pytest.param(arm, marks=SLOW.get(arm, ())) for arm in ARMS])
def test_a_killed_training_resumes_from_its_newest_checkpoint(arm: str, tmp_path: Path) -> None:
    """Each life is killed by its steps, not by a clock. What an engine that is asynchronous has not written is lost."""
    if "lightning" in arm:
        pytest.importorskip("lightning")
    trial = Trial(Job(arm, tmp_path, state_bytes=1_000_000, sequences=1, every=EVERY, threads=1))
    told = trial.told
    trial.live(lambda: any(tmp_path.glob("step-*")) and told.step >= 3 * EVERY)
    saved = trial.useful_steps()
    assert saved % EVERY == 0 and saved <= told.steps
    trial.live(lambda: told.resumed > 0 and told.step >= saved + 4 * EVERY)
    assert trial.useful_steps() >= saved
    assert len(trial.restarts_s) == 2


def test_a_process_that_ends_by_itself_is_reported(tmp_path: Path) -> None:
    with pytest.raises(goodput.ArmFailed, match="no such engine ended by itself with 1"):
        Trial(Job("no such engine", tmp_path, state_bytes=1_000_000, sequences=1)).live(lambda: False)


def test_kills_come_as_often_as_the_mean_time_says_and_the_last_ends_the_trial() -> None:
    moments = goodput._kills(random.Random(0), mtbf_s=2.0, trial_s=4000.0)
    assert moments == sorted(moments) and moments[-1] == 4000.0
    assert len(moments) == pytest.approx(2000, rel=0.1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_goodput_is_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (goodput, "TRIAL_S", 1.0),
        (goodput, "MTBF_S", 0.5),
        (goodput, "COMPUTE_S", 0.0),
        (workload, "LAYERS", 1),
        (workload, "VOCABULARY", 64),
    ):
        monkeypatch.setattr(module, name, value)
    folders = ["--dir", str(tmp_path / "disk"), "--output", str(tmp_path / "report")]
    sizes = ["--pairs", "1", "--train-gb", "0.001", "--arms", "lazyckpt,torch.save"]
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--only", "goodput", *sizes, *folders])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 0
    section = load_section(tmp_path / "report", "goodput")
    assert section is not None
    (table,) = section.tables
    assert [row[0] for row in table.rows] == ["lazyckpt", "torch.save"]
    assert not [row for row in table.rows if "missing" in row]
