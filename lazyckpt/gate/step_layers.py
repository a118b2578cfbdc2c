"""Looks through the layers that torch puts around an optimizer's ``step``: hooks, ``differentiable``, ``no_grad()``."""

from __future__ import annotations

import inspect
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

from lazyckpt import private_names

GRAD_MODES = (torch.enable_grad, torch.no_grad, torch.set_grad_enabled, torch.inference_mode)
_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
HOOKED: CodeType = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__
_use_grad = private_names.find("torch.optim.optimizer._use_grad_for_differentiable")
_USE_GRAD: CodeType | None = None if _use_grad is None else _use_grad(lambda self: None).__code__


def _unnamed(code: CodeType) -> CodeType:
    """The same code without its name: newer torch names that of a decorator after its context."""
    names = {name: "" for name in ("co_name", "co_qualname") if hasattr(code, name)}  # the latter since Python 3.11
    return code.replace(**names)  # type: ignore[arg-type]


_IN_CONTEXT = _unnamed(torch.no_grad()(lambda: None).__code__)


def step_behind(frame: FrameType, optimizer: Any) -> Any:
    """The step that torch runs once its hooks, called from ``frame``, have returned."""
    if frame.f_code is HOOKED:
        return frame.f_locals["func"]
    return without_hooks(getattr(type(optimizer), "step", None))


def cell(function: FunctionType, name: str) -> Any:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return cells[name].cell_contents


def without_hooks(step: Any) -> Any:
    return cell(step, "func") if getattr(step, "__code__", None) is HOOKED else step


def without_layers(step: Any, kind: type[Any]) -> FunctionType | None:
    """The function inside torch's decorators; None if there is another layer, or no function in Python."""
    while isinstance(step, FunctionType):
        if _unnamed(step.__code__) == _IN_CONTEXT:
            context = getattr(cell(step, "ctx_factory"), "__self__", None)
            if type(context) not in GRAD_MODES:
                return None
        elif step.__code__ is not _USE_GRAD:
            return None if step.__code__.co_flags & _SUSPENDABLE else step
        elif inspect.getattr_static(kind, "defaults", None) is not None:  # it reads this attribute
            return None
        step = cell(step, "func")
    return None
