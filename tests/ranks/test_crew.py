"""A Checkpointer on every rank: one folder, one answer, and the way back onto other ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lazyckpt
from lazyckpt.integrations.dcp import LazyStorageReader
from lazyckpt.ranks import store
from lazyckpt.tools.verify import verify


class Net(torch.nn.Module):
    """Sizes that no number of ranks divides, a buffer, and dropout, which draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(33, 77)
        self.norm = torch.nn.BatchNorm1d(77)
        self.down = torch.nn.Linear(77, 130)
        self.out = torch.nn.Linear(130, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.nn.functional.dropout(self.down(self.norm(self.up(x)).relu()), 0.2))


def built(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Net()
    world = dist.get_world_size() if dist.is_initialized() else 1
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        for part in (model.up, model.down):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "tp":
        mesh = init_device_mesh("cpu", (world,))
        parallelize_module(model, mesh, {"down": ColwiseParallel(), "out": RowwiseParallel()})
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "shard")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """The same batch on every rank, so that every number of ranks computes the same."""
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 33, generator=torch.Generator().manual_seed(3))).square().sum()
        loss.backward()
        optimizer.step()
    return float(loss)


def whole(tree: Any) -> Any:
    """The same with every DTensor as the whole tensor."""
    if isinstance(tree, DTensor):
        return tree.full_tensor().clone()
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    return [whole(value) for value in tree] if isinstance(tree, list) else tree


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return whole({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def save(folder: Path, kind: str, steps: int = 2) -> Any:
    model, optimizer = built(kind)
    with lazyckpt.Checkpointer(folder) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        trained(model, optimizer, steps)
        handle = ckpt.save(steps)
        expected = state_of(model, optimizer)
        trained(model, optimizer, 1)  # while it is copied
        return str(handle.result()), expected, handle.metrics.eager_bytes / handle.metrics.bytes


def restore(folder: Path, kind: str, steps: int = 0) -> Any:
    """Restores into new objects, or into some that have trained."""
    model, optimizer = built(kind)
    trained(model, optimizer, steps)
    with lazyckpt.Checkpointer(folder) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        return ckpt.restore(), state_of(model, optimizer)


def test_every_rank_gets_the_same_answer_and_torch_reads_it(ranks, tmp_path):
    (path, expected, _), (path_1, _, _) = ranks.run(2, save, tmp_path / "run", "fsdp")
    assert path == path_1 == str(tmp_path / "run/step-00000002")
    assert sorted(os.listdir(path)) == sorted(
        (".metadata", ".lazyckpt-lock", "__0_0.distcp", "__1_0.distcp", "manifest.json")
    )
    script = """
import sys
sys.modules["lazyckpt"] = None  # as if it were not installed
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], sys.argv[2])
"""
    subprocess.run([sys.executable, "-c", script, path, tmp_path / "whole.pt"], check=True)
    loaded = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert equal(loaded["model"], expected["model"])
    by_name = {name: loaded["optimizer"]["state"][name] for name in dict(Net().named_parameters())}
    assert equal(dict(enumerate(by_name.values())), expected["optimizer"]["state"])
    assert loaded["rng"].keys() == {"0", "1"}
    assert equal(lazyckpt.load(path)["model"], expected["model"])


@pytest.mark.parametrize("saved", ["fsdp", "tp"])
@pytest.mark.parametrize("steps", [0, 1])
def test_two_ranks_restore_what_two_ranks_saved(ranks, tmp_path, saved, steps):
    (_, expected, _), _ = ranks.run(2, save, tmp_path / "run", saved)
    for kind in ("fsdp", "tp", "plain"):
        for step, found in ranks.run(2, restore, tmp_path / "run", kind, steps):
            assert step == 2
            assert equal(found, expected), kind


def test_one_process_restores_what_two_ranks_saved(ranks, tmp_path):
    (_, expected, _), _ = ranks.run(2, save, tmp_path / "run", "fsdp")
    with pytest.warns(UserWarning, match="was saved by 2 ranks"):
        step, found = restore(tmp_path / "run", "plain")
    assert step == 2
    assert equal(found, expected)


def test_sharded_models_restore_what_one_process_saved(ranks, tmp_path):
    path, expected, _ = save(tmp_path / "run", "plain")
    assert sorted(os.listdir(path)) == ["manifest.json", "state.pt"]
    for steps in (0, 1):
        for kind in ("fsdp", "tp"):
            for step, found in ranks.run(2, restore, tmp_path / "run", kind, steps):
                assert step == 2
                assert equal(found, expected), kind


@pytest.mark.parametrize("world", [3, 4])
def test_other_numbers_of_ranks_restore_it(ranks, tmp_path, world):
    (_, expected, _), _ = ranks.run(2, save, tmp_path / "run", "fsdp")
    for step, found in ranks.run(world, restore, tmp_path / "run", "fsdp"):
        assert step == 2
        assert equal(found, expected)
    if world == 4:
        (path, expected, _), *_ = ranks.run(4, save, tmp_path / "hsdp", "hsdp")
        sizes = [os.path.getsize(Path(path) / f"__{rank}_0.distcp") for rank in range(4)]
        assert max(sizes) < 0.6 * sum(sizes)  # replicas share the work
        for _, found in ranks.run(2, restore, tmp_path / "hsdp", "tp"):
            assert equal(found, expected)


def run_on(folder: Path, steps: int, save_at: int | None) -> Any:
    """Trains with random numbers and a loader of each rank's own, from the newest checkpoint on."""
    model, optimizer = built("fsdp")
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    data = torch.utils.data.TensorDataset(torch.randn(40, 33, generator=torch.Generator().manual_seed(rank)))
    losses = []
    with lazyckpt.Checkpointer(folder) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        loader = ckpt.track_loader(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
        step = ckpt.restore() or 0
        for (batch,) in loader:
            if step == steps:
                break
            optimizer.zero_grad()
            loss = model(batch).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            step += 1
            if step == save_at:
                ckpt.save(step)
    return losses, state_of(model, optimizer)


def test_a_resumed_run_equals_the_uninterrupted_one(ranks, tmp_path):
    whole_run = ranks.run(2, run_on, tmp_path / "whole", 8, None)
    ranks.run(2, run_on, tmp_path / "run", 5, 4)
    resumed = ranks.run(2, run_on, tmp_path / "run", 8, None)
    for (losses, state), (rest, resumed_state) in zip(whole_run, resumed, strict=True):
        assert losses[4:] == rest
        for buffer in Net().norm.state_dict().keys() - dict(Net().norm.named_parameters()):
            del state["model"][f"norm.{buffer}"], resumed_state["model"][f"norm.{buffer}"]  # rank 0's on both ranks
        assert equal(state, resumed_state)
    assert whole_run[0][0] != whole_run[1][0]  # each rank has numbers and batches of its own


def test_steady_saves_use_no_collective_and_stay_lazy(ranks, tmp_path):
    for collectives, calls, eager in ranks.run(2, count_calls, tmp_path / "run"):
        assert collectives == []
        assert calls == []
        assert eager < 0.03


def count_calls(folder: Path) -> Any:
    """What ``save`` calls of torch.distributed and of its store, from the second save on."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    collectives: list[str] = []
    calls: list[str] = []
    main = threading.get_ident()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "c10d" in str(function):
                collectives.append(str(function))
            return function(*args, **(kwargs or {}))

    def spied(call):
        def called(client, *args):
            if threading.get_ident() == main and inside:
                calls.append(call.__name__)
            return call(client, *args)

        return called

    inside = False
    with lazyckpt.Checkpointer(folder) as ckpt, pytest.MonkeyPatch.context() as patch:
        for name in ("set", "claim", "look", "count", "delete", "ask", "release"):
            patch.setattr(store.TcpClient, name, spied(getattr(store.TcpClient, name)))
        ckpt.track(model=model, optimizer=optimizer)
        for step in range(1, 5):
            model(torch.ones(2, 512)).sum().backward()
            optimizer.step()
            inside = step > 1
            with Watch():
                handle = ckpt.save(step)
            inside = False
            collectives *= step > 1
        handle.result()
    return collectives, calls, handle.metrics.eager_bytes / handle.metrics.bytes


# Torch is imported once; each rank is a fork, and ends as an interpreter does.
LEAVES_A_SAVE_PENDING = """
import gc, os, sys, torch, lazyckpt
import torch.distributed as dist
sys.path[:0] = sys.argv[3:]
from test_crew import built, trained
folder, port = sys.argv[1:3]
torch.set_num_threads(1)
gc.freeze()  # or each end would collect what torch holds
children = []
for rank in range(2):
    if (child := os.fork()) == 0:
        store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        model, optimizer = built("fsdp")
        ckpt = lazyckpt.Checkpointer(folder)
        ckpt.track(model=model, optimizer=optimizer)
        trained(model, optimizer, 1)
        ckpt.save(1)
        break
    children.append(child)
else:
    sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def test_a_save_that_is_pending_at_exit_is_committed(tmp_path):
    """Without close() or result()."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    here = Path(__file__).parent
    arguments = [tmp_path / "run", str(store.port), here, here.parent]
    command = [sys.executable, "-c", LEAVES_A_SAVE_PENDING, *arguments]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run/step-00000001/manifest.json").exists()


# what goes wrong


def damage(folder: Path, file: str) -> None:
    """Flips a bit in the middle of the largest item of a file."""
    with open(folder / file, "r+b") as handle:
        at = os.path.getsize(folder / file) // 2
        handle.seek(at)
        byte = handle.read(1)
        handle.seek(at)
        handle.write(bytes([byte[0] ^ 4]))


def restores_otherwise(folder: Path, calls: list[dict[str, Any]]) -> tuple[str, bool]:
    """The error of a call that another rank makes otherwise, and whether the model stayed as it was."""
    model, optimizer = built("fsdp")
    before = state_of(model, optimizer)
    with lazyckpt.Checkpointer(folder) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        with pytest.raises(lazyckpt.ConfigError) as caught:
            ckpt.restore(**calls[dist.get_rank()])
        return str(caught.value), equal(state_of(model, optimizer), before)


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ([{}, {"step": 2}], "rank 0 calls restore(), rank 1 calls restore(step=2): all ranks restore the same"),
        ([{"step": 1}, {"step": 2}], "rank 0 calls restore(step=1), rank 1 calls restore(step=2)"),
        ([{}, {"only": ["optimizer"]}], "rank 0 calls restore(), rank 1 calls restore(only=['optimizer'])"),
        ([{"strict": False}, {}], "rank 0 calls restore(strict=False), rank 1 calls restore()"),
    ],
)
def test_ranks_that_restore_something_else_are_refused(ranks, tmp_path, calls, told):
    """Regression: a rank took what rank 0 had asked for, or kept its model, without an error."""
    ranks.run(2, save, tmp_path / "run", "fsdp", 2)
    for error, stayed in ranks.run(2, restores_otherwise, tmp_path / "run", calls):
        assert told in error and stayed


def test_damage_that_one_rank_sees_makes_all_go_back(ranks, tmp_path):
    ranks.run(2, save, tmp_path / "run", "fsdp", 2)
    (_, expected, _), _ = ranks.run(2, save, tmp_path / "run", "fsdp", 3)
    (path, _, _), _ = ranks.run(2, save, tmp_path / "run", "fsdp", 4)
    damage(Path(path), "__1_0.distcp")
    for step, found in ranks.run(2, restore, tmp_path / "run", "fsdp"):
        assert step == 3
        assert equal(found, expected)


def load_as_dcp(path: str) -> str:
    model, _ = built("fsdp")
    with pytest.raises(dist.checkpoint.api.CheckpointException) as caught:
        dist.checkpoint.load({"model": model.state_dict()}, storage_reader=LazyStorageReader(path))
    return str(caught.value.failures)


def test_a_file_of_another_save_is_found_although_each_item_is_intact(ranks, tmp_path):
    """As when a folder is copied over an older one of the same step, and the copy is broken off."""
    (_, expected, _), _ = ranks.run(2, save, tmp_path / "run", "fsdp", 3)
    (path, _, _), _ = ranks.run(2, save, tmp_path / "run", "fsdp", 4)
    old, new = tmp_path / "run/step-00000003/__1_0.distcp", Path(path, "__1_0.distcp")
    assert old.stat().st_size == new.stat().st_size
    shutil.copy(old, new)
    for step, found in ranks.run(2, restore, tmp_path / "run", "fsdp"):
        assert step == 3
        assert equal(found, expected)
    assert "__1_0.distcp: is of another save than .metadata" in ranks.run(2, load_as_dcp, path)[0]
    with pytest.raises(lazyckpt.CorruptFileError, match="of another save"):
        lazyckpt.load(path)
    Path(path, "manifest.json").unlink()  # a trainer's folder has none
    (found,) = verify(Path(path)).findings
    assert found.damage == ("__1_0.distcp: is of another save than .metadata",)
    with new.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(bytes(64))
    with pytest.raises(lazyckpt.CorruptFileError, match="does not end with the stamp"):
        lazyckpt.load(path)


def misfit(folder: Path) -> str:
    model, optimizer = built("fsdp")
    if dist.get_rank() == 1:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    before = state_of(model, optimizer)
    with lazyckpt.Checkpointer(folder) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        with pytest.raises(lazyckpt.RestoreError) as caught:
            ckpt.restore()
    assert equal(state_of(model, optimizer), before)
    return str(caught.value)


def test_what_does_not_fit_on_one_rank_touches_nothing_on_any(ranks, tmp_path):
    ranks.run(2, save, tmp_path / "run", "fsdp")
    told = ranks.run(2, misfit, tmp_path / "run")
    assert "parameter groups" in told[1]
    assert "rank 1" in told[0]
    assert "parameter groups" in told[0]
