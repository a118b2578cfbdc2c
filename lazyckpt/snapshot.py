"""What may be copied lazily, and whether it stayed unchanged until it was.

Lazy is earned, eager is the default. Lazy are storages of more than 4 KiB that a gated optimizer owns wholly: its
parameters and its state, if it was seen to step since the last save and is not inside a step. Everything else
(buffers, which change in forward; scalars; RNG; the user's tensors) is copied before ``save()`` returns.
Frozen parameters become lazy once two snapshots in a row found them unchanged.
"""

from __future__ import annotations

import errno
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lazyckpt import _engine
from lazyckpt.gate import Gate, Guarded
from lazyckpt.metrics import CheckpointMetrics
from lazyckpt.providers.base import TensorView

LAZY_MIN_BYTES = 4096
ALL_OWNERS = (1 << 64) - 1
_SHARED_BIT = 62  # owners beyond the 62nd share a bit: they wait for each other's storages, too
_FROZEN = 1 << 63  # owned by nobody: no step waits for it


@dataclass(slots=True)
class _Owned:
    """What optimizers say of one storage."""

    owners: int
    eligible: bool
    tensors: list[torch.Tensor]
    whole: bool  # one of the tensors fills the storage

    def is_lazy(self, nbytes: int) -> bool:
        if not self.eligible:
            return False
        parts = {t.data_ptr(): t.numel() * t.element_size() for t in self.tensors} if not self.whole else {}
        return self.whole or (sum(parts.values()) == nbytes and all(map(_is_dense, self.tensors)))


class Ownership:
    """Which optimizer owns which storage, at one instant."""

    def __init__(self, gate: Gate, steps_before: dict[int, int]) -> None:
        self.bits: dict[int, int] = {}  # id of owner -> its bit
        self.steps: dict[int, int] = {}
        self.storages: dict[int, _Owned] = {}
        inside_step = gate.inside_step()
        for number, (owner, steps) in enumerate(list(gate.steps.items())):
            bit = 1 << min(number, _SHARED_BIT)
            self.bits[id(owner)] = bit
            self.steps[id(owner)] = steps
            eligible = not inside_step and steps != steps_before.get(id(owner), 0)
            for tensor in _tensors_of(owner):
                self._add(tensor, bit, eligible)

    def _add(self, tensor: torch.Tensor, bit: int, eligible: bool) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # a tensor without a storage of its own
        nbytes = storage.nbytes()
        if nbytes <= LAZY_MIN_BYTES:
            return
        eligible = eligible and tensor.is_cpu and not tensor.is_inference()
        whole = tensor.numel() * tensor.element_size() == nbytes and _is_dense(tensor)
        owned = self.storages.get(storage._cdata)
        if owned is None:
            self.storages[storage._cdata] = _Owned(bit, eligible, [tensor], whole)
        else:
            owned.owners |= bit
            owned.eligible = owned.eligible and eligible
            owned.tensors.append(tensor)
            owned.whole = owned.whole or whole


class FrozenParameters:
    """Parameters that nobody trains: lazy once two snapshots in a row had the same version and checksum."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int, int, int]] = {}  # key -> pointer, bytes, version, crc
        self._twice: set[str] = set()
        self._eager_for_good: set[str] = set()

    def is_lazy(self, view: TensorView, tensor: torch.Tensor) -> bool:
        seen = self._seen.get(view.key)
        here = (view.storage.data_ptr(), view.nbytes, tensor._version)
        return (
            view.key in self._twice and view.key not in self._eager_for_good and seen is not None and seen[:3] == here
        )

    def observe(self, view: TensorView, version: int, crc: int, was_lazy: bool) -> bool:
        """Notes what a snapshot found; False if a parameter that was copied lazily had changed."""
        here = (view.storage.data_ptr(), view.nbytes, version, crc)
        same = self._seen.get(view.key) == here
        self._seen[view.key] = here
        if same:
            self._twice.add(view.key)
        elif was_lazy:
            self._eager_for_good.add(view.key)
        else:
            self._twice.discard(view.key)
        return same or not was_lazy


class _Watched(NamedTuple):
    """A lazy storage: what must not change until it is copied."""

    source: int  # its index
    view: TensorView
    pointer: int
    owners: int
    tensors: list[torch.Tensor]
    versions: list[int]
    crc: int | None  # audit: at save()


class Snapshot:
    """The storages of one checkpoint from ``save()`` until they are copied. Implements :class:`gate.Pending`."""

    def __init__(
        self,
        views: list[TensorView],
        ownership: Ownership,
        frozen: FrozenParameters,
        frozen_parameters: Iterable[torch.Tensor],
        *,
        audit: bool,
    ) -> None:
        self.torn: str | None = None  # what changed, if something did
        self.job: _engine.Job | None = None
        self.metrics = CheckpointMetrics()
        self.durable: Future[Any] | None = None  # set if steps wait for it (before_step)
        self.name_of: Callable[[TensorView], str] = lambda view: f"data/{view.key}"
        self._bits = ownership.bits
        self._audit = audit
        self._frozen = frozen
        self._frozen_views: list[tuple[int, TensorView, int, bool]] = []
        self._watched: list[_Watched] = []
        self._verified = 0  # owners whose storages were found unchanged, or not
        self._lock = threading.Lock()
        self._staged: list[torch.UntypedStorage] = []
        frozen_by_storage = {t.untyped_storage()._cdata: t for t in frozen_parameters}
        classified = [(*self._classify(view, ownership, frozen_by_storage), view) for view in views]
        # Eager ones first, since save() waits for them; then the big ones, since they keep the disk busy longest.
        classified.sort(key=lambda c: (c[0] != 0, -c[2].nbytes))
        self.views = [view for _, _, view in classified]
        self.owners = array("Q", [owners for owners, _, _ in classified])
        self.sizes = array("Q", [view.nbytes for view in self.views])
        self.pointers = array("Q")
        for index, (owners, tensors, view) in enumerate(classified):
            pointer = view.storage.data_ptr() if owners else self._host_pointer(view)
            self.pointers.append(pointer)
            if not tensors:
                continue
            if owners in (0, _FROZEN):
                self._frozen_views.append((index, view, tensors[0]._version, owners != 0))
            if owners:
                crc = _engine.crc32_at(pointer, view.nbytes) if audit else None
                versions = [t._version for t in tensors]
                self._watched.append(_Watched(index, view, pointer, owners, tensors, versions, crc))

    def _classify(
        self, view: TensorView, ownership: Ownership, frozen: dict[int, torch.Tensor]
    ) -> tuple[int, list[torch.Tensor]]:
        """The owners of a storage (0: eager) and the tensors whose versions tell of its changes."""
        identity = view.storage._cdata
        if (owned := ownership.storages.get(identity)) is not None and owned.is_lazy(view.nbytes):
            return owned.owners, owned.tensors
        tensor = frozen.get(identity) if frozen else None
        if tensor is None or tensor.is_inference() or not tensor.is_cpu or view.nbytes <= LAZY_MIN_BYTES:
            return 0, []
        return (_FROZEN if self._frozen.is_lazy(view, tensor) else 0), [tensor]

    def _host_pointer(self, view: TensorView) -> int:
        if view.storage.device.type == "cpu":
            return view.storage.data_ptr()
        # Until the engine copies from devices itself: a copy by torch, ordered after the current stream.
        self._staged.append(view.storage.cpu())
        return self._staged[-1].data_ptr()

    # gate.Pending

    def concerns(self, owner: object) -> bool:
        return self.durable is not None or id(owner) in self._bits

    def wait(self, owner: object) -> None:
        self._wait(self._bits.get(id(owner), 0))

    def wait_all(self) -> None:
        self._wait(ALL_OWNERS)

    def _wait(self, owners: int) -> None:
        assert self.job is not None
        begin = time.perf_counter()
        self.job.wait_captured(owners)
        self.verify(owners)
        if self.durable is not None:
            wait([self.durable])
        self.metrics.gate_blocked_s += time.perf_counter() - begin

    # consistency

    def verify(self, owners: int = ALL_OWNERS) -> None:
        """Checks that what these owners protect did not change between ``save()`` and its copy; each storage once,
        after its copy and before its owner may step. Sets :attr:`torn` and fails the job otherwise."""
        assert self.job is not None
        with self._lock:
            todo = [w for w in self._watched if w.owners & owners and not w.owners & self._verified]
            self._verified |= owners
            crcs = self.job.source_crcs() if self._audit and todo else []
            for watched in todo:
                if self.torn is None and (problem := self._changed(watched, crcs)) is not None:
                    self.torn = f"{self.name_of(watched.view)} {problem}"
                    self.job.fail(errno.ECANCELED, self.torn)

    def _changed(self, watched: _Watched, crcs: list[int]) -> str | None:
        storage = watched.view.storage
        if storage.data_ptr() != watched.pointer or storage.nbytes() != watched.view.nbytes:
            return "was given other memory between save() and its copy"
        if [tensor._version for tensor in watched.tensors] != watched.versions:
            return "was written to between save() and the next optimizer step"
        if watched.crc is not None and crcs[watched.source] != watched.crc:
            return "was written to while it was being copied (found by audit)"
        if watched.crc is not None and _engine.crc32_at(watched.pointer, watched.view.nbytes) != watched.crc:
            return "was written to between its copy and the next optimizer step (found by audit)"
        return None

    def verify_frozen(self) -> None:
        """Compares frozen parameters with the snapshot before; after all is copied."""
        assert self.job is not None
        if not self._frozen_views:
            return
        crcs = self.job.source_crcs()
        for index, view, version, lazy in self._frozen_views:
            if not self._frozen.observe(view, version, crcs[index], lazy) and self.torn is None:
                self.torn = f"{self.name_of(view)} is frozen, but was written to since the checkpoint before"

    def release(self) -> None:
        """Lets go of every tensor."""
        self.views = []
        self._staged = []
        with self._lock:
            self._watched = []
            self._frozen_views = []


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill numel x itemsize bytes of memory without overlap."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _tensors_of(owner: Any) -> Iterator[torch.Tensor]:
    if isinstance(owner, Guarded):
        obj = owner.obj
        yield from obj.parameters() if isinstance(obj, torch.nn.Module) else _tensors_in(obj.state_dict())
        return
    for group in owner.param_groups:
        yield from group["params"]
    yield from _tensors_in(list(owner.state.values()))


def _tensors_in(obj: Any) -> Iterator[torch.Tensor]:
    if isinstance(obj, torch.Tensor):
        yield obj
    elif isinstance(obj, dict):
        for value in obj.values():
            yield from _tensors_in(value)
    elif isinstance(obj, list | tuple):
        for value in obj:
            yield from _tensors_in(value)
