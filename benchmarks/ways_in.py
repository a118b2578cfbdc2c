"""The same state by other ways in than `Checkpointer.save`: how long each keeps the training thread."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.latency import TIMEOUT_S
from benchmarks.paired import ArmFailed, interleaved

CHECKPOINTER = "Checkpointer.save"
DICT = "Saver.save of a new dict"  # as Lightning does
FOLDER = "a staged folder"  # as transformers and Accelerate do
DCP = "LazyStorageWriter.stage"  # inside dcp.async_save
WAYS = (CHECKPOINTER, DICT, FOLDER, DCP)


class Ways:
    """Saves one state in every way. Each asks the model and the optimizer for their `state_dict()`."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
        self._model, self._optimizer, self._directory = model, optimizer, directory
        self._planner: Any = None  # of DCP
        self._saves = 0

    def measure(self, rounds: int, step: Callable[[], None]) -> dict[str, list[float]]:
        """The ways take turns, each after a `step` of its own; milliseconds."""
        import lazyckpt

        with ExitStack() as stack:
            checkpointer = stack.enter_context(lazyckpt.Checkpointer(self._directory / "checkpoints", keep_last=1))
            checkpointer.track(model=self._model, optimizer=self._optimizer)
            savers = [stack.enter_context(lazyckpt.Saver()) for _ in WAYS[1:]]
            stack.enter_context(_alone_in_a_group())
            arms = {
                CHECKPOINTER: lambda: self._timed(lambda: checkpointer.save(self._saves)),
                DICT: lambda: self._timed(lambda: savers[0].save(self._state(), self._directory / "saved.ckpt")),
                FOLDER: lambda: self._timed(lambda: self._folder(savers[1])),
                DCP: lambda: self._dcp(savers[2]),
            }
            times, failures = interleaved(arms, rounds, lambda text: None, prepare=step)
        if failures:
            raise ArmFailed("; ".join(failures.values()))
        return times

    def _state(self) -> dict[str, Any]:
        return {"state_dict": self._model.state_dict(), "optimizer_states": [self._optimizer.state_dict()]}

    def _timed(self, save: Callable[[], Any]) -> float:
        self._saves += 1
        begin = time.perf_counter()
        handle = save()
        wall = 1e3 * (time.perf_counter() - begin)
        handle.result(timeout=TIMEOUT_S)
        return wall

    def _folder(self, saver: Any) -> Any:
        with saver.stage(self._directory / "folder") as staged:
            staged.add("model.safetensors", self._model.state_dict(), {"format": "pt"})
            staged.add("optimizer.bin", self._optimizer.state_dict())
            return staged.save()

    def _dcp(self, saver: Any) -> float:
        """`dcp.async_save`, of which torch's own part is not counted."""
        from lazyckpt.integrations.dcp import LazySavePlanner, LazyStorageWriter

        self._planner = self._planner or LazySavePlanner()
        begin = time.perf_counter()
        state = self._state()
        wall = time.perf_counter() - begin

        class Timed(LazyStorageWriter):
            def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
                nonlocal wall
                begin = time.perf_counter()
                staged = super().stage(state_dict)
                wall += time.perf_counter() - begin
                return staged

        folder = self._directory / "dcp"
        dcp.async_save(state, storage_writer=Timed(folder, saver=saver), planner=self._planner).result()
        shutil.rmtree(folder)
        return 1e3 * wall


@contextmanager
def _alone_in_a_group() -> Iterator[None]:
    """DCP saves in the background only where there is a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
