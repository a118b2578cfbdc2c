"""torchsnapshot's `async_take`: stages before it returns, writes from a thread, never syncs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.arms.base import Arm, fsync_tree
from benchmarks.workload import Training


class TorchSnapshot(Arm):
    def __init__(self, training: Training, directory: Path) -> None:
        super().__init__(training, directory)
        from torchsnapshot import Snapshot

        self._snapshot = Snapshot
        self._pending: Any = None

    def save(self, step: int) -> None:
        self._wait()
        app_state = {"model": self.training.model, "optimizer": self.training.optimizer}
        self._pending = self._snapshot.async_take(str(self.path(step)), app_state)

    def drain(self) -> None:
        self._wait()
        fsync_tree(self.directory)

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
