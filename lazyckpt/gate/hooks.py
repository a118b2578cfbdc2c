"""Opens and closes each optimizer step at the gate, from torch's global step hooks.

With a closure, the wait moves behind the closure, so that forward and backward still overlap with the copy.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from types import FrameType
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from lazyckpt.gate import averages
from lazyckpt.gate.foreign import guard_callers, guard_switches, warn_of_foreign, writes_before_closure
from lazyckpt.gate.gate import gate
from lazyckpt.gate.torch_methods import gate_methods

warmups: weakref.WeakSet[Any] = weakref.WeakSet()  # called after each step (warmup.py)
_installed = threading.Lock()  # held from the first ``install`` on


def install() -> None:
    """Registers the hooks, once per process."""
    averages.guard_imported()
    if not _installed.acquire(blocking=False):
        return
    hook = torch_optimizer.register_optimizer_step_pre_hook(_before_step)
    # Hooks of other code may write, too. They run behind ours, even those registered earlier.
    torch_optimizer._global_optimizer_pre_hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]
    torch_optimizer.register_optimizer_step_post_hook(_after_step)
    gate_methods()


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
    frame = sys._getframe(1)
    try:
        return _open_step(optimizer, args, kwargs, frame)
    except Exception as error:  # the optimizer differs from torch's: it owns nothing, and waits for everything
        with contextlib.suppress(Exception):  # it may have no hash
            gate.steps.pop(optimizer, None)
        warn_of_foreign(optimizer, error)
        gate.wait_all()
        gate.begin_writing([gate.enter(optimizer, frame)], ())
        return None


def _open_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
) -> _Arguments | None:
    if optimizer not in gate.steps:
        guard_switches(type(optimizer))
    guard_callers(frame)
    step = gate.enter(optimizer, frame)
    if not gate.is_nested(step):  # the hook runs twice for a subclass that calls super().step()
        gate.count(optimizer)
    gate.note_capture(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    # torch's own optimizers run the closure, which holds forward and backward, before they change anything. So do
    # those whose code proves it (closures.py). Others may not (SAM), and wait up front.
    if not callable(closure) or writes_before_closure(optimizer, frame, by_name=len(args) <= 1):
        if not callable(closure):
            gate.evidence.look(optimizer)
        gate.begin_writing([step], (optimizer,))
        return None

    def gated_closure() -> Any:
        gate.pause(step)
        loss = closure()
        gate.evidence.look(optimizer)
        gate.begin_writing([step], (optimizer,))
        return loss

    if len(args) > 1:
        return (args[0], gated_closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": gated_closure}


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if len(args) > 1 or kwargs:
        gate.evidence.look(optimizer)  # with a closure behind the gate, the gradients exist only now
    if (step := gate.opened(optimizer, sys._getframe(1))) is not None:
        gate.leave(step)
    for warmup in list(warmups):
        warmup.after_step(optimizer)
