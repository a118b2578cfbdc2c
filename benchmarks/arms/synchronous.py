"""Arms without an engine: no checkpoint at all, `torch.save` + fsync, `safetensors.save_file` + fsync."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from benchmarks.arms.base import Arm
from benchmarks.workload import Training


class NoCheckpoint(Arm):
    """The denominator."""


class TorchSave(Arm):
    def save(self, step: int) -> None:
        with open(self.path(step), "wb") as file:
            torch.save(self.training.state(), file)
            file.flush()
            os.fsync(file.fileno())


class Safetensors(Arm):
    def __init__(self, training: Training, directory: Path) -> None:
        super().__init__(training, directory)
        from safetensors.torch import save_file

        self._save_file = save_file

    def save(self, step: int) -> None:
        self._save_file(self.training.tensors(), self.path(step))
        with open(self.path(step), "rb") as file:
            os.fsync(file.fileno())
