"""Trainers' large files are loaded and verified by lazyckpt, all others as ever (integrations/loads.py)."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counted_reads import counted_reads

import lazyckpt
from lazyckpt.integrations.loads import loading_together

STATE = {"exp_avg": torch.arange(50_000.0), "step": torch.tensor(3.0)}


class Custom:
    def __init__(self) -> None:
        self.values = torch.ones(50_000)


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def loaded(path: Any, **arguments: Any) -> tuple[Any, int]:
    """What ``load`` returns, and how many bytes lazyckpt has read."""
    namespace = SimpleNamespace(load=torch.load)
    with counted_reads(least_bytes=50_000) as reads, loading_together(namespace, 20.0):
        found = namespace.load(path, **arguments)
    assert namespace.load is torch.load
    return found, reads.nbytes


def test_a_flipped_bit_in_a_large_file_is_found(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "optimizer.bin")
    found, read = loaded(tmp_path / "optimizer.bin", map_location=torch.device("cpu"), weights_only=True)
    assert torch.equal(found["exp_avg"], STATE["exp_avg"]) and read == 200_004
    damaged(tmp_path / "optimizer.bin")
    with pytest.raises(lazyckpt.CorruptFileError, match=r"optimizer\.bin: checksum does not match"):
        loaded(tmp_path / "optimizer.bin")


@pytest.mark.parametrize("what", ["small", "open", "mmap", "unlisted"])
def test_what_only_torch_loads_is_torchs(tmp_path: Path, what: str) -> None:
    path = tmp_path / "a.bin"
    torch.save({"small": {"x": 1}, "unlisted": Custom()}.get(what, STATE), path)
    if what == "unlisted":
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            loaded(path, weights_only=True)
        with torch.serialization.safe_globals([Custom]):
            assert loaded(path)[0].values.sum() == 50_000
    elif what == "open":
        with open(path, "rb") as file:
            assert loaded(file)[1] == 0
    else:
        assert loaded(path, **{"mmap": True} if what == "mmap" else {})[1] == 0


def test_another_thread_loads_by_itself(tmp_path: Path) -> None:
    """It would keep the other ranks waiting, which do not load what it loads."""
    torch.save(STATE, tmp_path / "a.bin")
    namespace, found = SimpleNamespace(load=torch.load), []
    with counted_reads(least_bytes=50_000) as reads, loading_together(namespace, 20.0):
        thread = threading.Thread(target=lambda: found.append(namespace.load(tmp_path / "a.bin")))
        thread.start()
        thread.join()
    assert torch.equal(found[0]["exp_avg"], STATE["exp_avg"]) and reads.nbytes == 0
