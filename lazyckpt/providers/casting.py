"""Saves floating-point tensors in another dtype, for copies of a model that are published.

torch converts them inside ``save()``, in host memory: the GPU has no room for a second copy of a model. The converted
tensors are of the moment of ``save()``; training may change the live ones as soon as it returns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from lazyckpt.errors import ConfigError
from lazyckpt.providers.base import StorageTable
from lazyckpt.providers.module import ModuleProvider
from lazyckpt.providers.ranges import to_host


def check_dtype(dtype: Any) -> None:
    """Raises ConfigError for a dtype that is not floating."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype={dtype!r}: expected a floating-point dtype of torch")


def converted(state: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Returns the state with its floating-point tensors in ``dtype``. Calls wait for the device."""
    done: dict[Any, torch.Tensor] = {}
    result = OrderedDict((name, _convert(value, dtype, done)) for name, value in state.items())
    if (versions := getattr(state, "_metadata", None)) is not None:
        vars(result)["_metadata"] = versions  # load_state_dict() reads it
    return result


def _convert(value: Any, dtype: torch.dtype, done: dict[Any, torch.Tensor]) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype is dtype:
        return value
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        return value.detach().cpu().to(dtype)
    # Tied weights stay one tensor.
    view = value.storage_offset(), value.shape, value.stride(), value.dtype, value.is_neg()
    place = value.untyped_storage()._cdata, *view
    if place not in done:
        done[place] = to_host(value.detach()).to(dtype)
    return done[place]


class CastModuleProvider(ModuleProvider):
    """A module that is saved in another dtype, and restored from it."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        """Raises ConfigError for a dtype that is not floating."""
        check_dtype(dtype)
        super().__init__(module, casts=True)
        self.save_dtype = dtype

    def opcodes(self, table: StorageTable) -> bytes:
        state = self.state()
        # Their versions tell of a write inside save().
        table.views.tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return self.opcodes_of(converted(state, self.save_dtype), table)
