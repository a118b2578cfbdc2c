"""A bucket of its own for each test, on a real server behind a proxy that can fail; and other kinds of places."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import fsspec
import pytest
from file_server import Files, Folders, FTPServer, InMemory, Objects
from hub_server import TOKEN, HubServer
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


@pytest.fixture
def ftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FTPServer]:
    pytest.importorskip("pyftpdlib")
    server = FTPServer(tmp_path_factory.mktemp("ftp"))
    yield server
    server.close()


@pytest.fixture
def ftp_place(ftp: FTPServer, monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setitem(fsspec.config.conf, "ftp", ftp.login)  # as FSSPEC_FTP_USERNAME and so on do
    return Files(ftp.base, ftp.root)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub._commit_api.is_xet_available", lambda: False)  # it has a server of its own
    monkeypatch.setattr(waits, "MIRROR_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(waits, "MIRROR_LONGEST_PAUSE_S", 0.2)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # tests of the Trainer set it, and constants remember it
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    server = HubServer()
    yield server
    server.close()


@pytest.fixture(params=["s3", "ftp", "folders", "objects"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> S3 | Files | InMemory:
    """An empty place of each kind."""
    monkeypatch.setattr(waits, "MIRROR_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(waits, "MIRROR_LONGEST_PAUSE_S", 0.2)
    if request.param in ("s3", "ftp"):
        found: S3 | Files = request.getfixturevalue({"s3": "s3", "ftp": "ftp_place"}[request.param])
        return found
    if request.param == "objects":
        fsspec.register_implementation("objects", Objects, clobber=True)
        return InMemory(f"objects://{uuid.uuid4().hex}")
    fsspec.register_implementation("folders", Folders, clobber=True)
    root = tmp_path_factory.mktemp("folders")
    Folders.roots[root.name] = root
    return Files(f"folders://{root.name}", root)
