"""Loads of sharded folders from a store, where each request takes a while."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from counted_requests import Requests

import lazyckpt

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
    assert len(requests.asked) <= TENSORS + 10
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
    assert len(requests.asked) < 10
