"""Objects as segments: what ``torch.save`` would write, bit for bit, the first time and from the cache."""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import torch_load_with_our_globals
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lazyckpt
from lazyckpt.providers.torch_pickler import MIN_ARRAY_BYTES
from trials import Trials

BIG = MIN_ARRAY_BYTES  # bytes from which on an array is a storage record

NEWER = ("float8_e8m0fnu", "float4_e2m1fn_x2")  # not in every torch that is supported
PLAIN = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.complex128, torch.complex64, torch.complex32),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
)
DTYPES = (*PLAIN, *(getattr(torch, name) for name in NEWER if hasattr(torch, name)))


def noise(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every bit pattern: NaN payloads, denormals, -0.0. A bool is 0 or 1."""
    count = torch.Size(shape).numel()
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, shape)


class Tagged(torch.Tensor):
    """A subclass as users write them."""


class Point:
    def __init__(self, x: Any) -> None:
        self.x = x


def with_attribute() -> torch.Tensor:
    t = torch.randn(5)
    t.tag = ["sharded", 3]  # type: ignore[attr-defined]
    return t


def tagged() -> torch.Tensor:
    t = torch.randn(4).as_subclass(Tagged)
    t.note = "mine"  # type: ignore[attr-defined]
    return t


def tied() -> Any:
    w = torch.randn(6, 4)
    return {"a": w, "b": w, "c": w.t(), "d": w[1:3], "e": w.detach(), "f": [w]}


def cyclic() -> Any:
    x: list[Any] = [torch.ones(2)]
    x.append(x)
    return x


def shared_containers() -> Any:
    inner = {"t": torch.ones(3)}
    return [inner, inner, (inner,)]


def grad_leaf() -> torch.Tensor:
    t = torch.randn(3, requires_grad=True)
    (t * 2).sum().backward()
    return t


def hooked() -> torch.Tensor:
    t = torch.randn(3, requires_grad=True)
    t.retain_grad()
    return t


def jagged() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])


def quantised() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.randn(4, 8)
        return [
            torch.quantize_per_tensor(x, 0.1, 3, torch.qint8),
            torch.quantize_per_tensor(x, 0.1, 3, torch.quint8),
            torch.quantize_per_channel(x, torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int64), 0, torch.qint8),
        ]


def structured() -> Any:
    dtype = np.dtype([("a", "<i4"), ("b", ">f8", (2,)), ("c", "S5")])
    return np.frombuffer(np.random.default_rng(1).bytes(dtype.itemsize * 4000), dtype=dtype).copy()


def arrays() -> Any:
    rng = np.random.default_rng(0)
    big = rng.standard_normal((200, 300))
    return {
        "big": big,
        "same": big,
        "small": rng.standard_normal(7),
        "fortran": np.asfortranarray(big),
        "strided": big[::2, ::3],
        "transposed": big.T,
        "reversed": big[::-1],
        "structured": structured(),
        "bool": rng.random(BIG) > 0.5,
        "half": big.astype(np.float16),
        "times": np.arange(BIG).astype("datetime64[s]"),
        "text": np.array(["a", "bcd"] * BIG),
        "objects": np.array([1, "two", None], dtype=object),
        "zero": np.zeros((0, 5)),
        "0-d": np.array(3.5),
        "scalar": np.float32(0.1),
        "read only": np.frombuffer(bytes(range(256)) * 512, dtype=np.uint8),
        "empty dim": np.zeros((3, 0, BIG)),
    }


def storages() -> Any:
    t, raw = torch.arange(10.0), torch.arange(10, dtype=torch.uint8)
    return {"typed": t._typed_storage(), "of": t, "untyped": raw.untyped_storage(), "of it": raw}


CASES: dict[str, Callable[[], Any]] = {
    **{str(dtype).removeprefix("torch."): lambda dtype=dtype: noise(dtype, 3, 5) for dtype in DTYPES},
    **{f"0-d {dtype}".replace("torch.", ""): lambda dtype=dtype: noise(dtype) for dtype in PLAIN[:3]},
    "empty": lambda: [torch.empty(0), torch.empty(3, 0), torch.empty(0, 2, dtype=torch.int8)],
    "empty view of something": lambda: torch.ones(5)[2:2],
    "non-contiguous": lambda: torch.randn(4, 6, 5).permute(2, 0, 1)[:, ::2],
    "expanded": lambda: torch.ones(3, 1).expand(3, 7),
    "overlapping": lambda: torch.arange(10.0).unfold(0, 4, 2),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "tied": tied,
    "sub-storage views": lambda: list(torch.arange(100.0).split(17)),
    "conj": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "neg": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "conj and its base": lambda: (lambda z: {"z": z, "c": z.conj()})(torch.randn(4, dtype=torch.complex128)),
    "real and its neg": lambda: (lambda z: [z.imag, z.conj().imag])(torch.randn(4, dtype=torch.complex128)),
    "quantised": quantised,
    "sparse coo": lambda: torch.eye(4).to_sparse(),
    "sparse, not coalesced": lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), check_invariants=False),
    "sparse csr": lambda: torch.eye(4).to_sparse_csr(),
    "nested": jagged,
    "meta": lambda: torch.empty(2, 3, device="meta"),
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)),
    "parameters, tied": lambda: (lambda p: [p, p, p.data])(torch.nn.Parameter(torch.randn(3))),
    "frozen parameter": lambda: torch.nn.Parameter(torch.randn(3), requires_grad=False),
    "buffer": lambda: torch.nn.Buffer(torch.randn(3)),
    "requires_grad": grad_leaf,
    "retains grad": hooked,
    "attribute": with_attribute,
    "subclass": tagged,
    "storages": storages,
    "module state": lambda: torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).state_dict(),
    "module": lambda: torch.nn.Linear(3, 2),
    "arrays": arrays,
    "array beside tensor": lambda: {"n": np.ones(BIG, np.uint8), "t": torch.zeros(BIG, dtype=torch.uint8)},
    "array of a tensor": lambda: (lambda t: {"t": t, "n": t.numpy()})(torch.randn(BIG)),
    "scalars": lambda: [1, True, 1.0, -0.0, float("nan"), float("inf"), None, "é\ud800", b"\0", 1 << 200, 2 - 3j, ...],
    "containers": lambda: [(), [], {}, set(), frozenset([1]), OrderedDict(a=1), defaultdict(list, a=[1]), range(3)],
    "shared containers": shared_containers,
    "cyclic": cyclic,
    "dtype, size, device": lambda: [torch.float8_e5m2, torch.Size([1, 2]), torch.device("cpu"), torch.strided],
    "object": lambda: Point(torch.ones(3)),
    "int keys": lambda: {0: torch.ones(1), "0": 2, None: 3, (1, 2): 4},
    "nothing": lambda: None,
    "generator state": lambda: torch.Generator().manual_seed(1).get_state(),
    "many": lambda: {f"t{i}": torch.full((i % 7,), i) for i in range(500)},
}


def outcome(load: Callable[[], Any], graph: Callable[[Any], Any]) -> Any:
    """Returns the graph of the loaded object, or the class of the error that loading raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return graph(load())
    except Exception:
        return "refused"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_file_says_what_torch_save_would_say(name: str, tmp_path: Path, graph: Any, by_torch: Any) -> None:
    obj = CASES[name]()
    theirs, ours = tmp_path / "theirs.pt", tmp_path / "ours.pt"
    torch.save(obj, theirs)
    lazyckpt.save(obj, ours)
    expected = graph(torch.load(theirs, weights_only=False))
    assert graph(torch.load(ours, weights_only=False)) == expected
    assert graph(torch.load(ours, weights_only=False, mmap=True)) == expected
    assert graph(lazyckpt.load(ours, weights_only=False)) == expected
    assert graph(lazyckpt.load(theirs, weights_only=False)) == expected
    restricted = outcome(lambda: torch_load_with_our_globals(theirs), graph)
    assert outcome(lambda: lazyckpt.load(theirs), graph) == restricted
    assert restricted == "refused" or outcome(lambda: torch_load_with_our_globals(ours), graph) == restricted
    assert restricted == "refused" or outcome(lambda: lazyckpt.load(ours), graph) == restricted


@pytest.mark.long(first=41)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_says_it_too_and_again_from_the_cache(
    name: str, saver: Any, tmp_path: Path, graph: Any, by_torch: Any
) -> None:
    """Unless ``restore()`` could not read it: then every save is refused, and a Saver saves it all the same."""
    obj = CASES[name]()
    expected = graph(by_torch(obj))
    lazyckpt.save(obj, tmp_path / "a.pt")
    restorable = outcome(lambda: lazyckpt.load(tmp_path / "a.pt", weights_only=True), graph) != "refused"
    with lazyckpt.Saver() as other:
        for _ in range(3):
            file = other.save(obj, tmp_path / "b.pt").result(timeout=30)
            assert graph(torch.load(file, weights_only=False)) == expected
            if not restorable:
                with pytest.raises(lazyckpt.SerializationError, match=r"'x.*restore\(\) could not read"):
                    saver.save(obj)
                continue
            assert graph(torch.load(saver.save(obj), weights_only=False)["x"]["value"]) == expected


# round trips of anything


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(PLAIN))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    torch.manual_seed(draw(st.integers(0, 1 << 30)))
    t = noise(dtype, *shape)
    for _ in range(draw(st.integers(0, 2))):
        if t.dim() and draw(st.booleans()):
            t = t.transpose(0, draw(st.integers(0, t.dim() - 1)))
        if t.dim() and t.shape[0]:
            t = t[draw(st.integers(0, t.shape[0] - 1)) :: draw(st.integers(1, 3))]
    if t.dtype.is_floating_point and t.dtype.itemsize >= 4 and draw(st.booleans()):
        t.requires_grad_()
    return t


leaves = st.one_of(
    tensors(),
    # Views of one storage; but torch.load gives each tensor without elements one of its own.
    st.builds(lambda t: [t[None], t, t.detach()] if t.numel() else t, tensors()),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=20),
    st.builds(
        lambda n, order: np.arange(n, dtype=np.int32).reshape(-1, 2, order=order),
        st.sampled_from([2, 10, BIG // 4, BIG]),
        st.sampled_from("CF"),
    ),
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
        | st.tuples(inner, inner)
        | st.builds(lambda x: [x, x], inner)
    ),
    max_leaves=8,
)


@pytest.mark.timeout(1800)  # with all trials
def test_any_tree_comes_back_from_a_file(graph: Any, by_torch: Any, trials: Trials, shm: Path) -> None:
    tried = 0

    @trials.examples(60, 6000)
    @given(tree=trees)
    def round_trip(tree: Any) -> None:
        nonlocal tried
        tried += 1
        lazyckpt.save(tree, shm / "t.pt")
        expected = graph(by_torch(tree))
        assert graph(lazyckpt.load(shm / "t.pt", weights_only=False)) == expected
        assert graph(torch.load(shm / "t.pt", weights_only=False)) == expected

    round_trip()
    trials.report("round trips of any tree, bit for bit", tried, shm)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(sequence=st.lists(trees, min_size=2, max_size=4))
def test_any_sequence_of_trees_comes_back_from_one_cache(
    sequence: list[Any], saver: Any, graph: Any, by_torch: Any
) -> None:
    for tree in [*sequence, sequence[-1]]:
        assert graph(torch.load(saver.save(tree), weights_only=False)["x"]["value"]) == graph(by_torch(tree))


def test_an_array_keeps_its_byte_order(tmp_path: Path) -> None:
    """``torch.save`` turns it into the machine's own; the values are the same."""
    array = np.arange(BIG, dtype=">f4")
    lazyckpt.save(array, tmp_path / "a.pt")
    again = torch.load(tmp_path / "a.pt", weights_only=False)
    assert again.dtype == array.dtype and (again == array).all()


def test_objects_are_pickled_at_once(tmp_path: Path) -> None:
    log: list[Any] = [1, {"lr": 0.1}]
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(log=log)
        handle = ckpt.save(1)
        log.append(2)
        log[1]["lr"] = 7
        assert torch.load(handle.result() / "state.pt")["log"] == [1, {"lr": 0.1}]


def test_what_cannot_be_pickled_is_a_typed_error_that_names_it(tmp_path: Path) -> None:
    bad = {"callback": lambda: None}
    with pytest.raises(lazyckpt.SerializationError, match="lambda") as one:
        lazyckpt.save(bad, tmp_path / "a.pt")
    assert one.value.__cause__ is not None
    assert list(tmp_path.iterdir()) == []
    ckpt = lazyckpt.Checkpointer(tmp_path / "run")
    ckpt.track(good=[1], bad=bad)
    with pytest.raises(lazyckpt.SerializationError, match=r"step 5.*'bad'.*lambda"):
        ckpt.save(5)
    bad.clear()
    assert torch.load(ckpt.save(6).result() / "state.pt")["bad"] == {}
    ckpt.close()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["step-00000006"]
