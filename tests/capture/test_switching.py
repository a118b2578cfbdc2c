"""Optimizers that write to parameters outside of ``step()``: schedule-free ones, and those that step twice."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import schedulefree
import torch

HELD_S = 0.05
AT_MOST_S = 5.0
SCHEDULE_FREE: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda p: schedulefree.AdamWScheduleFree(p, lr=0.01),
    "SGD": lambda p: schedulefree.SGDScheduleFree(p, lr=0.01),
    "wrapper": lambda p: schedulefree.ScheduleFreeWrapper(torch.optim.SGD(p, lr=0.01), momentum=0.9),
}


@contextlib.contextmanager
def held(disk: Any) -> Iterator[None]:
    """The disk is held in here, but not for ever: who waits for it finds nothing pending afterwards."""
    limit = threading.Timer(AT_MOST_S, disk.release)
    limit.start()
    disk.hold()
    try:
        yield
    finally:
        limit.cancel()
        disk.release()


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


class MovingSam(Sam):
    """Goes back to the weights by a pointer, as the code does that most have copied."""

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()


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


@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_a_switch_to_the_mode_that_it_has_waits_for_nothing(name: str, make_run: Any, disk: Any, pending: Any) -> None:
    """Trainers call train() in front of every batch."""
    run = make_run(SCHEDULE_FREE[name], warm=False)
    for step, switch in enumerate(("train", "eval")):
        run.optimizer.train()
        run.step()
        getattr(run.optimizer, switch)()
        with held(disk):
            handle = run.ckpt.save(step)
            assert pending(handle) > 0, "it is lazy"
            getattr(run.optimizer, switch)()
            run.backward()
            assert pending(handle) > 0, "no thread has waited"
        handle.result(timeout=30)


class Wrapping(schedulefree.AdamWScheduleFree):
    """An optimizer of another that shows itself as one of its class, as those of trainers do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def test_a_switch_through_a_wrapper_is_one_of_the_optimizer_inside(make_run: Any, disk: Any, pending: Any) -> None:
    run = make_run(lambda p: schedulefree.AdamWScheduleFree(p, lr=0.01), warm=False)
    wrapping = Wrapping(run.optimizer)
    wrapping.train()
    for step in range(4):
        run.step()
        if step == 1:
            wrapping.eval()
        with held(disk):
            handle = run.ckpt.save(step)
            assert pending(handle) > 0, "it is lazy, whether or not the wrapper did anything since the last save"
        if step == 1:
            wrapping.train()
        handle.result(timeout=30)


@pytest.mark.parametrize("kind", [Sam, MovingSam])
@pytest.mark.parametrize("by_closure", [False, True])
def test_sam(by_closure: bool, kind: Any, make_run: Any, disk: Any, pending: Any, graph: Any) -> None:
    run = make_run(kind, warm=False)

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
        train()
        saved = torch.load(handle.result(timeout=30) / "state.pt")["model"]
        assert graph(saved) == graph(before)
