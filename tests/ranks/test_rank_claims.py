"""Ranks that would replace each other's checkpoints are refused, all of them and by name; others are left in peace."""

from __future__ import annotations

import os
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Ranks
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import lazyckpt
from lazyckpt import waits
from lazyckpt.ranks import rank_claims
from lazyckpt.storage import mounts
from ranks.training import KNOBS, Training, tick_of


def wait_for(saver: lazyckpt.Saver) -> None:
    while saver.pending():
        time.sleep(0.002)


def told(act: Any) -> str:
    try:
        act()
    except lazyckpt.LazyCkptError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# DistributedDataParallel


def replicated(folder: Path, savers: list[int], folders: str = "{shared}", late: int = 0) -> list[str]:
    """Trains with DDP. Returns what ``save`` raised, by step. Every rank tracks and restores; only ``savers`` save, and
    all but the first of them not before step ``late``."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    answers = []
    with warnings.catch_warnings(), lazyckpt.Checkpointer(folder / folders.format(shared="run", rank=rank)) as ckpt:
        warnings.simplefilter("ignore")
        ckpt.track(model=model, optimizer=optimizer)
        ckpt.restore()
        for step in range(1, 5):
            optimizer.zero_grad()
            model(torch.full((1, 3), float(rank))).sum().backward()
            optimizer.step()
            if rank in savers and (step > late or rank == savers[0]):
                answers.append(told(lambda: ckpt.save(step)))  # noqa: B023
                wait_for(ckpt._saver)
            dist.barrier()
        answers.append(told(ckpt.close))
    return answers


BOTH = r"ranks \d and \d both save into .*/run, each .*torch.distributed.get_rank\(\) == 0"


def test_replicas_that_all_save_into_one_folder_are_refused_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    """Regression: each replaced the checkpoints of the others."""
    found = ranks.run(3, replicated, tmp_path, [0, 1, 2])
    for answers in found:
        assert any(re.search(BOTH, answer) for answer in answers), found
    refused = [answers for answers in found if answers[0].startswith("ConfigError")]
    assert len(refused) == 2 and all(re.match(f"ConfigError: {BOTH}", a) for answers in refused for a in answers[:4])


@pytest.mark.parametrize(
    ("savers", "folders", "late"),
    [([0], "{shared}", 0), ([1], "{shared}", 0), ([0, 1, 2], "{rank}", 0), ([0, 1, 2], "{rank}/run", 2)],
)
def test_one_saver_or_a_folder_for_each_is_fine(
    ranks: Ranks, tmp_path: Path, savers: list[int], folders: str, late: int
) -> None:
    for answers in ranks.run(3, replicated, tmp_path, savers, folders, late):
        assert not any(answers)
    kept = tmp_path / folders.format(shared="run", rank=savers[-1])
    assert len([name for name in os.listdir(kept) if name.startswith("step-")]) == 4 - late


def test_a_rank_that_saves_late_is_refused_and_the_first_one_is_told(ranks: Ranks, tmp_path: Path) -> None:
    first, second, third = ranks.run(3, replicated, tmp_path, [0, 2], "{shared}", 2)
    assert not any(first[:2]) and any(re.search(BOTH, answer) for answer in first[2:])
    assert all(re.match(f"ConfigError: {BOTH}", answer) for answer in third[:2]) and not any(second)
    assert {"step-00000001", "step-00000002"} <= set(os.listdir(tmp_path / "run"))


def in_turn(folder: Path) -> str:
    """Rank 0 closes its Checkpointer; then rank 1 goes on."""
    answer = ""
    for rank in range(2):
        if dist.get_rank() == rank:
            with lazyckpt.Checkpointer(folder) as ckpt:
                ckpt.track(state=(state := {"rank": 9}))
                ckpt.restore()
                answer = f"{state['rank']} {told(lambda: ckpt.save(rank, blocking=True))}"  # noqa: B023
        dist.barrier()
    return answer


def test_a_folder_may_pass_from_rank_to_rank(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, in_turn, tmp_path) == ["9 ", "9 "]
    assert {"step-00000000", "step-00000001"} <= set(os.listdir(tmp_path))


def as_other_machines(folder: Path) -> str:
    """Ranks on machines that have each a disk of its own, with equal names and numbers. It saves nothing: here, the
    ranks have one disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_claims, "machine", lambda: f"machine {dist.get_rank()}")
        return told(rank_claims.RankClaims(folder).enter)


def test_equal_names_on_different_machines_are_different_folders(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, as_other_machines, tmp_path) == ["", ""]


def test_what_two_processes_call_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    here = rank_claims.identity(tmp_path)
    assert rank_claims.identity(tmp_path / "link" / ".") == here
    (tmp_path / "a").mkdir()
    assert rank_claims.identity(tmp_path / "a") != here
    for kind, of_all in (("nfs4", True), ("xfs", False), ("fuse.unknown", False)):
        monkeypatch.setattr(mounts, "source_of", lambda _, kind=kind: (kind, "server:/export"))
        monkeypatch.setattr(rank_claims, "machine", lambda: "one")
        one = rank_claims.identity(tmp_path)
        monkeypatch.setattr(rank_claims, "machine", lambda: "other")
        assert (rank_claims.identity(tmp_path) == one) == of_all, kind


def test_the_source_of_a_mount_is_read_from_the_kernel() -> None:
    kind, source = mounts.source_of(Path("/proc"))
    assert (kind, source) == ("proc", "proc")


# sharded state


def half_sharded(folder: Path, plain: int, order: str) -> tuple[str, float]:
    """Rank ``plain`` tracks no DTensor. ``order``: which save comes first."""
    rank = dist.get_rank()
    training = Training(rank, dist.get_world_size())
    training.step()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(waits, "ALONE_GRACE_S", 0.5)
        with lazyckpt.Checkpointer(folder, **KNOBS, rank_timeout_s=4.0) as ckpt:
            if order == "plain first" and rank != plain:
                dist.barrier()
            if rank == plain:
                ckpt.track(model=torch.nn.Linear(2, 2))
            else:
                ckpt.track(model=training.model, optimizer=training.optimizer, clock=training.clock)
            if order == "sharded first":
                dist.barrier()
            begin = time.monotonic()
            answer = told(lambda: ckpt.save(1))
            if order == "plain first" and rank == plain:
                wait_for(ckpt._saver)
                dist.barrier()
                time.sleep(2)
                answer = told(lambda: ckpt.save(2))
                wait_for(ckpt._saver)
                answer = answer or told(lambda: ckpt.save(3))
        return answer, time.monotonic() - begin


@pytest.mark.parametrize("order", ["sharded first", "plain first"])
@pytest.mark.parametrize("plain", [0, 1])
def test_a_rank_without_shards_is_refused_where_others_save_shards(
    ranks: Ranks, tmp_path: Path, plain: int, order: str
) -> None:
    """Regression: it saved a checkpoint of its own into the folder, and the others waited for ten minutes."""
    found = ranks.run(2, half_sharded, tmp_path, plain, order)
    for answer, seconds in found:
        assert f"rank {1 - plain} tracks DTensors" in answer and f"rank {plain} tracks none" in answer, found
        assert seconds < 30
    saved = [name for name in os.listdir(tmp_path) if name.startswith("step-")]
    assert saved == ([] if order == "sharded first" else saved) and len(saved) < 3


def both_kinds(folder: Path) -> list[int]:
    """Rank 0 saves before the model is sharded, and later has a Checkpointer of its own beside that of all ranks."""
    rank = dist.get_rank()
    with lazyckpt.Checkpointer(folder / "run", **KNOBS) as ckpt:
        if rank == 0:
            ckpt.track(notes={"before": 1})
            ckpt.save(100, blocking=True)
        training = Training(rank, dist.get_world_size())
        training.step()
        if rank == 1:
            ckpt.track(notes={"before": 1})
        ckpt.track(model=training.model, optimizer=training.optimizer, clock=training.clock)
        ckpt.save(1).result()
        if rank == 0:
            with lazyckpt.Checkpointer(folder / "own") as own:
                own.track(notes={"own": 1})
                own.save(1).result()
        with lazyckpt.Checkpointer(folder / "run", read_only=True) as reader:
            reader.track(model=torch.nn.Linear(2, 2))
            return [c.step for c in reader.checkpoints()]


def test_sharded_and_whole_checkpoints_of_one_job_may_live_side_by_side(ranks: Ranks, tmp_path: Path) -> None:
    for steps in ranks.run(2, both_kinds, tmp_path):
        assert sorted(steps) == [1, 100]
    assert tick_of(tmp_path / "run/step-00000001") == 1
    assert os.listdir(tmp_path / "own") == ["step-00000001"]


# without torch.distributed, and without a store


def test_a_process_of_a_launcher_that_does_not_know_the_others_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="not initialized"), lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(state={})
        ckpt.save(1).result()


def test_a_lost_store_refuses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(HashStore):
        def compare_set(self, *_: Any) -> Any:
            raise RuntimeError("Connection reset by peer")

        check = compare_set

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", Lost)
    entry = rank_claims.RankClaims(tmp_path)
    for call in (entry.enter, entry.look, entry.announce, entry.await_all, entry.leave):
        call()


def test_every_rank_finds_a_note_and_the_next_attempt_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the first rank that found it removed it, and another one waited for ten minutes."""
    store, rank = HashStore(), [0]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_rank", lambda: rank[0])
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(waits, "ALONE_GRACE_S", 0.0)

    def of(number: int, call: str) -> str:
        rank[0] = number
        return told(getattr(rolls[number], call))

    rolls = [rank_claims.RankClaims(tmp_path) for _ in range(3)]
    assert not any((of(1, "enter"), of(0, "announce"), of(2, "announce")))
    why = of(2, "await_all")
    assert "rank 2 tracks DTensors" in why and "rank 1 tracks none" in why
    assert of(1, "look") == why and not of(1, "look")
    assert not any((of(1, "leave"), of(2, "leave")))
    assert of(0, "await_all") == why
    assert not of(0, "leave")

    rolls = [rank_claims.RankClaims(tmp_path) for _ in range(3)]
    for call in ("announce", "await_all", "leave"):
        assert not any(of(number, call) for number in range(3))
