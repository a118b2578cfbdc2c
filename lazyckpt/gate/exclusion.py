"""Keeps saves and optimizer steps of different threads apart.

A step is *open* while its frame is on the stack of its thread. It is *writing* all that time, except while it runs a
closure that ends at the gate. A save waits until no other thread is writing. Steps that begin meanwhile wait until the
save has copied the eager storages and guarded the lazy ones.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from lazyckpt import waits
from lazyckpt.errors import SaveError

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Call:
    """A function call, known by its frame. If the call raises, only the missing frame shows it. Keeps neither the frame
    nor its locals alive."""

    __slots__ = ("_code", "frame", "thread")

    def __init__(self, frame: FrameType) -> None:
        self.thread = threading.get_ident()
        self.frame = id(frame)
        self._code: CodeType = frame.f_code

    def under_way(self, stack: FrameType | None) -> bool:
        """Whether the call is on ``stack``, the innermost frame of its thread; True also if this is not certain."""
        end = stack
        while stack is not None:
            if id(stack) == self.frame and stack.f_code is self._code:
                return True
            end, stack = stack, stack.f_back
        # The other thread runs while this one looks. A generator that was suspended meanwhile has lost its caller.
        return end is not None and bool(end.f_code.co_flags & _SUSPENDABLE)

    @property
    def thread_name(self) -> str:
        names = [thread.name for thread in threading.enumerate() if thread.ident == self.thread]
        return names[0] if names else str(self.thread)


class Guarded:
    """Stands for an object, not an optimizer, whose tensors only guarded methods change."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj


class Step(Call):
    """A step of an owner, or another call behind the gate."""

    __slots__ = ("name", "owner", "writing")

    def __init__(self, owner: object, frame: FrameType) -> None:
        super().__init__(frame)
        self.owner = id(owner)  # which outlives the call
        self.name = type(owner.obj if isinstance(owner, Guarded) else owner).__name__
        self.writing = False


class _Arming(Call):
    """A ``save()`` from its first look at the state until everything is copied or guarded."""

    def __init__(self, frame: FrameType) -> None:
        super().__init__(frame)
        self.armed = False  # no other thread is writing
        self.collecting = True  # runs the user's code, which may wait for anything
        self.stepped: str | None = None  # which owner stepped on the same thread since then: in a signal handler
        self.broken: str | None = None  # which step stopped waiting


class Exclusion:
    """The open steps and the saves of a process. Thread-safe. The gate (gate.py) derives from it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # re-entrant: a signal handler may save
        self._open: dict[int, list[Step]] = {}  # by thread, innermost last
        self._armings: list[_Arming] = []

    # steps

    def inside_step(self) -> bool:
        """Whether a step is open on any thread."""
        with self._changed:
            self._forget_raised()
            return bool(self._open)

    def enter(self, owner: object, frame: FrameType) -> Step:
        """Opens a step of ``owner``, in ``frame``."""
        step = Step(owner, frame)
        with self._changed:
            for arming in self._armings:
                if arming.thread == step.thread and not arming.collecting:
                    arming.stepped = step.name
            mine = self._open.get(step.thread, ())  # nested steps, or some that raised
            alive = [s for s in mine if s.frame != step.frame and s.under_way(frame.f_back)]
            self._open[step.thread] = [*alive, step]
        return step

    def leave(self, step: Step) -> None:
        """Closes a step, and those inside it that raised."""
        with self._changed:
            mine = self._open.get(step.thread, [])
            if step in mine:
                self._keep_open(step.thread, mine[: mine.index(step)])
            if self._armings:
                self._changed.notify_all()

    def is_nested(self, step: Step) -> bool:
        """Whether another step of the same owner is open around ``step``, on its thread."""
        return any(other.owner == step.owner for other in self._open[step.thread][:-1])

    def opened(self, owner: object, frame: FrameType) -> Step | None:
        """Returns the open step of ``owner`` that this thread opened in ``frame``."""
        mine = reversed(self._open.get(threading.get_ident(), ()))
        return next((step for step in mine if step.frame == id(frame) and step.owner == id(owner)), None)

    def _keep_open(self, thread: int, steps: list[Step]) -> None:
        if steps:
            self._open[thread] = steps
        else:
            del self._open[thread]

    def pause(self, step: Step) -> None:
        """Lets saves go on while ``step`` does not write."""
        with self._changed:
            step.writing = False
            self._changed.notify_all()

    def _try_writing(self, steps: list[Step], since: float | None) -> bool:
        """Marks ``steps``, of this thread, as writing unless they must wait for a save; call with the lock held.
        ``since``: when they began to wait (``time.monotonic()``)."""
        me = steps[0].thread
        if self._armings and not any(step.writing for step in self._open.get(me, ())):
            waited_s = time.monotonic() - since if since is not None else 0.0
            if self._armed_elsewhere(me, waited_s, steps[0].name) is not None:
                return False
        for step in steps:
            step.writing = True
        return True

    def _forget_raised(self) -> None:
        """Closes steps that ended without their post-hook."""
        if self._open:
            stacks = sys._current_frames()
            for thread, steps in list(self._open.items()):
                self._keep_open(thread, [step for step in steps if step.under_way(stacks.get(thread))])

    # saves

    @contextlib.contextmanager
    def arming(self, path: str | os.PathLike[str], step: int | None) -> Iterator[None]:
        """No other thread writes in a step inside this context. Raises SaveError if an open step does not end: it may
        be waiting for this thread."""
        mine = _Arming(sys._getframe(2))  # behind that of contextlib
        try:
            self._arm(mine, path, step)
            yield
        finally:
            with self._changed:
                self._armings = [arming for arming in self._armings if arming is not mine]
                self._changed.notify_all()
            self._go_on_writing(mine.thread)

    def _arm(self, mine: _Arming, path: str | os.PathLike[str], step: int | None) -> None:
        begin = time.monotonic()
        with self._changed:
            self._armings = [*self._armings, mine]
            while (other := self._writing_elsewhere(mine.thread)) is not None:
                if time.monotonic() - begin > waits.STEP_PATIENCE_S:
                    raise SaveError(
                        f"{other.name} has been inside its step on thread {other.thread_name!r} for "
                        f"{waits.STEP_PATIENCE_S:.0f} s, and a snapshot is never taken in the middle of another "
                        "thread's step. Call save() on the thread that steps, between two steps",
                        path=path,
                        step=step,
                    )
                self._changed.wait(waits.STEP_LOOK_S)
            mine.armed = True

    def collected(self, path: str | os.PathLike[str], step: int | None) -> None:
        """Notes, inside ``arming``, that the save runs no more of the user's code, so steps may wait without limit.

        Raises SaveError if a step has stopped waiting.
        """
        me = threading.get_ident()
        with self._changed:
            for arming in self._armings:
                if arming.thread == me:
                    arming.collecting = False
                    if arming.broken is not None:
                        raise SaveError(arming.broken, path=path, step=step)

    def stepped_inside(self) -> str | None:
        """Returns the class of an owner that has stepped on this thread, inside ``arming``, since ``collected``."""
        me = threading.get_ident()
        with self._changed:
            return next((arming.stepped for arming in self._armings if arming.thread == me and arming.stepped), None)

    def _writing_elsewhere(self, me: int) -> Step | None:
        """A writing step of another thread, unless that thread is in ``save()`` itself."""
        self._forget_raised()
        here = {me, *(arming.thread for arming in self._armings)}
        steps = (step for thread, steps in self._open.items() if thread not in here for step in steps)
        return next((step for step in steps if step.writing), None)

    def _armed_elsewhere(self, me: int, waited_s: float, name: str) -> _Arming | None:
        """A save on another thread that the step ``name`` must wait for."""
        stacks = sys._current_frames() if self._armings else {}
        self._armings = [arming for arming in self._armings if arming.under_way(stacks.get(arming.thread))]
        for arming in self._armings:
            if arming.thread == me or arming.broken is not None:
                continue
            if arming.armed and arming.collecting and waited_s > waits.STEP_PATIENCE_S:
                arming.broken = (
                    f"{name} on thread {threading.current_thread().name!r} waited {waits.STEP_PATIENCE_S:.0f} s for "
                    "save() to collect the state, and then stepped. If a state_dict() waits for the training thread, "
                    "call save() there"
                )
            elif arming.armed or waited_s < waits.STEP_GIVES_WAY_S:
                return arming
        return None

    def _go_on_writing(self, me: int) -> None:
        """Waits, after a save inside a step of its own thread, until the step may write again: other saves may be
        armed."""
        begin = time.monotonic()
        with self._changed:
            writing = [step for step in self._open.get(me, ()) if step.writing]
            while writing:
                # Only for saves that are armed: the others wait for this step.
                waited_s = time.monotonic() - begin + waits.STEP_GIVES_WAY_S
                if self._armed_elsewhere(me, waited_s, writing[0].name) is None:
                    return
                self._changed.wait(waits.STEP_LOOK_S)
