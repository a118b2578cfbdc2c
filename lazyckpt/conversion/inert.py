"""Reads a ``torch.save`` archive without running its code and without reading a tensor.

Every name in the pickle becomes an ``InertObject``, which only remembers its arguments. The exceptions are the few
functions and types that make plain tensors and containers. Loading the file instead, even with ``weights_only``, would
allocate tensors and refuse every type that is not allowed.
"""

from __future__ import annotations

import itertools
import operator
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from lazyckpt.errors import CorruptFileError
from lazyckpt.formats.distcp import Place
from lazyckpt.formats.dtypes import DTYPES, Dtype
from lazyckpt.formats.reader import FileReader, Record, count_elements
from lazyckpt.formats.torch_zip_reader import Directory
from lazyckpt.reading.bounded_pickle import BoundedUnpickler
from lazyckpt.stores.store import AnyPath
from lazyckpt.stores.urls import located

_MAX_DIMENSIONS = 1000
_MAX_NAMES = 10_000
_MAX_PARTS = 4  # of a tensor, in a message


class InertPart(NamedTuple):
    """A part of a tensor of a sharded checkpoint: an item of a ``.distcp`` file."""

    file: AnyPath
    place: Place
    offsets: tuple[int, ...]  # of the part in the whole tensor
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class InertShards:
    """Where the parts of a tensor of ``shape`` are, each element once."""

    shape: tuple[int, ...]
    parts: tuple[InertPart, ...]

    def __str__(self) -> str:
        told = []
        for part in self.parts[:_MAX_PARTS]:
            cut = ", ".join(f"{at}:{at + n}" for at, n in zip(part.offsets, part.shape, strict=True))
            told.append(part.file.name if part.shape == self.shape else f"[{cut}] {part.file.name}")
        return ", ".join(told) + (f", … {len(self.parts)} parts" if len(self.parts) > _MAX_PARTS else "")


@dataclass(frozen=True, eq=False)
class InertStorage:
    """A storage in a record of ``file``; ``dtype`` is None if only its tensors name one.

    With ``shards`` it is the storage of a dense tensor whose parts are apart: ``file`` is the ``.metadata`` of their
    folder, and only the name and length of the record have a meaning."""

    record: Record
    dtype: Dtype | None
    file: AnyPath
    shards: InertShards | None = None


@dataclass(frozen=True, eq=False)
class InertTensor:
    """A tensor's description. ``offset`` and ``stride`` count elements; ``storage`` is None for a meta tensor; ``kind``
    names the type if it was not a plain tensor. Raises ValueError if malformed."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]
    storage: InertStorage | None
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


class InertObject:
    """Stands for an object of any other type, or for the result of any function: its name and arguments."""

    global_name = ""
    args: tuple[Any, ...]
    state: Any
    entries: dict[Any, Any]
    members: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> InertObject:
        self = super().__new__(cls)
        self.args = (*args, *kwargs.values())
        self.state = None
        self.entries = {}
        self.members = []
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries[key] = value

    def append(self, value: Any) -> None:
        self.members.append(value)

    def extend(self, values: list[Any]) -> None:
        self.members.extend(values)

    add = append


def read_inert(path: str | os.PathLike[str], directory: Directory) -> Any:
    """Returns the saved object, made of containers, plain values and inert tensors, storages and objects.

    Raises CorruptFileError if the pickle is damaged or contradicts the archive, LoadError if the file cannot be read.
    """
    with FileReader(path) as file:
        data = file.read_record(directory.records["data.pkl"])
    try:
        return _Unpickler(data, path, directory).load()
    except CorruptFileError:
        raise
    except Exception as error:  # a damaged pickle can make the unpickler raise nearly anything
        raise CorruptFileError(f"record data.pkl: {type(error).__name__}: {error}", path=path) from error


class _Unpickler(BoundedUnpickler):
    dispatch: ClassVar[dict[int, Any]] = dict(BoundedUnpickler.dispatch)

    def __init__(self, data: bytes, path: str | os.PathLike[str], directory: Directory) -> None:
        super().__init__(data, encoding="utf-8", errors="replace")
        self._path = path
        self._records = directory.records
        self._types: dict[str, type[InertObject]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _KNOWN:
            return _KNOWN[full]
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if full not in self._types:
            if len(self._types) == _MAX_NAMES:
                raise ValueError(f"more than {_MAX_NAMES} names")
            self._types[full] = type("InertObject", (InertObject,), {"global_name": full})
        return self._types[full]

    def copies(self, function: Any) -> bool:
        return not (isinstance(function, type) and issubclass(function, InertObject))

    def load_build(self) -> None:
        """Sets the state of an InertObject. A tensor's fields stay as checked, and functions keep no attributes."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], InertObject):
            self.stack[-1].state = state

    dispatch[pickle.BUILD[0]] = load_build

    def persistent_load(self, saved_id: Any) -> InertStorage:
        if not isinstance(saved_id, tuple) or len(saved_id) != 5:
            raise CorruptFileError("record data.pkl: unknown persistent id", path=self._path)
        _, kind, key, _, _ = saved_id
        record = self._records.get(f"data/{key.decode() if isinstance(key, bytes) else key}")
        if record is None:
            raise CorruptFileError(f"record data/{key} is missing, the pickle refers to it", path=self._path)
        dtype = _STORAGE_DTYPES.get(getattr(kind, "global_name", "").rpartition(".")[2])
        return InertStorage(record, dtype, located(self._path))


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> InertTensor:
    """Stands for _rebuild_tensor, _v2 and _v3. The dtype is the storage's, or a later argument."""
    dtype = next((item for item in rest if isinstance(item, Dtype)), None) or storage.dtype
    if not isinstance(storage, InertStorage):
        raise ValueError("a malformed tensor")
    flags = next((item for item in rest if type(item) is dict), {})  # torch calls them metadata
    kind = " and ".join(word for bit, word in (("conj", "conjugated"), ("neg", "negated")) if flags.get(bit))
    return InertTensor(dtype_name(dtype), tuple(shape), offset, tuple(stride), storage, kind)


def _from_type(make: Callable[..., Any], kind: Any, args: tuple[Any, ...], *_: Any) -> Any:
    """Makes a tensor of a subclass, or with attributes."""
    made = make(*args)
    if not isinstance(made, InertTensor):
        return made
    name = getattr(kind, "global_name", "").rpartition(".")[2]
    return InertTensor(made.dtype, made.shape, made.offset, made.stride, made.storage, "" if name == "Tensor" else name)


def _meta_tensor(dtype: Any, shape: Any, stride: Any, *_: Any) -> InertTensor:
    return InertTensor(dtype_name(dtype), tuple(shape), 0, tuple(stride), None, "on the meta device")


def _size(sizes: Any = ()) -> tuple[int, ...]:
    if not all(type(n) is int for n in sizes):
        raise ValueError("a malformed size")
    return tuple(sizes)


_KNOWN: dict[str, Any] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta_tensor,
    "torch._tensor._rebuild_from_type": _from_type,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.Size": _size,
    "collections.OrderedDict": OrderedDict,
    # Protocol 2 writes bytes as text and its encoding.
    "_codecs.encode": lambda text, encoding: text.encode("latin1" if encoding == "latin1" else "utf-8"),
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
    """Returns the strides of a dense tensor, whose last dimension varies fastest, or whose first does."""
    lengths = [max(n, 1) for n in (shape if first_fastest else reversed(shape))]
    strides = tuple(itertools.accumulate([1, *lengths[:-1]], operator.mul))[: len(shape)]
    return strides if first_fastest else strides[::-1]
