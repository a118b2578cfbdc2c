"""The benchmarks of the trainers run, and their stopwatch misses nothing that a checkpoint makes training wait for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from benchmarks import frameworks
from benchmarks.frameworks import NONE, TRAINERS, Block
from benchmarks.workload import Training
from lazyckpt.capture.gate import gate

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = 10_000_000  # bytes of the smallest model
CHECKPOINTS = 2
STEPS = (CHECKPOINTS + 1) * frameworks.EVERY + 1
WAIT_S = 0.2


@pytest.fixture(scope="module")
def training() -> Training:
    return Training(SMALL)


def run(training: Training, trainer: str, arm: str, folder: Path) -> Block:
    pytest.importorskip(trainer)
    block = Block(training, arm, folder / "run", STEPS)
    block.run(TRAINERS[trainer].train)
    assert not list(folder.iterdir())
    return block


@pytest.mark.parametrize(("trainer", "arm"), [(t, arm) for t, kind in TRAINERS.items() for arm in (NONE, *kind.arms)])
def test_every_arm_saves_as_often(training: Training, trainer: str, arm: str, tmp_path: Path) -> None:
    before = training.model.head.weight.detach().clone()
    block = run(training, trainer, arm, tmp_path)
    assert block.seconds > block.blocked_s > 0
    assert block.watch.saves == (0 if arm == NONE else CHECKPOINTS)
    assert not torch.equal(before, training.model.head.weight), "nothing was trained"
    ours = arm == TRAINERS[trainer].arms[-1]
    # The Trainer's loggers get the newest checkpoint that is durable, which on a slow disk is not each.
    least = 1 if trainer == "transformers" else CHECKPOINTS + 1
    assert (least if ours else 0) <= len(block.reported_s) <= (CHECKPOINTS + 1 if ours else 0)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("where", ["save", "gate"])
def test_what_a_checkpoint_makes_training_wait_for_counts(
    training: Training, trainer: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the call that saves, and at the gate, which with Lightning stands inside ``optimizer.step``."""

    def late(method: Any) -> Any:
        def wait_and(*args: Any, **kwargs: Any) -> Any:
            time.sleep(WAIT_S)
            return method(*args, **kwargs)

        return wait_and

    if where == "save":
        monkeypatch.setattr(lazyckpt.Saver, "submit", late(lazyckpt.Saver.submit))
    else:
        monkeypatch.setattr(gate, "_wait", late(gate._wait))
    block = run(training, trainer, TRAINERS[trainer].arms[-1], tmp_path)
    assert WAIT_S <= block.blocked_s < block.seconds / CHECKPOINTS


def test_a_trainer_that_is_not_installed_is_missing_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_none(block: Block) -> None:
        raise ImportError("no module named trainer")

    def train_instantly(block: Block) -> None:
        block.step_begins(frameworks.EVERY, lambda: None)
        with block.watch.saving():
            (block.folder / "checkpoint").write_bytes(b"")

    kinds = {
        "absent": frameworks.TrainerKind(train_none, ("default",)),
        "present": frameworks.TrainerKind(train_instantly, ("default", "ours")),
    }
    monkeypatch.setattr(frameworks, "TRAINERS", kinds)
    told: list[str] = []
    table = frameworks.measure(
        pairs=2, checkpoints=1, state_bytes=SMALL, directory=tmp_path, progress=told.append, compute_s=0
    )
    rows = {row[0]: row[1:] for row in table.rows}
    assert list(rows) == ["absent: none", "absent: default", "present: none", "present: default", "present: ours"]
    assert set(rows["absent: default"]) == {"missing"}
    assert any("no module named trainer" in note for note in table.notes)
    assert rows["present: none"][0] == "1" and "missing" not in rows["present: ours"]
    assert len(told) == 2 + 3 * 3  # what is missing is tried once, the others in the round that warms up, too
