"""Compares two checkpoints of DeepSpeed, in a process that may import it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import torch


def described(obj: Any) -> Any:
    """An object as values that ``==`` compares exactly."""
    if isinstance(obj, torch.Tensor):
        kind = type(obj), obj.dtype, tuple(obj.shape), obj.stride(), obj.requires_grad
        return kind, obj.detach().contiguous().view(torch.uint8).numpy().tobytes() if obj.dim() else obj.item()
    if isinstance(obj, dict):
        return type(obj), [(key, described(value)) for key, value in obj.items() if key != "ds_config"]
    if isinstance(obj, list | tuple):  # a copy that DeepSpeed makes has a tuple for a torch.Size
        return isinstance(obj, list), [described(item) for item in obj]
    if isinstance(obj, numpy.ndarray):
        return obj.dtype, obj.tolist()
    if type(obj).__module__.startswith("deepspeed."):
        return type(obj), described(vars(obj))
    return obj


def different(folder: str, tag: str) -> list[str]:
    """The files that differ in what torch reads of them."""
    import deepspeed_training  # noqa: F401  # the classes in the files

    ours, plain = (sorted(Path(folder, whose, tag).glob("*.pt")) for whose in ("ours", "plain"))
    assert [path.name for path in ours] == [path.name for path in plain] and ours
    pairs = zip(ours, plain, strict=True)
    read = (
        (one.name, *(described(torch.load(path, weights_only=False)) for path in (one, other))) for one, other in pairs
    )
    return [name for name, one, other in read if one != other]
