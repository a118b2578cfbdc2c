"""The types that load and restore allow beyond torch's list, and the ones that they refuse."""

from __future__ import annotations

import collections
import datetime
import pickle
import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt.errors import UnsupportedFormatError
from lazyckpt.formats import safe_globals

ZONE = datetime.timezone(datetime.timedelta(hours=2), "X")
READABLE: dict[str, Any] = {
    "float64": np.float64(1.5),
    "float16": np.float16(2),
    "int64": np.int64(-3),
    "bool": np.bool_(True),
    "complex64": np.complex64(1j),
    "text": np.str_("añb"),
    "no text": np.str_(""),
    "bytes_": np.bytes_(b"ab"),
    "array": np.arange(6).reshape(2, 3),
    "array in columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "array of other byte order": np.arange(3, dtype=">f4"),
    "empty array": np.zeros((0, 3)),
    "array without dimensions": np.array(3.0),
    "array of text": np.array(["a", "bcd"]),
    "array of bytes": np.array([b"x", b"yz"]),
    "large array": np.arange(20_000.0).reshape(100, 200),
    "large array in columns": np.asfortranarray(np.arange(20_000.0).reshape(100, 200)),
    "large array of text": np.array(["abc"] * 20_000),
    "dtype": np.dtype("f4"),
    "path": Path("a/b"),
    "pure path": PurePosixPath("/x"),
    "datetime": datetime.datetime(2020, 2, 29, 1, 2, 3, 4),
    "datetime of a zone": datetime.datetime(2020, 1, 1, fold=1, tzinfo=ZONE),
    "date": datetime.date(9999, 12, 31),
    "time": datetime.time(23, 59, 59, 999_999, fold=1),
    "time of a zone": datetime.time(1, tzinfo=datetime.timezone.utc),
    "timedelta": datetime.timedelta(-1, 2, 3),
    "no bytes": b"",
    "frozenset": frozenset([1, ("a", 2)]),
    "no frozenset": frozenset(),
    "counter": collections.Counter("aab"),
}


def same(found: Any, expected: Any) -> bool:
    if type(found) is not type(expected):
        return False
    if not isinstance(expected, np.ndarray):
        return bool(found == expected)
    return (
        found.dtype == expected.dtype.newbyteorder("=")
        and found.shape == expected.shape
        and found.flags.f_contiguous == expected.flags.f_contiguous
        and found.flags.writeable
        and np.array_equal(found, expected)
    )


@pytest.mark.parametrize("name", READABLE)
def test_it_is_loaded_and_restored(name: str, tmp_path: Path) -> None:
    obj = READABLE[name]
    torch.save({"x": obj}, tmp_path / "theirs.pt")
    lazyckpt.save({"x": obj}, tmp_path / "ours.pt")
    for file in ("theirs.pt", "ours.pt"):
        assert same(lazyckpt.load(tmp_path / file, weights_only=True)["x"], obj)
        assert same(torch.load(tmp_path / file, weights_only=False)["x"], obj)
    with lazyckpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.track(x={"x": obj})
        ckpt.save(1).result()
    target: dict[str, Any] = {}
    with lazyckpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.track(x=target)
        assert ckpt.restore() == 1
    assert same(target["x"], obj)


REFUSED: dict[str, Callable[[], Any]] = {
    "objects": lambda: np.array([None]),
    "fields": lambda: np.zeros(2, [("a", "f4")]),
    "large, of fields": lambda: np.zeros(20_000, [("a", "f4")]),
    "time of NumPy": lambda: np.datetime64("2020-01-01"),
    "bytes of NumPy": lambda: np.void(b"ab"),
    "defaultdict": lambda: collections.defaultdict(int, a=1),
    "a class": lambda: float,
    "a function": lambda: len,
    "range": lambda: range(3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str, tmp_path: Path) -> None:
    torch.save({"x": REFUSED[name]()}, tmp_path / "a.pt")
    with pytest.raises(UnsupportedFormatError, match="add_safe_globals"):
        lazyckpt.load(tmp_path / "a.pt", weights_only=True)


def test_what_the_user_allows_is_not_restricted(tmp_path: Path) -> None:
    objects = np.array([1, None, "x"], dtype=object)
    torch.save({"x": objects}, tmp_path / "a.pt")
    reconstruct = objects.__reduce__()[0]
    with torch.serialization.safe_globals([reconstruct, np.ndarray, np.dtype, type(objects.dtype)]):
        assert lazyckpt.load(tmp_path / "a.pt", weights_only=True)["x"].tolist() == [1, None, "x"]
    with pytest.raises(UnsupportedFormatError):
        lazyckpt.load(tmp_path / "a.pt", weights_only=True)


def test_the_list_of_other_threads_is_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"x": np.float64(1)}, tmp_path / "a.pt")
    meanwhile: list[BaseException] = []
    before = torch.serialization.get_safe_globals()  # torch allows some itself
    real = safe_globals.allows_call

    def load_elsewhere() -> None:
        try:
            torch.load(tmp_path / "a.pt", weights_only=True)
        except pickle.UnpicklingError as error:
            meanwhile.append(error)

    def allows_call(*args: Any, **kwargs: Any) -> bool:
        thread = threading.Thread(target=load_elsewhere)
        thread.start()
        thread.join()
        return real(*args, **kwargs)

    monkeypatch.setattr("lazyckpt.formats.pickle_guard.allows_call", allows_call)
    assert lazyckpt.load(tmp_path / "a.pt", weights_only=True)["x"] == 1
    assert len(meanwhile) > 0 and torch.serialization.get_safe_globals() == before


def test_places_in_the_memo_that_look_like_opcodes(tmp_path: Path) -> None:
    """Regression: load refused some checkpoints, depending on how many objects preceded a tensor with an attribute."""
    noted = torch.ones(3)
    noted.note = "x"  # type: ignore[attr-defined]
    objects = [noted, np.dtype("f4"), np.arange(3), bytearray(b"ab"), {(1, (2, 3))}]
    for count in range(130):
        torch.save({"x": [f"s{number}" for number in range(count)], "y": objects}, tmp_path / "a.pt")
        lazyckpt.load(tmp_path / "a.pt", weights_only=True)


def test_a_number_of_numpy_does_not_cost_the_place_to_land(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """restore() still reads the tensors beside it straight into the live ones."""
    model = torch.nn.Linear(100, 100)
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model, run={"best": np.float64(0.5), "from": Path("a"), "names": frozenset("ab"), "raw": b""})
        ckpt.save(1).result()
        landed: list[int] = []
        real = lazyckpt.reading.restore._choose
        monkeypatch.setattr(
            "lazyckpt.reading.restore._choose", lambda *args: (found := real(*args), landed.append(len(found[0])))[0]
        )
        assert ckpt.restore() == 1
    assert landed == [2]
