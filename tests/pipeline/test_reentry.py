"""Calls that a signal handler, a hook or another thread makes in the middle of a call: refused or served, no hang."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from interrupts import (
    TINY,
    Interrupt,
    Training,
    check,
    gated_step,
    points_of,
    restore,
    result,
    save,
    save_blocking,
)
from lazyckpt.gate.gate import gate
from trials import TORTURE, Trials

# A hang ends the run, with the stack of every thread.
pytestmark = pytest.mark.timeout(600 if TORTURE else 120, method="thread")


def wait(training: Training) -> None:
    training.save()
    training.ckpt._saver.wait()


def other_saver(training: Training) -> None:
    """One of its own, for another file."""
    training.other.save({"x": torch.ones(30_000)}, training.ckpt.directory.parent / "other.pt", blocking=True)


def result_of_the_last(training: Training) -> None:
    if training.ckpt._saver.pending():
        training.ckpt._saver.pending()[-1].result()


def lone_save(training: Training) -> None:
    lazyckpt.save({"x": torch.ones(30_000)}, training.ckpt.directory.parent / "lone.pt")


OUTER = [save, save_blocking, gated_step, restore, result, wait, lone_save]
INNER = [save, save_blocking, restore, wait, result_of_the_last, other_saver, lone_save]


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    training = Training(tmp_path / "run")
    with lazyckpt.Saver(**TINY) as training.other:
        yield training
    training.ckpt.close()


@pytest.mark.parametrize("outer", OUTER, ids=lambda way: way.__name__)
def test_a_handler_anywhere(outer: Callable[[Training], None], training: Training, trials: Trials) -> None:
    """Regression: save() in a signal handler during save(), with a state larger than the ring, waited for ever."""
    points = points_of(outer, training)
    plan = [(at, inner) for at in range(1, points + 1) for inner in INNER]
    said: dict[Callable[[Training], None], list[str]] = {inner: [] for inner in INNER}
    chosen = sorted(trials.random.sample(plan, trials.count(16, len(plan))), key=lambda trial: trial[0])
    for at, inner in chosen:

        def handle(inner: Callable[[Training], None] = inner) -> None:
            try:
                inner(training)
                said[inner].append("served")
            except lazyckpt.ConfigError as error:
                assert "was called inside" in str(error)
                said[inner].append("refused")

        handler = Interrupt(at, handle)
        with handler:
            outer(training)
        check(training, f"{inner.__name__} at point {at} of {points}: {handler.where}, {said[inner][-1:]}")
    assert sum(map(len, said.values())) >= len(chosen) * 0.8, "the points were not met"
    if outer in (save, save_blocking, restore):
        answers = [answer for inner in (save, save_blocking, restore, other_saver) for answer in said[inner]]
        assert answers.count("refused") > len(answers) // 2
    assert "refused" not in said[lone_save]
    trials.report(f"a handler at any point of {outer.__name__}", len(chosen), training.ckpt.directory)


# Real signals, and code of the user's inside save()


@contextlib.contextmanager
def at_intervals(seconds: float, handle: Callable[[], None]) -> Iterator[None]:
    """A real signal every so often."""
    before = signal.signal(signal.SIGALRM, lambda *_: handle())
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("ring_chunks", [2, 64])
def test_a_real_signal_during_save_and_step(ring_chunks: int, tmp_path: Path, trials: Trials) -> None:
    training = Training(tmp_path / "run", host_buffer_bytes=ring_chunks * TINY["chunk_bytes"])
    said: list[str] = []
    outer: list[lazyckpt.SaveHandle] = []

    def handle() -> None:
        try:
            training.ckpt.save(1_000_000 + len(said), blocking=len(said) % 2 == 0)
            said.append("served")
        except lazyckpt.ConfigError:
            said.append("refused")

    for number in range(trials.count(10, 2000)):
        with at_intervals(trials.random.uniform(0.0002, 0.002), handle):
            outer.append(training.ckpt.save(number + 10))
            training.step()
    for one in outer:
        assert one.result(timeout=10).name == f"step-{one.step:08d}"
    check(training, f"{said}")
    training.ckpt.close()
    assert {"served", "refused"} <= set(said), "the signals came elsewhere"
    trials.report(f"real signals that save, ring of {ring_chunks} chunks", len(said), tmp_path)


class Hook:
    """Tracked state whose state_dict() calls what it was told to, as may happen inside every save()."""

    def __init__(self) -> None:
        self.call: Callable[[], object] = lambda: None
        self.raised: BaseException | None = None

    def state_dict(self) -> dict[str, Any]:
        call, self.call = self.call, lambda: None  # once: it may lead here again
        try:
            call()
        except lazyckpt.LazyCkptError as error:
            self.raised = error
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state_dict()


def calls(training: Training) -> dict[str, Callable[[], object]]:
    """Everything that might wait for the save that it interrupts."""
    ckpt, saver, other = training.ckpt, training.ckpt._saver, training.other
    folder = ckpt.directory.parent
    staged = other.stage(folder / "staged")  # saved by nobody
    staged.add("x.pt", 1)
    return {
        "save()": lambda: ckpt.save(99),
        "save() of a Saver": lambda: saver.save(1, folder / "x.pt"),
        "save() of another Saver": lambda: other.save(1, folder / "x.pt"),
        "save() of a folder": staged.save,
        "restore()": ckpt.restore,
        "wait()": saver.wait,
        "check()": saver.check,
        "close()": ckpt.close,
        "remove()": lambda: saver.remove(folder / "x.pt"),
        "stage()": lambda: saver.stage(folder / "y"),
    }


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[Training]:
    """With room for several saves that are not durable."""
    training = Training(tmp_path / "run", host_buffer_bytes=4 << 20, max_in_flight=5)
    with lazyckpt.Saver(**TINY) as training.other:
        yield training
    training.ckpt.close()


@pytest.mark.parametrize("outer", ["save", "restore"])
def test_what_a_state_dict_calls_inside_save_and_restore_is_refused(outer: str, roomy: Training) -> None:
    hook = Hook()
    roomy.ckpt.track(hook=hook)
    roomy.save().result()
    for name, call in calls(roomy).items():
        hook.call, hook.raised = call, None
        (roomy.save if outer == "save" else roomy.ckpt.restore)()
        hook.call = lambda: None
        wanted = f"{name.split(' of')[0]} was called inside {outer}(), by a signal handler"
        assert isinstance(hook.raised, lazyckpt.ConfigError) and str(hook.raised).startswith(wanted), name
    check(roomy, "at the end")


def test_another_saver_may_be_closed_inside_save(training: Training) -> None:
    """A garbage collection may do it, at any moment."""
    hook = Hook()
    training.ckpt.track(hook=hook)
    handle = training.other.save({"x": torch.ones(30_000)}, training.ckpt.directory.parent / "other.pt")
    hook.call = training.other.close
    training.save()
    assert hook.raised is None and handle.done() and training.other.closed
    hook.call = lambda: None
    check(training, "at the end")


@pytest.mark.parametrize("way", ["result", "exception", "wait_captured"])
def test_a_handle_is_not_waited_for_inside_save(way: str, roomy: Training, disk: Any) -> None:
    hook = Hook()
    roomy.ckpt.track(hook=hook)
    disk.hold()
    earlier = roomy.save()
    hook.call = getattr(earlier, way)
    roomy.save()
    hook.call = lambda: None
    assert isinstance(hook.raised, lazyckpt.ConfigError)
    assert str(hook.raised).startswith(f"{way}() was called inside save(), by a signal handler")
    disk.release()
    check(roomy, "at the end")


def test_what_cannot_wait_for_long_is_answered_inside_save(roomy: Training, disk: Any) -> None:
    hook = Hook()
    roomy.ckpt.track(hook=hook)
    done = roomy.save()
    done.result()
    disk.hold()
    pending = roomy.save()
    answers: list[Any] = []

    def ask() -> None:
        answers.extend([roomy.ckpt._saver.pending(), done.result(), done.wait_captured()])
        with pytest.raises(TimeoutError):
            pending.result(timeout=0.01)

    hook.call = ask
    roomy.save()
    assert hook.raised is None and answers == [[pending], done.path, True]
    hook.call = lambda: None
    disk.release()
    check(roomy, "at the end")


@pytest.mark.timeout(30, method="thread")
def test_a_handler_that_interrupts_where_this_thread_has_a_lock(roomy: Training, disk: Any) -> None:
    """Regression: background threads cannot finish a save without it, and the handler would have waited for them."""
    disk.hold()
    handle = roomy.save()
    for lock in (gate._changed, handle._snapshot._lock):
        with lock, pytest.raises(lazyckpt.ConfigError, match=r"save\(\) was called inside the gate, by a signal"):
            roomy.save(blocking=True)
    disk.release()
    check(roomy, "at the end")


def test_a_handler_may_close_what_is_being_closed(tmp_path: Path) -> None:
    training = Training(tmp_path)
    points, at = 1, 0
    while at < points:
        training.ckpt = lazyckpt.Checkpointer(tmp_path, keep_last=2, **TINY)
        training.ckpt.track(model=training.model, optimizer=training.optimizer, losses=training.losses)
        handle = training.save()
        with Interrupt(at, training.ckpt.close) as handler:
            training.ckpt.close()
        assert handle.done() and training.ckpt._saver._ended, handler.where
        points = max(points, handler.points)
        at += 1 + points // 30
    assert points > 20, "the points were not met"


# Two threads


def test_a_second_thread_is_refused_inside_a_call_and_served_after_it(training: Training) -> None:
    hook = Hook()
    training.ckpt.track(hook=hook)
    raised: dict[str, BaseException | None] = {}

    def elsewhere(name: str, call: Callable[[], object]) -> None:
        def run() -> None:
            try:
                call()
                raised[name] = None
            except lazyckpt.LazyCkptError as error:
                raised[name] = error

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), f"{name} hangs"

    folder = training.ckpt.directory.parent
    of_the_same = {
        "save()": lambda: training.ckpt.save(99),
        "save() of its Saver": lambda: training.ckpt._saver.save(1, folder / "x.pt"),
        "restore()": training.ckpt.restore,
        "close()": training.ckpt.close,
    }
    for name, call in of_the_same.items():
        hook.call = lambda name=name, call=call: elsewhere(name, call)
        training.save()
    of_others = {
        "save() of another": lambda: training.other.save(1, folder / "x.pt"),
        "wait()": training.ckpt._saver.wait,
        "lone": lambda: lone_save(training),
    }
    for name, call in of_others.items():
        hook.call = lambda name=name, call=call: elsewhere(name, call)
        training.save()
    hook.call = lambda: None
    for name in of_the_same:
        wanted = f"{name.split(' of')[0]}: another thread is inside save() or restore()"
        assert isinstance(raised[name], lazyckpt.ConfigError) and str(raised[name]).startswith(wanted), name
    assert all(raised[name] is None for name in of_others), raised
    elsewhere("after it", lambda: training.ckpt.save(99))
    assert raised["after it"] is None
    check(training, "at the end")


def test_on_done_that_saves_is_a_warning_and_no_hang(tmp_path: Path) -> None:
    """It runs on a thread of the background, for which the training thread may be waiting."""
    ckpt: lazyckpt.Checkpointer
    third_returned = threading.Event()
    served: list[int] = []

    def on_done(metrics: lazyckpt.CheckpointMetrics, error: lazyckpt.SaveError | None) -> None:
        if metrics.step == 3:
            assert third_returned.wait(30)
            end = time.monotonic() + 30
            while "inside" not in ckpt._callers and time.monotonic() < end:
                time.sleep(0.001)
            ckpt.save(100)  # the training thread is in save(4) until this handler returns
            served.append(3)

    with lazyckpt.Checkpointer(tmp_path, max_in_flight=1, on_done=on_done, **TINY) as ckpt:
        ckpt.track(x={"t": torch.ones(50_000)})
        for step in range(1, 4):
            ckpt.save(step)
        with pytest.warns(UserWarning, match="another thread is inside"):
            third_returned.set()
            ckpt.save(4)
        ckpt._saver.drain()
    assert served == []


def test_a_forked_child_is_not_inside_what_its_parent_is(training: Training) -> None:
    hook = Hook()
    training.ckpt.track(hook=hook)

    def fork_elsewhere() -> None:
        def run() -> None:
            if (child := os.fork()) == 0:
                os._exit(len(lazyckpt.pipeline.reentry._inside))
            said.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(30)

    said: list[int] = []
    hook.call = fork_elsewhere
    training.save()
    assert said == [0] and not lazyckpt.pipeline.reentry._inside
