"""Remembers the storages of torn snapshots, so that later saves copy them eagerly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

MAX_NAMES = 5  # of torn tensors in a message
_CURE = (
    "It is copied inside save() from now on, which takes longer. To keep it lazy, let the code that writes to it wait: "
    'lazyckpt.guard(object, "method"), or lazyckpt.wait_captured() before the write'
)
_MAX_TORN_SNAPSHOTS = 3  # of a Saver; after these nothing is lazy, since the writer cannot be found


def told(names: list[str], torn: int, what: str) -> str:
    """Says that the ``torn`` tensors, the first of them by name, were changed as ``what`` says."""
    more = f" and {torn - len(names)} more" if torn > len(names) else ""
    return f"{', '.join(names)}{more} {'were' if torn > 1 else 'was'} {what}. {_CURE}"


class TornStorages:
    """The torn snapshots of one Saver. Any thread may call.

    The whole process shares the storages, so that another Saver need not find them again. The save after a torn one
    copies everything eagerly, so that it commits even if the writer writes again.
    """

    def __init__(self) -> None:
        self._snapshots = 0
        self._copy_all = False

    def add(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Notes that a snapshot was torn, since something wrote to ``storages``."""
        self._snapshots += 1
        self._copy_all = True
        for dead in [identity for identity, torn in list(_torn.items()) if torn.expired()]:
            _torn.pop(dead, None)
        _torn.update((storage._cdata, StorageWeakRef(storage)) for storage in storages)

    def facts(self) -> Any:
        """All that ``without`` depends on, without any tensor; None if it makes everything eager."""
        return None if self._copy_all or self._snapshots >= _MAX_TORN_SNAPSHOTS else frozenset(_torn)

    def without(self, owners: list[int], identities: Iterable[int]) -> list[int]:
        """Returns ``owners`` of the storages with these identities (``_cdata``), 0 for those that must be eager."""
        copy_all, self._copy_all = self._copy_all, False
        if copy_all or self._snapshots >= _MAX_TORN_SNAPSHOTS:
            return [0] * len(owners)
        if not _torn:
            return owners
        return [0 if identity in _torn else bits for identity, bits in zip(identities, owners, strict=True)]


def is_torn(identity: int) -> bool:
    """Whether the storage with this ``_cdata`` was torn before, in any Saver."""
    return identity in _torn


# By ``_cdata``, which no other storage gets while a weak reference to this one exists. There must be none to a tensor:
# torch.utils.swap_tensors refuses such a tensor.
_torn: dict[int, StorageWeakRef] = {}
