"""Code that interrupts a call of ours: Ctrl-C gets through, other calls are refused or served, and nothing hangs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import random
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
    LOSES_POINTS,
    TINY,
    Interrupt,
    Training,
    check,
    gated_step,
    lone_save,
    points_of,
    restore,
    result,
    save,
    save_blocking,
    wait,
    wait_captured_and_step,
)
from lazyckpt.gate.gate import gate
from trials import TORTURE, Trials

# A hang ends the run, with the stack of every thread.
pytestmark = pytest.mark.timeout(600 if TORTURE else 150, method="thread")
Way = Callable[[Training], None]


def other_saver(training: Training) -> None:
    """One of its own, for another file."""
    training.other.save({"x": torch.ones(30_000)}, training.ckpt.directory.parent / "other.pt", blocking=True)


def result_of_the_last(training: Training) -> None:
    if training.ckpt._saver.pending():
        training.ckpt._saver.pending()[-1].result()


CTRL_C = [save, save_blocking, wait_captured_and_step, gated_step, restore, result]
OUTER = [save, save_blocking, gated_step, restore, result, wait, lone_save]
INNER = [save, save_blocking, restore, wait, result_of_the_last, other_saver, lone_save]


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    with closing(Training(tmp_path / "run")) as training:
        yield training


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[Training]:
    """With room for several saves that are not durable."""
    with closing(Training(tmp_path / "run", host_buffer_bytes=4 << 20, max_in_flight=5)) as training:
        yield training


@contextlib.contextmanager
def closing(training: Training) -> Iterator[Training]:
    with lazyckpt.Saver(**TINY) as training.other:
        yield training
    training.ckpt.close()


# Ctrl-C


@pytest.mark.long(first=3)
@pytest.mark.usefixtures("small_tensors_are_lazy")
@pytest.mark.parametrize("way", CTRL_C, ids=lambda way: way.__name__)
def test_ctrl_c_anywhere_and_the_next_save_works(way: Way, tmp_path: Path, trials: Trials) -> None:
    """Regressions: close() and later saves hung after Ctrl-C between the copy of the eager bytes and the hand-over to
    the background."""
    training = Training(tmp_path)
    points = points_of(way, training)
    last = range(max(1, points - 60), points + 1) if way is save else ()  # the hand-over
    chosen = sorted({*last, *trials.random.sample(range(1, points + 1), min(points, trials.count(12, points)))})
    interrupted = 0
    for at in chosen:
        interrupt = Interrupt(at)
        try:
            with interrupt:
                way(training)
        except KeyboardInterrupt:
            interrupted += 1
        check(training, f"point {at} of {points}: {interrupt.where}")
    training.ckpt.close()
    assert gate._pending == ()
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert interrupted >= len(chosen) * 0.8 or LOSES_POINTS, "the points were not met"
    trials.report(f"Ctrl-C at any point of {way.__name__}", interrupted, tmp_path)


@pytest.mark.usefixtures("small_tensors_are_lazy", "nothing_is_learnt")
def test_ctrl_c_while_a_torn_snapshot_is_found(tmp_path: Path, disk: Any) -> None:
    """Regression: between noting that a storage was looked at and saying what was found, and it was published."""
    training = Training(tmp_path, host_buffer_bytes=1 << 20, witness="versions")
    points, at = 1, 0
    while at < points:
        training.step()
        disk.hold()  # so that the step is who looks first
        handle = training.save()
        with torch.no_grad():
            training.model[1].weight.add_(1)
        interrupt = Interrupt(at)
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            training.optimizer.step()
        disk.release()
        assert isinstance(handle.exception(timeout=60), lazyckpt.TornSnapshotError), interrupt.where
        points = max(points, interrupt.points)
        at += 1
    assert points > 20 or LOSES_POINTS, "the points were not met"
    training.ckpt.close()


def test_ctrl_c_while_handles_are_asked(tmp_path: Path) -> None:
    """Regression: a signal came between taking a handle's lock and the block that gives it back."""
    random.seed(1)
    with (
        alarms(signal.default_int_handler),
        lazyckpt.Saver() as saver,
        concurrent.futures.ThreadPoolExecutor(1) as other,
    ):
        for _ in range(60):
            handle = saver.save({"x": torch.zeros(100_000)}, tmp_path / "a.pt")
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0003, 0.004))
                while True:
                    handle.done()
            assert other.submit(handle.result, 10).result(20) == tmp_path / "a.pt"


# Signal handlers


@contextlib.contextmanager
def alarms(handle: Callable[..., object]) -> Iterator[None]:
    """The handler of a timer that the test sets."""
    before = signal.signal(signal.SIGALRM, handle)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.long(first=5)
@pytest.mark.parametrize("outer", OUTER, ids=lambda way: way.__name__)
def test_a_handler_anywhere(outer: Way, training: Training, trials: Trials) -> None:
    """Regression: save() in a signal handler during save(), with a state larger than the ring, waited for ever."""
    points = points_of(outer, training)
    plan = [(at, inner) for at in range(1, points + 1) for inner in INNER]
    said: dict[Way, list[str]] = {inner: [] for inner in INNER}
    chosen = sorted(trials.random.sample(plan, trials.count(16, len(plan))), key=lambda trial: trial[0])
    for at, inner in chosen:

        def handle(inner: Way = inner) -> None:
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
    assert sum(map(len, said.values())) >= len(chosen) * 0.8 or LOSES_POINTS, "the points were not met"
    if outer in (save, save_blocking, restore):
        answers = [answer for inner in (save, save_blocking, restore, other_saver) for answer in said[inner]]
        assert answers.count("refused") > len(answers) // 2
    assert "refused" not in said[lone_save]
    trials.report(f"a handler at any point of {outer.__name__}", len(chosen), training.ckpt.directory)


@pytest.mark.parametrize("ring_chunks", [2, 64])
def test_a_real_signal_during_save_and_step(ring_chunks: int, tmp_path: Path, trials: Trials) -> None:
    training = Training(tmp_path / "run", host_buffer_bytes=ring_chunks * TINY["chunk_bytes"])
    said: list[str] = []
    outer: list[lazyckpt.SaveHandle] = []

    def handle(*_: object) -> None:
        try:
            training.ckpt.save(1_000_000 + len(said), blocking=len(said) % 2 == 0)
            said.append("served")
        except lazyckpt.ConfigError:
            said.append("refused")

    for number in range(trials.count(10, 2000)):
        with alarms(handle):
            every = trials.random.uniform(0.0002, 0.002)
            signal.setitimer(signal.ITIMER_REAL, every, every)
            outer.append(training.ckpt.save(number + 10))
            training.step()
    for one in outer:
        assert one.result(timeout=10).name == f"step-{one.step:08d}"
    check(training, f"{said}")
    training.ckpt.close()
    assert {"served", "refused"} <= set(said), "the signals came elsewhere"
    trials.report(f"real signals that save, ring of {ring_chunks} chunks", len(said), tmp_path)


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
        training.open()
        handle = training.save()
        with Interrupt(at, training.ckpt.close) as handler:
            training.ckpt.close()
        assert handle.done() and training.ckpt._saver._ended, handler.where
        points = max(points, handler.points)
        at += 1 + points // 30
    assert points > 20 or LOSES_POINTS, "the points were not met"


# Code of the user's inside save()


def calls(training: Training) -> dict[str, Callable[[], object]]:
    """Everything that might wait for the save that it interrupts."""
    ckpt, saver, other = training.ckpt, training.ckpt._saver, training.other
    folder = ckpt.directory.parent
    staged = other.stage(folder / "staged")  # never saved
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


@pytest.mark.parametrize("outer", ["save", "restore"])
def test_what_a_state_dict_calls_inside_save_and_restore_is_refused(outer: str, roomy: Training) -> None:
    for name, call in calls(roomy).items():
        raised = roomy.inside(roomy.save if outer == "save" else roomy.ckpt.restore, call)
        wanted = f"{name.split(' of')[0]} was called inside {outer}(), by a signal handler"
        assert isinstance(raised, lazyckpt.ConfigError) and str(raised).startswith(wanted), name
    check(roomy, "at the end")


def test_another_saver_may_be_closed_inside_save(training: Training) -> None:
    """A garbage collection may do it, at any moment."""
    handle = training.other.save({"x": torch.ones(30_000)}, training.ckpt.directory.parent / "other.pt")
    assert training.inside(training.save, training.other.close) is None
    assert handle.done() and training.other.closed
    check(training, "at the end")


@pytest.mark.parametrize("way", ["result", "exception", "wait_captured"])
def test_a_handle_is_not_waited_for_inside_save(way: str, roomy: Training, disk: Any) -> None:
    disk.hold()
    raised = roomy.inside(roomy.save, getattr(roomy.save(), way))
    assert isinstance(raised, lazyckpt.ConfigError)
    assert str(raised).startswith(f"{way}() was called inside save(), by a signal handler")
    disk.release()
    check(roomy, "at the end")


def test_what_cannot_wait_for_long_is_answered_inside_save(roomy: Training, disk: Any) -> None:
    done = roomy.save()
    done.result()
    disk.hold()
    pending = roomy.save()
    answers: list[Any] = []

    def ask() -> None:
        answers.extend([roomy.ckpt._saver.pending(), done.result(), done.wait_captured()])
        with pytest.raises(TimeoutError):
            pending.result(timeout=0.01)

    assert roomy.inside(roomy.save, ask) is None
    assert answers == [[pending], done.path, True]
    disk.release()
    check(roomy, "at the end")


# Two threads


def elsewhere(call: Callable[[], object]) -> BaseException | None:
    """Calls it on another thread; returns what it raised."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            raised.append(None)
        except lazyckpt.LazyCkptError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), f"{call} hangs"
    return raised[0]


def test_a_second_thread_is_refused_inside_a_call_and_served_after_it(training: Training) -> None:
    refused: dict[str, BaseException | None] = {}
    asked = calls(training)
    for name in ("save()", "save() of a Saver", "restore()", "close()"):
        call = asked[name]
        training.inside(training.save, lambda name=name, call=call: refused.update({name: elsewhere(call)}))
    served: list[BaseException | None] = []
    for call in (asked["save() of another Saver"], asked["wait()"], lambda: lone_save(training)):
        training.inside(training.save, lambda call=call: served.append(elsewhere(call)))
    for name, error in refused.items():
        wanted = f"{name.split(' of')[0]}: another thread is inside save() or restore()"
        assert isinstance(error, lazyckpt.ConfigError) and str(error).startswith(wanted), name
    assert served == [None] * 3 and len(refused) == 4
    assert elsewhere(asked["save()"]) is None
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
    said: list[int] = []

    def fork() -> None:
        if (child := os.fork()) == 0:
            os._exit(len(lazyckpt.pipeline.reentry._inside))
        said.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    training.inside(training.save, lambda: elsewhere(fork))
    assert said == [0] and not lazyckpt.pipeline.reentry._inside
