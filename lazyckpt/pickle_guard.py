"""What torch's restricted unpickler is not asked to survive.

It calls only functions on its list, but some of those allocate whatever they are told to, and Python hashes tuples by
recursion in C, without a limit: a key that is nested a million times ends the process. So the pickle is handed over as
a stream that looks at the unpickler's stack in front of the opcodes that call and that set keys. It neither parses the
pickle nor changes what is made of it.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch._weights_only_unpickler import Unpickler

from lazyckpt.errors import CorruptFileError, UnsupportedFormatError

_REDUCE, _NEWOBJ, _SETITEM, _SETITEMS = b"R", b"\x81", b"s", b"u"
_WATCHED = frozenset((_REDUCE, _NEWOBJ, _SETITEM, _SETITEMS))
_MAX_DEPTH = 100
_ENCODINGS = ("latin1", "latin-1", "utf-8", "ascii")  # bytes are pickled as text that is to be encoded


class GuardedPickle(io.BytesIO):
    """``data`` as a stream for the restricted ``unpickler``, which is to be set before the first read.

    Reading raises CorruptFileError, or UnsupportedFormatError for a call that no ``torch.save`` writes.
    """

    unpickler: Unpickler

    def __init__(self, data: bytes, path: Any) -> None:
        super().__init__(data)
        self._nbytes = len(data)
        self._path = path

    def read(self, size: int | None = -1, /) -> bytes:
        data = _read(self, size)
        # An operand that looks like one of these opcodes is looked at, too: that costs time, nothing else.
        if data in _WATCHED:
            stack = self.unpickler.stack
            if data == _SETITEMS:
                self._check_depth(stack[::2])
            elif data == _SETITEM:
                self._check_depth(stack[-2:-1])
            elif len(stack) > 1:
                if id(stack[-2]) in _VIEWS:  # which hash nothing
                    self._check_view(*stack[-1][:4])
                else:
                    self._check_depth(stack[-1:])
                    self._check_call(stack[-2], stack[-1])
        return data

    def _check_depth(self, values: list[Any]) -> None:
        """Of tuples and lists in ``values``. Shared ones count each time, as they do where they are hashed."""
        found = [(value, 1) for value in values if isinstance(value, tuple | list)]
        budget = self._nbytes
        while found:
            value, depth = found.pop()
            budget -= 1
            if depth > _MAX_DEPTH or budget < 0:
                raise CorruptFileError("record data.pkl: a key or argument is nested too deep", path=self._path)
            found += [(inner, depth + 1) for inner in value if isinstance(inner, tuple | list)]

    def _check_call(self, function: Any, arguments: Any) -> None:
        while function is torch._tensor._rebuild_from_type_v2 and len(arguments) > 2:
            function, _, arguments = arguments[:3]
        if id(function) in _VIEWS:
            self._check_view(*arguments[:4])
            fine = True
        elif function is bytearray:
            fine = all(isinstance(argument, bytes | str) for argument in arguments)
        elif _is_memory(function):
            fine = not arguments  # a number would be a length
        elif getattr(function, "__module__", None) == "_codecs":
            fine = len(arguments) < 2 or (isinstance(arguments[1], str) and arguments[1] in _ENCODINGS)
        else:
            fine = True
        if not fine:
            what = f"a call of {function.__name__} that torch.save does not write"
            raise UnsupportedFormatError(f"record data.pkl: {what}", path=self._path)

    def _check_view(self, storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
        """torch would enlarge a storage that is too small for a tensor."""
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if 0 not in size and last >= storage._size():
            raise CorruptFileError("record data.pkl: a tensor views more than its storage holds", path=self._path)


def _is_memory(function: Any) -> bool:
    """Types that are as large as they are told to be."""
    storages = (torch.UntypedStorage, torch.storage.TypedStorage)
    return isinstance(function, type) and (
        function is torch.Tensor or function in storages or function in torch._tensor_classes
    )


_read = io.BytesIO.read
# Nearly all calls, by id(), since what is called may be anything. They begin with a storage, an offset, a size and a
# stride.
_VIEWS = frozenset(
    map(id, (torch._utils._rebuild_tensor_v2, torch._utils._rebuild_tensor_v3, torch._utils._rebuild_tensor))
)
