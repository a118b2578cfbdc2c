"""Saves anything lazily: from objects to the engine, and on to the background."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn

import torch

from lazyckpt import _engine
from lazyckpt.capture import devices
from lazyckpt.capture.budget import auto_ring_bytes
from lazyckpt.capture.eager import EagerShare
from lazyckpt.capture.frozen import FrozenParameters
from lazyckpt.capture.gate import gate
from lazyckpt.capture.ownership import Ownership
from lazyckpt.capture.snapshot import Snapshot
from lazyckpt.capture.torn import TornStorages
from lazyckpt.capture.warmup import Warmup
from lazyckpt.config import Config
from lazyckpt.errors import ClosedError, ConfigError, NoSpaceError, SaveError, SerializationError, save_error
from lazyckpt.observe.trace import Trace
from lazyckpt.pipeline.background import Background, Flight, Target
from lazyckpt.pipeline.handle import SaveHandle, in_flight, wait_for
from lazyckpt.pipeline.plan import FilePlan, ObjectProvider, ZipPlan, plan_for, unsavable
from lazyckpt.pipeline.reentry import alone, other_thread, refuse
from lazyckpt.pipeline.tasks import NO_MEMORY, lacks_memory
from lazyckpt.providers.base import TensorView, TensorViews
from lazyckpt.providers.naming import name_in
from lazyckpt.providers.sharded import ShardedTensorError
from lazyckpt.staged import StagedFolder
from lazyckpt.storage import commit, folders, mounts, paths, removal
from lazyckpt.storage.in_place import InPlaceStaging

_EAGER_FIRST_S = 0.002


class Saver:
    """Saves any objects, lazily and durably; each save is one file or one folder, which appears whole under its name.

        with lazyckpt.Saver() as saver:
            ...
            optimizer.step()
            saver.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"runs/step{step}.pt")

    What only the steps of an optimizer change is copied while the next forward and backward compute: its parameters and
    its state, whatever object they are saved in. Everything else is frozen before ``save`` returns.
    A ``Checkpointer`` adds a folder of checkpoints, their retention and their restoration.

    Keyword arguments are the fields of ``Config``; ``keep_last`` and ``keep_every`` have no effect here: retention is a
    ``Checkpointer``'s. One thread at a time may call: a second one, and a signal handler inside a call, get a
    ConfigError. Saves become durable in the order in which they were called.
    Raises ConfigError for a knob that makes no sense.
    """

    def __init__(self, **knobs: Any) -> None:
        try:
            self.config = config = Config(**knobs)
        except TypeError as error:
            raise ConfigError(str(error).replace("Config.__init__()", type(self).__name__)) from None
        self._watched = _is_watched(config.witness)
        self._callers: dict[str, int] = {}  # see reentry.py
        self._archive = ObjectProvider(None)  # its skeletons serve all lone archives
        self._archive_plan = ZipPlan(self._archive)
        self._folder_plans: dict[str, tuple[ObjectProvider, ZipPlan]] = {}
        self._modules: list[torch.nn.Module] = []
        self._swept: set[Path] = set()
        self._frozen = FrozenParameters()
        self._torn = TornStorages()
        self._eager_share = EagerShare()
        self._steps: dict[int, int] = {}  # of each optimizer, at the last save
        self._steps_before: dict[int, int] = {}  # and at the one before it, of another training step
        self._training_step: int | None = None  # of the last save
        self._pid = os.getpid()
        self._closed = False  # nothing new is taken on
        self._ended = False  # and what was is durable
        self._trace = Trace(config.trace) if config.trace is not None else None
        if self._trace is not None:
            weakref.finalize(self, self._trace.close)  # also at exit
        self._background = Background(config, self._trace)
        auto = config.host_buffer_bytes == "auto"
        self._max_ring_bytes = auto_ring_bytes(config.chunk_bytes) if auto else int(config.host_buffer_bytes)
        try:
            self.engine = _engine.Engine(
                watch_pages=self._watched,
                copy_on_write=config.witness == "copy",
                ring_bytes=self._max_ring_bytes,
                chunk_bytes=config.chunk_bytes,
                io_depth=config.io_depth,
                copy_threads=config.copy_threads,
                backend=config.io_backend,
                direct=None if config.direct_io == "auto" else config.direct_io,
            )
        except OSError as error:
            self._background.close()
            if self._trace is not None:
                self._trace.close()
            raise ConfigError(
                f"the engine does not start with host_buffer_bytes={self._max_ring_bytes}, "
                f"io_backend={config.io_backend!r}, io_depth={config.io_depth}, copy_threads={config.copy_threads}: "
                f'{error.strerror}; use a smaller buffer or fewer threads, or io_backend="auto" to do without io_uring'
            ) from error
        if config.io_backend == "auto" and self.engine.fallback:
            _warn_once(f"io_uring is not used ({self.engine.fallback}); a thread pool writes instead")
        if not auto:
            self.engine.reserve(self._max_ring_bytes)
        self._warmup = Warmup(self._prepare_ring)
        gate.install()

    # what users call

    @alone("save()")
    def save(
        self, obj: Any, path: str | os.PathLike[str], *, step: int | None = None, blocking: bool = False
    ) -> SaveHandle:
        """Save ``obj`` as the file ``path``, as ``torch.save`` would; a name that ends in ``.safetensors`` gives that
        format, and ``obj`` is then a dict of tensors.

        Returns in milliseconds, unless ``max_in_flight`` saves are not durable yet: it waits then. ``blocking=True``
        returns when the file is durable. ``step``, the training step, is for messages; several saves of one step stay
        lazy by it, although no optimizer has stepped between them.

        Raises the SaveError of an earlier save that failed in the background (``on_error="raise"``), or its own, if it
        fails at once; with ``on_error="warn"`` these are warnings, and the handle holds the error.
        """
        if not Path(path).name:
            raise ConfigError(f"save: {str(path)!r} is not the name of a file")
        target = paths.local(path)
        paths.refuse_special_file(target)
        plan: FilePlan
        if target.name.endswith(".safetensors"):
            plan = plan_for(target.name, obj)
        else:
            self._archive.obj, plan = obj, self._archive_plan
        self._prepare(target.parent, target, step)
        handle = SaveHandle(step, target)
        try:
            return self.submit(
                handle,
                Target(files={target.name: plan}, stage=lambda: commit.FileStaging(target)),
                blocking=blocking,
                name_of=lambda view: name_in(obj, "", view.storage),
                training_step=step,
            )
        finally:
            self._archive.obj = None

    def stage(
        self, path: str | os.PathLike[str], *, inside: str | os.PathLike[str] | None = None, step: int | None = None
    ) -> StagedFolder:
        """Begin a folder that will appear as ``path`` when all that is put into it is durable.

        Until then it has a temporary name beside ``path``, or in the folder ``inside`` if that is on the same mount. A
        folder that has the name is replaced by it; files in there that the new one lacks stay, as they would if it had
        been written to. A folder that cannot be renamed, such as a mount point, is filled instead (in_place.py), and a
        symbolic link is followed. Raises SaveError if it cannot be made.
        """
        refuse("stage()")
        self.check_usable()
        target = paths.local(path)
        try:
            if target.is_symlink() or target.name == "..":
                target = Path(os.path.realpath(target, strict=True))
            if mounts.is_fixed(target):
                self._prepare(target, target, step)
                return StagedFolder(self, InPlaceStaging(target), step)
            self._prepare(target.parent, target, step)
            beside = None if inside is None else paths.local(inside)
            if beside is not None:
                self._prepare(beside, target, step)
                if not mounts.on_one_mount(beside, target.parent):
                    beside = None
            staging = commit.Staging(target, beside, keep_others=True)
            try:
                replaceable = not target.is_dir() or staging.may_replace()
            except OSError:
                staging.discard()
                raise
            if not replaceable:
                staging.discard()
                self._prepare(target, target, step)
                staging = InPlaceStaging(target)
        except OSError as error:
            raise save_error(error, path=target, step=step) from error
        return StagedFolder(self, staging, step)

    def watch(self, module: torch.nn.Module) -> None:
        """Make ``module.load_state_dict`` wait for pending copies. Its frozen parameters may become lazy, too."""
        if not any(module is known for known in self._modules):
            self._modules.append(module)
            gate.watch(module)

    def expect(self, *objects: torch.nn.Module | torch.optim.Optimizer) -> None:
        """Say what the first save will hold, so that its staging buffer is ready in time.

        After the first step of one of these optimizers a background thread takes the memory, and pins it where there is
        a GPU. Without this the first save begins that, and its copies wait. A process that takes no step, since it only
        loads, takes no memory.
        """
        for obj in objects:
            self._warmup.expect(obj)

    def pending(self) -> list[SaveHandle]:
        """The saves that are not durable yet, oldest first."""
        return self._background.pending

    def wait(self, path: str | os.PathLike[str] | None = None) -> None:
        """Return when nothing is pending any more, neither saves nor removals nor done-callbacks of handles; or no save
        that will have the name ``path`` or lie in it.

        Raises the first SaveError that nobody has seen yet (``on_error="raise"``).
        """
        refuse("wait()")
        self._check_process()
        if path is None:
            self._background.drain()
        else:
            wanted = Path(path).resolve()  # however it was spelled
            ways = [(h, h.path.resolve()) for h in self.pending()]
            wait_for(h for h, there in ways if there == wanted or wanted in there.parents)
        self._background.raise_failed()

    def check(self) -> None:
        """Raise the first SaveError that nobody has seen yet (``on_error="raise"``); wait for nothing."""
        refuse("check()")
        self._background.raise_failed()

    @alone("remove()")
    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove a file or folder in the background, once everything saved before this call is durable and the
        done-callbacks of those saves have returned.

        If the last of that fails, ``path`` stays, with a warning: it may be the last good one. So does what is saved
        under that name after this call.
        """
        self.check_usable()
        self._background.remove(paths.local(path))

    def close(self) -> None:
        """Wait until everything is durable; stop the threads. Raises the SaveError of a save that failed."""
        if self._ended or os.getpid() != self._pid:
            return
        closed, self._closed = self._closed, True
        if self._callers or gate.is_held():  # otherwise let it: a garbage collection inside another save may close this
            self._closed = closed
            refuse("close()")
            raise other_thread("close()")
        self._background.close()
        if self._trace is not None:
            self._trace.close()
        self._modules.clear()
        self._warmup.forget()
        self._ended = True
        self.__dict__.pop("engine", None)  # a signal handler may have closed it meanwhile
        self._background.raise_failed()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, since its threads and its staging buffer belong to "
            f"this process; make another {type(self).__name__} with the same settings where you need one"
        )

    @property
    def closed(self) -> bool:
        return self._closed

    def __enter__(self) -> Saver:
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

    # for those who build on it: Checkpointer

    def drain(self) -> None:
        """Like ``wait``, but failures keep for the next save."""
        self._background.drain()

    def submit(
        self,
        handle: SaveHandle,
        target: Target,
        *,
        blocking: bool,
        name_of: Callable[[TensorView], str | None],
        training_step: int | None = None,
    ) -> SaveHandle:
        """From the plans of the files to the engine and the background; what ``save`` says holds."""
        begin = time.perf_counter()
        self.check_usable()
        gate.give_verdicts()
        self._background.raise_failed(before_save=True)
        if devices.capturing():
            raise ConfigError("save() inside a CUDA graph capture; save before or after it")
        self._background.wait_for_room()
        handle.metrics.in_flight_wait_s = time.perf_counter() - begin
        try:
            with gate.arming(handle.path, handle.step):
                self._launch(handle, target, begin, name_of, training_step)
        except SaveError as error:
            self._background.fail(handle, error)
            blocking = True  # it has failed already: this call says so, not the next
        except OSError as error:  # the engine refused
            self._background.fail(handle, save_error(error, path=handle.path, step=handle.step))
            blocking = True
        if blocking:
            wait_for([handle])
        handle.metrics.save_blocked_s = time.perf_counter() - begin
        if self._trace is not None and handle._snapshot is not None:
            self._trace.saved(handle.metrics, begin)
        if blocking:
            self._background.raise_failed()
        return handle

    def _launch(
        self,
        handle: SaveHandle,
        target: Target,
        begin: float,
        name_of: Callable[[TensorView], str | None],
        training_step: int | None,
    ) -> None:
        """When this returns, every eager byte is copied and every lazy one guarded."""
        started = time.perf_counter()
        plans = list(target.files.values())
        with _no_garbage_collection():
            with _serialization_errors(handle):
                views = [plan.gather() for plan in plans]
            snapshot = self._snapshot(views, [plan.any_order for plan in plans], training_step)
            with _serialization_errors(handle):
                programs = [plan.lay_out(file) for plan, file in zip(plans, snapshot.files, strict=True)]
        gate.collected(handle.path, handle.step)
        snapshot.name_of = partial(_name_of, name_of)
        sizes = [nbytes for _, nbytes in programs]
        self._check_space(sum(sizes), handle)
        self._eager_share.look(snapshot, self._modules, snapshot.name_of)
        snapshot.metrics = handle.metrics
        handle.in_training = snapshot.in_training
        handle.metrics.storages = len(snapshot.sizes)
        handle.metrics.bytes = sum(sizes)
        if self.config.durability == "before_step":
            snapshot.durable = handle
        self.reserve(sum(sizes) + 2 * self.config.chunk_bytes)
        job = self.engine.begin(  # not by keyword: with no memory for one, pybind11 3.1 ends the process
            snapshot.pointers,
            snapshot.sizes,
            snapshot.owners,
            len(plans),
            True,  # the eager bytes are waited for below
            snapshot.devices,
            snapshot.streams,
        )
        trace, traced = self._trace, None
        try:
            first_source = 0
            for number, (extents, _) in enumerate(programs):
                for extent in extents:
                    job.append(number, extent.offset, extent.rows, extent.blob, first_source)
                first_source += len(snapshot.files[number])
            job.seal()
            snapshot.job = job
            if trace is not None:
                layout = [extents for extents, _ in programs]
                traced = trace.begin(begin, list(target.files), layout, snapshot.files, snapshot.name_of)
                snapshot.waited = partial(trace.gate, traced, handle.step)
            gate.add(snapshot)
            # Most often all of it: once other threads run, this one may have to wait for the GIL and for a core. Not
            # longer, since the ring may have no room before the background has opened the files.
            frozen = job.wait_eager(_EAGER_FIRST_S)
            previous = self._background.newest
            handle._snapshot = snapshot
            self._background.launch(Flight(handle, target, snapshot, job, sizes, begin, previous, traced))
            handle.metrics.plan_s = time.perf_counter() - started
            job.go()
            if not frozen:
                job.wait_eager()
        except BaseException as error:
            doubts = 0
            while True:
                try:
                    # Ctrl-C: training may go on and change what is only half copied, and the ring is wanted.
                    job.fail(errno.ECANCELED, "save() was interrupted")
                    gate.discard(snapshot)
                    if trace is not None and traced is not None:
                        trace.forget(traced)
                    in_flight.pop(handle, None)
                    break
                except NO_MEMORY as lack:
                    if not lacks_memory(lack, doubts):
                        break
                    doubts += not isinstance(lack, MemoryError)
            handle._reported = not isinstance(error, OSError)  # by this; of those submit() tells
            raise
        if snapshot.devices is not None and self.engine.unpinned:
            way = "pass a small buffer that is" if self.engine.bounces else "are slow, and save() may wait for them"
            _warn_once(f"the staging buffer is not pinned ({self.engine.unpinned}); copies from the GPU {way}")
        handle.metrics.eager_wait_s = time.perf_counter() - started - handle.metrics.plan_s

    def _snapshot(self, files: list[TensorViews], any_order: list[bool], training_step: int | None) -> Snapshot:
        if training_step is None or training_step != self._training_step:
            self._steps_before = self._steps
        self._training_step = training_step
        gate.guard_averages()
        ownership = Ownership(gate, self._steps_before, watched=self._watched)
        self._steps = ownership.steps
        return Snapshot(
            files,
            ownership,
            self._frozen,
            self._modules,
            any_order=any_order,
            audit=self.config.audit,
            engine=self.engine,
            watched=self._watched,
            torn=self._torn,
        )

    def reserve(self, nbytes: int) -> None:
        """Let the staging ring grow to ``nbytes``, if it may."""
        if self.config.host_buffer_bytes == "auto":
            self.engine.reserve(min(nbytes, self._max_ring_bytes))

    def _prepare_ring(self, tensors: list[torch.Tensor], nbytes: int) -> None:
        """See ``warmup.py``. It never fails: the first save raises what is wrong."""
        if self._closed or os.getpid() != self._pid:
            return
        storages = [tensor.untyped_storage() for tensor in tensors]
        with contextlib.suppress(OSError):  # first the devices: the ring goes next to them
            devices.locate(storages, [storage.device for storage in storages], self.engine)
        self.reserve(nbytes + 2 * self.config.chunk_bytes)

    def forget_frozen(self) -> None:
        """What was seen of frozen parameters holds no longer: somebody wrote to them."""
        self._frozen = FrozenParameters()

    def _check_space(self, nbytes: int, handle: SaveHandle) -> None:
        """Found now, before anything is copied; fallocate finds what others take in the meantime."""
        where = {"path": handle.path, "step": handle.step}
        try:
            free = folders.free_bytes(handle.path if handle.path.is_dir() else handle.path.parent)
        except OSError as error:
            raise save_error(error, **where) from error  # type: ignore[arg-type]
        if free < nbytes:
            what = f"needs {nbytes} bytes, {free} are free; free some space, or keep fewer checkpoints (keep_last)"
            raise NoSpaceError(what, **where)  # type: ignore[arg-type]

    def _prepare(self, folder: Path, target: Path, step: int | None) -> None:
        """Makes ``folder`` for ``target``, and clears away what dead runs left in it."""
        if folder in self._swept:
            return
        try:
            folders.make_folder(folder)
            removal.sweep(folder)
        except OSError as error:
            raise save_error(error, path=target, step=step) from error
        self._swept.add(folder)

    def check_usable(self) -> None:
        """Raises ClosedError after ``close`` and in a forked child."""
        self._check_process()
        if self._closed:
            raise ClosedError(f"this {type(self).__name__} is closed")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(f"this {type(self).__name__} belongs to the parent of this process; make one here")


def _name_of(find: Callable[[TensorView], str | None], view: TensorView) -> str:
    try:
        return find(view) or f"data/{view.key}"
    except Exception:  # it asks providers for their state: what is to be said matters more than the name
        return f"data/{view.key}"


@contextlib.contextmanager
def _serialization_errors(handle: SaveHandle) -> Iterator[None]:
    try:
        yield
    except ShardedTensorError:
        raise
    except Exception as error:
        what = unsavable(error)
        raise SerializationError(what, path=handle.path, step=handle.step) from error.__cause__ or error


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Tens of thousands of small objects come to life in a save, none of them in a cycle: looking for garbage
    among them would take longer than to make them."""
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()


def _is_watched(witness: str) -> bool:
    """Whether the kernel watches the pages of lazy host memory."""
    if witness == "versions":
        return False
    refused = _engine.page_witness(copy_on_write=witness == "copy")
    if not refused or witness == "auto":
        return not refused
    needs = "Linux 6.7 or newer and, in a container, a seccomp profile that allows userfaultfd"
    if witness == "copy":
        needs += ", and access to /dev/userfaultfd, CAP_SYS_PTRACE or vm.unprivileged_userfaultfd=1"
    raise ConfigError(
        f'witness="{witness}" does not work here ({refused}). It takes {needs}. witness="auto" takes what there is'
    )


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=3)
