"""A state that all ranks hold, written by many of them into one file."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import warnings
import zipfile
import zlib
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Ranks
from torch.overrides import TorchFunctionMode

import lazyckpt
from lazyckpt.pipeline.replicated import file, plan, share
from lazyckpt.ranks import store

KNOBS: dict[str, Any] = {"chunk_bytes": 64 << 10, "host_buffer_bytes": 4 << 20, "rank_timeout_s": 20.0}
SIZES = ((300, 257), (1, 33), (1024, 64), (77, 1000), (513, 129), (40_000,))  # some are multiples of 4096, some small


class Net(torch.nn.Module):
    def __init__(self, sizes: tuple[tuple[int, ...], ...] = SIZES) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.weights = torch.nn.ParameterList(torch.randn(size, generator=generator) for size in sizes)
        self.register_buffer("mean", torch.zeros(5000))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self) -> torch.Tensor:
        self.count += 1
        return torch.stack([weight.square().sum() for weight in self.weights]).sum()


class Training:
    """The same on every rank but for a buffer and the random state."""

    def __init__(self, rank: int, sizes: tuple[tuple[int, ...], ...] = SIZES) -> None:
        self.model = Net(sizes)
        self.model.mean.fill_(rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        torch.manual_seed(100 + rank)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model().backward()
        self.optimizer.step()

    def track(self, ckpt: lazyckpt.Checkpointer) -> None:
        ckpt.track(model=self.model, optimizer=self.optimizer)


def random_states() -> list[torch.Tensor]:
    state = lazyckpt.RandomStates().state_dict()
    return [state["torch"], state["python"]["words"], *([state["numpy"]["key"]] if state["numpy"] else [])]


def owned_bytes(training: Training) -> int:
    tensors = [*training.model.parameters()]
    tensors += [t for state in training.optimizer.state.values() for t in state.values() if t.numel() > 1]
    return sum(t.nbytes for t in tensors)


def save_all(folder: Path, writers: Any) -> Any:
    """Three saves by all ranks; rank 0 saves the same alone into another folder."""
    rank = dist.get_rank()
    training = Training(rank)
    metrics = []
    alone = lazyckpt.Checkpointer(folder / "alone", **KNOBS) if rank == 0 else contextlib.nullcontext()
    with lazyckpt.Checkpointer(folder / "run", writers=writers, **KNOBS) as ckpt, alone as other:
        for saver in filter(None, (ckpt, other)):
            training.track(saver)
        for step in range(1, 4):
            training.step()
            if other is not None:
                other.save(step).result()
            handle = ckpt.save(step)
            training.step()
            handle.result()
            metrics.append((handle.metrics.copied_bytes, handle.metrics.eager_bytes, handle.metrics.bytes))
    return metrics, owned_bytes(training)


class Dropping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 700), torch.nn.Linear(700, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.dropout(self.up(x).relu(), 0.3))


class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.full((64,), at / 64) + torch.randn(64)  # augmented


def trained(folder: Path, first: int, last: int, writers: Any = "all", save_at: int | None = 5) -> Any:
    """DistributedDataParallel with dropout and augmentation, from the newest checkpoint on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(Dropping())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(77 + rank)
    sampler = torch.utils.data.DistributedSampler(Data(), world, rank, shuffle=True, seed=3)
    with lazyckpt.Checkpointer(folder, writers=writers, **KNOBS) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        loader = ckpt.track_loader(torch.utils.data.DataLoader(Data(), batch_size=4, sampler=sampler))
        step = ckpt.restore() or 0
        assert step == first
        while step < last:
            for batch in loader:
                optimizer.zero_grad()
                model(batch).square().sum().backward()
                optimizer.step()
                step += 1
                if step == save_at:
                    ckpt.save(step)
                if step == last:
                    break
    draws = torch.rand(3).tolist()
    return [p.tolist() for p in model.parameters()], draws


def test_a_resumed_run_ends_in_the_same_bits_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    straight = ranks.run(2, trained, tmp_path / "straight", 0, 11)
    ranks.run(2, trained, tmp_path / "run", 0, 5)
    resumed = ranks.run(2, trained, tmp_path / "run", 5, 11)
    assert resumed == straight
    assert resumed[0][0] == resumed[1][0] and resumed[0][1] != resumed[1][1]


def with_uneven_inputs(folder: Path) -> Any:
    """Rank 1 has three batches more than rank 0, and saves once more."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(Dropping(), static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    expected: dict[str, torch.Tensor] = {}
    said = ""
    try:
        with lazyckpt.Checkpointer(folder, writers="all", **KNOBS) as ckpt, model.join():
            ckpt.track(model=model, optimizer=optimizer)
            for step in range(1, 6 + 3 * rank):
                optimizer.zero_grad()
                model(torch.full((4, 64), step / 8)).square().sum().backward()
                optimizer.step()
                if step == 5:
                    expected = {name: value.clone() for name, value in model.state_dict().items()}
                if step in (3, 5, 7):
                    ckpt.save(step)
    except lazyckpt.RankError as error:
        said = str(error)
    saved = lazyckpt.load(folder / "step-00000005")["model"]
    return all(torch.equal(saved[name], value) for name, value in expected.items()), said


def test_join_and_a_static_graph_save_exactly_while_all_ranks_have_inputs(ranks: Ranks, tmp_path: Path) -> None:
    (whole, nothing), (also_whole, said) = ranks.run(2, with_uneven_inputs, tmp_path)
    assert whole and also_whole and nothing == ""
    assert "step 7" in said and "rank 0 has closed its Checkpointer" in said
    writers = json.loads((tmp_path / "step-00000005/manifest.json").read_text())["files"][0]["writers"]
    assert writers == [0, 1] and not (tmp_path / "step-00000007").exists()


def resharded(folder: Path, first: int, last: int) -> Any:
    with pytest.warns(UserWarning, match="was saved by 2 ranks, and 3 restore it.*loaders begin a new epoch"):
        return trained(folder, first, last)


def test_another_number_of_ranks_goes_on_with_a_warning(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, trained, tmp_path, 0, 5)
    draws = [draw for _, draw in ranks.run(3, resharded, tmp_path, 5, 5)]
    assert len({tuple(draw) for draw in draws}) == 3


def restored_alone(folder: Path) -> Any:
    return trained(folder, 5, 5, None)[0]


def test_ranks_without_writers_and_one_process_restore_it_and_the_other_way_round(ranks: Ranks, tmp_path: Path) -> None:
    both = ranks.run(2, trained, tmp_path, 0, 5)
    with pytest.warns(UserWarning, match="was saved by 2 ranks, and 1 restore it"):
        tree = lazyckpt.load(tmp_path / "step-00000005")
        model = Dropping()
        with lazyckpt.Checkpointer(tmp_path, read_only=True) as ckpt:
            ckpt.track(model=torch.nn.ModuleDict({"module": model}))
            ckpt.restore(only=["model", "rng"])
    assert [p.tolist() for p in model.parameters()] == both[0][0]
    assert ranks.run(2, trained, tmp_path, 5, 5, None) == both
    assert set(tree) == {"model", "optimizer", "loader", "rng"}


@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_write_the_file_that_one_would_write(ranks: Ranks, tmp_path: Path, world: int) -> None:
    found = ranks.run(world, save_all, tmp_path, "all")
    for step in range(1, 4):
        folder = tmp_path / "run" / f"step-{step:08d}"
        one = (tmp_path / "alone" / folder.name / "state.pt").read_bytes()
        assert (folder / "state.pt").read_bytes() == one
        assert lazyckpt.verify(folder).ok
        torch.load(folder / "state.pt")
        with zipfile.ZipFile(folder / "state.pt") as archive:
            assert archive.testzip() is None
        writers = json.loads((folder / "manifest.json").read_text())["files"][0]["writers"]
        assert writers == (list(range(world)) if step > 1 else [0])
        names = {"state.pt", "manifest.json", ".lazyckpt-lock", *(f"rank-{rank}.pt" for rank in range(1, world))}
        assert set(os.listdir(folder)) == names
    own = sum(t.nbytes for t in random_states())
    for rank, (metrics, owned) in enumerate(found):
        first, *others = [copied for copied, _, _ in metrics]
        assert first > owned if rank == 0 else first <= own
        mean = (owned + 20_000) / world  # with a buffer, which is rank 0's
        more = 4096 * world if rank == 0 else 0  # blocks with checksums
        assert all(-4096 <= copied - own - mean <= 4096 + more for copied in others), (rank, others, mean)


def count_calls(folder: Path) -> Any:
    """The collectives, and the calls of the store inside ``save()``, of each save."""
    calls: list[str] = []
    here = threading.get_ident()

    class Seen(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(function, "__module__", "").startswith("torch.distributed"):
                calls.append(str(function))
            return function(*args, **(kwargs or {}))

    def spied(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == here:
                calls.append(original.__name__)
            return original(*args, **kwargs)

        return call

    found = []
    with pytest.MonkeyPatch.context() as patch:
        for client, name in ((store.PollingClient, "_call"), (store.TcpClient, "_call"), (store.TcpClient, "ask")):
            patch.setattr(client, name, spied(getattr(client, name)))
        for name in ("all_reduce", "broadcast", "barrier", "all_gather", "all_gather_object", "broadcast_object_list"):
            patch.setattr(dist, name, spied(getattr(dist, name)))
        training = Training(dist.get_rank())
        with lazyckpt.Checkpointer(folder, writers="all", **KNOBS) as ckpt, Seen():
            training.track(ckpt)
            for step in range(1, 5):
                training.step()
                calls.clear()
                handle = ckpt.save(step)
                found.append(list(calls))
                handle.result()
    return found


def test_save_talks_to_no_other_rank_from_the_second_time_on(ranks: Ranks, tmp_path: Path) -> None:
    for first, *others in ranks.run(2, count_calls, tmp_path):
        assert first and others == [[]] * 3


def save_otherwise(folder: Path, what: str) -> Any:
    """Rank 1 holds another state than rank 0."""
    rank = dist.get_rank()
    sizes = ((513, 257), *SIZES[1:]) if rank == 1 and what == "shape" else SIZES
    training = Training(rank, sizes)
    with lazyckpt.Checkpointer(folder, writers="all", on_error="warn", **KNOBS) as ckpt:
        training.track(ckpt)
        told = []
        for step in (1, 2):
            training.step()
            handle = ckpt.save(step)
            with contextlib.suppress(lazyckpt.SaveError):
                handle.result()
            told.append(str(handle.exception()))
    return told


def test_a_rank_with_another_state_is_named_with_the_tensor(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks.run(2, save_otherwise, tmp_path, "shape"):
        for error in told:
            assert "rank 1" in error or "the state differs" in error, error
            assert "rank 0 has model.weights.0 with 308400 bytes, this rank has model.weights.0 with 527364" in error
    assert not list(tmp_path.glob("step-*"))


class Sampling(torch.utils.data.Sampler):  # type: ignore[type-arg]
    """Its state has another size on each rank."""

    def __init__(self, nbytes: int) -> None:
        self.seen = torch.zeros(nbytes, dtype=torch.uint8)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"].clone()


def save_own(folder: Path, nbytes: int, action: str) -> Any:
    rank = dist.get_rank()
    training, sampling = Training(rank), Sampling(1 + rank * nbytes)
    with lazyckpt.Checkpointer(folder, writers="all", **KNOBS) as ckpt:
        training.track(ckpt)
        ckpt.track(sampling=sampling)
        if action == "restore":
            ckpt.restore()
            return sampling.seen.sum().item()
        sampling.seen += 1
        for step in (1, 2):
            training.step()
            ckpt.save(step).result()
    return None


@pytest.mark.parametrize("nbytes", [5000, 100_000])
def test_the_own_state_of_a_rank_may_have_another_size(ranks: Ranks, tmp_path: Path, nbytes: int) -> None:
    """Then the bytes that it writes lie elsewhere in the file than it had laid them out."""
    ranks.run(2, save_own, tmp_path, nbytes, "save")
    assert all(lazyckpt.verify(folder).ok for folder in tmp_path.glob("step-*"))
    assert ranks.run(2, save_own, tmp_path, nbytes, "restore") == [1, 1 + nbytes]


@pytest.mark.parametrize("writers", ["rank0", "node", 2, "auto"])
def test_some_ranks_write(ranks: Ranks, tmp_path: Path, writers: Any) -> None:
    found = ranks.run(3, save_all, tmp_path, writers)
    for step in range(1, 4):
        count = 2 if writers == 2 and step > 1 else 1
        folder = tmp_path / "run" / f"step-{step:08d}"
        assert (folder / "state.pt").read_bytes() == (tmp_path / "alone" / folder.name / "state.pt").read_bytes()
        assert lazyckpt.verify(folder).ok
        written_by = json.loads((folder / "manifest.json").read_text())["files"][0]["writers"]
        assert written_by == list(range(count))
    (last, owned) = found[-1]
    assert all(copied < owned / 10 for copied, _, _ in last)


@pytest.mark.parametrize("kind", ["ZeroRedundancyOptimizer", "DistributedFusedAdam", "DistributedFusedLAMB"])
def test_optimizers_whose_state_is_cut_are_refused(kind: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    base = type(kind, (torch.optim.SGD,), {})
    with lazyckpt.Checkpointer(tmp_path, writers="all") as ckpt:
        with pytest.raises(lazyckpt.ConfigError, match=f"'optimizer' is a {kind}"):
            ckpt.track(optimizer=type("Mine", (base,), {})(model.parameters(), lr=1.0))
        ckpt.track(model=model)
        ckpt.save(1).result()  # one process writes all
    assert sorted(os.listdir(tmp_path / "step-00000001")) == ["manifest.json", "state.pt"]


@pytest.mark.parametrize("writers", ["none", 0, True, 1.5])
def test_other_writers_are_refused(tmp_path: Path, writers: Any) -> None:
    with pytest.raises(lazyckpt.ConfigError, match="writers="):
        lazyckpt.Checkpointer(tmp_path, writers=writers)


def with_other_writers(folder: Path) -> str:
    writers: Any = "all" if dist.get_rank() else "rank0"
    with lazyckpt.Checkpointer(folder, writers=writers, **KNOBS) as ckpt:
        with pytest.raises(lazyckpt.ConfigError) as caught:
            ckpt.save(1)
        return str(caught.value)


def test_ranks_with_other_writers_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    told = "rank 0 has writers='rank0', max_in_flight=2; rank 1 has writers='all', max_in_flight=2. Give all the same"
    assert ranks.run(2, with_other_writers, tmp_path) == [told] * 2


def test_receipts_that_leave_a_hole_are_refused() -> None:
    parts = [b"a" * 4096, b"b" * 4096, b"c" * 100]
    crcs = [zlib.crc32(part) for part in parts]
    runs = [(8192, 100, crcs[2]), (0, 4096, crcs[0]), (4096, 4096, crcs[1])]
    whole = zlib.crc32(b"".join(parts))
    assert file._crc_of_file("state.pt", runs, 8292) == whole
    assert file._whole([(0, 4096, 8192, crcs[1]), (0, 8192, 8292, crcs[2]), (0, 0, 4096, crcs[0])], [8292]) == [whole]
    twice = [runs[0], runs[1], runs[1]]  # as many bytes as the file
    for wrong in (runs[:2], runs[1:], [*runs, (4096, 4096, crcs[1])], twice):
        with pytest.raises(ValueError, match="wrote"):
            file._crc_of_file("state.pt", wrong, 8292)
    for missing in ([(0, 0, 4096, 1)], [(0, 4096, 8292, 1)], [], [(0, 0, 8292, 1), (0, 0, 8292, 1)]):
        with pytest.raises(ValueError, match="no rank wrote"):
            file._whole(missing, [8292])


def mend(training: Training) -> None:
    """Gives the last rank the values of rank 0."""
    state = [tensor for of_one in training.optimizer.state.values() for tensor in of_one.values()]
    for tensor in (*training.model.parameters(), *state):
        if dist.get_rank() == 0:
            dist.send(tensor.data, dist.get_world_size() - 1)
        elif dist.get_rank() == dist.get_world_size() - 1:
            dist.recv(tensor.data, 0)


def save_diverging(folder: Path, changed_at: int, name: str) -> Any:
    """The replica of the last rank differs from save ``changed_at`` on, and is mended three saves later."""
    rank, world = dist.get_rank(), dist.get_world_size()
    training = Training(rank)
    training.model.count += rank  # a buffer may differ
    tensor = dict(training.model.named_parameters())[name]
    told: list[str] = []
    copied = []
    with lazyckpt.Checkpointer(folder, writers="all", max_in_flight=2, **KNOBS) as ckpt:
        training.track(ckpt)
        for step in range(1, changed_at + 10):
            training.step()
            if rank == world - 1 and changed_at <= step < changed_at + 3:
                tensor.data[-1] += 1
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                handle = ckpt.save(step)
                handle.result()
            told += [f"{step}: {warning.message}" for warning in caught]
            copied.append(handle.metrics.copied_bytes)
            if step == changed_at + 2:
                mend(training)
    return told, copied, owned_bytes(training)


@pytest.mark.parametrize("name", ["weights.0", "weights.1"])  # a large and a small one
@pytest.mark.parametrize("changed_at", [1, 3])
def test_replicas_that_differ_are_named_and_rank_0_writes_all_until_they_are_equal(
    ranks: Ranks, tmp_path: Path, changed_at: int, name: str
) -> None:
    found = ranks.run(3, save_diverging, tmp_path, changed_at, name)
    told, copied, owned = found[0]
    assert len(told) == 1 and f"different values in model.{name}" in told[0], told
    step = int(told[0].split(":")[0])
    assert changed_at <= step <= changed_at + 2 and "2 hold different values" in told[0]
    alone = [at for at, n in enumerate(copied, 1) if n > 0.9 * owned]
    # Rank 0 tells the others with the next save, and two may have begun by then; so it is with the end.
    told_at, equal_at = step + 1, max(changed_at + 3, step + 3)
    assert alone == [*([1] if told_at > 2 or step == 1 else []), *range(told_at + 2, equal_at + 3)], (step, alone)
    for save in range(1, changed_at + 10):
        tree = lazyckpt.load(tmp_path / f"step-{save:08d}")
        assert lazyckpt.verify(tmp_path / f"step-{save:08d}").ok
        assert torch.isfinite(tree["model"][name]).all()
    assert [told for told, _, _ in found[1:]] == [[], []]


def with_longer_metadata(folder: Path) -> None:
    training = Training(dist.get_rank())
    with lazyckpt.Saver(**KNOBS) as saver:
        for step, nbytes in enumerate([1, 1, 5000, 1]):
            training.step()
            with saver.stage(folder / str(step), step=step, all_ranks=True, writers="all") as staged:
                staged.add("a.safetensors", dict(training.model.named_parameters()), {"note": "x" * nbytes})
                staged.write_together(["a.safetensors"])
                staged.save().result()


def test_a_header_of_another_length_moves_the_ranges_of_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Regression: the ranges followed the header of the first save."""
    ranks.run(2, with_longer_metadata, tmp_path)
    for step in range(4):
        assert lazyckpt.verify(tmp_path / str(step) / "a.safetensors").ok


def with_slices(folder: Path) -> Any:
    """The weights are parts of one flat parameter. In the last save, those of rank 1 differ in one of them."""
    torch.manual_seed(0)
    flat = torch.nn.Parameter(torch.rand(10 + 4 * 30_000))
    optimizer = torch.optim.SGD([flat], lr=1.0)
    weights = {f"{at}.weight": flat.data[10 + at * 30_000 :][:30_000] for at in range(4)}
    copied, told = [], []
    with lazyckpt.Saver(**KNOBS) as saver:
        for step in range(4):
            flat.grad = torch.ones_like(flat)
            optimizer.step()
            if step == 3:
                weights["2.weight"].data[7] += dist.get_rank()
            with (
                saver.stage(folder / str(step), step=step, all_ranks=True, writers="all") as staged,
                warnings.catch_warnings(record=True) as caught,
            ):
                warnings.simplefilter("always")
                staged.add("a.safetensors", weights)
                staged.write_together(["a.safetensors"])
                handle = staged.save()
                handle.result()
            told += [str(warning.message) for warning in caught]
            copied.append(handle.metrics.copied_bytes)
            if step < 3:
                loaded = lazyckpt.load(handle.path / "a.safetensors")
                assert all(torch.equal(loaded[name], weights[name]) for name in weights)
                assert lazyckpt.verify(handle.path).ok
    return copied[-2], told


def test_ranks_write_slices_of_a_storage_together(ranks: Ranks, tmp_path: Path) -> None:
    """Each takes parts of parts; one that differs has its own name."""
    (first, told), (second, _) = ranks.run(2, with_slices, tmp_path)
    assert first + second < 1.6 * 4 * 30_000 * 4, "both copied all"
    assert len(told) == 1 and "different values in a.safetensors.2.weight" in told[0], told


@pytest.mark.parametrize(("world", "saves"), [(2, 1), (3, 2), (5, 4), (8, 7), (20, 57)])
def test_each_rank_compares_with_every_other_one(world: int, saves: int) -> None:
    sizes = [1 << 20] * world
    places, laid = share.laid_out([str(n) for n in range(world)], array("Q", sizes), [True] * world, ())
    assert places == list(range(world))
    cache = plan.ReplicaCache(plan.Writers("all", 0, ["one"] * world, 2))
    split = share.Split(laid, share.ZipForm("archive", laid), list(range(world)), alone=False)
    for rank in range(world):
        others = {split.compares_with(rank, cache.turn(ordinal)) for ordinal in range(100, 100 + saves)}
        assert others == set(range(world)) - {rank}
    everything = sorted(part for writer in range(world) for part in split.parts(writer))
    assert everything == sorted(part for rank in range(world) for part in split.compared(rank, cache.turn(7)))


def test_what_rank_0_tells_holds_once_all_ranks_know_it() -> None:
    cache = plan.ReplicaCache(plan.Writers("all", 1, ["one", "one"], 3))
    assert [cache.is_alone(n) for n in range(1, 5)] == [True, False, False, False]
    cache.told_alone(4, True)
    assert [cache.is_alone(n) for n in range(4, 9)] == [False, False, False, True, True]
    cache.told_alone(9, False)
    assert [cache.is_alone(n) for n in range(10, 14)] == [True, True, False, False]
