"""A disk that is slow, held back or broken, for saves of single files."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lazyckpt.pipeline import request
from lazyckpt.storage import commit
from trainers import SLOW_S, FileDisk


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
