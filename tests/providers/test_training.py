"""Providers for what a training loop holds: each kind comes back as it was, in place, and says what does not fit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lazyckpt
from lazyckpt.errors import RestoreError
from lazyckpt.providers.optimizer import OptimizerProvider


def there_and_back(tmp_path: Path, source: Any, target: Any) -> None:
    """Saves ``source`` and restores it into ``target``, in another Checkpointer."""
    with lazyckpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.track(x=source)
        ckpt.save(1).result()
    with lazyckpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.track(x=target)
        assert ckpt.restore() == 1


class Everything(nn.Module):
    """Parameters, buffers of both kinds, extra state, tied weights, a frozen part and odd shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.emb.weight
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.low = nn.Parameter(torch.randn(5).bfloat16())
        self.strided = nn.Parameter(torch.randn(4, 7).t())
        self.last = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.register_buffer("kept", torch.randn(3))
        self.register_buffer("dropped", torch.randn(3), persistent=False)
        self.extra = {"calls": 3}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_a_module_comes_back_whole_and_in_place(tmp_path: Path, graph: Any) -> None:
    torch.manual_seed(1)
    source = Everything()
    source.extra = {"calls": 7}
    source.norm(torch.randn(4, 6))
    torch.manual_seed(2)
    target = Everything()
    pointers = {k: p.data_ptr() for k, p in itertools.chain(target.named_parameters(), target.named_buffers())}
    there_and_back(tmp_path, source, target)
    for name, value in source.state_dict().items():
        found = target.state_dict()[name]
        assert found == value if name == "_extra_state" else torch.equal(found, value), name
    assert target.extra == {"calls": 7}
    assert target.head.weight is target.emb.weight
    assert {k: p.data_ptr() for k, p in itertools.chain(target.named_parameters(), target.named_buffers())} == pointers
    assert target.strided.stride() == (1, 7) and target.last.is_contiguous(memory_format=torch.channels_last)
    assert not target.frozen.weight.requires_grad and target.emb.weight.requires_grad
    assert not torch.equal(target.dropped, source.dropped)


def test_load_hooks_run_and_see_the_saved_values(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Hooked(nn.Linear):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
            seen.append(state_dict[prefix + "weight"].sum().item())
            super()._load_from_state_dict(state_dict, prefix, *args)

    source, target = nn.Linear(30, 30), nn.Linear(30, 30)
    target.register_load_state_dict_post_hook(lambda module, keys: seen.append("post"))
    target.register_load_state_dict_pre_hook(lambda module, state, *_: seen.append(state["weight"].sum().item()))
    there_and_back(tmp_path, source, target)
    assert seen == [source.weight.sum().item(), "post"]
    seen.clear()
    inner = nn.Sequential(Hooked(30, 30))
    there_and_back(tmp_path / "2", nn.Sequential(source), inner)
    assert seen == [source.weight.sum().item()] and torch.equal(inner[0].weight, source.weight)


def test_a_lazy_module_takes_its_shapes_from_the_checkpoint(tmp_path: Path) -> None:
    source, target = nn.Sequential(nn.Linear(5, 3)), nn.Sequential(nn.LazyLinear(3))
    there_and_back(tmp_path, source, target)
    assert torch.equal(target(torch.ones(1, 5)), source(torch.ones(1, 5)))


def test_a_parametrized_module_and_spectral_norm(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Linear(6, 2))

    source, target = make(), make()
    source(torch.randn(3, 6))
    there_and_back(tmp_path, source, target)
    assert all(torch.equal(v, target.state_dict()[k]) for k, v in source.state_dict().items())


# optimizers


def trained(optimizer: Any, steps: int, width: int = 40, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    made = optimizer(model.parameters())
    for _ in range(steps):
        train_step(model, made, width)
    return model, made


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int = 40) -> float:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.linspace(-1, 1, width)) - 1).square().sum()
        loss.backward()
        return loss

    return float(optimizer.step(closure).detach())


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.001, centered=True, momentum=0.3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
}


@pytest.mark.parametrize(
    ("name", "warm"), [*((name, True) for name in OPTIMIZERS), ("SGD momentum", False), ("LBFGS", False)]
)
def test_an_optimizer_goes_on_bit_for_bit(name: str, warm: bool, tmp_path: Path, graph: Any) -> None:
    model, optimizer = trained(OPTIMIZERS[name], 3)
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        ckpt.save(3).result()
    expected = [train_step(model, optimizer) for _ in range(3)]
    other, target = trained(OPTIMIZERS[name], 2 if warm else 0, seed=5)
    pointers = {
        id(t): t.data_ptr()
        for state in target.state.values()
        for t in state.values()
        if isinstance(t, torch.Tensor) and name != "LBFGS"
    }
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=other, optimizer=target)
        ckpt.restore()
    again = {t.data_ptr() for s in target.state.values() for t in s.values() if isinstance(t, torch.Tensor)}
    assert set(pointers.values()) <= again, "state that was there is filled in place"
    assert [train_step(other, target) for _ in range(3)] == expected
    assert graph(target.state_dict()) == graph(optimizer.state_dict()) or name == "LBFGS"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_parameter_groups_with_names_and_options(tmp_path: Path) -> None:
    def make(lr: float) -> torch.optim.Optimizer:
        model = nn.Linear(4, 4)
        groups = [{"params": [model.weight], "lr": lr, "tag": "w"}, {"params": [model.bias]}]
        return torch.optim.SGD(groups, lr=0.5, momentum=0.9)

    source, target = make(0.1), make(0.2)
    there_and_back(tmp_path, source, target)
    assert [g["lr"] for g in target.param_groups] == [0.1, 0.5]
    assert target.param_groups[0]["tag"] == "w"


def test_an_optimizer_that_does_not_fit_says_all_that_does_not() -> None:
    _, optimizer = trained(OPTIMIZERS["AdamW"], 1)
    _, narrow = trained(OPTIMIZERS["AdamW"], 1, width=30)
    with pytest.raises(RestoreError, match=r"state\[0\]\['exp_avg'\]: \(30, 30\).*parameter is \(40, 40\)") as caught:
        OptimizerProvider(optimizer).landings(narrow.state_dict())
    assert len(str(caught.value).splitlines()) == 8
    state = optimizer.state_dict()
    fewer = {"state": {}, "param_groups": [{**state["param_groups"][0], "params": [0, 1]}]}
    with pytest.raises(RestoreError, match="parameter group 0: 2 parameters in the checkpoint, 4 in the optimizer"):
        OptimizerProvider(optimizer).landings(fewer)
    with pytest.raises(RestoreError, match="0 parameter groups in the checkpoint, 1 in the optimizer"):
        OptimizerProvider(optimizer).landings({"state": {}, "param_groups": []})
    for nonsense in (None, [], {"state": {}}, torch.ones(1)):
        with pytest.raises(RestoreError, match="not the state of an optimizer"):
            OptimizerProvider(optimizer).landings(nonsense)


class LowRank(torch.optim.Optimizer):
    """Keeps the moments of a projected gradient, as GaLore does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            moment = self.state[parameter].setdefault("exp_avg", torch.zeros(2, parameter.shape[1]))
            moment.lerp_(parameter.grad[:2], 0.1)
            parameter[:2] -= self.param_groups[0]["lr"] * moment


def test_moments_of_another_shape_than_the_parameter(tmp_path: Path, graph: Any) -> None:
    """A fresh optimizer has no state yet, and GaLore's was refused."""

    def make() -> LowRank:
        return LowRank([nn.Parameter(torch.randn(6, 8))])

    source, target = make(), make()
    for parameter in source.param_groups[0]["params"]:
        parameter.grad = torch.ones(6, 8)
    source.step()
    there_and_back(tmp_path, source, target)
    assert graph(target.state_dict()) == graph(source.state_dict())


# everything else


def test_a_scheduler_a_scaler_and_any_stateful_object(tmp_path: Path) -> None:
    class Metric:
        total = 0.0

        def state_dict(self) -> Any:
            return {"total": self.total}

        def load_state_dict(self, state: Any) -> None:
            self.total = state["total"]

    def make() -> tuple[Any, Any, Any]:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
            ],
            milestones=[3],
        )
        return scheduler, torch.amp.GradScaler("cpu", init_scale=4.0), Metric()

    source, target = make(), make()
    for _ in range(5):
        source[0].optimizer.step()
        source[0].step()
    source[2].total = 0.1 + 0.2
    for objects in (source, target):
        with lazyckpt.Checkpointer(tmp_path) as ckpt:
            ckpt.track(scheduler=objects[0], scaler=objects[1], metric=objects[2])
            if objects is source:
                ckpt.save(1).result()
            else:
                ckpt.restore()
    assert target[0].get_last_lr() == source[0].get_last_lr() and target[0].last_epoch == 5
    assert target[2].total == 0.1 + 0.2


def test_a_tensor_is_restored_in_place(tmp_path: Path) -> None:
    for source in (torch.randn(50), torch.randn(6, 7).t(), torch.randn(4, dtype=torch.complex64), torch.tensor(3)):
        target = torch.zeros_like(source)
        alias = target.view(-1) if target.is_contiguous() else target.t().view(-1)
        there_and_back(tmp_path / str(source.shape), source, target)
        assert torch.equal(target, source) and alias.data_ptr() == target.data_ptr()
    leaf = torch.zeros(20, requires_grad=True)
    there_and_back(tmp_path / "leaf", torch.ones(20), leaf)
    assert torch.equal(leaf, torch.ones(20)) and leaf.requires_grad and leaf.is_leaf


def test_plain_containers_are_changed_in_place(tmp_path: Path) -> None:
    tensor = torch.zeros(30)
    target: Any = {"epoch": 0, "best": None, "ema": tensor, "gone": 1}
    there_and_back(tmp_path, {"epoch": 3, "best": [1, {"x": 0.5}], "ema": torch.ones(30), "new": 2}, target)
    assert {k: v for k, v in target.items() if k != "ema"} == {"epoch": 3, "best": [1, {"x": 0.5}], "new": 2}
    assert target["ema"] is tensor and torch.equal(tensor, torch.ones(30))
    history: list[Any] = [9, 9, 9, 9]
    there_and_back(tmp_path / "list", [1, "two", torch.ones(2)], history)
    assert history[:2] == [1, "two"] and torch.equal(history[2], torch.ones(2)) and len(history) == 3


def test_a_container_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(lazyckpt.RestoreError, match="x: dict in the checkpoint, list tracked"):
        there_and_back(tmp_path, {"a": 1}, [1])


def test_a_provider_of_ones_own(tmp_path: Path) -> None:
    class Replay(lazyckpt.StateProvider):
        """Without calling StateProvider.__init__, as people do."""

        def __init__(self, size: int) -> None:
            self.memory = torch.zeros(size)
            self.position = 0

        def state(self) -> Any:
            return {"memory": self.memory, "position": self.position}

        def load_state(self, state: Any) -> None:
            self.memory.copy_(state["memory"])
            self.position = state["position"]

    source, target = Replay(5000), Replay(5000)
    source.memory.fill_(3)
    source.position = 17
    there_and_back(tmp_path, source, target)
    assert torch.equal(target.memory, source.memory) and target.position == 17
