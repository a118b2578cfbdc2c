"""A save that succeeds restores: a zoo of objects on the way out and back, as one file and as a sharded folder. What
``restore()`` would refuse is refused by ``track()`` or by the first ``save()``."""

from __future__ import annotations

import collections.abc
import dataclasses
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, lr_scheduler
from torch.optim.swa_utils import AveragedModel

import lazyckpt
from lazyckpt.errors import ConfigError, SerializationError


class Inner(torch.optim.Optimizer):
    """A wrapper that never runs ``Optimizer.__init__``."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


class Passing(Inner):
    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state


class Lookahead(Inner):
    """The usual one: the lists of the inner optimizer, and slow weights beside its state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.param_groups, self.state = inner.param_groups, inner.state
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def state_dict(self) -> Any:
        return {**super().state_dict(), "slow": self.slow}

    def load_state_dict(self, state: Any) -> None:
        self.slow = state["slow"]
        super().load_state_dict({key: value for key, value in state.items() if key != "slow"})


class Several(Inner):
    """Shows the groups of two optimizers, and has their states in a list."""

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        self.several = inner

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return [group for one in self.several for group in one.param_groups]

    def state_dict(self) -> Any:
        return [one.state_dict() for one in self.several]

    def load_state_dict(self, state: Any) -> None:
        for one, its in zip(self.several, state, strict=True):
            one.load_state_dict(its)


class OfTheFirst(Several):
    """Shows two optimizers' groups, and has the state of one."""

    def state_dict(self) -> Any:
        return self.several[0].state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.several[0].load_state_dict(state)


class Made(AdamW):
    """Torch's own class, made without its ``__init__``."""

    def __init__(self, inner: AdamW) -> None:
        self.__dict__.update(inner.__dict__)


class Object:
    """Keeps a state and gives it back."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


class Slots:
    __slots__ = ("level",)

    def __init__(self) -> None:
        self.level = torch.ones(3)

    def state_dict(self) -> Any:
        return {name: getattr(self, name) for name in self.__slots__}

    def load_state_dict(self, state: Any) -> None:
        for name, value in state.items():
            setattr(self, name, value)


@dataclasses.dataclass
class Data:
    level: int = 1
    seen: torch.Tensor = dataclasses.field(default_factory=lambda: torch.ones(3))

    def state_dict(self) -> Any:
        return vars(self)

    def load_state_dict(self, state: Any) -> None:
        vars(self).update(state)


class Delegating:
    def __init__(self, inner: Any) -> None:
        vars(self)["inner"] = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["inner"], name)


class OtherArguments(Object):
    def load_state_dict(self, state: Any, *, strict: bool = True, assign: bool = False) -> None:
        self.value = state


class OneTooMany(Object):
    def load_state_dict(self, state: Any, strict: bool) -> None:  # type: ignore[override]
        raise AssertionError("is never called")


class ByKeyword(Object):
    def load_state_dict(self, *, state: Any) -> None:  # type: ignore[override]
        raise AssertionError("is never called")


class WithPrefix(Object):
    def state_dict(self, prefix: str) -> Any:  # type: ignore[override]
        raise AssertionError("is never called")


class OneTooManyModule(nn.Linear):
    def load_state_dict(self, state: Any, device: str) -> Any:  # type: ignore[override]
        raise AssertionError("is never called")


class AsList(nn.Linear):
    """A module whose state is no dict."""

    def state_dict(self) -> Any:  # type: ignore[override]
        return [self.weight.detach(), self.bias.detach()]

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        for live, saved in zip(self.parameters(), state, strict=True):
            live.data.copy_(saved)


class AsNested(nn.Linear):
    def state_dict(self) -> Any:  # type: ignore[override]
        return {"of": {"linear": super().state_dict()}}

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        super().load_state_dict(state["of"]["linear"])


class Buffer(nn.Linear):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__(2, 2)
        self.register_buffer("value", value)


class Expanded(Buffer):
    """Takes its buffer by code of its own, so that restore() need not fill it."""

    def __init__(self) -> None:
        super().__init__(torch.ones(1).expand(4))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        others = {name: value for name, value in state.items() if name != prefix + "value"}
        self._buffers.clear()
        super()._load_from_state_dict(others, prefix, *rest)
        self.register_buffer("value", state[prefix + "value"][:1].clone().expand(4))


def _small() -> nn.Linear:
    return nn.Linear(3, 3)


def _trained(wrap: Callable[..., Any], kind: Any = AdamW) -> Any:
    """An optimizer whose state is there, and the wrapper around it."""
    model = _small()
    inner = kind(model.parameters(), lr=0.01)
    model(torch.randn(2, 3)).sum().backward()
    inner.step()
    return wrap(inner)


def _two(wrap: Callable[..., Any]) -> Any:
    return wrap(_trained(lambda inner: inner), _trained(lambda inner: inner, SGD))


def _sgd() -> SGD:
    return SGD(_small().parameters(), lr=1.0)


def _peft() -> Any:
    return peft.get_peft_model(nn.Sequential(_small(), _small()), peft.LoraConfig(target_modules=["0"]))


def _with_metadata() -> Any:
    state = collections.OrderedDict(a=torch.ones(3))
    state._metadata = collections.OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    return state


def _jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


TAKEN: dict[str, Callable[[], Any]] = {
    "accelerate's optimizer": lambda: _trained(AcceleratedOptimizer),
    "lightning's optimizer": lambda: _trained(LightningOptimizer),
    "an optimizer that passes all on": lambda: _trained(Passing),
    "an optimizer without groups": lambda: _trained(Inner),
    "lookahead": lambda: _trained(Lookahead),
    "several optimizers": lambda: _two(Several),
    "several optimizers, one state": lambda: _two(OfTheFirst),
    "an optimizer without its init": lambda: _trained(Made),
    "no optimizer, but like one": lambda: _trained(Delegating),
    "LBFGS": lambda: torch.optim.LBFGS(_small().parameters()),
    "accelerate's scheduler": lambda: AcceleratedScheduler(
        lr_scheduler.StepLR(o := _sgd(), 1), AcceleratedOptimizer(o)
    ),
    "chained schedulers": lambda: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(o := _sgd(), 1), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
    "schedulers in turn": lambda: lr_scheduler.SequentialLR(
        o := _sgd(), [lr_scheduler.StepLR(o, 1), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "plateau": lambda: lr_scheduler.ReduceLROnPlateau(_sgd()),
    "one cycle": lambda: lr_scheduler.OneCycleLR(_sgd(), max_lr=1.0, total_steps=10),
    "scaler": lambda: torch.amp.GradScaler("cpu"),
    "average": lambda: AveragedModel(_small()),
    "DataParallel": lambda: nn.DataParallel(_small()),
    "compiled": lambda: torch.compile(_small()),
    "scripted": lambda: torch.jit.script(_small()),
    "adapter": _peft,
    "a module as a list": lambda: AsList(2, 2),
    "a module as nested dicts": lambda: AsNested(2, 2),
    "an expanded buffer of its own": Expanded,
    "a sparse buffer": lambda: Buffer(torch.eye(3).to_sparse()),
    "a buffer that is a view": lambda: Buffer(torch.arange(6.0)[1:4]),
    "a conjugate buffer": lambda: Buffer(torch.ones(3, dtype=torch.complex64).conj()),
    "slots": Slots,
    "dataclass": Data,
    "delegating": lambda: Delegating(Object({"a": torch.ones(2)})),
    "other arguments": lambda: OtherArguments({"a": 1}),
    "metadata": lambda: Object(_with_metadata()),
    "no dict": lambda: Object((1, torch.ones(2))),
    "nothing": lambda: Object(None),
    "keys that are no text": lambda: Object({1: {(2, 3): torch.ones(2)}}),
    "a Counter": lambda: Object(collections.Counter("aab")),
    "a parameter": lambda: nn.Parameter(torch.ones(2)),
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
    "a view": lambda: torch.arange(16.0).view(4, 4).t()[1:],
    "an expanded tensor in a dict": lambda: {"a": torch.ones(1).expand(4)},
    "a nested tensor in a dict": lambda: {"a": _jagged()},
}


@dataclasses.dataclass
class Refused:
    make: Callable[[], Any]
    why: str


REFUSED: dict[str, Refused] = {
    "one argument too many": Refused(lambda: OneTooMany({}), r"load_state_dict\(state\) cannot be called.*'strict'"),
    "by keyword": Refused(lambda: ByKeyword({}), r"ByKeyword.load_state_dict\(state\) cannot be called"),
    "a prefix": Refused(lambda: WithPrefix({}), r"WithPrefix.state_dict\(\) cannot be called.*'prefix'"),
    "a module with one": Refused(lambda: OneTooManyModule(2, 2), r"load_state_dict\(state\) cannot be called"),
    "a nested tensor": Refused(_jagged, "'x' is a .*[Nn]ested.?[Tt]ensor"),
    "an expanded tensor": Refused(lambda: torch.ones(1).expand(4), r"'x' is an expanded tensor.*contiguous\(\)"),
    "an expanded buffer": Refused(lambda: Buffer(torch.ones(1).expand(4)), r"'x.value' is in state_dict.*contiguous"),
    "a nested buffer": Refused(lambda: Buffer(_jagged()), "'x.value' is .*[Nn]ested.?[Tt]ensor"),
    "a mapping proxy": Refused(lambda: Object(types.MappingProxyType({})), "mappingproxy"),
    "a defaultdict": Refused(lambda: Object({"a": collections.defaultdict(int)}), r"keep dict\(a\) instead"),
}

if torch._utils._rebuild_nested_tensor not in torch._weights_only_unpickler._get_allowed_globals().values():
    case = "a nested tensor in a dict"  # torch 2.15 does not trust it
    REFUSED[case] = Refused(TAKEN.pop(case), r"'x\.a' is a .*NestedTensor.*add_safe_globals")


def values(obj: Any) -> Any:
    """All of a state to the bit, in a form that compares. A sharded folder makes dicts of all mappings."""
    if isinstance(obj, torch.Tensor):
        parts = obj.detach().unbind() if obj.is_nested else [obj.detach().to_dense()]
        return obj.dtype, obj.layout, [(part.shape, part.tolist()) for part in parts]
    if isinstance(obj, collections.abc.Mapping):
        return {key: values(value) for key, value in obj.items()}
    return type(obj)(map(values, obj)) if isinstance(obj, list | tuple) else obj


def state_of(obj: Any) -> Any:
    return values(obj.state_dict() if hasattr(obj, "state_dict") else obj)


def round_trip(folder: Path, make: Callable[[], Any], **others: Any) -> None:
    """Saves one, and restores it into another one and into itself."""
    torch.manual_seed(0)
    saved = make()
    with lazyckpt.Checkpointer(folder) as ckpt:
        ckpt.track(x=saved, **others)
        ckpt.save(1).result()
    expected = state_of(saved)
    torch.manual_seed(1)
    for live in (make(), saved):
        with lazyckpt.Checkpointer(folder, read_only=True) as ckpt:
            ckpt.track(x=live, **others)
            assert ckpt.restore() == 1
        assert state_of(live) == expected


@pytest.fixture(params=["file", "sharded"])
def others(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Further tracked objects. A model with DTensors makes the checkpoint a sharded folder."""
    accelerate.Accelerator(cpu=True)
    if request.param == "file":
        yield {}
        return
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = _small()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        yield {"model": model}
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.long(first=47)
@pytest.mark.parametrize("name", TAKEN)
def test_what_is_saved_is_restored(name: str, others: dict[str, Any], tmp_path: Path) -> None:
    round_trip(tmp_path, TAKEN[name], **others)
    assert (tmp_path / "step-00000001/.metadata").exists() == bool(others)


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_not_be_restored_is_not_saved(name: str, others: dict[str, Any], tmp_path: Path) -> None:
    if others and name == "a defaultdict":
        pytest.skip("a sharded folder makes a dict of every mapping")
    with (
        pytest.raises((ConfigError, SerializationError), match=REFUSED[name].why),
        lazyckpt.Checkpointer(tmp_path) as ckpt,
    ):
        ckpt.track(x=REFUSED[name].make(), **others)
        ckpt.save(1)
