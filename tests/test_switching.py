"""Optimizers that write to parameters outside of ``step()``: schedule-free ones, and those that step twice."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import schedulefree
import torch

from lazyckpt.gate import gate

HELD_S = 0.05
SCHEDULE_FREE: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda p: schedulefree.AdamWScheduleFree(p, lr=0.01),
    "SGD": lambda p: schedulefree.SGDScheduleFree(p, lr=0.01),
    "wrapper": lambda p: schedulefree.ScheduleFreeWrapper(torch.optim.SGD(p, lr=0.01), momentum=0.9),
}


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization as it is commonly written."""

    def __init__(self, params: Any, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho, "lr": 0.01})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.01, momentum=0.9, fused=True)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.data.add_(p.grad, alpha=group["rho"])

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.copy_(self.state[p]["old_p"])
        self.base_optimizer.step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()


@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_a_save_between_eval_and_train_commits(name: str, make_run: Any, disk: Any, pending: Any, graph: Any) -> None:
    run = make_run(lambda p: torch.optim.SGD(p, lr=0.01))
    optimizer = SCHEDULE_FREE[name](run.model.parameters())
    lazy = 0
    for step in range(4):
        optimizer.train()
        run.backward()
        optimizer.step()
        optimizer.eval()
        run.optimizer.step()  # the tracked one, which owns the same parameters
        before = run.state()["model"]
        disk.hold()
        handle = run.ckpt.save(step)
        lazy += pending(handle) > 0
        disk.release(after_s=HELD_S)
        optimizer.train()
        saved = torch.load(handle.result(timeout=30) / "state.pt")["model"]
        assert graph(saved) == graph(before)
    assert lazy >= 3


@pytest.mark.parametrize("by_closure", [False, True])
def test_sam(by_closure: bool, make_run: Any, disk: Any, pending: Any, graph: Any) -> None:
    run = make_run(Sam, warm=False)

    def train() -> None:
        run.backward()
        if by_closure:
            run.optimizer.step(run.backward)
            return
        run.optimizer.first_step()
        run.backward()
        run.optimizer.second_step()

    train()
    train()
    for step in range(3):
        before = run.state()["model"]
        disk.hold()
        handle = run.ckpt.save(step)
        assert pending(handle) > 0, "it is lazy"
        disk.release(after_s=HELD_S)
        train()
        saved = torch.load(handle.result(timeout=30) / "state.pt")["model"]
        assert graph(saved) == graph(before)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda obj: pickle.loads(pickle.dumps(obj))])
def test_an_optimizer_that_is_guarded_is_copied_as_ever(duplicate: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = schedulefree.AdamWScheduleFree([parameter], lr=0.1)
    attributes, state = set(vars(optimizer)), optimizer.state_dict()
    gate.install()
    optimizer.train()
    parameter.grad = torch.ones(3)
    optimizer.step()
    steps = gate.steps[optimizer]
    optimizer.eval()
    assert gate.steps[optimizer] == steps + 1, "it is guarded"
    assert set(vars(optimizer)) == attributes and optimizer.state_dict().keys() == state.keys()
    other = duplicate(optimizer)
    other.train()
    assert torch.equal(optimizer.param_groups[0]["params"][0], parameter)
    assert not optimizer.param_groups[0]["train_mode"] and other.param_groups[0]["train_mode"]
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    assert b"lazyckpt" not in buffer.getvalue()
