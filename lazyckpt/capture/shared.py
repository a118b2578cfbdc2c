"""Finds memory that other processes may write to, where no kernel watches it.

torch knows only the shared memory that it made itself. Memory that it was given, by ``torch.from_numpy`` of a
``numpy.memmap`` for instance, may be shared as well: ``/proc/self/maps`` tells.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch

_MAPS = "/proc/self/maps"
_SHARED = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ...s", re.MULTILINE)
_known: dict[int, int] = {}
"""The address of a storage, or its complement if the memory is shared; by ``_cdata``. Each entry has a weak reference,
so that no other storage gets its ``_cdata``. Asking takes milliseconds if a process has thousands of mappings."""


def may_be_shared(
    storages: Sequence[torch.UntypedStorage], identities: Sequence[int], pointers: list[int]
) -> list[bool]:
    """Returns for each storage in host memory whether another process may have its memory, too.

    ``identities``: the ``_cdata`` of each. ``pointers``: its address."""
    known: list[Any] = list(map(_known.get, identities))
    if known == pointers:  # as at every save but the first
        return [False] * len(pointers)
    columns = zip(storages, identities, pointers, known, strict=True)
    new = [(storage, identity, at) for storage, identity, at, was in columns if was not in (at, ~at)]
    if new:
        _look_at(new)
    return [_known[identity] < 0 for identity in identities]


def _look_at(new: list[tuple[torch.UntypedStorage, int, int]]) -> None:
    for identity in filter(torch.UntypedStorage._expired, list(_known)):
        if _known.pop(identity, None) is not None:
            torch.UntypedStorage._free_weak_ref(identity)
    mappings = _shared_mappings()
    for storage, identity, pointer in new:
        shared = mappings is None or _overlaps(mappings, pointer, storage.nbytes())
        if identity not in _known:
            storage._weak_ref()
        _known[identity] = ~pointer if shared else pointer


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
