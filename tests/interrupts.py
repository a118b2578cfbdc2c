"""Ctrl-C or another interruption at chosen instructions of the package, and the small training that it hits."""

from __future__ import annotations

import concurrent.futures
import dis
import functools
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import lazyckpt
from lazyckpt.gate.gate import gate
from lazyckpt.pipeline.handle import in_flight

PACKAGE = str(Path(lazyckpt.__file__).parent)
TINY = {"chunk_bytes": 16 << 10, "host_buffer_bytes": 64 << 10, "copy_threads": 1, "io_depth": 2}

LOSES_POINTS = sys.version_info[:2] == (3, 13)  # 3.13.0 does not trace every instruction


class Interrupt:
    """Raises KeyboardInterrupt, or calls ``handle``, in this thread at the n-th instruction of the package at which
    CPython may run a signal handler: where a function begins, a loop goes on, a function written in C has returned.

    CPython raises as if the call had failed; a trace function can only raise at the next instruction. Where that one
    has another exception handler, behind the last call of a ``with`` for instance, it is no point.
    """

    def __init__(self, at: int, handle: Callable[[], object] | None = None) -> None:
        self.at, self.handle, self.points, self.where = at, handle, 0, ""
        self._caller: FrameType | None = None  # of the Python function that began last

    def __enter__(self) -> Interrupt:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        self._caller = frame.f_back
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        names = instructions(frame.f_code)
        called, before = False, -1

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal called, before
            if event == "opcode":
                name = names[frame.f_lasti]
                returned = called and self._caller is not frame
                returned = returned and handler_at(frame.f_code, before) == handler_at(frame.f_code, frame.f_lasti)
                before = frame.f_lasti
                called = name.startswith("CALL")
                self._caller = None
                if returned or name.startswith("RESUME") or goes_on(frame.f_code, frame.f_lasti):
                    self._point(frame)
            elif event == "exception":
                called = False
            return trace

        return trace

    def _point(self, frame: FrameType) -> None:
        self.points += 1
        if self.points == self.at:
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            sys.settrace(None)
            if self.handle is None:
                raise KeyboardInterrupt
            self.handle()


@functools.cache
def instructions(code: CodeType) -> dict[int, str]:
    """The names of its instructions, by their place."""
    return {i.offset: i.opname for i in dis.get_instructions(code)}


@functools.cache
def handlers(code: CodeType) -> list[tuple[int, int, int]]:
    """From where to where each of its exception handlers is for, and where that begins.

    None before CPython 3.11: there an instruction of its own ends what a handler is for.
    """
    parse = getattr(dis, "_parse_exception_table", lambda code: [])
    return [(entry.start, entry.end, entry.target) for entry in parse(code)]


def handler_at(code: CodeType, offset: int) -> int | None:
    return next((target for start, end, target in handlers(code) if start <= offset < end), None)


def goes_on(code: CodeType, offset: int) -> bool:
    """Whether it is where a loop goes on, and known to the exception handlers around the loop: CPython 3.13 forgets
    some (python/cpython#130279), and nothing helps then."""
    if not instructions(code)[offset].startswith("JUMP_BACKWARD"):
        return False
    return sys.version_info[:2] != (3, 13) or not handlers(code) or handler_at(code, offset) is not None


class Hook:
    """Tracked state whose ``state_dict()`` makes a call, as user code may inside every ``save()`` and ``restore()``."""

    def __init__(self) -> None:
        self.call: Callable[[], object] | None = None
        self.raised: BaseException | None = None

    def state_dict(self) -> dict[str, Any]:
        call, self.call = self.call, None  # once: it may lead here again
        try:
            if call is not None:
                call()
        except lazyckpt.LazyCkptError as error:
            self.raised = error
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state_dict()


class Training:
    """As little of it as has lazy and eager storages, in a ring that they do not fit into."""

    other: lazyckpt.Saver

    def __init__(self, folder: Path, **knobs: Any) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(80, 80), torch.nn.Linear(80, 80))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6, momentum=0.9)
        self.number = 0
        self.losses = {"": torch.zeros(self.number)}  # more at every save, so that each file is laid out anew
        self.hook = Hook()
        self._folder, self._knobs = folder, knobs
        self.open()
        self.step()
        self.save().result()  # something to restore

    def open(self) -> None:
        self.ckpt = lazyckpt.Checkpointer(self._folder, keep_last=2, **{"max_in_flight": 2, **TINY, **self._knobs})
        self.ckpt.track(model=self.model, optimizer=self.optimizer, losses=self.losses, hook=self.hook)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 80)).square().sum().backward()
        self.optimizer.step()

    def save(self, **knobs: Any) -> lazyckpt.SaveHandle:
        self.number += 1
        self.losses[""] = torch.zeros(self.number)
        return self.ckpt.save(self.number, **knobs)

    def inside(self, outer: Callable[[], object], call: Callable[[], object]) -> BaseException | None:
        """Makes the call once inside of ``outer``, a save or a restore; returns what it raised."""
        self.hook.call, self.hook.raised = call, None
        outer()
        assert self.hook.call is None
        return self.hook.raised


def save(training: Training) -> None:
    training.save()


def save_blocking(training: Training) -> None:
    training.save(blocking=True)


def wait_captured_and_step(training: Training) -> None:
    handle = training.save()
    handle.wait_captured()
    training.step()


def gated_step(training: Training) -> None:
    training.save()
    training.step()


def restore(training: Training) -> None:
    training.ckpt.restore()


def result(training: Training) -> None:
    training.save().result()


def wait(training: Training) -> None:
    training.save()
    training.ckpt._saver.wait()


def lone_save(training: Training) -> None:
    lazyckpt.save({"x": torch.ones(30_000)}, training.ckpt.directory.parent / "lone.pt")


def points_of(way: Callable[[Training], None], training: Training) -> int:
    """The number of points that every call has: the fewest of three calls.

    The first call builds what the others reuse. A call that waits for another thread has more points than one that
    finds everything done. And each ``save()`` looks at every optimizer of the process: those of earlier tests must be
    gone now, or a later garbage collection would take their points away.
    """
    gc.collect()
    points = []
    for _ in range(3):
        with Interrupt(-1) as counted:
            way(training)
        points.append(counted.points)
        training.ckpt._saver.drain()
        training.step()
    return min(points)


def check(training: Training, where: str) -> None:
    """All that was saved lands, the ring is empty then, and a save holds what it should."""
    __tracebackhide__ = True
    saver = training.ckpt._saver
    for handle in saver.pending():
        concurrent.futures.wait([handle], timeout=60)
        assert handle.done(), f"{where}: a save that never ends"
    for task in saver._background._tasks:
        concurrent.futures.wait([task], timeout=60)
        assert task.done(), f"{where}: a task that never ends"
    before = training.model[0].weight.detach().clone()
    try:
        handle = training.save()
    except lazyckpt.SaveError as error:
        raise AssertionError(f"{where}: {error}") from error
    training.step()
    path = handle.result(timeout=60)
    assert torch.equal(torch.load(path / "state.pt")["model"]["0.weight"], before), where
    assert not torch.equal(training.model[0].weight, before), where
    saver.drain()
    assert gc.isenabled(), where
    assert not in_flight(), where
    assert saver.engine.ring_used_bytes == 0, where
    assert gate._pending == (), where
    assert not gate._open, where
