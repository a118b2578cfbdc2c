"""Skeletons that a provider keeps from save to save: they notice every change, and spare tensors a second pickling."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt.providers import pickles, plain_tensors
from lazyckpt.providers.base import StorageTable
from lazyckpt.providers.objects import StateProvider
from lazyckpt.providers.pickles import Skeleton
from lazyckpt.providers.torch_pickler import MIN_ARRAY_BYTES as BIG


def swap(tree: dict[str, Any], a: str, b: str) -> None:
    tree[a], tree[b] = tree[b], tree[a]


def put(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda tree: tree.__setitem__(key, value)


def resize(tree: dict[str, Any]) -> None:
    tree["t"].resize_(50)
    tree["t"].fill_(1)


def reallocate(tree: dict[str, Any]) -> None:
    tree["t"].data = tree["t"].data * 2


def retie(tree: dict[str, Any]) -> None:
    tree["u"] = tree["t"]


def untie(tree: dict[str, Any]) -> None:
    tree["tied"] = tree["tied2"].clone()


def move_memory(tree: dict[str, Any]) -> None:
    tree["t"].set_(torch.full((40,), 7.0).untyped_storage(), 0, tree["t"].shape)


def reorder(tree: dict[str, Any]) -> None:
    tree["t"] = tree.pop("t")


def swap_sizes(tree: dict[str, Any]) -> None:
    tree["t"], tree["u"] = torch.full((2, 5), 3.0), torch.full((2, 5), 4.0)


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "nothing": lambda tree: None,
    "a tensor's contents": lambda tree: tree["t"].add_(1),
    "a float": put("f", 0.25),
    "1 becomes True": put("one", True),
    "1 becomes 1.0": put("one", 1.0),
    "0.0 becomes -0.0": put("zero", -0.0),
    "a float becomes nan": put("f", float("nan")),
    "the payload of a nan": put("nan", np.frombuffer(b"\1\0\0\0\0\0\xf8\x7f", "<f8")[0].item()),
    "a string": put("s", "other"),
    "the order of keys": reorder,
    "a key": lambda tree: put("s2", tree.pop("s"))(tree),
    "dtype, same bytes": lambda tree: put("t", tree["t"].view(torch.int32))(tree),
    "shape": lambda tree: put("t", tree["t"].view(5, 2))(tree),
    "shape, same strides": lambda tree: put("t", tree["t"][:1])(tree),
    "who is tied to whom": lambda tree: put("tie2", tree["tie3"])(tree),
    "stride": lambda tree: put("sq", tree["sq"].t())(tree),
    "offset": lambda tree: put("t", tree["t"].view(-1)[1:])(tree),
    "requires_grad": lambda tree: tree["t"].requires_grad_(),
    "storage given by .data=": reallocate,
    "storage given by set_": move_memory,
    "storage resized": resize,
    "tied": retie,
    "untied": untie,
    "two tensors swapped": lambda tree: swap(tree, "t", "u"),
    "two of different size swapped": lambda tree: swap(tree, "t", "sq"),
    "tensor and array swapped": lambda tree: swap(tree, "big", "bytes"),
    "tensor and storage swapped": lambda tree: swap(tree, "bytes", "storage"),
    "array and storage swapped": lambda tree: swap(tree, "big", "storage"),
    "two tensors of new memory": swap_sizes,
    "a list that grew": lambda tree: tree["list"].append(torch.ones(2)),
    "a list that shrank": lambda tree: tree["list"].pop(),
    "a list that was replaced by a tuple": lambda tree: put("list", tuple(tree["list"]))(tree),
    "a parameter instead of a tensor": lambda tree: put("t", torch.nn.Parameter(tree["t"]))(tree),
    "an attribute": lambda tree: setattr(tree["t"], "tag", 1),
    "a view as conj": lambda tree: put("z", tree["z"].conj())(tree),
    "an array's contents": lambda tree: tree["big"].__setitem__(3, 77),
    "an array's dtype": lambda tree: put("big", tree["big"].view(np.int8))(tree),
    "an array's shape": lambda tree: put("big", tree["big"].reshape(2, -1))(tree),
    "an array's order": lambda tree: put("mat", np.asfortranarray(tree["mat"]))(tree),
    "an array that grew": lambda tree: put("big", np.ones(2 * BIG, np.uint8))(tree),
    "an array by a small one": lambda tree: put("big", np.ones(3, np.uint8))(tree),
    "a small array's contents": lambda tree: tree["small"].__setitem__(0, 5),
    "an array by its tensor": lambda tree: put("big", torch.from_numpy(tree["big"]))(tree),
    "an inner dict": lambda tree: tree["inner"].update(k=2),
    "the identity of two lists": lambda tree: put("list2", list(tree["list"]))(tree),
}


def changeable() -> dict[str, Any]:
    tied_tensor, tie = torch.randn(4), torch.randn(4)
    shared: list[Any] = [torch.ones(1), 2]
    return {
        "t": torch.arange(10.0).view(2, 5),
        "u": torch.arange(10.0, 20.0).view(2, 5),
        "sq": torch.randn(3, 3),
        "z": torch.randn(3, dtype=torch.complex64),
        "tied": tied_tensor,
        "tied2": tied_tensor,
        "tie1": tie,
        "tie2": tie.view(2, 2).view(4),
        "tie3": torch.randn(4),
        "big": np.arange(BIG, dtype=np.uint8),
        "bytes": torch.arange(BIG, dtype=torch.int64).to(torch.uint8) + 1,
        "storage": torch.full((BIG,), 9, dtype=torch.uint8).untyped_storage(),
        "mat": np.arange(BIG, dtype=np.float64).reshape(-1, 2),
        "small": np.zeros(3),
        "f": 0.5,
        "one": 1,
        "zero": 0.0,
        "nan": float("nan"),
        "s": "text",
        "list": shared,
        "list2": shared,
        "inner": {"k": 1},
    }


@pytest.mark.long(first=53)
@pytest.mark.parametrize("bare", [False, True], ids=["inside", "as the whole state"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_cache_notices(change: str, bare: bool, saver: Any, graph: Any, by_torch: Any) -> None:
    tree = changeable()
    for _ in range(2):  # the second save is from the cache
        saver.save(tree, bare=bare)
    CHANGES[change](tree)
    expected = graph(by_torch(tree))
    for _ in range(2):
        state = torch.load(saver.save(tree, bare=bare), weights_only=False)["x"]
        assert graph(state if bare else state["value"]) == expected


def test_keys_stay_the_same_from_save_to_save() -> None:
    fresh = map(str, range(10**6))
    skeleton = Skeleton()
    tree = {"lr": 0.1, "w": [torch.randn(3) for _ in range(5)]}
    seen = []
    for _ in range(4):
        tree["lr"] /= 2  # pickled anew each time
        tree["w"][2] = torch.randn(3)
        table = StorageTable(fresh)
        skeleton.opcodes(tree, table)
        seen.append([view.key for view in table.views])
    assert seen == [["0", "1", "2", "3", "4"]] * 4


def test_two_objects_that_share_storages_write_them_once(tmp_path: Path) -> None:
    w = torch.randn(2000)
    a, b = {"w": w, "own": torch.zeros(3)}, {"w": w[:1000], "own": torch.ones(3)}
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(a=a, b=b)
        for step in range(3):
            state = torch.load(ckpt.save(step).result() / "state.pt")
            assert state["a"]["w"].untyped_storage()._cdata == state["b"]["w"].untyped_storage()._cdata
            assert torch.equal(state["b"]["w"], w[:1000])
            b["w"] = w[:1000] if step else w[500:1500]
            assert step or torch.equal(torch.load(ckpt.save(9).result() / "state.pt")["b"]["w"], w[500:1500])
            b["w"] = w[:1000]


def test_sharing_that_begins_or_ends_between_cached_objects_is_noticed(tmp_path: Path) -> None:
    """Each object is unchanged by its own lights when only the other comes to share a storage with it."""
    w, v = torch.randn(1500), torch.randn(1500)
    a, b, c = {"w": w}, {"w": v}, {"w": torch.ones(7)}
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(a=a, b=b, c=c)
        for step, (first, second) in enumerate([(w, v), (w, w), (v, w), (v, v), (w, v), (v, w)]):
            a["w"], b["w"] = first, second
            state = torch.load(ckpt.save(step).result() / "state.pt")
            assert torch.equal(state["a"]["w"], first) and torch.equal(state["b"]["w"], second)
            assert torch.equal(state["c"]["w"], torch.ones(7))
            assert (state["a"]["w"].data_ptr() == state["b"]["w"].data_ptr()) == (first is second)


@pytest.mark.parametrize("cached_first", [True, False])
def test_one_memory_under_two_dtypes_is_refused_also_across_cached_objects(cached_first: bool, tmp_path: Path) -> None:
    t = torch.arange(3000.0)
    a, b = {"x": t}, {"y": torch.zeros(4)}
    ckpt = lazyckpt.Checkpointer(tmp_path)
    ckpt.track(**({"a": a, "b": b} if cached_first else {"b": b, "a": a}))
    for step in range(2):
        ckpt.save(step).result()
    b["y"] = t.view(torch.int32)
    with pytest.raises(lazyckpt.SerializationError, match="different types"):
        ckpt.save(3)
    ckpt.close()


class Whole(StateProvider):
    """A state with one skeleton for all of it."""

    def __init__(self, tree: Any) -> None:
        super().__init__()
        self.tree = tree

    def state(self) -> Any:
        return self.tree

    def load_state(self, state: Any) -> None: ...


@pytest.mark.alone
def test_ten_thousand_tensors_are_planned_in_no_time() -> None:
    """The bounds are four times what the design asks for, of this thread's own time: what else runs does not count."""
    provider = Whole({"deep": {f"layer.{i}.weight": torch.zeros(2) for i in range(10_000)}})
    fresh = map(str, range(10**6))
    times = []
    for _ in range(4):
        begin = time.thread_time()
        assert provider.opcodes(StorageTable(fresh))
        times.append(time.thread_time() - begin)
    assert times[0] < 0.6 and min(times[1:]) < 0.2, times


def many_kinds() -> dict[str, Any]:
    """More words in common than there are places for them, tensors in several places, and views."""
    shared = torch.randn(6, 4)
    dtypes = [d for d in vars(torch).values() if isinstance(d, torch.dtype)]
    plain = [d for d in dtypes if d in plain_tensors.PLAIN_DTYPES]
    assert len(plain) > plain_tensors.PLACES
    return {
        "kinds": {str(d): torch.zeros(3, dtype=d) for d in sorted(set(plain), key=str)},
        "shared": [shared, shared, shared.t(), shared[2:, 1], shared.detach().requires_grad_()],
        "scalars": (torch.tensor(1.0), torch.zeros(0), torch.zeros(2, 0, 3)),
        "step": 0,
    }


def test_what_changes_beside_the_tensors_costs_them_nothing(
    tmp_path: Path, graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a training step in a checkpoint does, also when its number becomes longer."""
    state = many_kinds()
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(whole=Whole(state))
        for step in (0, 1, 255, 256, 1 << 40, "a name", [shared := {}, shared]):
            state["step"] = step
            saved = torch.load(ckpt.save(1).result() / "state.pt", weights_only=False)["whole"]
            assert graph(saved) == graph(state)
            monkeypatch.setattr(pickles, "spell", lambda *_: pytest.fail("the tensors were pickled again"))


def test_bytes_that_look_like_the_place_of_a_tensor(tmp_path: Path, graph: Any) -> None:
    looks_so = pickles._PLACEHOLDER_OPCODES.decode("latin-1")
    state = {"w": torch.randn(4), "note": "", "v": torch.randn(5)}
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(whole=Whole(state))
        for note in ("nothing", looks_so, 3 * looks_so, "nothing"):
            state["note"] = note
            saved = torch.load(ckpt.save(1).result() / "state.pt", weights_only=False)["whole"]
            assert graph(saved) == graph(state)
