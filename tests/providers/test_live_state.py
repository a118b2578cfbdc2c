"""``live_state`` returns what ``state_dict()`` does, but for ``detach()``, or None where torch would run other code."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lazyckpt import _engine
from lazyckpt.providers.base import StorageTable
from lazyckpt.providers.module import ModuleProvider
from lazyckpt.providers.pickles import Skeleton


class Part(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.norm = torch.nn.BatchNorm1d(2)  # its version is 2
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("passing", torch.zeros(1), persistent=False)
        self.register_buffer("none", None)
        self.register_parameter("absent", None)
        self.register_module("nothing", None)


def model() -> torch.nn.Module:
    made = torch.nn.Sequential(Part(), torch.nn.ModuleDict({"a": Part(), "0": torch.nn.Identity()}), torch.nn.ReLU())
    made.append(torch.nn.ParameterList([torch.zeros(2), torch.ones(1)]))
    made.append(made[0])  # a module at two places
    made[0].linear.bias = made[1]["a"].linear.bias
    return made


def pickled(state: Any, **how: Any) -> bytes | None:
    with torch._C.DisableTorchFunction():
        return Skeleton().opcodes_of_plain(state, StorageTable(map(str, count())), **how)


def test_it_is_what_state_dict_returns() -> None:
    module = model()
    live, state = _engine.live_state(module), module.state_dict(keep_vars=True)
    assert live is not None and type(live) is type(state)
    assert list(live.items()) == list(state.items())
    assert all(live[key] is state[key] for key in state)
    assert vars(live) == vars(state) and list(vars(live)["_metadata"]) == list(vars(state)["_metadata"])


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.requires_grad_(False),
        lambda weight: setattr(weight, "tag", 1),
        lambda weight: weight.register_hook(print),
        lambda weight: setattr(weight, "data", weight.data.t().contiguous().t()),
        lambda weight: setattr(weight, "data", torch.zeros(5, 3)[1:3]),
        lambda weight: setattr(weight, "data", torch.zeros(2, 3, dtype=torch.bfloat16)),
    ],
)
def test_it_is_pickled_as_what_state_dict_returns(change: Callable[[Any], Any]) -> None:
    module = model()
    change(module[0].linear.weight)
    opcodes = pickled(_engine.live_state(module), detached=True)
    assert opcodes is not None and opcodes == pickled(module.state_dict())


def test_a_tensor_whose_bytes_are_not_its_values_is_not_pickled() -> None:
    module = torch.nn.Module()
    module.register_buffer("x", torch.zeros(2, dtype=torch.complex64).conj())
    assert pickled(_engine.live_state(module), detached=True) is None
    assert pickled(module.state_dict()) is None


class Overrides:
    """Classes of modules that do something of their own in ``state_dict()``."""

    class StateDict(Part):
        def state_dict(self, *args: Any, **named: Any) -> Any:
            return super().state_dict(*args, **named)

    class SaveToStateDict(Part):
        def _save_to_state_dict(self, *args: Any) -> None:
            super()._save_to_state_dict(*args)

    class ExtraState(Part):
        def get_extra_state(self) -> Any:
            return 1

    class GetAttribute(Part):
        def __getattribute__(self, name: str) -> Any:
            return super().__getattribute__(name)

    class Parameters(Part):
        _parameters = property(lambda self: {})  # type: ignore[assignment]

    class Version(Part):
        _version = property(lambda self: 7)  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [kind for name, kind in vars(Overrides).items() if isinstance(kind, type)])
def test_a_class_with_code_of_its_own(kind: type[torch.nn.Module]) -> None:
    part = Part()
    part.__class__ = kind
    assert _engine.live_state(torch.nn.Sequential(Part(), part)) is None


def _of_the_instance(name: str) -> Callable[[Any], None]:
    return lambda part: part.__dict__.__setitem__(name, getattr(part, name, None))


def _reordered(part: Any) -> None:
    part.__dict__["_parameters"] = OrderedDict(part._parameters)


def _subclass(part: Any) -> None:
    part.linear.weight = torch.nn.Parameter(part.linear.weight.detach().as_subclass(Subclass))


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "change",
    [
        lambda part: part._register_state_dict_hook(lambda *args: None),
        lambda part: part.register_state_dict_pre_hook(lambda *args: None),
        _of_the_instance("state_dict"),
        _of_the_instance("_save_to_state_dict"),
        _of_the_instance("get_extra_state"),
        _reordered,
        _subclass,
        lambda part: part._modules.__setitem__("other", object()),
        lambda part: part._buffers.__setitem__("kept", "no tensor"),
        lambda part: part._parameters.__setitem__(1, part.linear.weight),
        lambda part: part.__dict__.pop("_buffers"),
        lambda part: part.__dict__.__setitem__("_version", "2"),
        lambda part: part.__dict__.__setitem__("_non_persistent_buffers_set", ["passing"]),
    ],
)
def test_an_instance_with_something_of_its_own(change: Callable[[Any], Any]) -> None:
    module = model()
    assert _engine.live_state(module) is not None
    change(module[1]["a"])
    assert _engine.live_state(module) is None


@pytest.mark.parametrize("method", ["state_dict", "_save_to_state_dict", "get_extra_state"])
@pytest.mark.parametrize("kind", [torch.nn.Module, torch.nn.Linear])
def test_a_class_of_torch_that_is_patched_later(kind: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = model()
    assert _engine.live_state(module) is not None
    before = getattr(kind, method)
    with monkeypatch.context() as patch:
        patch.setattr(kind, method, lambda *args, **named: before(*args, **named))
        assert _engine.live_state(module) is None
    assert _engine.live_state(module) is not None


@pytest.mark.parametrize("mode", [TorchFunctionMode, TorchDispatchMode])
def test_under_a_mode_that_may_change_what_detach_does(mode: type[Any]) -> None:
    module = model()
    with mode():
        assert _engine.live_state(module) is None


def test_the_second_save_of_a_module_does_not_call_state_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    module, calls = model(), []
    state_dict = module.state_dict
    provider = ModuleProvider(module)
    first = provider.opcodes(StorageTable(map(str, count())))
    monkeypatch.setattr(ModuleProvider, "state", lambda self: calls.append(1) or state_dict())
    assert provider.opcodes(StorageTable(map(str, count()))) == first and not calls
    module[0].add_module("more", torch.nn.Linear(1, 1))
    assert provider.opcodes(StorageTable(map(str, count(100)))) != first and calls == [1]
