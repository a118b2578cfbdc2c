"""Guards torch's restricted unpickler against pickles that it does not survive.

torch's unpickler calls only functions on its list. But some of them allocate as much as they are told to, or set
attributes that mean something to torch. And Python hashes tuples by recursion in C, without a limit: a key nested a
million times ends the process. The functions that we add to the list (``safe_globals``) may be called only as pickle
itself calls them.

So the unpickler reads the pickle from a stream that looks at the unpickler's stack before each opcode that calls, sets
keys or sets a state. The stream changes nothing that the unpickler makes. Only before it raises does it parse the
pickle, to tell an opcode from an operand that looks like one.
"""

from __future__ import annotations

import io
import pickletools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from inspect import getattr_static
from operator import index
from pickle import BUILD, NEWOBJ, REDUCE, SETITEM, SETITEMS
from typing import Any, NoReturn

import torch

from lazyckpt.errors import CorruptFileError, UnsupportedFormatError
from lazyckpt.formats.safe_globals import RestrictedUnpickler, allows_call, allows_state

_WATCHED = frozenset((REDUCE, NEWOBJ, BUILD, SETITEM, SETITEMS))
_MAX_DEPTH = 100
# The memory that the arguments of all calls and all keys may take together: a file may name one long list again and
# again, for two bytes each time.
_BUDGET_BYTES, _BUDGET_FACTOR = 8 << 20, 64  # plus this many times the pickle
_ITEM_BYTES = 64
CONSENT = (
    "allow the type with torch.serialization.add_safe_globals, or load with weights_only=False, which runs code from "
    "the file: only if you trust its origin"
)
_ENCODINGS = ("latin1", "latin-1", "utf-8", "ascii")  # protocol 2 writes bytes as text and its encoding


class GuardedPickle(io.BytesIO):
    """``data`` as a stream that its restricted ``unpickler`` reads."""

    def __init__(self, data: bytes, path: Any) -> None:
        super().__init__(data)
        self.unpickler: Any = RestrictedUnpickler(self, encoding="utf-8")
        self._budget = _BUDGET_BYTES + _BUDGET_FACTOR * len(data)
        self._path = path
        self._opcodes: Iterator[int] | None = None  # their offsets, from the last one asked for
        self._opcode = -1

    def load(self, persistent_load: Callable[[Any], torch.storage.TypedStorage]) -> Any:
        """The object that the pickle holds. To be called once.

        Passes on errors of the unpickler. Raises CorruptFileError, or UnsupportedFormatError for a call that
        ``torch.save`` never writes.
        """
        self.unpickler.persistent_load = persistent_load
        try:
            return self.unpickler.load()
        finally:
            del self.unpickler  # breaks a cycle that would keep the archive, and its part of the ring, alive

    def read(self, size: int | None = -1, /) -> bytes:
        data = _read(self, size)
        if data in _WATCHED:
            try:
                self._check(data, self.unpickler.stack)
            except Exception:
                if self._is_opcode(self.tell() - 1):
                    raise
        return data

    def _check(self, opcode: bytes, stack: list[Any]) -> None:
        if opcode == SETITEMS:
            self._check_depth(stack[::2])
        elif opcode == SETITEM:
            self._check_depth(stack[-2:-1])
        elif len(stack) < 2:
            pass  # the unpickler raises
        elif opcode == BUILD:
            if type(stack[-2]) in (torch.Tensor, torch.nn.Parameter) and len(stack[-1]) == 4:
                self._check_view(*stack[-1])  # the state holds the arguments of Tensor.set_
            elif not allows_state(stack[-2], stack[-1]):
                self._restricted(f"it sets the state of a {type(stack[-2]).__name__}")
        elif type(stack[-1]) is not tuple:  # to unpack anything else may take forever
            self._restricted("it calls a function with other arguments than a tuple")
        elif id(stack[-2]) in _VIEWS:  # these hash nothing
            self._check_view(*stack[-1][:4])
        else:
            self._check_depth(stack[-1:])
            self._check_call(stack[-2], stack[-1], new=opcode == NEWOBJ)

    def _is_opcode(self, at: int) -> bool:
        """Whether the byte at ``at`` is an opcode, not part of an operand. ``at`` may only grow from call to call."""
        if self._opcodes is None:
            self._opcodes = (place for _, _, place in pickletools.genops(self.getvalue()) if place is not None)
        try:
            while self._opcode < at:
                self._opcode = next(self._opcodes)
        except (ValueError, StopIteration):
            return True  # a pickle that cannot be parsed is never trusted
        return self._opcode == at

    def _check_depth(self, values: list[Any]) -> None:
        """Limits the depth of tuples and lists. Shared ones count each time, since hashing walks them each time."""
        found = [(value, 1) for value in values if isinstance(value, tuple | list)]
        while found:
            value, depth = found.pop()
            self._charge(_ITEM_BYTES * len(value))
            if depth > _MAX_DEPTH:
                raise CorruptFileError("record data.pkl: a key or argument is nested too deep", path=self._path)
            found += [(inner, depth + 1) for inner in value if isinstance(inner, tuple | list)]

    def _charge(self, nbytes: int) -> None:
        self._budget -= nbytes
        if self._budget < 0:
            self._refuse("what it makes takes far more memory than its bytes")

    def _check_call(self, function: Any, arguments: Any, *, new: bool) -> None:
        direct = True
        while function is torch._tensor._rebuild_from_type_v2 and len(arguments) > 2:
            self._check_attributes(arguments[3:])
            function, _, arguments = arguments[:3]
            direct = False
            if type(arguments) is not tuple:
                self._restricted("it calls a function with other arguments than a tuple")
        if function is torch._utils._rebuild_parameter_with_state:
            self._check_attributes(arguments[3:])
        self._charge(sum(len(argument) for argument in arguments if isinstance(argument, str | bytes | bytearray)))
        fine = True
        if id(function) in _VIEWS:
            self._check_view(*arguments[:4])
        elif function is bytearray:
            fine = all(isinstance(argument, bytes | str) for argument in arguments)
        elif isinstance(function, type) and (function in _MEMORY or function in torch._tensor_classes):
            fine = not arguments  # a number would be a length
        elif function in _COLLECTIONS:
            fine = all(type(argument) in (tuple, list, dict) for argument in arguments)
        elif getattr(function, "__module__", None) == "_codecs":
            fine = len(arguments) < 2 or (isinstance(arguments[1], str) and arguments[1] in _ENCODINGS)
        elif not allows_call(function, arguments, pickled=direct and not new):
            self._restricted(f"it calls {function.__module__}.{function.__name__}")
        if not fine:
            what = f"a call of {function.__name__} that torch.save does not write"
            raise UnsupportedFormatError(f"record data.pkl: {what}", path=self._path)

    def _check_attributes(self, states: tuple[Any, ...]) -> None:
        """Refuses attributes of tensors that their class computes: to set ``real``, for one, would write to memory."""
        for state in states:
            for attributes in state if isinstance(state, tuple) else [state]:
                for key in attributes or ():
                    computed = type(key) is not str or hasattr(getattr_static(torch.nn.Parameter, key, None), "__set__")
                    if computed or key.startswith("__"):
                        self._restricted(f"it sets {key!r} of a tensor")

    def _restricted(self, what: str) -> NoReturn:
        self._refuse(f"{what} in a way that may do harm")

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedFormatError(f"is not to be unpickled: {what} ({CONSENT})", path=self._path)

    def _check_view(self, storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
        """Refuses a view past the end: torch would enlarge the storage."""
        self._charge(_ITEM_BYTES * len(size))  # many tensors may share one tuple of a million sizes
        # NumPy's integers would wrap around.
        last = index(offset) + sum((index(n) - 1) * index(step) for n, step in zip(size, stride, strict=True))
        if 0 not in size and last >= storage._size():
            raise CorruptFileError("record data.pkl: a tensor views more than its storage holds", path=self._path)


_MEMORY = (torch.Tensor, torch.UntypedStorage, torch.storage.TypedStorage)  # are as large as they are told to be
_COLLECTIONS = (set, torch.Size, OrderedDict, Counter)
_read = io.BytesIO.read
# Nearly all calls; by id(), since a pickle may call anything. They begin with a storage, an offset, a size, a stride.
_VIEWS = frozenset(
    map(id, (torch._utils._rebuild_tensor_v2, torch._utils._rebuild_tensor_v3, torch._utils._rebuild_tensor))
)
