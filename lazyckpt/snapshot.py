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
import weakref
from array import array
from collections.abc import Iterable
from concurrent.futures import Future, wait
from itertools import accumulate, chain, repeat
from operator import and_, attrgetter, eq, gt
from typing import Any

import torch

from lazyckpt import _engine
from lazyckpt.gate import Gate, Guarded
from lazyckpt.metrics import CheckpointMetrics
from lazyckpt.providers.base import TensorView

LAZY_MIN_BYTES = 4096
ALL_OWNERS = (1 << 64) - 1
_SHARED_BIT = 62  # owners beyond the 62nd share a bit: they wait for each other's storages, too
_HUGE = 1 << 62  # more bytes than a storage has
_FROZEN = 1 << 63  # owned by nobody: no step waits for it


# What optimizers say of one storage: the bits of those that own it, whether they are gated and it is on the host,
# their tensors, and whether a contiguous one fills it. A plain tuple: there are tens of thousands.
_Claim = tuple[int, bool, tuple[torch.Tensor, ...], bool]


def _join(a: _Claim, b: _Claim) -> _Claim:
    return a[0] | b[0], a[1] and b[1], (*a[2], *b[2]), a[3] or b[3]


def _lazy_owners(claim: _Claim | None, nbytes: int) -> int:
    """The owners that a storage waits for; 0: it is eager."""
    if claim is None or nbytes <= LAZY_MIN_BYTES:
        return 0
    owners, eligible, tensors, whole = claim
    return owners if eligible and (whole or _fill(tensors, nbytes)) else 0


def _fill(tensors: Iterable[torch.Tensor], nbytes: int) -> bool:
    """Whether they fill a storage together: views of a flat buffer, or one in another order of dimensions."""
    parts = {t.data_ptr(): t.nbytes for t in tensors}
    return sum(parts.values()) == nbytes and all(map(_is_dense, tensors))


class Ownership:
    """Which optimizer owns which storage, at one instant."""

    def __init__(self, gate: Gate, steps_before: dict[int, int]) -> None:
        # The bit of each owner, and the parameters it had. Weakly held: an optimizer may die while its storages wait.
        self.owners: weakref.WeakKeyDictionary[Any, tuple[int, list[int]]] = weakref.WeakKeyDictionary()
        self.steps: dict[int, int] = {}
        self.claims: dict[int, _Claim] = {}
        inside_step = gate.inside_step()
        for number, (owner, steps) in enumerate(list(gate.steps.items())):
            bit = 1 << min(number, _SHARED_BIT)
            self.owners[owner] = bit, _parameters_of(owner)
            self.steps[id(owner)] = steps
            self._add(owner, bit, not inside_step and steps != steps_before.get(id(owner), 0))

    def _add(self, owner: Any, bit: int, gated: bool) -> None:
        tensors, storages = _storages_of(owner)
        # Asked of all tensors at once, without a bytecode per tensor.
        identities = list(map(attrgetter("_cdata"), storages))
        fills = map(eq, map(attrgetter("nbytes"), tensors), map(torch.UntypedStorage.nbytes, storages))
        whole = map(and_, fills, map(torch.Tensor.is_contiguous, tensors))
        on_host = map(attrgetter("is_cpu"), tensors)
        eligible = map(gt, on_host, map(torch.Tensor.is_inference, tensors)) if gated else repeat(False)
        new: list[_Claim] = list(zip(repeat(bit), eligible, zip(tensors, strict=True), whole, strict=False))
        by_identity = dict(zip(identities, new, strict=True))
        claims = self.claims
        if len(by_identity) == len(new) and claims.keys().isdisjoint(by_identity):
            claims.update(by_identity)
            return
        for identity, claim in zip(identities, new, strict=True):
            before = claims.get(identity)
            claims[identity] = claim if before is None else _join(before, claim)


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


class Snapshot:
    """The storages of one checkpoint from ``save()`` until they are copied. Implements :class:`gate.Pending`."""

    def __init__(
        self,
        files: list[list[TensorView]],
        ownership: Ownership,
        frozen: FrozenParameters,
        frozen_parameters: Iterable[torch.Tensor],
        *,
        any_order: list[bool],
        audit: bool,
    ) -> None:
        """``files``: the storages of each file, which may be laid out in another order where ``any_order``."""
        self.torn: str | None = None  # what changed, if something did
        self.job: _engine.Job | None = None  # while it is under way
        self.metrics = CheckpointMetrics()
        self.durable: Future[Any] | None = None  # set if steps wait for it (before_step)
        self.name_of = _key_of
        self._owners = ownership.owners
        self._audit = audit
        self._frozen = frozen
        self._frozen_views: list[tuple[int, TensorView, int, bool]] = []
        self._lock = threading.Lock()
        self._verified = 0  # owners whose storages have been looked at after their copy
        self._staged: list[torch.UntypedStorage] = []
        views = list(chain.from_iterable(files))
        _, storages, sizes, _ = zip(*views, strict=True) if views else ((), (), (), ())
        identities = list(map(attrgetter("_cdata"), storages))
        claims = list(map(ownership.claims.get, identities))
        owners = list(map(_lazy_owners, claims, sizes))
        frozen_at = self._classify_frozen(views, identities, owners, frozen_parameters)
        # Eager ones first, since save() waits for them; then the big ones, since they keep the disk busy longest.
        rank = [nbytes - (_HUGE if bits else 0) for bits, nbytes in zip(owners, sizes, strict=True)]
        order: list[int] = []
        for file, movable in zip(files, any_order, strict=True):
            here = range(len(order), len(order) + len(file))
            order += sorted(here, key=rank.__getitem__, reverse=True) if movable else here
        self.views = [views[at] for at in order]
        ends = list(accumulate(map(len, files)))
        self.files = [self.views[end - len(file) : end] for file, end in zip(files, ends, strict=True)]
        self.owners = array("Q", [owners[at] for at in order])
        self.sizes = array("Q", [sizes[at] for at in order])
        self.pointers = array("Q", self._host_pointers([storages[at] for at in order]))
        # What must not change until it is copied: the versions of the tensors that view a lazy storage.
        for at, tensor in frozen_at.items():
            claims[at] = (owners[at], True, (tensor,), True)
        lazy = [source for source, bits in enumerate(self.owners) if bits]
        watched = [claim[2] for source in lazy if (claim := claims[order[source]]) is not None]
        self._tensors: list[torch.Tensor] = list(chain.from_iterable(watched))
        self._source_of: list[int] = [s for s, tensors in zip(lazy, watched, strict=True) for _ in tensors]
        self._versions = list(map(_version, self._tensors))
        for source, at in enumerate(order if frozen_at else ()):
            if at in frozen_at:
                self._frozen_views.append((source, views[at], frozen_at[at]._version, owners[at] != 0))
        self._crcs = self._checksums() if audit else {}

    def _classify_frozen(
        self,
        views: list[TensorView],
        identities: list[int],
        owners: list[int],
        parameters: Iterable[torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """The views of frozen parameters; enters those that may be lazy into ``owners``."""
        frozen = {t.untyped_storage()._cdata: t for t in parameters if t.is_cpu and not t.is_inference()}
        found = {}
        for at, identity in enumerate(identities if frozen else ()):
            tensor = frozen.get(identity)
            if tensor is None or owners[at] or views[at].nbytes <= LAZY_MIN_BYTES:
                continue
            found[at] = tensor
            if self._frozen.is_lazy(views[at], tensor):
                owners[at] = _FROZEN
        return found

    def _host_pointers(self, storages: list[torch.UntypedStorage]) -> list[int]:
        # Until the engine copies from devices itself: a copy by torch, ordered after the current stream.
        on_host = storages
        if any(device.type != "cpu" for device in set(map(attrgetter("device"), storages))):
            on_host = [s if s.device.type == "cpu" else s.cpu() for s in storages]
        self._staged = on_host
        return list(map(torch.UntypedStorage.data_ptr, on_host))

    def _checksums(self) -> dict[int, int]:
        return {s: _engine.crc32_at(self.pointers[s], self.sizes[s]) for s in set(self._source_of)}

    # gate.Pending

    def wait(self, owner: object) -> None:
        bit, parameters = self._owners.get(owner, (0, None))
        # One that is new, or was given other parameters since, may own any of the storages by now.
        self._wait(bit if parameters == _parameters_of(owner) else ALL_OWNERS)

    def wait_all(self) -> None:
        self._wait(ALL_OWNERS)

    def _wait(self, owners: int) -> None:
        begin = time.perf_counter()
        if (job := self.job) is not None:
            job.wait_captured(owners)
            self.verify(owners)
        if self.durable is not None:
            wait([self.durable])
        self.metrics.gate_blocked_s += time.perf_counter() - begin

    # consistency

    def verify(self, owners: int = ALL_OWNERS) -> None:
        """Checks that what these owners protect did not change between ``save()`` and its copy; each storage once,
        after its copy and before its owner may step. Sets :attr:`torn` and fails the job otherwise."""
        with self._lock:
            todo = owners & ~self._verified
            self._verified |= owners
            if not todo or self.torn is not None or self.job is None:
                return
            problem = self._changed(todo, self._verified & ~todo)
            if problem is not None:
                self.torn = problem
                self.job.fail(errno.ECANCELED, problem)

    def _changed(self, owners: int, verified: int) -> str | None:
        """What changed of the storages of ``owners`` that no owner in ``verified`` has been asked about."""
        assert self.job is not None
        versions = list(map(_version, self._tensors))
        pointers = list(map(torch.UntypedStorage.data_ptr, map(attrgetter("storage"), self.views)))
        copied = self.job.source_crcs() if self._crcs else []
        now = self._checksums() if self._crcs else {}
        for source, before, version in zip(self._source_of, self._versions, versions, strict=True):
            protects = self.owners[source]
            if not protects & owners or protects & verified:
                continue
            view = self.views[source]
            if pointers[source] != self.pointers[source] or view.storage.nbytes() != view.nbytes:
                what = "was given other memory between save() and its copy"
            elif version != before:
                what = "was written to between save() and the next optimizer step"
            elif self._crcs and copied[source] != self._crcs[source]:
                what = "was written to while it was being copied (found by audit)"
            elif self._crcs and now[source] != self._crcs[source]:
                what = "was written to between its copy and the next optimizer step (found by audit)"
            else:
                continue
            return f"{self.name_of(view)} {what}"
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
        with self._lock:
            self._verified = ALL_OWNERS
            self.name_of = _key_of
            self.views = []
            self.files = []
            self._staged = []
            self._tensors = []
            self._frozen_views = []


def _key_of(view: TensorView) -> str:
    return f"data/{view.key}"


_version = attrgetter("_version")


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


def _parameters_of(owner: Any) -> list[int]:
    """Which tensors an owner is for, by identity; they are alive as long as it is."""
    if isinstance(owner, Guarded):
        return [id(owner.obj)]
    return [id(parameter) for group in owner.param_groups for parameter in group["params"]]


def _storages_of(owner: Any) -> tuple[list[torch.Tensor], list[torch.UntypedStorage]]:
    """The tensors that an optimizer or a guarded object owns, and the storage of each."""
    tensors: list[torch.Tensor] = []
    if isinstance(owner, Guarded):
        obj = owner.obj
        _collect(list(obj.parameters()) if isinstance(obj, torch.nn.Module) else obj.state_dict(), tensors)
    else:
        _collect([group["params"] for group in owner.param_groups], tensors)
        _collect(owner.state, tensors)
    try:
        return tensors, list(map(torch.Tensor.untyped_storage, tensors))
    except (NotImplementedError, RuntimeError):  # some have no storage of their own: wrapper subclasses, sparse
        tensors = [t for t in tensors if type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout is torch.strided]
        return tensors, list(map(torch.Tensor.untyped_storage, tensors))


def _collect(obj: Any, tensors: list[torch.Tensor]) -> None:
    values = obj.values() if isinstance(obj, dict) else obj
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, dict | list | tuple):
            _collect(value, tensors)
