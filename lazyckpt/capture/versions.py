"""Reads the version counters with which torch counts in-place writes to a tensor."""

from __future__ import annotations

from array import array

import torch

from lazyckpt import _engine


def versions_of(tensors: list[torch.Tensor]) -> array[int]:
    """-1 for inference tensors, which have no counter."""
    with torch._C.DisableTorchFunction():  # runs no code of subclasses; a mode would make it many times slower
        return array("q", _engine.versions_of(tensors))
