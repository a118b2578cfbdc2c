"""Several processes with a gloo group, which run one function after the other: to start them takes seconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

_TIMEOUT_S = 120.0


class Failed(AssertionError):
    """What went wrong on which rank."""


class Ranks:
    """``run`` calls a function of a test module on every rank: ``function(rank, *args)``. It may use torch.distributed,
    whose default group is gloo."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world_size, port, sys.path), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = _TIMEOUT_S) -> list[Any]:
        """Returns what the function returned, by rank. Raises Failed if it raised anywhere, or if a process died."""
        self.start(function, *args)
        return self.results(timeout_s)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        for pipe in self._pipes:
            pipe.send((function, args))

    def results(self, timeout_s: float = _TIMEOUT_S, *, ranks: Iterator[int] | list[int] | None = None) -> list[Any]:
        """Returns the results of ``ranks``, all by default."""
        answers = []
        problems = []
        for rank in range(self.world_size) if ranks is None else ranks:
            try:
                if not self._pipes[rank].poll(timeout_s):
                    problems.append(f"rank {rank} did not answer within {timeout_s:g} s")
                    continue
                answer, problem = self._pipes[rank].recv()
            except (EOFError, ConnectionResetError):
                self.processes[rank].join(5)
                problems.append(f"rank {rank} died with {self.processes[rank].exitcode}")
                continue
            answers.append(answer)
            if problem is not None:
                problems.append(f"rank {rank}:\n{problem}")
        if problems:
            raise Failed("\n".join(problems))
        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(pipe: Connection, rank: int, world_size: int, port: int, path: list[str]) -> None:
    sys.path[:] = path
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank)
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    while (task := pipe.recv()) is not None:
        function, args = task
        try:
            pipe.send((function(rank, *args), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
    with contextlib.suppress(Exception):  # a rank may be dead
        dist.destroy_process_group()
