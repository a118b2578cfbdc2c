"""Decides what may be copied lazily, and finds out whether it stayed unchanged until it was.

A storage is copied lazily if a gated optimizer owns all of it (its parameters and its state), stepped since the last
save, is not inside a step, and has evidence for it (evidence.py). It must be larger than 4 KiB, or 16 KiB where the
kernel watches its pages. Everything else (buffers, which change in forward; scalars; RNG; the user's tensors) is copied
before ``save()`` returns. Frozen parameters become lazy once two snapshots in a row found them unchanged.

The engine finds writes to watched pages. For other memory the version counters tell (verdict.py).
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from array import array
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Future
from functools import reduce
from itertools import chain, compress, count, repeat
from operator import attrgetter, not_, or_
from typing import TYPE_CHECKING, Any

import torch

from lazyckpt import _engine
from lazyckpt.capture import devices
from lazyckpt.capture.gate import gate, is_of_torch
from lazyckpt.capture.ownership import Ownership, parameters_of
from lazyckpt.capture.torn import CURE, TornStorages, is_torn
from lazyckpt.capture.verdict import Verdict, wait_durable
from lazyckpt.metrics import CheckpointMetrics
from lazyckpt.providers.base import TensorView, TensorViews
from lazyckpt.providers.wrappers import Link, storages_in

if TYPE_CHECKING:
    from lazyckpt.capture.eager import Copied

LAZY_MIN_BYTES = 4096
WATCHED_MIN_BYTES = 16 << 10  # smaller ones lie in pages with others, and are copied sooner than watched
FROZEN_MIN_BYTES = 8192  # more than the state of any random number generator: without others no module is looked into
ALL_OWNERS = (1 << 64) - 1
_MAX_NAMES = 5  # of torn tensors in a message
_MOVED = "given other memory between save() and the copy"
_ASK_S = 0.2  # another thread for its verdict, before this one writes
_PATIENCE_AT_EXIT_S = 5.0  # with threads that Python does not wait for
_FROZEN = 1 << 63  # together with the bits of optimizers that have it in a group, although they do not train it


class FrozenParameters:
    """Parameters that nobody trains: lazy once two snapshots in a row had the same version and checksum."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int, int, int]] = {}  # key -> pointer, bytes, version, crc
        self._twice: set[str] = set()

    def is_lazy(self, view: TensorView, tensor: torch.Tensor) -> bool:
        seen = self._seen.get(view.key)
        here = (view.storage.data_ptr(), view.nbytes, tensor._version)
        return view.key in self._twice and seen is not None and seen[:3] == here

    def observe(self, view: TensorView, version: int, crc: int, was_lazy: bool) -> bool:
        """Notes what a snapshot found; False if a parameter that was copied lazily had changed."""
        here = (view.storage.data_ptr(), view.nbytes, version, crc)
        same = self._seen.get(view.key) == here
        self._seen[view.key] = here
        if same:
            self._twice.add(view.key)
        else:
            self._twice.discard(view.key)
        return same or not was_lazy


def frozen_parameters(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """The dense parameters of ``modules`` that nobody trains. ``Module.parameters()`` takes ten times as long to find
    them, since it makes their names, too."""
    found = []
    todo = list(modules)
    seen = set(todo)
    while todo:
        module = todo.pop()
        found += [p for p in module._parameters.values() if p is not None and not p.requires_grad]
        parts = {m for m in module._modules.values() if m is not None} - seen
        todo += parts
        seen |= parts
    return [p for p in found if p.layout is torch.strided]


class Snapshot:
    """The storages of one checkpoint from ``save()`` until they are copied. Implements ``gate.Pending``."""

    def __init__(
        self,
        files: list[TensorViews],
        ownership: Ownership,
        frozen: FrozenParameters,
        modules: Iterable[torch.nn.Module],
        *,
        any_order: list[bool],
        audit: bool,
        engine: _engine.Engine,
        watched: bool,
        torn: TornStorages,
        metrics: CheckpointMetrics,
        durable: Future[Any] | None,
        name_of: Callable[[TensorView], str],
    ) -> None:
        """``files``: the storages of each file, which may be laid out in another order where ``any_order``.
        ``watched``: the engine watches the pages of lazy host memory. ``metrics`` counts waits at the gate.
        ``durable``: if given, optimizer steps wait for it (before_step). ``name_of`` names a tensor in messages.

        Raises OSError if ``engine`` cannot use a device of theirs."""
        self.torn: str | None = None  # what changed, if something did
        self.job: _engine.Job | None = None  # while it is under way
        self.metrics = metrics
        self.durable = durable
        self.waited: Callable[[float], None] = _nothing  # told of every wait at the gate: when it began
        self.name_of = name_of
        self._owners = ownership.owners
        self._frozen = frozen
        self._torn_storages = torn
        self._frozen_views: list[tuple[int, TensorView, int, bool]] = []
        self.copied: Copied | None = None  # what is noted for eager.py
        self._owned: Container[int] = ownership.tensors  # storages of optimizers and of guarded objects, lazy or not
        self._lock = threading.RLock()
        self._verified = 0  # owners whose storages have been looked at after their copy
        # The storages of all files: those of the first, of the second, …
        identities = list(chain.from_iterable(file.identities for file in files))
        sizes = list(chain.from_iterable(file.sizes for file in files))
        where = list(chain.from_iterable(file.devices for file in files))
        storages = list(chain.from_iterable(file.storages for file in files))
        located = devices.locate(storages, where, engine)
        may_be_lazy = list(map(ownership.lazy_owners.get, identities, repeat(0)))
        # Whether some of it belongs to an optimizer that is at work.
        self.in_training = any(may_be_lazy)
        owners = [b if nbytes > LAZY_MIN_BYTES else 0 for b, nbytes in zip(may_be_lazy, sizes, strict=True)]
        frozen_at = self._classify_frozen(files, identities, sizes, owners, modules, ownership)
        owners = torn.without(owners, identities)
        if located is not None:  # a copy by torch is made now
            owners = [0 if device == devices.ELSEWHERE else bits for device, bits in zip(located, owners, strict=True)]
        if not watched:  # or another process may write; the witness refuses such memory by itself
            shared = (
                bits and d.type == "cpu" and s.is_shared() for bits, d, s in zip(owners, where, storages, strict=True)
            )
            owners = [0 if is_shared else bits for is_shared, bits in zip(shared, owners, strict=True)]
        if watched:
            on_host = repeat(True) if located is None else map(devices.HOST.__eq__, located)
            owners = [
                0 if host and nbytes <= WATCHED_MIN_BYTES else bits
                for host, nbytes, bits in zip(on_host, sizes, owners, strict=located is not None)
            ]
        order: list[int] = []
        self.files: list[TensorViews] = []
        for file, movable in zip(files, any_order, strict=True):
            first = len(order)
            here = list(range(first, first + len(file)))
            if movable:
                # Eager ones first, since save() waits for them; then the big ones: they keep the disk busy longest.
                by_size = sorted(here, key=sizes.__getitem__, reverse=True)
                here = [at for at in by_size if not owners[at]] + [at for at in by_size if owners[at]]
            order += here
            self.files.append(file.take([at - first for at in here]) if movable else file)
        self.owners = array("Q", map(owners.__getitem__, order))
        self.sizes = array("Q", map(sizes.__getitem__, order))
        self._storages = list(chain.from_iterable(file.storages for file in self.files))
        self._places: dict[int, int] | None = None  # of the storages, by _cdata, once somebody asks
        located = located and list(map(located.__getitem__, order))
        self.pointers, self.devices, self.streams, self._held, self._cuda = devices.sources(self._storages, located)
        self._identities = list(map(identities.__getitem__, order))
        self._tensors_of = ownership.tensors | {identities[at]: (tensor,) for at, tensor in frozen_at.items()}
        # What must not change until it is copied. The engine watches host memory, if it can; of the rest, the versions
        # of the tensors that view it tell.
        self._lazy = list(compress(count(), self.owners))
        unseen = self._lazy if not watched else [s for s in self._lazy if located and located[s] != devices.HOST]
        views = [self._tensors_of[self._identities[source]] for source in unseen]
        self._tensors: list[torch.Tensor] = list(chain.from_iterable(views))
        self._source_of: list[int] = list(chain.from_iterable(map(repeat, unseen, map(len, views))))
        # A write through a wrapper may move only the wrapper's version, a write to an inner tensor only that one's.
        links = ownership.links
        self._links: list[tuple[int, Link]] = (
            [(source, link) for source in unseen for link in links.get(self._identities[source], ())] if links else []
        )
        self._tensors += [link.wrapper for _, link in self._links]
        self._versions = _versions_of(self._tensors)
        for source, at in enumerate(order if frozen_at else ()):
            if at in frozen_at:
                self._frozen_views.append((source, _view_at(files, at), frozen_at[at]._version, owners[at] != 0))
        self._crcs = self._checksums() if audit else {}
        owed = self._lazy if self._crcs else unseen
        self.verdict = Verdict(reduce(or_, map(self.owners.__getitem__, owed), 0), self._tensors)

    def _classify_frozen(
        self,
        files: list[TensorViews],
        identities: list[int],
        sizes: list[int],
        owners: list[int],
        modules: Iterable[torch.nn.Module],
        ownership: Ownership,
    ) -> dict[int, torch.Tensor]:
        """Frozen parameters, by the place of their storage; enters those that may be lazy into ``owners``."""
        eager = [at for at, bits in enumerate(owners) if not bits and sizes[at] > FROZEN_MIN_BYTES]
        if not eager:
            return {}
        frozen: dict[int, torch.Tensor] = {}
        for storages in storages_in(frozen_parameters(modules)):
            here = zip(storages.identities, storages.tensors, strict=True)
            frozen.update((identity, tensor) for identity, tensor in here if not tensor.is_inference())
        for identity in ownership.guarded:  # these do not rest, although nobody trains them
            frozen.pop(identity, None)
        found = {at: frozen[identities[at]] for at in eager if identities[at] in frozen}
        for at, tensor in found.items():
            if self._frozen.is_lazy(_view_at(files, at), tensor):
                owners[at] = _FROZEN | ownership.frozen_owners.get(identities[at], 0)
        return found

    def _checksums(self) -> dict[int, int]:
        copies = {s: devices.on_host(self._storages[s]) for s in self._lazy}
        return {s: _engine.crc32_at(copy.data_ptr(), self.sizes[s]) for s, copy in copies.items()}

    # gate.Pending

    def wait(self, owner: object) -> None:
        # One that is new, was given other parameters since, or cannot be asked may own any of the storages by now.
        owners = ALL_OWNERS
        with contextlib.suppress(Exception):
            bit, parameters = self._owners.get(owner, (0, None))
            if parameters is not None and parameters == parameters_of(owner):
                owners = bit
        # What torch's optimizers do to a device they put into its current stream. Of others nobody knows.
        self._wait(owners, on_device=is_of_torch(owner))

    def wait_all(self) -> None:
        self._wait(ALL_OWNERS, on_device=False)

    def wait_for_storage(self, storage: torch.UntypedStorage) -> None:
        if self._places is None:
            self._places = {s._cdata: at for at, s in enumerate(self._storages)}
        at = self._places.get(storage._cdata)
        if at is not None and self.owners[at] and (job := self.job) is not None:
            job.wait_captured(self.owners[at])
            self.verify(self.owners[at])

    def is_held(self) -> bool:
        return self._lock._is_owned()  # type: ignore[attr-defined,no-any-return]

    def _wait(self, owners: int, *, on_device: bool) -> None:
        begin = time.perf_counter()
        if (job := self.job) is not None:
            if self._cuda and ((on_device and not self._crcs) or devices.capturing()):
                job.wait_enqueued(owners, devices.current_streams(self._cuda))
            else:
                job.wait_captured(owners)
            if owners == ALL_OWNERS:
                self.verify_soon()
            else:
                self.verify(owners)
        if self.durable is not None:
            with gate.standing():
                wait_durable(self.durable)
        self.metrics.gate_blocked_s += time.perf_counter() - begin
        self.waited(begin)

    # consistency

    def give_verdict(self) -> None:
        if (job := self.job) is not None and self.verdict.is_owed_by_this_thread() and job.wait_captured(ALL_OWNERS, 0):
            self.verify()

    def await_verdict(self) -> bool:
        """Returns True when no verdict is owed any more; on a thread of the background, after everything is copied.
        False if the process ends and the thread that owes it has not given it for long."""
        patient_until = None
        while self.torn is None and self.verdict.owed:
            self._ask_for_verdict()
            if not threading.main_thread().is_alive():
                patient_until = patient_until or time.monotonic() + _PATIENCE_AT_EXIT_S
                if time.monotonic() > patient_until and self.verdict.owed:
                    return False
        return True

    def verify_soon(self) -> None:
        """Like ``verify``, for whoever is about to write. If that is not the thread that owes the verdict, that one is
        asked for a moment: it may be writing. If it does not say, what is written now fails the checkpoint."""
        end = time.monotonic() + _ASK_S
        while self.torn is None and self.verdict.is_owed_by_another() and time.monotonic() < end:
            self._ask_for_verdict()
        if not self.verdict.is_owed_by_another():
            self.verify()

    def _ask_for_verdict(self) -> None:
        if not self.verdict.is_thread_alive():
            self.verify()  # all that it began has ended
        gate.if_standing(self.verdict.thread.ident, self.verify)
        versions = self.verdict.ask()
        if versions is not None:
            self.verify(versions=versions)

    def verify(self, owners: int = ALL_OWNERS, versions: list[int] | None = None) -> None:
        """Checks that what these owners protect did not change between ``save()`` and its copy; each storage once,
        after its copy and before its owner may step. Sets ``torn`` and fails the job otherwise.

        To be called where no write of this thread's is under way, or with the ``versions`` of such a moment."""
        with self._lock:
            todo = owners & ~self._verified
            if not todo or self.torn is not None or self.job is None:
                return
            changed = self._changed(todo, versions)
            if changed is not None:
                self._tear(*changed)
            self._verified |= owners  # last: Ctrl-C before this, and the next who waits looks again
            self.verdict.give(owners)

    def _tear(self, sources: list[int], what: str) -> None:
        assert self.job is not None
        names = [self._name_of(source) for source in sources[:_MAX_NAMES]]
        more = f" and {len(sources) - len(names)} more" if len(sources) > len(names) else ""
        verb = "were" if len(sources) > 1 else "was"
        self.torn = f"{', '.join(names)}{more} {verb} {what}. {CURE}"
        self.job.fail(errno.ECANCELED, self.torn)
        self._torn_storages.add(self._storages[source] for source in sources)

    def _name_of(self, source: int) -> str:
        view = _view_at(self.files, source)
        name = self.name_of(view)
        if name == _key_of(view):  # whoever viewed the storage at save() may have been given another one since
            for tensor in self._tensors_of.get(self._identities[source], ()):
                name = self.name_of(view._replace(storage=tensor.untyped_storage()))
        return name

    def _changed(self, owners: int, versions: list[int] | None) -> tuple[list[int], str] | None:
        """What changed of the storages of ``owners`` that no verified owner has."""
        assert self.job is not None
        todo = [s for s in self._lazy if self.owners[s] & owners and not self.owners[s] & self._verified]
        if moved := self._moved(todo):
            return moved, _MOVED
        if versions is None:
            versions = _versions_of(self._tensors)
        asked = set(todo) if len(todo) < len(self._lazy) else None
        written = [
            source
            for source, tensor, before, version in zip(
                self._source_of, self._tensors, self._versions, versions, strict=False
            )
            # One that was given another storage tells nothing of this one any more.
            if (version != before or tensor.untyped_storage()._cdata != self._identities[source])
            and (asked is None or source in asked)
        ]
        through = len(self._source_of)
        written += [
            source
            for (source, link), before, version in zip(
                self._links, self._versions[through:], versions[through:], strict=True
            )
            if (version != before or not link.holds()) and (asked is None or source in asked)
        ]
        if written:
            return list(dict.fromkeys(written)), "written to between save() and the next optimizer step"
        if not self._crcs:
            return None
        copied = self.job.source_crcs()
        if during := [s for s in todo if copied[s] != self._crcs[s]]:
            return during, "written to while it was being copied (found by audit)"
        now = self._checksums()
        if after := [s for s in todo if now[s] != self._crcs[s]]:
            return after, "written to between its copy and the next optimizer step (found by audit)"
        return None

    def _moved(self, sources: list[int]) -> list[int]:
        storages = [self._storages[source] for source in sources]
        now = zip(sources, map(devices.data_ptr, storages), storages, strict=True)
        return [
            source for source, p, storage in now if p != self.pointers[source] or storage.nbytes() != self.sizes[source]
        ]

    def verify_pages(self) -> None:
        """Asks the engine whether a page of host memory was written before it was copied; after all is copied."""
        assert self.job is not None
        written = self.job.torn()
        with self._lock:
            if written and self.torn is None:
                moved = self._moved(written)  # whoever has that memory now has written to it
                self._tear(*((moved, _MOVED) if moved else (written, "written to between save() and the copy")))

    def verify_frozen(self) -> None:
        """Compares frozen parameters with the snapshot before; after all is copied."""
        assert self.job is not None
        if not self._frozen_views:
            return
        crcs = self.job.source_crcs()
        for index, view, version, lazy in self._frozen_views:
            if not self._frozen.observe(view, version, crcs[index], lazy) and self.torn is None:
                self._tear([index], "frozen (requires_grad=False), but written to since the checkpoint before")

    # what is eager

    def unowned(self) -> dict[int, TensorView]:
        """What is eager since nobody owns it, by the number of its source."""
        unowned = compress(count(), map(not_, map(self._owned.__contains__, self._identities)))
        return {
            source: _view_at(self.files, source)
            for source in unowned
            if not self.owners[source] and self.sizes[source] > LAZY_MIN_BYTES and not is_torn(self._identities[source])
        }

    def note_copied(self) -> None:
        """For eager.py; after all is copied."""
        if self.copied is not None and self.job is not None:
            self.copied.fill_in(self, self.job)

    def release(self) -> None:
        """Lets go of every tensor."""
        with self._lock:
            self._verified = ALL_OWNERS
            self.verdict.give(ALL_OWNERS)
            self.name_of = _key_of
            self.files = []
            self._storages = []
            self._held = []
            self._tensors = []
            self._links = []
            self._tensors_of = {}
            self._owned = ()
            self._frozen_views = []


def _nothing(begin: float) -> None:
    pass


def _key_of(view: TensorView) -> str:
    return f"data/{view.key}"


def _view_at(files: Iterable[TensorViews], at: int) -> TensorView:
    """The one at this place among those of all files."""
    for file in files:
        if at < len(file):
            return file[at]
        at -= len(file)
    raise IndexError


def _versions_of(tensors: list[torch.Tensor]) -> list[int]:
    with torch._C.DisableTorchFunction():  # runs no code of subclasses; a mode would make it many times slower
        return list(map(_version, tensors))


_version = attrgetter("_version")
