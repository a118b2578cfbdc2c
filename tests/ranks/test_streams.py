"""Ranks that restore one random state are told, and given a line that helps; others hear nothing."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Ranks

import lazyckpt
from ranks.training import KNOBS, Net, Training


def resumed(folder: Path, how: str) -> tuple[list[str], list[int], float]:
    """What a rank is warned of at ``restore()``, which ranks draw its number next, and again after the advice."""
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = folder / str(rank) if how == "a folder for each" else folder
    with lazyckpt.Checkpointer(folder) as ckpt:
        ckpt.track(model=torch.nn.Linear(2, 2))
        torch.manual_seed(rank)
        if rank == 0 or how == "a folder for each":
            ckpt.save(7).result()
        dist.barrier()
    torch.manual_seed(100 + rank)
    with warnings.catch_warnings(record=True) as caught, lazyckpt.Checkpointer(folder) as ckpt:
        warnings.simplefilter("always")
        ckpt.track(model=torch.nn.Linear(2, 2))
        step: Any = 7
        if how == "rank 0 alone" and rank:
            dist.barrier()
        else:
            step = ckpt.restore(**{"only": ["model"]} if how == "the model alone" else {})
            dist.barrier()
    told = [str(warning.message) for warning in caught if "random state" in str(warning.message)]
    before = numbers()
    if told:
        line = re.search(r"torch\.manual_seed\(.*?get_rank\(\)\)", told[0])
        assert line is not None
        exec(line[0], {"torch": torch, "step": step})
    after = numbers()
    return told, [other for other in range(world) if before[other] == before[rank]], len(set(after))


def numbers() -> list[float]:
    """What each rank draws next."""
    drawn = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(drawn, torch.rand(1))
    return [float(number) for number in drawn]


def test_replicas_that_restore_one_random_state_are_told_how_to_part(ranks: Ranks, tmp_path: Path) -> None:
    """Regression: all ranks had equal dropout masks from then on, without a warning."""
    found = ranks.run(3, resumed, tmp_path, "all")
    assert [len(told) for told, _, _ in found].count(1) == 2 and sum(len(told) for told, _, _ in found) == 2
    for told, equal, different in found:
        assert equal == [0, 1, 2] and different == 3
        assert all(re.match(rf"ranks \d and \d have both restored .*{tmp_path}/step-00000007", text) for text in told)


@pytest.mark.parametrize("how", ["rank 0 alone", "a folder for each", "the model alone"])
def test_where_each_rank_has_its_own_stream_nobody_is_warned(ranks: Ranks, tmp_path: Path, how: str) -> None:
    for rank, (told, equal, _) in enumerate(ranks.run(3, resumed, tmp_path, how)):
        assert told == [] and equal == [rank]


def sharded(folder: Path, whole: bool) -> list[str]:
    """``whole``: restores what one process saved."""
    training = Training(dist.get_rank(), dist.get_world_size())
    training.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if not whole:
            with lazyckpt.Checkpointer(folder, **KNOBS) as ckpt:
                ckpt.track(model=training.model, optimizer=training.optimizer)
                ckpt.save(1).result()
        with lazyckpt.Checkpointer(folder, **KNOBS) as ckpt:
            ckpt.track(model=training.model, optimizer=training.optimizer)
            assert ckpt.restore() == 1
    return [str(warning.message) for warning in caught if "random state" in str(warning.message)]


def test_sharded_checkpoints_hold_a_stream_for_each_rank(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, sharded, tmp_path, False) == [[], []]


def test_sharded_models_that_restore_what_one_process_saved_are_told(ranks: Ranks, tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0)
    model(1).backward()
    optimizer.step()
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        ckpt.save(1).result()
    assert sum(map(len, ranks.run(2, sharded, tmp_path, True))) == 1
