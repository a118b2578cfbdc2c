"""Loads of sharded folders from a store, where each request takes a while."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from counted_requests import Requests

import lazyckpt
from lazyckpt.reading.sharded.folder import ShardedFolder
from lazyckpt.reading.sharded.metadata import Stamps
from lazyckpt.stores.store import StorePath

TENSORS = 100
WORDS = 100 << 10


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_ends_of_items_come_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch wrote them, so their headers are not known before."""
    state = {f"w{n}": torch.full((WORDS,), float(n)) for n in range(TENSORS)}
    dcp.save(state, checkpoint_id=str(tmp_path / "step"), no_dist=True)
    requests = Requests("memory://sharded", monkeypatch)
    for file in (tmp_path / "step").iterdir():
        requests.store.write(f"step/{file.name}", [file.read_bytes()], file.stat().st_size)
    found = lazyckpt.load("memory://sharded/step")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert TENSORS // 2 < len(requests.asked) <= TENSORS + 10
    assert sum(end - begin for begin, end in requests.asked) < TENSORS * (20 << 10)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_file_is_opened_once_for_all_its_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"lr{n}": {"value": n} for n in range(TENSORS)}
    dcp.save(state, checkpoint_id=str(tmp_path / "step"), no_dist=True)
    requests = Requests("memory://objects", monkeypatch)
    requests.several.set()
    for file in (tmp_path / "step").iterdir():
        requests.store.write(f"step/{file.name}", [file.read_bytes()], file.stat().st_size)
    assert lazyckpt.load("memory://objects/step") == state
    assert 0 < len(requests.asked) < 10


def test_no_more_is_kept_of_many_files_than_of_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each file is looked at before any byte lands."""
    monkeypatch.setattr(Stamps, "check", lambda self, file: file.read(0, 4))
    requests = Requests("memory://files", monkeypatch)
    requests.several.set()
    for name in "abc":
        requests.store.write(f"step/{name}", [bytes(1000)], 1000)
    folder = ShardedFolder.__new__(ShardedFolder)
    folder.path, folder.stamps = StorePath(requests.store, "step"), Stamps.__new__(Stamps)
    folder._objects, folder._last = {}, None
    for name in "abca":
        with folder.open(name) as file:
            file.read(0, 100)
    assert [len(file._object._kept) for file in folder._objects.values() if file._object] == [1, 0, 0]
    assert len(requests.asked) == 7
