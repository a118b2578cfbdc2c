"""Fixtures of the tests that start ranks as processes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.process import BaseProcess

import pytest
from torch.distributed import TCPStore


@pytest.fixture
def job_store() -> TCPStore:
    """The store of a job, in this process, as torchrun has it in its agent."""
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)


@pytest.fixture
def killed_at_the_end() -> Iterator[list[BaseProcess]]:
    """A list for processes that the test starts."""
    started: list[BaseProcess] = []
    yield started
    for process in started:
        process.kill()
        process.join()
