"""Each rank's own state: loaders, samplers and datasets of every kind return to the rank that had them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Ranks
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

import lazyckpt
from ranks.training import KNOBS, Training


class Counting:
    """State that differs from rank to rank."""

    at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Loader(Counting, DataLoader[Any]):
    """Of the shape of torchdata's StatefulDataLoader."""


class Order(Counting, Sampler[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


class Stream(Counting, IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


class Table(Counting, Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Reader(Counting):
    """A loader of another library."""

    def __iter__(self) -> Any:
        return iter(range(4))


DATA = TensorDataset(torch.arange(8))
TRACKED = {"loader": lambda: Loader(DATA), "sampler": Order, "stream": Stream, "table": Table}
THROUGH = {"through_loader": lambda: Loader(DATA), "through_sampler": Order, "through_reader": Reader}


def ranks_of(parts: dict[str, Any]) -> dict[str, int]:
    return {name: part.at for name, part in parts.items()}


def run(folder: Path, action: str) -> Any:
    """``action``: save or restore. Returns where each part is, by name."""
    rank = dist.get_rank()
    training = Training(rank, dist.get_world_size())
    parts: dict[str, Any] = {name: make() for name, make in TRACKED.items()}
    with lazyckpt.Checkpointer(folder, **KNOBS) as ckpt:
        ckpt.track(
            model=training.model, optimizer=training.optimizer, clock=training.clock, shared=(shared := Reader())
        )
        ckpt.track(**parts)
        for name, make in THROUGH.items():
            parts[name] = ckpt.track_loader(make(), name)
            assert ckpt.track_loader(parts[name], name) is parts[name]
            ckpt.track(**{name: parts[name]})
        for number, part in enumerate((*parts.values(), shared)):
            part.at = (10 * rank + number + 1) * (action != "restore")
        if action == "save":
            training.step()
            ckpt.save(1).result()
        elif action == "restore":
            assert ckpt.restore() == 1
        else:
            assert ckpt.restore(loader=False) == 1
        return {"shared": shared.at, **ranks_of(parts)}


NAMES = [*TRACKED, *THROUGH]


def expected(rank: int, shared: int) -> dict[str, int]:
    return {"shared": shared, **{name: 10 * rank + number + 1 for number, name in enumerate(NAMES)}}


def test_every_rank_gets_back_its_own_loaders_samplers_and_datasets(ranks: Ranks, tmp_path: Path) -> None:
    """Regression: a loader that keeps its position itself was rank 0's on all ranks."""
    ranks.run(2, run, tmp_path, "save")
    found = ranks.run(2, run, tmp_path, "restore")
    assert found == [expected(rank, len(NAMES) + 1) for rank in range(2)]


def test_loader_false_leaves_all_of_them(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, run, tmp_path, "save")
    assert ranks.run(2, run, tmp_path, "leave") == [expected(rank, len(NAMES) + 1) for rank in range(2)]


def resharded(folder: Path) -> Any:
    with pytest.warns(UserWarning, match="was saved by 2 ranks, and 3 restore it.*; .*loader.*stays as it is"):
        return run(folder, "restore")


def test_on_another_number_of_ranks_they_begin_anew_with_a_warning(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, run, tmp_path, "save")
    assert ranks.run(3, resharded, tmp_path) == [dict.fromkeys(NAMES, 0) | {"shared": len(NAMES) + 1}] * 3
