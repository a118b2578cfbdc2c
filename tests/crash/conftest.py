from __future__ import annotations

from collections.abc import Iterator

import pytest

from crash.actor import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Importing torch takes longer than all the trials of a test together: one process forks those of all."""
    server = Server()
    yield server
    server.close()
