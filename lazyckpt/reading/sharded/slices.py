"""Reads slices of saved tensors out of ``.distcp`` files, straight into live tensors, in parallel.

Of each tensor it takes only the bytes between the first and the last requested element: for a shard along the
first dimension, that is the shard. They land in the target if they have its form; otherwise they are copied there.
Every byte is checked: it reads whole segments (segments.py). It also reads the files of plain
torch.distributed.checkpoint.

A part that is a whole item is read at once, in the expectation that lazyckpt wrote it: then all bytes around its tensor
are known but the checksum (``distcp.Frame``). If one byte differs, the item is read again, step by step.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from lazyckpt import _engine, devices
from lazyckpt.collector import collector_paused
from lazyckpt.errors import CorruptFileError
from lazyckpt.formats.distcp import STORAGE_KEY, Frame, Place, frame_of, item_directory
from lazyckpt.formats.plain_pickle import NotPlain, read_plain
from lazyckpt.formats.reader import FileReader, Record
from lazyckpt.providers.plain_tensors import PLAIN_DTYPES, tensor_pickle
from lazyckpt.reading.archive import check_small_records
from lazyckpt.reading.ranges import ParallelRead
from lazyckpt.reading.sharded.segments import Segments, Span, read_spans
from lazyckpt.reading.unpickle import load_errors

_MAX_ASIDE_BYTES = 256 << 20  # memory for bytes that do not land in their target at once
_FRAMES_AT_ONCE = 4096  # a few KiB each
_END_BYTES = 4096  # of an item: headers, the pickle, the directory, and the table of segments behind it
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_ZIP = b"PK\3\4"


class Slice(NamedTuple):
    """A slice of a saved tensor, and where it goes."""

    name: str  # of the tensor, for messages
    place: Place  # of its item in the file
    offsets: tuple[int, ...]  # of the slice in the saved tensor, in elements
    target: torch.Tensor  # of the slice's shape, and of any dtype and device


class _Saved(NamedTuple):
    """How an item holds its tensor: the storage, and the elements of it that the tensor shows."""

    segments: Segments
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Landing(NamedTuple):
    """Bytes of the file, and the memory that they are read into."""

    span: Span
    memory: torch.Tensor  # contiguous
    device: int
    copy_to: torch.Tensor | None  # the tensor that then takes the elements of ``shown``
    shown: torch.Tensor


def read_slices(file: FileReader, slices: Iterable[Slice], engine: _engine.Engine) -> None:
    """Reads slices of the tensors in one ``.distcp`` file. The targets do not overlap.

    Raises CorruptFileError, which names the file and the item, if the file is damaged, hostile or not as they say;
    LoadError if it cannot be read. Targets may hold some of the new bytes then."""
    with torch.no_grad():
        slices = _read_framed(file.path, list(slices), engine)
        saved: dict[Place, _Saved | torch.Tensor] = {}
        slices.sort(key=lambda wanted: wanted.place)
        file.will_need(_ends(file, [wanted.place for wanted in slices]))
        with collector_paused():
            landings = [_land(file, wanted, saved, engine) for wanted in slices]
        for batch in _batches([landing for landing in landings if landing is not None]):
            _read(file.path, batch, engine)


def _read_framed(path: str | os.PathLike[str], slices: list[Slice], engine: _engine.Engine) -> list[Slice]:
    """Reads the slices that are whole items, and as expected. Returns the others, of which some may have been read into
    their targets."""
    framed: list[tuple[Slice, Frame, int]] = []
    others: list[Slice] = []
    with collector_paused():
        for wanted in slices:
            at = devices.target(wanted.target.device, engine)
            frame = _frame_around(wanted) if at != devices.HOST or wanted.target.is_cpu else None
            if frame is None:
                others.append(wanted)
            else:
                framed.append((wanted, frame, at))
    for first in range(0, len(framed), _FRAMES_AT_ONCE):
        others += _read_frames(path, framed[first : first + _FRAMES_AT_ONCE], engine)
    return others


def _ends(file: FileReader, places: Iterable[Place]) -> Iterator[tuple[int, int]]:
    """Where the parsers of these items look: at both ends of each, and behind it."""
    for offset, nbytes in places:
        end = offset + nbytes
        yield offset, min(offset + _END_BYTES, end)
        yield max(offset, end - _END_BYTES), min(end + _END_BYTES, file.size)


def _frame_around(wanted: Slice) -> Frame | None:
    """Returns the bytes that lazyckpt writes around the tensor; None if this is not a whole item."""
    target = wanted.target
    if any(wanted.offsets) or not target.numel() or target.dtype not in PLAIN_DTYPES:
        return None
    if type(target) not in _PLAIN or not target.is_contiguous() or target.is_conj() or target.is_neg():
        return None
    pickled = tensor_pickle(target.dtype, target.shape, target.stride(), target.nbytes, STORAGE_KEY)
    frame = frame_of(target.nbytes, pickled)
    return frame if frame.nbytes == wanted.place.nbytes else None


def _read_frames(
    path: str | os.PathLike[str], framed: list[tuple[Slice, Frame, int]], engine: _engine.Engine
) -> list[Slice]:
    """Returns the slices that are not as expected."""
    aside = bytearray(sum(len(frame.head) + frame.tail_bytes for _, frame, _ in framed))
    address = torch.frombuffer(aside, dtype=torch.uint8).data_ptr()
    records: list[Record] = []
    pointers: list[int] = []
    ordinals: list[int] = []
    for wanted, frame, at in framed:
        offset = wanted.place.offset
        memory = ((len(frame.head), None), (wanted.target.nbytes, wanted.target), (frame.tail_bytes, None))
        for nbytes, target in memory:
            records.append(Record(wanted.name, offset, nbytes, None))
            pointers.append(address if target is None else devices.address(target))
            ordinals.append(devices.HOST if target is None else at)
            offset += nbytes
            address += nbytes if target is None else 0
    try:
        read = ParallelRead(path, records, engine)
        try:
            crcs = read.read_into(pointers, ordinals)
        finally:
            read.close()
    except CorruptFileError:  # too short: the reads one by one say which
        return [wanted for wanted, _, _ in framed]
    others = []
    begin = 0
    for (wanted, frame, _), crc in zip(framed, crcs[1::3], strict=True):
        end = begin + len(frame.head) + frame.tail_bytes
        if aside[begin:end] != frame.head + frame.tail(crc):
            others.append(wanted)
        begin = end
    return others


def slice_of(tensor: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """A view of a slice of a tensor."""
    for dimension, (begin, length) in enumerate(zip(offsets, shape, strict=True)):
        if length != tensor.shape[dimension]:  # sparse tensors can only be taken whole
            tensor = tensor.narrow(dimension, begin, length)
    return tensor


def read_bytes(file: FileReader, place: Place, name: str, *, weights_only: bool) -> bytes:
    """Returns a ready-made item. If it is an archive, verifies every checksum.

    ``weights_only``: raises UnsupportedFormatError unless torch's restricted unpickler reads it. Raises
    CorruptFileError for damage."""
    if place.offset < 0 or place.nbytes < 0:
        raise file.corrupt(f"{name}: an item of {place.nbytes} bytes at offset {place.offset}")
    data = file.read(*place)
    if (pickled := _engine.pickle_in(data)) is not None and (not weights_only or _is_plain(pickled)):
        return data
    verified = data.startswith(_ZIP)
    if verified:
        for record in item_directory(file, place).records.values():
            file.read_record(record)
    if weights_only:
        with load_errors(file.path, weights_only=True, verified=verified):
            torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return data


def _is_plain(pickled: bytes) -> bool:
    """Whether this is a pickle of numbers, texts and the like, which are harmless without an unpickler's check."""
    with contextlib.suppress(NotPlain):
        read_plain(pickled, _no_storage)
        return True
    return False


def _no_storage(_: Any) -> Any:
    raise NotPlain


def _land(
    file: FileReader, wanted: Slice, known: dict[Place, _Saved | torch.Tensor], engine: _engine.Engine
) -> _Landing | None:
    """Where the bytes of this slice go; None if they are there."""
    saved = known.get(wanted.place)
    if saved is None:
        saved = known[wanted.place] = _parse(file, wanted)
    lengths = tuple(wanted.target.shape)
    fits = len(wanted.offsets) == len(lengths) == len(saved.shape)
    if not fits or any(a < 0 or a + n > size for a, n, size in zip(wanted.offsets, lengths, saved.shape, strict=True)):
        raise file.corrupt(f"{wanted.name}: is {tuple(saved.shape)}, without {lengths} at {wanted.offsets}")
    if isinstance(saved, torch.Tensor):
        wanted.target.copy_(slice_of(saved, wanted.offsets, lengths))
        return None
    if not wanted.target.numel():
        return None
    width = saved.dtype.itemsize
    first = saved.offset + sum(a * step for a, step in zip(wanted.offsets, saved.stride, strict=True))
    count = 1 + sum((n - 1) * step for n, step in zip(lengths, saved.stride, strict=True))
    span = saved.segments.around(wanted.name, first * width, count * width)
    target = wanted.target
    at = devices.target(target.device, engine)
    same = target.dtype == saved.dtype and target.is_contiguous() and not target.is_conj() and not target.is_neg()
    if same and in_order(lengths, saved.stride) and (at != devices.HOST or target.is_cpu):
        return _Landing(span, target, at, None, target)
    memory = torch.empty(count, dtype=saved.dtype)
    return _Landing(span, memory, devices.HOST, target, memory.as_strided(lengths, saved.stride))


def in_order(lengths: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements with these strides lie in memory in the order of a contiguous tensor."""
    expected = 1
    for n, step in zip(reversed(lengths), reversed(stride), strict=True):
        if n != 1 and step != expected:
            return False
        expected *= n
    return True


def _parse(file: FileReader, wanted: Slice) -> _Saved | torch.Tensor:
    """Raises CorruptFileError unless the item is exactly one archive of one tensor."""
    try:
        records = item_directory(file, wanted.place).records
        check_small_records(file, records)
        data = file.read_record(records["data.pkl"])
        storages = [record for name, record in records.items() if name.startswith("data/")]
        with contextlib.suppress(NotPlain):
            if len(storages) == 1:
                geometry = _geometry(data, storages[0].name, storages[0].nbytes)
                return _Saved(Segments(file, wanted.place, storages[0]), *geometry)
    except CorruptFileError as error:
        raise CorruptFileError(f"{wanted.name}: {error.what}", path=file.path) from error
    content = read_bytes(file, wanted.place, wanted.name, weights_only=True)  # of a class, sparse, quantized
    with load_errors(file.path, weights_only=True, verified=True):
        loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not isinstance(loaded, torch.Tensor):
        raise file.corrupt(f"{wanted.name}: its item holds no tensor")
    return loaded


@lru_cache(maxsize=4096)
def _geometry(data: bytes, name: str, nbytes: int) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]:
    """The part of its storage that a pickled tensor shows. Raises NotPlain."""

    def load(saved_id: Any) -> torch.storage.TypedStorage:
        _, storage_type, key, _, numel = saved_id
        dtype = torch.uint8 if storage_type is torch.UntypedStorage else storage_type.dtype
        if f"data/{key}" != name or numel * dtype.itemsize != nbytes:
            raise NotPlain
        memory = torch.UntypedStorage(nbytes, device="meta")
        return torch.storage.TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)

    tensor = read_plain(data, load)
    if type(tensor) is not torch.Tensor:
        raise NotPlain
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _batches(landings: list[_Landing]) -> Iterator[list[_Landing]]:
    """Splits a read, so that few bytes wait aside at once."""
    batch: list[_Landing] = []
    aside = 0
    for landing in landings:
        nbytes = landing.memory.nbytes if landing.copy_to is not None else 0
        if batch and nbytes and aside + nbytes > _MAX_ASIDE_BYTES:
            yield batch
            batch, aside = [], 0
        batch.append(landing)
        aside += nbytes
    if batch:
        yield batch


def _read(path: str | os.PathLike[str], landings: list[_Landing], engine: _engine.Engine) -> None:
    pointers = [devices.address(landing.memory) for landing in landings]
    read_spans(path, [landing.span for landing in landings], pointers, [item.device for item in landings], engine)
    for landing in landings:
        if landing.copy_to is not None:
            landing.copy_to.copy_(landing.shown)
