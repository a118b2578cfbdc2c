"""The globals that ``load`` and ``restore`` allow beyond torch's list: NumPy, paths, dates, frozen sets, empty bytes.

A pickle may name these, and call them only with the arguments that pickle itself writes for such an object. Nothing on
the list runs code of the file's choice, opens a file, or takes more memory than the file has bytes:

- ``numpy.dtype`` makes booleans, numbers and fixed-width text, always as a new object. Its state must equal that of the
  type it names. Fields, objects and metadata, which can alias memory, are refused.
- ``numpy._core.multiarray._reconstruct`` makes one empty array. Its state must hold exactly the bytes of its shape. An
  array takes a state once, since other arrays may view its memory afterwards.
- ``numpy._core.multiarray.scalar`` reads exactly one item.
- ``numpy.asarray`` and ``numpy.ndarray`` view the whole storage of one tensor: lazyckpt writes large arrays in this
  form. The first is a function of ours, since NumPy's believes an ``__array_interface__`` that a pickle has given to a
  tensor.
- ``pathlib`` paths take strings and touch no file. ``datetime`` classes take bytes that form a date, and whole numbers.
- ``frozenset`` takes a list, and ``bytes`` takes nothing.

Types that the user allows with ``torch.serialization.add_safe_globals`` are the user's choice and not restricted here.
"""

from __future__ import annotations

import datetime
import math
import pathlib
import re
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from lazyckpt import private_names

private_names.check("python", "torch")

numpy: Any = sys.modules.get("numpy")  # torch imports it where it is installed

_MAX_DIMENSIONS = 32  # NumPy 1's limit; with more in its state an array reads past its own memory
_DTYPES = re.compile(r"b1|[iufc][0-9]{1,2}|[SU][0-9]{1,9}")


def _is_text(arguments: tuple[Any, ...]) -> bool:
    return all(type(part) is str for part in arguments)


def _is_moment(nbytes: int) -> Callable[[tuple[Any, ...]], bool]:
    """Accepts the bytes of a date (4), a time of day (6) or both (10), and the zone of a time."""

    def accepts(arguments: tuple[Any, ...]) -> bool:
        if not 1 <= len(arguments) <= (1 if nbytes == 4 else 2):
            return False
        data, *zones = arguments
        if type(data) is not bytes or len(data) != nbytes:
            return False
        date, time = (b"\0\1\1\1", data) if nbytes == 6 else (data[:4], data[4:] or bytes(6))
        # The highest bit is the fold; it lies in the hour of a time, and in the month of a date with a time.
        month, hour = date[2] & (0x7F if nbytes == 10 else 0xFF), time[0] & (0x7F if nbytes == 6 else 0xFF)
        try:
            datetime.date(date[0] << 8 | date[1], month, date[3])
            datetime.time(hour, time[1], time[2], int.from_bytes(time[3:], "big"))
        except ValueError:
            return False
        return all(type(zone) is datetime.timezone for zone in zones)

    return accepts


def _is_duration(arguments: tuple[Any, ...]) -> bool:
    return len(arguments) == 3 and all(type(part) is int for part in arguments)


def _is_zone(arguments: tuple[Any, ...]) -> bool:
    return (
        len(arguments) in (1, 2)
        and type(arguments[0]) is datetime.timedelta
        and all(type(name) is str for name in arguments[1:])
    )


def _is_dtype(arguments: tuple[Any, ...]) -> bool:
    return (
        len(arguments) == 3
        and type(arguments[0]) is str
        and _DTYPES.fullmatch(arguments[0]) is not None
        and arguments[1:] == (False, True)  # a copy: NumPy shares its own dtypes, and a state changes them
    )


def _is_reconstructed(arguments: tuple[Any, ...]) -> bool:
    return len(arguments) == 3 and arguments[0] is numpy.ndarray and arguments[1:] == ((0,), b"b")


def _is_scalar(arguments: tuple[Any, ...]) -> bool:
    if len(arguments) != 2:
        return False
    dtype, data = arguments
    return _is_simple(dtype) and type(data) is bytes and len(data) == dtype.itemsize


def _is_view(arguments: tuple[Any, ...]) -> bool:
    if len(arguments) != 6:
        return False
    shape, dtype, memory, *rest = arguments
    return (
        type(memory) is numpy.ndarray
        and memory.dtype == numpy.uint8
        and _fits(shape, dtype, memory.size)
        and rest[:2] == [0, None]
        and rest[2] in ("C", "F")
    )


def _is_storage(arguments: tuple[Any, ...]) -> bool:
    if len(arguments) != 1 or type(tensor := arguments[0]) is not torch.Tensor:
        return False
    whole = tensor.layout is torch.strided and tensor.dim() == 1 and tensor.is_contiguous()
    return tensor.dtype == torch.uint8 and whole and not tensor.__dict__


def _as_array(tensor: torch.Tensor) -> Any:
    return torch.Tensor.numpy(tensor.cpu())


def _is_simple(dtype: Any) -> bool:
    return isinstance(dtype, numpy.dtype) and dtype.kind in "biufcSU" and dtype.metadata is None


def _fits(shape: Any, dtype: Any, nbytes: int) -> bool:
    """Whether an array of this shape has this many bytes. With empty items, an array of any length would have none."""
    return (
        type(shape) is tuple
        and len(shape) <= _MAX_DIMENSIONS
        and all(type(length) is int and length >= 0 for length in shape)
        and _is_simple(dtype)
        and dtype.itemsize > 0
        and math.prod(shape) * dtype.itemsize == nbytes
    )


def _is_state_of_dtype(dtype: Any, state: Any) -> bool:
    version, order = state[:2]
    return version == 3 and order in ("<", ">", "|") and dtype.newbyteorder(order).__reduce__()[2] == state


def _is_state_of_array(array: Any, state: Any) -> bool:
    version, shape, dtype, _, data = state
    return version == 1 and array.shape == (0,) and type(data) is bytes and _fits(shape, dtype, len(data))


_Calls = dict[str, tuple[Any, Callable[[tuple[Any, ...]], bool]]]


def _standard_library() -> _Calls:
    calls: _Calls = {
        "builtins.int": (int, lambda arguments: len(arguments) == 1 and type(arguments[0]) is int),
        "builtins.frozenset": (frozenset, lambda arguments: len(arguments) == 1 and type(arguments[0]) is list),
        "builtins.bytes": (bytes, lambda arguments: not arguments),
        "datetime.date": (datetime.date, _is_moment(4)),
        "datetime.time": (datetime.time, _is_moment(6)),
        "datetime.datetime": (datetime.datetime, _is_moment(10)),
        "datetime.timedelta": (datetime.timedelta, _is_duration),
        "datetime.timezone": (datetime.timezone, _is_zone),
    }
    for module in ("pathlib", "pathlib._local"):  # the second in Python 3.13
        for kind in (type(pathlib.Path()), type(pathlib.PurePath())):
            calls[f"{module}.{kind.__name__}"] = kind, _is_text
    return calls


def _numpy() -> _Calls:
    scalar = numpy.float64(0).__reduce__()[0]
    reconstruct = numpy.empty(0).__reduce__()[0]
    calls: _Calls = {
        "numpy.dtype": (numpy.dtype, _is_dtype),
        "numpy.ndarray": (numpy.ndarray, _is_view),
        "numpy.asarray": (_as_array, _is_storage),
    }
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):  # NumPy 2, NumPy 1
        calls[f"{module}._reconstruct"] = reconstruct, _is_reconstructed
        calls[f"{module}.scalar"] = scalar, _is_scalar
    return calls


_CALLS = _standard_library() | ({} if numpy is None else _numpy())
_ARGUMENTS = {id(function): accepts for function, accepts in _CALLS.values()}
# NumPy's dtype classes, which may take a state. No pickle can name them: no name holds a line feed.
_DTYPE_CLASSES = {} if numpy is None else {f"\n{code}": type(numpy.dtype(code)) for code in "?bhilqBHILQefdgFDGSU"}
_STATES: dict[Any, Callable[[Any, Any], bool]] = dict.fromkeys(_DTYPE_CLASSES.values(), _is_state_of_dtype)
if numpy is not None:
    _STATES[numpy.ndarray] = _is_state_of_array

_GLOBALS = {name: function for name, (function, _) in _CALLS.items()} | _DTYPE_CLASSES

WITHOUT_STORAGES = frozenset(
    name.replace("builtins.", "__builtin__.") for name in _CALLS if name not in ("numpy.asarray", "numpy.ndarray")
)
"""The names, as a pickle spells them, of globals that look at no tensor."""

_allowed_by_user: Callable[[], dict[str, Any]] = torch._weights_only_unpickler._get_user_allowed_globals


def _allowed_globals() -> dict[str, Any]:
    return {**_GLOBALS, **_allowed_by_user()}


class RestrictedUnpickler(torch._weights_only_unpickler.Unpickler):
    """torch's unpickler with our globals beside those that the user allowed.

    It reads from a ``GuardedPickle``, which checks the calls. torch keeps one list for all threads, so this class runs
    torch's code with a list of its own.
    """


_NAMESPACE = {**vars(torch._weights_only_unpickler), "_get_user_allowed_globals": _allowed_globals}
for _name, _method in vars(torch._weights_only_unpickler.Unpickler).items():  # load(), or a part of it in torch 2.15
    if isinstance(_method, FunctionType) and "_get_user_allowed_globals" in _method.__code__.co_names:
        setattr(RestrictedUnpickler, _name, FunctionType(_method.__code__, _NAMESPACE))


_SPARSE_TENSORS: list[torch.Tensor] = private_names.find("torch._utils._sparse_tensors_to_validate") or []


def sparse_tensors_to_validate() -> list[torch.Tensor]:
    """torch's own list. Between 2.13 and 2.15 it became one list per thread."""
    of_thread = getattr(torch.serialization._serialization_tls, "sparse_tensors_to_validate", None)
    return _SPARSE_TENSORS if of_thread is None else of_thread


def allows_call(function: Any, arguments: Any, *, pickled: bool) -> bool:
    """Whether our list lets a pickle call ``function``. ``pickled``: by the opcode that pickle writes for it, not
    through ``__new__`` or another function."""
    accepts = _ARGUMENTS.get(id(function))
    if accepts is None and not (isinstance(function, type) and function in _STATES):
        return True
    if _is_in(function, _allowed_by_user()):
        return True
    return accepts is not None and pickled and type(arguments) is tuple and accepts(arguments)


def allows_state(obj: Any, state: Any) -> bool:
    """Whether our list lets a pickle set the state of ``obj``."""
    kind = type(obj)
    accepts = _STATES.get(kind)
    if (accepts is None and id(kind) not in _ARGUMENTS) or _is_in(kind, _allowed_by_user()):
        return True
    return accepts is not None and type(state) is tuple and accepts(obj, state)


def _is_in(wanted: Any, names: dict[str, Any]) -> bool:
    return any(wanted is found for found in names.values())
