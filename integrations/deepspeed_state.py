"""Tells the gate what a DeepSpeed engine writes to in its step, and nowhere else.

With ZeRO, and with 16-bit weights, the step of an outer optimizer calls that of a torch optimizer, once for each param
group or sub-group, with ``param_groups`` replaced for the moment, and then copies the result into the weights. The
hooks of the torch optimizer see a part of the state at a time, and never the weights. So the gate stands in front of
the outer step, and all of the state belongs to that (``lazyckpt.guard``).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
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
        # Where they lie, with the padding behind them.
        for name in ("bit16_groups_flat", "bf16_groups_flat"):
            weights += getattr(outer, name, ())
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
        self._storages = storages

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.clone and len(args) == 1 and not kwargs:
            with torch._C.DisableTorchFunction():
                if args[0].untyped_storage()._cdata in self._storages:
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
def weights_lent(lend: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """A context in which accelerate's state dict holds what ``lend`` returns for the weights of a DeepSpeed engine.

    With ZeRO 1 and 2, accelerate has DeepSpeed clone them. Weights that overlap an earlier one are still cloned: so
    the file has each of several tied weights, as DeepSpeed's clones are not tied."""
    clone = checkpoint_utils.clone_tensors_for_torch_save

    def lent(state: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, dict):  # ``clone`` calls itself by the name that is replaced
            return clone(state, *args, **kwargs)
        weights = {name: value.detach() for name, value in state.items() if _is_plain(value)}
        tied = overlaps(weights)
        items = state.items()
        return type(state)(
            {k: lend(weights[k]) if k in weights and k not in tied else clone(v, *args, **kwargs) for k, v in items}
        )

    checkpoint_utils.clone_tensors_for_torch_save = lent
    try:
        yield
    finally:
        checkpoint_utils.clone_tensors_for_torch_save = clone


def _is_plain(value: Any) -> bool:
    dense = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_meta
    return dense and value.is_contiguous() and value.numel() > 0
