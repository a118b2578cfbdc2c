"""The global random number generators: captured, put back, and plain enough for ``weights_only=True``."""

from __future__ import annotations

import concurrent.futures
import io
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.errors import RestoreError
from lazyckpt.providers.rng import KeptMemory, capture_rng, check_rng, restore_rng


def draw() -> list[Any]:
    numpy = pytest.importorskip("numpy")
    return [
        random.random(),
        random.gauss(0, 1),
        numpy.random.rand(3).tolist(),
        numpy.random.randn(1).tolist(),
        torch.rand(5).tolist(),
        torch.randn(17).tolist(),
    ]


def reload(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_draws_continue_where_the_state_was_captured() -> None:
    draw()  # an odd number of Gaussians: the second of each pair is waiting in random and in NumPy
    state = reload(capture_rng())
    expected = [draw() for _ in range(3)]
    random.seed(1), torch.manual_seed(1)
    restore_rng(state)
    assert [draw() for _ in range(3)] == expected


def test_capture_draws_nothing_and_does_not_change_later() -> None:
    draw()
    first = capture_rng()
    kept = reload(first)
    second = capture_rng()
    draw()
    for name in ("python", "numpy"):
        assert repr(first[name]) == repr(second[name]) == repr(kept[name])
    assert torch.equal(first["torch"], second["torch"]) and torch.equal(first["torch"], kept["torch"])


def test_structure_is_stable() -> None:
    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shape(item) for key, item in value.items()}
        return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else None

    before = shape(capture_rng())
    draw()
    assert shape(capture_rng()) == before


def test_numpy_is_not_imported_for_our_sake() -> None:
    script = (
        "import sys; from lazyckpt.providers.rng import KeptMemory, capture_rng, check_rng, restore_rng\n"
        "sys.modules.pop('numpy.random', None)\n"
        "state = capture_rng(); restore_rng(state)\n"
        "assert state['numpy'] is None and 'numpy.random' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_numpy_state_without_numpy_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    draw()
    state = capture_rng()
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.warns(UserWarning, match="NumPy is not installed"):
        restore_rng(state)


def test_replaced_numpy_generator_is_left_out_with_a_warning() -> None:
    numpy = pytest.importorskip("numpy")
    before = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(numpy.random.PCG64(1))
        with pytest.warns(UserWarning, match="replaced by PCG64"):
            assert capture_rng()["numpy"] is None
    finally:
        numpy.random.set_bit_generator(before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_states_on_a_machine_without_cuda_warn() -> None:
    state = capture_rng()
    state["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * 2
    with pytest.warns(UserWarning, match=r"2 CUDA device\(s\), this machine has 0"):
        restore_rng(state)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_every_cuda_device_is_restored() -> None:
    devices = range(torch.cuda.device_count())

    def draw_all() -> list[list[float]]:
        return [torch.rand(7, device=f"cuda:{device}").tolist() for device in devices]

    draw_all()
    state = reload(capture_rng())
    expected = draw_all()
    restore_rng(state)
    assert draw_all() == expected
    state["cuda"].append(state["cuda"][0])
    with pytest.warns(UserWarning, match="random numbers on the others will differ"):
        restore_rng(state)
    assert draw_all() == expected


def numpy_with(key: str, value: Any) -> dict[str, Any]:
    state = {"key": torch.zeros(624, dtype=torch.int64), "pos": 1, "has_gauss": 0, "cached_gaussian": 0.0}
    return {**state, key: value}


WRONG_OF_NUMPY = [
    ("pos", "x"),
    ("pos", -1),
    ("pos", 10**6),  # NumPy would take it, and read beyond its words
    ("has_gauss", "x"),
    ("cached_gaussian", "x"),
    ("key", torch.zeros(624)),
]
MALFORMED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "no python": {"python": None},
    "short words": {"python": {"version": 3, "words": torch.zeros(3, dtype=torch.int64), "gauss_next": None}},
    "torch of the wrong size": {"torch": torch.zeros(7, dtype=torch.uint8)},
    "torch of the wrong dtype": {"torch": torch.zeros(5056)},
    "numpy without a key": {"numpy": {"pos": 1}},
    **{f"numpy with {key} {value!r}": {"numpy": numpy_with(key, value)} for key, value in WRONG_OF_NUMPY},
    "words with fractions": {"python": {"version": 3, "words": torch.zeros(625), "gauss_next": None}},
    "a column of words": {
        "python": {"version": 3, "words": torch.zeros(625, 1, dtype=torch.int64), "gauss_next": None}
    },
    "cuda not a list": {"cuda": 5},
}


@pytest.mark.parametrize("damage", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_state_is_one_typed_error_and_changes_nothing(damage: dict[str, Any]) -> None:
    draw()
    state = {**capture_rng(), **damage} if damage else {}
    random.random()
    before = capture_rng()
    expected = draw()
    restore_rng(before)
    with pytest.raises(RestoreError, match="no generator was changed"):
        restore_rng(state)
    with pytest.raises(RestoreError, match="no generator was changed"):
        check_rng(state)
    assert draw() == expected


def pointers(state: dict[str, Any]) -> list[int]:
    numpy = [] if state["numpy"] is None else [state["numpy"]["key"]]
    return [tensor.data_ptr() for tensor in (state["python"]["words"], *numpy, state["torch"])]


@pytest.mark.parametrize("held", ["nothing", "tensors", "storages"])
def test_random_states_have_the_memory_of_the_last_save_unless_it_holds_that(held: str) -> None:
    draw()
    memory = KeptMemory()
    first = memory.take(capture_rng())
    before, bytes_before, at = reload(first), repr(first), pointers(first)
    kept: Any = None
    if held == "tensors":
        kept = first
    elif held == "storages":
        kept = [t.untyped_storage() for t in (first["python"]["words"], first["numpy"]["key"], first["torch"])]
    del first
    draw()
    second = memory.take(capture_rng())
    assert repr(second) == repr(capture_rng()) != bytes_before
    if held == "nothing":
        assert pointers(second) == at
    else:
        assert set(pointers(second)).isdisjoint(at)
    if held == "tensors":
        assert repr(kept) == repr(before)


def test_a_save_that_takes_random_states_twice_finds_the_memory_of_both() -> None:
    memory = KeptMemory()

    def taken() -> list[list[int]]:
        states = [memory.take(capture_rng()) for _ in range(2)]
        return list(map(pointers, states))

    first, second = at = taken()
    assert set(first).isdisjoint(second)
    assert taken() == at == taken()


def test_a_save_in_flight_keeps_its_random_states(tmp_path: Path) -> None:
    """Copied before ``save()`` returns, so the next one may write over them."""
    with lazyckpt.Checkpointer(tmp_path, max_in_flight=2) as ckpt:
        ckpt.track(value=torch.zeros(3))
        expected, handles = [], []
        for step in range(4):
            draw()
            expected.append(torch.get_rng_state())
            handles.append(ckpt.save(step))
        concurrent.futures.wait(handles)
        for step, state in enumerate(expected):
            loaded = lazyckpt.load(tmp_path / f"step-{step:08d}")
            assert torch.equal(next(v for k, v in loaded.items() if "rng" in k)["torch"], state)
