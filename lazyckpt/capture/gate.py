"""The gate: an optimizer step waits for what is not copied yet (DataStates-LLM, V-A2).

Parameters and optimizer state change in ``optimizer.step()`` and nowhere else. So they may be copied *lazily*,
during the next forward and backward, if a gate stands in front of the step. This module is that gate: a global
hook of torch in front of every optimizer step. Which storages are lazy, and whether they really stayed as they
were, is snapshot.py's part.

A step is *open* while its frame is on the stack of its thread, and *writing* but for the time in a closure that ends
at the gate. ``save()`` and writing steps exclude each other across threads: a save waits until the steps of other
threads are over, and steps that begin meanwhile wait until it has copied what is eager and guarded what is lazy.
A snapshot taken inside an open step is not lazy.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
from torch.optim import optimizer as torch_optimizer

from lazyckpt.capture import averages, devices
from lazyckpt.capture.evidence import Evidence
from lazyckpt.errors import SaveError

# Methods of a storage after which it has other memory. To hold on to the storage does not help: what it had is freed at
# once, and whoever reads that may end the process. Sharded training resizes; share_memory(), and whoever sends a tensor
# to another process, moves what it has. torch has no hook for them.
_GIVE_MEMORY_BACK = ("resize_", "_share_fd_cpu_", "_share_filename_cpu_")

# Seconds: how often a waiting thread looks whether the call it waits for still runs; how long a step gives way to a
# save that waits for other steps; how long one waits for the other before the save fails.
_LOOK_S = 0.02
_GIVE_WAY_S = 1.0
_PATIENCE_S = 60.0

_TORCH = Path(torch.__file__).parent
_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_WAITS = frozenset(
    function.__code__.co_filename for function in (threading.Event.wait, Future.exception, contextlib.suppress.__init__)
)

# Methods of an optimizer that write to parameters outside of step(): of schedule-free ones, and of SAM. And swap_….
_MOVE = ("first_step", "second_step")  # these may do it by `p.data = …`
_SWITCHES = ("train", "eval", *_MOVE)
_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_MAX_CALLERS = 8  # frames in which one optimizer may be the caller of another's step


class Pending(Protocol):
    """A snapshot that is not copied yet."""

    def wait(self, owner: object) -> None:
        """Returns when ``owner`` may change what it owns."""

    def wait_all(self) -> None:
        """Returns when everything may change."""

    def wait_for_storage(self, storage: torch.UntypedStorage) -> None:
        """Returns when ``storage`` may let go of its memory."""

    def give_verdict(self) -> None:
        """Gives the verdict, if the calling thread owes it and everything is copied."""

    def is_held(self) -> bool:
        """Whether this thread has a lock that a background thread needs to finish it."""


class Guarded:
    """An object other than an optimizer whose ``method`` changes tensors, and nothing else does."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj


class _Call:
    """A function call under way. A call that raised leaves no other trace than that its frame is gone."""

    __slots__ = ("_code", "frame", "thread")

    def __init__(self, frame: FrameType) -> None:
        self.thread = threading.get_ident()
        self.frame = id(frame)  # not the frame: it would keep its locals alive
        self._code: CodeType = frame.f_code

    def under_way(self, stack: FrameType | None) -> bool:
        """Whether it is on the stack of its thread; True as well if that cannot be told."""
        end = stack
        while stack is not None:
            if id(stack) == self.frame and stack.f_code is self._code:
                return True
            end, stack = stack, stack.f_back
        # The other thread goes on while this one looks. A generator that is suspended by then has lost its caller.
        return end is not None and bool(end.f_code.co_flags & _SUSPENDABLE)

    @property
    def thread_name(self) -> str:
        names = [thread.name for thread in threading.enumerate() if thread.ident == self.thread]
        return names[0] if names else str(self.thread)


def _only_waits(stack: FrameType | None, call: _Call) -> bool:
    """Whether a thread with this stack runs nothing inside ``call`` but what waits: a signal handler of the user's may
    write."""
    while stack is not None and (stack.f_code.co_filename in _WAITS or stack.f_code.co_filename.startswith(_PACKAGE)):
        if id(stack) == call.frame:
            return call.under_way(stack)
        stack = stack.f_back
    return False


class _Step(_Call):
    """A step, or another call behind the gate, of ``owner``."""

    __slots__ = ("_kind", "owner", "writing")

    def __init__(self, owner: object, frame: FrameType) -> None:
        super().__init__(frame)
        self.owner = id(owner)  # alive as long as the call
        self._kind = type(owner.obj if isinstance(owner, Guarded) else owner)
        self.writing = False

    @property
    def name(self) -> str:
        return self._kind.__name__


class _Arming(_Call):
    """A ``save()`` from its first look at the state until everything is copied or guarded."""

    def __init__(self, frame: FrameType) -> None:
        super().__init__(frame)
        self.armed = False  # no step of another thread is writing
        self.collecting = True  # runs code of the user's, which may wait for anything
        self.broken: str | None = None  # which step could not wait any longer


class Gate:
    """One per process. Thread-safe: an optimizer in backward steps on autograd's threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # re-entrant: a signal handler may save; is_held() asks who has it
        self._pending: tuple[Pending, ...] = ()
        self._open: dict[int, list[_Step]] = {}  # by thread, the innermost last
        self._armings: list[_Arming] = []
        self._installed = False
        self._standing: dict[_Call, None] = {}  # a dict, since one entry of it is added or removed at once
        self._judged: list[int] = []  # threads that must not leave their wait just now
        self.evidence = Evidence()
        # Every optimizer that was seen to step, and every known average (averages.py) that was updated, with the number
        # of these steps. Nobody has to name them.
        self.steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # Those whose step is in a CUDA graph of torch's, which is replayed without any hook; True if the user waits by
        # hand.
        self.replayed: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        # Every module that was watched, and its parts. No hooks: a copy of a module has nothing of the gate.
        self.modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.warmups: weakref.WeakSet[Any] = weakref.WeakSet()  # to be told of steps that are over (warmup.py)
        self._capturing = threading.local()  # `steps`: of the CUDAGraph below that this thread captures

    def install(self) -> None:
        """Registers the hooks, once per process."""
        self.guard_averages()
        with self._changed:
            if self._installed:
                return
            self._installed = True
        hook = torch_optimizer.register_optimizer_step_pre_hook(self._before_step)
        # Hooks of others may write, too: they run behind ours, even those that were there before.
        torch_optimizer._global_optimizer_pre_hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]
        torch_optimizer.register_optimizer_step_post_hook(self._after_step)
        for name in _GIVE_MEMORY_BACK:
            setattr(torch.UntypedStorage, name, self._gated(getattr(torch.UntypedStorage, name)))
        for kind, name, known in _LOADS:
            setattr(kind, name, self._gated_load(getattr(kind, name), known(self)))

    def add(self, pending: Pending) -> None:
        with self._changed:
            self._pending = (*self._pending, pending)

    def discard(self, pending: Pending) -> None:
        with self._changed:
            self._pending = tuple(p for p in self._pending if p is not pending)

    def forget(self) -> None:
        """In a forked child: nothing is copied there, so nothing waits."""
        self._changed = threading.Condition()
        self._pending = ()
        self._open = {}
        self._armings = []
        self._standing = {}
        self._judged = []

    def is_held(self) -> bool:
        """Whether this thread has a lock that background threads need to finish a save."""
        owned = self._changed._is_owned()  # type: ignore[attr-defined]
        return owned or any(pending.is_held() for pending in self._pending)

    def wait_all(self) -> None:
        """Returns when no tensor is waiting to be copied any more."""
        for pending in self._pending:
            pending.wait_all()

    def give_verdicts(self) -> None:
        """The calling thread gives the verdicts that it owes (verdict.py), where everything is copied."""
        for pending in self._pending:
            pending.give_verdict()

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """The calling thread only waits in here: it writes nothing, and the verdicts that it owes can be had."""
        call = _Call(sys._getframe(2))  # behind that of contextlib
        self._standing[call] = None
        try:
            yield
        finally:
            self._standing.pop(call, None)
            # No lock: a signal handler may come here, too, and wait for the one who judges.
            while call.thread in self._judged:
                time.sleep(0.0001)

    def if_standing(self, thread: int | None, act: Callable[[], None]) -> None:
        """Calls ``act``, if this thread stands; meanwhile it does not go on."""
        if thread is None:
            return
        self._judged.append(thread)
        try:
            stack = sys._current_frames().get(thread)
            mine = [call for call in list(self._standing) if call.thread == thread]
            for call in mine:
                if not call.under_way(stack):  # Ctrl-C came before it could say that it is over
                    self._standing.pop(call, None)
            if any(_only_waits(stack, call) for call in mine):
                act()
        finally:
            self._judged.remove(thread)

    def wait_by_hand(self) -> None:
        """See ``lazyckpt.wait_captured``. It stands for the hook of steps that are replayed."""
        self.wait_all()
        for optimizer in list(self.replayed):
            self.replayed[optimizer] = True
            self._count(optimizer)

    def guard(self, obj: Any, method: str) -> None:
        """See ``lazyckpt.guard``."""
        own = getattr(obj, method)
        if isinstance(own, GatedMethod) or averages.is_update(obj, method):
            return
        # One owner, however many methods: each of them may be called between two saves, or none.
        others = [m.owner for m in getattr(obj, "__dict__", {}).values() if isinstance(m, GatedMethod)]
        owner = obj if averages.is_known(obj) else others[0] if others else Guarded(obj)
        setattr(obj, method, GatedMethod(owner, own))

    def guard_averages(self) -> None:
        """Puts the gate in front of the methods with which averages write, for every class that is known and imported.

        The class changes, not the object, so that averages are copied and pickled as ever."""
        for kind, average in averages.imported_since():
            for names, gated in ((average.updates, self._gated_update), (average.swaps, self._gated_swap)):
                for name in names:
                    setattr(kind, name, gated(vars(kind)[name]))

    def _gated_update(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def update(average: Any, *args: Any, **kwargs: Any) -> Any:
            if not averages.is_known(average):  # of a class derived from one that is
                return method(average, *args, **kwargs)
            holder = averages.holder_of(average)
            if isinstance(holder, torch.nn.Module) and holder not in self.modules:
                self.watch(holder)
            with self.step(average):
                return method(average, *args, **kwargs)

        return update

    def _gated_swap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def swap(average: Any, *args: Any, **kwargs: Any) -> Any:
            with self.step(Guarded(average), counted=False):  # one that is new waits for everything
                return method(average, *args, **kwargs)

        return swap

    def capture_into(self, steps: weakref.WeakSet[Any] | None) -> None:
        """From here on, the optimizers whose step this thread captures go into ``steps``; None: the capture is over."""
        self._capturing.steps = steps

    # steps

    def inside_step(self) -> bool:
        """Whether a step is open, on any thread."""
        with self._changed:
            self._forget_raised()
            return bool(self._open)

    @contextlib.contextmanager
    def step(self, *owners: Any, counted: bool = True) -> Iterator[None]:
        """What ``owners`` change is changed in here. If it is not ``counted``, they own nothing by it."""
        frame = sys._getframe(2)  # behind that of contextlib
        opened: list[_Step] = []
        try:
            for owner in owners:
                opened.append(self._enter(owner, frame))
            for owner in owners if counted else ():
                self._count(owner)
                self._note_capture(owner)
            self._begin_writing(opened, owners)
            yield
        finally:
            for step in reversed(opened):
                self._leave(step)

    def _enter(self, owner: Any, frame: FrameType) -> _Step:
        step = _Step(owner, frame)
        with self._changed:
            mine = self._open.get(step.thread)
            if mine is None:
                self._open[step.thread] = [step]
            else:  # nested steps, or some that raised
                alive = [s for s in mine if s.frame != step.frame and s.under_way(frame.f_back)]
                self._open[step.thread] = [*alive, step]
        return step

    def _leave(self, step: _Step) -> None:
        """Closes a step, and those inside of it that raised."""
        with self._changed:
            mine = self._open.get(step.thread, [])
            if step in mine:
                if step is mine[0]:
                    del self._open[step.thread]
                else:
                    self._open[step.thread] = mine[: mine.index(step)]
            if self._armings:
                self._changed.notify_all()

    def _forget_raised(self) -> None:
        """Closes steps that ended without their post-hook."""
        if self._open:
            stacks = sys._current_frames()
            for thread, steps in list(self._open.items()):
                alive = [step for step in steps if step.under_way(stacks.get(thread))]
                if alive:
                    self._open[thread] = alive
                else:
                    del self._open[thread]

    def _count(self, owner: Any) -> None:
        with self._changed:
            self.steps[owner] = self.steps.get(owner, 0) + 1

    def _note_capture(self, owner: Any) -> None:
        """Notes that what ``owner`` does now is captured into a CUDA graph, if it is."""
        if devices.capturing():
            steps = getattr(self._capturing, "steps", None)
            if steps is None:
                self.replayed.setdefault(owner, False)
            else:
                steps.add(owner)

    def _wait(self, owner: Any) -> None:
        for pending in self._pending:
            pending.wait(owner)

    def _begin_writing(self, steps: list[_Step], owners: tuple[Any, ...]) -> None:
        """Returns when ``owners`` may write: all that they wait for is copied, and no save is being armed. Nobody waits
        for a step that waits here."""
        me = steps[0].thread
        begin = None
        while True:
            seen = self._pending
            for owner in owners:
                self._wait(owner)
            with self._changed:
                if self._pending is not seen and any(not any(p is q for q in seen) for p in self._pending):
                    continue
                if not self._armings:
                    for step in steps:
                        step.writing = True
                    return
                begin = begin or time.monotonic()
                nested = any(step.writing for step in self._open.get(me, ()))
                arming = None if nested else self._armed_elsewhere(me, time.monotonic() - begin, steps[0].name)
                if arming is None:
                    for step in steps:
                        step.writing = True
                    return
                self._changed.wait(_LOOK_S)

    # saves

    @contextlib.contextmanager
    def arming(self, path: str | os.PathLike[str], step: int | None) -> Iterator[None]:
        """No step of another thread writes in here.

        Raises SaveError if one that is open does not end: it may be waiting for this thread.
        """
        mine = _Arming(sys._getframe(2))
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
                if time.monotonic() - begin > _PATIENCE_S:
                    raise SaveError(
                        f"{other.name} has been inside its step on thread {other.thread_name!r} for {_PATIENCE_S:.0f} "
                        "s, and a snapshot is never taken in the middle of another thread's step. Call save() on the "
                        "thread that steps, between two steps",
                        path=path,
                        step=step,
                    )
                self._changed.wait(_LOOK_S)
            mine.armed = True

    def collected(self, path: str | os.PathLike[str], step: int | None) -> None:
        """Inside ``arming``, when no more code of the user's runs: from here on steps wait as long as it takes.

        Raises SaveError if a step could not wait until now.
        """
        me = threading.get_ident()
        with self._changed:
            for arming in self._armings:
                if arming.thread == me:
                    arming.collecting = False
                    if arming.broken is not None:
                        raise SaveError(arming.broken, path=path, step=step)

    def _writing_elsewhere(self, me: int) -> _Step | None:
        """A writing step of another thread than ``me``, unless that thread is in ``save()`` itself."""
        self._forget_raised()
        saving = {arming.thread for arming in self._armings}
        for thread, steps in self._open.items():
            if thread != me and thread not in saving:
                for step in steps:
                    if step.writing:
                        return step
        return None

    def _armed_elsewhere(self, me: int, waited_s: float, name: str) -> _Arming | None:
        """A save on another thread that a step must wait for."""
        if not self._armings:
            return None
        stacks = sys._current_frames()
        self._armings = [arming for arming in self._armings if arming.under_way(stacks.get(arming.thread))]
        for arming in self._armings:
            if arming.thread == me or arming.broken is not None:
                continue
            if arming.armed and arming.collecting and waited_s > _PATIENCE_S:
                arming.broken = (
                    f"{name} on thread {threading.current_thread().name!r} waited {_PATIENCE_S:.0f} s for save() to "
                    "collect the state, and then stepped. If a state_dict() waits for the training thread, call "
                    "save() there"
                )
            elif arming.armed or waited_s < _GIVE_WAY_S:
                return arming
        return None

    def _go_on_writing(self, me: int) -> None:
        """Behind a save inside a step of its own thread: the step writes again, and others may be armed by now."""
        begin = time.monotonic()
        with self._changed:
            writing = [step for step in self._open.get(me, ()) if step.writing]
            while writing:
                waited_s = time.monotonic() - begin + _GIVE_WAY_S  # to saves that are armed only: others wait for it
                if self._armed_elsewhere(me, waited_s, writing[0].name) is None:
                    return
                self._changed.wait(_LOOK_S)

    # torch's hooks

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        frame = sys._getframe(1)
        try:
            return self._open_step(optimizer, args, kwargs, frame)
        except Exception as error:  # not as torch's are: it owns nothing, and waits for everything
            with contextlib.suppress(Exception):  # it may have no hash
                self.steps.pop(optimizer, None)
            warn_of_foreign(optimizer, error)
            self.wait_all()
            self._begin_writing([self._enter(optimizer, frame)], ())
            return None

    def _open_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if optimizer not in self.steps:
            _guard_switches(type(optimizer))
        _guard_callers(frame)
        step = self._enter(optimizer, frame)
        mine = self._open[step.thread]
        if len(mine) == 1 or all(other.owner != step.owner for other in mine[:-1]):
            self._count(optimizer)  # a subclass that calls super().step() comes by twice
        self._note_capture(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        # torch's own optimizers run the closure, which holds forward and backward, before they change anything.
        # Others may not (SAM), and wait up front.
        if not callable(closure) or not is_of_torch(optimizer) or _writes_before_closure(optimizer):
            if not callable(closure):
                self.evidence.look(optimizer)
            self._begin_writing([step], (optimizer,))
            return None

        def gated_closure() -> Any:
            with self._changed:
                step.writing = False
                self._changed.notify_all()
            loss = closure()
            self.evidence.look(optimizer)
            self._begin_writing([step], (optimizer,))
            return loss

        if len(args) > 1:
            return (args[0], gated_closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": gated_closure}

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if len(args) > 1 or kwargs:
            self.evidence.look(optimizer)  # of a closure behind the gate, the gradients are there by now
        frame, owner = id(sys._getframe(1)), id(optimizer)
        for step in reversed(self._open.get(threading.get_ident(), ())):
            if step.owner == owner and step.frame == frame:
                self._leave(step)
                break
        for warmup in list(self.warmups):
            warmup.after_step(optimizer)

    def _gated(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wait_and_call(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            for pending in self._pending:
                pending.wait_for_storage(storage)
            return method(storage, *args, **kwargs)

        return wait_and_call

    def _gated_load(self, load: Callable[..., Any], known: Container[Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def wait_and_load(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if self._pending and _is_in(owner, known):
                self.wait_all()
            return load(owner, *args, **kwargs)

        return wait_and_load

    def watch(self, module: torch.nn.Module) -> None:
        """Makes ``load_state_dict`` of ``module`` and of its parts wait for pending copies.

        Whatever its parts write to in forward is copied eagerly from here on.
        """
        with self._changed:
            self.evidence.watch(module)
            self.modules.update(module.modules())

    def owners(self) -> tuple[list[tuple[Any, int]], set[int]]:
        """Who was seen to step, with the number of steps, oldest first; and the storages that are eager whoever owns
        them."""
        with self._changed:
            return list(self.steps.items()), self.evidence.eager_storages()


def _is_in(owner: Any, known: Container[Any]) -> bool:
    try:
        return owner in known
    except Exception:  # it has no hash, or none that works
        return False


# The methods that load, and the objects for which they wait. torch has hooks for them, but only on the object itself,
# where they would become part of its copies and pickles.
_LOADS: tuple[tuple[Any, str, Callable[[Gate], Container[Any]]], ...] = (
    (torch.nn.Module, "_load_from_state_dict", lambda gate: gate.modules),  # called for each part
    (torch.optim.Optimizer, "load_state_dict", lambda gate: gate.steps),
)


def is_of_torch(optimizer: object) -> bool:
    """Whether it is exactly one of torch's own optimizers, not of a class derived from them."""
    return _is_class_of_torch(type(optimizer))


def _is_class_of_torch(kind: type[Any]) -> bool:
    return f"{kind.__module__}.".startswith("torch.optim.")  # that of Adafactor is torch.optim itself


def _writes_before_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether code that is not torch's runs between the global hook and the closure; warns once, by its name."""
    hooks = [
        *list(torch_optimizer._global_optimizer_pre_hooks.values())[1:],
        *getattr(optimizer, "_optimizer_step_pre_hooks", {}).values(),
    ]
    foreign = hooks[0] if hooks else _foreign_step(type(optimizer).step)
    if foreign is None:
        return False
    message = (
        f"{type(optimizer).__name__}.step(closure) waits for pending copies before forward and backward, which then do "
        f"not overlap with them: {_place_of(foreign)} runs before the closure and may write to parameters. Call it "
        "before step() instead"
    )
    _warn_once(message)
    return True


def warn_of_foreign(optimizer: object, error: Exception) -> None:
    """Warns, once for its class, of an optimizer that raises where torch's do not."""
    if type(optimizer) in _told_of:
        return
    _told_of.add(type(optimizer))
    why = "".join(traceback.format_exception_only(error)).strip()  # also of an error that cannot be printed
    _warn_once(
        f"what {type(optimizer).__name__} trains cannot be told ({why}): its steps wait for all copies, and what no "
        "other optimizer trains is copied inside save()"
    )


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        with contextlib.suppress(Warning):  # where a filter makes errors of them, training goes on
            warnings.warn(message, stacklevel=5)


_warned: set[str] = set()
_told_of: weakref.WeakSet[type[Any]] = weakref.WeakSet()


def _place_of(function: Any) -> str:
    code: CodeType | None = getattr(function, "__code__", None)
    if code is None:
        return f"{type(function).__module__}.{type(function).__qualname__}"
    name = getattr(code, "co_qualname", code.co_name)  # not the function's, which functools.wraps changes
    return f"{name} ({code.co_filename}:{code.co_firstlineno})"


@functools.lru_cache(maxsize=64)
def _foreign_step(step: Any) -> Any:
    """The layer of a class's ``step`` that is not torch's, if there is one."""
    while step is not None:
        code = getattr(step, "__code__", None)
        if code is None or not Path(code.co_filename).is_relative_to(_TORCH):
            return step
        step = getattr(step, "__wrapped__", None)
    return None


def _guard_switches(kind: type[Any]) -> None:
    """Puts the gate in front of the methods with which optimizers of a class write outside of ``step()``.

    The class changes, not the instance, so that optimizers are copied and pickled as ever."""
    if kind in _guarded or _is_class_of_torch(kind):
        return
    for name in dir(kind) if kind.__hash__ is not None else ():
        method = inspect.getattr_static(kind, name)
        # That of schedulefree's wrapper is no torch.optim.Optimizer's, and writes before that of the one inside.
        alone = name == "step" and _is_schedulefree(kind.__module__) and not hasattr(method, "hooked")
        if (alone or name in _SWITCHES or name.startswith("swap_")) and inspect.isfunction(method):
            with contextlib.suppress(TypeError, AttributeError):  # a class that cannot be changed
                setattr(kind, name, _guarded_switch(method))
    _guarded.add(kind)


def _guarded_switch(method: Callable[..., Any]) -> Callable[..., Any]:
    # Trainers call train() before every batch: the mode mostly is what it was, and forward overlaps with the copy.
    mode = {"train": True, "eval": False}.get(method.__name__) if _is_schedulefree(method.__module__) else None
    moves = method.__name__ in _MOVE

    @functools.wraps(method)
    def switch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if mode is not None and _is_in_mode(self, mode):
            return method(self, *args, **kwargs)
        owner = unwrapped(self)
        with gate.step(owner), gate.evidence.kept(owner) if moves else contextlib.nullcontext():
            return method(self, *args, **kwargs)

    return switch


def _is_in_mode(optimizer: Any, train: bool) -> bool:
    """Whether a schedule-free optimizer holds the weights of training, or of evaluation, already."""
    try:
        own = getattr(optimizer, "train_mode", None)  # of schedulefree's wrapper
        return all((own if own is not None else group.get("train_mode")) is train for group in optimizer.param_groups)
    except Exception:
        return False


def unwrapped(optimizer: Any) -> Any:
    """The optimizer that ``optimizer`` passes everything on to, as LightningOptimizer does: the two are one owner."""
    seen = [optimizer]
    try:
        groups, state = optimizer.param_groups, optimizer.state
        for outer in seen if groups is not None and state is not None else ():  # grows meanwhile
            for inner in list(getattr(outer, "__dict__", {}).values()):
                passed_on = isinstance(inner, torch.optim.Optimizer) and not any(inner is other for other in seen)
                if passed_on and inner.param_groups is groups and inner.state is state:
                    seen.append(inner)
    except Exception:  # not as torch's are: it stands for itself
        return optimizer
    return seen[-1]


def _guard_callers(frame: FrameType) -> None:
    """Finds optimizers that step by another's, as SAM does: torch's hooks never see them."""
    caller = frame.f_back
    for _ in range(_MAX_CALLERS):
        if caller is None:
            return
        code = caller.f_code
        alone = code.co_name == "step" and _is_schedulefree(caller.f_globals.get("__name__"))
        if (alone or code.co_name in _SWITCHES) and code.co_argcount:
            owner = caller.f_locals.get(code.co_varnames[0])
            if hasattr(type(owner), "param_groups") or "param_groups" in getattr(owner, "__dict__", ()):
                _guard_switches(type(owner))
        caller = caller.f_back


def _is_schedulefree(module: str | None) -> bool:
    return module is not None and module.startswith("schedulefree.")


_guarded: weakref.WeakSet[type[Any]] = weakref.WeakSet()


gate = Gate()


class CUDAGraph(torch.cuda.CUDAGraph):
    """A ``torch.cuda.CUDAGraph`` whose replay waits as the steps would that were captured into it.

    torch calls no hook when a graph is replayed. So an optimizer whose step is in a graph of torch's own is copied
    before ``save()`` returns; in a graph of this class, lazily:

        graph = lazyckpt.CUDAGraph()
        with torch.cuda.graph(graph):
            ...
            optimizer.step()

    An optimizer that is in graphs of both kinds is copied before ``save()`` returns.
    """

    _steps: weakref.WeakSet[Any] | tuple[()] = ()

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        """As torch's."""
        gate.install()
        super().capture_begin(*args, **kwargs)
        self._steps = weakref.WeakSet()
        gate.capture_into(self._steps)

    def capture_end(self) -> None:
        """As torch's."""
        gate.capture_into(None)
        super().capture_end()

    def replay(self) -> None:
        """As torch's, behind the gate: the GPU waits for copies of what the graph writes, not the host."""
        with gate.step(*self._steps):
            super().replay()


class GatedMethod:
    """Replaces a bound method with one that waits at the gate. Copies and pickles of the object get their own method
    instead, without the gate: they need no lazyckpt."""

    def __init__(self, owner: Any, method: Callable[..., Any]) -> None:
        self.owner = owner
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with gate.step(self.owner):
            return self._method(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (self._method,)


os.register_at_fork(after_in_child=gate.forget)


def wait_captured() -> None:
    """Wait until every pending lazy copy in this process is done.

    Call it before anything but an optimizer step changes parameters or optimizer state in place: the replay of a
    CUDA graph, a schedule-free swap of weights, a kernel of your own.

    An optimizer whose step was captured into a graph other than a ``lazyckpt.CUDAGraph`` is copied eagerly, until
    this was called for the first time: then it is lazy again after every call:

        lazyckpt.wait_captured()
        graph.replay()
    """
    gate.wait_by_hand()


def guard(obj: Any, method: str) -> None:
    """Put the gate in front of ``obj.method`` too, as in ``guard(average, "update")``.

    From then on the parameters of ``obj`` (of a module; otherwise the tensors of its ``state_dict()``) are copied
    lazily, since nothing but this method changes them; buffers stay eager. The averages of torch, timm, ema-pytorch,
    torch-ema and diffusers need no guard. Raises AttributeError if there is no such method.
    """
    gate.install()
    gate.guard(obj, method)
