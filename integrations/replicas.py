"""For trainers whose ranks hold the same state (DistributedDataParallel): their files and settings.

A trainer writes its files on the main process. The other ranks add the large ones to their staged folder, too. Hooks
may rename files or leave some out on the main process alone. So the ranks write those together that all of them have,
and the main process the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import lazyckpt

_LARGE_BYTES = 64 << 10  # of a tensor; smaller ones are written by rank 0


def is_large(obj: Any) -> bool:
    """Whether ranks can share the work of a file with these contents."""
    return any(isinstance(leaf, torch.Tensor) and leaf.nbytes >= _LARGE_BYTES for leaf in tree_leaves(obj))


def write_together(staged: lazyckpt.StagedFolder, names: list[list[str]]) -> None:
    """``names``: those of the files that each rank has added, by rank."""
    common = set(names[0]).intersection(*names[1:])
    staged.write_together(name for name in names[0] if name in common)


def check_same(settings: list[dict[str, Any]]) -> None:
    """Raises ConfigError if ranks have other settings, as when a variable is set on one machine only: those that save
    would wait for the others. ``settings``: of each rank; every rank calls this with those of all."""
    for rank, of_rank in enumerate(settings):
        for name, value in of_rank.items():
            if value != settings[0][name]:
                what = f"rank 0 has {name}={settings[0][name]!r}; rank {rank} has {name}={value!r}"
                how = f"as an argument, as LAZYCKPT_{name.upper()} or in lazyckpt.yaml"
                raise lazyckpt.ConfigError(f"{what}. Give all the same, {how}")
