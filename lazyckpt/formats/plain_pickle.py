"""Reads the pickles of plain state without torch's unpickler, several times as fast.

Plain state is what ``torch.save`` and ``lazyckpt.save`` write for tensors and parameters in dicts, lists and tuples
with strings and numbers: protocol 2, only the names in ``_GLOBALS``, and calls of the functions among them. Any other
pickle, a damaged or hostile one too, raises NotPlain; torch's restricted unpickler reads it then, or refuses it.

The native reader (``csrc/python/plain_pickle.cc``) makes, object for object, the same as torch's unpickler. It needs no
budget: an object is never larger than a constant times its opcodes, since keys are never nested and a tensor has at
most 64 dimensions; and a tensor never views more than its storage holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from lazyckpt import _engine, private_names

private_names.check("python", "torch")

_FUNCTIONS = (
    OrderedDict,
    torch._utils._rebuild_parameter,
    torch._utils._rebuild_tensor_v2,
    torch._utils._rebuild_tensor_v3,
    torch.UntypedStorage,
)

# What follows the opcode GLOBAL -> the object that torch's unpickler makes of it.
_GLOBALS = {
    "{}\n{}".format(*name.rpartition(".")[::2]).encode(): value
    for name, value in torch._weights_only_unpickler._get_allowed_globals().items()
    if value in _FUNCTIONS or isinstance(value, torch.dtype | torch.serialization.StorageType)
}


class NotPlain(Exception):
    """The pickle has to be read by torch's unpickler."""


def read_plain(data: bytes, persistent_load: Callable[[Any], torch.storage.TypedStorage]) -> Any:
    """The object that ``data`` holds.

    ``persistent_load`` returns the storage of a persistent id and may raise any error. Raises NotPlain for a
    pickle of anything else, and under a dispatch mode, which may make other tensors.
    """
    if torch._C._len_torch_dispatch_stack():
        raise NotPlain
    try:
        return _engine.read_plain_pickle(data, persistent_load, _GLOBALS)
    except Exception as error:  # torch's unpickler fails in the same way, and names the problem
        raise NotPlain from error
