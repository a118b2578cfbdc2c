"""A bucket of its own for each test, on a real server behind a proxy that can fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from object_store import CREDENTIALS, S3, Server

from lazyckpt import waits


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    pytest.importorskip("obstore")
    pytest.importorskip("moto")
    server = Server()
    yield server
    server.close()


@pytest.fixture
def s3(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    monkeypatch.setattr(waits, "STORE_SILENCE_S", 120.0)  # a test holds requests as long as it needs
    monkeypatch.setattr(waits, "STORE_RETRIES_S", 120.0)
    monkeypatch.setattr(waits, "MIRROR_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(waits, "MIRROR_LONGEST_PAUSE_S", 0.2)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with server.bucket() as bucket:
        monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.proxy.endpoint)
        yield bucket
