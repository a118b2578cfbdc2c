"""For trainers whose ranks hold the same state (DistributedDataParallel): their files.

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
