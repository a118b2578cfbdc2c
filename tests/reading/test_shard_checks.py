"""What ``.metadata`` may say of tensors and items: any cut into parts, and no other."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from lazyckpt.reading.sharded.checks import _overlap, check_places, check_tensor

Box = tuple[tuple[int, ...], tuple[int, ...]]


def check(size: tuple[int, ...], boxes: list[Box], *, nbytes: int | None = None) -> None:
    """Checks a float32 tensor with these parts, each in an item that is large enough."""
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    items: dict[Any, Any] = {}
    for number, (offsets, sizes) in enumerate(boxes):
        items.setdefault(offsets, ("file", number << 40, torch.Size(sizes).numel() * 4 if nbytes is None else nbytes))
    check_tensor(TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(size), chunks), items, {})


def cuts(size: int, draw: st.DrawFn) -> list[tuple[int, int]]:
    """Begin and length of the pieces of a dimension."""
    points = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
    return [(begin, end - begin) for begin, end in itertools.pairwise(points)] or [(0, 0)]


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    size = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    pieces = itertools.product(*(cuts(n, draw) for n in size))
    return size, [(tuple(begin for begin, _ in p), tuple(length for _, length in p)) for p in pieces]


@given(grids(), st.randoms(use_true_random=False))
def test_any_grid_is_accepted_in_any_order(grid: tuple[tuple[int, ...], list[Box]], order: random.Random) -> None:
    size, boxes = grid
    order.shuffle(boxes)
    check(size, boxes)
    check(size, [*boxes, (size, (0,) * len(size))] if size else boxes)  # a rank without a part


@given(grids(), st.data())
def test_a_part_that_is_missing_moved_or_there_twice_is_refused(
    grid: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    size, boxes = grid
    number = data.draw(st.integers(0, len(boxes) - 1))
    offsets, sizes = boxes[number]
    rest = boxes[:number] + boxes[number + 1 :]
    with pytest.raises(ValueError, match="elements of it are in no file"):
        check(size, rest)
    with pytest.raises(ValueError, match=r"overlap|item of another"):
        check(size, [*boxes, boxes[number]])
    for dimension in range(len(size)):
        for step in (-1, 1):
            moved = tuple(at + step * (d == dimension) for d, at in enumerate(offsets))
            with pytest.raises(ValueError, match=r"overlap|of a tensor|offsets of|item of another|cannot be in"):
                check(size, [*rest, (moved, sizes)])


def test_an_item_holds_as_many_bytes_as_its_part() -> None:
    check((2, 2), [((0, 0), (2, 2))], nbytes=16)
    with pytest.raises(ValueError, match=r"cannot be in an item of 15 bytes"):
        check((2, 2), [((0, 0), (2, 2))], nbytes=15)


def test_one_item_is_one_part_whatever_the_tensor() -> None:
    def described(*sizes: int, dtype: torch.dtype = torch.float32) -> TensorStorageMetadata:
        chunk = ChunkStorageMetadata(torch.Size([0] * len(sizes)), torch.Size(sizes))
        return TensorStorageMetadata(TensorProperties(dtype), torch.Size(sizes), [chunk])

    forms: dict[Any, Any] = {}
    place = ("file", 0, 4096)
    for _ in range(2):  # tied tensors
        check_tensor(described(4), {(0,): place}, forms)
    for other in (described(3), described(4, dtype=torch.int32)):
        with pytest.raises(ValueError, match="item of another part"):
            check_tensor(other, {(0,): place}, forms)


@pytest.mark.parametrize(
    ("places", "told"),
    [
        ([("a", 0, 10), ("a", 9, 1)], "items 0 and 1 overlap in a"),
        ([("a", 100, 1), ("a", 50, 60)], "items 1 and 0 overlap in a"),
        ([("a", -1, 1)], "item 0: 1 bytes at offset -1"),
        ([("a", 0, -1)], "item 0: -1 bytes"),
        ([("a", 1 << 62, 1 << 62)], "item 0: "),
    ],
)
def test_items_that_share_bytes_are_refused(places: list[tuple[str, int, int]], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_places({place: str(number) for number, place in enumerate(places)})
    check_places({("a", 0, 10): "0", ("a", 10, 10): "1", ("b", 5, 10): "2", ("a", 30, 0): "3"})


def test_thousands_of_parts_are_not_compared_in_all_pairs() -> None:
    """Ranks in two dimensions: all pairs would be two million."""
    boxes = [((i * 2, j * 3), (2, 3)) for i in range(32) for j in range(64)]
    seen = 0

    class Counted(int):
        def __lt__(self, other: int) -> bool:
            nonlocal seen
            seen += 1
            return int(self) < other

    check((64, 192), boxes)
    assert _overlap([((Counted(a), Counted(b)), (c, d)) for (a, b), (c, d) in boxes]) is None
    assert seen < 300_000
