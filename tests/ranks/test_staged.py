"""A folder that all ranks stage together: what trainers save through (Saver.stage with all_ranks)."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Died, Ranks
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lazyckpt
from lazyckpt.ranks.votes import Ballot
from lazyckpt.storage import commit
from lazyckpt.storage.shared import AttachedStaging


def built(width: int = 65) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(33, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 3))
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, width: int = 33) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, width, generator=torch.Generator().manual_seed(3))).square().sum().backward()
    optimizer.step()


def states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    return get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)


def whole(tree: Any) -> Any:
    """The same, every DTensor whole."""
    if isinstance(tree, DTensor):
        return tree.full_tensor().clone()
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map(whole, tree))
    return tree.clone() if isinstance(tree, torch.Tensor) else tree


def rank_here() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def save(
    saver: lazyckpt.Saver, target: Path, state: tuple[Any, Any], inside: Path | None = None, step: int = 1
) -> lazyckpt.SaveHandle:
    """What a trainer does: two sharded states, a file of each rank that it writes, and one that lazyckpt writes."""
    rank = rank_here()
    with saver.stage(target, inside=inside, step=step, all_ranks=True) as staged:
        (staged.path / f"random_{rank}.txt").write_text(str(rank))
        staged.add_shards("model_0", {"model": state[0]})
        staged.add_shards("optimizer_0", {"optimizer": state[1]})
        if rank == 0:
            staged.add("scheduler.bin", {"last_epoch": 7})
        return staged.save()


def all_of_it(target: Path, inside: Path | None = None) -> Any:
    model, optimizer = built()
    trained(model, optimizer)
    with lazyckpt.Saver() as saver:
        handle = save(saver, target, states(model, optimizer), inside)
        expected = whole(states(model, optimizer))
        trained(model, optimizer)  # while it is copied
        return str(handle.result()), expected


READ = """
import sys
sys.modules["lazyckpt"] = None  # as if it were not installed
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
for name in ("model_0", "optimizer_0"):
    dcp_to_torch_save(f"{sys.argv[1]}/{name}", f"{sys.argv[2]}/{name}.pt")
"""


def read_by_torch(target: Path, into: Path) -> tuple[Any, Any]:
    subprocess.run([sys.executable, "-c", READ, target, into], check=True)
    model, optimizer = (torch.load(into / f"{name}.pt", weights_only=True) for name in ("model_0", "optimizer_0"))
    return model["model"], optimizer["optimizer"]


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


FILES = ["__0_0.distcp", "__1_0.distcp", ".metadata"]
ALL = {"model_0", "optimizer_0", "random_0.txt", "random_1.txt", "scheduler.bin", ".lazyckpt-lock"}


def test_several_sharded_states_and_files_of_all_ranks_appear_as_one_and_torch_reads_them(
    ranks: Ranks, tmp_path: Path
) -> None:
    target = tmp_path / "checkpoints" / "checkpoint_3"
    (path, (model, optimizer)), (path_1, _) = ranks.run(2, all_of_it, target)
    assert path == path_1 == str(target)
    assert set(os.listdir(target)) == ALL and os.listdir(target.parent) == [target.name]
    for folder in ("model_0", "optimizer_0"):
        assert sorted(os.listdir(target / folder)) == sorted(FILES)
    assert torch.load(target / "scheduler.bin") == {"last_epoch": 7}
    assert (target / "random_1.txt").read_text() == "1"
    found_model, found_optimizer = read_by_torch(target, tmp_path)
    same(found_model, model)
    same(found_optimizer["state"], optimizer["state"])


def test_it_is_staged_where_the_trainer_wants_it(ranks: Ranks, tmp_path: Path) -> None:
    target, inside = tmp_path / "checkpoints" / "checkpoint_3", tmp_path / "aside"
    ranks.run(2, staged_names, target, inside)
    assert set(os.listdir(target)) == ALL and os.listdir(target.parent) == [target.name]
    assert os.listdir(inside) == []


def staged_names(target: Path, inside: Path) -> None:
    _model, _optimizer = built()
    with lazyckpt.Saver() as saver, saver.stage(target, inside=inside, all_ranks=True) as staged:
        assert staged.path.parent == inside and staged.path.is_dir()
        dist.barrier()
        assert os.listdir(target.parent) == []
        dist.barrier()
    all_of_it(target, inside)


def test_an_existing_folder_is_replaced_and_other_files_in_it_stay(ranks: Ranks, tmp_path: Path) -> None:
    target = tmp_path / "state"
    (target / "model_0").mkdir(parents=True)
    for name in ("notes.txt", "model_0/__7_0.distcp", "model_0/vocabulary.txt", "random_0.txt"):
        (target / name).write_text("theirs")
    ranks.run(2, all_of_it, target)
    assert set(os.listdir(target)) == {*ALL, "notes.txt"}
    assert (target / "random_0.txt").read_text() == "0"
    assert sorted(os.listdir(target / "model_0")) == sorted([*FILES, "vocabulary.txt"])  # none of eight ranks
    assert os.listdir(tmp_path) == ["state"]


def replaced_whole(target: Path) -> None:
    with lazyckpt.Saver() as saver, saver.stage(target, all_ranks=True, keep_others=False) as staged:
        staged.add(f"random_{rank_here()}.txt", {})
        staged.save()


@pytest.mark.parametrize("world", [1, 2])
def test_other_files_go_if_so_wished(ranks: Ranks, tmp_path: Path, world: int) -> None:
    target = tmp_path / "state"
    target.mkdir()
    (target / "notes.txt").write_text("theirs")
    ranks.run(world, replaced_whole, target)
    assert sorted(set(os.listdir(target)) - {".lazyckpt-lock"}) == [f"random_{rank}.txt" for rank in range(world)]
    assert os.listdir(tmp_path) == ["state"]


def steady(folder: Path) -> Any:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(6)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    told = []
    with lazyckpt.Saver() as saver:
        for step in range(1, 6):
            trained(model, optimizer, 256)
            handle = save(saver, folder / f"step{step}", states(model, optimizer), step=step)
            told.append(handle)
    return [(h.metrics.eager_bytes / h.metrics.bytes, h.metrics.save_blocked_s, h.metrics.storages) for h in told]


def test_from_the_second_save_on_nearly_everything_is_copied_later(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks.run(2, steady, tmp_path):
        assert max(eager for eager, _, _ in told[1:]) < 0.03
        assert sorted(blocked for _, blocked, _ in told[1:])[1] < 0.1  # milliseconds, on a machine that is not busy
    sizes = [os.path.getsize(tmp_path / "step5/optimizer_0" / name) for name in FILES[:2]]
    assert max(sizes) < 0.55 * sum(sizes)


def order(folder: Path) -> list[str]:
    """What a rank does at the end of a save."""
    told: list[str] = []

    def noted(name: str, call: Any) -> Any:
        return lambda *args: (told.append(name), call(*args))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttachedStaging, "sync", noted("sync", AttachedStaging.sync))
        patch.setattr(Ballot, "vote", noted("vote", Ballot.vote))
        all_of_it(folder)
    return told


def test_a_rank_votes_when_its_files_and_their_names_are_durable(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, order, tmp_path / "state") == [["vote"], ["sync", "vote"]]


# the latest


def latest(folder: Path, delay_s: float = 0.0, fails: bool = False, dies: bool = False) -> list[str]:
    """What ``latest`` names on this rank once its save is done, and the error. Rank 0 publishes the pointer late."""
    publish = commit.publish_pointer

    def publish_late(file: Path, target: Path) -> None:
        if rank_here() == 0 and target.name == "step2":
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            if fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
            time.sleep(delay_s)  # so that a rank that is told too early is seen
        publish(file, target)

    told = []
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(lazyckpt.SaveError):
        patch.setattr(commit, "publish_pointer", publish_late)
        with lazyckpt.Saver(rank_timeout_s=3) as saver:
            for step in (1, 2):
                where = {"all_ranks": True, "latest": folder / "latest", "wait": False}
                with saver.stage(folder / f"step{step}", step=step, **where) as staged:
                    staged.add(f"file_{rank_here()}.pt", {"rank": rank_here()})
                    handle = staged.save()
                error = handle.exception()
                told.append((folder / "latest").read_text() + (f": {error}" if error is not None else ""))
    return told


@pytest.mark.parametrize("world", [1, 2])
def test_every_rank_that_waits_for_the_result_finds_the_latest(ranks: Ranks, tmp_path: Path, world: int) -> None:
    assert ranks.run(world, latest, tmp_path, 0.2) == [["step1", "step2"]] * world
    assert sorted(os.listdir(tmp_path)) == ["latest", "step1", "step2"]
    assert len(set(os.listdir(tmp_path / "step2")) - {".lazyckpt-lock"}) == world


def test_a_latest_that_cannot_be_replaced_fails_the_save_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks.run(2, latest, tmp_path, 0.0, True):
        assert told[0] == "step1" and re.match(r"step1: .*rank 0 .*Input/output error .*latest", told[1]), told


def test_a_rank_0_that_dies_before_it_names_the_latest_is_stood_in_for(ranks: Ranks, tmp_path: Path) -> None:
    died, told = ranks.run(2, latest, tmp_path, 0.0, False, True)
    assert isinstance(died, Died) and told == ["step1", "step2"]


# what goes wrong


def faulty(folder: Path, fault: str) -> list[str]:
    """A good save, one that fails on rank 1, and another good one."""
    model, optimizer = built()
    told = []
    with lazyckpt.Saver(on_error="warn") as saver:
        for step in (1, 2, 3):
            trained(model, optimizer)
            bad = rank_here() == 1 and step == 2
            name = f"other{step}" if bad and fault == "another folder" else f"state{step}"
            try:
                with saver.stage(folder / name, step=step, all_ranks=True) as staged:
                    (staged.path / f"rng{rank_here()}").write_text("")
                    if bad and fault == "an error of the trainer":
                        raise lazyckpt.ConfigError("the trainer's")
                    if not (bad and fault == "a missing state"):
                        staged.add_shards("model_0", get_model_state_dict(model))
                    if bad and fault == "unpicklable":
                        staged.add("rest.bin", (x for x in ()))
                    if bad and fault == "one name twice":
                        (staged.path / "model_0").mkdir(exist_ok=True)
                        (staged.path / "model_0/__1_0.distcp").write_text("")
                    told.append(staged.save().result().name)
            except lazyckpt.LazyCkptError as error:
                told.append(f"{type(error).__name__}: {error}")
    return told


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("an error of the trainer", "RankError: .*rank 1 failed: the trainer's"),
        ("unpicklable", "RankError: .*rank 1 failed"),
        ("a missing state", "SaveError: .*the ranks hold"),
        ("one name twice", "RankError: .*rank 1 failed: open: File exists"),
        ("another folder", "RankError: .*rank 1.* saves step 2 with layout other2; rank 0 saves it with layout state2"),
    ],
)
def test_a_folder_that_one_rank_fails_to_save_appears_on_none(
    ranks: Ranks, tmp_path: Path, fault: str, why: str
) -> None:
    first, second = ranks.run(2, faulty, tmp_path, fault)
    assert re.search(why, first[1], re.DOTALL), first
    assert "Error" in second[1]
    assert [told[0] for told in (first, second)] == ["state1"] * 2
    assert [told[2] for told in (first, second)] == ["state3"] * 2
    assert sorted(os.listdir(tmp_path)) == ["state1", "state3"]


def mount_points(folder: Path) -> str:
    here = os.getcwd()
    os.chdir(folder)
    try:
        with lazyckpt.Saver() as saver, pytest.raises(lazyckpt.SaveError) as caught:
            saver.stage(folder, all_ranks=True)
    finally:
        os.chdir(here)
    return str(caught.value)


def test_a_folder_that_cannot_be_renamed_is_refused_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "cwd").mkdir()
    for told in ranks.run(2, mount_points, tmp_path / "cwd"):
        assert "save into a folder below it" in told


def many_folders(folder: Path) -> int:
    model, _ = built()
    with lazyckpt.Saver() as saver:
        for number in range(11):
            with saver.stage(folder / str(number) / "state", all_ranks=True) as staged:
                staged.add_shards(".", get_model_state_dict(model))
                staged.save()
        return len(saver._teams._crews)


def test_folders_in_many_places_take_few_threads(ranks: Ranks, tmp_path: Path) -> None:
    for crews in ranks.run(2, many_folders, tmp_path):
        assert crews == 8
    assert sorted(os.listdir(tmp_path / "0/state")) == sorted([*FILES, ".lazyckpt-lock"])
    assert os.listdir(tmp_path / "10") == ["state"]


def test_one_process_stages_alone(tmp_path: Path) -> None:
    path, (model, _optimizer) = all_of_it(tmp_path / "state")
    assert sorted(os.listdir(tmp_path / "state/model_0")) == [".metadata", "__0_0.distcp"]
    same(read_by_torch(Path(path), tmp_path)[0], model)


def test_shards_need_a_folder_of_all_ranks_and_a_name_of_their_own(tmp_path: Path) -> None:
    with lazyckpt.Saver() as saver:
        with saver.stage(tmp_path / "a") as staged, pytest.raises(lazyckpt.ConfigError, match="all_ranks=True"):
            staged.add_shards("model", {})
        with saver.stage(tmp_path / "b", all_ranks=True) as staged:
            staged.add_shards("model", {})
            for name in ("model", "../model", "/model"):
                with pytest.raises(lazyckpt.ConfigError, match="not a new name"):
                    staged.add_shards(name, {})
    with pytest.raises(lazyckpt.ConfigError, match="too late"):
        staged.add_shards("late", {})
