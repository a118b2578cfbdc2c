"""A folder of DCP is whole or not there, and what cannot work is refused, on every rank."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)

import torch.distributed.checkpoint as dcp  # noqa: E402
from processes import Died, Ranks, die  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402

import lazyckpt  # noqa: E402
from dcp_training import Training, content, load, names, save, save_async, why  # noqa: E402
from lazyckpt.integrations.dcp import LazySavePlanner, LazyStorageReader, LazyStorageWriter  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def plans_once(engine: str, folder: str) -> list[int]:
    """The items that this rank tells of at each save, while the state changes: on all ranks, and on one."""
    training = Training("fsdp", norm=torch.nn.LayerNorm)
    planner = LazySavePlanner()
    told: list[int] = []

    class Watched(LazyStorageWriter):
        def prepare_local_plan(self, plan: Any) -> Any:
            plan = super().prepare_local_plan(plan)
            told.append(len(plan.items))
            return plan

    for number, change in enumerate(("first", "none", "none", "all", "none", "one", "none", "exists", "none")):
        training.step()
        state = training.state()
        if number >= 3:
            state["all"] = torch.full((5,), 1.0 * number)
        if number >= 5 and dist.get_rank() == 1:
            state["one"] = {"rank 1": torch.full((3,), 1.0 * number)}
        path = f"{folder}/{number}"
        if change == "exists":
            os.makedirs(f"{path}/used", exist_ok=True)
            dist.barrier()
        expected = content(state)
        writer = Watched(path)

        def write(state: Any = state, writer: LazyStorageWriter = writer) -> None:
            if engine == "async":
                save_async(state, writer, planner=planner).result()
            else:
                dcp.save(state, storage_writer=writer, planner=planner)

        if change == "exists":
            assert "exists" in why(write)
            continue
        write()
        for reader in (dcp.FileSystemReader, LazyStorageReader):
            assert load(path, state, reader) == expected, (path, reader)
    assert not planner.state_dict
    return told


@pytest.mark.long(first=1)
@pytest.mark.parametrize("engine", ["sync", "async"])
def test_a_planner_of_a_run_plans_again_only_what_has_changed(engine: str, ranks: Ranks, tmp_path: Path) -> None:
    for rank, told in enumerate(ranks.run(2, plans_once, engine, str(tmp_path))):
        changed = [bool(items) for items in told]
        assert changed[:7] == [True, False, False, True, False, rank == 1, False], told
        assert changed[-1] is True, told  # no rank knows whether the coordinator has planned the failed save


def refuses_to_overwrite(engine: str, folder: str) -> tuple[str, bool]:
    training = Training("fsdp")
    training.step()
    save("sync", training.state(), f"{folder}/step")
    before = content(training.state())
    training.step()
    failed = why(lambda: save(engine, training.state(), f"{folder}/step"))
    return failed, load(f"{folder}/step", training.state()) == before and names(folder) == ["step"]


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_a_folder_that_exists_is_refused_before_anything_is_written(engine: str, ranks: Ranks, tmp_path: Path) -> None:
    for failed, intact in ranks.run(2, refuses_to_overwrite, engine, str(tmp_path)):
        assert "step exists" in failed and intact


def fills(kind: str, path: Path) -> None:
    if kind == "file":
        path.write_text("")
    elif kind == "link":
        path.with_name("elsewhere").mkdir()
        path.symlink_to("elsewhere")
    elif kind == "dangling":
        path.symlink_to("nowhere")
    else:
        path.mkdir(exist_ok=True)
        (path / "note").write_text("")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["file", "link", "dangling", "folder"])
def test_only_an_empty_folder_is_replaced(kind: str, late: bool, tmp_path: Path) -> None:
    """torch's own writer asks for an empty folder or none; a job often makes it first."""

    class Late(LazyStorageWriter):
        def finish(self, *args: Any, **others: Any) -> None:
            if late:
                self.path.rmdir()
                fills(kind, self.path)
            super().finish(*args, **others)

    path = tmp_path / "step"
    path.mkdir() if late else fills(kind, path)
    before = None if late else path.lstat()
    failed = why(lambda: dcp.save({"w": torch.ones(3)}, storage_writer=Late(path)))
    assert ("another program made it" if late else "step exists") in failed
    assert before is None or (path.lstat().st_ino, path.lstat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert not (path / ".metadata").exists()


def saves_into_empty(engine: str, folder: str) -> None:
    os.makedirs(f"{folder}/step", exist_ok=True)  # as every rank of a job may do
    dist.barrier()
    state = {"w": torch.full((1000,), 3.0)}
    save(engine, state, f"{folder}/step")
    assert load(f"{folder}/step", state) == content(state)


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_an_empty_folder_is_replaced(engine: str, ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, saves_into_empty, engine, str(tmp_path))
    assert os.listdir(tmp_path) == ["step"]


class Failing(LazyStorageWriter):
    """Fails on rank 1, when the others have written."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            self._fail()
        return super().write_data(plan, planner)

    def _fail(self) -> None:
        raise OSError("the disk of rank 1")


class Dying(Failing):
    def _fail(self) -> None:
        time.sleep(0.5)
        die()


class PlainFailing(dcp.FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("the disk of rank 1")
        return super().write_data(plan, planner)


class PlainDying(dcp.FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(0.5)
            die()
        return super().write_data(plan, planner)


def one_rank_fails(engine: str, folder: str) -> tuple[str, list[str]]:
    training = Training("fsdp")
    training.step()
    save(engine, training.state(), f"{folder}/1")
    training.step()

    def saves() -> None:
        if engine == "sync":
            dcp.save(training.state(), storage_writer=Failing(f"{folder}/2"))
        else:
            dcp.async_save(training.state(), storage_writer=Failing(f"{folder}/2")).result()

    failed = why(saves)
    found = names(folder)
    training.step()  # the gate is open
    save(engine, training.state(), f"{folder}/3")
    assert load(f"{folder}/3", training.state()) == content(training.state())
    return failed, found


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_if_one_rank_fails_there_is_no_folder_and_the_next_save_works(
    engine: str, ranks: Ranks, tmp_path: Path
) -> None:
    for failed, found in ranks.run(2, one_rank_fails, engine, str(tmp_path)):
        assert "the disk of rank 1" in failed
        assert found == ["1"]


def captured_in_vain(folder: str) -> tuple[str, list[str]]:
    """Rank 1 fails when its captured file is being written."""
    training = Training("fsdp", 3001)
    training.step()
    state = {**training.state(), f"only rank {dist.get_rank()}": "has this"}
    module = sys.modules[LazyStorageWriter.__module__]
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(module, "write_shard", lambda *_, **__: Failing(f"{folder}/1")._fail())
        failed = why(lambda: save("async", state, f"{folder}/1"))
    found = names(folder)
    save("async", training.state(), f"{folder}/2")
    assert load(f"{folder}/2", training.state()) == content(training.state())
    return failed, found


def test_what_was_captured_in_vain_leaves_nothing(ranks: Ranks, tmp_path: Path) -> None:
    for failed, found in ranks.run(2, captured_in_vain, str(tmp_path)):
        assert "the disk of rank 1" in failed and found == []


def overwrites(writer: str, folder: str) -> str:
    """Saves step 1, then step 2 under the same name while a rank fails; returns what loads afterwards."""
    path = f"{folder}/latest"
    mesh = init_device_mesh("cpu", (2,))

    def state(step: float) -> dict[str, Any]:
        return {"w": distribute_tensor(torch.full((2000,), step), mesh, [Shard(0)])}

    kind = globals()[writer]
    plain = issubclass(kind, dcp.FileSystemWriter)
    save("plain" if plain else "sync", state(1.0), path)
    return why(lambda: dcp.save(state(2.0), storage_writer=kind(path)))


def steps_in(path: Path) -> set[float]:
    """What plain DCP loads, in one process."""
    state = {"w": torch.zeros(2000)}
    dcp.load(state, checkpoint_id=path)
    return set(state["w"].tolist())


@pytest.mark.parametrize("how", ["Failing", "Dying"])
def test_plain_dcp_mixes_two_checkpoints_and_we_do_not(how: str, ranks: Ranks, tmp_path: Path) -> None:
    """The fault of DCP that this integration cures: a name is used again, and a rank fails or dies."""
    for folder, writer in (("plain", f"Plain{how}"), ("ours", how)):
        (tmp_path / folder).mkdir()
        failed = ranks.run(2, overwrites, writer, str(tmp_path / folder))
        assert all(isinstance(result, Died) or result for result in failed)
    assert steps_in(tmp_path / "plain" / "latest") == {1.0, 2.0}, "DCP is cured: this test can go"
    assert steps_in(tmp_path / "ours" / "latest") == {1.0}


def dies_in(engine: str, folder: str) -> None:
    training = Training("fsdp")
    training.step()
    writer = Dying(f"{folder}/2")
    if engine == "sync":
        dcp.save(training.state(), storage_writer=writer)
    else:
        dcp.async_save(training.state(), storage_writer=writer).result()


@pytest.mark.parametrize("engine", ["sync", "async"])
def test_if_a_rank_dies_there_is_no_folder(engine: str, ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 0"):
        ranks.run(2, dies_in, engine, str(tmp_path))
    assert not (tmp_path / "2").exists()


class Refusing(DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("no plan on rank 1")
        return super().create_local_plan()


def no_plan(folder: str) -> tuple[str, float, list[str]]:
    """The staging buffer is smaller than the state, so a step waits for the files of a save that never gets them."""
    training = Training("fsdp", 20_001)
    saver = lazyckpt.Saver(host_buffer_bytes=1 << 20, chunk_bytes=256 << 10)
    training.step()
    writer = LazyStorageWriter(f"{folder}/1", saver=saver)
    future = save_async(training.state(), writer, planner=Refusing())
    begin = time.perf_counter()
    training.step()
    waited = time.perf_counter() - begin
    failed = why(future.result)
    found = names(folder)
    save_again = save_async(training.state(), LazyStorageWriter(f"{folder}/2", saver=saver))
    expected = content(training.state())
    training.step()
    save_again.result()
    assert load(f"{folder}/2", training.state()) == expected
    saver.close()
    return failed, waited, found


def test_training_goes_on_when_a_rank_cannot_plan(ranks: Ranks, tmp_path: Path) -> None:
    for failed, waited, found in ranks.run(2, no_plan, str(tmp_path)):
        assert "no plan on rank 1" in failed
        assert waited < 20
        assert found == []


def plans(*planners: LazySavePlanner, fails: bool = False) -> list[int]:
    """One save of ranks with these planners: how many items each writes. ``fails``: after the coordinator planned."""
    local = []
    for rank, planner in enumerate(planners):
        planner.set_up_planner({f"of {rank}": torch.ones(3)}, is_coordinator=rank == 0)
        local.append(planner.create_local_plan())
    ranks, metadata = planners[0].create_global_plan(local)
    assert set(metadata.state_dict_metadata) == {f"of {rank}" for rank in range(len(planners))}
    return (
        [] if fails else [len(planner.finish_plan(plan).items) for planner, plan in zip(planners, ranks, strict=True)]
    )


def test_a_planner_plans_anew_for_another_number_of_ranks() -> None:
    one, two, three = LazySavePlanner(), LazySavePlanner(), LazySavePlanner()
    for _ in range(3):
        assert plans(one, two) == [1, 1]
    with pytest.raises(lazyckpt.ConfigError, match="one planner, one process group"):
        plans(one, two, three)
    assert plans(one, two, fails=True) == []  # no rank knows which plans the others have cached
    assert plans(one, two, three) == [1, 1, 1]
    assert plans(one, two, three) == [1, 1, 1]


# Refusals


def refusals(folder: str) -> dict[str, str]:
    training = Training("fsdp")
    training.step()
    found = {}
    process = getattr(dcp.state_dict_saver, "AsyncCheckpointerType", None)
    if process is not None:
        found["process"] = why(
            lambda: dcp.async_save(
                training.state(),
                storage_writer=LazyStorageWriter(f"{folder}/a"),
                async_checkpointer_type=process.PROCESS,
            ).result()
        )
        training.step()
    if "enable_plan_caching" in DefaultSavePlanner.__init__.__code__.co_varnames:
        planner = DefaultSavePlanner(enable_plan_caching=True)
        save("sync", training.state(), f"{folder}/c0", planner=planner)
        found["caching"] = why(lambda: save("sync", training.state(), f"{folder}/c1", planner=planner))
    lock = threading.Lock()
    found["lock"] = why(lambda: save("async", {"w": torch.ones(3), "lock": [lock]}, f"{folder}/l"))
    return found


@pytest.mark.long
def test_what_cannot_work_is_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(2, refusals, str(tmp_path), timeout_s=150):
        assert "PROCESS" in found.get("process", "PROCESS") and "THREAD" in found.get("process", "THREAD")
        assert "enable_plan_caching" in found.get("caching", "enable_plan_caching")
        assert "'lock'" in found["lock"]
    assert not [path.name for path in tmp_path.iterdir() if path.name not in ("c0",)]


def test_a_writer_refuses_what_is_no_path_and_no_saver(tmp_path: Path) -> None:
    with pytest.raises(lazyckpt.ConfigError, match="None is no path"):
        LazyStorageWriter(None)  # type: ignore[arg-type]
    with pytest.raises(lazyckpt.ConfigError, match=r"saver=3: expected a lazyckpt\.Saver"):
        LazyStorageWriter(tmp_path / "a", saver=3)  # type: ignore[arg-type]


def two_folders(folder: str) -> dict[str, str]:
    """Each rank saves and loads another one."""
    rank = dist.get_rank()
    own = f"{folder}/of-{rank}"
    found = {how: why(lambda how=how: save(how, {"w": torch.ones(3)}, own)) for how in ("sync", "async")}
    for name in ("a", "b"):
        save("sync", {"w": torch.ones(3)}, f"{folder}/{name}")
    state = {"w": torch.zeros(3)}
    found["load"] = why(lambda: dcp.load(state, storage_reader=LazyStorageReader(f"{folder}/{'ab'[rank]}")))
    assert not state["w"].any()
    return found


def test_ranks_that_name_two_folders_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Regression: the coordinator's folder held parts that another rank had meant for another one."""
    for found in ranks.run(2, two_folders, str(tmp_path), timeout_s=150):
        for how in ("sync", "async"):
            assert f"rank 1 saves of-1, the coordinator saves {tmp_path}/of-0: all save one folder" in found[how]
        assert f"rank 1 loads {tmp_path}/b, rank 0 loads {tmp_path}/a: all load one checkpoint" in found["load"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def other_forms(folder: str) -> dict[str, str]:
    rank = dist.get_rank()
    states = {
        "size": {"w": torch.ones(3 + rank)},
        "dtype": {"w": torch.ones(3, dtype=(torch.float32, torch.float64)[rank])},
    }
    found = {}
    for name, state in states.items():
        for how in ("sync", "async"):
            found[f"{name} {how}"] = why(lambda how=how, state=state: save(how, {**state, "same": 1}, f"{folder}/a"))
    planner = LazySavePlanner()
    save("sync", {"w": torch.ones(3)}, f"{folder}/b", planner=planner)
    found["later"] = why(lambda: save("sync", {"w": torch.ones(3 + rank)}, f"{folder}/c", planner=planner))
    return found


def test_an_entry_that_has_another_form_on_another_rank_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Plain DCP saves that of rank 0, and every rank restores it."""
    for found in ranks.run(2, other_forms, str(tmp_path), timeout_s=150):
        assert len(found) == 5
        for case, text in found.items():
            assert "w is a torch.float32 tensor of (3,) on rank 0, but not on rank 1" in text, case
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
