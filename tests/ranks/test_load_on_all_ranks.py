"""All ranks load one file together: each gets what torch.load gives, and each byte is read once."""

from __future__ import annotations

import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from counted_reads import counted_reads
from processes import Died, Ranks, die

import lazyckpt
from lazyckpt.ranks.meeting import all_ranks_at
from lazyckpt.reading import together
from lazyckpt.reading.on_all_ranks import load_together
from ranks.test_together import flip, small_pieces, storages


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(1000, 100, generator=generator)
    return {
        "state_dict": OrderedDict(
            whole=whole,
            tied=whole,
            rows=whole[3:5],
            turned=whole.t(),
            half=torch.randn(70_001, generator=generator).bfloat16(),
            counts=torch.arange(30_000),
            empty=torch.empty(0, 3),
        ),
        "loops": [{"epoch": 3, "seen": torch.tensor(7)}],
        "step": 9,
    }


def nbytes_of(state: dict[str, Any]) -> int:
    found = state["state_dict"].values()
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}.values()) + 8


def to_itself(storage: Any, location: str) -> Any:
    return storage


def to_a_copy(storage: Any, location: str) -> Any:
    return storage.clone()


WAYS: dict[str, dict[str, Any]] = {
    "as saved": {},
    "to the host": {"map_location": "cpu"},
    "by a function": {"map_location": to_itself},
    "to a copy": {"map_location": to_a_copy},
    "unrestricted": {"weights_only": False},
    "a part": {"key": "state_dict.half"},
    "renamed": {"key": "state_dict", "rename": {"turned": "upright"}},
}


def loaded(path: Path, how: str = "as saved", way: str = "memory") -> Any:
    with small_pieces(way), counted_reads() as reads:
        return lazyckpt.load(path, **WAYS[how], all_ranks=True), reads.nbytes


@pytest.mark.parametrize(("world", "way"), [(2, "memory"), (4, "broadcasts")])
@pytest.mark.parametrize("how", list(WAYS))
def test_each_rank_gets_what_one_process_gets(
    ranks: Ranks, tmp_path: Path, graph: Any, how: str, world: int, way: str
) -> None:
    torch.save(state(), tmp_path / "a.pt")
    expected = lazyckpt.load(tmp_path / "a.pt", **WAYS[how])
    found = ranks.run(world, loaded, tmp_path / "a.pt", how, way)
    for mine, _ in found:
        assert graph(mine) == graph(expected)
    read = [nbytes for _, nbytes in found]
    if how in ("to a copy", "unrestricted"):  # their bytes must be there before torch makes the tensors
        assert read == [nbytes_of(state())] * world
    elif how == "a part":
        assert sum(read) == expected.nbytes
    elif how != "renamed":
        assert sum(read) == nbytes_of(state()) and max(read) - min(read) <= 2 * 4096


@pytest.mark.parametrize("kind", ["list", "tensor", "object", "safetensors", "checkpoint", "dcp"])
def test_other_files_are_loaded_as_well(ranks: Ranks, tmp_path: Path, graph: Any, kind: str) -> None:
    path, tensors = tmp_path / "a.pt", {"x": torch.randn(300, 300), "y": torch.randn(100_000)}
    if kind == "safetensors":
        safetensors.torch.save_file(tensors, path := tmp_path / "a.safetensors")
    elif kind == "dcp":
        dcp.save(tensors, checkpoint_id=path)
    elif kind == "checkpoint":
        with lazyckpt.Checkpointer(tmp_path) as ckpt:
            ckpt.track(tensors=tensors)
            path = ckpt.save(1).result()
    else:
        objects = {"list": [*tensors.values()], "tensor": tensors["x"], "object": {"of": torch.Generator().get_state()}}
        torch.save(objects[kind], path)
    expected = lazyckpt.load(path)
    assert all(graph(mine) == graph(expected) for mine, _ in ranks.run(2, loaded, path))


def test_a_process_by_itself_loads_as_ever(tmp_path: Path, graph: Any) -> None:
    torch.save(state(), tmp_path / "a.pt")
    assert graph(lazyckpt.load(tmp_path / "a.pt", all_ranks=True)) == graph(lazyckpt.load(tmp_path / "a.pt"))


def refused(path: Path, fault: str) -> Any:
    with pytest.MonkeyPatch.context() as patch, small_pieces():
        if dist.get_rank() == 1:
            if fault == "another file":
                path = path.with_name("other.pt")
            elif fault == "dies":
                patch.setattr(together.Filling, "_read", lambda *_: die())
        begin = time.monotonic()
        with pytest.raises(lazyckpt.LazyCkptError) as caught, all_ranks_at(path, 1.5) as team:
            load_together(path, "cpu", None, team)
        return type(caught.value).__name__, str(caught.value), time.monotonic() - begin


def test_ranks_that_load_two_files_are_told_so(ranks: Ranks, tmp_path: Path) -> None:
    for name in ("a.pt", "other.pt"):
        torch.save(state(), tmp_path / name)
    for kind, told, _ in ranks.run(2, refused, tmp_path / "a.pt", "another file"):
        assert kind == "ConfigError" and "a.pt" in told and "rank 1 calls load(" in told and "other.pt" in told


def test_all_ranks_raise_for_a_flipped_bit(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save(state(), path)
    record = storages(path)[0]
    flip(path, record.offset + 9)
    for kind, told, _ in ranks.run(2, refused, path, "a flipped bit"):
        assert kind == "CorruptFileError" and str(path) in told and record.name in told


def test_a_rank_that_dies_is_named(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save(state(), path)
    first, died, last = ranks.run(3, refused, path, "dies")
    assert died == Died(9)
    for kind, told, took_s in (first, last):
        assert kind == "RankError" and "rank 1 has given no sign of life for 1.5 s" in told, told
        assert took_s < 15


def missing(path: Path) -> Any:
    if dist.get_rank() == 1:
        path.unlink()
    dist.barrier()
    with pytest.raises(lazyckpt.LoadError) as caught:
        lazyckpt.load(path, all_ranks=True)
    return str(caught.value), type(caught.value.__cause__)


def test_a_file_that_is_not_there_is_missed_as_by_one_process(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "a.pt").touch()
    for told, cause in ranks.run(2, missing, tmp_path / "a.pt"):
        assert str(tmp_path / "a.pt") in told and cause is FileNotFoundError
