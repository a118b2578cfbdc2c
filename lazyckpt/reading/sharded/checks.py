"""Checks that the ``.metadata`` of a folder describes tensors and items that are possible: it may be hostile.

After the checks every element of every tensor lies in exactly one item, no item reaches into another one, and no
tensor is larger than its items. So a reader never allocates more memory than the files take on the disk.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from lazyckpt.formats.reader import count_elements

_MAX_DIMENSIONS = 64  # torch's limit
_MAX_OFFSET = 2**63 - 1

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes of a part of a tensor
Place = tuple[str, int, int]  # file, offset and length of an item


def check_places(places: dict[Place, str]) -> None:
    """Raises ValueError if two items share bytes of a file. ``places``: that of each, and a name.

    Several names may have one and the same item: their tensors were one."""
    by_file: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for (file, offset, nbytes), name in places.items():
        if offset < 0 or nbytes < 0 or offset + nbytes > _MAX_OFFSET:
            raise ValueError(f"item {name}: {nbytes} bytes at offset {offset} of {file}")
        by_file[file].append((offset, nbytes, name))
    for file, found in by_file.items():
        for (offset, nbytes, name), (following, _, other) in pairwise(sorted(found)):
            if offset + nbytes > following:
                raise ValueError(f"items {name} and {other} overlap in {file}")


def check_tensor(described: Any, items: dict[tuple[int, ...] | None, Place], forms: dict[Place, Any]) -> None:
    """Raises ValueError unless the chunks of a tensor are the whole, each in an item of its own that can hold it.

    ``items``: the places of its items, by the offsets of the chunk in each. ``forms``: the shapes that other tensors
    gave their items; this one adds to it."""
    facts = vars(described)
    size, chunks = facts.get("size"), facts.get("chunks")
    properties = vars(facts.get("properties"))
    dtype, layout = properties.get("dtype"), properties.get("layout", torch.strided)
    if not isinstance(dtype, torch.dtype) or type(chunks) is not list:
        raise ValueError("a tensor without a dtype or chunks")
    total = count_elements(_numbers(size))
    boxes: list[Box] = []
    used: set[Place] = set()
    for chunk in chunks:
        told = vars(chunk)
        offsets, sizes = _numbers(told.get("offsets")), _numbers(told.get("sizes"))
        if not len(offsets) == len(sizes) == len(size):
            raise ValueError(f"a part {sizes} at {offsets} of a tensor of {tuple(size)}")
        if not math.prod(sizes):
            continue  # ranks without a part of a small tensor
        if any(at + n > whole for at, n, whole in zip(offsets, sizes, size, strict=True)):
            raise ValueError(f"a part {sizes} at {offsets} of a tensor of {tuple(size)}")
        if (place := items.get(offsets)) is None:
            raise ValueError(f"the part {sizes} at {offsets} is in no file")
        if layout is torch.strided and place[2] < math.prod(sizes) * dtype.itemsize:
            raise ValueError(f"the part {sizes} of {dtype} at {offsets} cannot be in an item of {place[2]} bytes")
        if place in used or forms.setdefault(place, (dtype, sizes)) != (dtype, sizes):
            raise ValueError(f"the part {sizes} at {offsets} is in the item of another part")
        used.add(place)
        boxes.append((offsets, sizes))
    if (missing := total - sum(math.prod(sizes) for _, sizes in boxes)) > 0:
        raise ValueError(f"{missing} elements of it are in no file")
    if (found := _overlap(boxes)) is not None:
        raise ValueError(f"its parts at {found[0][0]} and {found[1][0]} overlap")


def _numbers(value: Any) -> tuple[int, ...]:
    """Raises ValueError unless these are the sizes or offsets of a tensor."""
    if not isinstance(value, tuple) or len(value) > _MAX_DIMENSIONS:
        raise ValueError("sizes or offsets that are none")
    if not all(type(n) is int and 0 <= n <= _MAX_OFFSET for n in value):
        raise ValueError(f"sizes or offsets of {value}")
    return tuple(value)


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, if there are any. Sweeps along the dimension that most boxes are cut in, and
    compares each only with those that are open there: not all pairs, of which a thousand ranks make half a million."""
    if len(boxes) < 2:
        return None
    dimensions = range(len(boxes[0][0]))
    along = max(dimensions, key=lambda dimension: len({offsets[dimension] for offsets, _ in boxes}), default=None)
    if along is None:
        return boxes[0], boxes[1]  # two numbers
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[0][along]):
        begin = box[0][along]
        open_boxes = [other for other in open_boxes if other[0][along] + other[1][along] > begin]
        for other in open_boxes:
            if all(_meet(box, other, dimension) for dimension in dimensions):
                return other, box
        open_boxes.append(box)
    return None


def _meet(one: Box, other: Box, dimension: int) -> bool:
    begin, end = one[0][dimension], one[0][dimension] + one[1][dimension]
    return begin < other[0][dimension] + other[1][dimension] and other[0][dimension] < end
