"""Which optimizers wait behind their closure: those whose code proves that it runs the closure before it writes."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import lazyckpt
from lazyckpt import warn
from lazyckpt.gate import closure_proof, closures, proof
from lazyckpt.gate.step_layers import without_hooks

pytestmark = pytest.mark.usefixtures("small_tensors_are_lazy")

SGD = torch.optim.SGD
AdamW = torch.optim.AdamW


@pytest.fixture(autouse=True)
def every_class_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warn, "_given", set())


def exists(value: Any) -> bool:
    return value is not None


class Inherited(AdamW):
    pass


class Delegating(AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class DelegatingAll(SGD):
    def step(self, *args: Any, **kwargs: Any) -> Any:
        return super(DelegatingAll, self).step(*args, **kwargs)  # noqa: UP008


class Own(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """As the libraries write it."""
        loss: Any = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(0.9)
        return loss


class ByFunction(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if exists(closure):
            with torch.enable_grad():
                loss = closure()
        self.param_groups[0]["params"][0].data.mul_(0.9)
        return loss


class OtherName(SGD):
    def step(self, again: Any = None) -> Any:  # type: ignore[override]
        if again is None:
            raise ValueError("a closure, please")
        again = torch.enable_grad()(again)
        loss = float(again())
        with torch.no_grad():
            self.param_groups[0]["params"][0].mul_(0.9)
        return loss


class Flagged(SGD):
    """As schedule-free's begin."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for group in self.param_groups:
            group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if not self.param_groups[0]["train_mode"]:
            raise Exception("not in train mode")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.param_groups[0]["params"][0].data.mul_(0.9)
        return loss


PROVEN = (Inherited, Delegating, DelegatingAll, Own, ByFunction, OtherName, Flagged)


def write(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data.mul_(0.5)


class WritesFirst(AdamW):
    def step(self, closure: Any = None) -> Any:
        write(self)
        return super().step(closure)


class WritesInProperty(SGD):
    @property
    def now(self) -> None:
        write(self)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if self.now is None and closure is not None:
            loss = closure()
        return loss


class WritesInGetattribute(AdamW):
    busy = False

    def __getattribute__(self, name: str) -> Any:
        if name == "_accelerator_graph_capture_health_check" and not type(self).busy:
            type(self).busy = True
            write(self)
            type(self).busy = False
        return super().__getattribute__(name)


class WritesInHealthCheck(AdamW):
    def _accelerator_graph_capture_health_check(self) -> None:
        write(self)

    _cuda_graph_capture_health_check = _accelerator_graph_capture_health_check


class WritesInDefaults(AdamW):
    @property
    def defaults(self) -> Any:
        if "param_groups" in vars(self):
            write(self)
        return vars(self)["kept"]

    @defaults.setter
    def defaults(self, value: Any) -> None:
        vars(self)["kept"] = value


class WritesInElse(SGD):
    flag = True

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if closure is not None and self.flag:
            write(self)
            return closure()
        return None


class WritesByDecorator(SGD):
    def _decorated(step: Any) -> Any:
        @functools.wraps(step)
        def decorated(self: Any, closure: Any = None) -> Any:
            write(self)
            return step(self, closure)

        return decorated

    @_decorated
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return closure()


class Writing:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __enter__(self) -> None:
        write(self.optimizer)

    def __exit__(self, *_: object) -> None: ...


class WritesByContext(SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with Writing(self):
            return closure()


class WritesInArgument(AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(write(self) or closure)


class SkipsTheClosure(SGD):
    """It gets a closure, drops it, and writes."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        closure = None
        if closure is not None:
            return closure()
        write(self)
        return None


class Generates(SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure()
        yield loss


class Loops(SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["params"][0].data.mul_(0.5)
        return closure()


class WritesInBool(SGD):
    class Flag:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def __bool__(self) -> bool:
            write(self.optimizer)
            return True

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if self.Flag(self):
            loss = closure()
        return loss


class Built(SGD):
    step = len  # type: ignore[assignment]


class Takes(SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            loss = closure()
        write(self)
        return loss


class DropsPositional(Takes):
    """``Takes`` is never made, so torch does not hook it: nothing waits in front of it."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(**kwargs)


class DropsByName(Takes):
    def step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(*args)


class DropsNamed(Takes):
    def step(self, closure: Any = None, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().step(*args, **kwargs)


class Shifts(Takes):
    def step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(None, *args, **kwargs)


class OfAnother(Takes):
    def step(self, closure: Any = None, other: Any = None) -> Any:  # type: ignore[override]
        self = other  # noqa: F841
        return super().step(closure)


class EqualToAll(contextlib.nullcontext[None]):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    def __call__(self) -> EqualToAll:
        write(self)
        return self


equal_to_all = EqualToAll()


class WritesByEqualContext(SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with equal_to_all():
            return closure()


UNPROVEN = (
    WritesFirst,
    WritesInProperty,
    WritesInGetattribute,
    WritesInHealthCheck,
    WritesInDefaults,
    WritesInElse,
    WritesByDecorator,
    WritesByContext,
    WritesInArgument,
    WritesInBool,
    SkipsTheClosure,
    Generates,
    Loops,
    Built,
    DropsNamed,
    OfAnother,
    WritesByEqualContext,
    torch.optim.LBFGS,
)

MUON = [torch.optim.Muon] if hasattr(torch.optim, "Muon") else []


def is_proven(kind: type[Any], *, by_name: bool = False) -> bool:
    optimizer = kind([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    step = without_hooks(type(optimizer).step)
    return closures.runs_closure_first(step, optimizer, by_name=by_name)


@pytest.mark.parametrize("kind", [*PROVEN, SGD, AdamW, *MUON])
def test_the_code_proves_it(kind: type[Any]) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = kind([parameter], lr=0.1)
    assert closures.runs_closure_first(without_hooks(kind.step), optimizer, by_name=False)


@pytest.mark.parametrize("kind", UNPROVEN)
def test_the_code_does_not_prove_it(kind: type[Any]) -> None:
    assert not is_proven(kind) and not is_proven(kind, by_name=True)


def test_a_step_that_drops_the_closure_on_its_way_up_is_not_proven() -> None:
    assert is_proven(DropsPositional, by_name=True) and not is_proven(DropsPositional)
    assert is_proven(Shifts, by_name=True) and not is_proven(Shifts)
    assert is_proven(DropsByName) and not is_proven(DropsByName, by_name=True)


def test_every_class_of_torch_but_lbfgs_is_proven_in_a_subclass() -> None:
    kinds = [k for k in vars(torch.optim).values() if isinstance(k, type) and issubclass(k, torch.optim.Optimizer)]
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    unproven = set()
    for kind in kinds:
        if kind is not torch.optim.Optimizer:
            optimizer = type(f"My{kind.__name__}", (kind,), {})([parameter])
            step = without_hooks(type(optimizer).step)
            if not closures.runs_closure_first(step, optimizer, by_name=True):
                unproven.add(kind)
    by_dynamo = {kind for kind in kinds if "_dynamo" in kind.step.__code__.co_filename}  # it wraps some once imported
    assert unproven - by_dynamo == {torch.optim.LBFGS} - by_dynamo


def pending_at_closure(run: Any, disk: Any, pending: Any, *, waits: bool, by_name: bool = True) -> int:
    """Chunks that were not copied when the closure of a step began, after a save. ``waits``: whether the step needs the
    disk before its closure, which otherwise gives the disk back."""
    run.backward()
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    disk.hold()
    handle = run.ckpt.save(len(run.ckpt.checkpoints()) + 1)
    seen = []

    def closure() -> Any:
        seen.append(pending(handle))
        disk.release()
        return run.backward()

    if waits:
        disk.release(after_s=0.1)
    if by_name:
        run.optimizer.step(closure=closure)
    else:
        run.optimizer.step(closure)
    saved = torch.load(handle.result(timeout=30) / "state.pt")["model"]
    assert all(torch.equal(saved[name], value) for name, value in before.items())
    return seen[0]


@pytest.mark.parametrize("kind", PROVEN)
def test_a_proven_step_waits_behind_its_closure(kind: type[Any], make_run: Any, disk: Any, pending: Any) -> None:
    """Regression: only classes of torch.optim itself did."""
    run = make_run(lambda p: kind(p, lr=1e-3), warm=False)
    run.optimizer.step(run.backward)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pending_at_closure(run, disk, pending, waits=False, by_name=kind is not OtherName) > 0


@pytest.mark.parametrize("kind", [WritesFirst, WritesInGetattribute, WritesInHealthCheck, WritesByDecorator])
def test_another_step_waits_in_front_and_is_told_of_once(kind: Any, make_run: Any, disk: Any, pending: Any) -> None:
    run = make_run(lambda p: kind(p, lr=1e-3), warm=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.optimizer.step(run.backward)
        assert [pending_at_closure(run, disk, pending, waits=True) for _ in range(2)] == [0, 0]
    (message,) = [str(w.message) for w in told if "closure" in str(w.message)]
    assert f"lazyckpt.closure_first({kind.__name__})" in message


def test_the_user_vouches_for_a_class(make_run: Any, disk: Any, pending: Any) -> None:
    @lazyckpt.closure_first
    class Vouched(SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            for _ in range(1):
                loss = closure()
            write(self)
            return loss

    class Child(Vouched):
        pass

    class Other(Vouched):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            write(self)
            return super().step(closure)

    class Above(Vouched):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return super().step(closure)

    assert is_proven(Vouched) and is_proven(Child) and not is_proven(Other)
    above = Above([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    assert closures.runs_closure_first(without_hooks(Vouched.step), above, by_name=False), "the step that torch calls"
    run = make_run(lambda p: Child(p, lr=1e-3), warm=False)
    run.optimizer.step(run.backward)
    assert pending_at_closure(run, disk, pending, waits=False) > 0
    Vouched.step = WritesFirst.step  # type: ignore[method-assign]
    assert not is_proven(Vouched), "the vouched step is gone"
    for wrong in (3, Vouched([torch.nn.Parameter(torch.zeros(1))], lr=0.1), int):
        with pytest.raises(TypeError, match="takes a class with a step"):
            lazyckpt.closure_first(wrong)  # type: ignore[type-var]


def test_what_a_proof_rests_on_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_proven(ByFunction)
    monkeypatch.setitem(globals(), "exists", lambda value: write(value) or True)
    assert not is_proven(ByFunction), "another function"
    monkeypatch.undo()
    assert is_proven(ByFunction)
    before = exists.__code__
    exists.__code__ = (lambda value: bool(value.write())).__code__
    try:
        assert not is_proven(ByFunction), "other code"
    finally:
        exists.__code__ = before
    assert is_proven(Inherited)
    monkeypatch.setattr(AdamW, "_accelerator_graph_capture_health_check", write, raising=False)
    monkeypatch.setattr(AdamW, "_cuda_graph_capture_health_check", write, raising=False)
    assert not is_proven(Inherited), "another method"
    monkeypatch.undo()
    monkeypatch.setattr(Own, "step", Loops.step)
    assert not is_proven(Own), "another step"


def test_a_method_of_the_instance_is_no_method_of_torch() -> None:
    optimizer = Inherited([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    step = without_hooks(Inherited.step)
    assert closures.runs_closure_first(step, optimizer, by_name=True)
    for name in proof.PURE_METHODS:
        setattr(optimizer, name, lambda: write(optimizer))
    assert not closures.runs_closure_first(step, optimizer, by_name=True)


class WritingFlag:
    """Writes to the parameters of an optimizer where it is asked for anything."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __bool__(self) -> bool:
        write(self.optimizer)
        return True

    def __getitem__(self, _: object) -> Any:
        write(self.optimizer)
        return self.optimizer.defaults


class WritingDict(dict[str, Any]):
    def __getitem__(self, name: str) -> Any:
        write(self["optimizer"]) if name != "optimizer" else None
        return super().__getitem__(name)


def test_a_flag_of_a_class_may_run_code() -> None:
    def make(kind: type[Any] = Flagged) -> Any:
        return kind([torch.nn.Parameter(torch.ones(2))], lr=0.1)

    def proven(optimizer: Any) -> bool:
        return closures.runs_closure_first(without_hooks(type(optimizer).step), optimizer, by_name=False)

    assert proven(make())
    optimizer = make()
    optimizer.param_groups[0]["train_mode"] = WritingFlag(optimizer)
    assert not proven(optimizer)
    optimizer = make()
    optimizer.param_groups[0] = WritingDict(optimizer.param_groups[0])
    assert not proven(optimizer)
    optimizer = make()
    optimizer.param_groups = WritingFlag(optimizer)
    assert not proven(optimizer)
    optimizer = make()
    del optimizer.param_groups[0]["train_mode"]
    assert not proven(optimizer)

    class WithProperty(Flagged):
        pass

    assert proven(make(WithProperty))
    optimizer = make(WithProperty)
    WithProperty.param_groups = property(lambda self: write(self) or vars(self)["param_groups"])  # type: ignore
    assert not proven(optimizer)


class RaisesBehindAWrite(Flagged):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not self.param_groups[0]["train_mode"]:
            write(self)
            raise Exception("not in train mode")
        return closure()


class MayPassOver(Flagged):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["train_mode"]:
            closure()
        write(self)


def test_what_depends_on_a_flag_must_end_or_be_harmless() -> None:
    assert not is_proven(RaisesBehindAWrite)
    assert not is_proven(MayPassOver)


def test_source_that_is_not_that_of_the_code_proves_nothing() -> None:
    """It was edited after the import, or there is none."""
    names: dict[str, Any] = {"SGD": SGD}
    exec("class Unseen(SGD):\n def step(self, closure=None):\n  return closure()", names)
    assert not is_proven(names["Unseen"])
    code = Own.step.__wrapped__ if hasattr(Own.step, "__wrapped__") else Own.step  # type: ignore[attr-defined]
    moved = functools.reduce(lambda f, _: getattr(f, "__wrapped__", f), range(3), code).__code__
    with pytest.raises(closure_proof.Unproven):
        closure_proof._tree_of(moved.replace(co_consts=(*moved.co_consts, 1)))


def test_a_hook_of_somebody_else_between_the_gate_and_the_closure(make_run: Any, disk: Any, pending: Any) -> None:
    run = make_run(lambda p: Inherited(p, lr=1e-3), warm=False)
    run.optimizer.step(run.backward)
    run.optimizer.register_step_pre_hook(lambda optimizer, *_: write(optimizer))
    with pytest.warns(UserWarning, match="runs before the closure and may write"):
        assert pending_at_closure(run, disk, pending, waits=True) == 0


def test_our_own_hooks_are_no_writers(tmp_path: Any, make_run: Any, disk: Any, pending: Any) -> None:
    """Regression: the hook of ``trace=`` counted as somebody else's, and the step waited before forward."""
    run = make_run(AdamW, warm=False, trace=tmp_path / "trace.json")
    run.optimizer.step(run.backward)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pending_at_closure(run, disk, pending, waits=False) > 0
    hook: Callable[..., None] = lambda optimizer, *_: write(optimizer)  # noqa: E731
    handle = register_optimizer_step_pre_hook(hook)
    try:
        with pytest.warns(UserWarning, match=r"test_closures\.py"):
            assert pending_at_closure(run, disk, pending, waits=True) == 0
    finally:
        handle.remove()
