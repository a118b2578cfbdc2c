"""A save keeps the decision of the save before as long as the facts are the same, and no longer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.capture.decision import Decision
from lazyckpt.gate.gate import gate

pytestmark = pytest.mark.usefixtures("small_tensors_are_lazy")

ADAM = lambda p: torch.optim.AdamW(p, lr=0.1)  # noqa: E731


class Body(torch.nn.Module):
    """Parameters, a buffer, a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(96, 96)
        self.second = torch.nn.Linear(96, 96)
        self.frozen = torch.nn.Linear(96, 96).requires_grad_(False)
        self.table = torch.nn.Embedding(96, 96)
        self.register_buffer("mean", torch.zeros(5000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.table(torch.arange(1))
        return self.frozen(self.second(self.first(x))) + rows


@pytest.fixture
def run(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(gate, "steps", weakref.WeakKeyDictionary())  # without the owners of other tests
    run = make_run(ADAM, Body())
    for step in range(4):  # the second save finds frozen parameters unchanged, the third makes them lazy
        run.step()
        run.ckpt.save(step, blocking=True)
    return run


def saved_again(run: Any, kept: list[Decision], step: int = 10) -> bool:
    """Saves; returns whether it kept the decision of the save before, which conftest.py then compares."""
    count = len(kept)
    run.ckpt.save(step, blocking=True)
    return len(kept) > count


def test_a_save_after_a_step_keeps_the_decision(run: Any, kept_decisions: list[Decision]) -> None:
    for step in (10, 11):
        run.step()
        assert saved_again(run, kept_decisions, step)
    assert kept_decisions[-1].lazy and kept_decisions[-1].frozen


def replace_parameter(run: Any) -> None:
    run.model.first.weight.data = torch.randn(96, 96)


def transpose_parameter(run: Any) -> None:
    run.model.first.weight.data = run.model.first.weight.data.t().contiguous().t()


def freeze(run: Any) -> None:
    run.model.first.weight.requires_grad_(False)


def unfreeze(run: Any) -> None:
    run.model.frozen.weight.requires_grad_()


def write_to_frozen(run: Any) -> None:
    with torch.no_grad():
        run.model.frozen.weight.add_(1)


def add_group(run: Any) -> None:
    run.model.third = torch.nn.Linear(96, 96)
    run.optimizer.add_param_group({"params": list(run.model.third.parameters())})


def add_state(run: Any) -> None:
    run.optimizer.state[run.model.first.weight]["extra"] = torch.zeros(5000)


def drop_state(run: Any) -> None:
    del run.optimizer.state[run.model.first.weight]["exp_avg"]


def tie(run: Any) -> None:
    run.model.second.weight = run.model.first.weight


def own_by_another(run: Any) -> None:
    other = torch.optim.SGD(run.model.first.parameters(), lr=0.1)
    other.step()
    run.other = other


def do_not_step(run: Any) -> None:
    run.skip = True


def limit_the_norm(run: Any) -> None:
    run.model.table.max_norm = 1.0


def guard(run: Any) -> None:
    run.average = torch.nn.Linear(96, 96)
    run.average.update = lambda: None
    run.ckpt.track(average=run.average)
    lazyckpt.guard(run.average, "update")
    run.average.update()


def grow_the_buffer(run: Any) -> None:
    run.model.mean = torch.zeros(6000)


def own_the_buffer(run: Any) -> None:
    run.optimizer.state[run.model.first.weight]["mean"] = run.model.mean


CHANGES: list[Callable[[Any], None]] = [
    replace_parameter, transpose_parameter, freeze, unfreeze, write_to_frozen, add_group, add_state, drop_state, tie,
    own_by_another, do_not_step, limit_the_norm, guard, grow_the_buffer, own_the_buffer,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_facts_makes_another_decision(
    change: Callable[[Any], None], run: Any, kept_decisions: list[Decision]
) -> None:
    run.skip = False
    change(run)
    if not run.skip:
        with gate.step(run.optimizer):
            pass
    assert not saved_again(run, kept_decisions)


def test_evidence_that_another_save_has_dropped_is_gone_here_too(
    run: Any, kept_decisions: list[Decision], tmp_path: Any
) -> None:
    """A parameter that was frozen in between looks as before."""
    weight = run.model.first.weight
    weight.requires_grad_(False)
    with lazyckpt.Checkpointer(tmp_path / "other") as other:
        other.track(model=run.model, optimizer=run.optimizer)
        other.save(1, blocking=True)
    weight.requires_grad_()
    with gate.step(run.optimizer):
        pass
    assert not saved_again(run, kept_decisions)


def test_a_foreign_optimizer_with_parameters_that_are_none_costs_no_save(
    run: Any, kept_decisions: list[Decision]
) -> None:
    class Foreign(torch.optim.SGD):
        pass

    foreign = Foreign([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    foreign.step()
    foreign.param_groups[0]["params"] = ["not a tensor"]
    with pytest.warns(UserWarning, match="Foreign"):
        run.step()
        assert not saved_again(run, kept_decisions, 10)
    run.step()
    assert saved_again(run, kept_decisions, 11)


def test_a_buffer_that_is_another_storage_each_time_costs_no_decision(run: Any, kept_decisions: list[Decision]) -> None:
    """As random states are."""
    for step in (10, 11):
        run.step()
        run.model.mean = torch.zeros(5000)
        assert saved_again(run, kept_decisions, step)
    assert torch.equal(torch.load(run.ckpt.save(12).result() / "state.pt")["model"]["mean"], run.model.mean)


class Other:
    """An optimizer of a parameter that no checkpoint has."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._base = torch.zeros(5001)
        self.parameter = torch.nn.Parameter(self._base[:5000])
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.1, momentum=0.9)

    def step(self) -> None:
        self._run.step()
        self.parameter.grad = torch.ones(5000)
        self.optimizer.step()

    def move_in_its_storage(self) -> None:
        self.parameter.data = self._base[1:]

    def move_its_storage(self) -> None:
        storage, before = self._base.untyped_storage(), self._base.data_ptr()
        size = storage.nbytes()
        storage.resize_(0)
        self._taken = [torch.zeros(5001) for _ in range(4)]  # the memory that it had
        storage.resize_(size)
        self._base.zero_()
        assert self._base.data_ptr() != before

    def give_its_momentum(self) -> None:
        self._run.model.mean = self.optimizer.state[self.parameter]["momentum_buffer"]


@pytest.mark.parametrize("change", [Other.move_in_its_storage, Other.move_its_storage, Other.give_its_momentum])
def test_a_change_of_an_owner_that_no_checkpoint_has_makes_another_decision(
    change: Callable[[Other], None], run: Any, kept_decisions: list[Decision]
) -> None:
    """Its storages are outside the file, but the facts about it are part of the decision."""
    other = Other(run)
    for step in (10, 11):
        other.step()
        run.ckpt.save(step, blocking=True)
    other.step()
    assert saved_again(run, kept_decisions, 12)
    change(other)
    other.step()
    assert not saved_again(run, kept_decisions, 13)
