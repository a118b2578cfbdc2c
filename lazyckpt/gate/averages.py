"""Knows averages of weights by their class, and puts the gate in front of the methods with which they write.

An average is copied lazily if only methods behind the gate write to it. For the classes in this table the gate
stands in front of these methods (``guard_imported``), so no program has to call ``lazyckpt.guard``. Only the
class itself counts: a subclass may have other methods that write.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lazyckpt.gate.exclusion import Guarded
from lazyckpt.gate.gate import gate


class Average(NamedTuple):
    """The methods of one class of averages."""

    updates: tuple[str, ...]
    """The methods that write to the average."""
    swaps: tuple[str, ...] = ()
    """The methods that write to the parameters that train."""
    module: str | None = None
    """The attribute with the averaged module, if the object has other parameters, too."""


# By module and class. No library is imported for this.
_AVERAGES = {
    ("torch.optim.swa_utils", "AveragedModel"): Average(("update_parameters",)),
    ("timm.utils.model_ema", "ModelEmaV2"): Average(("update", "set")),
    ("timm.utils.model_ema", "ModelEmaV3"): Average(("update", "set", "apply_update_", "apply_update_no_buffers_")),
    ("ema_pytorch.ema_pytorch", "EMA"): Average(
        ("update", "copy_params_from_model_to_ema", "update_moving_average"),
        ("copy_params_from_ema_to_model", "update_model_with_ema"),
        "ema_model",
    ),
    ("torch_ema.ema", "ExponentialMovingAverage"): Average(("update",), ("copy_to", "restore")),
    ("diffusers.training_utils", "EMAModel"): Average(("step",), ("copy_to", "restore")),
    ("lightning.pytorch.callbacks.stochastic_weight_avg", "StochasticWeightAveraging"): Average(
        ("on_train_epoch_start",), ("on_train_end",), "_average_model"
    ),
    # Its average is an AveragedModel.
    ("lightning.pytorch.callbacks.weight_averaging", "WeightAveraging"): Average(
        (), ("_swap_models", "_copy_average_to_current")
    ),
}


_known: weakref.WeakKeyDictionary[type, Average] = weakref.WeakKeyDictionary()


def guard_imported() -> None:
    """Puts the gate in front of the writing methods of those classes of the table that were imported since the last
    call. From then on the classes are known.

    The class changes, not the object, so that averages are copied and pickled as before. A class whose first method is
    missing is of another version, whose writing methods are unknown."""
    for (module, name), average in _AVERAGES.items():
        kind = getattr(sys.modules.get(module), "__dict__", {}).get(name)
        first = (*average.updates, *average.swaps)[0]
        if isinstance(kind, type) and kind not in _known and inspect.isfunction(vars(kind).get(first)):
            updates, swaps = (tuple(m for m in names if inspect.isfunction(vars(kind).get(m))) for names in average[:2])
            _known[kind] = Average(updates, swaps, average.module)
            for method in (*updates, *swaps):
                setattr(kind, method, _gated(vars(kind)[method], updates=method in updates))


def _gated(method: Callable[..., Any], *, updates: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def gated(average: Any, *args: Any, **kwargs: Any) -> Any:
        if updates and not is_known(average):  # of a class derived from a known one
            return method(average, *args, **kwargs)
        holder = holder_of(average)
        if updates and isinstance(holder, torch.nn.Module) and holder not in gate.modules:
            gate.watch(holder)
        # A swap may write to the parameters of any owner, so it waits as a new owner does: for everything.
        with gate.step(average if updates else Guarded(average), counted=updates):
            return method(average, *args, **kwargs)

    return gated


def is_known(obj: object) -> bool:
    """Whether the gate stands in front of all methods that write to this average."""
    return type(obj) in _known


def is_update(obj: object, method: str) -> bool:
    """Whether the gate stands in front of this method of an average that is known."""
    average = _known.get(type(obj))
    return average is not None and method in average.updates


def holder_of(obj: Any) -> Any:
    """Returns the object that holds the averages of ``obj``: a module (in its parameters), another object (in its
    ``state_dict()``), or None as long as there are none."""
    average = _known.get(type(obj))
    return obj if average is None or average.module is None else getattr(obj, average.module, None)
