"""The storages of one checkpoint from ``save()`` until they are copied, and the proof that they did not change.

laziness.py decides which of them are lazy. The engine finds writes to watched pages, version counters
those to other memory (verdict.py).
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from array import array
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cached_property, reduce
from itertools import chain, compress, count, islice, repeat
from operator import not_, or_
from typing import TYPE_CHECKING

import torch

from lazyckpt import _engine, devices, waits
from lazyckpt.capture.frozen import FrozenParameters
from lazyckpt.capture.laziness import LAZY_MIN_BYTES, decide
from lazyckpt.capture.ownership import Ownership, parameters_of
from lazyckpt.capture.torn import MAX_NAMES, TornStorages, is_torn, told
from lazyckpt.capture.verdict import Verdict
from lazyckpt.capture.versions import versions_of
from lazyckpt.formats import torch_zip
from lazyckpt.gate.foreign import is_torch_class
from lazyckpt.gate.gate import gate
from lazyckpt.gate.standing import inside_operation
from lazyckpt.metrics import CheckpointMetrics
from lazyckpt.providers.base import TensorView, TensorViews
from lazyckpt.providers.wrappers import Link

if TYPE_CHECKING:
    from lazyckpt.capture.eager import Copied

ALL_OWNERS = (1 << 64) - 1
_MOVED = "given other memory between save() and the copy"


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
        durable: Callable[[], None] | None,
        name_of: Callable[[TensorView], str],
    ) -> None:
        """``files``: the storages of each file; the snapshot may put them into another order where ``any_order``.
        ``watched``: the engine watches the pages of lazy host memory. ``metrics`` counts waits at the gate. ``durable``
        waits until the checkpoint is durable; if given, optimizer steps call it (before_step). ``name_of`` names a
        tensor in messages.

        Raises OSError if ``engine`` cannot use a device of theirs."""
        self.torn: str | None = None  # what changed, if something did
        self.job: _engine.Job | None = None  # while it is under way
        self.eager_copied = False  # until then a step inside save(), in a signal handler, waits for eager bytes, too
        self.metrics = metrics
        self.durable = durable
        self.waited: Callable[[float], None] | None = None  # told of every wait at the gate: when it began
        self.name_of = name_of
        self.copied: Copied | None = None  # for eager.py
        self._owners = ownership.owners
        self._frozen = frozen
        self._torn_storages = torn
        self._frozen_views: list[tuple[int, TensorView, int, bool]] = []
        self._owned: Container[int] = ownership.tensors  # storages of optimizers and of guarded objects, lazy or not
        self._lock = threading.RLock()
        self._verified = 0  # owners whose storages were checked after their copy
        views = TensorViews.joined(files)
        located = devices.locate(views.storages, views.devices, engine)
        decided = decide(views, located, ownership, frozen, modules, torn, watched=watched)
        owners, frozen_at, self.in_training = decided
        order: list[int] = []
        self.files: list[TensorViews] = []
        for file, movable in zip(files, any_order, strict=True):
            here: Sequence[int] = range(len(file))
            if movable:
                here = torch_zip.file_order(file.sizes, list(map(self._owned.__contains__, file.identities)))
            first = len(order)
            order += [first + at for at in here]
            self.files.append(file.take(here) if movable else file)
        self._views = TensorViews.joined(self.files)
        self.owners = array("Q", map(owners.__getitem__, order))
        self.sizes = array("Q", self._views.sizes)
        self._storages = self._views.storages
        located = located and list(map(located.__getitem__, order))
        self.pointers, self.devices, self.streams, self._held, self._cuda = devices.sources(self._storages, located)
        self._identities = self._views.identities
        self._whole_sizes = array("Q", map(torch.UntypedStorage.nbytes, self._storages))
        self._tensors_of = ownership.tensors | {views.identities[at]: (tensor,) for at, tensor in frozen_at.items()}
        # These must not change until they are copied. The engine watches host memory, if it can. For the rest, the
        # versions of the tensors that view it tell.
        self._lazy = list(compress(count(), self.owners))
        unseen = self._lazy if not watched else [s for s in self._lazy if located and located[s] != devices.HOST]
        seen_through = [self._tensors_of[self._identities[source]] for source in unseen]
        self._tensors: list[torch.Tensor] = list(chain.from_iterable(seen_through))
        self._source_of: list[int] = list(chain.from_iterable(map(repeat, unseen, map(len, seen_through))))
        # A write through a wrapper may move only the wrapper's version, a write to an inner tensor only that one's.
        wrapped = unseen if ownership.links else ()
        links = [(source, link) for source in wrapped for link in ownership.links.get(self._identities[source], ())]
        self._links: list[Link] = [link for _, link in links]
        self._source_of += [source for source, _ in links]
        self._tensors += [link.wrapper for link in self._links]
        self._versions = versions_of(self._tensors)
        for source, at in enumerate(order if frozen_at else ()):
            if at in frozen_at:
                self._frozen_views.append((source, views[at], frozen_at[at]._version, owners[at] != 0))
        self._crcs = self._checksums() if audit else {}
        owed = self._lazy if self._crcs else unseen
        self.verdict = Verdict(reduce(or_, map(self.owners.__getitem__, owed), 0), self._tensors)

    def _checksums(self) -> dict[int, int]:
        copies = {s: devices.on_host(self._storages[s]) for s in self._lazy}
        return {s: _engine.crc32_at(copy.data_ptr(), self.sizes[s]) for s, copy in copies.items()}

    # gate.Pending

    def wait(self, owner: object) -> None:
        # A new owner, one with other parameters than at save(), and one that raises may own any of the storages now.
        owners = ALL_OWNERS
        with contextlib.suppress(Exception):
            bit, parameters = self._owners.get(owner, (0, None))
            if parameters is not None and parameters == parameters_of(owner):
                owners = bit
        # torch's optimizers write in the device's current stream. Other optimizers may use any stream.
        self._wait(owners, on_device=is_torch_class(type(owner)))

    def wait_all(self) -> None:
        self._wait(ALL_OWNERS, on_device=False)

    def wait_for_storage(self, storage: torch.UntypedStorage) -> None:
        if (job := self.job) is not None and (owners := self._owners_by_identity.get(storage._cdata)) is not None:
            job.wait_captured(owners)
            self.verify(owners)

    @cached_property
    def _owners_by_identity(self) -> dict[int, int]:
        """For ``wait_for_storage``: there may be as many calls as storages. Several files may hold one."""
        owners: dict[int, int] = {}
        for identity, bits in zip(self._identities, self.owners, strict=True):
            owners[identity] = owners.get(identity, 0) | bits
        return owners

    def is_held(self) -> bool:
        return self._lock._is_owned()  # type: ignore[attr-defined,no-any-return]

    def _wait(self, owners: int, *, on_device: bool) -> None:
        begin = time.perf_counter()
        if (job := self.job) is not None:
            if not self.eager_copied:
                job.wait_eager()
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
                self.durable()
        self.metrics.gate_blocked_s += time.perf_counter() - begin
        if self.waited is not None:
            self.waited(begin)

    # consistency

    def give_verdict(self) -> None:
        owed = self.verdict.owed and not self.verdict.is_owed_by_another()
        if owed and (job := self.job) is not None and job.wait_captured(ALL_OWNERS, 0):
            self.verify()

    def await_verdict(self) -> bool:
        """Waits until no verdict is owed; on a background thread, after everything is copied.

        Returns False if the process ends before the thread that owes the verdict has given it."""
        patient_until = None
        while self.torn is None and self.verdict.owed:
            self._ask_for_verdict()
            if not threading.main_thread().is_alive():
                patient_until = patient_until or time.monotonic() + waits.VERDICT_AT_EXIT_S
                if time.monotonic() > patient_until and self.verdict.owed:
                    return False
        return True

    def verify_soon(self) -> None:
        """Verifies, for a caller that is about to write.

        If another thread owes the verdict, asks it for a moment: it may be writing itself. If that thread does not
        answer, the caller's write will fail the checkpoint."""
        end = time.monotonic() + waits.VERDICT_BEFORE_WRITE_S
        while self.torn is None and self.verdict.is_owed_by_another() and time.monotonic() < end:
            self._ask_for_verdict()
        if not self.verdict.is_owed_by_another():
            self.verify()

    def _ask_for_verdict(self) -> None:
        if not self.verdict.is_thread_alive():
            self.verify()  # the thread has ended, so it writes no more
        gate.standing.judge(self.verdict.thread.ident, self.verify)
        if (waiting := gate.standing.waits_for_future(self.verdict.thread.ident)) is not None:
            found = versions_of(self._tensors)
            if gate.standing.waits_for_future(self.verdict.thread.ident) == waiting:  # nothing was written in between
                self.verify(versions=found)
        versions = self.verdict.ask()
        if versions is not None:
            self.verify(versions=versions)

    def verify(self, owners: int = ALL_OWNERS, versions: list[int] | None = None) -> None:
        """Checks that the storages of these owners did not change between ``save()`` and their copy.

        Checks each storage once, after its copy and before its owner may step. If one changed, sets ``torn`` and fails
        the job. Call it where this thread writes nothing, or with the ``versions`` of such a moment. Inside an
        operation of torch, it leaves storages that only versions protect to a later call."""
        if versions is None and self._tensors and inside_operation():
            return
        with self._lock:
            todo = owners & ~self._verified
            if not todo or self.torn is not None or self.job is None:
                return
            changed = self._changed(todo, versions)
            if changed is not None:
                self._tear(*changed)
            self._verified |= owners  # last: after Ctrl-C before this, the next waiter checks again
            self.verdict.give(owners)

    def _tear(self, sources: list[int], what: str) -> None:
        assert self.job is not None
        self.torn = told(list(map(self._name_of, sources[:MAX_NAMES])), len(sources), what)
        self.job.fail(errno.ECANCELED, self.torn)
        self._torn_storages.add(self._storages[source] for source in sources)

    def _name_of(self, source: int) -> str:
        view = self._views[source]
        name = self.name_of(view)
        if name == _key_of(view):  # the tensors that viewed the storage at save() may have other storages now
            for tensor in self._tensors_of.get(self._identities[source], ()):
                name = self.name_of(view._replace(storage=tensor.untyped_storage()))
        return name

    def _changed(self, owners: int, versions: list[int] | None) -> tuple[list[int], str] | None:
        """The changed storages of ``owners``, less those of verified owners, and how they changed."""
        assert self.job is not None
        todo = [s for s in self._lazy if self.owners[s] & owners and not self.owners[s] & self._verified]
        if moved := self._moved(todo):
            return moved, _MOVED
        if versions is None:
            versions = versions_of(self._tensors)
        asked = set(todo)
        seen_through = zip(self._source_of, self._tensors, self._versions, versions, strict=True)
        direct = islice(seen_through, len(self._tensors) - len(self._links))  # the others are wrappers
        written = [
            source
            for source, tensor, before, version in direct
            # A tensor with another storage by this time proves nothing about this one.
            if (version != before or tensor.untyped_storage()._cdata != self._identities[source]) and source in asked
        ]
        written += [
            source
            for (source, _, before, version), link in zip(seen_through, self._links, strict=True)
            if (version != before or not link.holds()) and source in asked
        ]
        if written:
            return list(dict.fromkeys(written)), "written to between save() and the next optimizer step"
        if not self._crcs:
            return None
        copied = self.job.source_crcs()
        todo = [s for s in todo if s in self._crcs]
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
            source
            for source, p, storage in now
            if p != self.pointers[source] or storage.nbytes() != self._whole_sizes[source]
        ]

    def verify_pages(self) -> None:
        """Checks, after everything is copied, that no page of host memory was written before its copy."""
        assert self.job is not None
        written = self.job.torn()
        with self._lock:
            if written and self.torn is None:
                moved = self._moved(
                    written
                )  # the storage has other memory, and the present user of the old memory has written to it
                self._tear(*((moved, _MOVED) if moved else (written, "written to between save() and the copy")))

    def verify_eager(self, moved: Iterable[torch.Tensor]) -> None:
        """Notes that these tensors were written to while ``save()`` waited for room for eager bytes."""
        identities = {tensor.untyped_storage()._cdata for tensor in moved}
        with self._lock:
            eager = [s for s, at in enumerate(self._identities) if at in identities and not self.owners[s]]
            if eager and self.torn is None:
                self._tear(eager, "written to inside save(), before it was copied")

    def verify_frozen(self) -> None:
        """Compares frozen parameters with the snapshot before, after everything is copied."""
        assert self.job is not None
        if not self._frozen_views:
            return
        crcs = self.job.source_crcs()
        for index, view, version, lazy in self._frozen_views:
            if not self._frozen.observe(view, version, crcs[index], lazy) and self.torn is None:
                self._tear([index], "frozen (requires_grad=False), but written to since the checkpoint before")

    # eager storages

    def unowned(self) -> dict[int, TensorView]:
        """The storages that are eager because they have no owner, by source."""
        unowned = compress(count(), map(not_, map(self._owned.__contains__, self._identities)))
        return {
            source: self._views[source]
            for source in unowned
            if not self.owners[source] and self.sizes[source] > LAZY_MIN_BYTES and not is_torn(self._identities[source])
        }

    def note_copied(self) -> None:
        """Notes the eager storages for eager.py, after everything is copied."""
        if self.copied is not None and self.job is not None:
            self.copied.fill_in(self, self.job)

    def release(self) -> None:
        """Drops its references to all tensors."""
        with self._lock:
            self._verified = ALL_OWNERS
            self.verdict.give(ALL_OWNERS)
            self.name_of = _key_of
            self._views = TensorViews()
            self.files, self._storages, self._held, self._tensors, self._links = [], [], [], [], []
            self._tensors_of, self._owned, self._frozen_views = {}, (), []


def _key_of(view: TensorView) -> str:
    return f"data/{view.key}"
