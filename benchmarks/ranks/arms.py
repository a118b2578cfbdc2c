"""Engines that save a sharded state, each on every rank into one folder that all ranks share."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from benchmarks.arms import KINDS, Arm, ArmKind
from benchmarks.arms.floor import FloorArm
from benchmarks.arms.lazy import LazyCkpt
from benchmarks.ranks.phases import Phase
from benchmarks.ranks.sharded import phases_of
from benchmarks.workload import Training


class FloorOfRanks(FloorArm):
    """Each rank writes its own file; no rank commits."""

    def path(self, step: int) -> Path:
        return super().path(step).with_suffix(f".{dist.get_rank()}")


class LazyCkptOfRanks(LazyCkpt):
    """A Checkpointer on every rank."""

    def __init__(self, training: Training, directory: Path, **knobs: Any) -> None:
        super().__init__(training, directory, **knobs)
        self._begun: list[float] = []

    def save(self, step: int) -> None:
        self._begun.append(time.perf_counter())
        super().save(step)

    def drain(self) -> None:
        super().drain()
        phases = phases_of(self.training)
        for begun, metrics in zip(self._begun, self.metrics, strict=True):
            phases.add(Phase(metrics.plan_s, begun + metrics.synced_s, begun + metrics.durable_s))
            phases.eager.append(metrics.eager_bytes / metrics.bytes)
        self._begun.clear()
        self.metrics.clear()


class LazyDcp(Arm):
    """`dcp.save`, as a user would call it."""

    def __init__(self, training: Training, directory: Path) -> None:
        super().__init__(training, directory)
        from lazyckpt.integrations.dcp import LazySavePlanner, LazyStorageWriter

        self._writer, self._planner = LazyStorageWriter, LazySavePlanner()

    def save(self, step: int) -> None:
        save(self.training.state(), storage_writer=self._writer(self.path(step)), planner=self._planner)


class LazyDcpAsync(LazyDcp):
    """`dcp.async_save`; the optimizer waits by itself."""

    def __init__(self, training: Training, directory: Path) -> None:
        super().__init__(training, directory)
        import lazyckpt

        self._group = dist.new_group(backend="gloo")
        self._saver = lazyckpt.Saver()
        self._pending: Any = None
        self._metrics: list[Any] = []

    def save(self, step: int) -> None:
        self._wait()
        writer = self._writer(self.path(step), saver=self._saver)
        state = self.training.state()
        self._pending = async_save(state, storage_writer=writer, planner=self._planner, process_group=self._group)
        self._metrics += [handle.metrics for handle in self._saver.pending()]

    def drain(self) -> None:
        self._wait()
        phases_of(self.training).eager += [metrics.eager_bytes / metrics.bytes for metrics in self._metrics]
        self._metrics.clear()

    def close(self) -> None:
        self._saver.close()

    def _wait(self) -> None:
        """One after the other: two saves would use one process group at once."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None


ARMS = {
    kind.name: kind
    for kind in [
        ArmKind("floor", partial(FloorOfRanks, ring=1.0)),
        ArmKind("lazyckpt", partial(LazyCkptOfRanks, ring=1.0), "lazyckpt"),
        ArmKind("lazyckpt-dcp", LazyDcp, "lazyckpt"),
        ArmKind("lazyckpt-dcp-async", LazyDcpAsync, "lazyckpt"),
        *(KINDS[name] for name in ("dcp", "dcp-async-thread", "dcp-async-process")),
        *(KINDS[name] for name in ("torchsnapshot", "torch_checkpointing")),
    ]
}

ALONE = ("floor", "lazyckpt")  # whose save() waits for no other rank


def make(kind: ArmKind, training: Training, directory: Path) -> Arm:
    """An arm in a folder of its name below `directory`, which all ranks share."""
    own = directory / kind.name
    own.mkdir(parents=True, exist_ok=True)
    return kind.make(training, own)
