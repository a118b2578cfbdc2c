"""``lazyckpt bench``: its figures are consistent, and it removes its files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import lazyckpt
from commands import fails, run, run_json
from lazyckpt import functional, waits
from lazyckpt.config import MIB
from lazyckpt.storage import folders
from lazyckpt.tools import bench


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_MIN_BYTES", 16 * MIB)
    monkeypatch.setattr(bench, "_MAX_BYTES", 16 * MIB)
    monkeypatch.setattr(waits, "BENCH_LAST_ROUND_S", 1000.0)


def test_bench_measures_and_tells_what_to_expect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = run_json("bench", tmp_path)
    assert told["bytes"] == 16 * MIB
    assert list(told["bytes_per_s"]) == ["raw write", "lazyckpt.save", "raw read", "restore", "lazyckpt.load"]
    for rate in told["bytes_per_s"].values():
        assert len(rate["all"]) == bench._ROUNDS and sorted(rate["all"])[1] == rate["median"] > 0
    ten = told["expected"][1]
    assert ten.pop("bytes") == 10**10
    for key, way in {"durable_s": "lazyckpt.save", "restored_s": "restore", "loaded_s": "lazyckpt.load"}.items():
        assert ten[key] == pytest.approx(1e10 / told["bytes_per_s"][way]["median"])
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(waits, "BENCH_LAST_ROUND_S", 0.0)
    shown = run("bench", tmp_path).stdout
    assert "1 round of 16.0 MiB" in shown
    assert "a checkpoint of 10 GB: durable in " in shown and "lazyckpt.save" in shown


def test_a_restore_lands_in_the_tensors_that_are_there(tmp_path: Path) -> None:
    state = {"a": torch.arange(5000), "b": torch.ones(3000)}
    places = [tensor.data_ptr() for tensor in state.values()]
    lazyckpt.save(state, tmp_path / "saved.pt")
    for tensor in state.values():
        tensor.zero_()
    bench._restore(state, tmp_path / "saved.pt")
    assert torch.equal(state["a"], torch.arange(5000)) and torch.equal(state["b"], torch.ones(3000))
    assert [tensor.data_ptr() for tensor in state.values()] == places


def test_the_raw_loops_move_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file may end inside a chunk."""
    monkeypatch.setattr(bench, "_CHUNK_BYTES", 3 * 4096)
    raw = bench._Raw(True)
    seen: list[tuple[int, int]] = []
    raw.run(100 * 4096, lambda part, at: seen.append((at, at + len(part))) or len(part))
    assert [begin for begin, _ in sorted(seen)] == [0, *(end for _, end in sorted(seen))][:-1]
    assert max(end for _, end in seen) == 100 * 4096
    with pytest.raises(OSError, match="cut short"):
        raw.run(4096, lambda part, at: 1)
    raw.close()


def test_bench_refuses_what_it_cannot_do_and_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.pt").touch()
    for name in ("missing", "a.pt"):  # not a SaveError
        assert fails(2, "bench", tmp_path / name).startswith(f"error: {tmp_path / name}: not a folder")
    (tmp_path / "a.pt").unlink()

    class Full:
        f_bavail, f_frsize = 3, 4096

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: Full)
        what = "needs 64.0 MiB for a moment; 12.0 KiB are free"
        assert fails(2, "bench", tmp_path) == f"error: {tmp_path}: {what}"

    def break_off(*_: object) -> None:
        assert [name.startswith(folders.TEMPORARY) for name in os.listdir(tmp_path)] == [True]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(functional, "save", break_off)
        assert run("bench", tmp_path).exit_code != 0
    assert os.listdir(tmp_path) == []
