"""An unpickler for pickles that may be hostile: it bounds their memory and the depth of their tuples.

A subclass maps the names in a pickle to objects with ``find_class``.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from lazyckpt import private_names

private_names.check("python")

# Python hashes nested tuples by recursion in C. Deep ones overflow the stack; shared ones take exponential time.
_MAX_DEPTH = 100
_MAX_TUPLES = 1_000_000
# Items that all calls together may copy. A pickle of a few bytes can pass the same long list to many calls.
_ITEMS, _ITEMS_PER_BYTE = 100_000, 4


# Python's own unpickler: the one in C lets a pickle of a few bytes allocate gigabytes for its memo.
class BoundedUnpickler(pickle._Unpickler):
    """Reads a pickle that may be hostile, if ``find_class`` returns only harmless objects: it takes no more memory
    than the pickle justifies, and no tuple is nested so deep that hashing it would end the process."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]
    read: Callable[[int], bytes]
    append: Callable[[Any], None]

    def __init__(self, data: bytes, **options: Any) -> None:
        super().__init__(io.BytesIO(data), **options)
        self._items = _ITEMS + _ITEMS_PER_BYTE * len(data)
        self._tuples: dict[int, tuple[int, int]] = {}  # id (may be stale) -> depth, number of nested tuples

    def get_extension(self, code: int) -> None:
        """Refuses extension codes: they would call functions that this process has registered."""
        raise ValueError("an extension code")

    def copies(self, function: Any) -> bool:
        """Whether a call of ``function`` may copy its arguments."""
        return True

    def load_reduce(self) -> None:
        function, arguments = self.stack[-2:]
        if self.copies(function):
            self._items -= sum(len(argument) for argument in arguments if hasattr(argument, "__len__"))
            if self._items < 0:
                raise ValueError("its calls copy far more items than the pickle holds")
        super().load_reduce()  # type: ignore[misc]

    dispatch[pickle.REDUCE[0]] = load_reduce

    def load_bytearray8(self) -> None:
        (nbytes,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(nbytes)))

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8

    def load_any_tuple(self, load: Callable[[Any], None]) -> None:
        """Counts the tuples nested in the one that ``load`` puts on the stack. Raises ValueError if there are too
        many."""
        load(self)
        made = self.stack[-1]
        inside = [self._tuples.get(id(item), (1, 1)) for item in made if type(item) is tuple]
        if not inside:
            self._tuples.pop(id(made), None)
            return
        depth = 1 + max(depth for depth, _ in inside)
        number = 1 + sum(number for _, number in inside)
        if depth > _MAX_DEPTH or number > _MAX_TUPLES:
            raise ValueError("its tuples are nested too deep")
        self._tuples[id(made)] = depth, number


for _opcode in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
    BoundedUnpickler.dispatch[_opcode[0]] = partial(
        BoundedUnpickler.load_any_tuple, load=BoundedUnpickler.dispatch[_opcode[0]]
    )
