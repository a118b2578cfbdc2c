"""All ranks restore one file together: each byte is read once, and no rank ends with other bytes, or waits for ever."""

from __future__ import annotations

import contextlib
import errno
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counted_reads import counted_reads
from processes import Died, Ranks, die
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lazyckpt
from lazyckpt import waits
from lazyckpt.formats.reader import FileReader, Record
from lazyckpt.formats.torch_zip_reader import directory_of
from lazyckpt.ranks import broadcast, shared_memory
from lazyckpt.ranks.shared_memory import Segment
from lazyckpt.ranks.shares import runs
from lazyckpt.reading import relay, together
from lazyckpt.reading.ranges import ParallelRead
from lazyckpt.reading.sharded.folder import ShardedFolder

KIB = 1 << 10
KNOBS: dict[str, Any] = {
    "chunk_bytes": 64 << 10,
    "host_buffer_bytes": 4 << 20,
    "rank_timeout_s": 20.0,
    "writers": "all",
}
SIZES = ((300, 257), (1, 33), (1024, 64), (77, 1000), (513, 129), (40_000,), (3,))


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(torch.randn(size, generator=generator) for size in SIZES)
        self.tied = self.weights[0]
        self.register_buffer("mean", torch.full((5000,), float(seed)))

    def forward(self) -> torch.Tensor:
        return torch.stack([weight.square().sum() for weight in self.weights]).sum()


class Training:
    def __init__(self, seed: int) -> None:
        self.model = Net(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model().backward()
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}.{name}": tensor.clone() for name, tensor in state.items()}
        return found


def elsewhere(offer: str) -> Segment:
    raise FileNotFoundError(errno.ENOENT, "another machine", offer)


@contextlib.contextmanager
def small_pieces(way: str = "memory") -> Iterator[None]:
    """Files of these tests are read together, in several rounds, and some tensors travel alone."""
    with pytest.MonkeyPatch.context() as patch:
        if way == "broadcasts" or (way == "memory of some" and dist.get_rank() == 1):
            patch.setattr(Segment, "find", elsewhere)
        elif way == "memory":
            patch.setattr(broadcast.Broadcasts, "start", None)
        patch.setattr(shared_memory, "SLOT_BYTES", 20 * KIB)
        patch.setattr(relay, "LEAST_BYTES", 64 * KIB)
        patch.setattr(relay, "ROUND_BYTES", 96 * KIB)
        patch.setattr(broadcast, "LARGE_BYTES", 32 * KIB)
        patch.setattr(broadcast, "PIECE_BYTES", 48 * KIB)
        yield


@contextlib.contextmanager
def opened(folder: Path, training: Training, **knobs: Any) -> Iterator[lazyckpt.Checkpointer]:
    with lazyckpt.Checkpointer(folder, **KNOBS | knobs) as ckpt:
        ckpt.track(model=training.model, optimizer=training.optimizer)
        yield ckpt


def save(folder: Path, steps: int = 1) -> dict[str, torch.Tensor]:
    """Returns the tensors of the last step, which are the same on all ranks."""
    training = Training(1)
    torch.manual_seed(100 + dist.get_rank())
    with opened(folder, training) as ckpt:
        for step in range(1, steps + 1):
            training.step()
            ckpt.save(step).result()
    return training.tensors()


def changed(model: Net, how: str) -> dict[str, Any]:
    """Changes the model; returns the arguments of ``restore()``."""
    if how == "cast":
        model.to(torch.bfloat16)
        return {"cast": True}
    if how == "strided":
        model.weights[2] = nn.Parameter(torch.randn(64, 1024).t())
    elif how == "missing":
        model.register_buffer("new", torch.ones(3))
        return {"strict": False}
    return {"only": ["model"]} if how == "only" else {}


def restored(folder: Path, how: str = "fresh", way: str = "memory", **knobs: Any) -> Any:
    """Restores what ``save`` has saved. Returns the tensors, a random number, and the bytes that this rank has read."""
    training = Training(2 + dist.get_rank())
    arguments = changed(training.model, how)
    if how == "stepped":
        training.step()  # now the optimizer has a state, which is read in place
    torch.manual_seed(0)
    with small_pieces(way), counted_reads(alone=False) as reads, opened(folder, training, **knobs) as ckpt:
        assert ckpt.restore(**arguments) is not None
    assert training.model.tied is training.model.weights[0]
    return training.tensors(), torch.rand(1).item(), reads.nbytes


@pytest.mark.long(first=5)
@pytest.mark.parametrize("way", ["memory", "broadcasts"])
@pytest.mark.parametrize("how", ["fresh", "stepped", "cast", "strided", "missing", "only"])
def test_every_rank_has_the_saved_state_and_has_read_its_share(
    ranks: Ranks, tmp_path: Path, how: str, way: str
) -> None:
    world = 4 if how == "stepped" else 2
    saved = ranks.run(world, save, tmp_path)[0]
    found = ranks.run(world, restored, tmp_path, how, way)
    for tensors, _, _ in found:
        for name, tensor in tensors.items():
            if name != "new":
                expected = saved[name] if how != "cast" else saved[name].to(tensor.dtype)
                assert torch.equal(tensor, expected), name
        assert tensors.keys() - {"new"} == {name for name in saved if how != "only" or not name[0].isdigit()}
    assert len({draw for _, draw, _ in found}) == (1 if how == "only" else world)
    read = [nbytes for _, _, nbytes in found]
    nbytes = sum(tensor.nbytes for name, tensor in saved.items() if name not in ("tied", "weights.tied"))
    if how == "only":
        nbytes = sum(tensor.nbytes for name, tensor in saved.items() if not name[0].isdigit() and name != "tied")
    assert nbytes == sum(read)
    assert max(read) - min(read) <= 4096 * 2


def without_memory(folder: Path) -> Any:
    def refuse(name: str) -> int:
        raise PermissionError(errno.EPERM, "no memory for you", name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "memfd_create", refuse)
        return restored(folder, way="broadcasts")


def test_ranks_that_may_not_share_memory_restore_together(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.run(2, save, tmp_path)[0]
    for tensors, _, nbytes in ranks.run(2, without_memory, tmp_path):
        assert all(torch.equal(tensors[name], tensor) for name, tensor in saved.items())
        assert nbytes > 0


def test_ranks_of_two_machines_restore_together(ranks: Ranks, tmp_path: Path) -> None:
    """One rank cannot map the memory of the others, so none uses it."""
    saved = ranks.run(3, save, tmp_path)[0]
    for tensors, _, nbytes in ranks.run(3, restored, tmp_path, "fresh", "memory of some"):
        assert all(torch.equal(tensors[name], tensor) for name, tensor in saved.items())
        assert nbytes > 0


def sharded(folder: Path, action: str) -> Any:
    """Two replicas of two shards. Returns the whole tensors, and the bytes that this rank has read."""
    read: list[int] = []

    def counted(self: ShardedFolder, targets: Any, engine: Any, original: Any = ShardedFolder.read) -> None:
        read.extend(target.local.nbytes for target in targets)
        original(self, targets, engine)

    training = Training(1 if action == "save" else 5)
    del training.model.tied
    fully_shard(training.model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=0.01)
    with small_pieces(), pytest.MonkeyPatch.context() as patch, opened(folder, training, writers=None) as ckpt:
        patch.setattr(ShardedFolder, "read", counted)
        if action == "save":
            for step in (1, 2):
                for parameter in training.model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                training.optimizer.step()
                ckpt.save(step).result()
        else:
            assert ckpt.restore() == int(action)
    tensors = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in training.tensors().items()}
    return tensors, sum(read)


@pytest.mark.filterwarnings("ignore")
def test_replicas_of_a_shard_read_it_once(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.run(4, sharded, tmp_path, "save")[0][0]
    found = ranks.run(4, sharded, tmp_path, "2")
    for tensors, _ in found:
        assert all(torch.equal(tensors[name], tensor) for name, tensor in saved.items())
    read = [nbytes for _, nbytes in found]
    once = sum(tensor.nbytes for tensor in saved.values())
    whole = saved["mean"].nbytes + sum(t.nbytes for name, t in saved.items() if name.endswith("step"))
    assert once <= sum(read) <= once + 3 * whole and all(read)
    flip(tmp_path / "step-00000002" / "__1_0.distcp", 200_000)
    assert all(nbytes > 0 for _, nbytes in ranks.run(4, sharded, tmp_path, "1"))


@pytest.mark.parametrize("sizes", [[], [0, 0], [5, 0, 4096, 1, 90_000, 3, 40_960, 20_480]])
def test_slots_hold_every_byte_once(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", 20 * KIB)
    covered = [0] * len(sizes)
    for parts in shared_memory.packed(sizes):
        end = 0
        for number, begin, nbytes, at in parts:
            assert begin == covered[number] and nbytes > 0 and at >= end and at + nbytes <= 20 * KIB and at % 64 == 0
            covered[number] += nbytes
            end = at + nbytes
    assert covered == sizes


def test_memory_of_another_process_is_not_taken_for_the_one_that_was_offered() -> None:
    segment, offer = Segment.make()
    assert segment is not None
    pid, number, name = offer.split("/")
    other = Segment.find(offer)
    segment.counters[3] = 7
    assert other.counters[3] == 7
    with open("/dev/null") as file:
        for wrong in (f"{pid}/{file.fileno()}/{name}", f"{pid}/{number}/{name[:-1]}", f"999999999/{number}/{name}"):
            with pytest.raises(OSError):
                Segment.find(wrong)
    segment.close()
    with pytest.raises(OSError):
        Segment.find(offer)


def without_a_group(folder: Path) -> Any:
    if dist.get_rank() == 0:
        return restored(folder, writers=None)[2]
    return None


def test_a_rank_alone_reads_alone(ranks: Ranks, tmp_path: Path) -> None:
    """Without ``writers`` only some ranks may call restore(), so no collective may be in it."""
    ranks.run(2, save, tmp_path)
    assert ranks.run(2, without_a_group, tmp_path) == [0, None]


def with_other_names(folder: Path) -> Any:
    """Rank 1 leaves an entry out, which no other rank can know from the text of its call."""
    training = Training(7)
    with small_pieces(), opened(folder, training) as ckpt:
        leave = "weights.5" if dist.get_rank() == 1 else None
        found = ckpt.restore(strict=False, rename=lambda name: None if name == leave else name)
        assert found is not None
    return training.tensors()["weights.5"], found.missing


def test_ranks_that_take_other_entries_read_alone(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.run(2, save, tmp_path)[0]
    (all_of_it, none), (without, missing) = ranks.run(2, with_other_names, tmp_path)
    assert torch.equal(all_of_it, saved["weights.5"]) and none == ()
    assert torch.equal(without, Net(7).weights[5]) and missing == ("model.weights.5",)


def refused(folder: Path, training: Training | None = None, way: str = "memory", **knobs: Any) -> Any:
    """Returns the error of restore(), the seconds it took, and whether the state was touched."""
    training = training or Training(9)
    before = training.tensors()
    with small_pieces(way), opened(folder, training, **knobs) as ckpt:
        begin = time.monotonic()
        with pytest.raises(lazyckpt.LazyCkptError) as caught:
            ckpt.restore()
        took_s = time.monotonic() - begin
        with contextlib.suppress(lazyckpt.LazyCkptError):
            ckpt.close()
    after = training.tensors()
    same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    return type(caught.value).__name__, str(caught.value), took_s, not same


def with_another_shape(folder: Path) -> Any:
    training = Training(9)
    if dist.get_rank() == 1:
        training.model.weights[3] = nn.Parameter(torch.zeros(3, 3))
    return refused(folder, training)


def test_a_tensor_that_does_not_fit_on_one_rank_touches_no_rank(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, save, tmp_path)
    for rank, (kind, told, _, touched) in enumerate(ranks.run(2, with_another_shape, tmp_path)):
        assert kind == "RestoreError" and "weights.3" in told and not touched
        assert ("rank 1" in told) == (rank == 0)


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def storages(path: Path) -> list[Record]:
    with FileReader(path) as file:
        found = directory_of(file).records.values()
    return sorted((r for r in found if r.name.startswith("data/") and r.nbytes > 10_000), key=lambda r: r.offset)


def passed_over(folder: Path) -> Any:
    """Returns the step that was restored, whether the state is that one, and the warnings."""
    training = Training(4)
    with small_pieces(), opened(folder, training) as ckpt, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = ckpt.restore()
        assert step is not None
        state = lazyckpt.load(ckpt.checkpoint(step).path)
    found = training.tensors()
    same = all(torch.equal(found[name], tensor) for name, tensor in state["model"].items())
    return int(step), same, "\n".join(str(warning.message) for warning in caught)


@pytest.mark.parametrize("where", ["in a share", "in the first part", "in the last part"])
def test_ranks_that_find_a_flipped_bit_all_go_back_to_the_checkpoint_before(
    ranks: Ranks, tmp_path: Path, where: str
) -> None:
    ranks.run(2, save, tmp_path, 2)
    file = tmp_path / "step-00000002" / "state.pt"
    records = storages(file)
    half, at = sum(r.nbytes for r in records) // 2, 0
    for record in records:
        if at + record.nbytes > half + 8192:
            break  # both ranks read it; rank 0 all before
        at += record.nbytes
    if where == "in a share":
        record = records[0]
        flip(file, record.offset + 9)
    else:
        flip(file, record.offset + (9 if where == "in the first part" else record.nbytes - 9))
    for rank, (step, same, told) in enumerate(ranks.run(2, passed_over, tmp_path)):
        assert step == 1 and same
        name = "archive/" * record.name.startswith("archive/") + record.name
        assert f"{file}: " in told and f"checksum does not match: {name}" in told
        if where == "in a share":
            assert ("rank 0: checksum" in told) == (rank == 1)
        else:
            assert "which ranks 0, 1 have read" in told


def interrupted(folder: Path, way: str) -> Any:
    """Rank 1 is interrupted, and lives on until rank 0 knows of it."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with small_pieces(way), opened(folder, Training(9)) as ckpt, pytest.MonkeyPatch.context() as patch:
        begin = time.monotonic()
        if dist.get_rank() == 1:
            patch.setattr(together.Filling, "_place", interrupt)
            with pytest.raises(KeyboardInterrupt):
                ckpt.restore()
            while not (folder / "told").exists() and time.monotonic() < begin + 30:
                time.sleep(0.01)
            return None
        with pytest.raises(lazyckpt.RankError) as caught:
            ckpt.restore()
        (folder / "told").touch()
        return str(caught.value), time.monotonic() - begin


@pytest.mark.parametrize("way", ["memory", "broadcasts"])
def test_a_rank_that_is_interrupted_is_named_at_once(ranks: Ranks, tmp_path: Path, way: str) -> None:
    ranks.run(2, save, tmp_path)
    (told, took_s), _ = ranks.run(2, interrupted, tmp_path, way)
    assert "rank 1 failed: KeyboardInterrupt" in told and took_s < 25


class BadDisk(ParallelRead):
    def __init__(self, path: Any, *_: Any) -> None:
        self._path = path
        with self._load_error():
            raise OSError(errno.EIO, "no luck")


def with_a_bad_disk(folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(together, "ParallelRead", BadDisk)
        patch.setattr(waits, "READ_RETRIES_S", (0.01,))
        return refused(folder)


def test_a_rank_that_cannot_read_is_named_on_all(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(3, save, tmp_path)
    for rank, (kind, told, _, touched) in enumerate(ranks.run(3, with_a_bad_disk, tmp_path)):
        assert kind == "ReadError" and "no luck" in told and "the tracked state is undefined now" in told, told
        assert ("rank 1" in told) == (rank != 1) and touched


def without_one(folder: Path, way: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(together.Filling, "_read", lambda *_: die())
        return refused(folder, way=way, rank_timeout_s=1.5)


@pytest.mark.long(first=1)
@pytest.mark.parametrize("way", ["memory", "broadcasts"])
def test_a_rank_that_dies_is_named_on_all_within_the_timeout(ranks: Ranks, tmp_path: Path, way: str) -> None:
    ranks.run(4, save, tmp_path)
    found = ranks.run(4, without_one, tmp_path, way)
    assert found[1] == Died(9)
    for kind, told, took_s, _ in (found[0], *found[2:]):
        assert kind == "RankError" and "rank 1 has given no sign of life for 1.5 s" in told, told
        assert "the tracked state is undefined now" in told
        assert took_s < 15


@pytest.mark.parametrize(("count", "seed"), [(1, 0), (2, 1), (4, 2), (7, 3), (64, 4)])
def test_runs_are_equal_and_hold_every_byte_once(count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 100_000, (40,), generator=generator).tolist()
    begins, at = [], 777
    for size in sizes:
        begins.append(at)
        at += size + 64 - size % 64
    found = runs(begins, sizes, count)
    assert len(found) == count
    pieces = [piece for run in found for piece in run]
    covered = [0] * len(sizes)
    for number, begin, nbytes in pieces:
        assert nbytes > 0 and begin == covered[number]
        covered[number] += nbytes
        assert covered[number] == sizes[number] or (begins[number] + covered[number]) % 4096 == 0
    assert covered == sizes
    assert [piece.number for piece in pieces] == sorted(piece.number for piece in pieces)
    mean = sum(sizes) / count
    assert all(abs(sum(piece.nbytes for piece in run) - mean) <= 4096 for run in found)
