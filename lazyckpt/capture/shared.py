"""Finds memory that other processes may write to, where no kernel watches it.

torch knows only the shared memory that it made itself. Memory that it was given, by ``torch.from_numpy`` of a
``numpy.memmap`` for instance, may be shared as well: ``/proc/self/maps`` tells.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import repeat

import torch

from lazyckpt import devices

_MAPS = "/proc/self/maps"
_SHARED = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ...s", re.MULTILINE)
_known: dict[int, int] = {}
"""Twice the address of a storage, and one more if its memory is shared; by ``_cdata``. Each entry has a weak reference,
so that no other storage gets its ``_cdata``. Asking takes milliseconds if a process has thousands of mappings."""


def may_be_shared(storages: Sequence[torch.UntypedStorage]) -> list[bool]:
    """Returns for each storage in host memory whether another process may have its memory, too."""
    identities = [storage._cdata for storage in storages]
    pointers = list(map(devices.data_ptr, storages))
    found = list(map(_known.get, identities, repeat(-1)))
    columns = enumerate(zip(found, pointers, strict=True))
    new = [at for at, (known, pointer) in columns if known >> 1 != pointer]
    if new:
        _look_at([(storages[at], identities[at], pointers[at]) for at in new])
        found = list(map(_known.__getitem__, identities))
    return [known & 1 != 0 for known in found]


def _look_at(new: list[tuple[torch.UntypedStorage, int, int]]) -> None:
    for identity in filter(torch.UntypedStorage._expired, list(_known)):
        if _known.pop(identity, None) is not None:
            torch.UntypedStorage._free_weak_ref(identity)
    mappings = _shared_mappings()
    for storage, identity, pointer in new:
        shared = mappings is None or _overlaps(mappings, pointer, storage.nbytes())
        if identity not in _known:
            storage._weak_ref()
        _known[identity] = 2 * pointer + shared


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
