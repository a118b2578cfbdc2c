"""Starts the ranks of a job on this machine, and lets them agree on what they measured."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.paired import ArmFailed, Progress, reason

HOST = "127.0.0.1"
TIMEOUT = timedelta(minutes=5)  # of a collective: a rank that waits longer has lost another
LOOK_S = 0.2
Task = TypeVar("Task")
Result = TypeVar("Result")


class Member:
    """One rank among `size`.

    The ranks agree over a process group of their own, which no engine uses. Every rank calls the same methods in the
    same order. The processor cores are divided among the ranks.
    """

    def __init__(self, rank: int, size: int, tell: Progress) -> None:
        self.rank = rank
        self.size = size
        self.tell: Progress = tell if rank == 0 else lambda text: None
        torch.set_num_threads(cores(size))
        dist.init_process_group("gloo", timeout=TIMEOUT)
        self._group: Any = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def barrier(self) -> None:
        dist.barrier(self._group)

    def gather(self, value: Result) -> list[Result]:
        """The values of all ranks, on every rank."""
        values: list[Result | None] = [None] * self.size
        dist.all_gather_object(values, value, self._group)
        return cast("list[Result]", values)

    def together(self, call: Callable[[], Result]) -> Result:
        """Calls on every rank at once. If one fails, raises ArmFailed on all, with the reason of the first that did."""
        self.barrier()
        failure = ""
        try:
            result = call()
        except Exception as error:
            failure = reason(error)
        if failures := [f"{told} (rank {rank})" for rank, told in enumerate(self.gather(failure)) if told]:
            raise ArmFailed(failures[0])
        return result


def cores(ranks: int) -> int:
    """How many cores each of `ranks` has for itself."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def run_ranks(work: Callable[[Member, Task], Result], ranks: int, task: Task, progress: Progress) -> Result:
    """Runs `work` on every rank, in processes of their own; returns what it returns on rank 0.

    If a rank fails, the others are ended. Raises ProcessRaisedException or ProcessExitedException, with the reason.
    """
    # Not on rank 0, as under torchrun: the store outlives every rank.
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    messages: SimpleQueue[Any] = mp.get_context("spawn").SimpleQueue()
    running = mp.start_processes(_main, (work, ranks, store.port, task, messages), ranks, join=False)
    results = []
    ended = False
    while not ended:
        ended = running.join(timeout=LOOK_S)
        while not messages.empty():
            kind, content = messages.get()
            if kind == "result":
                results.append(content)
            else:
                progress(content)
    return cast(Result, results[0])


def _main(rank: int, work: Callable[[Member, Any], Any], ranks: int, port: int, task: Any, messages: Any) -> None:
    os.environ |= {
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 joins the store, too, instead of serving it
    }
    result = work(Member(rank, ranks, lambda text: messages.put(("progress", text))), task)
    if rank == 0:
        messages.put(("result", result))
    dist.barrier()
    dist.destroy_process_group()
