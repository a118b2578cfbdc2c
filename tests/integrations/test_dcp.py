"""Checkpoints of torch.distributed.checkpoint: lazy, whole or not there, and plain DCP's own when they are read."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import pickletools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: E402
from torch.distributed.checkpoint.planner import WriteItem  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import lazyckpt  # noqa: E402
from lazyckpt.integrations.dcp import LazySavePlanner, LazyStorageReader, LazyStorageWriter  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

# What runs on the ranks.


class Net(torch.nn.Module):
    """37 and 61 divide by no number of ranks here: shards are uneven."""

    def __init__(self, width: int, norm: Callable[[int], torch.nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Linear(37, width)
        self.norm = norm(width)
        self.down = torch.nn.Linear(width, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)).relu())


class Training:
    """A sharded model and its AdamW."""

    def __init__(
        self, kind: str, width: int = 61, norm: Callable[[int], torch.nn.Module] = torch.nn.BatchNorm1d
    ) -> None:
        world = dist.get_world_size()
        self.net = Net(width, norm)
        if kind == "fsdp":
            fully_shard(self.net, mesh=init_device_mesh("cpu", (world,)))
        elif kind == "tp":
            self._tensor_parallel(init_device_mesh("cpu", (world,)))
        elif kind == "2d":
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
            self._tensor_parallel(mesh["tp"])
            fully_shard(self.net, mesh=mesh["dp"])
        elif kind == "hsdp":
            fully_shard(self.net, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("r", "s")))
        else:
            assert kind == "replicated"
        self.optimizer = torch.optim.AdamW(
            self.net.parameters(), lr=0.01, foreach=kind == "fsdp"
        )  # foreach takes no mixture
        self.steps = 0

    def _tensor_parallel(self, mesh: Any) -> None:
        parallelize_module(
            self.net,
            mesh,
            {"up": ColwiseParallel(output_layouts=Replicate()), "down": RowwiseParallel(input_layouts=Replicate())},
        )

    def step(self) -> None:
        self.steps += 1
        x = torch.randn(8, 37, generator=torch.Generator().manual_seed(self.steps))
        self.net(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer, "progress": {"steps": self.steps, "note": "a"}}

    def load(self, state: dict[str, Any]) -> None:
        set_state_dict(self.net, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.steps = state["progress"]["steps"]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict | list):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from leaves(value, f"{name}.{key}")
    else:
        yield name, state


def content(state: Any) -> dict[str, Any]:
    """The bytes of what this rank holds, and everything else."""
    return {
        name: (str(v.dtype), tuple(v.shape), local(v).detach().contiguous().clone().view(torch.uint8).numpy().tobytes())
        if isinstance(v, torch.Tensor) and v.dim()
        else (v.item() if isinstance(v, torch.Tensor) else v)
        for name, v in leaves(state)
    }


def blank(state: Any) -> Any:
    """The same state with other values."""
    if isinstance(state, torch.Tensor):
        return torch.full_like(state, 7)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return type(state)() if isinstance(state, int | str) else state


def load(path: str, like: Any, reader: Callable[..., Any] | None = None) -> dict[str, Any]:
    state = blank(like)
    dcp.load(state, storage_reader=(reader or dcp.FileSystemReader)(path))
    return content(state)


def save(engine: str, state: Any, path: str, **others: Any) -> None:
    if engine == "plain":
        dcp.save(state, checkpoint_id=path, **others)
    elif engine == "sync":
        dcp.save(state, storage_writer=LazyStorageWriter(path), **others)
    else:
        save_async(state, path, **others).result()


def save_async(state: Any, to: str | LazyStorageWriter, **others: Any) -> Any:
    """Saves on a group of its own, so that training may communicate meanwhile."""
    writer = LazyStorageWriter(to) if isinstance(to, str) else to
    return dcp.async_save(state, storage_writer=writer, process_group=dist.new_group(backend="gloo"), **others)


def why(call: Callable[[], Any]) -> str:
    """What a call raised on this rank; DCP's exception is no Exception."""
    text = ""
    try:
        call()
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    gc.collect()  # the exception is in a circle with the frames of the save
    return text


def names(folder: str) -> list[str]:
    dist.barrier()
    found = sorted(os.listdir(folder))
    dist.barrier()
    return found


# Interoperation


def saves_as_plain_dcp(kind: str, folder: str) -> None:
    training = Training(kind)
    for number in range(3):  # unknown to the first save, with a share known to the later ones
        training.step()
        state, expected = training.state(), content(training.state())
        for engine in ("plain", "sync", "async"):
            path = f"{folder}/{engine}-{number}"
            save(engine, state, path)
            for reader in (dcp.FileSystemReader, LazyStorageReader):
                assert load(path, state, reader) == expected, (path, reader)


KINDS = [("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("tp", 2), ("2d", 4), ("hsdp", 4), ("replicated", 2)]


@pytest.mark.parametrize(("kind", "world"), KINDS)
def test_every_engine_reads_and_writes_what_plain_dcp_does(kind: str, world: int, ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(world, saves_as_plain_dcp, kind, str(tmp_path))
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {f"{engine}-{n}" for engine in ("plain", "sync", "async") for n in range(3)}


def test_torchs_tools_convert_a_checkpoint_with_lazyckpt_uninstalled(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, saves_as_plain_dcp, "fsdp", str(tmp_path))
    converted = without_lazyckpt(
        "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save\n"
        "import torch\n"
        f"for engine in ('plain', 'sync', 'async'): dcp_to_torch_save(r'{tmp_path}/' + engine + '-2', engine)\n"
        "plain, *ours = (torch.load(e, weights_only=False) for e in ('plain', 'sync', 'async'))\n"
        "from torch.utils._pytree import tree_flatten\n"
        "for state in ours:\n"
        "    for a, b in zip(tree_flatten(plain)[0], tree_flatten(state)[0], strict=True):\n"
        "        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, (a, b)\n"
        "print('the same', len(tree_flatten(plain)[0]))",
        tmp_path,
    )
    assert converted.startswith("the same")


def without_lazyckpt(program: str, folder: Path) -> str:
    """Runs a program in a process that cannot import lazyckpt."""
    program = f"import sys; sys.modules['lazyckpt'] = None\n{program}"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def trains_and_saves(kind: str, path: str) -> None:
    training = Training(kind)
    training.step()
    dcp.async_save(training.state(), storage_writer=LazyStorageWriter(path)).result()


def loads_and_gathers(kind: str, path: str) -> dict[str, Any]:
    training = Training(kind)
    training.step()
    gathered = []
    for reader in (dcp.FileSystemReader, LazyStorageReader):
        state = blank(training.state())
        dcp.load(state, storage_reader=reader(path))
        whole = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in leaves(state)}
        gathered.append(content(whole))
    assert gathered[0] == gathered[1]
    return gathered[0]


def test_a_checkpoint_of_two_ranks_loads_on_any_number(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "two")
    ranks.run(2, trains_and_saves, "fsdp", path)
    wholes = [
        ranks.run(world, loads_and_gathers, kind, path)
        for world, kind in [(1, "fsdp"), (3, "fsdp"), (4, "fsdp"), (2, "tp")]
    ]
    assert all(whole == wholes[0][0] for of_world in wholes for whole in of_world)


def resumes(folder: str) -> None:
    straight = Training("fsdp")
    for _ in range(6):
        straight.step()
    first = Training("fsdp")
    for _ in range(3):
        first.step()
    future = save_async(first.state(), f"{folder}/3")
    first.step()  # goes on, as a run that dies later does
    future.result()
    second = Training("fsdp")
    state = second.state()
    dcp.load(state, storage_reader=LazyStorageReader(f"{folder}/3"))
    second.load(state)
    assert second.steps == 3
    for _ in range(3):
        second.step()
    assert content(second.state()) == content(straight.state())


def test_a_resumed_run_equals_the_uninterrupted_one(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, resumes, str(tmp_path))


# The snapshot


def steps_right_after(folder: str, fused: bool) -> list[float]:
    training = Training("fsdp", 30_001, torch.nn.LayerNorm)  # no buffers
    training.optimizer = torch.optim.AdamW(training.net.parameters(), lr=0.01, fused=fused)
    shares = []
    for number in range(4):
        training.step()
        state, expected = training.state(), content(training.state())
        writer = LazyStorageWriter(f"{folder}/{number}")
        future = save_async(state, writer)
        staged = writer._staged
        training.step()
        state["progress"]["note"] = "changed"
        future.result()
        assert load(f"{folder}/{number}", state, LazyStorageReader) == expected
        if staged is not None:  # torch's thread may have taken it already
            shares.append(staged.capture.metrics.eager_bytes / staged.capture.metrics.bytes)
    return shares


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_right_after_async_save_tears_nothing_and_waits_for_little(
    fused: bool, ranks: Ranks, tmp_path: Path
) -> None:
    for shares in ranks.run(3, steps_right_after, str(tmp_path), fused):
        assert all(share < 0.03 for share in shares), shares


def changes_everything(folder: str) -> None:
    weight = torch.nn.Parameter(torch.full((5000,), 1.0 + dist.get_rank()))
    average = torch.full((5000,), 10.0 + dist.get_rank())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard = DTensor.from_local(torch.full((5000,), 20.0 + dist.get_rank()), mesh, [Shard(0)])
    notes = {"list": [1, {"deep": "a"}], "array": [torch.tensor([1.0])]}
    state = {"w": weight, "average": average, "shard": shard, "notes": notes}
    for number in range(2):
        expected = content(copy.deepcopy({"w": weight, "average": average, "notes": notes, "shard": shard}))
        future = save_async(state, f"{folder}/{number}")
        notes["list"][1]["deep"] = "changed"
        notes["list"].append(5)
        weight.data, average.data = average.data, weight.data  # as a swap of averaged weights does
        shard._local_tensor = torch.zeros(5000)
        state.clear()
        future.result()
        like = {
            "w": weight,
            "average": average,
            "shard": shard,
            "notes": {"list": [0, {"deep": ""}], "array": [torch.ones(1)]},
        }
        found = load(f"{folder}/{number}", like)
        # Of tensors that every rank holds, any rank's may be saved.
        for name in (".w", ".average"):
            first = [None] * dist.get_world_size()
            dist.all_gather_object(first, expected[name])
            assert found.pop(name) in first
            expected.pop(name)
        assert found == expected
        weight.data, average.data = average.data, weight.data
        shard._local_tensor = torch.full((5000,), 20.0 + dist.get_rank())
        notes["list"] = [1, {"deep": "a"}]
        state.update(w=weight, average=average, shard=shard, notes=notes)


def test_a_snapshot_is_of_its_moment_whatever_becomes_of_the_state(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, changes_everything, str(tmp_path))


@pytest.mark.parametrize("written", [False, True])
def test_without_a_page_witness_the_wait_for_the_future_gives_the_verdict(written: bool, tmp_path: Path) -> None:
    """The main thread owes the verdict, and ``result()`` of torch's future is no call of ours."""
    weight = torch.nn.Parameter(torch.randn(500, 500))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    before = weight.detach().clone()
    with lazyckpt.Saver(witness="versions") as saver, torch.no_grad():
        writer = LazyStorageWriter(tmp_path / "step", saver=saver)
        future = dcp.async_save({"the weight": weight}, storage_writer=writer)
        if written:
            weight.add_(1)
        failed = why(lambda: future.result(timeout=60))
    if failed:
        assert written and "the weight was written to" in failed
        assert not (tmp_path / "step").exists()
    else:  # perhaps it was copied before the write
        found = {"the weight": torch.zeros(500, 500)}
        dcp.load(found, checkpoint_id=tmp_path / "step")
        assert torch.equal(found["the weight"], before)


class Halving(DefaultSavePlanner):
    """Writes tensors in another dtype: new tensors, made long after ``async_save``."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        return found.half() if isinstance(found, torch.Tensor) and found.dim() else found


def transforms(folder: str) -> tuple[str, list[str]]:
    training = Training("fsdp")
    training.step()
    failed = why(lambda: save("async", training.state(), f"{folder}/async", planner=Halving()))
    training.step()  # nothing waits for what was given up
    save("sync", training.state(), f"{folder}/sync", planner=Halving())
    return failed, names(folder)


def test_a_tensor_that_is_not_in_the_snapshot_fails_by_name(ranks: Ranks, tmp_path: Path) -> None:
    for failed, found in ranks.run(2, transforms, str(tmp_path)):
        assert "model.up.weight" in failed and "not in the snapshot" in failed
        assert found == ["sync"]


def shares_the_work(folder: str) -> tuple[list[int], list[int]]:
    torch.manual_seed(0)
    state: dict[str, Any] = {f"w{n}": torch.full((1000 * (1 + n % 5),), float(n)) for n in range(40)}
    state["big"] = torch.ones(30_000)
    for engine in ("sync", "async"):
        for number in range(3):
            save(engine, state, f"{folder}/{engine}-{number}")
            assert load(f"{folder}/{engine}-{number}", state) == content(state)
    sizes = [os.path.getsize(f"{folder}/{name}/__{dist.get_rank()}_0.distcp") for name in ("sync-2", "async-2")]
    return sizes, [len(os.listdir(f"{folder}/async-{number}")) for number in range(3)]


def test_what_all_ranks_hold_is_written_once_and_by_all_alike(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(3, shares_the_work, str(tmp_path))
    nbytes = 4 * (1000 * 8 * (1 + 2 + 3 + 4 + 5) + 30_000)
    for engine in (0, 1):
        sizes = [of_rank[0][engine] for of_rank in found]
        assert nbytes < sum(sizes) < 1.4 * nbytes  # items begin on pages
        assert max(sizes) - min(sizes) < 30_000
    # The first save copies all and writes a share; later ones capture their share, and there is nothing else.
    assert found[0][1] == [4, 4, 4]


def loses_a_key(folder: str) -> tuple[str, str]:
    state = {f"w{n}": torch.full((100,), float(n)) for n in range(4)}
    for number in range(2):
        save("async", state, f"{folder}/{number}")
    if dist.get_rank() == 0:
        del state["w0"], state["w1"]
    first = why(lambda: save("async", state, f"{folder}/lost"))
    second = why(lambda: save("async", state, f"{folder}/again"))
    return first, second


def test_a_state_that_changes_on_one_rank_is_saved_sooner_or_later(ranks: Ranks, tmp_path: Path) -> None:
    for first, second in ranks.run(2, loses_a_key, str(tmp_path)):
        assert not first or "not in the snapshot" in first
        assert not second
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


# Whole, or not there


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


# Reading, in one process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {"w": torch.arange(60_000.0).reshape(300, 200), "b": torch.ones(3), "n": {"x": 1}}
    dcp.save(state, storage_writer=LazyStorageWriter(tmp_path / "step"))
    return tmp_path / "step"


def state_like() -> dict[str, Any]:
    return {"w": torch.zeros(300, 200), "b": torch.zeros(3), "n": {"x": 0}}


def test_nothing_of_ours_stands_in_the_metadata(folder: Path) -> None:
    ops = pickletools.genops((folder / ".metadata").read_bytes())
    texts = {arg for _, arg, _ in ops if isinstance(arg, str)}
    assert not [text for text in texts if "lazyckpt" in text and text != str(folder)]
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    assert metadata.storage_meta.checkpoint_id == str(folder)


def test_a_checkpoint_of_an_old_torch_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old ones describe tensors by a class of ShardedTensor's. Regression: it was not to be unpickled."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.checkpoint.metadata.TensorProperties", TensorProperties)
        patch.setattr("torch.distributed.checkpoint.planner_helpers.TensorProperties", TensorProperties)
        dcp.save({"w": torch.arange(7.0)}, checkpoint_id=tmp_path / "old")
    assert b"torch.distributed._shard" in (tmp_path / "old" / ".metadata").read_bytes()
    state = {"w": torch.zeros(7)}
    dcp.load(state, storage_reader=LazyStorageReader(tmp_path / "old"))
    assert torch.equal(state["w"], torch.arange(7.0))


class Noting(DefaultSavePlanner):
    """Keeps what DCP tells a planner about the storage."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.told = storage_meta
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


def test_the_planner_the_writer_and_the_metadata_know_a_save_and_a_load_by_the_same_id(tmp_path: Path) -> None:
    """Regression: the planner heard of no id at the first save, and of the last save's at the next one."""
    writer, planner, seen = LazyStorageWriter(tmp_path / "0"), Noting(), set()
    for name in ("0", "1"):
        if name != "0":
            writer.reset(tmp_path / name)
        dcp.save({"w": torch.ones(3)}, storage_writer=writer, planner=planner)
        reader = LazyStorageReader(tmp_path / name)
        found = reader.read_metadata().storage_meta
        assert found is not None and found.load_id == reader.load_id
        assert planner.told.save_id == found.save_id == writer.save_id
        seen.add(found.save_id)
    assert len(seen) == 2 and "" not in seen


def test_a_damaged_file_is_named_with_its_tensor(folder: Path) -> None:
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    at = data.index(torch.tensor(1234.0).numpy().tobytes())
    data[at] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)
    assert (failed := why(lambda: dcp.load(state_like(), storage_reader=LazyStorageReader(folder))))
    assert "CorruptFileError" in failed and "__0_0.distcp" in failed and ": w" in failed


@pytest.mark.parametrize("where", ["metadata", "item"])
def test_a_hostile_pickle_runs_nothing(where: str, folder: Path, tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "was here"),)

    if where == "metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(Hostile()))
    else:
        out = io.BytesIO()
        torch.save(Hostile(), out)
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        info = metadata.storage_data[MetadataIndex("n.x")]
        info.offset, info.length = (folder / info.relative_path).stat().st_size, len(out.getvalue())
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with open(folder / info.relative_path, "ab") as file:
            file.write(out.getvalue())
    failed = why(lambda: dcp.load(state_like(), storage_reader=LazyStorageReader(folder)))
    assert "not to be unpickled" in failed
    assert not (tmp_path / "was here").exists()
    if where == "item":
        why(lambda: dcp.load(state_like(), storage_reader=LazyStorageReader(folder, weights_only=False)))
        assert (tmp_path / "was here").exists(), "this test proves nothing"
