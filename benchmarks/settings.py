"""How a run measures: what every part is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch

from benchmarks.arms import ArmKind


class Compute(TypedDict, total=False):
    """Arguments of `train.Contest`: how long forward and backward are made to last."""

    compute_over_write: float
    min_compute_s: float


# The write takes longer than what it could hide behind.
HASTE: Compute = {"compute_over_write": 0.5, "min_compute_s": 0.0}


@dataclass(frozen=True)
class Settings:
    directory: Path  # on the disk to test, this part's own, and empty
    kinds: Sequence[ArmKind]
    pairs: int
    steps: int  # in a block
    state_bytes: int  # AdamW state of the training job
    disk_bytes: int  # tensors that are written and read without training
    largest_bytes: int  # the largest state of all
    ranks: int  # of a sharded job
    full: bool
    device: torch.device
    compute: Compute
    output: Path  # the folder of the report, for what goes beside it
