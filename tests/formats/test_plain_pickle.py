"""The reader of plain pickles makes, object for object, what torch's unpickler makes, or leaves the pickle to it."""

from __future__ import annotations

import io
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import describe_graph
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import lazyckpt
from attacks.mutate import mutate_pickle
from attacks.pickles import Raw, call, name, opcodes, tensor
from lazyckpt.formats.plain_pickle import NotPlain, read_plain
from lazyckpt.reading.unpickle import unpickle
from trials import Trials


class Saved:
    """The pickle and the storages of what ``torch.save`` writes."""

    def __init__(self, obj: Any, save: Callable[..., None] = torch.save) -> None:
        out = io.BytesIO()
        save(obj, out)
        with zipfile.ZipFile(out) as archive:
            records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
        self.pickle = records["data.pkl"]
        self.storages = {name.removeprefix("data/"): data for name, data in records.items() if name.startswith("data/")}

    def plain(self, data: bytes | None = None) -> Any:
        return read_plain(self.pickle if data is None else data, self._loader())

    def theirs(self, data: bytes | None = None) -> Any:
        whole = self.pickle if data is None else data
        return unpickle(whole, "a.pt", self._loader(), None, weights_only=True)

    def _loader(self) -> Callable[[Any], torch.storage.TypedStorage]:
        memory: dict[str, torch.UntypedStorage] = {}

        def load(saved_id: Any) -> torch.storage.TypedStorage:
            _, kind, key, _, numel = saved_id
            dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
            data = self.storages[key]
            assert len(data) == numel * dtype.itemsize
            if key not in memory:
                memory[key] = torch.UntypedStorage(len(data))
                torch.empty(0, dtype=torch.uint8).set_(memory[key]).copy_(torch.tensor(list(data), dtype=torch.uint8))
            return torch.storage.TypedStorage(wrap_storage=memory[key], dtype=dtype, _internal=True)

        return load


BASE = torch.arange(24.0)
TENSORS = [
    BASE,
    BASE[3:9:2],
    BASE.view(2, 3, 4).permute(2, 0, 1),
    torch.tensor(2.5),
    torch.empty(0, 3),
    torch.ones(3, requires_grad=True),
    torch.nn.Parameter(torch.ones(2, 2)),
    torch.nn.Parameter(torch.ones(2), requires_grad=False),
    torch.ones(3, dtype=torch.bool),
    torch.arange(5, dtype=torch.int16),
    torch.ones(2, dtype=torch.complex64),
    torch.ones(2).bfloat16(),
    torch.ones(3, dtype=torch.uint16),
    torch.ones(3).to(torch.float8_e5m2),
    torch.ones(1).expand(4, 5),
]
KEYS = st.text(max_size=5) | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False)
LEAVES = KEYS | st.floats() | st.integers(-(2**600), 2**600) | st.sampled_from(TENSORS) | st.sampled_from([torch.int8])
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=5)
        | st.dictionaries(KEYS, inner, max_size=5).map(OrderedDict)
        | inner.map(lambda shared: [shared, shared])
    ),
    max_leaves=20,
)


def with_attributes() -> OrderedDict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    return model.state_dict()  # type: ignore[return-value]  # it has _metadata


@settings(max_examples=100, deadline=None)
@given(STATES)
@example(with_attributes())
@example({"all": TENSORS, "again": [TENSORS], "many": {str(n): n for n in range(1500)}})
def test_plain_state_is_read_as_torch_reads_it(state: Any) -> None:
    saved = Saved(state)
    assert describe_graph(saved.plain()) == describe_graph(saved.theirs())


def test_hooks_and_attributes_are_what_torch_sets() -> None:
    saved = Saved(with_attributes())
    ours, theirs = saved.plain(), saved.theirs()
    assert type(ours) is type(theirs) and ours._metadata == theirs._metadata and ours.keys() == theirs.keys()
    for a, b in zip(ours.values(), theirs.values(), strict=True):
        assert type(a._backward_hooks) is type(b._backward_hooks) is OrderedDict
        assert (a._version, a.is_leaf, a.is_inference()) == (b._version, b.is_leaf, b.is_inference())


def test_what_lazyckpt_writes_is_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading and restoring it never needs torch's unpickler, which takes four times as long."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model, optimizer=optimizer, scheduler=scheduler)
        path = ckpt.save(1).result()
        monkeypatch.delattr("lazyckpt.reading.archive.unpickle")
        assert ckpt.restore() == 1
    assert lazyckpt.load(path)["model"].keys() == model.state_dict().keys()


NOT_PLAIN: dict[str, bytes] = {
    "another protocol": b"\x80\x04N.",
    "an opcode of another protocol": b"\x80\x02\x8c\x01a.",
    "a class of torch's list": opcodes(call("collections.Counter")) + b".",
    "a class of neither list": opcodes(call("os.system", "true")) + b".",
    "a tuple as a key": opcodes({(1, 2): 3}) + b".",
    "a tensor as a key": b"}" + tensor() + b"Ns.",
    "items of a number": b"K\x01(K\x01K\x02u.",
    "items of a list": b"](K\x01K\x02u.",
    "an odd number of items": b"}(K\x01u.",
    "elements of a tuple": b")(K\x01e.",
    "an element of a dict": b"}K\x01a.",
    "a state of a dict": b"}}b.",
    "a state of a tensor": tensor() + b"}b.",
    "a state of a function": name("torch._utils._rebuild_tensor_v2") + b"}b.",
    "a new object": name("collections.OrderedDict") + b")\x81.",
    "a place that is empty": b"h\x07.",
    "a mark that is missing": b"K\x01t.",
    "a stack that is empty": b".",
    "elements below the mark": b"](K\x01aN.",
    "a tuple across a mark": b"K\x01(K\x02\x86.",
    "a place for nothing": b"q\0N.",
    "a place without end": b"Nr\xff\xff\xff\xff.",
    "half an item": b"}Ns.",
    "a storage of no id": b")Q.",
    "a name without end": b"ctorch\n.",
    "a cut text": b"X\xff\xff\xff\xffa.",
    "a cut long number": b"\x8a\xff\1.",
    "a cut number": b"J\0",
    "no end": b"N",
    "text that is not UTF-8": b"X\1\0\0\0\xff.",
    "an offset that is no number": tensor(offset=True) + b".",
    "a size that is no number": tensor(size=(True,)) + b".",
    "a size that is a list": tensor(size=[4]) + b".",
    "a stride too many": tensor(stride=(1, 1)) + b".",
    "a view past the end": tensor(size=(5,)) + b".",
    "a view before the beginning": tensor(offset=-1) + b".",
    "a negative stride": tensor(stride=(-1,)) + b".",
    "a negative size": tensor(size=(-4,)) + b".",
    "a view past all memory": tensor(size=(2**62, 2), stride=(4, 1)) + b".",
    "a size beyond 64 bits": tensor(size=(2**64,)) + b".",
    "a size of too many dimensions": tensor(size=(1,) * 65, stride=(1,) * 65) + b".",
    "a view of a number": call(
        "torch._utils._rebuild_tensor_v2", 1, 0, (4,), (1,), False, call("collections.OrderedDict")
    )
    + b".",
    "arguments in a list": Raw(name("collections.OrderedDict") + b"]R") + b".",
    "a parameter of a number": call("torch._utils._rebuild_parameter", 1, False, call("collections.OrderedDict"))
    + b".",
}


@pytest.mark.parametrize("what", NOT_PLAIN)
def test_everything_else_is_left_to_torch(what: str) -> None:
    saved = Saved(torch.ones(4))
    with pytest.raises(NotPlain):
        saved.plain(NOT_PLAIN[what])


def test_under_a_dispatch_mode_all_is_left_to_torch() -> None:
    saved = Saved([1])
    with FakeTensorMode(), pytest.raises(NotPlain):
        saved.plain()


def test_a_mutation_is_read_as_torch_reads_it_or_left_to_torch(trials: Trials, tmp_path: Path) -> None:
    states = [
        {"t": TENSORS, "a": [1, (2.5, None, "x")]},
        with_attributes(),
        {"n": {"m": [BASE, BASE[:2]]}, "o": TENSORS[5:8]},
    ]
    valid = [Saved(state) for state in states]
    verdicts = {"plain": 0, "left to torch": 0}
    count = trials.count(1500, 300_000)
    for number in range(count):
        rng = random.Random(f"{trials.seed}-{number}")
        saved = rng.choice(valid)
        data = saved.pickle
        for _ in range(rng.choice((1, 1, 1, 2))):
            data = mutate_pickle(data, rng)
        try:
            ours = saved.plain(data)
        except NotPlain:
            verdicts["left to torch"] += 1
            continue
        verdicts["plain"] += 1
        assert describe_graph(ours) == describe_graph(saved.theirs(data)), f"case {trials.seed}-{number}"
    assert min(verdicts.values()) > count // 50, verdicts
    trials.report("mutated pickles of plain state", count, tmp_path, **verdicts)


def test_a_state_that_shadows_a_method() -> None:
    """Regression: BUILD put ``update`` into an OrderedDict, and its items were handed to that."""
    ordered = b"ccollections\nOrderedDict\n"
    data = b"\x80\x02" + ordered + b")R}X\x06\0\0\0update" + ordered + b"sbX\x01\0\0\0aK\x01s."
    saved = Saved({})
    assert saved.plain(data) == saved.theirs(data) == OrderedDict(a=1)
