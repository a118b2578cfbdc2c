"""Fixtures of the tests that start ranks as processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.process import BaseProcess

import pytest
from torch.distributed import TCPStore

from ranks.jobs import Job


@pytest.fixture
def job_store() -> TCPStore:
    """The store of a job, in this process, as torchrun has it in its agent."""
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)


@pytest.fixture
def start() -> Iterator[Callable[[Job], list[BaseProcess]]]:
    """A function that starts the ranks of a job. They are killed at the end."""
    started: list[BaseProcess] = []

    def begin(job: Job) -> list[BaseProcess]:
        started.extend(ranks := job.start())
        return ranks

    yield begin
    for process in started:
        process.kill()
        process.join()
