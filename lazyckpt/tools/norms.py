"""By how much two saved tensors differ, read a few megabytes at a time whatever their size."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from lazyckpt import _engine
from lazyckpt.errors import CorruptFileError
from lazyckpt.formats.reader import FileReader
from lazyckpt.reading.skeleton import Tensor

_PIECE_BYTES = 4 << 20  # read of either file at once; compared in float64, which takes some times as much
_NUMPY_DTYPES = {"f2": "float16", "f4": "float32", "f8": "float64", "b1": "bool", "u1": "uint8"} | {
    f"i{n}": f"int{8 * n}" for n in (1, 2, 4, 8)
}


@dataclass
class Norms:
    """Of the elements of a tensor, or of all tensors of a module that differ."""

    elements: int = 0
    differing: int = 0
    squares: float = 0.0  # of the differences
    squares_a: float = 0.0
    max_abs: float = 0.0
    comparable: bool = True  # False: not as numbers, in some of it

    def add(self, other: Norms) -> None:
        self.elements += other.elements
        self.differing += other.differing
        self.squares += other.squares
        self.squares_a += other.squares_a
        # max() would drop a NaN
        self.max_abs = math.nan if math.isnan(self.max_abs + other.max_abs) else max(self.max_abs, other.max_abs)
        self.comparable = self.comparable and other.comparable

    @property
    def relative(self) -> float:
        """|B - A| / |A|"""
        if self.squares == 0:
            return 0.0
        return math.sqrt(self.squares / self.squares_a) if self.squares_a else math.inf


def compare(a: Tensor, b: Tensor, advance: Callable[[int], None]) -> Norms:
    """Raises CorruptFileError if a checksum shows that what was read is not what was written."""
    norms = Norms()
    if a.storage is None or b.storage is None:  # on the meta device
        return norms
    dtype = _dtype_of(a)
    itemsize = 1 if dtype is None else dtype.itemsize
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that bytes are read-only: nothing writes to them
        for ours, theirs in zip(_pieces(a, b), _pieces(b, a), strict=True):
            _compare_pieces(ours, theirs, dtype, itemsize, norms)
            advance(len(ours))
    return norms


def _compare_pieces(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None, itemsize: int, norms: Norms) -> None:
    numbers = _numbers(a, dtype), _numbers(b, dtype)
    norms.elements += len(a) // itemsize
    if numbers[0] is not None:
        norms.squares_a += float(numbers[0].square().sum())
    if torch.equal(a, b):
        return
    differ = (a.view(-1, itemsize) != b.view(-1, itemsize)).any(dim=1)
    norms.differing += int(differ.sum())
    if numbers[0] is None or numbers[1] is None:
        norms.comparable = False
        return
    # Only those whose bits differ: inf - inf is no difference.
    distance = (numbers[1].view(len(differ), -1) - numbers[0].view(len(differ), -1))[differ]
    norms.squares += float(distance.square().sum())
    largest = float(distance.square().sum(dim=1).sqrt().max())
    norms.max_abs = math.nan if math.isnan(norms.max_abs + largest) else max(norms.max_abs, largest)


def _dtype_of(tensor: Tensor) -> torch.dtype | None:
    """None: torch has none, as for most kinds of NumPy arrays."""
    dtype = getattr(torch, _NUMPY_DTYPES.get(tensor.dtype, tensor.dtype), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _numbers(raw: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor | None:
    """The elements in float64, complex ones as pairs; None if they are no numbers that torch converts."""
    if dtype is None:
        return None
    try:
        values = raw if dtype is torch.bool else raw.view(dtype)
        if values.is_complex():
            values = torch.view_as_real(values)
        return (values.to(torch.float32) if dtype.itemsize == 1 else values).to(torch.float64)
    except (RuntimeError, NotImplementedError):
        return None


def _pieces(tensor: Tensor, other: Tensor) -> Iterator[torch.Tensor]:
    """The elements of a tensor as bytes, in the same order as those of ``other``."""
    assert tensor.storage is not None
    dtype = _dtype_of(tensor)
    itemsize = 1 if dtype is None else dtype.itemsize
    numel = math.prod(tensor.shape)
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True)) if numel else 0
    record = tensor.storage.record
    if dtype is None:  # a NumPy array of another kind: all of its memory
        numel = span = record.nbytes
    begin, nbytes = tensor.offset * itemsize, span * itemsize
    if begin + nbytes > record.nbytes:
        raise CorruptFileError(f"record {record.name}: too short for a tensor that views it", path=tensor.storage.file)
    if dtype is None or (span == numel and (numel == 0 or _steps(tensor) == _steps(other))):
        yield from _read(tensor, begin, nbytes, _PIECE_BYTES)
        return
    (memory,) = _read(tensor, begin, nbytes, nbytes)
    whole = memory.view(dtype).as_strided(tensor.shape, tensor.stride).contiguous().view(-1).view(torch.uint8)
    yield from whole.split(_PIECE_BYTES)


def _steps(tensor: Tensor) -> list[int]:
    return [step for n, step in zip(tensor.shape, tensor.stride, strict=True) if n != 1]


def _read(tensor: Tensor, begin: int, nbytes: int, at_once: int) -> Iterator[torch.Tensor]:
    """Bytes of the storage of a tensor; compares the checksum, if it is all of them."""
    assert tensor.storage is not None
    record = tensor.storage.record
    crc = 0
    with FileReader(tensor.storage.file) as file:
        for at in range(begin, begin + nbytes, at_once):
            data = file.read(record.offset + at, min(at_once, begin + nbytes - at))
            crc = _engine.crc32(data, crc)
            yield torch.frombuffer(data, dtype=torch.uint8)
    if nbytes == record.nbytes and record.crc32 not in (None, crc):
        raise CorruptFileError(f"record {record.name}: checksum does not match", path=tensor.storage.file)
