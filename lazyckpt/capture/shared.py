"""Finds memory that other processes may write to, where no kernel watches it.

torch knows only the shared memory that it made itself. Memory that it was given, by ``torch.from_numpy`` of a
``numpy.memmap`` for instance, may be shared as well: ``/proc/self/maps`` tells.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lazyckpt import devices

_MAPS = "/proc/self/maps"
_SHARED = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ...s", re.MULTILINE)
_known: dict[int, tuple[StorageWeakRef, int, bool]] = {}
"""The address of a storage, and whether its memory is shared; by ``_cdata``, which no other storage gets while there is
a weak reference. Asking takes milliseconds if a process has thousands of mappings."""


def may_be_shared(storages: Sequence[torch.UntypedStorage]) -> list[bool]:
    """Returns for each storage in host memory whether another process may have its memory, too."""
    at = [(storage._cdata, devices.data_ptr(storage)) for storage in storages]
    found = [_known.get(identity) for identity, _ in at]
    new = [
        (storage, *place)
        for storage, place, known in zip(storages, at, found, strict=True)
        if known is None or known[1] != place[1]
    ]
    if new:
        _look_at(new)
    return [_known[identity][2] for identity, _ in at]


def _look_at(new: list[tuple[torch.UntypedStorage, int, int]]) -> None:
    for identity in [identity for identity, (ref, *_) in list(_known.items()) if ref.expired()]:
        _known.pop(identity, None)
    mappings = _shared_mappings()
    for storage, identity, pointer in new:
        shared = mappings is None or _overlaps(mappings, pointer, storage.nbytes())
        _known[identity] = StorageWeakRef(storage), pointer, shared


def _overlaps(mappings: list[tuple[int, int]], begin: int, nbytes: int) -> bool:
    """``mappings``: begin and end of each, by address."""
    before = bisect_right(mappings, (begin + nbytes - 1, 1 << 64)) - 1  # the last that begins before the end
    return before >= 0 and mappings[before][1] > begin


def _shared_mappings() -> list[tuple[int, int]] | None:
    """Returns None if they are unknown: then any memory may be shared."""
    try:
        with open(_MAPS, "rb") as file:
            return [(int(begin, 16), int(end, 16)) for begin, end in _SHARED.findall(file.read())]
    except OSError:
        return None
