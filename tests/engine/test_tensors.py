"""The native pass over all tensors (csrc/python/tensors.cc)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lazyckpt import _engine
from lazyckpt.providers.wrappers import storages_in


def look(*tensors: torch.Tensor) -> bytes:
    looks = _engine.look_at_tensors(list(tensors))
    assert looks is not None
    return looks[0]


BASE = torch.zeros(6)
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shape": lambda t: t.view(2, 3),
    "strides": lambda t: t.view(2, 3).t().reshape(3, 2)[:, :].as_strided((6,), (0,)),
    "offset": lambda t: t[1:],
    "dtype of the same size": lambda t: t.view(torch.int32),
    "requires_grad": lambda t: t.detach().requires_grad_(),
    "bytes of the storage": lambda t: torch.zeros(7)[:6],
    "one dimension of six and none": lambda t: t.view(6, 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_look_tells_apart_what_a_pickle_tells_apart(change: str) -> None:
    assert look(BASE) == look(torch.ones(6)), "contents are not asked about"
    assert look(BASE) != look(CHANGES[change](BASE))


def test_a_look_tells_whether_storages_are_shared() -> None:
    a, b = torch.zeros(4), torch.zeros(4)
    assert look(a, b) != look(a, a)
    assert look(a, b, a) != look(a, b, b)
    assert look(a, b, a) == look(b, a, b)


def test_storages_come_once_in_the_order_of_appearance() -> None:
    a, b = torch.zeros(4), torch.zeros(4)
    looks = _engine.look_at_tensors([b, a[1:], b.view(2, 2)])
    assert looks is not None
    expected = [b.untyped_storage(), a.untyped_storage()]
    assert list(looks[1]) == [s._cdata for s in expected]
    assert [s.data_ptr() for s in looks[1].values()] == [s.data_ptr() for s in expected]


def with_attribute() -> torch.Tensor:
    tensor = torch.zeros(2)
    tensor.note = "mine"  # type: ignore[attr-defined]
    return tensor


def with_hook() -> torch.Tensor:
    tensor = torch.zeros(2, requires_grad=True)
    tensor.register_hook(lambda grad: grad)
    return tensor


NOT_PLAIN: dict[str, Callable[[], torch.Tensor]] = {
    "attribute": with_attribute,
    "hook": with_hook,
    "sparse": lambda: torch.eye(2).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "negated": lambda: torch.zeros(2, dtype=torch.complex64).conj().imag,
    "conjugated": lambda: torch.zeros(2, dtype=torch.complex64).conj(),
    "neither CPU nor CUDA": lambda: torch.zeros(2, device="meta"),
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_what_is_not_plain_is_said_to_be(kind: str) -> None:
    assert _engine.look_at_tensors([torch.zeros(1), NOT_PLAIN[kind]()]) is None


def test_a_complex_tensor_behind_a_real_one_is_asked_too() -> None:
    real, complex_ = torch.zeros(2), torch.zeros(2, dtype=torch.complex64)
    assert _engine.look_at_tensors([real, complex_, real]) is not None
    assert _engine.look_at_tensors([real, complex_, complex_.conj()]) is None


WHOLE: dict[str, tuple[Callable[[], torch.Tensor], int]] = {
    "all of it": (lambda: torch.zeros(2, 3), 1),
    "a scalar": (lambda: torch.tensor(1.0), 1),
    "nothing": (lambda: torch.zeros(0), 1),
    "a part": (lambda: torch.zeros(6)[:3], 0),
    "another order": (lambda: torch.zeros(2, 3).t(), 0),
    "expanded": (lambda: torch.zeros(1).expand(4), 0),
    "inference": (lambda: torch.inference_mode()(lambda: torch.zeros(3))(), 0),
    "not on the host": (lambda: torch.zeros(3, device="meta"), 1),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_which_tensors_fill_their_storage(kind: str) -> None:
    make, whole = WHOLE[kind]
    tensor = make()
    storage = tensor.untyped_storage()
    [found], seen, wrappers = _engine.storages_in(tensor)
    assert found is tensor and wrappers == []
    assert (seen.identities, seen.sizes, seen.whole) == ([storage._cdata], [storage.nbytes()], bytes([whole]))


def test_tensors_are_found_however_deep_and_those_without_a_storage_are_left_out() -> None:
    a, b, c, d = (torch.zeros(n) for n in range(1, 5))
    tree = {"a": a, 1: [b, (c, {"x": None, "y": "text"}, [[d]]), torch.eye(2).to_sparse(), {a}], "again": a}
    found, seen, _ = _engine.storages_in(tree)
    assert [id(t) for t in found] == [id(t) for t in (a, b, c, d, a)]
    assert seen.identities == [t.untyped_storage()._cdata for t in found]
    assert seen.sizes == [4, 8, 12, 16, 4]
    found, seen, wrappers = _engine.storages_in(object())
    assert (found, seen.identities, wrappers) == ([], [], [])


class Holder(torch.Tensor):
    """Holds another tensor as DTensor does."""

    _local_tensor: torch.Tensor

    @staticmethod
    def __new__(cls: Any, inside: torch.Tensor) -> Any:
        holder = torch.Tensor._make_wrapper_subclass(cls, inside.shape)  # type: ignore[attr-defined]
        holder._local_tensor = inside
        return holder

    def __tensor_flatten__(self) -> Any:
        return ["_local_tensor"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def test_the_tensor_inside_a_dtensor_takes_its_place_unless_it_is_a_wrapper_too() -> None:
    inside, beside = torch.zeros(3), torch.zeros(5)
    outer, twice = Holder(inside), Holder(Holder(beside))
    tensors, seen, wrappers = _engine.storages_in([outer, twice, beside], True)
    assert [id(t) for t in tensors] == [id(beside), id(inside)]
    assert seen.identities == [t.untyped_storage()._cdata for t in tensors]
    assert (seen.sizes, seen.whole) == ([20, 12], bytes([1, 1])) and [id(w) for w in wrappers] == [id(twice)]
    assert [id(w) for w in _engine.storages_in([outer, twice], False)[2]] == [id(outer), id(twice)]
    found = [
        {i for level in storages_in([outer, twice], links=links) for i in level.identities} for links in (False, True)
    ]
    assert found[0] == found[1] == {inside.untyped_storage()._cdata, beside.untyped_storage()._cdata}


def test_a_tree_without_end_is_an_error() -> None:
    tree: list[Any] = [torch.zeros(1)]
    tree.append({"again": (tree,)})
    for _ in range(2):
        with pytest.raises(RecursionError, match="looking for tensors"):
            _engine.storages_in(tree)
    assert len(_engine.storages_in([tree[0]])[0]) == 1


def test_errors_of_those_asked_come_through() -> None:
    with pytest.raises(TypeError, match="list"):
        _engine.look_at_tensors((torch.zeros(1),))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="object"):
        _engine.look_at_tensors([object()])  # type: ignore[list-item]
    assert _engine.look_at_tensors([]) is not None


def test_tensors_are_prefetched() -> None:
    """Fails if this torch lays its tensors out in a way that the search does not find; saves are slower then."""
    assert _engine.prefetches_tensors()


def test_two_threads_may_be_the_first_to_ask() -> None:
    """Regression: a thread released the GIL while it looked up torch's names; another waited for it with the GIL."""
    script = """
import builtins, threading, time, torch
from lazyckpt import _engine
tensors, load = [torch.zeros(1)], builtins.__import__
other = threading.Thread(target=_engine.look_at_tensors, args=(tensors,))
def slowly(*args, **kwargs):
    builtins.__import__ = load
    other.start()
    time.sleep(0.5)
    return load(*args, **kwargs)
builtins.__import__ = slowly
assert _engine.look_at_tensors(tensors) is not None
assert other.ident is not None, "nothing was looked up"
other.join()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


PAIRS: dict[str, tuple[torch.Tensor, torch.Tensor, bool]] = {
    "alike": (torch.ones(2, 3), torch.zeros(2, 3), True),
    "into a part of a buffer": (torch.ones(4), torch.zeros(9)[3:7], True),
    "empty": (torch.ones(0), torch.zeros(0), False),
    "a part of what was saved": (torch.ones(9)[:4], torch.zeros(4), False),
    "saved in another order": (torch.ones(2, 3).t(), torch.zeros(3, 2), False),
    "live in another order": (torch.ones(3, 2), torch.zeros(2, 3).t(), False),
    "saved as a conjugate": (torch.ones(2, dtype=torch.complex64).conj(), torch.zeros(2, dtype=torch.complex64), False),
    "live negated": (torch.ones(2), torch._neg_view(torch.zeros(2)), False),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_where_a_saved_storage_can_be_read_to_whole(kind: str) -> None:
    saved, live, expected = PAIRS[kind]
    identities, storages, offsets, whole = _engine.look_at_landings([saved], [live])
    assert identities == [saved.untyped_storage()._cdata] and list(whole) == [expected]
    assert storages[0].data_ptr() + offsets[0] == live.data_ptr()


def test_landings_are_pairs_of_tensors() -> None:
    with pytest.raises(ValueError, match="length"):
        _engine.look_at_landings([torch.ones(1)], [])
    with pytest.raises(NotImplementedError):
        _engine.look_at_landings([torch.ones(1)], [torch.ones(1).to_sparse()])
