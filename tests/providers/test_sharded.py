"""A tensor of which this process holds only a part is refused, wherever it is, and named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Ranks

import lazyckpt

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard  # noqa: E402

Make = Callable[[torch.Tensor], Any]


@pytest.fixture
def first_of() -> Iterator[Callable[[int], None]]:
    """A function that makes this process the first of so many; the others do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(count: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)

    yield start
    dist.destroy_process_group()


@pytest.fixture
def part(first_of: Callable[[int], None]) -> torch.Tensor:
    """Half of a tensor."""
    first_of(2)
    return dtensor((2,), Shard(0))


def dtensor(mesh: tuple[int, ...], *placements: Placement) -> torch.Tensor:
    return DTensor.from_local(torch.ones(4, 4), init_device_mesh("cpu", mesh), placements, run_check=False)


class Holder:
    """Something that is pickled with what it holds."""

    def __init__(self, value: Any) -> None:
        self.value = [value]


class App:
    """Something with a state_dict(), which gives the state anew."""

    def __init__(self, state: Any) -> None:
        self.value = state

    def state_dict(self) -> Any:
        return {"inner": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["inner"]


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    plain = torch.ones(4)
    plain.shard = tensor  # type: ignore[attr-defined]
    return plain


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((2,), (Shard(0),)),
        ((2,), (Shard(1),)),
        ((2,), (Partial(),)),
        ((2, 2), (Replicate(), Shard(0))),
        ((2, 2), (Shard(0), Replicate())),
        ((1, 4), (Shard(0), Partial())),
    ],
    ids=str,
)
def test_what_is_not_whole_here_is_refused(
    mesh: tuple[int, ...], placements: tuple[Placement, ...], tmp_path: Path, first_of: Callable[[int], None]
) -> None:
    first_of(torch.Size(mesh).numel())
    state = {"model": {"weight": dtensor(mesh, *placements)}}
    with pytest.raises(lazyckpt.ConfigError, match=r"save model\.weight: .* ranks.*torch\.distributed\.checkpoint"):
        lazyckpt.save(state, tmp_path / "x.pt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [((1,), (Shard(0),)), ((2,), (Replicate(),)), ((2, 1), (Replicate(), Shard(0))), ((1, 1), (Partial(), Shard(1)))],
    ids=str,
)
def test_what_is_whole_here_is_saved(
    mesh: tuple[int, ...],
    placements: tuple[Placement, ...],
    tmp_path: Path,
    first_of: Callable[[int], None],
    graph: Any,
) -> None:
    first_of(torch.Size(mesh).numel())
    state = {"weight": dtensor(mesh, *placements)}
    lazyckpt.save(state, tmp_path / "x.pt")
    assert graph(torch.load(tmp_path / "x.pt", weights_only=False)) == graph(state)


NESTED: dict[str, tuple[Make, str]] = {
    "alone": (lambda t: t, "this tensor"),
    "a parameter": (torch.nn.Parameter, "this tensor"),
    "in a dict": (lambda t: {"a": {"b": t}}, r"a\.b"),
    "in a list": (lambda t: [0, (t,)], r"1\.0"),
    "in an object": (lambda t: {"it": Holder(t)}, r"it\.value\.0"),
    "in an attribute of a tensor": (lambda t: [with_attribute(t)], r"0\.shard"),
    "behind many others": (lambda t: {**{str(i): torch.ones(i) for i in range(100)}, "last": t}, "last"),
}


@pytest.mark.parametrize("where", NESTED)
def test_it_is_found_and_named_wherever_it_is(where: str, tmp_path: Path, part: torch.Tensor) -> None:
    make, name = NESTED[where]
    obj = make(part)
    with pytest.raises(lazyckpt.ConfigError, match=f"cannot save {name}: it is a DTensor"):
        lazyckpt.save(obj, tmp_path / "x.pt")
    with lazyckpt.Saver() as saver:
        with pytest.raises(lazyckpt.ConfigError, match=f"cannot save {name}: it is a DTensor"):
            saver.save(obj, tmp_path / "y.pt")
        with saver.stage(tmp_path / "folder") as folder:
            folder.add("whole.pt", torch.ones(4))
            folder.add("part.pt", obj)
            with pytest.raises(lazyckpt.ConfigError, match=f"cannot save {name}: it is a DTensor"):
                folder.save()
        saver.save({"whole": 1}, tmp_path / "z.pt").result(timeout=30)
    assert [path.name for path in tmp_path.iterdir()] == ["z.pt"]


def test_save_refuses_parts_in_state_that_is_not_sharded_itself(tmp_path: Path, part: torch.Tensor) -> None:
    module = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    app, scores = App(1), {"a": 1}
    with lazyckpt.Checkpointer(tmp_path, on_error="warn") as ckpt:
        ckpt.track(module=module, optimizer=optimizer, app=app, scores=scores)
        ckpt.save(1).result(timeout=30)

        def refused(name: str) -> None:
            with pytest.raises(lazyckpt.ConfigError, match=f"cannot save {name}: it is a DTensor"):
                ckpt.save(2)

        optimizer.state[module.weight]["momentum_buffer"] = part
        refused(r"optimizer\.state\.0\.momentum_buffer")
        optimizer.state.clear()
        app.value = [part]
        refused(r"app\.inner\.0")
        app.value = 1
        scores["a"] = part  # type: ignore[assignment]
        refused(r"scores\.a")
        scores["a"] = 1
        ckpt.save(2).result(timeout=30)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_sharded_tensor_of_fsdp1_is_refused(tmp_path: Path) -> None:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.metadata import ShardMetadata

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        half = ShardMetadata(shard_offsets=[0, 0], shard_sizes=[2, 4], placement="rank:0/cpu")
        shards = [sharded_tensor.Shard(torch.ones(2, 4), half)]
        whole = sharded_tensor.init_from_local_shards(shards, 2, 4)
        lazyckpt.save({"w": whole}, tmp_path / "whole.pt")
        whole.metadata().shards_metadata.append(half)  # of a rank that this test does not start
        with pytest.raises(lazyckpt.ConfigError, match="cannot save w: it is a ShardedTensor of 2 shards"):
            lazyckpt.save({"w": whole}, tmp_path / "part.pt")
        ckpt = lazyckpt.Checkpointer(tmp_path / "run")
        with ckpt, pytest.raises(lazyckpt.ConfigError, match=r"cannot save x\.w: "):
            ckpt.track(x={"w": whole})
        (tmp_path / "run").rmdir()
        assert [path.name for path in tmp_path.iterdir()] == ["whole.pt"]
    finally:
        dist.destroy_process_group()


# Real ranks


def on_a_rank(folder: Path) -> list[str]:
    """Shards a model with FSDP2, is refused, gathers it, saves that; returns what was said."""
    rank = dist.get_rank()
    mesh: DeviceMesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters())
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    said = []
    for refused in (
        lambda: lazyckpt.save({"optimizer": optimizer.state_dict()}, folder / f"x-{rank}.pt"),
        lambda: lazyckpt.save(model.state_dict(), folder / f"x-{rank}.safetensors"),
    ):
        try:
            refused()
            said.append("accepted")
        except lazyckpt.ConfigError as error:
            said.append(str(error).split(":")[0])
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        lazyckpt.save(gathered, folder / "whole.pt")
        whole = lazyckpt.load(folder / "whole.pt")
        said.append("whole" if all(torch.equal(whole[name], expected[name]) for name in expected) else "lost")
    return said


def test_one_file_of_fsdp2_is_refused_on_both_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Regression: rank 0 wrote its half of every weight, every rank restored that half, without an error."""
    expected = ["cannot save optimizer.state.0.exp_avg", "cannot save bias"]
    assert ranks.run(2, on_a_rank, tmp_path) == [[*expected, "whole"], expected]
    assert not list(tmp_path.glob("x-*"))
