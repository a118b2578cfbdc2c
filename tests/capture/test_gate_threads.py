"""A save on one thread and steps on others: a checkpoint is of one instant, and no thread waits for ever."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt import waits
from lazyckpt.gate.exclusion import Call
from lazyckpt.gate.gate import gate

SOON_S = 0.1  # in which what does not wait would have happened
WAIT_S = 20.0  # a test that waits as long has failed


@contextmanager
def thread(run: Callable[[], None], name: str = "other") -> Iterator[threading.Thread]:
    """``run`` on a thread of its own, which ends with the block; what it raises is raised there."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    other = threading.Thread(target=guarded, name=name, daemon=True)
    other.start()
    try:
        yield other
    finally:
        other.join(WAIT_S)
    assert not other.is_alive(), "it hangs"
    if errors:
        raise errors[0]


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class Model:
    """Every parameter has the same value, and every step makes it less by one."""

    def __init__(self, optimizer: Any = None, count: int = 8) -> None:
        self.module = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(100, 200)) for _ in range(count))
        make = optimizer or (lambda p: torch.optim.SGD(p, lr=1.0, fused=True))
        for p in self.module:
            p.grad = torch.ones_like(p)
        self.optimizer = make(self.module.parameters())

    @property
    def value(self) -> float:
        return float(self.module[0].detach()[0, 0])


class Halfway(torch.optim.SGD):
    """A foreign optimizer that stops in the middle of its step."""

    reached: threading.Event | None = None
    go_on: threading.Event | None = None
    failing = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        for p in parameters[:4]:
            p.sub_(1.0)
        if self.reached is not None and self.go_on is not None:
            self.reached.set()
            assert self.go_on.wait(WAIT_S)
        if self.failing:
            raise FloatingPointError("nan")
        for p in parameters[4:]:
            p.sub_(1.0)

    def stop(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()


class Slow:
    """Something tracked whose ``state_dict`` waits."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self.wait = wait

    def state_dict(self) -> dict[str, Any]:
        self.wait()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.fixture
def ckpt(tmp_path: Any) -> Iterator[lazyckpt.Checkpointer]:
    with lazyckpt.Checkpointer(tmp_path / "run", chunk_bytes=64 << 10, host_buffer_bytes=128 << 10) as ckpt:
        yield ckpt


def values(handle: lazyckpt.SaveHandle, name: str = "model") -> set[float]:
    state = torch.load(handle.result(timeout=WAIT_S) / "state.pt")[name]
    return {value for tensor in state.values() for value in tensor.unique().tolist()}


def test_saves_on_one_thread_and_steps_on_another(ckpt: lazyckpt.Checkpointer) -> None:
    model = Model()
    ckpt.track(model=model.module)
    model.optimizer.step()
    over = threading.Event()

    def train() -> None:
        while not over.is_set():
            model.optimizer.step()

    with thread(train):
        try:
            found = [values(ckpt.save(number)) for number in range(25)]
        finally:
            over.set()
    assert all(len(one) == 1 for one in found), found
    assert len(set.union(*found)) > 5


@pytest.mark.parametrize("writer", ["step", "closure", "guard"])
def test_who_would_write_during_a_save_waits_until_it_has_what_it_needs(
    writer: str, ckpt: lazyckpt.Checkpointer
) -> None:
    model = Model()
    wrote = threading.Event()
    trying = threading.Event()

    def collect() -> None:
        trying.set()
        assert not wrote.wait(SOON_S)

    def write() -> None:
        assert trying.wait(WAIT_S)
        if writer == "step":
            model.optimizer.step()
        elif writer == "closure":
            model.optimizer.step(lambda: None)
        else:
            average.update()
        wrote.set()

    class Average(torch.nn.Module):
        def update(self) -> None:
            for p in model.module:
                p.data.sub_(1.0)

    average = Average()
    lazyckpt.guard(average, "update")
    model.optimizer.step()
    ckpt.track(slow=Slow(collect), model=model.module)
    value = model.value
    with thread(write):
        handle = ckpt.save(1)
    assert values(handle) == {value} != {model.value}


def test_a_save_waits_for_the_step_of_another_thread(ckpt: lazyckpt.Checkpointer) -> None:
    model = Model(lambda p: Halfway(p, lr=1.0))
    ckpt.track(model=model.module)
    model.optimizer.step()
    model.optimizer.stop()
    with thread(model.optimizer.step):
        assert model.optimizer.reached.wait(WAIT_S)
        threading.Timer(SOON_S, model.optimizer.go_on.set).start()
        handle = ckpt.save(1)
    assert values(handle) == {model.value}


def test_a_step_inside_of_an_open_one_goes_on_while_a_save_waits(
    ckpt: lazyckpt.Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookahead, SAM, and whatever else wraps an optimizer."""
    monkeypatch.setattr(waits, "STEP_GIVES_WAY_S", WAIT_S)
    model = Model()

    class Outer(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            model.module[0].sub_(1.0)
            inside.set()
            until(lambda: gate._armings)
            time.sleep(SOON_S)
            model.optimizer.step()
            model.module[0].add_(1.0)

    inside = threading.Event()
    outer = Outer(model.module.parameters(), lr=1.0)
    model.optimizer.step()
    ckpt.track(model=model.module)
    begin = time.monotonic()
    with thread(outer.step):
        assert inside.wait(WAIT_S)
        handle = ckpt.save(1)
    assert values(handle) == {model.value}
    assert time.monotonic() - begin < WAIT_S / 2


@pytest.mark.parametrize("lives_on", [False, True])
def test_nobody_waits_for_a_step_that_raised(lives_on: bool, ckpt: lazyckpt.Checkpointer) -> None:
    """torch calls no post-hook then. Its thread may be gone, too."""
    model = Model(lambda p: Halfway(p, lr=1.0))
    ckpt.track(model=model.module)
    model.optimizer.step()
    model.optimizer.failing = True
    raised, over = threading.Event(), threading.Event()

    def fail() -> None:
        with pytest.raises(FloatingPointError):
            model.optimizer.step()
        raised.set()
        if lives_on:
            over.wait(WAIT_S)

    with thread(fail) as other:
        assert raised.wait(WAIT_S)
        if not lives_on:
            other.join()
        begin = time.monotonic()
        ckpt.save(1).result(timeout=WAIT_S)
        assert time.monotonic() - begin < WAIT_S / 2
        over.set()


def test_a_step_that_does_not_end_fails_the_save(ckpt: lazyckpt.Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be waiting for the thread that saves."""
    monkeypatch.setattr(waits, "STEP_PATIENCE_S", SOON_S)
    model = Model(lambda p: Halfway(p, lr=1.0))
    ckpt.track(model=model.module)
    model.optimizer.step()
    model.optimizer.stop()
    with thread(model.optimizer.step, "trainer"):
        assert model.optimizer.reached.wait(WAIT_S)
        with pytest.raises(lazyckpt.SaveError, match=r"step 1: .*Halfway has been inside its step on thread 'trainer'"):
            ckpt.save(1)
        model.optimizer.go_on.set()
    assert gate._armings == []
    assert values(ckpt.save(2)) == {model.value}


def test_a_state_dict_that_waits_for_a_step_fails_the_save(
    ckpt: lazyckpt.Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that takes a lock which the training thread holds around its step."""
    monkeypatch.setattr(waits, "STEP_PATIENCE_S", SOON_S)
    model = Model()
    model.optimizer.step()
    lock, locked = threading.Lock(), threading.Event()

    def collect() -> None:
        assert locked.wait(WAIT_S)
        with lock:
            pass

    def train() -> None:
        with lock:
            locked.set()
            until(lambda: any(arming.armed for arming in gate._armings))
            model.optimizer.step()

    slow = Slow(collect)
    ckpt.track(model=model.module, slow=slow)
    with (
        thread(train, "trainer"),
        pytest.raises(lazyckpt.SaveError, match=r"SGD on thread 'trainer' waited .* state_dict\(\)"),
    ):
        ckpt.save(1)
    slow.wait = lambda: None
    assert values(ckpt.save(2)) == {model.value}


def test_a_save_does_not_wait_for_forward_and_backward_of_another_thread(ckpt: lazyckpt.Checkpointer) -> None:
    """A closure writes nothing; behind it, the step waits for saves that began meanwhile."""
    model = Model()
    ckpt.track(model=model.module)
    model.optimizer.step()
    inside, saved = threading.Event(), threading.Event()

    def closure() -> None:
        inside.set()
        assert saved.wait(WAIT_S)

    value = model.value
    with thread(lambda: model.optimizer.step(closure)):
        assert inside.wait(WAIT_S)
        handle = ckpt.save(1)
        saved.set()
    assert values(handle) == {value} != {model.value}


def test_saves_inside_of_steps_do_not_wait_for_each_other(tmp_path: Any) -> None:
    """Each in a hook of its own optimizer, on its own thread."""
    meet = threading.Barrier(2)
    found = []

    def train(number: int) -> None:
        model = Model()
        with lazyckpt.Checkpointer(tmp_path / str(number)) as ckpt:
            ckpt.track(model=model.module)

            def save(*_: Any) -> None:
                meet.wait(WAIT_S)
                found.append((values(ckpt.save(1)), {model.value}))

            model.optimizer.register_step_post_hook(save)
            model.optimizer.step()

    begin = time.monotonic()
    with thread(lambda: train(0), "first"), thread(lambda: train(1), "second"):
        pass
    assert time.monotonic() - begin < WAIT_S / 2
    assert len(found) == 2 and all(one == other for one, other in found)


def test_a_step_that_goes_on_behind_its_own_save_waits_for_those_of_others(ckpt: lazyckpt.Checkpointer) -> None:
    """The other one began while this thread was in ``save()`` and so not writing."""
    model = Model()
    inside, armed, wrote = threading.Event(), threading.Event(), threading.Event()

    class Saving(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            with gate.arming("somewhere", None):
                inside.set()
                assert armed.wait(WAIT_S)
            for p in model.module:
                p.data.sub_(1.0)
            wrote.set()

    def collect() -> None:
        armed.set()
        assert not wrote.wait(SOON_S)

    model.optimizer.step()
    ckpt.track(slow=Slow(collect), model=model.module)
    value = model.value
    with thread(Saving(model.module.parameters(), lr=1.0).step):
        assert inside.wait(WAIT_S)
        handle = ckpt.save(1)
    assert values(handle) == {value} != {model.value}


def test_a_step_that_waits_for_that_of_a_third_thread_goes_on(ckpt: lazyckpt.Checkpointer) -> None:
    """A step gives way to a save that waits, but not for long: another step may be waiting for it."""
    model, third = Model(), Model()
    inside = threading.Event()

    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            inside.set()
            until(lambda: gate._armings)
            with thread(third.optimizer.step, "third"):
                pass

    outer = Outer(model.module.parameters(), lr=1.0)
    model.optimizer.step()
    ckpt.track(model=model.module)
    begin = time.monotonic()
    with thread(outer.step):
        assert inside.wait(WAIT_S)
        assert values(ckpt.save(1)) == {model.value}
    assert time.monotonic() - begin < WAIT_S / 2


def test_a_step_on_the_thread_that_saves_does_not_wait_for_it(ckpt: lazyckpt.Checkpointer) -> None:
    model, other = Model(), Model()
    model.optimizer.step()
    ckpt.track(slow=Slow(lambda: other.optimizer.step()), model=model.module)
    begin = time.monotonic()
    assert values(ckpt.save(1)) == {model.value}
    assert time.monotonic() - begin < WAIT_S / 2 and other.value == -1


def test_a_save_that_is_interrupted_leaves_nobody_waiting(ckpt: lazyckpt.Checkpointer) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    model = Model()
    ckpt.track(slow=Slow(interrupt))
    with pytest.raises(KeyboardInterrupt):
        ckpt.save(1)
    with thread(model.optimizer.step):
        pass
    assert model.value == -1


def test_a_call_below_a_generator_that_was_suspended_meanwhile_is_under_way() -> None:
    """Regression: its frame has no caller any more, the save passed for over, and a step wrote into the eager copy."""

    def generator() -> Iterator[None]:
        yield

    suspended = generator()
    next(suspended)
    assert suspended.gi_frame.f_back is None
    assert Call(sys._getframe()).under_way(suspended.gi_frame)
    assert not Call(sys._getframe()).under_way(sys._getframe().f_back)
