"""What an arm is: one way to checkpoint a training job, driven by the benchmark's loop.

The loop calls `save`, then computes, then `before_step`, `optimizer.step()`, `after_step`; `drain` ends the
timed region. What the training thread spends in `save`, and from `before_step` until the optimizer itself
begins, is the arm's blocked time, measured by the loop's own clock.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.workload import Training


class Arm:
    """Writes checkpoints of `training` below `directory`, which exists and is the arm's own."""

    def __init__(self, training: Training, directory: Path) -> None:
        self.training = training
        self.directory = directory

    def save(self, step: int) -> None:
        """Begin checkpoint `step`; waits first for whatever the engine demands to be over."""

    def before_step(self) -> None:
        """Wait until the optimizer may change the state."""

    def after_step(self) -> None:
        """Undo whatever `before_step` holds."""

    def drain(self) -> None:
        """Return when every checkpoint begun is durable on disk; raise if one failed."""

    def resume(self) -> int:
        """Load the newest checkpoint that loads, in place; returns its step, or 0 if there is none."""
        for path in sorted(self.directory.glob("step-*"), reverse=True):
            try:
                self.load(path)
            except Exception:  # the engine was killed while it wrote this one
                continue
            return int(path.name.removeprefix("step-"))
        return 0

    def load(self, path: Path) -> None:
        """Load one checkpoint, in the format of torch.save; raise if it is not whole."""
        state = torch.load(path)
        self.training.model.load_state_dict(state["model"])
        self.training.optimizer.load_state_dict(state["optimizer"])

    def discard(self) -> None:
        """Delete the checkpoints, outside the timed region: inside it, no arm but lazyckpt deletes any."""
        shutil.rmtree(self.directory)
        self.directory.mkdir()

    def close(self) -> None:
        """Release threads, processes and memory."""

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}"


@dataclass(frozen=True)
class ArmKind:
    """How to make an arm. `make` may raise: the report then shows the arm as missing, with the reason."""

    name: str
    make: Callable[[Training, Path], Arm]
    package: str = ""  # distribution whose version the report quotes


def fsync_tree(directory: Path) -> None:
    """Make all below `directory` durable, for engines that never do: no arm gains by dirty pages.

    A file that vanishes belongs to another rank, which renames it and then syncs it.
    """
    for root, _, files in os.walk(directory):
        for name in [*files, "."]:
            try:
                descriptor = os.open(os.path.join(root, name), os.O_RDONLY)
            except FileNotFoundError:
                continue
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
