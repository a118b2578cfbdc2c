"""The gate: writes to parameters and optimizer state wait until these are copied; other code does not wait."""

from __future__ import annotations

import collections
import copy
import functools
import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

import lazyckpt
from lazyckpt import warn
from lazyckpt.gate import hooks
from lazyckpt.gate.gate import gate

pytestmark = pytest.mark.usefixtures("small_tensors_are_lazy")

HELD_S = 0.05  # how long the disk is held back: who waits, waits that long


class Twice(torch.optim.AdamW):
    """A subclass whose step comes by the hooks twice."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "subclass": lambda p: Twice(p, lr=0.1),
}
FUSED = OPTIMIZERS["AdamW fused"]
CLOSURES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **{name: OPTIMIZERS[name] for name in ("AdamW", "AdamW fused", "SGD momentum")},
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=1e-3, max_iter=2, history_size=2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),  # its __module__ is torch.optim itself
}


@pytest.fixture
def check(graph: Any) -> Callable[[Any, lazyckpt.SaveHandle, Any], None]:
    """Asserts that a checkpoint has the bits that ``Run.state()`` told before."""

    def check(run: Any, handle: lazyckpt.SaveHandle, before: Any) -> None:
        saved = torch.load(handle.result(timeout=30) / "state.pt")
        assert graph({k: saved[k] for k in ("model", "optimizer")}) == graph(before)

    return check


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_waits_for_what_it_changes(name: str, make_run: Any, disk: Any, pending: Any, check: Any) -> None:
    run = make_run(OPTIMIZERS[name])
    run.backward()
    before = run.state()
    disk.hold()
    handle = run.ckpt.save(1)
    assert pending(handle) > 0 and not handle.wait_captured(0)
    disk.release(after_s=HELD_S)
    run.optimizer.step()
    assert pending(handle) == 0
    assert handle.metrics.gate_blocked_s > HELD_S / 2
    check(run, handle, before)


@pytest.mark.parametrize(("name", "positional"), [*((name, True) for name in CLOSURES), ("AdamW", False)])
def test_a_closure_overlaps_and_then_the_step_waits(
    name: str, positional: bool, make_run: Any, disk: Any, pending: Any, check: Any
) -> None:
    """Lightning's automatic optimization: forward and backward happen inside ``step()``."""
    run = make_run(CLOSURES[name], warm=False)
    run.optimizer.step(run.backward)
    before = run.state()
    disk.hold()
    handle = run.ckpt.save(1)
    seen = []

    def closure() -> Any:
        seen.append(pending(handle))
        loss = run.backward()
        disk.release()
        return loss

    loss = run.optimizer.step(closure) if positional else run.optimizer.step(closure=closure)
    assert isinstance(loss, torch.Tensor), "the closure's result is the step's"
    assert seen[0] > 0, "the closure began while chunks were pending"
    assert not any(seen[1:]), "LBFGS moves the weights between its closures"
    check(run, handle, before)


def test_a_closure_that_raises_leaves_no_step_open(make_run: Any, disk: Any, pending: Any, check: Any) -> None:
    run = make_run(FUSED)
    before = run.state()
    disk.hold()
    handle = run.ckpt.save(1)

    def closure() -> Any:
        raise KeyError("out of data")

    with pytest.raises(KeyError, match="out of data"):
        run.optimizer.step(closure)
    assert not gate.inside_step()
    assert pending(handle) > 0, "nothing was changed, so nothing had to wait"
    disk.release(after_s=HELD_S)
    run.step()
    check(run, handle, before)
    lazy = run.ckpt.save(2)
    lazy.result()
    assert lazy.metrics.eager_bytes < lazy.metrics.bytes / 4


def decays(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """As a hook in front of the step would decay weights."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data.mul_(0.5)


@pytest.fixture
def put_in_front(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, torch.optim.Optimizer], None]]:
    """Puts ``decays`` between torch's hook and the closure."""
    handles = []

    def put(where: str, optimizer: torch.optim.Optimizer) -> None:
        if where == "a hook of the optimizer":
            handles.append(optimizer.register_step_pre_hook(decays))
        elif where == "a hook of all":
            handles.append(torch_optimizer.register_optimizer_step_pre_hook(decays))
        else:
            kind = type(optimizer)
            step = kind.step.__wrapped__  # type: ignore[attr-defined]

            @functools.wraps(step)
            def decaying(self: Any, closure: Any = None) -> Any:
                decays(self)
                return step(self, closure)

            monkeypatch.setattr(kind, "step", kind.profile_hook_step(decaying))

    monkeypatch.setattr(warn, "_given", set())
    yield put
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("where", ["a hook of the optimizer", "a hook of all", "a step of somebody else's"])
def test_the_wait_is_in_front_of_what_writes_before_the_closure(
    where: str, put_in_front: Any, make_run: Any, disk: Any, pending: Any, check: Any
) -> None:
    run = make_run(FUSED, warm=False)
    run.optimizer.step(run.backward)
    put_in_front(where, run.optimizer)
    for step in range(3):
        before = run.state()
        disk.hold()
        handle = run.ckpt.save(step)
        assert pending(handle) > 0
        disk.release(after_s=HELD_S)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.optimizer.step(run.backward)
        names = [str(warning.message) for warning in caught if "do not overlap" in str(warning.message)]
        assert len(names) == (step == 0) and all("test_gate.py:" in name and "decay" in name for name in names)
        check(run, handle, before)


def test_the_gate_is_in_front_of_hooks_that_were_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_optimizer, "_global_optimizer_pre_hooks", collections.OrderedDict())
    after = torch_optimizer._global_optimizer_post_hooks
    monkeypatch.setattr(torch_optimizer, "_global_optimizer_post_hooks", collections.OrderedDict(after))
    monkeypatch.setattr(hooks, "gate_methods", lambda: None)
    monkeypatch.setattr(hooks, "_installed", threading.Lock())
    torch_optimizer.register_optimizer_step_pre_hook(decays)
    hooks.install()
    assert list(torch_optimizer._global_optimizer_pre_hooks.values()) == [hooks._before_step, decays]


class Unhashable(torch.optim.SGD):
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]


class Bare(torch.optim.Optimizer):
    """Of torch's attributes it has none."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for p in self.parameters:
                p.sub_(1.0)

    _optimizer_step_pre_hooks: Any = {}  # noqa: RUF012
    _optimizer_step_post_hooks: Any = {}  # noqa: RUF012


@pytest.mark.parametrize("closure", [None, lambda: None])
@pytest.mark.parametrize("make", [lambda p: Unhashable(p, lr=0.1), Bare], ids=["unhashable", "bare"])
def test_an_optimizer_that_is_not_quite_one_of_torchs_steps_and_waits(
    make: Any, closure: Any, make_run: Any, disk: Any, pending: Any, check: Any
) -> None:
    """It owns nothing, so it may write to everything."""
    run = make_run(FUSED)
    strange = make(run.model.parameters())
    for step in range(2):
        run.backward()
        before = run.state()
        disk.hold()
        handle = run.ckpt.save(step)
        assert pending(handle) > 0 or isinstance(strange, Bare)
        disk.release(after_s=HELD_S)
        strange.step(closure)
        check(run, handle, before)
        run.step()


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_was_never_seen_before_waits(
    fused: bool, make_run: Any, disk: Any, pending: Any, check: Any
) -> None:
    """A new phase of training begins right after a save, with a new optimizer for the same parameters."""
    run = make_run(FUSED)
    run.backward()
    before = run.state()
    disk.hold()
    handle = run.ckpt.save(1)
    disk.release(after_s=HELD_S)
    torch.optim.SGD(run.model.parameters(), lr=1.0, fused=fused).step()
    assert pending(handle) == 0
    check(run, handle, before)


def test_only_the_optimizer_whose_storages_are_pending_waits(make_run: Any, disk: Any, pending: Any) -> None:
    """The largest tensor is copied first and fits into the ring; its optimizer may step, the other may not."""
    first = torch.nn.Linear(25_600, 1, bias=False)
    small = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(11)))
    run = make_run(OPTIMIZERS["SGD"], small, host_buffer_bytes=256 << 10)
    run.ckpt.track(first=first)
    mine = torch.optim.SGD(first.parameters(), lr=1.0)
    first.weight.grad = torch.ones_like(first.weight)
    mine.step()
    run.step()
    before = first.weight.detach().clone()
    disk.hold()
    handle = run.ckpt.save(1)
    mine.step()  # returns although the disk is held
    assert pending(handle) > 0
    blocked = handle.metrics.gate_blocked_s
    disk.release(after_s=HELD_S)
    run.optimizer.step()
    assert handle.metrics.gate_blocked_s > blocked + HELD_S / 2
    assert torch.equal(torch.load(handle.result() / "state.pt")["first"]["weight"], before)


def test_a_storage_with_two_owners_waits_for_both(make_run: Any, disk: Any, check: Any) -> None:
    run = make_run(FUSED)
    second = torch.optim.SGD(run.model.parameters(), lr=1e-3, fused=True)
    second.step()
    run.step()
    eager = run.ckpt.save(1, blocking=True)
    assert eager.metrics.eager_bytes < eager.metrics.bytes / 2, "both have stepped"
    run.step()
    half = run.ckpt.save(2, blocking=True)
    assert half.metrics.eager_bytes > 700_000, "the second has not: the parameters, which it owns too, are eager"
    second.step()
    half = run.ckpt.save(3, blocking=True)
    assert half.metrics.eager_bytes > 2_100_000, "the first has not"
    run.step()
    second.step()
    before = run.state()
    disk.hold()
    handle = run.ckpt.save(3)
    disk.release(after_s=HELD_S)
    second.step()
    assert handle.metrics.gate_blocked_s > 0
    run.optimizer.step()
    check(run, handle, before)


def test_a_step_that_the_scaler_skips_costs_nothing_and_earns_nothing(make_run: Any, disk: Any, pending: Any) -> None:
    run = make_run(OPTIMIZERS["AdamW"])  # a fused one is always stepped
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    disk.hold()
    handle = run.ckpt.save(1)
    scaler.scale(run.model(run.batch()).square().sum()).backward()
    next(run.model.parameters()).grad.fill_(float("inf"))
    scaler.step(run.optimizer)  # would hang if it waited
    scaler.update()
    assert pending(handle) > 0
    disk.release()
    handle.result()
    again = run.ckpt.save(2, blocking=True)
    assert again.metrics.eager_bytes > again.metrics.bytes * 0.9, "no step was seen since the save before"


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_waits(make_run: Any, disk: Any, pending: Any, check: Any) -> None:
    run = make_run(OPTIMIZERS["SGD momentum"])
    step = torch.compile(run.optimizer.step, backend="eager")
    run.backward()
    step()
    run.backward()
    before = run.state()
    disk.hold()
    handle = run.ckpt.save(1)
    assert pending(handle) > 0
    disk.release(after_s=HELD_S)
    step()
    assert pending(handle) == 0
    check(run, handle, before)


def test_optimizers_in_backward_wait_each_for_its_own(make_run: Any, disk: Any) -> None:
    """One optimizer for each parameter, more than there are owner bits; they step on autograd's thread."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(40)))
    run = make_run(FUSED)
    run.ckpt.track(inside=model)
    optimizers = {p: torch.optim.SGD([p], lr=1e-6, momentum=0.9, fused=True) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: (optimizers[p].step(), optimizers[p].zero_grad())[0])
    for _ in range(2):
        model(torch.ones(1, 64)).sum().backward()
    for step in range(5):
        run.step()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        disk.hold()
        handle = run.ckpt.save(step)
        disk.release(after_s=HELD_S)
        model(torch.ones(1, 64)).sum().backward()
        saved = torch.load(handle.result() / "state.pt")["inside"]
        assert all(torch.equal(saved[k], v) for k, v in before.items())


# writes other than optimizer steps


def load_module(run: Any) -> None:
    run.model.load_state_dict({k: v + 1 for k, v in run.model.state_dict().items()})


def load_submodule(run: Any) -> None:
    for layer in run.model:
        layer.load_state_dict({k: v + 1 for k, v in layer.state_dict().items()})


def load_optimizer(run: Any) -> None:
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    for state in run.optimizer.state.values():
        state["exp_avg"].fill_(7)
    torch._foreach_mul_(list(run.model.parameters()), 2.0)


def load_optimizer_by_name(run: Any) -> None:
    """As torch calls it after _patch_optimizer_state_dict. Regression: it raised TypeError."""
    torch.optim.Optimizer.load_state_dict(self=run.optimizer, state_dict=run.optimizer.state_dict())
    torch._foreach_mul_(list(run.model.parameters()), 2.0)


def wait_and_write(run: Any) -> None:
    lazyckpt.wait_captured()
    with torch.no_grad():
        torch._foreach_add_(list(run.model.parameters()), 1.0)


CHANGES = {f.__name__: f for f in (load_module, load_submodule, load_optimizer, load_optimizer_by_name, wait_and_write)}


@pytest.mark.parametrize("change", CHANGES)
def test_loading_in_the_middle_of_training_waits(change: str, make_run: Any, disk: Any, check: Any) -> None:
    run = make_run(FUSED)
    before = run.state()
    disk.hold()
    handle = run.ckpt.save(1)
    disk.release(after_s=HELD_S)
    with torch.no_grad():
        CHANGES[change](run)
    assert handle.metrics.gate_blocked_s > HELD_S / 2
    check(run, handle, before)


def test_after_wait_captured_of_a_handle_everything_may_change(make_run: Any, check: Any) -> None:
    """No false alarm: whether the snapshot is whole is settled when wait_captured returns, not some time later."""
    run = make_run(FUSED)
    for step in range(40):
        before = run.state()
        handle = run.ckpt.save(step)
        assert handle.wait_captured(timeout=10)
        with torch.no_grad():
            torch._foreach_add_(list(run.model.parameters()), 1.0)
        check(run, handle, before)
        run.step()


def test_a_forked_child_trains_on_and_the_parent_does_too(make_run: Any, disk: Any, pending: Any, check: Any) -> None:
    run = make_run(FUSED)
    run.backward()
    before = run.state()
    disk.hold()
    handle = run.ckpt.save(1)
    child = os.fork()
    if child == 0:
        try:
            run.optimizer.step()
            run.model.load_state_dict(run.model.state_dict())
            lazyckpt.wait_captured()
            os._exit(0)
        except BaseException:
            os._exit(3)
    assert os.waitpid(child, 0)[1] == 0
    disk.release(after_s=HELD_S)
    run.optimizer.step()
    check(run, handle, before)


# eager state


def test_a_save_inside_an_open_step_is_eager(make_run: Any, graph: Any) -> None:
    run = make_run(FUSED)
    saved = []

    def closure() -> Any:
        saved.append((run.state(), run.ckpt.save(1)))
        return run.backward()

    run.optimizer.step(closure)
    before, handle = saved[0]
    state = torch.load(handle.result() / "state.pt")
    assert graph(state["model"]) == graph(before["model"])
    assert handle.metrics.eager_bytes > handle.metrics.bytes * 0.9


def test_a_second_save_without_a_step_is_eager(make_run: Any) -> None:
    run = make_run(FUSED)
    lazy, eager = run.ckpt.save(1), run.ckpt.save(2)
    for handle in (lazy, eager):
        handle.result()
    assert lazy.metrics.eager_bytes < lazy.metrics.bytes / 4
    assert eager.metrics.eager_bytes > eager.metrics.bytes * 0.9


class Average(torch.optim.swa_utils.AveragedModel):
    """None that lazyckpt knows: those are in test_averages.py."""


def test_guard_makes_an_average_lazy_and_its_update_wait(make_run: Any, disk: Any, pending: Any) -> None:
    run = make_run(FUSED)
    ema = Average(run.model)
    run.ckpt.track(ema=ema)
    lazyckpt.guard(ema, "update_parameters")
    ema.update_parameters(run.model)
    run.step()
    ema.update_parameters(run.model)
    before = {k: v.clone() for k, v in ema.state_dict().items()}
    disk.hold()
    handle = run.ckpt.save(1)
    run.backward()
    disk.release(after_s=HELD_S)
    ema.update_parameters(run.model)
    assert handle.metrics.gate_blocked_s > HELD_S / 2
    saved = torch.load(handle.result() / "state.pt")["ema"]
    assert all(torch.equal(saved[k], v) for k, v in before.items())
    assert handle.metrics.eager_bytes < 100_000


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda obj: pickle.loads(pickle.dumps(obj))])
def test_a_copy_of_a_guarded_object_updates_itself(duplicate: Any) -> None:
    model = torch.nn.Linear(4, 4)
    average = Average(model)
    lazyckpt.guard(average, "update_parameters")
    other = duplicate(average)
    before = average.module.weight.detach().clone()
    model.weight.data.add_(1.0)
    other.update_parameters(model)
    assert torch.equal(average.module.weight, before) and int(average.n_averaged) == 0
    assert torch.equal(other.module.weight, model.weight) and int(other.n_averaged) == 1
    assert b"lazyckpt" not in pickle.dumps(average), "it is loaded where there is no lazyckpt"


def test_guard_of_an_unknown_method_is_refused() -> None:
    with pytest.raises(AttributeError, match="no_such"):
        lazyckpt.guard(torch.nn.Linear(1, 1), "no_such")


def test_buffers_that_change_in_forward_are_eager(make_run: Any) -> None:
    norm = torch.nn.BatchNorm1d(5000)
    run = make_run(FUSED)
    run.ckpt.track(norm=norm)
    for step in range(20):
        before = {k: v.clone() for k, v in norm.state_dict().items()}
        handle = run.ckpt.save(step)
        for _ in range(3):
            norm(torch.randn(4, 5000))  # moves no version
        run.step()
        saved = torch.load(handle.result() / "state.pt")["norm"]
        assert all(torch.equal(saved[k], v) for k, v in before.items())


# without the gate


@pytest.mark.alone
def test_gate_costs_nothing_when_nothing_is_pending(make_run: Any) -> None:
    run = make_run(FUSED)
    run.ckpt.save(1, blocking=True)
    begin = time.perf_counter()
    for _ in range(1000):
        gate._wait(run.optimizer)
    assert time.perf_counter() - begin < 0.1


def test_a_replay_of_a_graph_without_a_step_waits_for_nothing() -> None:
    """Regresses an IndexError."""
    with gate.step():
        pass
