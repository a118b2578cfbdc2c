"""torch_checkpointing: shared-memory staging, a writer process, `lock()` round the step.

Its default layout over buffered writes: its O_DIRECT writer passes unaligned memory, which ext4 refuses, and
its safetensors layout builds the whole file in memory first and is slower. It never syncs, so `drain` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.arms.base import Arm, fsync_tree
from benchmarks.workload import Training


class TorchCheckpointing(Arm):
    def __init__(self, training: Training, directory: Path) -> None:
        super().__init__(training, directory)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))
        self._lock = self._manager.lock()
        self._write: Any = None

    def save(self, step: int) -> None:
        self._write = self._manager.save(str(self.path(step)), self.training.state())

    def before_step(self) -> None:
        self._lock.__enter__()

    def after_step(self) -> None:
        self._lock.__exit__(None, None, None)

    def drain(self) -> None:
        if self._write is not None:
            self._write.result()
            self._write = None
        fsync_tree(self.directory)

    def close(self) -> None:
        self._manager.close()
