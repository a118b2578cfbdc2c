"""A rank keeps which parts of a sharded state it writes, and where they lie, only while the facts are the same."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lazyckpt.formats.inventory import kind_of
from lazyckpt.pipeline.sharded.rank_plan import RankCache, RankFile, RankPlan

Leaves = dict[Any, Any]


@pytest.fixture(scope="module", autouse=True)
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


BY_ROWS = (Shard(0),)


def sharded(rows: int = 4, placements: Any = BY_ROWS, mesh: Any = None, dtype: Any = torch.float32) -> DTensor:
    mesh = init_device_mesh("cpu", (4,)) if mesh is None else mesh
    return DTensor.from_local(torch.ones(rows, 300, dtype=dtype), mesh, placements, run_check=False)


def over_two() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))


class State:
    """The leaves of a state: shards, replicas, plain tensors and objects."""

    own = frozenset(("rng",))

    def __init__(self) -> None:
        mesh = over_two()
        replicated = {("model", f"twice.{n}"): sharded(n, (Replicate(), Shard(0)), mesh) for n in range(1, 6)}
        self.all: Leaves = {
            ("model", "weight"): sharded(),
            ("model", "bias"): sharded(2),
            **replicated,
            ("model", "mean"): torch.zeros(30),
            ("model", "only here"): torch.zeros(40),
            ("optimizer", "step"): torch.tensor(1.0),
            ("optimizer", "lr"): 0.1,
            ("rng", "1"): {"words": torch.zeros(5)},
        }

    def leaves(self) -> Leaves:
        return dict(self.all)


def planned(state: State, cache: RankCache, rank: int) -> Any:
    """All that is decided for the file of one rank."""
    file = RankFile()
    plan = RankPlan(state, rank, cache, file, b"stamp")
    views = plan.gather()
    extents, nbytes = plan.lay_out(views)
    rows = [(extent.offset, array("q", extent.rows), extent.blob) for extent in extents]
    return file.items(), file.shared(), views.columns(), rows, nbytes


def planned_again(state: State, cache: RankCache, rank: int) -> bool:
    """Plans with what was kept, and anew, and compares. Returns whether the share was kept."""
    before = cache._share
    found = planned(state, cache, rank)
    anew = RankCache()
    anew.elsewhere = cache.elsewhere
    assert found == planned(state, anew, rank)
    return cache._share is before


def put(name: str, value: Callable[[], Any]) -> Callable[[State], None]:
    return lambda state: state.all.update({("model", name): value()})


def local_dtype(state: State) -> None:
    state.all["model", "weight"]._local_tensor.data = torch.ones(4, 300, dtype=torch.bfloat16)


def local_shape(state: State) -> None:
    state.all["model", "weight"]._local_tensor = torch.ones(3, 300)


def local_stride(state: State) -> None:
    state.all["model", "weight"]._local_tensor = torch.ones(300, 4).t()


def renamed(state: State) -> None:
    state.all["model", "other"] = state.all.pop(("model", "weight"))


def reordered(state: State) -> None:
    state.all["model", "weight"] = state.all.pop(("model", "weight"))


def tied(state: State) -> None:
    state.all["model", "bias"] = state.all["model", "weight"]


CHANGES: dict[str, Callable[[State], None]] = {
    "placements": put("weight", lambda: sharded(placements=(Shard(1),))),
    "replicated instead of sharded": put("weight", lambda: sharded(placements=(Replicate(),))),
    "the mesh": put("weight", lambda: sharded(placements=(Shard(0), Shard(0)), mesh=over_two())),
    "the number of replicas": put("twice.3", lambda: sharded(3)),
    "the size of a replica": put("twice.3", lambda: sharded(30, (Replicate(), Shard(0)), over_two())),
    "the shape": put("weight", lambda: sharded(5)),
    "the dtype": put("weight", lambda: sharded(dtype=torch.bfloat16)),
    "the dtype of the part here": local_dtype,
    "the shape of the part here": local_shape,
    "the strides of the part here": local_stride,
    "a new key": put("new", sharded),
    "a key that goes": lambda state: state.all.pop(("model", "bias")),
    "another key": renamed,
    "the order of keys": reordered,
    "two that are one": tied,
    "a plain tensor's shape": put("only here", lambda: torch.zeros(41)),
    "a plain tensor's dtype": put("only here", lambda: torch.zeros(40, dtype=torch.int32)),
    "a plain tensor that is sharded": put("only here", sharded),
    "a shard that is a plain tensor": put("weight", lambda: torch.zeros(5)),
    "an object for a tensor": put("only here", lambda: "text"),
    "a sparse tensor": put("only here", lambda: torch.eye(3).to_sparse()),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_facts_makes_another_share(change: str, rank: int) -> None:
    state, cache = State(), RankCache()
    cache.elsewhere = {".".join(p): kind_of(None) for p in state.all if p[0] == "optimizer"} if rank else {}
    planned_again(state, cache, rank)
    assert planned_again(state, cache, rank), "nothing has changed"
    CHANGES[change](state)
    assert not planned_again(state, cache, rank)
    assert planned_again(state, cache, rank)


def test_what_rank_0_writes_is_a_fact() -> None:
    state, cache = State(), RankCache()
    planned_again(state, cache, 1)
    cache.elsewhere = planned(state, RankCache(), 0)[1]
    assert not planned_again(state, cache, 1)
    cache.elsewhere = {}
    assert not planned_again(state, cache, 1)


def test_values_and_memory_cost_no_share() -> None:
    state, cache = State(), RankCache()
    planned_again(state, cache, 0)
    for step in range(3):
        state.all["optimizer", "lr"] = 0.1 / (step + 2)
        state.all["optimizer", "step"] = torch.tensor(float(step))
        state.all["model", "weight"]._local_tensor.data = torch.full((4, 300), float(step))
        state.all["rng", "1"] = {"words": torch.full((5 + step,), step)}
        assert planned_again(state, cache, 0)
