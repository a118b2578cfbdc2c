"""The class of an optimizer or a scheduler, as the manifest of a checkpoint tells it.

The state of AdamW loads into SGD without an error, and training goes wrong later. So ``restore()`` compares classes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from lazyckpt.errors import RestoreError
from lazyckpt.providers.objects import StatefulProvider, StateProvider
from lazyckpt.providers.optimizer import OptimizerProvider


def kinds_of(parts: Mapping[str, StateProvider]) -> dict[str, str]:
    """The classes of those parts whose state fits only one class, by name."""
    return {name: kind for name, part in parts.items() if (kind := _kind_of(part)) is not None}


def _kind_of(part: StateProvider) -> str | None:
    if isinstance(part, OptimizerProvider):
        return _name_of(_inner(part.obj))
    if isinstance(part, StatefulProvider) and isinstance(part.obj, torch.optim.lr_scheduler.LRScheduler):
        return _name_of(part.obj)
    return None


def _inner(optimizer: Any) -> Any:
    """The optimizer that Accelerate's wrapper, for one, holds."""
    inner = None
    with contextlib.suppress(Exception):  # code of the user's
        inner = optimizer.optimizer
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def _name_of(obj: Any) -> str:
    """The class of torch that ``obj`` has or derives from; its own if there is none."""
    base = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    mro = [kind for kind in type(obj).__mro__ if kind not in base]
    found = next((kind for kind in mro if f"{kind.__module__}.".startswith("torch.optim.")), type(obj))
    return found.__name__


def refuse_other_kinds(saved: Mapping[str, str], parts: Mapping[str, StateProvider]) -> None:
    """Raises RestoreError if a part was saved by another class. ``saved``: as ``kinds_of`` told it then."""
    if problems := other_kinds(saved, parts):
        raise RestoreError("\n".join(problems))


def other_kinds(saved: Mapping[str, str], parts: Mapping[str, StateProvider]) -> list[str]:
    """Names both classes of each part that was saved by another class."""
    return [
        f"{name}: {saved[name]} in the checkpoint, {kind} here"
        for name, kind in kinds_of(parts).items()
        if name in saved and saved[name] != kind
    ]
