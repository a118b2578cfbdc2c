"""What every rank is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.settings import Compute


@dataclass(frozen=True)
class Task:
    directory: Path  # empty, and the same for all ranks
    arms: Sequence[str]  # of ARMS
    state_bytes: int  # of all ranks together
    pairs: int
    steps: int  # in a block
    intervals: Sequence[int]  # in steps, from one checkpoint to the next
    compute: Compute
