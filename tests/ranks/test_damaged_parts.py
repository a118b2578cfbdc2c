"""Ranks that read only a part of a tensor never take a damaged byte, whatever the way: all go back together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lazyckpt
from lazyckpt.integrations.dcp import LazyStorageReader
from lazyckpt.reading.sharded.folder import open_folder

pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = {"model": "model.wide.weight", "optimizer": "optimizer.state.wide.weight.momentum_buffer"}


class Net(torch.nn.Module):
    """``wide`` has several segments on each rank, and its columns are none of the ranks' own."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(500, 2500, bias=False)
        self.down = torch.nn.Linear(2500, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.wide(x))


def built(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Net()
    world = dist.get_world_size() if dist.is_initialized() else 1
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("r", "s")))
    elif kind in ("tp", "tp of columns"):
        wide = ColwiseParallel() if kind == "tp" else RowwiseParallel()
        parallelize_module(model, init_device_mesh("cpu", (world,)), {"wide": wide})
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def save(folder: Path, kind: str) -> None:
    model, optimizer = built(kind)
    with lazyckpt.Checkpointer(folder) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        for step in (1, 2):
            for parameter in model.parameters():  # on every rank its own part of the same tensor
                parameter.grad = torch.ones_like(parameter) * step
            optimizer.step()
            ckpt.save(step).result()


def values(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = [p for p in model.parameters()] + [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    return [t.full_tensor().clone() if isinstance(t, DTensor) else t.detach().clone() for t in found]


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def together() -> None:
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def flipped(file: Path, at: int) -> Iterator[None]:
    """A file with another byte at ``at``, for all ranks."""

    def flip() -> None:
        together()
        if is_first():
            with open(file, "r+b") as opened:
                opened.seek(at)
                byte = opened.read(1)
                opened.seek(at)
                opened.write(bytes([byte[0] ^ 4]))
        together()

    flip()
    yield
    flip()


def everywhere(folder: Path, name: str) -> list[tuple[Path, int]]:
    """Places all over the bytes of a tensor: the ends of each rank's part, and between them."""
    found = []
    for file, place in open_folder(folder).entries[name].items.values():
        first, last = place.offset + 5000, place.offset + place.nbytes - 6000
        found += [(folder / file, at) for at in (first, (2 * first + last) // 3, last)]
    return found


def takes_no_damage(run: Path, kind: str, how: dict[str, Any]) -> list[str]:
    """What a rank took that it should not have taken."""
    wrong = []
    model, optimizer = built(kind)
    with lazyckpt.Checkpointer(run, read_only=True) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        assert ckpt.restore(step=1) == 1
        older = values(model, optimizer)
        for part in how.get("only", NAMES):
            places = everywhere(run / "step-00000002", NAMES[part])
            for file, at in places:
                with flipped(file, at):
                    try:
                        ckpt.restore(step=2, **how)
                        wrong.append(f"{file.name}, {at}")
                    except lazyckpt.RestoreError as error:
                        assert file.name in str(error) and NAMES[part] in str(error)
            with flipped(*places[0]):
                assert ckpt.restore(**how) == 1  # all go back together
            assert how or all(map(torch.equal, values(model, optimizer), older))
    return wrong


WAYS = {
    "on 3 ranks": ("fsdp", 2, "fsdp", 3),
    "on 4 ranks": ("fsdp", 2, "fsdp", 4),
    "HSDP as FSDP": ("hsdp", 4, "fsdp", 4),
    "FSDP as TP": ("fsdp", 2, "tp of columns", 2),
    "TP as FSDP": ("tp of columns", 2, "fsdp", 2),
}


@pytest.mark.long(first=2)
@pytest.mark.parametrize("table", ["with a table", "without"])
@pytest.mark.parametrize("way", WAYS)
def test_no_damaged_byte_reaches_the_model(way: str, table: str, ranks: Any, tmp_path: Path) -> None:
    """Regression: what a rank read in part was not checked, and verify found it afterwards."""
    saved_as, saved_by, kind, world = WAYS[way]
    ranks.run(saved_by, save, tmp_path / "run", saved_as)
    if table == "without":  # as of an older version
        for file in (tmp_path / "run").glob("*/*.distcp"):
            data = file.read_bytes()
            assert b"lazyckpt crc32s " in data
            file.write_bytes(data.replace(b"lazyckpt crc32s ", bytes(16)))
    assert ranks.run(world, takes_no_damage, tmp_path / "run", kind, {}) == [[]] * world


@pytest.mark.parametrize("part", NAMES)
def test_a_part_of_the_state_is_checked_too(part: str, ranks: Any, tmp_path: Path) -> None:
    ranks.run(2, save, tmp_path / "run", "fsdp")
    assert ranks.run(3, takes_no_damage, tmp_path / "run", "fsdp", {"only": [part]}) == [[]] * 3
    folder = tmp_path / "run/step-00000002"
    for file, at in everywhere(folder, NAMES[part]):
        with flipped(file, at), pytest.raises(lazyckpt.CorruptFileError, match="wide"):
            lazyckpt.load(folder, key=NAMES[part])


def loads_no_damage(folder: Path, kind: str) -> list[str]:
    wrong = []
    for file, at in everywhere(folder, NAMES["model"]):
        model, _ = built(kind)
        with flipped(file, at):
            try:
                dist.checkpoint.load({"model": model.state_dict()}, storage_reader=LazyStorageReader(folder))
                wrong.append(f"{file.name}, {at}")
            except CheckpointException as error:  # on every rank, not only on the one that read it
                assert "wide.weight" in str(error.failures)
    return wrong


@pytest.mark.parametrize(("kind", "world"), [("fsdp", 3), ("tp of columns", 2)])
def test_dcp_load_takes_no_damage(kind: str, world: int, ranks: Any, tmp_path: Path) -> None:
    ranks.run(2, save, tmp_path / "run", "fsdp")
    assert ranks.run(world, loads_no_damage, tmp_path / "run/step-00000002", kind) == [[]] * world
