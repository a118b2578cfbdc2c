"""The safetensors file: 8 bytes of length, a JSON header, the tensors' bytes without gaps.

The format has no place for checksums, so they go into the header's ``__metadata__`` (strings only), first of
all keys:

    "lazyckpt.crc32": "<header> <tensor> <tensor> …"      CRC-32s, 8 hex digits each, tensors by name

``<header>`` covers everything in front of the tensors' bytes but this value. The header's length is known
before any checksum is, so the data can be written first and the header last. It is padded with spaces to a
multiple of 4096 bytes, eight spaces at least. The safetensors library pads by seven at most.
So if it loads a file and saves changed tensors with the old metadata, the header is visibly not ours, and
lazyckpt ignores the stale checksums.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lazyckpt.errors import ConfigError, UnsupportedFormatError
from lazyckpt.formats.dtypes import DTYPES, Dtype
from lazyckpt.formats.program import PAGE_BYTES, Extent, ExtentBuilder
from lazyckpt.formats.reader import FileReader, Record, count_elements, unique_keys

if TYPE_CHECKING:
    import torch

_MAX_HEADER_BYTES = 100_000_000  # the safetensors crate refuses more
_MAX_DIMENSION = 2**63 - 1
_LENGTH_BYTES = 8
_CHECKSUMS = "lazyckpt.crc32"
_VALUE_PREFIX = b'{"__metadata__":{"%s":"' % _CHECKSUMS.encode()
_OUR_PADDING = b" " * 8

# The crate's Dtype, less what torch lacks (F6_*).
_TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32",
    "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}  # fmt: skip
_KINDS = {f"torch.{name}": kind for kind, name in _TORCH_NAMES.items()}
_PACKED = "F4"  # two to the byte: the header counts values, torch's shape counts bytes


class Layout:
    """Where everything of one file lies: a pure function of the arguments, so cache it.

    Tensor i is source i of the program; the tensors' bytes follow one another in the order given. Run
    ``data`` first, then ``header``, which holds the checksums. ``header_bytes`` is where the data begins.

    Raises ConfigError for a dtype that safetensors lacks; ValueError if a tensor's offset is not a multiple
    of its element size (order them by element size, largest first), or a name is used twice or reserved.
    """

    def __init__(
        self,
        names: Sequence[str],
        dtypes: Sequence[torch.dtype],
        shapes: Sequence[tuple[int, ...]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        data = ExtentBuilder()
        tensors: dict[str, dict[str, Any]] = {}
        end = 0
        for index, (name, dtype, shape) in enumerate(zip(names, dtypes, shapes, strict=True)):
            if name in tensors or name == "__metadata__":
                raise ValueError(f"tensor name {name!r} is reserved or used twice")
            kind, told_shape = _to_header(name, dtype, shape)
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            if begin % dtype.itemsize:
                raise ValueError(f"tensor {name!r} ({dtype}) would begin at {begin}: order by element size")
            tensors[name] = {"dtype": kind, "shape": told_shape, "data_offsets": [begin, end]}
            if end > begin:
                data.source(index, end - begin)

        user = {key: value for key, value in (metadata or {}).items() if key != _CHECKSUMS}
        if not all(isinstance(text, str) for item in user.items() for text in item):
            raise ValueError("safetensors metadata must map strings to strings")
        # behind the checksums' closing quote: the rest of __metadata__, then the tensors
        behind = b'"' + _members(user) + b"}" + _members(tensors) + b"}" + _OUR_PADDING
        value_bytes = 9 * len(tensors) + 8
        used = _LENGTH_BYTES + len(_VALUE_PREFIX) + value_bytes + len(behind)
        self.header_bytes = -(-used // PAGE_BYTES) * PAGE_BYTES
        if self.header_bytes - _LENGTH_BYTES > _MAX_HEADER_BYTES:
            raise ConfigError(f"a safetensors header of {self.header_bytes} bytes; readers refuse that")
        behind += b" " * (self.header_bytes - used)
        front = (self.header_bytes - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little") + _VALUE_PREFIX

        header = ExtentBuilder()
        header.literal(front + b"%08x" % zlib.crc32(behind, zlib.crc32(front)))
        for index in sorted(range(len(names)), key=names.__getitem__):
            begin, end = tensors[names[index]]["data_offsets"]
            if end > begin:
                header.literal(b" ")
                header.crc32_hex(index)
            else:
                header.literal(b" 00000000")
        header.literal(behind)
        self.data: Extent = data.build(self.header_bytes)
        self.header: Extent = header.build(0)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file: ``shape`` as torch has it, ``record`` its bytes."""

    dtype: Dtype
    shape: tuple[int, ...]
    record: Record


@dataclass(frozen=True)
class Header:
    """``tensors`` by name, in file order; ``metadata`` without lazyckpt's checksums."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_header(path: str | os.PathLike[str]) -> Header:
    """Opens the file ``path`` and returns its header; see ``header_of``. Raises LoadError if it cannot."""
    with FileReader(path) as file:
        return header_of(file)


def header_of(file: FileReader) -> Header:
    """Reads and checks the header: the tensors must cover the rest of the file exactly.

    Raises CorruptFileError if it is damaged or no safetensors file, UnsupportedFormatError for a dtype that
    torch lacks, LoadError if the file cannot be read.
    """
    front = file.read(0, _LENGTH_BYTES)
    nbytes = int.from_bytes(front, "little")
    data_offset = _LENGTH_BYTES + nbytes
    if nbytes > _MAX_HEADER_BYTES or data_offset > file.size:
        raise file.corrupt(f"no safetensors file, or truncated: a header of {nbytes} bytes")
    raw = file.read(_LENGTH_BYTES, nbytes)
    try:
        if not raw.startswith(b"{"):
            raise ValueError("does not begin with {")
        tree: dict[str, Any] = json.loads(raw.decode(), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise file.corrupt(f"safetensors header: {error}") from error
    metadata = tree.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise file.corrupt("safetensors header: __metadata__ must map strings to strings")
    try:
        "".join((*tree, *metadata, *metadata.values())).encode()
    except UnicodeEncodeError as error:  # an escaped half of a character: no text, and refused by the library
        raise file.corrupt("safetensors header: a name is not Unicode") from error
    checksums = _checksums(file, front + raw, metadata, tree)
    found = [_tensor(file, name, told, data_offset, checksums.get(name)) for name, told in tree.items()]
    found.sort(key=lambda info: (info.record.offset, info.record.nbytes))
    end = data_offset
    for info in found:
        if info.record.offset != end:
            raise file.corrupt(f"tensor {info.record.name!r}: a gap or an overlap at offset {end}")
        end += info.record.nbytes
    if end != file.size:
        how = "truncated: " if end > file.size else ""
        raise file.corrupt(f"{how}tensors end at {end}, the file at {file.size}")
    return Header({info.record.name: info for info in found}, metadata)


def _to_header(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    kind = _KINDS.get(str(dtype))
    if kind is None or (kind == _PACKED and not shape):
        raise ConfigError(f"tensor {name!r}: safetensors cannot hold {dtype} with shape {tuple(shape)}")
    if kind == _PACKED:
        return kind, [*shape[:-1], 2 * shape[-1]]
    return kind, list(shape)


def _members(tree: Mapping[str, Any]) -> bytes:
    """The members of a JSON object, each led by a comma."""
    text = json.dumps(tree, ensure_ascii=False, separators=(",", ":"))
    return ("," + text[1:-1]).encode() if tree else b""


def _checksums(file: FileReader, header: bytes, metadata: dict[str, str], names: Iterable[str]) -> dict[str, int]:
    """Takes the checksums out of ``metadata``: CRC-32 by name, empty if the header is not lazyckpt's."""
    ordered = sorted(names)
    key, value = next(iter(metadata.items()), ("", ""))
    metadata.pop(_CHECKSUMS, None)
    if len(header) % PAGE_BYTES or not header.endswith(_OUR_PADDING):
        return {}
    # by the key or by the value: damage to one of them must not pass for a file without checksums
    well_formed = re.fullmatch(rf"[0-9a-f]{{8}}( [0-9a-f]{{8}}){{{len(ordered)}}}", value)
    if not well_formed and key != _CHECKSUMS:
        return {}
    begin = _LENGTH_BYTES + len(_VALUE_PREFIX)
    rest = zlib.crc32(header[begin + len(value) :], zlib.crc32(header[:begin]))
    values = [int(digits, 16) for digits in value.split()] if well_formed else []
    if not values or values[0] != rest:
        raise file.corrupt("safetensors header: its checksum is wrong")
    return dict(zip(ordered, values[1:], strict=True))


def _tensor(file: FileReader, name: str, told: Any, data_offset: int, crc32: int | None) -> TensorInfo:
    where = f"safetensors header, tensor {name!r}"
    if not isinstance(told, dict) or told.keys() != {"dtype", "shape", "data_offsets"}:
        raise file.corrupt(f"{where}: must have dtype, shape and data_offsets")
    kind, shape, offsets = told["dtype"], told["shape"], told["data_offsets"]
    if not isinstance(kind, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise file.corrupt(f"{where}: dtype, shape or data_offsets is malformed")
    if kind not in _TORCH_NAMES:
        raise UnsupportedFormatError(f"{where}: this torch has no dtype for {kind!r}", path=file.path)
    if kind == _PACKED:
        if not shape or shape[-1] % 2:
            raise file.corrupt(f"{where}: {kind} needs an even last dimension")
        shape = [*shape[:-1], shape[-1] // 2]
    dtype = DTYPES[_TORCH_NAMES[kind]]
    begin, end = offsets
    try:
        nbytes = count_elements([*shape, dtype.itemsize])
    except ValueError as error:
        raise file.corrupt(f"{where}: {error}") from error
    if nbytes != end - begin:
        raise file.corrupt(f"{where}: {end - begin} bytes for shape {tuple(shape)} of {dtype}")
    return TensorInfo(dtype, tuple(shape), Record(name, data_offset + begin, end - begin, crc32))


def _are_sizes(value: Any) -> bool:
    # type(), because True is an int
    return type(value) is list and all(type(n) is int and 0 <= n <= _MAX_DIMENSION for n in value)
