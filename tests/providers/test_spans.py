"""A compact archive holds the bytes that its tensors show, and loads to what they are in memory."""

from __future__ import annotations

import ctypes
import io
import random
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import lazyckpt
from lazyckpt import _engine
from lazyckpt.formats import program
from lazyckpt.pipeline.plan import ArchiveCache, ObjectPlan
from lazyckpt.providers import pickles
from lazyckpt.providers.base import TensorViews
from lazyckpt.providers.torch_pickler import MIN_ARRAY_BYTES


class Tagged(torch.Tensor):
    """A subclass, which torch pickles with all of its storage."""


class NoVocabulary:
    """Takes the place of the native pickler, and pickles nothing."""

    def pickle_compact(self, *_: Any) -> None:
        return None


WAYS: dict[str, Callable[[], Any]] = {
    "native": lambda: None,
    "outline": lambda: {1, 2},
    "reducers": lambda: torch.eye(3).to_sparse(),
    "array": lambda: numpy.ones(MIN_ARRAY_BYTES, dtype="uint8"),
}


def archived(obj: Any, cache: ArchiveCache | None = None, *, compact: bool = True) -> tuple[bytes, TensorViews]:
    """The archive of ``obj`` and its storages."""
    plan = ObjectPlan(obj, cache or ArchiveCache(), compact=compact)
    views = plan.gather()
    sources = [ctypes.string_at(view.storage.data_ptr() + view.offset, view.nbytes) for view in views]
    return program.run(plan.lay_out(views)[0], sources), views


def loaded(archive: bytes) -> Any:
    return torch.load(io.BytesIO(archive), weights_only=False)


def bits(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor, in its order."""
    held = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
    return held.view(torch.uint8).numpy().tobytes() if held.numel() else b""


def check(found: torch.Tensor, saved: torch.Tensor) -> None:
    assert type(found) is type(saved) and found.requires_grad == saved.requires_grad
    assert (found.dtype, found.shape, found.stride()) == (saved.dtype, saved.shape, saved.stride())
    assert bits(found) == bits(saved)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage from the first element to the last."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset()
    return begin * tensor.itemsize, (begin + last + 1) * tensor.itemsize


@pytest.fixture
def flat() -> torch.Tensor:
    return torch.arange(1000, dtype=torch.float32)


@pytest.fixture(params=WAYS)
def beside(request: pytest.FixtureRequest) -> Any:
    """What makes an object to be pickled in one way or another."""
    return WAYS[request.param]()


def test_a_view_is_written_as_a_storage_of_its_own(flat: torch.Tensor, beside: Any) -> None:
    state = {
        "first": flat[:10],
        "next": flat[10:20].view(2, 5),  # adjacent: they share no byte
        "transposed": flat[100:160].view(6, 10).t(),
        "strided": flat[200:300:7],
        "corner": flat[300:400].view(10, 10)[2:4, 3:5],
        "expanded": flat[500:501].expand(4, 3),
        "scalar": flat[600],
        "empty": flat[700:700],
        "trained": flat[800:810].requires_grad_(),
        "parameter": torch.nn.Parameter(flat[900:910], requires_grad=False),
        "half": torch.arange(100).bfloat16()[10:20],
        "float8": torch.arange(100, dtype=torch.uint8).view(torch.float8_e4m3fn)[3:8],
        "whole": torch.arange(7),
    }
    cache = ArchiveCache()
    archives = {archived({**state, "beside": beside}, cache)[0] for _ in range(3)}
    assert len(archives) == 1, "a kept layout changes no byte"
    found = loaded(archives.pop())
    for name, tensor in state.items():
        check(found[name], tensor)
        begin, end = extent(tensor)
        assert (found[name].untyped_storage().nbytes(), found[name].storage_offset()) == (end - begin, 0), name
    assert len({found[name].untyped_storage()._cdata for name in state}) == len(state)


def test_tensors_that_share_bytes_keep_sharing_them(flat: torch.Tensor, beside: Any) -> None:
    state = {
        "tied": flat[:10],
        "to it": flat[:10].view(2, 5),
        "longer": flat[100:130],
        "overlaps": flat[120:150],
        "inside": flat[125:126],
        "behind": flat[150:160],
    }
    archive, views = archived({**state, "beside": beside})
    found = loaded(archive)
    for name, tensor in state.items():
        check(found[name], tensor)
    for one, other in combinations(state, 2):
        a, b = extent(state[one]), extent(state[other])
        overlap = max(a[0], b[0]) < min(a[1], b[1])
        together = {one, other} <= {"longer", "overlaps", "inside"}  # two of them through the third
        shared = found[one].untyped_storage()._cdata == found[other].untyped_storage()._cdata
        assert shared == (overlap or together), (one, other)
    assert found["longer"].untyped_storage().nbytes() == 50 * 4
    found["overlaps"].zero_()
    assert found["longer"].sum() == sum(range(100, 120)) and found["inside"] == 0
    assert sum(views.sizes) >= 4 * (10 + 50 + 10)


@pytest.mark.parametrize("seed", range(30))
def test_any_views_load_to_what_they_are(seed: int, beside: Any) -> None:
    """Each byte that two tensors share is one byte when they are loaded; what no tensor shows is not in the file."""
    dice = random.Random(seed)
    dtypes = dice.choice([[torch.float32], [torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2], [torch.bool]])
    n = dice.choice([64, 512])
    # A bool has one bit pattern for each value.
    memory = torch.tensor([dice.randrange(2 if torch.bool in dtypes else 256) for _ in range(8 * n)], dtype=torch.uint8)
    tensors = []
    for _ in range(dice.randrange(1, 9)):
        flat = memory.view(dice.choice(dtypes))
        begin = dice.randrange(flat.numel())
        rows, columns = dice.randrange(1, 4), dice.randrange(5)
        strides = dice.randrange(6), dice.randrange(4)
        if begin + (rows - 1) * strides[0] + max(columns - 1, 0) * strides[1] < flat.numel():
            tensors.append(flat.as_strided((rows, columns), strides, begin))
    archive, views = archived({"tensors": tensors, "beside": beside})
    found = loaded(archive)["tensors"]
    for one, tensor in zip(found, tensors, strict=True):
        check(one, tensor)
    for (a, x), (b, y) in combinations(zip(found, tensors, strict=True), 2):
        (x_begin, x_end), (y_begin, y_end) = extent(x), extent(y)
        if max(x_begin, y_begin) < min(x_end, y_end):
            assert a.untyped_storage()._cdata == b.untyped_storage()._cdata
            assert extent(a)[0] - extent(b)[0] == x_begin - y_begin
    shown = {byte for tensor in tensors for byte in range(*extent(tensor))}
    of_memory = zip(views.identities, views.sizes, strict=True)
    written = sum(nbytes for identity, nbytes in of_memory if identity == memory.untyped_storage()._cdata)
    assert len(shown) <= written <= len(shown) + (8 * len(tensors) if len(dtypes) > 1 else 0)


@pytest.mark.parametrize("whole", ["a tensor", "an overlap", "a storage", "a subclass", "attributes", "conjugated"])
def test_a_storage_that_is_used_otherwise_is_written_whole(whole: str) -> None:
    flat = torch.arange(2000, dtype=torch.float32)
    state: dict[str, Any] = {"part": flat[10:20], "none": flat[5:5], "tied": flat[10:20]}
    if whole == "a tensor":
        state["whole"] = flat
    elif whole == "an overlap":
        state |= {"begin": flat[:1200], "end": flat[1100:]}
    elif whole == "a storage":
        state["whole"] = torch.storage.TypedStorage(
            wrap_storage=flat.untyped_storage(), dtype=flat.dtype, _internal=True
        )
    elif whole == "a subclass":
        state["whole"] = flat[30:40].as_subclass(Tagged)
    elif whole == "attributes":
        state["whole"] = flat[30:40]
        state["whole"].note = "x"
    else:
        state["whole"] = torch.view_as_complex(flat.view(1000, 2)).conj().imag  # a negated view
    archive, views = archived(state)
    expected, as_usual = archived(state, compact=False)
    assert list(views.sizes) == list(as_usual.sizes) == [8000] and views.offsets is None
    assert archive == expected


def test_of_state_without_views_nothing_changes() -> None:
    model = torch.nn.LSTM(8, 8, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 8))[0].sum().backward()
    optimizer.step()
    for state in (model.state_dict(), optimizer.state_dict(), list(model.parameters()), torch.zeros(3, 0)[2:], [1]):
        assert archived(state)[0] == archived(state, compact=False)[0]


@pytest.mark.parametrize("beside", [None, {1}])
def test_what_torch_refuses_is_refused_only_where_bytes_are_shared(beside: Any) -> None:
    memory = torch.zeros(800, dtype=torch.uint8)
    apart = {"a": memory[:400].view(torch.float32), "b": memory[400:].view(torch.int64), "beside": beside}
    found = loaded(archived(apart)[0])
    assert found["a"].untyped_storage().nbytes() == found["b"].untyped_storage().nbytes() == 400
    for compact, state in ((False, apart), (True, {**apart, "c": memory[396:404].view(torch.int32)})):
        with pytest.raises(RuntimeError, match="view the same data as different types"):
            archived(state, compact=compact)


def test_a_tensor_that_reaches_beyond_its_storage_is_written_as_torch_writes_it() -> None:
    """Sharded training frees memory in this way."""
    flat = torch.arange(100.0)
    state = [flat[:10], flat[50:60]]
    flat.untyped_storage().resize_(120)
    assert archived(state)[0] == archived(state, compact=False)[0]


def test_a_tensor_that_a_reducer_makes_is_written_whole() -> None:
    class Cloned:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __reduce__(self) -> tuple[Any, ...]:
            return list, ([self.tensor.clone()],)

    flat = torch.arange(100.0)
    for beside in (None, torch.eye(2).to_sparse()):
        state, cache = [flat[:10], Cloned(flat[20:30]), beside], ArchiveCache()
        for _ in range(3):
            found = loaded(archived(state, cache)[0])
            assert torch.equal(found[0], flat[:10]) and torch.equal(found[1][0], flat[20:30])


class Changing:
    """A dict of views, changed between saves in every way that a layout depends on."""

    def __init__(self, beside: Any) -> None:
        self.flat = torch.arange(400.0)
        self.cuts = [(0, 100), (100, 150), (300, 400)]
        self.state: dict[str, Any] = {"beside": beside, "step": 0}
        self.cut()

    def cut(self) -> None:
        self.state |= {str(at): self.flat[begin:end] for at, (begin, end) in enumerate(self.cuts)}

    def moves(self) -> None:
        self.flat = self.flat.clone()
        self.cut()

    def moves_inside(self) -> None:
        """The same sizes, elsewhere in the same storage."""
        self.cuts = [(400 - end, 400 - begin) for begin, end in self.cuts]
        self.cut()

    def swaps(self) -> None:
        self.cuts[0], self.cuts[2] = self.cuts[2], self.cuts[0]
        self.cut()

    def overlaps(self) -> None:
        begin, end = self.cuts[0]
        self.cuts[1] = begin + 10, end + (50 if end < 350 else -20)
        self.cut()

    def changes_shape(self) -> None:
        self.state["0"] = self.state["0"].reshape(5, -1).t()

    def grows(self) -> None:
        """The flat storage, and no view of it."""
        self.flat.untyped_storage().resize_(8 * 400)

    def is_shown_whole(self) -> None:
        self.state["whole"] = self.flat

    def is_no_longer(self) -> None:
        self.state.pop("whole", None)

    def is_split(self) -> None:
        """The same tensors, of two storages."""
        self.state["2"] = self.state["2"].clone()

    def steps(self) -> None:
        self.state["step"] += 1
        self.flat.add_(1)

    def needs_a_gradient(self) -> None:
        self.state["1"] = self.state["1"].detach().requires_grad_()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_no_layout_of_an_earlier_save_is_used_for_another(
    native: bool, seed: int, beside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each save is compared with one that keeps nothing but the keys."""
    if not native:
        monkeypatch.setattr(pickles, "_VOCABULARY", NoVocabulary())
    dice = random.Random(seed)
    changing, cache = Changing(beside), ArchiveCache()
    moves = [name for name, move in vars(Changing).items() if callable(move) and name not in ("__init__", "cut")]
    for move in [*dice.sample(moves, len(moves)), *dice.choices(moves, k=20)]:
        getattr(changing, move)()
        for _ in range(2):
            archive, views = archived(changing.state, cache)
            anew = ArchiveCache()
            anew.skeleton._kept = TensorViews(keys=list(views.keys))  # the keys alone stay
            expected, as_expected = archived(changing.state, anew)
            assert views.offsets == as_expected.offsets and archive == expected, move
            flats = {tensor.untyped_storage()._cdata for name, tensor in changing.state.items() if name.isdigit()}
            for one, other, storage in zip(views.identities, as_expected.identities, views.storages, strict=True):
                assert one == storage._cdata and (one == other or other not in flats), move
            for name, tensor in loaded(archive).items():
                if name.isdigit():
                    check(tensor, changing.state[name])


def test_one_cache_serves_compact_archives_and_others(flat: torch.Tensor, beside: Any) -> None:
    state, cache = {"a": flat[:10], "b": flat[500:], "beside": beside}, ArchiveCache()
    for compact in (True, False, True, True, False, False, True):
        _, views = archived(state, cache, compact=compact)
        assert sum(nbytes for nbytes in views.sizes if nbytes % 8 == 0) >= 2000
        assert (4000 in views.sizes) != compact


def test_facts_that_are_asked_in_pythons_way_are_the_same(flat: torch.Tensor) -> None:
    state = {"a": flat[5:10], "t": flat[100:160].view(6, 10).t(), "e": flat[9:9], "whole": torch.ones(3)}
    told = archived(state)[0]
    _engine.ask_tensors_always(True)
    try:
        assert archived(state)[0] == told
    finally:
        _engine.ask_tensors_always(False)


def test_spans_of_what_has_no_storage_are_refused() -> None:
    with pytest.raises(ValueError, match="plain"):
        _engine.spans_of([torch.eye(2).to_sparse()])


def test_a_compact_file_is_verified_and_loaded(tmp_path: Path, flat: torch.Tensor) -> None:
    state = {"a": flat[:10], "tied": flat[:10], "b": torch.nn.Parameter(flat[100:200].view(10, 10).t())}
    with lazyckpt.Saver(verify_after_write=True) as saver, saver.stage(tmp_path / "c") as staged:
        staged.add("a.pt", state, compact=True)
        staged.add("whole.pt", state)
        staged.add("a.safetensors", {"a": flat[:10]}, compact=True)
        handle = staged.save(blocking=True)
    assert handle.metrics.copied_bytes == 40 + 400 + 4000 + 40
    assert (tmp_path / "c/a.pt").stat().st_size < 4000 < (tmp_path / "c/whole.pt").stat().st_size
    for found in (lazyckpt.load(tmp_path / "c/a.pt"), torch.load(tmp_path / "c/a.pt", mmap=True, weights_only=True)):
        for name, tensor in state.items():
            check(found[name], tensor)
        assert found["a"].untyped_storage().data_ptr() == found["tied"].untyped_storage().data_ptr()
    damaged = bytearray((tmp_path / "c/a.pt").read_bytes())
    damaged[damaged.index(bits(flat[100:110]))] ^= 1
    (tmp_path / "c/a.pt").write_bytes(damaged)
    with pytest.raises(lazyckpt.LoadError):
        lazyckpt.load(tmp_path / "c/a.pt")
