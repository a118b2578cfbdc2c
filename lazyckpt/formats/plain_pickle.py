"""Reads the pickles of plain state without torch's unpickler, several times as fast.

Plain state is what ``torch.save`` and ``lazyckpt.save`` write for tensors and parameters in dicts, lists and tuples
with strings and numbers: protocol 2, only the names in ``_GLOBALS`` and the calls in ``_call``. Any other pickle, a
damaged or hostile one too, raises NotPlain; torch's restricted unpickler reads it then, or refuses it.

What this module accepts is, object for object, what torch's unpickler makes of it. It keeps torch's data structures for
that reason: a stack for each open mark, and a memo by number. It needs no budget: an object is never larger than a
constant times its opcodes, since keys are never nested and a tensor has at most 64 dimensions; and a tensor never views
more than its storage holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from struct import Struct
from typing import Any

import torch
from torch._weights_only_unpickler import _get_allowed_globals

_MAX_DIMENSIONS = 64  # torch computes with no more
_KEYS = frozenset((str, int, float, bool, type(None)))
_DICTS = (dict, OrderedDict)
_rebuild_parameter = torch._utils._rebuild_parameter
_rebuild_tensor_v2 = torch._utils._rebuild_tensor_v2
_rebuild_tensor_v3 = torch._utils._rebuild_tensor_v3

_read_float = Struct(">d").unpack_from
_read_int = Struct("<i").unpack_from
_read_long = Struct("<I").unpack_from
_read_short = Struct("<H").unpack_from

_FUNCTIONS = (OrderedDict, _rebuild_parameter, _rebuild_tensor_v2, _rebuild_tensor_v3, torch.UntypedStorage)

# What follows the opcode GLOBAL -> the object that torch's unpickler makes of it.
_GLOBALS = {
    "{}\n{}".format(*name.rpartition(".")[::2]).encode(): value
    for name, value in _get_allowed_globals().items()
    if value in _FUNCTIONS or isinstance(value, torch.dtype | torch.serialization.StorageType)
}


class NotPlain(Exception):
    """The pickle has to be read by torch's unpickler."""


def read_plain(data: bytes, persistent_load: Callable[[Any], torch.storage.TypedStorage]) -> Any:
    """The object that ``data`` holds.

    ``persistent_load`` gives the storage of a persistent id and may raise whatever it likes. Raises NotPlain for a
    pickle of anything else, and under a dispatch mode, which may make other tensors.
    """
    if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
        raise NotPlain
    try:
        return _read(data, persistent_load)
    except Exception as error:  # torch's unpickler meets the same problem and says what it is
        raise NotPlain from error


def _read(data: bytes, persistent_load: Callable[[Any], torch.storage.TypedStorage]) -> Any:
    memo: dict[int, Any] = {}
    outer: list[list[Any]] = []
    stack: list[Any] = []
    templates: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}  # empty tensors, to make others from
    at = 0
    # The most frequent opcodes come first.
    while True:
        opcode = data[at]
        at += 1
        if opcode == 0x68:  # BINGET
            stack.append(memo[data[at]])
            at += 1
        elif opcode == 0x4B:  # BININT1
            stack.append(data[at])
            at += 1
        elif opcode == 0x72:  # LONG_BINPUT
            memo[_read_long(data, at)[0]] = stack[-1]
            at += 4
        elif opcode == 0x28:  # MARK
            outer.append(stack)
            stack = []
        elif opcode == 0x74:  # TUPLE
            items, stack = stack, outer.pop()
            stack.append(tuple(items))
        elif opcode == 0x58:  # BINUNICODE
            begin = at + 4
            at = begin + _read_long(data, at)[0]
            stack.append(data[begin:at].decode("utf-8", "surrogatepass"))
        elif opcode == 0x52:  # REDUCE
            arguments = stack.pop()
            stack[-1] = _call(stack[-1], arguments, templates)
        elif opcode == 0x86:  # TUPLE2
            stack[-2:] = [(stack[-2], stack[-1])]
        elif opcode == 0x71:  # BINPUT
            memo[data[at]] = stack[-1]
            at += 1
        elif opcode == 0x51:  # BINPERSID
            saved_id = stack[-1]
            if type(saved_id) is not tuple or type(saved_id[0]) is not str or saved_id[0] != "storage":
                raise NotPlain
            stack[-1] = persistent_load(saved_id)
        elif opcode == 0x29:  # EMPTY_TUPLE
            stack.append(())
        elif opcode == 0x89:  # NEWFALSE
            stack.append(False)
        elif opcode == 0x85:  # TUPLE1
            stack[-1] = (stack[-1],)
        elif opcode == 0x4D:  # BININT2
            stack.append(_read_short(data, at)[0])
            at += 2
        elif opcode == 0x4A:  # BININT
            stack.append(_read_int(data, at)[0])
            at += 4
        elif opcode == 0x6A:  # LONG_BINGET
            stack.append(memo[_read_long(data, at)[0]])
            at += 4
        elif opcode == 0x87:  # TUPLE3
            stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
        elif opcode == 0x75:  # SETITEMS
            items, stack = stack, outer.pop()
            _set_items(stack[-1], items)
        elif opcode == 0x73:  # SETITEM
            items = [stack[-2], stack[-1]]
            del stack[-2:]
            _set_items(stack[-1], items)
        elif opcode == 0x65:  # APPENDS
            items, stack = stack, outer.pop()
            _extend(stack[-1], items)
        elif opcode == 0x61:  # APPEND
            items = [stack.pop()]
            _extend(stack[-1], items)
        elif opcode == 0x7D:  # EMPTY_DICT
            stack.append({})
        elif opcode == 0x5D:  # EMPTY_LIST
            stack.append([])
        elif opcode == 0x4E:  # NONE
            stack.append(None)
        elif opcode == 0x88:  # NEWTRUE
            stack.append(True)
        elif opcode == 0x47:  # BINFLOAT
            stack.append(_read_float(data, at)[0])
            at += 8
        elif opcode == 0x8A:  # LONG1
            begin = at + 1
            at = begin + data[at]
            stack.append(int.from_bytes(data[begin:at], "little", signed=True))
        elif opcode == 0x63:  # GLOBAL
            end = data.index(b"\n", data.index(b"\n", at) + 1)
            stack.append(_GLOBALS[data[at:end]])
            at = end + 1
        elif opcode == 0x62:  # BUILD: the attributes of an OrderedDict, such as a state dict's _metadata
            state = stack.pop()
            if type(stack[-1]) is not OrderedDict or type(state) is not dict:
                raise NotPlain
            stack[-1].__dict__.update(state)
        elif opcode == 0x80:  # PROTO
            if data[at] != 2:
                raise NotPlain
            at += 1
        elif opcode == 0x2E:  # STOP
            return stack.pop()
        else:
            raise NotPlain


def _set_items(target: Any, items: list[Any]) -> None:
    keys = items[::2]
    if type(target) not in _DICTS or len(items) % 2 or not _KEYS.issuperset(map(type, keys)):
        raise NotPlain
    type(target).update(target, zip(keys, items[1::2], strict=True))  # a state may shadow the method


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) is not list:
        raise NotPlain
    target.extend(items)


def _call(function: Any, arguments: Any, templates: dict[tuple[torch.dtype, torch.device], torch.Tensor]) -> Any:
    if type(arguments) is not tuple:
        raise NotPlain
    if function is OrderedDict and not arguments:
        return OrderedDict()
    if function is _rebuild_parameter:
        tensor, requires_grad, hooks = arguments
        if type(tensor) is not torch.Tensor or type(requires_grad) is not bool or type(hooks) is not OrderedDict:
            raise NotPlain
        return _rebuild_parameter(tensor, requires_grad, hooks)
    if function is _rebuild_tensor_v2:
        storage, offset, size, stride, requires_grad, hooks = arguments
        dtype = storage.dtype
    elif function is _rebuild_tensor_v3:
        storage, offset, size, stride, requires_grad, hooks, dtype = arguments
        if requires_grad:
            raise NotPlain
    else:
        raise NotPlain
    if type(storage) is not torch.storage.TypedStorage or type(offset) is not int or type(hooks) is not OrderedDict:
        raise NotPlain
    if type(dtype) is not torch.dtype or type(requires_grad) is not bool:
        raise NotPlain
    # Many tensors may share one tuple of a million sizes.
    if type(size) is not tuple or type(stride) is not tuple or len(size) > _MAX_DIMENSIONS:
        raise NotPlain
    last, empty = offset, False
    for n, step in zip(size, stride, strict=True):
        if type(n) is not int or type(step) is not int or n < 0 or step < 0:
            raise NotPlain
        last += (n - 1) * step
        empty = empty or n == 0
    memory = storage._untyped_storage
    # torch would enlarge a storage that is too small.
    if offset < 0 or (not empty and (last + 1) * dtype.itemsize > memory.nbytes()):
        raise NotPlain
    kind = dtype, memory.device
    template = templates.get(kind)
    if template is None:
        template = templates[kind] = torch.empty(0, dtype=dtype, device=memory.device)
    tensor = template.new_empty(0).set_(memory, offset, size, stride)
    if requires_grad:
        tensor.requires_grad = True
    tensor._backward_hooks = hooks
    return tensor
