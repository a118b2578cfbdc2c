"""What a torn snapshot teaches: which storages are copied inside ``save()`` from then on."""

from __future__ import annotations

from collections.abc import Iterable

import torch

CURE = (
    "It is copied inside save() from now on, which takes longer. To keep it lazy, let the code that writes to it wait: "
    'lazyckpt.guard(object, "method"), or lazyckpt.wait_captured() before the write'
)
_MAX_TORN_SNAPSHOTS = 3  # of a Saver; then nothing is lazy any more: who writes is not to be known


class TornStorages:
    """The storages of one Saver that were written to before they were copied. Any thread may call.

    The storages are known to the whole process: another Saver need not learn it again. The save after a torn one copies
    everything at once, so that it commits whoever else writes.
    """

    def __init__(self) -> None:
        self._snapshots = 0
        self._copy_all = False

    def add(self, storages: Iterable[tuple[int, int]]) -> None:
        """A snapshot was torn, since somebody wrote to ``storages``: the ``_cdata`` and the address of each. Not held
        weakly: torch.utils.swap_tensors refuses a tensor that is. Another storage in the same place is eager without
        need."""
        self._snapshots += 1
        self._copy_all = True
        _torn.update(storages)

    def without(self, owners: list[int], identities: list[int], storages: list[torch.UntypedStorage]) -> list[int]:
        """``owners`` of these storages, 0 for those that have to be eager."""
        copy_all, self._copy_all = self._copy_all, False
        if copy_all or self._snapshots >= _MAX_TORN_SNAPSHOTS:
            return [0] * len(owners)
        if not _torn:
            return owners
        places = zip(identities, map(torch.UntypedStorage.data_ptr, storages), strict=True)
        return [0 if place in _torn else bits for place, bits in zip(places, owners, strict=True)]


_torn: set[tuple[int, int]] = set()
