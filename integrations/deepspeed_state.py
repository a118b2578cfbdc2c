"""Tells the gate what a DeepSpeed engine writes to in its step, and nowhere else.

With ZeRO, and with 16-bit weights, the step of an outer optimizer calls that of a torch optimizer, once for each param
group or sub-group, with ``param_groups`` replaced for the moment, and then copies the result into the weights. The
hooks of the torch optimizer see a part of the state at a time, and never the weights. So the gate stands in front of
the outer step, and all of the state belongs to that (``lazyckpt.guard``).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.checkpoint import utils as checkpoint_utils
from torch.overrides import TorchFunctionMode

import lazyckpt
from lazyckpt.providers.ranges import overlaps


class OuterStep:
    """The gate in front of the outer optimizer's step of an engine, until ``close``. Does nothing without one."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self._replaced = vars(engine.optimizer).get("step") if _has_inner(engine) else None
        if _has_inner(engine):
            self.step = engine.optimizer.step
            lazyckpt.guard(self, "step")
            engine.optimizer.step = self.step

    def state_dict(self) -> dict[str, Any]:
        """The tensors that only the step writes to, for ``guard``."""
        engine = self._engine()
        if engine is None or not _has_inner(engine):
            return {}
        outer, inner = engine.optimizer, engine.optimizer.optimizer
        weights = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
        masters = [parameter for group in inner.param_groups for parameter in group["params"]]
        # Between steps, stage 3 leaves the param groups empty.
        masters += getattr(outer, "fp32_partitioned_groups_flat", ())
        return {"weights": weights, "masters": masters, "state": list(inner.state.values())}

    def close(self) -> None:
        """Gives the optimizer its own step back."""
        engine = self._engine()
        if engine is None or not _has_inner(engine) or vars(engine.optimizer).get("step") is not vars(self)["step"]:
            return
        if self._replaced is None:
            del engine.optimizer.step
        else:
            engine.optimizer.step = self._replaced


def _has_inner(engine: Any) -> bool:
    return isinstance(getattr(engine.optimizer, "optimizer", None), torch.optim.Optimizer)


def expected(engine: Any) -> list[Any]:
    """Returns the objects whose state this rank saves."""
    optimizer = engine.optimizer.optimizer if _has_inner(engine) else engine.optimizer
    return [found for found in (engine.save_non_zero_checkpoint and engine.module, optimizer) if found]


class _NotCloned(TorchFunctionMode):
    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self.storages = storages

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.clone and len(args) == 1 and not kwargs:
            with torch._C.DisableTorchFunction():
                if args[0].untyped_storage()._cdata in self.storages:
                    return args[0].detach()
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def parameters_not_cloned(engine: Any) -> Iterator[None]:
    """A context in which ``clone()`` of a part of a parameter is that part.

    DeepSpeed clones the weights of each expert to save only them. A clone could not be copied lazily: it is no memory
    of the optimizer's."""
    parameters = list(engine.module.parameters())
    with _NotCloned({parameter.untyped_storage()._cdata for parameter in parameters}):
        yield


@contextlib.contextmanager
def weights_not_cloned() -> Iterator[None]:
    """A context in which accelerate's state dict holds the weights of a DeepSpeed engine themselves.

    With ZeRO 1 and 2, accelerate has DeepSpeed clone them, and transformers clones those that share a flat buffer.
    Tied weights are cloned but for the first: DeepSpeed's clones are not tied, so the file has each of them."""
    clone, not_cloned = checkpoint_utils.clone_tensors_for_torch_save, _NotCloned(set())

    def lend(state: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, dict):  # ``clone`` calls itself by the name that is replaced
            return clone(state, *args, **kwargs)
        weights = {name: value.detach() for name, value in state.items() if _is_plain(value)}
        tied = overlaps(weights)
        lent = {name: weight for name, weight in weights.items() if name not in tied}
        others = {name: clone(value, *args, **kwargs) for name, value in state.items() if name not in lent}
        not_cloned.storages.update(weight.untyped_storage()._cdata for weight in lent.values())
        return type(state)({name: lent[name] if name in lent else others[name] for name in state})

    checkpoint_utils.clone_tensors_for_torch_save = lend
    try:
        with not_cloned:
            yield
    finally:
        checkpoint_utils.clone_tensors_for_torch_save = clone


def _is_plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_meta
