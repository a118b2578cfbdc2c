"""What a ``torch.save`` archive holds, told from its pickle alone: no code of the file runs, no tensor is read.

Loading, even restricted, must allocate tensors, sometimes read them, and refuses types that nobody allowed. To
*show* a file none of that is needed: here every name in the pickle becomes an inert ``Opaque``, which only
remembers what it was given, but for those few that make plain tensors and containers.
"""

from __future__ import annotations

import io
import itertools
import operator
import os
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lazyckpt.errors import CorruptFileError
from lazyckpt.formats.dtypes import DTYPES, Dtype
from lazyckpt.formats.reader import FileReader, Record, count_elements
from lazyckpt.formats.torch_zip_reader import Directory

_MAX_DIMENSIONS = 1000
_MAX_NAMES = 10_000
# Tuples inside a tuple: Python hashes them by recursion in C, which ends the process where it is too deep, and takes
# for ever where the same ones are inside each other again and again.
_MAX_DEPTH = 100
_MAX_TUPLES = 1_000_000
# What is copied by all calls: a pickle may name one long list again and again, for two bytes each time.
_ITEMS, _ITEMS_PER_BYTE = 100_000, 4


@dataclass(frozen=True, eq=False)
class Storage:
    """A record of ``file``; ``dtype`` is None if the pickle leaves that to the tensors."""

    record: Record
    dtype: Dtype | None
    file: Path


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor that is not there. ``offset`` and ``stride`` count elements; ``storage`` is None for a meta tensor.
    ``kind`` says what was saved, if it was not a plain tensor."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]
    storage: Storage | None
    kind: str = ""

    def __post_init__(self) -> None:
        numbers = (self.offset, *self.shape, *self.stride)
        if not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers) or len(self.shape) > _MAX_DIMENSIONS:
            raise ValueError("a malformed tensor")
        count_elements(self.shape)

    @property
    def nbytes(self) -> int:
        dtype = DTYPES.get(self.dtype)
        return count_elements(self.shape) * dtype.itemsize if dtype is not None else 0


class Opaque:
    """An object of any other type, or the result of any function: its name, and what it was made of."""

    global_name = ""
    args: tuple[Any, ...]
    state: Any
    entries: dict[Any, Any]
    members: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Opaque:
        self = super().__new__(cls)
        self.args = (*args, *kwargs.values())
        self.state = None
        self.entries = {}
        self.members = []
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries[key] = value

    def append(self, value: Any) -> None:
        self.members.append(value)

    def extend(self, values: list[Any]) -> None:
        self.members.extend(values)

    def add(self, value: Any) -> None:
        self.members.append(value)


def read_skeleton(path: str | os.PathLike[str], directory: Directory) -> Any:
    """The saved object, made of containers, plain values, ``Tensor``, ``Storage`` and ``Opaque``.

    Raises CorruptFileError if the pickle is damaged or contradicts the archive, LoadError if it cannot be read.
    """
    record = directory.records["data.pkl"]
    with FileReader(path) as file:
        data = file.read(record.offset, record.nbytes)
    if record.crc32 not in (None, zlib.crc32(data)):
        raise CorruptFileError("record data.pkl: checksum does not match", path=path)
    try:
        return _Unpickler(data, path, directory).load()
    except CorruptFileError:
        raise
    except Exception as error:  # a damaged pickle can make the unpickler raise nearly anything
        raise CorruptFileError(f"record data.pkl: {type(error).__name__}: {error}", path=path) from error


# The unpickler in Python: the one in C lets a pickle of a few bytes allocate gigabytes for its memo.
class _Unpickler(pickle._Unpickler):
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]
    read: Callable[[int], bytes]
    append: Callable[[Any], None]

    def __init__(self, data: bytes, path: str | os.PathLike[str], directory: Directory) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8", errors="replace")
        self._items = _ITEMS + _ITEMS_PER_BYTE * len(data)
        self._path = path
        self._records = directory.records
        self._opaque: dict[str, type[Opaque]] = {}
        self._tuples: dict[int, tuple[int, int]] = {}  # by id, which may be stale: depth, and how many

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _KNOWN:
            return _KNOWN[full]
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if full not in self._opaque:
            if len(self._opaque) == _MAX_NAMES:
                raise ValueError(f"more than {_MAX_NAMES} names")
            self._opaque[full] = type("Opaque", (Opaque,), {"global_name": full})
        return self._opaque[full]

    def get_extension(self, code: int) -> None:
        """What a program has registered is not this program's to call."""
        raise ValueError("an extension code")

    def load_reduce(self) -> None:
        function, arguments = self.stack[-2:]
        if not (isinstance(function, type) and issubclass(function, Opaque)):  # that one copies nothing
            self._items -= sum(len(argument) for argument in arguments if hasattr(argument, "__len__"))
            if self._items < 0:
                raise ValueError("calls copy far more than the pickle has")
        super().load_reduce()  # type: ignore[misc]

    dispatch[pickle.REDUCE[0]] = load_reduce

    def load_build(self) -> None:
        """Attributes are for Opaque alone: those of a Tensor are checked, those of a function would stay."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], Opaque):
            self.stack[-1].state = state

    dispatch[pickle.BUILD[0]] = load_build

    def load_bytearray8(self) -> None:
        (nbytes,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(nbytes)))

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8

    def measure_tuple(self) -> None:
        """Of what was just made."""
        made = self.stack[-1]
        inside = [self._tuples.get(id(item), (1, 1)) for item in made if type(item) is tuple]
        if not inside:
            self._tuples.pop(id(made), None)
            return
        depth = 1 + max(depth for depth, _ in inside)
        number = 1 + sum(number for _, number in inside)
        if depth > _MAX_DEPTH or number > _MAX_TUPLES:
            raise ValueError("tuples are nested too deep")
        self._tuples[id(made)] = depth, number

    def persistent_load(self, saved_id: Any) -> Storage:
        if not isinstance(saved_id, tuple) or len(saved_id) != 5:
            raise CorruptFileError("record data.pkl: unknown persistent id", path=self._path)
        _, kind, key, _, _ = saved_id
        record = self._records.get(f"data/{key.decode() if isinstance(key, bytes) else key}")
        if record is None:
            raise CorruptFileError(f"record data/{key} is missing, the pickle refers to it", path=self._path)
        dtype = _STORAGE_DTYPES.get(getattr(kind, "global_name", "").rpartition(".")[2])
        return Storage(record, dtype, Path(self._path))


def _then_measure(load: Callable[[Any], None]) -> Callable[[_Unpickler], None]:
    def load_tuple(unpickler: _Unpickler) -> None:
        load(unpickler)
        unpickler.measure_tuple()

    return load_tuple


for _opcode in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
    _Unpickler.dispatch[_opcode[0]] = _then_measure(_Unpickler.dispatch[_opcode[0]])


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> Tensor:
    """_rebuild_tensor, _v2 and _v3: the dtype is that of the storage, or stands behind."""
    dtype = next((item for item in rest if isinstance(item, Dtype)), None) or storage.dtype
    if not isinstance(storage, Storage):
        raise ValueError("a malformed tensor")
    lazily = next((item for item in rest if type(item) is dict), {})  # what torch calls metadata
    kind = " and ".join(word for bit, word in (("conj", "conjugated"), ("neg", "negated")) if lazily.get(bit))
    return Tensor(dtype_name(dtype), tuple(shape), offset, tuple(stride), storage, kind)


def _same(data: Any, *_: Any) -> Any:
    return data


def _from_type(make: Callable[..., Any], kind: Any, args: tuple[Any, ...], *_: Any) -> Any:
    """A tensor of a subclass, or with attributes."""
    made = make(*args)
    if not isinstance(made, Tensor):
        return made
    name = getattr(kind, "global_name", "").rpartition(".")[2]
    return Tensor(made.dtype, made.shape, made.offset, made.stride, made.storage, "" if name == "Tensor" else name)


def _meta_tensor(dtype: Any, shape: Any, stride: Any, *_: Any) -> Tensor:
    return Tensor(dtype_name(dtype), tuple(shape), 0, tuple(stride), None, "on the meta device")


def _size(sizes: Any = ()) -> tuple[int, ...]:
    if not all(type(n) is int for n in sizes):
        raise ValueError("a malformed size")
    return tuple(sizes)


def _encode(text: str, encoding: str) -> bytes:
    """How bytes are written in pickle protocol 2."""
    return text.encode("latin1" if encoding == "latin1" else "utf-8")


_KNOWN: dict[str, Any] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _same,
    "torch._utils._rebuild_parameter_with_state": _same,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta_tensor,
    "torch._tensor._rebuild_from_type": _from_type,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.Size": _size,
    "collections.OrderedDict": OrderedDict,
    "_codecs.encode": _encode,
    **{
        f"{module}.{kind.__name__}": kind
        for module in ("builtins", "__builtin__")
        for kind in (set, frozenset, complex)
    },
}

_STORAGE_DTYPES = {
    f"{name}Storage": DTYPES[dtype]
    for name, dtype in {
        "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16",
        "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
        "ComplexDouble": "complex128", "ComplexFloat": "complex64",
        "QInt8": "qint8", "QInt32": "qint32", "QUInt8": "quint8", "QUInt4x2": "quint4x2", "QUInt2x4": "quint2x4",
    }.items()
}  # fmt: skip


def dtype_name(dtype: Any) -> str:
    return dtype.name if isinstance(dtype, Dtype) else "?"


def strides_of(shape: tuple[int, ...], first_fastest: bool = False) -> tuple[int, ...]:
    """Of a tensor without gaps: the last dimension is the fastest, or the first."""
    lengths = [max(n, 1) for n in (shape if first_fastest else reversed(shape))]
    strides = tuple(itertools.accumulate([1, *lengths[:-1]], operator.mul))[: len(shape)]
    return strides if first_fastest else strides[::-1]
