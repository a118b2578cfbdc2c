"""Measures the commit of a checkpoint without data by real ranks, processes of this machine, and prints it as a table.

    python -m benchmarks.ranks_commit [RANKS …]

A commit is everything that several ranks add: the staged folder, the votes, the renames, the outcome, the deleted keys.
The folder is on /dev/shm, so that no disk counts.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from pathlib import Path

from torch.distributed import TCPStore

from lazyckpt.ranks.group import RankGroup, join
from lazyckpt.storage import removal
from lazyckpt.storage.manifest import folder_name

SAVES = 100
RECEIPT = b"r" * 200


def commit(group: RankGroup, number: int) -> None:
    """One save of no file."""
    target = group.directory / folder_name(number % 3)
    ballot = group.ballot(number, number, "layout", target)
    if group.rank > 0:
        ballot.staged_name()
        ballot.vote(RECEIPT)
        ballot.outcome()
        return
    staging = group.stage(target)
    ballot.begin(staging.path.name)
    ballot.vote(RECEIPT)
    ballot.receipts()
    staging.describe(None, [])
    ballot.decide()
    if (replaced := staging.publish()) is not None:
        removal.remove(replaced)


def rank(number: int, world_size: int, port: int, folder: Path, told: SimpleQueue[tuple[float, float]]) -> None:
    store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    group = join(store, number, world_size, folder, timeout_s=60)
    exchanges, commits = [], []
    for save in range(1, SAVES + 1):
        begin = time.perf_counter()
        group.exchange("the start", b"")
        middle = time.perf_counter()
        commit(group, save)
        commits.append(time.perf_counter() - middle)
        exchanges.append(middle - begin)
    told.put((statistics.median(commits) * 1e3, statistics.median(exchanges) * 1e3))
    group.close()


def measure(world_size: int) -> tuple[float, float]:
    """The medians of a commit and of an exchange in milliseconds, on the slowest rank."""
    processes = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    told = processes.SimpleQueue()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        ranks = [
            processes.Process(target=rank, args=(number, world_size, store.port, Path(folder), told))
            for number in range(world_size)
        ]
        for process in ranks:
            process.start()
        found = [told.get() for _ in ranks]
        for process in ranks:
            process.join()
    return max(commit for commit, _ in found), max(exchange for _, exchange in found)


if __name__ == "__main__":
    print("| ranks | commit, ms | exchange, ms |\n|--:|--:|--:|")
    for size in map(int, sys.argv[1:] or (2, 4)):
        print("| {} | {:.1f} | {:.1f} |".format(size, *measure(size)))
