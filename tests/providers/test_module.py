"""What of a module ``restore()`` reads into: the parameters and buffers themselves, never what stands for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lazyckpt
from lazyckpt import RestoreError
from lazyckpt.providers.module import ModuleProvider, _plain_state


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() for key, value in state.items()}


class CopyingMethod(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        found.update(copied(found))
        return found


class CopyingPart(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        own: dict[str, Any] = {}
        super()._save_to_state_dict(own, prefix, keep_vars)
        destination.update(copied(own))


class CopyingDetach(nn.Parameter):
    """As a quantized weight that is saved in full."""

    def detach(self) -> torch.Tensor:
        return self.data.as_subclass(torch.Tensor).clone()


class Extra(nn.Linear):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.extra = torch.zeros(3)

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"extra": self.extra.clone()}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        self.extra = state["extra"]


class Hiding(nn.Sequential):
    """Hides its submodules."""

    def named_modules(self, *_: Any, **__: Any) -> Iterator[Any]:
        return iter([("", self)])


def on_the_instance() -> nn.Module:
    model = nn.Linear(2, 2)
    method = model.state_dict
    model.state_dict = lambda *args, **kwargs: copied(method(*args, **kwargs))  # type: ignore[method-assign]
    return model


def in_a_hook() -> nn.Module:
    model = nn.Linear(2, 2)
    model._register_state_dict_hook(lambda _module, state, _prefix, _: state.update(copied(state)))
    return nn.Sequential(model)


def in_a_parameter() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight = CopyingDetach(torch.randn(2, 2))
    return model


COPYING = {
    "a method": lambda: nn.Sequential(CopyingMethod(2, 2)),
    "a part of the method": lambda: nn.Sequential(nn.Linear(2, 2), CopyingPart(2, 2)),
    "a method of one object": on_the_instance,
    "a hook": in_a_hook,
    "a class of parameters": in_a_parameter,
    "extra state": lambda: nn.Sequential(nn.Linear(2, 2), Extra(2, 2)),
}


def values(model: nn.Module) -> list[torch.Tensor]:
    extra = [part.extra for part in model.modules() if isinstance(part, Extra)]
    return [t.data.as_subclass(torch.Tensor) for t in model.parameters()] + extra


@pytest.mark.parametrize("copies", COPYING)
def test_what_a_state_dict_copies_is_loaded_and_not_read_into(copies: str, tmp_path: Path) -> None:
    model = COPYING[copies]()
    with torch.no_grad():
        for number, tensor in enumerate(values(model)):
            tensor.fill_(number + 1)
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model)
        ckpt.save(1).result()
        with torch.no_grad():
            for tensor in values(model):
                tensor.zero_()
        assert ckpt.restore() == 1
    for number, tensor in enumerate(values(model)):
        assert tensor.eq(number + 1).all()


def test_a_copy_that_nothing_takes_back_is_refused() -> None:
    model = Hiding(CopyingMethod(2, 2))
    with pytest.raises(RestoreError, match="load_state_dict"):
        ModuleProvider(model).landings(model.state_dict())


def test_parameters_and_buffers_land() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    landings = ModuleProvider(model).landings(model.state_dict())
    live = [tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())]
    assert sorted(landing.live.untyped_storage()._cdata for landing in landings) == sorted(live)


class Various(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
        self.again = self.first
        self.none = None
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.first[0].weight  # type: ignore[assignment]
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        self.scale = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("passing", torch.ones(1), persistent=False)
        self.register_buffer("lasting", torch.ones(1))
        self.register_buffer("empty", None)


def test_plain_state_is_what_state_dict_returns() -> None:
    model = Various()
    ours, theirs = _plain_state(model), model.state_dict()
    assert ours is not None and list(ours) == list(theirs)
    for mine, torchs in zip(ours.values(), theirs.values(), strict=True):
        assert type(mine) is type(torchs) and mine.requires_grad is torchs.requires_grad is False
        assert (mine.data_ptr(), mine.shape, mine.stride()) == (torchs.data_ptr(), torchs.shape, torchs.stride())


def test_hooks_before_state_dict_run_at_a_restore(tmp_path: Path) -> None:
    """As FSDP2's do, which put the parameters back that the module has lent out."""
    model = nn.Linear(2, 2)
    own = model.weight
    model.register_state_dict_pre_hook(lambda module, *_: setattr(module, "weight", own))
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model)
        ckpt.save(1).result()
        expected = own.detach().clone()
        own.data.zero_()
        model.weight = nn.Parameter(torch.ones(2, 2))
        ckpt.restore()
    assert model.weight is own and torch.equal(own, expected)
