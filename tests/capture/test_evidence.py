"""Lazy copies are earned: by a parameter that had a gradient when its optimizer was about to step."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.gate.evidence import Evidence, addresses
from lazyckpt.gate.gate import gate

SGD = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
FUSED = lambda p: torch.optim.AdamW(p, lr=0.1, fused=True)  # noqa: E731
HELD_S = 0.05
MATRIX = 256 * 256 * 4
RING = {"host_buffer_bytes": MATRIX + (64 << 10)}  # room for one that is eager, with the disk held


def eager_bytes(run: Any, step: int = 1) -> int:
    """What ``save()`` copies itself, in matrices of 256 KiB."""
    return int(run.ckpt.save(step, blocking=True).metrics.eager_bytes) // MATRIX * MATRIX


def saved(handle: lazyckpt.SaveHandle) -> Any:
    return torch.load(handle.result(timeout=30) / "state.pt")


class Momentum(torch.nn.Module):
    """As MoCo, BYOL, and DINO have it: a key encoder that follows the query encoder in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.query = torch.nn.Linear(256, 256)
        self.key = torch.nn.Linear(256, 256).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            k.data = k.data.mul_(0.5).add_(q.data, alpha=0.5)
        y: torch.Tensor = self.query(x) - self.key(x)
        return y


def test_a_momentum_encoder_in_the_optimizer_is_eager(make_run: Any, disk: Any) -> None:
    run = make_run(FUSED, Momentum(), **RING)
    for step in range(5):
        run.step()
        before = run.state()["model"]
        disk.hold()
        handle = run.ckpt.save(step)
        run.backward()
        disk.release(after_s=HELD_S)
        run.optimizer.step()
        state = saved(handle)["model"]
        assert all(torch.equal(state[name], value) for name, value in before.items())


def test_what_gradient_hooks_update_is_eager(make_run: Any) -> None:
    """As LOMO does it: the parameter is updated and its gradient freed in backward; ``step()`` finds none."""
    run = make_run(SGD, warm=False)

    def update(parameter: torch.Tensor) -> None:
        parameter.data.sub_(parameter.grad.sign(), alpha=1e-3)
        parameter.grad = None

    for p in run.model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for step in range(3):
        run.step()
        before = run.state()["model"]
        handle = run.ckpt.save(step)
        run.backward()
        run.optimizer.step()
        state = saved(handle)["model"]
        assert handle.metrics.eager_bytes > handle.metrics.bytes * 0.9
        assert all(torch.equal(state[name], value) for name, value in before.items())


class Experts(torch.nn.Module):
    """Only the chosen one sees tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(2))
        self.chosen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.experts[self.chosen](x)
        return y


def test_a_parameter_is_lazy_once_it_had_a_gradient(make_run: Any) -> None:
    run = make_run(SGD, Experts())
    run.backward()
    assert eager_bytes(run) == MATRIX, "the second expert had no gradient"
    run.model.chosen = 1
    run.step()
    assert eager_bytes(run) == 0
    run.model.chosen = 0
    for step in range(2, 5):
        run.optimizer.zero_grad()  # to None
        run.model(run.batch()).sum().backward()
        assert run.model.experts[1].weight.grad is None
        run.optimizer.step()
        assert eager_bytes(run, step) == 0, "an expert without tokens stays lazy"


def test_gradients_are_looked_for_behind_the_closure(make_run: Any) -> None:
    """In front of it the first step has none, and later ones those of the step before."""

    class Foreign(torch.optim.SGD):
        """Not torch's own: it waits before its closure."""

    for optimizer in (torch.optim.SGD, Foreign):
        run = make_run(lambda p, make=optimizer: make(p, lr=0.1, momentum=0.9), warm=False)

        def closure(run: Any = run) -> Any:
            run.optimizer.zero_grad()
            loss = run.model(run.batch()).sum()
            loss.backward()
            return loss

        run.optimizer.step(closure)
        assert eager_bytes(run) == 0


def test_a_parameter_that_was_added_is_eager_until_it_had_a_gradient(make_run: Any) -> None:
    run = make_run(SGD)
    added = torch.nn.Parameter(torch.zeros(256, 256))
    run.ckpt.track(added={"added": added})
    run.optimizer.add_param_group({"params": [added]})
    run.step()
    assert eager_bytes(run) == MATRIX
    added.grad = torch.ones_like(added)
    run.step()
    assert eager_bytes(run, 2) == 0


def step_in_turns(optimizer: torch.optim.Optimizer, kind: str) -> None:
    """As ZeRO steps: with one group at a time, or with one group that holds another part of its parameters each
    time."""
    groups = optimizer.param_groups
    if kind == "groups":
        for group in groups:
            optimizer.param_groups = [group]
            optimizer.step()
        optimizer.param_groups = groups
        return
    for group in groups:
        whole = group["params"]
        for parameter in whole:
            group["params"] = [parameter]
            optimizer.param_groups = [group]
            optimizer.step()
        group["params"] = whole
    optimizer.param_groups = groups


@pytest.mark.parametrize("kind", ["groups", "parts"])
def test_parameters_earn_in_a_step_that_takes_them_in_turns(kind: str, make_run: Any) -> None:
    run = make_run(
        lambda p: torch.optim.SGD([{"params": [each]} for each in p], lr=0.1, momentum=0.9),
        torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(4))),
        warm=False,
    )
    generations = set()
    for step in range(4):
        run.backward()
        step_in_turns(run.optimizer, kind)
        assert eager_bytes(run, step) == 0
        generations.add(gate.evidence.generation)
    assert len(generations) == 1, "later steps change nothing, so later saves are planned as the first"


@pytest.mark.parametrize("change", ["frozen", "moved"])
def test_a_parameter_that_is_frozen_or_moved_has_to_earn_it_again(change: str, make_run: Any) -> None:
    run = make_run(SGD)
    run.step()
    assert eager_bytes(run) == 0
    weight = run.model[0].weight
    run.step()
    if change == "frozen":
        weight.requires_grad_(False)
    else:
        weight.data = weight.data.clone()
    assert eager_bytes(run, 2) == 2 * MATRIX, "with its momentum"
    weight.requires_grad_(True)
    weight.grad = None
    run.optimizer.step()
    assert eager_bytes(run, 3) == 2 * MATRIX
    run.step()
    assert eager_bytes(run, 4) == 0


def test_a_frozen_parameter_in_a_group_waits_for_its_optimizer(make_run: Any, disk: Any, pending: Any) -> None:
    """It becomes lazy by what two saves in a row found. Thawed right after a save, it is stepped on. Whatever else the
    optimizer has fits into the ring."""
    head = torch.nn.Linear(25_600, 1, bias=False)
    base = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(11))).requires_grad_(False)
    model = torch.nn.ModuleDict({"head": head, "base": base})
    run = make_run(lambda p: torch.optim.SGD(p, lr=1.0, fused=True), model, warm=False, host_buffer_bytes=256 << 10)
    weight = base[10].weight
    head.weight.grad = torch.ones_like(head.weight)
    for step in range(3):
        run.optimizer.step()
        run.ckpt.save(step, blocking=True)
    before = weight.detach().clone()
    run.optimizer.step()
    disk.hold()
    handle = run.ckpt.save(3)
    assert pending(handle) > 0
    weight.requires_grad_(True)
    weight.grad = torch.ones_like(weight)
    disk.release(after_s=HELD_S)
    run.optimizer.step()
    assert handle.metrics.gate_blocked_s > HELD_S / 2
    assert torch.equal(saved(handle)["model"]["base.10.weight"], before)


def test_state_follows_its_parameter(make_run: Any) -> None:
    """And what has no parameter, its owner's step."""
    run = make_run(SGD)
    run.step()
    run.optimizer.state["flat"] = {"buffer": torch.zeros(256, 256)}
    assert run.ckpt.save(1, blocking=True).metrics.eager_bytes < 100_000, "by name: it is the optimizer's"
    run.step()
    frozen = run.model[0].weight.requires_grad_(False)
    run.optimizer.state[frozen]["more"] = torch.zeros(512, 512)
    assert eager_bytes(run, 2) == 6 * MATRIX


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_embeddings_that_normalize_in_forward_are_eager(kind: Any, make_run: Any, disk: Any) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.ModuleDict({"table": kind(256, 256, max_norm=0.5)})

    def loss() -> torch.Tensor:
        tokens = torch.arange(256).reshape(1, -1)
        result: torch.Tensor = run.model.inner["table"](tokens).square().sum()
        return result

    run = make_run(SGD, Model(), warm=False, **RING)
    for step in range(4):
        before = run.model.inner["table"].weight.detach().clone()
        disk.hold()
        handle = run.ckpt.save(step)
        run.optimizer.zero_grad()
        loss().backward()  # every row is normalized
        disk.release(after_s=HELD_S)
        run.optimizer.step()
        assert torch.equal(saved(handle)["model"]["inner.table.weight"], before)
    assert not torch.equal(run.model.inner["table"].weight, before)
    assert eager_bytes(run, 9) == MATRIX, "and not its momentum"


def test_an_optimizer_without_gradients_of_its_own_is_trusted_with_those_of_another(make_run: Any) -> None:
    """Two optimizers over the same parameters; one is stepped after the gradients were freed."""
    run = make_run(SGD)
    other = torch.optim.SGD(run.model.parameters(), lr=0.1)
    run.step()
    run.optimizer.zero_grad()
    other.step()
    assert eager_bytes(run) == 0


def test_evidence_dies_with_its_parameter() -> None:
    """Another parameter may get its address, and even the address of its memory."""
    evidence = Evidence()
    parameter = torch.nn.Parameter(torch.zeros(100))
    parameter.grad = torch.ones(100)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

    def is_known() -> bool:
        return evidence.without(other, [parameter], [parameter.data_ptr()]) == []

    evidence.look(optimizer)
    assert evidence.without(optimizer, [parameter], [parameter.data_ptr()]) == []
    assert is_known()
    optimizer.param_groups[0]["params"].clear()
    evidence.without(optimizer, [], [])
    assert not is_known()
    optimizer.param_groups[0]["params"].append(parameter)
    evidence.look(optimizer)
    assert is_known()
    del optimizer
    gc.collect()
    assert not is_known()


def test_parameters_may_be_swapped_after_a_step() -> None:
    """torch.utils.swap_tensors refuses a tensor that has weak references."""
    parameter, other = torch.nn.Parameter(torch.zeros(100)), torch.nn.Parameter(torch.ones(100))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(100)
    evidence = Evidence()
    evidence.look(optimizer)
    torch.utils.swap_tensors(parameter, other)
    assert evidence.without(optimizer, [parameter], [parameter.data_ptr()]) == [parameter]


@pytest.mark.parametrize(
    "strange",
    [
        lambda: torch.eye(100).to_sparse(),
        lambda: torch.empty(100, device="meta"),
        lambda: torch.empty(0),
    ],
    ids=["sparse", "meta", "empty"],
)
def test_parameters_of_every_kind_are_looked_at(strange: Callable[[], torch.Tensor]) -> None:
    evidence = Evidence()
    parameters = [torch.nn.Parameter(strange()), torch.nn.Parameter(torch.ones(3))]
    parameters[1].grad = torch.ones(3)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    evidence.look(optimizer)
    found = evidence.without(optimizer, parameters, addresses(parameters))
    assert len(found) == 1 and found[0] is parameters[0]


@pytest.mark.alone
def test_ten_thousand_parameters_cost_a_step_nothing() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(10_000)]
    for p in parameters:
        p.grad = p.detach()
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    gate.evidence.look(optimizer)
    begin = time.perf_counter()
    for _ in range(1000):
        gate.evidence.look(optimizer)
    assert time.perf_counter() - begin < 0.1
