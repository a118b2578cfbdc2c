"""The ranks of a job, as processes that are started once and run many cases.

    def case(path: str) -> int:          # a function of a test file; all ranks call it, in a gloo group
        return dist.get_rank()

    def test_it(ranks: Ranks, tmp_path: Path) -> None:
        assert ranks.run(2, case, str(tmp_path)) == [0, 1]

Importing torch takes seconds in each process, a new group milliseconds. So processes are forked from a server that has
imported it, and each case gets a group of its own, of as many ranks as it asks for. Arguments and results are pickled.
A rank may die in a case: its result is ``Died``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

# With what a rank would import itself, which takes seconds.
FORKS = multiprocessing.get_context("forkserver")
_TORCH = ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp")
FORKS.set_forkserver_preload([*_TORCH, "lazyckpt.checkpointer", "lazyckpt.reading.sharded.restore"])

_START_S = 60.0
# Groups that torch 2.6 had better not free: it holds the GIL, and waits for a thread that may need the GIL to free the
# tensors of the last collective.
_kept: list[Any] = []


class Died(NamedTuple):
    """The result of a rank whose process ended."""

    exit_code: int | None


class RankError(AssertionError):
    """A case raised on some rank, or took too long."""


class _Raised(NamedTuple):
    trace: str


class Ranks:
    """The processes. The first ``run`` with so many ranks starts those that are missing, or that died."""

    def __init__(self) -> None:
        self._members: dict[int, tuple[Any, Connection]] = {}

    def run(self, world: int, case: Callable[..., Any], *args: Any, timeout_s: float = 90.0) -> list[Any]:
        """Calls ``case(*args)`` on ``world`` ranks; returns what they return. Raises RankError."""
        for rank in range(world):
            self._start(rank)
        results: dict[int, Any] = {}
        with tempfile.TemporaryDirectory() as folder:
            waiting = {}
            for rank in range(world):
                process, pipe = self._members[rank]
                pipe.send((rank, world, f"{folder}/port", case.__code__.co_filename, case.__qualname__, args))
                waiting[pipe] = rank
                waiting[process.sentinel] = rank
            end = time.monotonic() + timeout_s
            while len(results) < world:
                ready = wait([key for key, rank in waiting.items() if rank not in results], end - time.monotonic())
                if not ready:
                    stuck = [rank for rank in range(world) if rank not in results]
                    self.close()
                    raise RankError(f"{case.__name__}: ranks {stuck} did not end in {timeout_s} s; others: {results}")
                for rank in {waiting[key] for key in ready}:
                    _, pipe = self._members[rank]
                    try:
                        results[rank] = pipe.recv() if pipe.poll() else self._died(rank)
                    except (EOFError, ConnectionResetError):
                        results[rank] = self._died(rank)
        raised = {rank: result.trace for rank, result in results.items() if isinstance(result, _Raised)}
        if raised:
            raise RankError("\n".join(f"{case.__name__} on rank {rank}: {trace}" for rank, trace in raised.items()))
        return [results[rank] for rank in range(world)]

    def close(self) -> None:
        for process, pipe in self._members.values():
            pipe.close()
            process.kill()
            process.join()
        self._members.clear()

    def _start(self, rank: int) -> None:
        if rank not in self._members:
            ours, theirs = FORKS.Pipe()
            process = FORKS.Process(target=_serve, args=(theirs,))  # no daemon: it may have children
            process.start()
            theirs.close()
            self._members[rank] = process, ours

    def _died(self, rank: int) -> Died:
        process, pipe = self._members.pop(rank)
        process.join(_START_S)
        pipe.close()
        return Died(process.exitcode)


def _serve(pipe: Connection) -> None:
    """Runs cases until the other end of the pipe is closed."""
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            *job, file, name, args = pipe.recv()
            try:
                result = _run(*job, getattr(_module(file), name), args)
            except BaseException:  # torch's CheckpointException is one
                result = _Raised(traceback.format_exc())
            pipe.send(result)
            del result


def _run(rank: int, world: int, port: str, case: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Rank 0 serves the store, and leaves its port in the file ``port``."""
    import torch
    import torch.distributed as dist

    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        Path(f"{port}-new").write_text(str(store.port))
        os.rename(f"{port}-new", port)
    else:
        while not os.path.exists(port):
            time.sleep(0.002)
        store = dist.TCPStore("127.0.0.1", int(Path(port).read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        return case(*args)
    finally:
        if dist.is_initialized():  # a trainer may have ended it
            if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
                _kept.extend(dist.distributed_c10d._world.pg_map)
            dist.destroy_process_group()


@functools.cache
def _module(file: str) -> ModuleType:
    """The test file, which is in no package."""
    name = f"cases_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spawn(output: Path, function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """Replaces ``torch.multiprocessing.spawn`` by forks of the server. What they print goes to the file ``output``."""
    import torch.multiprocessing

    told = (str(output), function, args)
    torch.multiprocessing.start_processes(_printing, told, nprocs=nprocs, start_method="forkserver")


def _printing(rank: int, output: str, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    function(rank, *args)
    sys.stdout.flush()


def run_module(rank: int, module: str, arguments: list[str]) -> None:
    """What ``python -m module`` runs; for ``spawn``."""
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def die() -> None:
    """Ends this rank as a lost machine does."""
    os._exit(9)
