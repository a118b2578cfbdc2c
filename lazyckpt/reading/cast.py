"""Converts the floating-point tensors of a loaded object."""

from __future__ import annotations

import os
from typing import Any

import torch

from lazyckpt.errors import LoadError


def cast(obj: Any, dtype: torch.dtype, path: str | os.PathLike[str]) -> Any:
    """Converts the floating-point tensors in the dicts, lists and tuples below ``obj``, in place where it can. Shared
    objects stay shared. Raises LoadError, which names ``path``, if they are nested too deeply."""
    try:
        return _cast(obj, dtype, {})
    except RecursionError as error:
        raise LoadError("nested too deeply to convert its tensors", path=path) from error


def _cast(obj: Any, dtype: torch.dtype, known: dict[int, tuple[Any, Any]]) -> Any:
    if id(obj) in known:
        return known[id(obj)][1]
    result = obj
    known[id(obj)] = obj, result
    if isinstance(obj, torch.Tensor) and obj.is_floating_point():
        result = obj.detach().to(dtype)
    elif isinstance(obj, dict):
        obj.update({key: _cast(value, dtype, known) for key, value in obj.items()})
    elif isinstance(obj, list):
        obj[:] = [_cast(value, dtype, known) for value in obj]
    elif type(obj) is tuple:
        result = tuple(_cast(value, dtype, known) for value in obj)
    known[id(obj)] = obj, result  # keeps obj alive, so that no other object gets its id
    return result
