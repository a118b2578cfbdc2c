"""``restore()`` does the same with ``state.pt`` and with a sharded folder, into plain and into sharded models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lazyckpt


class Net(nn.Module):
    """Has buffers, and a weight under two names."""

    def __init__(self, head: str | None = "head", out: int = 3, *, more: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.body = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        self.tied = nn.Linear(5, 5, bias=bias)
        self.tied.weight = self.body.weight
        if head is not None:
            setattr(self, head, nn.Linear(5, out))
        if more:
            self.more = nn.Linear(5, 2)
        self.last = self._modules.get(head or "")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(self.norm(self.body(x)))
        return self.last(x) if self.last is not None else x


State = dict[str, Any]


def state(shards: bool, seed: int, *, optimizer: Callable[[Net], Any] | None = None, **net: Any) -> State:
    torch.manual_seed(seed)
    model = Net(**net)
    if shards:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    tracked: State = {"model": model}
    if optimizer is not None:
        tracked["optimizer"] = optimizer(model)
    train(tracked, seed)
    return tracked


def train(tracked: State, seed: int) -> None:
    model = tracked["model"]
    batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed), dtype=next(model.parameters()).dtype)
    model(batch).square().sum().backward()
    if (optimizer := tracked.get("optimizer")) is not None:
        optimizer.step()
        optimizer.zero_grad()


def adam(model: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def of_the_body(model: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.body.parameters(), lr=0.1)


def in_two_groups(model: Net) -> torch.optim.Optimizer:
    body = list(model.body.parameters())
    others = [parameter for parameter in model.parameters() if not any(parameter is one for one in body)]
    return torch.optim.AdamW([{"params": body}, {"params": others}], lr=0.1)


def with_average(shards: bool) -> State:
    return {**state(shards, 2), "average": torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))}


def half(shards: bool) -> State:
    torch.manual_seed(2)
    model = Net().bfloat16()
    if shards:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return {"model": model}


def fresh(shards: bool) -> State:
    model = state(shards, 2)["model"]
    return {"model": model, "optimizer": adam(model)}


# The tracked objects, and the arguments of restore(). The checkpoint has Net() and AdamW of all its parameters.
CASES: dict[str, tuple[Callable[[bool], State], dict[str, Any]]] = {
    "all": (lambda s: state(s, 2, optimizer=adam), {}),
    "a new head": (lambda s: state(s, 2, more=True), {"strict": False}),
    "a new head, strictly": (lambda s: state(s, 2, more=True), {"only": ["model"]}),
    "a dropped head": (lambda s: state(s, 2, head=None), {"strict": False}),
    "a dropped head, strictly": (lambda s: state(s, 2, head=None), {"only": ["model"]}),
    "a dropped bias": (lambda s: state(s, 2, bias=False), {"strict": False, "only": ["model"]}),
    "another head": (lambda s: state(s, 2, head="top", out=7), {"strict": False}),
    "a renamed head": (lambda s: state(s, 2, head="top"), {"only": ["model"], "rename": {"head.": "top."}}),
    "a head of another shape": (lambda s: state(s, 2, out=7), {"strict": False}),
    "a head left out": (lambda s: state(s, 2, out=7), {"strict": False, "rename": {"head.": None, "last.": None}}),
    "a name of two left out": (lambda s: state(s, 2), {"strict": False, "rename": {"tied.": None}}),
    "buffers left out": (lambda s: state(s, 2), {"strict": False, "rename": lambda n: None if "runn" in n else n}),
    "another dtype": (half, {"only": ["model"]}),
    "another dtype, cast": (half, {"only": ["model"], "cast": True}),
    "an optimizer of a part": (lambda s: state(s, 2, optimizer=of_the_body), {"strict": False}),
    "an optimizer in groups": (lambda s: state(s, 2, optimizer=in_two_groups), {"strict": False}),
    "only the optimizer": (lambda s: state(s, 2, optimizer=adam), {"only": ["optimizer"]}),
    "a new optimizer": (fresh, {"only": ["optimizer"]}),
    "another part": (with_average, {"strict": False}),
    "nothing of the head": (lambda s: state(s, 2, head=None, more=True), {"strict": False, "only": ["model"]}),
}


def values(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        tensor = tree.full_tensor() if isinstance(tree, DTensor) else tree
        return tensor.dtype, tensor.shape, tensor.tolist()
    if isinstance(tree, dict):
        return {key: values(value) for key, value in tree.items()}
    return [values(value) for value in tree] if isinstance(tree, list) else tree


def outcome(folder: Path, shards: bool, name: str) -> Any:
    make, how = CASES[name]
    tracked = make(shards)
    before = {part: values(obj.state_dict()) for part, obj in tracked.items()}
    said: Any
    try:
        with lazyckpt.Checkpointer(folder, read_only=True) as ckpt:
            ckpt.track(**tracked)
            restored = ckpt.restore(**{"strict": True, **how})
            # In a world of another size the random states may be left out.
            said = (
                (set(restored.parts) - {"rng"}, set(restored.missing), set(restored.unexpected))
                if isinstance(restored, lazyckpt.Restored)
                else restored
            )
    except lazyckpt.RestoreError as error:
        said = str(error).replace(str(folder), "")
        assert before == {part: values(obj.state_dict()) for part, obj in tracked.items()}
    found = {part: values(obj.state_dict()) for part, obj in tracked.items()}
    train(tracked, 3)  # whatever has happened
    return said, found


def save(folder: Path, shards: bool) -> None:
    tracked = state(shards, 1, optimizer=adam)
    with lazyckpt.Checkpointer(folder) as ckpt:
        ckpt.track(**tracked)
        ckpt.save(3).result()


def all_outcomes(folder: Path, shards: bool) -> dict[str, Any]:
    return {name: outcome(folder, shards, name) for name in CASES}


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint in ``state.pt``, and what a plain process makes of it."""
    folder = tmp_path_factory.mktemp("file")
    save(folder, False)
    assert (folder / "step-00000003/state.pt").exists()
    return folder, all_outcomes(folder, False)


@pytest.fixture(scope="module")
def folder(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in a folder of two ranks."""
    folder: Path = tmp_path_factory.mktemp("folder")
    ranks.run(2, save, folder, True)
    assert (folder / "step-00000003/.metadata").exists()
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_plain_model_takes_the_same_from_a_folder(name: str, expected: Any, folder: Path) -> None:
    assert outcome(folder, False, name) == expected[1][name]


@pytest.mark.parametrize("name", CASES)
def test_a_sharded_model_takes_the_same_from_a_file(name: str, expected: Any, world: None) -> None:
    assert outcome(expected[0], True, name) == expected[1][name]


def test_sharded_models_on_two_ranks_take_the_same_from_a_folder(ranks: Any, expected: Any, folder: Path) -> None:
    for found in ranks.run(2, all_outcomes, folder, True):
        for name in CASES:
            assert found[name] == expected[1][name], name
