"""The storages of one checkpoint from ``save()`` until they are copied, and the proof that they did not change.

sources.py says which of them are lazy. The engine finds writes to watched pages, version counters those to other memory
(verdict.py).
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, reduce
from operator import or_

import torch

from lazyckpt import _engine, devices, waits
from lazyckpt.capture.frozen import FrozenParameters
from lazyckpt.capture.owners import parameters_of
from lazyckpt.capture.sources import Sources
from lazyckpt.capture.torn import MAX_NAMES, TornStorages, told
from lazyckpt.capture.verdict import Verdict
from lazyckpt.capture.versions import versions_of
from lazyckpt.gate.foreign import is_torch_class
from lazyckpt.gate.standing import inside_operation, waits_for_future
from lazyckpt.metrics import CheckpointMetrics
from lazyckpt.providers.base import TensorView

ALL_OWNERS = (1 << 64) - 1
_MOVED = "given other memory between save() and the copy"


class Snapshot:
    """The storages of one checkpoint from ``save()`` until they are copied. Implements ``gate.Pending``."""

    def __init__(
        self,
        sources: Sources,
        job: _engine.Job,
        metrics: CheckpointMetrics,
        *,
        frozen: FrozenParameters | None = None,
        torn: TornStorages | None = None,
        durable: Callable[[], None] | None = None,
        waited: Callable[[float], None] | None = None,
        name_of: Callable[[TensorView], str] | None = None,
    ) -> None:
        """``job`` copies ``sources``. ``metrics`` counts waits at the gate. ``frozen`` and ``torn`` learn what this
        snapshot finds. ``durable`` waits until the checkpoint is durable; if given, optimizer steps call it
        (before_step). ``waited`` is told of every wait at the gate: when it began. ``name_of`` names a tensor in
        messages."""
        self.torn: str | None = None  # what changed, if something did
        self.job = job
        self.sources = sources
        self.eager_copied = False  # until then a step inside save(), in a signal handler, waits for eager bytes, too
        self.metrics = metrics
        self.durable = durable
        self._waited = waited
        self._name_of = name_of or _key_of
        self._by_owner = sources.decision.by_owner
        self._frozen = frozen or FrozenParameters()
        self._torn_storages = torn or TornStorages()
        self._lock = threading.RLock()
        self._verified = 0  # owners whose storages were checked after their copy
        owed = reduce(or_, map(sources.owners.__getitem__, sources.lazy), 0) if sources.crcs else sources.decision.owed
        self.verdict = Verdict(owed, sources.tensors)

    # gate.Pending

    def wait(self, owner: object) -> None:
        # A new owner, one with other parameters than at save(), and one that raises may own any of the storages now.
        owners = ALL_OWNERS
        with contextlib.suppress(Exception):
            bit, parameters = self._by_owner.get(owner, (0, None))
            if parameters is not None and parameters == parameters_of(owner):
                owners = bit
        # torch's optimizers write in the device's current stream. Other optimizers may use any stream.
        self._wait(owners, on_device=is_torch_class(type(owner)))

    def wait_all(self) -> None:
        self._wait(ALL_OWNERS, on_device=False)

    def wait_for_storage(self, storage: torch.UntypedStorage) -> None:
        if (owners := self._owners_by_identity.get(storage._cdata)) is not None:
            self.job.wait_captured(owners)
            self.verify(owners)

    @cached_property
    def _owners_by_identity(self) -> dict[int, int]:
        """For ``wait_for_storage``: there may be as many calls as storages. Several files may hold one."""
        owners: dict[int, int] = {}
        for identity, bits in zip(self.sources.identities, self.sources.owners, strict=True):
            owners[identity] = owners.get(identity, 0) | bits
        return owners

    def is_held(self) -> bool:
        return self._lock._is_owned()  # type: ignore[attr-defined,no-any-return]

    def _wait(self, owners: int, *, on_device: bool) -> None:
        begin = time.perf_counter()
        if not self.eager_copied:
            self.job.wait_eager()
        cuda = self.sources.cuda
        if cuda and ((on_device and not self.sources.crcs) or devices.capturing()):
            self.job.wait_enqueued(owners, devices.current_streams(cuda))
        else:
            self.job.wait_captured(owners)
        if owners == ALL_OWNERS:
            self.verify_soon()
        else:
            self.verify(owners)
        if self.durable is not None:
            self.durable()
        self.metrics.gate_blocked_s += time.perf_counter() - begin
        if self._waited is not None:
            self._waited(begin)

    # consistency

    def give_verdict(self) -> None:
        owed = self.verdict.owed and not self.verdict.is_owed_by_another()
        if owed and self.job.wait_captured(ALL_OWNERS, 0):
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
        if (waiting := waits_for_future(self.verdict.thread.ident)) is not None:
            found = versions_of(self.sources.tensors)
            if waits_for_future(self.verdict.thread.ident) == waiting:  # nothing was written in between
                self.verify(versions=found)
        versions = self.verdict.ask()
        if versions is not None:
            self.verify(versions=versions)

    def verify(self, owners: int = ALL_OWNERS, versions: Sequence[int] | None = None) -> None:
        """Checks that the storages of these owners did not change between ``save()`` and their copy.

        Checks each storage once, after its copy and before its owner may step. If one changed, sets ``torn`` and fails
        the job. Call it where this thread writes nothing, or with the ``versions`` of such a moment. Inside an
        operation of torch, it leaves storages that only versions protect to a later call."""
        if versions is None and self.sources.tensors and inside_operation():
            return
        with self._lock:
            todo = owners & ~self._verified
            if not todo or self.torn is not None:
                return
            changed = self._changed(todo, versions)
            if changed is not None:
                self._tear(*changed)
            self._verified |= owners  # last: after Ctrl-C before this, the next waiter checks again
            self.verdict.give(owners)

    def _tear(self, sources: list[int], what: str) -> None:
        self.torn = told(list(map(self._name, sources[:MAX_NAMES])), len(sources), what)
        self.job.fail(errno.ECANCELED, self.torn)
        self._torn_storages.add(self.sources.views.storages[source] for source in sources)

    def _name(self, source: int) -> str:
        view = self.sources.views[source]
        name = self._name_of(view)
        if name == _key_of(view):  # the tensors that viewed the storage at save() may have other storages now
            for tensor in self.sources.seen_through(source):
                name = self._name_of(view._replace(storage=tensor.untyped_storage()))
        return name

    def _changed(self, owners: int, versions: Sequence[int] | None) -> tuple[list[int], str] | None:
        """The changed storages of ``owners``, less those of verified owners, and how they changed."""
        sources = self.sources
        todo = [s for s in sources.lazy if sources.owners[s] & owners and not sources.owners[s] & self._verified]
        if moved := sources.moved(todo):
            return moved, _MOVED
        if written := sources.written(todo, versions_of(sources.tensors) if versions is None else versions):
            return written, "written to between save() and the next optimizer step"
        if not sources.crcs:
            return None
        copied = self.job.source_crcs()
        todo = [s for s in todo if s in sources.crcs]
        if during := [s for s in todo if copied[s] != sources.crcs[s]]:
            return during, "written to while it was being copied (found by audit)"
        now = sources.checksums()
        if after := [s for s in todo if now[s] != sources.crcs[s]]:
            return after, "written to between its copy and the next optimizer step (found by audit)"
        return None

    def verify_pages(self) -> None:
        """Checks, after everything is copied, that no page of host memory was written before its copy."""
        written = self.job.torn()
        with self._lock:
            if written and self.torn is None:
                moved = self.sources.moved(written)  # the present user of the old memory has written to it
                self._tear(*((moved, _MOVED) if moved else (written, "written to between save() and the copy")))

    def verify_eager(self, moved: Iterable[torch.Tensor]) -> None:
        """Notes that these tensors were written to while ``save()`` waited for room for eager bytes."""
        identities = {tensor.untyped_storage()._cdata for tensor in moved}
        with self._lock:
            columns = enumerate(zip(self.sources.identities, self.sources.owners, strict=True))
            eager = [source for source, (at, bits) in columns if at in identities and not bits]
            if eager and self.torn is None:
                self._tear(eager, "written to inside save(), before it was copied")

    def verify_frozen(self) -> None:
        """Compares frozen parameters with the snapshot before, after everything is copied."""
        if not self.sources.frozen:
            return
        crcs = self.job.source_crcs()
        for index, version, lazy in self.sources.frozen:
            if not self._frozen.observe(self.sources.views[index], version, crcs[index], lazy) and self.torn is None:
                self._tear([index], "frozen (requires_grad=False), but written to since the checkpoint before")

    def release(self) -> None:
        """Drops its references to all tensors."""
        with self._lock:
            self._verified = ALL_OWNERS
            self.verdict.give(ALL_OWNERS)
            self._name_of = _key_of
            self.sources.release()


def _key_of(view: TensorView) -> str:
    return f"data/{view.key}"
