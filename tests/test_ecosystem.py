"""What `make ecosystem` finds: rows that do not hold what they should are told, each kind of failure by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import describe_graph

from ecosystem.rows import EVERY, Outcome, Recipe, Row, Run, loop, outcome

Break = Callable[[Recipe], Recipe]


def row(change: Break = lambda recipe: recipe, **knobs: Any) -> Row:
    """A plain loop, and what ``change`` makes of it."""

    def build() -> Recipe:
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Dropout(0.1))
        optimizer = torch.optim.AdamW(model.parameters())

        def step(number: int) -> None:
            optimizer.zero_grad()
            model(torch.ones(4, 256) * number).square().sum().backward()
            optimizer.step()

        return change(Recipe({"model": model, "optimizer": optimizer}, step))

    return Row("a loop", ("torch",), loop(build), **knobs)


def found(tmp_path: Path, row: Row) -> Outcome:
    return outcome(row, tmp_path, describe_graph)


def test_a_row_that_holds(tmp_path: Path) -> None:
    fine = found(tmp_path, row(eager=0.05))
    assert fine.failures == []
    assert fine.exact and fine.lazy_share is not None and fine.lazy_share > 0.95
    assert fine.versions == {"torch": torch.__version__}


def test_state_that_is_copied_inside_save(tmp_path: Path) -> None:
    def add_noise(recipe: Recipe) -> Recipe:
        return recipe._replace(tracked={**recipe.tracked, "noise": Noise(1 << 16)})

    (failure,) = found(tmp_path, row(add_noise, eager=0.05)).failures
    assert "eager shares of" in failure


class Noise:
    """State that no optimizer owns."""

    def __init__(self, size: int) -> None:
        self.value = torch.zeros(size)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_that_fails(tmp_path: Path) -> None:
    def tear(recipe: Recipe) -> Recipe:
        weight = recipe.tracked["model"][0].weight

        def write(step: int) -> None:
            if step == EVERY:
                weight.data.mul_(1.0)

        return recipe._replace(after_save=write)

    failures = found(tmp_path, row(tear, eager=1.0)).failures
    assert any(f"the checkpoint of step {EVERY} failed" in failure for failure in failures), failures


def test_state_that_is_not_tracked(tmp_path: Path) -> None:
    def forget(recipe: Recipe) -> Recipe:
        return recipe._replace(tracked={"model": recipe.tracked["model"]})

    (failure,) = found(tmp_path, row(forget, eager=0.1)).failures
    assert failure == "without lazyckpt, resumption is not exact"
    inexact = found(tmp_path / "again", row(forget, eager=0.1, exact=False))
    assert inexact.failures == [] and inexact.exact is False


def test_training_that_lazyckpt_changes(tmp_path: Path) -> None:
    plain = row(eager=0.05)

    def train(run: Run) -> Any:
        state = plain.train(run)
        if run.knobs is not None:
            with torch.no_grad():
                state["model"][0].weight[0, 0] += 1
        return state

    failures = found(tmp_path, dataclasses.replace(plain, train=train)).failures
    assert failures == [
        "training with lazyckpt does not end in the same bits as without",
        "resumption with lazyckpt does not end in the same bits as without",
    ]


def test_a_state_that_should_be_refused(tmp_path: Path) -> None:
    (failure,) = found(tmp_path, row(refused="the key")).failures
    assert failure == "the first save is not refused"
