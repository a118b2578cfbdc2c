"""Reads the version counters with which torch counts in-place writes to a tensor."""

from __future__ import annotations

from operator import attrgetter

import torch

_version = attrgetter("_version")


def versions_of(tensors: list[torch.Tensor]) -> list[int]:
    """Raises RuntimeError for inference tensors, which have no counter."""
    with torch._C.DisableTorchFunction():  # runs no code of subclasses; a mode would make it many times slower
        return list(map(_version, tensors))


def versions_where_counted(tensors: list[torch.Tensor]) -> list[int]:
    """As ``versions_of``, with 0 for tensors without a counter."""
    try:
        return versions_of(tensors)
    except RuntimeError:
        with torch._C.DisableTorchFunction():
            return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
