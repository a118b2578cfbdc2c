"""Optimizers that are not quite as torch's are: whatever they raise when they are asked, training goes on as without
us, and their checkpoints are whole."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt import warn
from lazyckpt.gate import foreign

pytestmark = pytest.mark.usefixtures("small_tensors_are_lazy")

HELD_S = 0.05


class Wrapper(torch.optim.Optimizer):
    """Steps by another one and then moves its parameters, as Lookahead does; never calls ``Optimizer.__init__``, so
    that it has no more of torch's attributes than ``step()`` needs."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.defaults = {}
        self.steps = 0
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._patch_step_function()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.steps += 1
        with torch.no_grad():
            for group in self.inner.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.9)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "steps": {(0, 1): self.steps}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.steps = state_dict["steps"][0, 1]


class Lookahead(Wrapper):
    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state


def raising(*_: Any) -> Any:
    raise ValueError("not now")


def strange(name: str, base: type[Wrapper] = Lookahead, **attributes: Any) -> type[Wrapper]:
    return type(name, (base,), attributes)


CIRCLE: dict[str, Any] = {}
CIRCLE["me"] = CIRCLE
NoGroups = strange("NoGroups", Wrapper, param_groups=None)
GroupsRaise = strange("GroupsRaise", Wrapper, param_groups=property(raising))
GroupsOfNumbers = strange("GroupsOfNumbers", Wrapper, param_groups=[1, 2])
GroupsOfWords = strange("GroupsOfWords", Wrapper, param_groups=[{"params": ["weight", None]}])
GroupsOfOneTensor = strange("GroupsOfOneTensor", Wrapper, param_groups=[{"params": torch.zeros(10_000)}])
StateRaises = strange("StateRaises", state=property(raising))
StateInItself = strange("StateInItself", state=CIRCLE)
HashRaises = strange("HashRaises", __hash__=raising)
EqualRaises = strange("EqualRaises", __hash__=object.__hash__, __eq__=raising)
MissingRaises = strange("MissingRaises", __getattr__=raising)
DictRaises = strange("DictRaises", __dict__=property(raising))


class Counting(Lookahead):
    """Says something else each time, or nothing."""

    asked = 0

    @property
    def param_groups(self) -> Any:
        self.asked += 1
        raise Silent if self.asked % 2 else ValueError(f"for the {self.asked}th time")


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Sealed(type(torch.optim.Optimizer)):  # type: ignore[misc]
    def __dir__(cls) -> Any:
        raise ValueError("not now")


class ClassRaises(Lookahead, metaclass=Sealed):
    def train(self) -> None:
        pass


class OddSwitches(Lookahead):
    @staticmethod
    def train() -> None:
        pass

    @classmethod
    def eval(cls) -> None:
        pass

    swap_parameters = None


STRANGE = (
    NoGroups,
    GroupsRaise,
    GroupsOfNumbers,
    GroupsOfWords,
    StateRaises,
    StateInItself,
    HashRaises,
    EqualRaises,
    MissingRaises,
    ClassRaises,
)


def wrapped(kind: type[Wrapper], parameters: Any) -> Wrapper:
    return kind(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))


@pytest.fixture(autouse=True)
def each_class_warns_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "_told_of", weakref.WeakSet())
    monkeypatch.setattr(warn, "_given", set())


@pytest.mark.parametrize("kind", [Lookahead, OddSwitches, GroupsOfOneTensor, DictRaises, Counting, *STRANGE])
def test_training_is_as_without_us_and_checkpoints_are_whole(
    kind: type[Wrapper], make_run: Any, disk: Any, graph: Any
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = make_run(lambda parameters: wrapped(kind, parameters), warm=False)
        model = copy.deepcopy(run.model)
        alone = wrapped(kind, model.parameters())
        for step in range(2):
            for m, optimizer in ((run.model, run.optimizer), (model, alone)):
                optimizer.zero_grad()
                m(run.batch()).square().sum().backward()
                if optimizer is run.optimizer:
                    before = run.state()
                    disk.hold()
                    disk.release(after_s=HELD_S)  # also where the ring has no room for what save() has to copy
                    handle = run.ckpt.save(step)
                optimizer.step()
            assert graph(lazyckpt.load(handle.result())["model"]) == graph(before["model"])
            assert graph(lazyckpt.load(handle.path)["optimizer"]) == graph(before["optimizer"])
        assert graph(run.model.state_dict()) == graph(model.state_dict())
        run.ckpt.restore()
        assert graph(run.state()["model"]) == graph(before["model"])
        assert graph(run.optimizer.state_dict()) == graph(before["optimizer"])


@pytest.mark.parametrize("kind", [Lookahead, OddSwitches])
def test_one_that_tells_what_it_trains_is_lazy(kind: type[Wrapper], make_run: Any) -> None:
    run = make_run(lambda parameters: wrapped(kind, parameters))
    run.step()
    metrics = run.ckpt.save(1, blocking=True).metrics
    assert metrics.eager_bytes < 0.03 * metrics.bytes


@pytest.mark.parametrize("kind", [*STRANGE, Counting])
def test_its_class_is_told_of_once(kind: type[Wrapper], make_run: Any) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            run = make_run(lambda parameters: wrapped(kind, parameters))
            for step in range(2):
                run.ckpt.save(step, blocking=True)
                run.step()
    told = [w for w in told if str(w.message).startswith(f"lazyckpt cannot tell what {kind.__name__} trains")]
    assert len(told) == 1


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_stops_neither_step_nor_save(make_run: Any) -> None:
    run = make_run(lambda parameters: wrapped(GroupsRaise, parameters))
    run.step()
    assert Path(run.ckpt.save(1, blocking=True).path).exists()


def test_state_of_another_kind_is_not_put_into_an_optimizer_of_torch(make_run: Any, tmp_path: Path) -> None:
    run = make_run(lambda parameters: wrapped(Lookahead, parameters))
    run.ckpt.save(1, blocking=True)
    run.ckpt.close()
    other = make_run(lambda p: torch.optim.SGD(p, lr=0.1), directory=run.ckpt.directory)
    before = other.state()["model"]
    with pytest.raises(lazyckpt.RestoreError, match="optimizer: Lookahead in the checkpoint, SGD here"):
        other.ckpt.restore()
    assert all(torch.equal(value, before[name]) for name, value in other.model.state_dict().items())
