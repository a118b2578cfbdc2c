"""What a torn snapshot teaches: which storages are copied inside ``save()`` from then on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

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

    def add(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """A snapshot was torn, since somebody wrote to ``storages``."""
        self._snapshots += 1
        self._copy_all = True
        for dead in [identity for identity, torn in list(_torn.items()) if torn.expired()]:
            _torn.pop(dead, None)
        _torn.update((storage._cdata, StorageWeakRef(storage)) for storage in storages)

    def without(self, owners: list[int], identities: list[int]) -> list[int]:
        """``owners`` of the storages with these identities (``_cdata``), 0 for those that have to be eager."""
        copy_all, self._copy_all = self._copy_all, False
        if copy_all or self._snapshots >= _MAX_TORN_SNAPSHOTS:
            return [0] * len(owners)
        if not _torn:
            return owners
        return [0 if identity in _torn else bits for identity, bits in zip(identities, owners, strict=True)]


def is_torn(identity: int) -> bool:
    """Whether the storage with this ``_cdata`` was torn before, in whatever Saver."""
    return identity in _torn


# By ``_cdata``: no other storage is given it as long as there is a weak reference to the one that had it. To a tensor
# there must be none: torch.utils.swap_tensors refuses it.
_torn: dict[int, StorageWeakRef] = {}
