"""Finds out how optimizers other than torch's write, and puts the gate in front of these writes.

torch's own optimizers write to parameters in ``step()`` only, after the closure. Others may write before the closure,
in methods with other names (schedule-free optimizers, SAM, swaps of weights), or inside a step of their own that
torch's hook never sees. None of these functions fails for an optimizer that differs from torch's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from lazyckpt.gate.closures import runs_closure_first
from lazyckpt.gate.gate import gate
from lazyckpt.gate.step_layers import step_behind
from lazyckpt.warn import warn_once

_TORCH = Path(torch.__file__).parent
# Methods of an optimizer that write to parameters outside step(): of schedule-free ones, and of SAM. Also swap_….
_MOVE = ("first_step", "second_step")  # these may write by `p.data = …`
_SWITCHES = ("train", "eval", *_MOVE)
_MAX_CALLERS = 8  # frames in which one optimizer may be the caller of another's step

_told_of: weakref.WeakSet[type[Any]] = weakref.WeakSet()
_guarded: weakref.WeakSet[type[Any]] = weakref.WeakSet()


def is_torch_class(kind: type[Any]) -> bool:
    """Whether a class of optimizers is exactly one of torch's own, not derived from one."""
    return f"{kind.__module__}.".startswith("torch.optim.")  # the module of Adafactor is torch.optim itself


def warn_of_foreign(optimizer: object, error: Exception) -> None:
    """Warns, once for its class, of an optimizer that raises where torch's do not."""
    if type(optimizer) in _told_of:
        return
    _told_of.add(type(optimizer))
    why = "".join(traceback.format_exception_only(error)).strip()  # works also for an error that cannot be printed
    _warn(
        f"lazyckpt cannot tell what {type(optimizer).__name__} trains ({why}): its steps wait for all copies, and "
        "save() copies what no other optimizer trains before it returns"
    )


def _warn(message: str) -> None:
    with contextlib.suppress(Warning):  # training goes on where a filter turns warnings into errors
        warn_once(message)


# code before the closure


def writes_before_closure(optimizer: torch.optim.Optimizer, frame: FrameType, *, by_name: bool) -> bool:
    """Whether something may write to parameters between the global hook, called from ``frame``, and the closure; warns
    once, and names it. ``by_name``: the closure is the argument of that name, not the second one."""
    hooks = [
        *torch_optimizer._global_optimizer_pre_hooks.values(),
        *getattr(optimizer, "_optimizer_step_pre_hooks", {}).values(),
    ]
    foreign = next((hook for hook in hooks if not _is_ours(hook)), None)
    kind = type(optimizer)
    if foreign is not None:
        why = f"{_place_of(foreign)} runs before the closure and may write to parameters. Call it before step() instead"
    else:
        step = step_behind(frame, optimizer)
        if (is_torch_class(kind) and _foreign_step(step) is None) or runs_closure_first(
            step, optimizer, by_name=by_name
        ):
            return False
        place = _place_of(_foreign_step(step) or inspect.unwrap(step))
        why = (
            f"the code of {place} does not prove that it runs the closure before it writes to parameters. If it does, "
            f"call lazyckpt.closure_first({kind.__name__}) once"
        )
    _warn(
        f"{kind.__name__}.step(closure) waits for pending copies before forward and backward, which then do not "
        f"overlap with them: {why}"
    )
    return True


def _is_ours(hook: Any) -> bool:
    """Whether a hook is of lazyckpt, whose hooks write to no parameter."""
    module = getattr(hook, "__module__", None)
    return isinstance(module, str) and module.startswith(f"{__name__.partition('.')[0]}.")


@functools.lru_cache(maxsize=64)
def _foreign_step(step: Any) -> Any:
    """The layer of a class's ``step`` that is not torch's, or None."""
    while step is not None:
        code = getattr(step, "__code__", None)
        if code is None or not Path(code.co_filename).is_relative_to(_TORCH):
            return step
        step = getattr(step, "__wrapped__", None)
    return None


def _place_of(function: Any) -> str:
    code: CodeType | None = getattr(function, "__code__", None)
    if code is None:
        return f"{type(function).__module__}.{type(function).__qualname__}"
    name = getattr(code, "co_qualname", code.co_name)  # not the function's, which functools.wraps changes
    return f"{name} ({code.co_filename}:{code.co_firstlineno})"


# writes outside step()


def guard_switches(kind: type[Any]) -> None:
    """Puts the gate in front of the methods with which optimizers of a class write outside ``step()``.

    The class changes, not the instance, so that optimizers are copied and pickled as before."""
    if kind in _guarded or is_torch_class(kind):
        return
    for name in dir(kind) if kind.__hash__ is not None else ():
        method = inspect.getattr_static(kind, name)
        # schedulefree's wrapper is no torch.optim.Optimizer, and its step() writes before the step of the one inside.
        alone = name == "step" and _is_schedulefree(kind.__module__) and not hasattr(method, "hooked")
        if (alone or name in _SWITCHES or name.startswith("swap_")) and inspect.isfunction(method):
            with contextlib.suppress(TypeError, AttributeError):  # a class that cannot be changed
                setattr(kind, name, _guarded_switch(method))
    _guarded.add(kind)


def guard_callers(frame: FrameType) -> None:
    """Guards optimizers that step through another optimizer, as SAM does: torch's hooks never see them. ``frame`` is a
    step's."""
    caller = frame.f_back
    for _ in range(_MAX_CALLERS):
        if caller is None:
            return
        code = caller.f_code
        alone = code.co_name == "step" and _is_schedulefree(caller.f_globals.get("__name__"))
        if (alone or code.co_name in _SWITCHES) and code.co_argcount:
            owner = caller.f_locals.get(code.co_varnames[0])
            if hasattr(type(owner), "param_groups") or "param_groups" in getattr(owner, "__dict__", ()):
                guard_switches(type(owner))
        caller = caller.f_back


def _guarded_switch(method: Callable[..., Any]) -> Callable[..., Any]:
    # Trainers call train() before every batch. If the mode stays the same, forward overlaps with the copy.
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
    """Whether a schedule-free optimizer already holds the weights for training, or for evaluation."""
    try:
        own = getattr(optimizer, "train_mode", None)  # of schedulefree's wrapper
        return all((own if own is not None else group.get("train_mode")) is train for group in optimizer.param_groups)
    except Exception:
        return False


def unwrapped(optimizer: Any) -> Any:
    """The optimizer to which ``optimizer`` forwards everything, as LightningOptimizer does: the two are one owner."""
    try:
        groups, state = optimizer.param_groups, optimizer.state
        for inner in list(vars(optimizer).values()) if groups is not None and state is not None else ():
            passed_on = isinstance(inner, torch.optim.Optimizer) and inner is not optimizer
            if passed_on and inner.param_groups is groups and inner.state is state:
                return unwrapped(inner)
    except Exception:  # it differs from torch's, or is in a cycle: it counts as its own owner
        pass
    return optimizer


def _is_schedulefree(module: str | None) -> bool:
    return module is not None and module.startswith("schedulefree.")
