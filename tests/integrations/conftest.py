"""Disks that are slow, held back, full or broken, and a fresh accelerate."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mirrored_places import place
from object_fixtures import hub, s3, server
from processes import Ranks

from lazyckpt.pipeline import background, request
from lazyckpt.storage import commit
from trainers import SLOW_S, FileDisk, FolderDisk, forget_accelerators

__all__ = ["hub", "place", "s3", "server"]  # fixtures of all tests with a bucket

# Single files


@pytest.fixture
def file_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileDisk]:
    disk = FileDisk()
    FileStaging, publish_file = request.FileStaging, commit.publish_file

    def staging(target: Path) -> commit.FileStaging:
        time.sleep(disk.late_s)
        assert disk.free.wait(30)
        return FileStaging(target)

    def publish(temporary: Path, target: Path) -> None:
        if any(word in target.name for word in disk.broken):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        publish_file(temporary, target)

    monkeypatch.setattr(request, "FileStaging", staging)  # by the name that a save uses
    monkeypatch.setattr(commit, "publish_file", publish)
    yield disk
    disk.free.set()


@pytest.fixture
def slow_disk(file_disk: FileDisk) -> None:
    file_disk.late_s = SLOW_S


@pytest.fixture
def held_disk(file_disk: FileDisk) -> threading.Event:
    """A disk that opens no file until the event is set."""
    file_disk.free.clear()
    return file_disk.free


@pytest.fixture
def broken_disk(file_disk: FileDisk) -> list[str]:
    return file_disk.broken


# Folders


@pytest.fixture
def folder_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[FolderDisk]:
    """Holds saves back before their files are made: what does not fit into the ring stays uncopied."""
    disk = FolderDisk()
    persist, publish = background.Background._persist, commit.Staging.publish

    def held_persist(self: Any, flight: Any) -> None:
        assert disk.free.wait(60), "a test forgot to release the disk"
        persist(self, flight)

    def slow_publish(self: commit.Staging) -> Any:
        time.sleep(disk.publish_s)
        if self.target.name in disk.fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        disk.existed.append(self.target.exists())
        result = publish(self)
        disk.published.append(self.target.name)
        return result

    monkeypatch.setattr(background.Background, "_persist", held_persist)
    monkeypatch.setattr(commit.Staging, "publish", slow_publish)
    yield disk
    disk.free.set()


@pytest.fixture
def slow_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder gets its name a while after its bytes are there."""
    publish = commit.Staging.publish

    def late(self: commit.Staging) -> Path | None:
        time.sleep(0.1)
        return publish(self)

    monkeypatch.setattr(commit.Staging, "publish", late)


@pytest.fixture
def fresh_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate keeps its state for the whole process; and this machine's settings are no part of a test."""
    monkeypatch.setattr("accelerate.commands.config.config_args.cache_dir", str(tmp_path / "no settings here"))
    for name in list(os.environ):
        if name.startswith("LAZYCKPT_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    yield
    forget_accelerators()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Appending to it fills the disk for saves that are published later."""
    full: list[bool] = []
    publish = commit.Staging.publish

    def fail(self: commit.Staging) -> Path | None:
        if full:
            raise OSError(28, "No space left on device")
        return publish(self)

    monkeypatch.setattr(commit.Staging, "publish", fail)
    return full


# DeepSpeed


@pytest.fixture(scope="session")
def deepspeed_ranks() -> Iterator[Ranks]:
    """Ranks of their own: DeepSpeed stays on the path of a process that has imported it (deepspeed_training.py)."""
    if not os.path.isdir(os.path.join(sys.prefix, "deepspeed")):
        pytest.skip("make setup has not installed DeepSpeed")
    ranks = Ranks()
    yield ranks
    ranks.close()
