"""Computes statistics of a saved tensor, reading a few megabytes of it at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lazyckpt.conversion.elements import dtype_of, numbers, pieces
from lazyckpt.conversion.inert import InertTensor


@dataclass(frozen=True)
class Stats:
    """The least, greatest and mean of the finite elements of a tensor (None if there are none), and the number of those
    that are NaN and infinite. A complex number counts as two."""

    min: float | None
    max: float | None
    mean: float | None
    nan: int
    inf: int


def stats_of(tensor: InertTensor, advance: Callable[[int], None]) -> Stats | None:
    """Returns None for a tensor without numbers; ``advance`` gets the bytes read. Raises CorruptFileError if a checksum
    does not match."""
    if tensor.storage is None or tensor.kind:
        return None
    dtype = dtype_of(tensor)
    least, greatest, total = math.inf, -math.inf, 0.0
    count = nan = inf = 0
    for piece in pieces(tensor, tensor):
        values = numbers(piece, dtype)
        if values is None:
            return None
        finite = values[torch.isfinite(values)]
        nan += int(values.isnan().sum())
        inf += int(values.isinf().sum())
        if len(finite):
            least, greatest = min(least, float(finite.min())), max(greatest, float(finite.max()))
            total, count = total + float(finite.sum()), count + len(finite)
        advance(len(piece))
    return Stats(least, greatest, total / count, nan, inf) if count else Stats(None, None, None, nan, inf)
