"""Reads the elements of saved tensors, a few megabytes at a time."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from functools import lru_cache

import torch

from lazyckpt import _engine
from lazyckpt.conversion.inert import InertStorage, InertTensor
from lazyckpt.errors import CorruptFileError
from lazyckpt.formats.reader import FileReader, Record
from lazyckpt.reading.ranges import ParallelRead, process_engine
from lazyckpt.reading.sharded.slices import Slice, read_slices, slice_of
from lazyckpt.stores.store import AnyPath

_PIECE_BYTES = 4 << 20  # read at once; computing in float64 takes several times as much
_NUMPY_DTYPES = {"f2": "float16", "f4": "float32", "f8": "float64", "b1": "bool", "u1": "uint8"} | {
    f"i{n}": f"int{8 * n}" for n in (1, 2, 4, 8)
}


def dtype_of(tensor: InertTensor) -> torch.dtype | None:
    """Returns None if torch has no such dtype, as for most kinds of NumPy arrays."""
    dtype = getattr(torch, _NUMPY_DTYPES.get(tensor.dtype, tensor.dtype), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def numbers(raw: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor | None:
    """Returns the elements in float64, complex ones as pairs; None if torch cannot convert them."""
    if dtype is None:
        return None
    try:
        values = raw if dtype is torch.bool else raw.view(dtype)
        if values.is_complex():
            values = torch.view_as_real(values)
        return (values.to(torch.float32) if dtype.itemsize == 1 else values).to(torch.float64)
    except (RuntimeError, NotImplementedError):
        return None


def pieces(tensor: InertTensor, other: InertTensor) -> Iterator[torch.Tensor]:
    """Yields the elements of a tensor as bytes, in the same order as those of ``other``."""
    assert tensor.storage is not None
    dtype = dtype_of(tensor)
    itemsize = 1 if dtype is None else dtype.itemsize
    numel = math.prod(tensor.shape)
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True)) if numel else 0
    record = tensor.storage.record
    if dtype is None:  # compare all bytes of such a NumPy array
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


def read_sharded(storage: InertStorage) -> torch.Tensor:
    """Returns a tensor of a sharded checkpoint as one. Raises CorruptFileError that names it if a checksum does not
    match."""
    assert storage.shards is not None and storage.dtype is not None
    whole = torch.empty(storage.shards.shape, dtype=getattr(torch, storage.dtype.name))
    by_file: dict[AnyPath, list[Slice]] = {}
    for file, place, offsets, shape in storage.shards.parts:
        target = slice_of(whole, offsets, shape)
        by_file.setdefault(file, []).append(Slice(f"offsets {offsets}", place, (0,) * len(shape), target))
    try:
        for path, parts in by_file.items():
            with FileReader(path) as reader:
                read_slices(reader, parts, process_engine())
    except CorruptFileError as error:
        raise CorruptFileError(f"{storage.record.name}: {error.what}", path=error.path) from error
    return whole


def _steps(tensor: InertTensor) -> list[int]:
    return [step for n, step in zip(tensor.shape, tensor.stride, strict=True) if n != 1]


def _read(tensor: InertTensor, begin: int, nbytes: int, at_once: int) -> Iterator[torch.Tensor]:
    """Yields bytes of a tensor's storage; compares the checksum of all of it, of a part first."""
    assert tensor.storage is not None
    record = tensor.storage.record
    if tensor.storage.shards is not None and nbytes:  # whole, since its parts may lie in any order
        whole = read_sharded(tensor.storage).view(-1).view(torch.uint8)
        yield from whole[begin : begin + nbytes].split(at_once)
        return
    crc = 0
    with FileReader(tensor.storage.file) as file:
        if 0 < nbytes < record.nbytes:
            _check(tensor.storage.file, file.stamp, record)
        for at in range(begin, begin + nbytes, at_once):
            data = file.read(record.offset + at, min(at_once, begin + nbytes - at))
            crc = _engine.crc32(data, crc)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of read-only bytes, to which nothing writes
                piece = torch.frombuffer(data, dtype=torch.uint8)
            yield piece
    if nbytes == record.nbytes and record.crc32 not in (None, crc):
        raise CorruptFileError(f"record {record.name}: checksum does not match", path=tensor.storage.file)


@lru_cache(maxsize=1024)  # many tensors may view one storage
def _check(file: AnyPath, stamp: object, record: Record) -> None:
    """Raises CorruptFileError unless the record has its checksum."""
    ParallelRead(file, [record], process_engine()).read_into([0])
