"""torch.distributed.checkpoint: `save` and `async_save`, both in their best case.

Plan caching, one writing thread per core, files synced. `async_save`: one stager with reused buffers, staging awaited
only before the step, the upload before the next save; pinned memory and copies that do not block, for state on a GPU.
Several ranks share the cores, and `async_save` has a process group of its own.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.arms.base import Arm
from benchmarks.workload import Training


class Dcp(Arm):
    def __init__(self, training: Training, directory: Path) -> None:
        super().__init__(training, directory)
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        _process_group()
        self._save = save
        self._writer = FileSystemWriter
        self._planner = DefaultSavePlanner(enable_plan_caching=True)
        self._threads = max(1, len(os.sched_getaffinity(0)) // dist.get_world_size())

    def writer(self, step: int) -> Any:
        return self._writer(self.path(step), thread_count=self._threads, sync_files=True)

    def save(self, step: int) -> None:
        self._save(self.training.state(), storage_writer=self.writer(step), planner=self._planner)

    def load(self, path: Path) -> None:
        from torch.distributed.checkpoint import load

        if not (path / ".metadata").exists():  # dcp.load would raise a BaseException
            raise FileNotFoundError(f"{path} is not whole")
        load(self.training.state(), checkpoint_id=path)  # in place


class DcpAsync(Dcp):
    """`process` writes from a child process over shared memory, otherwise from a thread."""

    def __init__(self, training: Training, directory: Path, *, process: bool) -> None:
        super().__init__(training, directory)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        self._async_save = async_save
        self._group = dist.new_group(backend="gloo")
        on_gpu = training.device.type == "cuda"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=process,
                use_async_staging=True,
                use_non_blocking_copy=on_gpu,
            )
        )
        keep_open(self._stager)
        self._kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        self._pending: Any = None

    def save(self, step: int) -> None:
        self.drain()
        self._pending = self._async_save(
            self.training.state(),
            storage_writer=self.writer(step),
            planner=self._planner,
            process_group=self._group,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )

    def before_step(self) -> None:
        if self._pending is not None:
            self._pending.staging_completion.result()

    def drain(self) -> None:
        if self._pending is not None:
            self._pending.upload_completion.result()
            self._pending = None

    def close(self) -> None:
        self._stager.close()


def keep_open(stager: Any) -> None:
    """Lets torch reuse a stager of ours. In torch 2.11, a stager closes its own cache after every save, and the second
    save fails with ``KeyError: <class 'type'>`` (pytorch#183413)."""
    if "_state_dict_stager.close()" in inspect.getsource(type(stager)._stage):
        stager._state_dict_stager.close = lambda: None


def _process_group() -> None:
    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # where the child process looks for its store
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
