"""A ShardPlan writes of each tensor what it shows, and says where before a byte is copied."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.errors import SerializationError
from lazyckpt.formats import distcp
from lazyckpt.pipeline.plan import ArchiveCache, archive_of
from lazyckpt.pipeline.request import Request
from lazyckpt.pipeline.save_now import save_now
from lazyckpt.pipeline.sharded.shard_plan import Item, ShardCache, ShardPlan
from lazyckpt.reading.ranges import process_engine
from lazyckpt.shards import ShardSaver


def saved(items: list[Item], path: Path, cache: ShardCache | None = None) -> dict[str, bytes]:
    """The bytes of each item in the file."""
    plan = ShardPlan(items, cache)
    save_now(Request(path, None), {path.name: plan}, process_engine())
    data = path.read_bytes()
    return {name: data[at : at + nbytes] for name, (at, nbytes) in plan.places.items()}


def loaded(item: bytes) -> Any:
    return torch.load(io.BytesIO(item), weights_only=True)


def tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(70_000.0)
    return {
        "large": torch.randn(300, 400),
        "scalar": torch.tensor(3),
        "first part": base[:30_000],
        "middle part": base[10:20],
        "transposed": torch.randn(20, 30).t(),
        "gaps": torch.randn(20, 30)[:, ::3],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "empty": torch.zeros(0, 4),
        "empty part": base[:0],
        "bfloat16": torch.randn(100, 100).bfloat16(),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
        "sparse": torch.eye(3).to_sparse(),
        "parameter": torch.nn.Parameter(torch.randn(5)),
    }


def test_each_item_loads_as_what_the_tensor_shows(tmp_path: Path) -> None:
    items = tensors()
    found = saved([*items.items(), ("raw", b"raw bytes")], tmp_path / "f.distcp")
    assert found.pop("raw") == b"raw bytes"
    assert found.keys() == items.keys()
    for name, tensor in items.items():
        back = loaded(found[name])
        assert back.dtype == tensor.dtype and back.shape == tensor.shape, name
        assert not back.requires_grad
        assert torch.equal(back.to_dense() if back.is_sparse else back, tensor.detach().to_dense()), name
        if not back.is_sparse:
            assert back.untyped_storage().nbytes() == back.nbytes, name


def test_a_second_save_reuses_the_layout_and_holds_the_new_bytes(tmp_path: Path) -> None:
    cache, state = ShardCache(), {"a": torch.ones(5000), "b": torch.ones(3)}
    first = saved(list(state.items()), tmp_path / "1.distcp", cache)
    layout = cache.layout([(20_000, _pickle(state["a"])), (12, _pickle(state["b"]))])
    for change in (
        lambda: state["a"].mul_(2),
        lambda: state.update(a=torch.full((5000,), 7.0)),  # another storage
        lambda: state.update(b=torch.ones(4)),
        lambda: state.update(b=state["a"]),  # the same storage
        lambda: state.update(b=torch.ones(5000).t()),
        lambda: state.update(c=torch.ones(1)),
    ):
        change()
        found = saved(list(state.items()), tmp_path / "2.distcp", cache)
        assert {name: loaded(item).tolist() for name, item in found.items()} == {
            k: v.tolist() for k, v in state.items()
        }
    assert loaded(first["a"]).tolist() == [1.0] * 5000
    assert layout.head


def _pickle(tensor: torch.Tensor) -> bytes:
    from lazyckpt.providers.plain_tensors import tensor_pickle

    return tensor_pickle(tensor.dtype, tensor.shape, tensor.stride(), tensor.nbytes, distcp.STORAGE_KEY)


def test_an_object_becomes_the_archive_that_a_saver_writes(tmp_path: Path) -> None:
    """Also the second time, with other values, and with storages that are empty or aligned to a page."""
    cache = ArchiveCache()
    for number in range(2):
        state = {"n": number, "small": torch.full((3,), number), "large": torch.rand(5000), "none": torch.ones(0)}
        archive = archive_of(state, cache)
        lazyckpt.save(state, tmp_path / f"{number}.pt")
        assert archive == (tmp_path / f"{number}.pt").read_bytes()
        state["small"].add_(1)  # the archive is of its moment
        assert torch.load(io.BytesIO(archive))["small"].tolist() == [number] * 3


def test_one_memory_is_one_item(tmp_path: Path) -> None:
    tied = torch.ones(1000)
    cache = ShardCache()
    for _ in range(2):
        plan = ShardPlan([("a", tied), ("b", tied), ("c", tied[:500])], cache)
        assert len(plan.gather()) == 2
        save_now(Request(tmp_path / "f", None), {"f": plan}, process_engine())
        assert plan.places["a"] == plan.places["b"] != plan.places["c"]


@pytest.mark.parametrize(
    ("items", "what"),
    [
        ([("a", torch.ones(1)), ("a", b"x")], "'a'"),
        ([("m", torch.ones(1, device="meta"))], r"'m'.*meta"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(items: list[Item], what: str, tmp_path: Path) -> None:
    with pytest.raises(SerializationError, match=what):
        saved(items, tmp_path / "f")
    assert not list(tmp_path.iterdir())


def test_a_tensor_whose_memory_was_freed_is_refused_by_name(tmp_path: Path) -> None:
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    with pytest.raises(SerializationError, match=r"'w'.*its storage has 0"):
        saved([("w", freed)], tmp_path / "f")


@pytest.mark.parametrize("witness", ["auto", "versions"])
def test_the_part_that_an_optimizer_owns_is_lazy(witness: str, tmp_path: Path) -> None:
    """As an uneven shard of FSDP2: the parameter is the first part of a padded storage."""
    padded = torch.randn(50_000)
    weight = torch.nn.Parameter(padded[:40_000])
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    with lazyckpt.Saver(witness=witness) as saver:

        def step() -> None:
            weight.grad = torch.ones_like(weight)
            optimizer.step()

        def save(tensor: torch.Tensor, name: str) -> tuple[lazyckpt.SaveHandle, ShardPlan, torch.Tensor]:
            before = tensor.detach().clone()
            path = tmp_path / name
            plan = ShardPlan([("w", tensor), *((k, v) for k, v in optimizer.state[weight].items())])
            return saver.launcher.launch(Request(path, None), {name: plan}, blocking=False), plan, before

        for number in range(4):
            step()
            handle, plan, before = save(weight, f"{number}.distcp")
            step()  # waits for the copies
            data = handle.result(timeout=30).read_bytes()
            at, nbytes = plan.places["w"]
            assert torch.equal(loaded(data[at : at + nbytes]), before)
        # The pages that it shares with its neighbours are copied inside save(), and Adam's step, a scalar.
        assert handle.metrics.eager_bytes < 0.05 * handle.metrics.bytes
        step()
        handle, _, _ = save(padded, "all.distcp")
        assert handle.result(timeout=30)
        assert handle.metrics.eager_bytes > padded.nbytes, "the padding has no owner"


@pytest.mark.parametrize("witness", ["auto", "versions"])
def test_a_write_to_the_lazy_part_fails_the_save_by_name(witness: str, tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(5_000_000)[:4_000_000])
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    # The staging buffer is smaller than the weight: some of it is not copied before the file has a folder.
    with lazyckpt.Saver(witness=witness, host_buffer_bytes=2 << 20, chunk_bytes=1 << 20) as saver, torch.no_grad():
        optimizer.step()
        capture = ShardSaver(saver).capture([("the weight", weight)], "f", target=tmp_path / "step")
        weight.add_(1)
        capture.open(tmp_path)
        with pytest.raises(lazyckpt.TornSnapshotError, match="the weight was written to"):
            capture.result()
    assert not list(tmp_path.iterdir())


def test_what_is_abandoned_lets_training_go_on(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(5_000_000))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    with lazyckpt.Saver(host_buffer_bytes=2 << 20, chunk_bytes=1 << 20) as saver:
        optimizer.step()
        capture = ShardSaver(saver).capture([("w", weight)], "f", target=tmp_path / "step")
        threading.Timer(0.3, capture.abandon, ["no longer wanted"]).start()
        optimizer.step()  # waits for copies that wait for a folder
        with pytest.raises(lazyckpt.SaveError, match="no longer wanted"):
            capture.result()
