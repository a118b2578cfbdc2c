"""Ranks as processes. They save checkpoints of plain files, as the pipeline would, and log what the saves came to."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from processes import FORKS
from torch.distributed import PrefixStore, TCPStore

from lazyckpt.errors import RankError
from lazyckpt.ranks.group import RankGroup, join
from lazyckpt.storage import removal
from lazyckpt.storage.manifest import folder_name

STEPS = 3  # a run saves these again and again


@dataclass(frozen=True)
class Orders:
    """What the ranks of a job do."""

    folder: Path
    logs: Path
    world_size: int
    saves: int
    timeout_s: float = 1.5
    port: int | None = None  # of the store; None: rank 0 serves it
    attempt: str = "attempt-0"  # as torchrun counts restarts
    linger: bool = True  # False: ends as soon as the last save is settled, without close()


def start(orders: Orders) -> list[BaseProcess]:
    """Starts all ranks."""
    orders.logs.mkdir(exist_ok=True)
    ranks: list[BaseProcess] = [FORKS.Process(target=_run, args=(rank, orders)) for rank in range(orders.world_size)]
    for process in ranks:
        process.start()
    return ranks


def told(orders: Orders, rank: int) -> list[str]:
    """The lines that a rank has logged."""
    log = orders.logs / f"{orders.attempt}-{rank}"
    return log.read_text().splitlines() if log.exists() else []


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.005)


def _run(rank: int, orders: Orders) -> None:
    with open(orders.logs / f"{orders.attempt}-{rank}", "x", buffering=1) as log:
        os.dup2(os.open(orders.logs / f"{orders.attempt}-{rank}.err", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
        group = join(_store(rank, orders), rank, orders.world_size, orders.folder, orders.timeout_s)
        print("joined", file=log)
        for ordinal in range(1, orders.saves + 1):
            try:
                save(group, ordinal, ordinal % STEPS)
                print(f"{ordinal} committed", file=log)
            except RankError as error:
                print(f"{ordinal} aborted {error}", file=log)
                break
        if orders.linger:
            group.close()
        print("closed", file=log)
    os._exit(0)


def _store(rank: int, orders: Orders) -> Any:
    patience = timedelta(seconds=60)
    port = orders.port
    if port is None and rank == 0:
        store = TCPStore("127.0.0.1", 0, None, True, patience, wait_for_workers=False)
        (orders.logs / "port.tmp").write_text(str(store.port))
        os.rename(orders.logs / "port.tmp", orders.logs / "port")
    else:
        if port is None:
            wait_until((orders.logs / "port").exists)
            port = int((orders.logs / "port").read_text())
        store = TCPStore("127.0.0.1", port, None, False, patience, wait_for_workers=False)
    return PrefixStore(orders.attempt, store)


def save(group: RankGroup, ordinal: int, step: int) -> None:
    """One save, as the pipeline does it. Raises RankError."""
    target = group.directory / folder_name(step)
    ballot = group.ballot(ordinal, step, "layout", target)
    group.reach(ordinal)
    name = f"rank-{group.rank}"
    try:
        if group.rank == 0:
            staging = group.stage(target)
            ballot.begin(staging.path.name)
        else:
            staging = group.attach(target, ballot.staged_name()[0])
        with open(staging.path / name, "x") as file:
            file.write(f"{step} {ordinal} {group.generation} {group.world_size}\n" * 500)
            file.flush()
            os.fsync(file.fileno())
        if group.rank > 0:
            staging.describe(None, [name])
        ballot.vote(name.encode())
        if group.rank > 0:
            ballot.outcome()
            return
        names = [receipt.decode() for receipt in ballot.receipts()]
        (staging.path / "names").write_text(" ".join(names))
        staging.describe(None, names)
        ballot.decide()
        replaced = staging.publish()
        if replaced is not None:
            removal.remove(replaced)
    except OSError as error:
        if (refused := ballot.refuse(f"{error.strerror} ({error.filename})")) is not None:
            raise refused from error
