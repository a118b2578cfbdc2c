"""A job whose ranks are processes, and the store through which they meet. Each rank logs what happens to it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from processes import FORKS
from torch.distributed import PrefixStore, TCPStore


@dataclass(frozen=True)
class Job:
    """One attempt of a job. A subclass says what its ranks do."""

    folder: Path
    logs: Path
    world_size: int
    port: int | None = field(default=None, kw_only=True)  # of the store; None: rank 0 serves it
    attempt: str = field(default="attempt-0", kw_only=True)  # as torchrun counts restarts

    def run(self, rank: int) -> None:
        """What a rank does, in its own process."""
        raise NotImplementedError

    def start(self) -> list[BaseProcess]:
        """Starts all ranks."""
        self.logs.mkdir(exist_ok=True)
        ranks: list[BaseProcess] = [FORKS.Process(target=self.run, args=(rank,)) for rank in range(self.world_size)]
        for process in ranks:
            process.start()
        return ranks

    def log(self, rank: int) -> Path:
        return self.logs / f"{self.attempt}-{rank}"

    def lines(self, rank: int) -> list[str]:
        """What a rank has logged."""
        log = self.log(rank)
        return log.read_text().splitlines() if log.exists() else []

    def store(self, rank: int, patience_s: float = 60.0) -> Any:
        """Connects this rank to the store."""
        patience = timedelta(seconds=patience_s)
        file = self.logs / f"{self.attempt}-port"
        port = self.port
        if port is None and rank == 0:
            store = TCPStore("127.0.0.1", 0, None, True, patience, wait_for_workers=False)
            file.with_suffix(".new").write_text(str(store.port))
            os.rename(file.with_suffix(".new"), file)
        else:
            if port is None:
                wait_until(file.exists)
                port = int(file.read_text())
            store = TCPStore("127.0.0.1", port, None, False, patience, wait_for_workers=False)
        return PrefixStore(self.attempt, store)


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.005)
