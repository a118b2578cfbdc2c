"""Lightning's own: TorchCheckpointIO, and AsyncCheckpointIO, which clones in the caller, writes from one thread and has
no back-pressure."""

from __future__ import annotations

from pathlib import Path

from benchmarks.arms.base import Arm, fsync_tree
from benchmarks.workload import Training


class Lightning(Arm):
    def __init__(self, training: Training, directory: Path, *, asynchronous: bool) -> None:
        super().__init__(training, directory)
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        self._io = AsyncCheckpointIO(TorchCheckpointIO()) if asynchronous else TorchCheckpointIO()

    def save(self, step: int) -> None:
        self._io.save_checkpoint(self.training.state(), str(self.path(step)))

    def drain(self) -> None:
        self._io.teardown()  # waits for the queue; the next save starts a new thread
        fsync_tree(self.directory)
