"""The error of ``restore()`` names one call, and that call succeeds: whatever differs, and however much at once."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lazyckpt
from lazyckpt import RestoreError


class Net(nn.Module):
    def __init__(self, out: int = 3, more: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
        self.head = nn.Linear(6, out)
        if more:
            self.more = nn.Linear(2, 2)


class Wrapper(nn.Module):
    """Puts a prefix before all names, as DistributedDataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def words(net: nn.Module) -> nn.Module:
    """Wraps an inner module, as activation checkpointing does: a word within names."""
    net.body[0] = nn.ModuleDict({"_checkpoint_wrapped_module": net.body[0]})  # type: ignore[index,operator]
    return net


# What may differ between the run that saves and the one that restores: the model, its name, other parts.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "same": Net,
    "wrapped": lambda: Wrapper(Net()),
    "a word": lambda: words(Net()),
    "half": lambda: Net().bfloat16(),
    "head": lambda: Net(out=7),
    "more": lambda: Net(more=True),
    "wrapped, half, head, more": lambda: Wrapper(Net(out=7, more=True).bfloat16()),
    "a word, head": lambda: words(Net(out=7)),
}
NAMES = ("model", "net")
OTHERS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "none": lambda model: {},
    "adam": lambda model: {"optimizer": torch.optim.AdamW(model.parameters())},
    "renamed": lambda model: {"adam": torch.optim.AdamW(model.parameters())},
    "sgd": lambda model: {"optimizer": torch.optim.SGD(model.parameters())},
    "groups": lambda model: {"optimizer": torch.optim.AdamW([{"params": [p]} for p in model.parameters()])},
    "notes": lambda model: {"optimizer": torch.optim.AdamW(model.parameters()), "notes": {}},
}


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return model


def save(folder: Path, model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with lazyckpt.Checkpointer(folder) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        ckpt.save(3).result()


def told(error: RestoreError) -> dict[str, Any]:
    """The arguments that an error names in its last line."""
    (arguments,) = re.findall(r"\n  restore\((.*)\) takes what fits$", str(error))
    return eval(f"dict({arguments})")  # type: ignore[no-any-return]


def follow(folder: Path, saved: str, live: str, name: str, others: str, **given: Any) -> None:
    model = MODELS[live]()
    with lazyckpt.Checkpointer(folder, read_only=True) as ckpt:
        ckpt.track(**{name: model}, **OTHERS[others](model))
        try:
            restored = ckpt.restore(**given)
        except RestoreError as error:
            restored = ckpt.restore(**told(error))
    assert restored is not None and name in restored.parts, (saved, live, name, others)
    inner = model.module if isinstance(model, Wrapper) else model
    for key, value in inner.state_dict().items():
        plain = key.replace("_checkpoint_wrapped_module.", "")
        if plain in REFERENCE and REFERENCE[plain].shape == value.shape:
            assert torch.equal(value.float(), torch.full_like(value.float(), 0.5)), (saved, live, key)


REFERENCE = Net().state_dict()


def filled(model: nn.Module) -> nn.Module:
    """All of it is 0.5 once it is saved."""
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    return model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("saved")
    for saved in SAVED:
        with lazyckpt.Checkpointer(folder / saved) as ckpt:
            model = filled(MODELS[saved]())
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            filled(model)
            ckpt.track(model=model, optimizer=optimizer)
            ckpt.save(3).result()
    return {saved: folder / saved for saved in SAVED}


SAVED = ("same", "wrapped", "a word")


@pytest.mark.long(first=18)
@pytest.mark.parametrize(("saved", "live"), list(itertools.product(SAVED, MODELS)))
def test_the_call_that_is_told_succeeds(saved: str, live: str, checkpoints: dict[str, Path]) -> None:
    if ("a word" in live and saved == "wrapped") or (saved == "a word" and "wrapped" in live):
        pytest.skip("a prefix and a word at once are two functions")
    for name, others in itertools.product(NAMES, OTHERS):
        follow(checkpoints[saved], saved, live, name, others)


@pytest.mark.parametrize("given", [{"strict": False}, {"cast": True}, {"only": ["net"]}, {"parts": {"net": "model"}}])
def test_what_was_given_stays(given: dict[str, Any], checkpoints: dict[str, Path]) -> None:
    model = MODELS["wrapped, half, head, more"]()
    with lazyckpt.Checkpointer(checkpoints["same"], read_only=True) as ckpt:
        ckpt.track(net=model)
        with pytest.raises(RestoreError) as caught:
            ckpt.restore(**given)
        arguments = told(caught.value)
        assert given.items() <= arguments.items()
        assert ckpt.restore(**arguments) == 3


def on_ranks(folder: Path) -> None:
    save(folder, sharded(filled(Net())))
    for live, others in itertools.product(("same", "head", "more", "half"), ("none", "adam", "renamed", "groups")):
        model = sharded(MODELS[live]())
        with lazyckpt.Checkpointer(folder, read_only=True) as ckpt:
            ckpt.track(net=model, **OTHERS[others](model))
            with pytest.raises(RestoreError) as caught:
                ckpt.restore()
            assert "net" in ckpt.restore(**told(caught.value)).parts


@pytest.mark.long
def test_so_it_does_on_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks.run(2, on_ranks, tmp_path)


def test_where_nothing_helps_nothing_is_told(checkpoints: dict[str, Path]) -> None:
    with lazyckpt.Checkpointer(checkpoints["same"], read_only=True) as ckpt:
        ckpt.track(model=nn.Conv2d(1, 1, 1))
        with pytest.raises(RestoreError) as caught:
            ckpt.restore()
    assert "takes what fits" not in str(caught.value) and "weight: not in the checkpoint" in str(caught.value)
