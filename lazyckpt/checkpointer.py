"""The face of lazyckpt: track the state, restore it, save it while training goes on."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import gc
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch

from lazyckpt import _engine, catalog, commit
from lazyckpt.background import Background, Flight, SaveHandle
from lazyckpt.catalog import Catalog, Checkpoint
from lazyckpt.config import MIB, Config, auto_ring_bytes
from lazyckpt.containers import torch_zip
from lazyckpt.errors import (
    ClosedError,
    ConfigError,
    NoSpaceError,
    SaveError,
    SerializationError,
    save_error,
)
from lazyckpt.functional import ARCHIVE_NAME
from lazyckpt.gate import gate, watch_module
from lazyckpt.providers.base import Bytes, StorageTable, TensorView
from lazyckpt.providers.composite import CompositeProvider, UnpicklableError
from lazyckpt.providers.loader import track_loader
from lazyckpt.providers.naming import name_of_storage
from lazyckpt.providers.objects import pickle_of
from lazyckpt.providers.training import ModuleProvider, RngProvider, provider_for
from lazyckpt.restore import restore_newest, restore_one
from lazyckpt.snapshot import FrozenParameters, Ownership, Snapshot

RNG = "rng"
_READ_AHEAD_BYTES = 64 * MIB


class Checkpointer:
    """Saves and restores a training run in the folder ``directory``, which is made if it is missing.

    ::

        with lazyckpt.Checkpointer("runs/a") as ckpt:
            ckpt.track(model=model, optimizer=optimizer, scheduler=scheduler)
            loader = ckpt.track_loader(loader)
            step = ckpt.restore() or 0
            ...
            optimizer.step()
            ckpt.save(step)

    Keyword arguments are the fields of :class:`lazyckpt.Config`. One thread at a time may call.
    Raises ConfigError for a knob that makes no sense, SaveError if the folder cannot be written to.
    """

    def __init__(self, directory: str | os.PathLike[str], **knobs: Any) -> None:
        try:
            self.config = Config(**knobs)
        except TypeError as error:
            raise ConfigError(str(error).replace("Config.__init__()", "Checkpointer")) from None
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            commit.sweep(self.directory)
            commit.Staging(self.directory / "writable").discard()
        except OSError as error:
            raise save_error(error, path=self.directory) from error
        self._catalog = Catalog(self.directory)
        known = self._catalog.scan()
        self._sequence = max((c.sequence for c in known), default=0)
        self._provider = CompositeProvider()
        self._unwatch: list[Callable[[], None]] = []
        self._fresh_keys = map(str, itertools.count())
        self._layout: tuple[tuple[Any, ...], torch_zip.Layout] | None = None
        self._frozen = FrozenParameters()
        self._steps_before: dict[int, int] = {}
        self._background = Background(self._catalog, self.config)
        self._background.parent = known[0].sequence if known else None
        self._pid = os.getpid()
        self._closed = False
        config = self.config
        auto = config.host_buffer_bytes == "auto"
        self._max_ring_bytes = auto_ring_bytes(config.chunk_bytes) if auto else int(config.host_buffer_bytes)
        try:
            self._engine = _engine.Engine(
                ring_bytes=self._max_ring_bytes,
                chunk_bytes=config.chunk_bytes,
                io_depth=config.io_depth,
                copy_threads=config.copy_threads,
                backend=config.io_backend,
                direct=config.direct_io,
            )
        except OSError as error:
            raise ConfigError(
                f"the engine does not start with host_buffer_bytes={self._max_ring_bytes}, "
                f"io_backend={config.io_backend!r}, io_depth={config.io_depth}, copy_threads={config.copy_threads}: "
                f'{error.strerror}; use a smaller buffer or fewer threads, or io_backend="auto" to do without io_uring'
            ) from error
        if config.io_backend == "auto" and self._engine.fallback:
            _warn_once(f"io_uring is not used ({self._engine.fallback}); a thread pool writes instead")
        # "auto" grows with the first save; until then it holds what restore() reads ahead of the unpickler.
        ahead = min(known[0].nbytes, _READ_AHEAD_BYTES, self._max_ring_bytes) if known else 0
        self._engine.reserve(ahead if auto else self._max_ring_bytes)
        self._track(RNG, RngProvider())
        gate.install()

    # what is saved

    def track(self, **state: Any) -> None:
        """Name what is saved. Values: modules, optimizers, anything with ``state_dict``/``load_state_dict``,
        tensors, dicts and lists (restored in place), or a :class:`lazyckpt.StateProvider`.

        The random number generators are tracked as ``rng``. Raises ConfigError for anything else.
        """
        self._check_usable()
        for name, obj in state.items():
            if name in self._provider.parts:
                reserved = " (reserved for the random number generators)" if name == RNG else ""
                raise ConfigError(f"track: the name {name!r} is taken{reserved}")
            self._track(name, obj)

    def track_loader(self, loader: Any, name: str = "loader") -> Any:
        """Track a data loader and return what to iterate instead of it: a wrapper that knows its position, or the
        loader itself if it has ``state_dict`` and ``load_state_dict``."""
        wrapped = track_loader(loader)
        self.track(**{name: wrapped})
        return wrapped

    def _track(self, name: str, obj: Any) -> None:
        provider = provider_for(name, obj)
        # RNG last: what is restored before it may draw random numbers.
        parts = {**self._provider.parts, name: provider}
        if RNG in parts:
            parts[RNG] = parts.pop(RNG)
        self._provider.parts = parts
        if isinstance(provider, ModuleProvider):
            self._unwatch.append(watch_module(provider.module))

    # restore

    def restore(self, *, step: int | None = None, path: str | os.PathLike[str] | None = None) -> int | None:
        """Load the newest committed checkpoint into the tracked state; return its step, or None if there is none.

        Newest is the last one saved, whatever its step; a damaged one is passed over with a warning. ``step`` or
        ``path`` (a checkpoint folder) roll back to a given one. Waits for saves in flight.

        Raises RestoreError if the checkpoint does not fit what is tracked (nothing is touched then) or if none is
        whole; LoadError if the given one cannot be read.
        """
        self._check_usable()
        if step is not None and path is not None:
            raise ConfigError("restore: give a step or a path, not both")
        self._background.drain()
        gate.wait_all()  # other Checkpointers may be copying what is about to be overwritten
        checkpoint: Checkpoint | None
        if step is None and path is None:
            checkpoint = restore_newest(self._catalog, self._provider, self._engine)
        else:
            folder = self.directory / catalog.folder_name(_checked_step(step)) if step is not None else Path(path or "")
            checkpoint = restore_one(folder, self._provider, self._engine)
        if checkpoint is None:
            return None
        self._frozen = FrozenParameters()  # what was seen of them before is no longer so
        own = checkpoint.path.parent.resolve() == self.directory.resolve()
        self._background.parent = checkpoint.sequence if own else None
        return checkpoint.step

    # save

    def save(self, step: int, *, blocking: bool = False) -> SaveHandle:
        """Snapshot the tracked state as checkpoint ``step`` and make it durable in the background.

        Returns in milliseconds: what only an optimizer step changes is copied later, under the next forward and
        backward, and the next ``optimizer.step()`` waits if need be. Everything else is copied before this returns.
        Waits if ``max_in_flight`` checkpoints are not durable yet. ``blocking=True`` returns when it is durable.

        Raises the SaveError of an earlier checkpoint that failed in the background (``on_error="raise"``), or its
        own, if it fails at once; with ``on_error="warn"`` these are warnings, and the handle holds the error.
        """
        begin = time.perf_counter()
        self._check_usable()
        self._background.raise_failed()
        handle = SaveHandle(_checked_step(step), self.directory / catalog.folder_name(step))
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise ConfigError("save() inside a CUDA graph capture; save before or after it")
        self._background.wait_for_room()
        handle.metrics.in_flight_wait_s = time.perf_counter() - begin
        try:
            self._launch(handle, begin)
        except SaveError as error:
            self._background.finish(handle, error)
            blocking = True  # it has failed already: this call says so, not the next
        except OSError as error:  # the engine refused
            self._background.finish(handle, save_error(error, path=handle.path, step=handle.step))
            blocking = True
        if blocking:
            concurrent.futures.wait([handle])
        handle.metrics.save_blocked_s = time.perf_counter() - begin
        if blocking:
            self._background.raise_failed()
        return handle

    def _launch(self, handle: SaveHandle, begin: float) -> None:
        """From the state to the engine: when this returns, every eager byte is copied and every lazy one guarded."""
        started = time.perf_counter()
        with _no_garbage_collection():
            table = StorageTable(self._fresh_keys)
            try:
                opcodes = b"".join(s.data for s in self._provider.segments(table) if isinstance(s, Bytes))
            except UnpicklableError as error:
                raise SerializationError(str(error), path=handle.path, step=handle.step) from error.__cause__
            snapshot = self._snapshot(table)
            layout = self._layout_of(snapshot)
        tail = layout.finish(torch_zip.small_records(pickle_of(opcodes)))
        nbytes = layout.head_end + tail.nbytes
        self._check_space(nbytes, handle)
        snapshot.metrics = handle.metrics
        handle.metrics.storages = len(snapshot.views)
        if self.config.durability == "before_step":
            snapshot.durable = handle
        if self.config.host_buffer_bytes == "auto":
            self._engine.reserve(min(nbytes + 2 * self.config.chunk_bytes, self._max_ring_bytes))
        handed_over = time.perf_counter()
        job = self._engine.begin(snapshot.pointers, snapshot.sizes, snapshot.owners, 1)
        for extent in [*layout.head, tail]:
            job.append(0, extent.offset, extent.rows, extent.blob)
        job.seal()
        snapshot.job = job
        handle._snapshot = snapshot
        gate.add(snapshot)
        self._sequence += 1
        previous = self._background.newest
        self._background.launch(Flight(handle, snapshot, job, nbytes, self._sequence, begin, handed_over, previous))
        handle.metrics.plan_s = time.perf_counter() - started
        try:
            job.wait_eager()
        except BaseException:  # Ctrl-C: training may go on and change what is only half copied
            job.fail(errno.ECANCELED, "save() was interrupted")
            raise
        handle.metrics.eager_wait_s = time.perf_counter() - started - handle.metrics.plan_s

    def _snapshot(self, table: StorageTable) -> Snapshot:
        ownership = Ownership(gate, self._steps_before)
        self._steps_before = ownership.steps
        modules = [p.module for p in self._provider.parts.values() if isinstance(p, ModuleProvider)]
        frozen = [p for m in modules for p in m.parameters() if not p.requires_grad and p.layout is torch.strided]
        snapshot = Snapshot(table.views, ownership, self._frozen, frozen, audit=self.config.audit)
        snapshot.name_of = self._name_of
        return snapshot

    def _name_of(self, view: TensorView) -> str:
        return name_of_storage(self._provider, view.storage) or f"data/{view.key}"

    def _layout_of(self, snapshot: Snapshot) -> torch_zip.Layout:
        """Cached: it depends on keys and sizes only."""
        facts = tuple(map(attrgetter("key"), snapshot.views)), tuple(snapshot.sizes)
        if self._layout is None or self._layout[0] != facts:
            self._layout = facts, torch_zip.Layout(ARCHIVE_NAME, *facts)
        return self._layout[1]

    def _check_space(self, nbytes: int, handle: SaveHandle) -> None:
        """Found now, before anything is copied; fallocate finds what others take in the meantime."""
        where = {"path": handle.path, "step": handle.step}
        try:
            disk = os.statvfs(self.directory)
        except OSError as error:
            raise save_error(error, **where) from error  # type: ignore[arg-type]
        free = disk.f_bavail * disk.f_frsize
        if free < nbytes:
            what = f"needs {nbytes} bytes, {free} are free; free some space, or keep fewer checkpoints (keep_last)"
            raise NoSpaceError(what, **where)  # type: ignore[arg-type]

    # the end

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"the Checkpointer of {self.directory} belongs to the parent of this process; make one here"
            )
        if self._closed:
            raise ClosedError(f"the Checkpointer of {self.directory} is closed")

    def close(self) -> None:
        """Wait until every checkpoint is durable; stop the threads. Raises the SaveError of one that failed."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._background.close()
        for undo in self._unwatch:
            undo()
        del self._engine
        self._background.raise_failed()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        try:
            self.close()
        except SaveError as failure:
            if error is None:
                raise
            warnings.warn(str(failure), stacklevel=2)  # the exception that ended training matters more
        return False


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Tens of thousands of small objects come to life in a save, none of them in a cycle: looking for garbage
    among them would take longer than to make them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _checked_step(step: Any) -> int:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ConfigError(f"step={step!r}: expected a whole number, at least 0")
    return step


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=3)
