"""Lightning: ``Trainer(plugins=[LazyCheckpointIO()])`` or ``Fabric(plugins=[LazyCheckpointIO()])`` saves lazily.

Lightning expects a file to exist when the call that saves it returns. Here it does not exist yet, and the weights may
not be copied yet. So there are two parts. A CheckpointIO saves, waits before it loads, and removes in order. A
callback, which Lightning finds through an entry point, handles what a CheckpointIO does not see: code that asks whether
a file exists, code that swaps weights, the end of training. Without the callback a Trainer's saves block.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import lazyckpt
from lazyckpt import settings
from lazyckpt.capture.gate import gate
from lazyckpt.config import Settings, spells_out
from lazyckpt.integrations import StartsAnew, close_and_warn
from lazyckpt.storage import commit, folders
from lazyckpt.warn import warn

try:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
    from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
    from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
    from lightning.pytorch.loggers import Logger

    from lazyckpt.integrations import lightning_last
    from lazyckpt.integrations.lightning_last import META, local_path
except ImportError as error:
    raise ImportError('lazyckpt.integrations.lightning needs Lightning: pip install "lightning>=2.6"') from error

if TYPE_CHECKING:
    from typing_extensions import Unpack

_TRAINER_CHECKPOINT = "pytorch-lightning_version"  # a key that Trainer.save_checkpoint writes, and Fabric does not
_SLURM_PREFIX = "hpc_ckpt_"  # of what Lightning saves in a signal handler, and looks for after a requeue
_SMALL_BYTES = 16 << 20
# Lightning's callbacks that hear of the start or the end of an epoch, and leave weights alone.
_ONLY_READ = (
    *(callbacks.Checkpoint, callbacks.EarlyStopping, callbacks.GradientAccumulationScheduler),
    *(callbacks.LearningRateMonitor, callbacks.ProgressBar, callbacks.Timer),
)


class LazyCheckpointIO(StartsAnew, TorchCheckpointIO):
    """Saves checkpoints lazily and durably: ``Trainer(plugins=[LazyCheckpointIO()])``, or Fabric's.

    Keyword arguments are the fields of ``Config``, except ``keep_last`` and ``keep_every``: retention is
    ``ModelCheckpoint(save_top_k=…)``. Raises ConfigError for an invalid one. Make it before training begins.

    A Trainer's saves block (are durable when they return) outside ``fit`` and its like, after an exception, and in
    SLURM's signal handler. A save that fails in the background raises SaveError at the next save or load, or at the end
    of ``fit``; ``on_error="warn"`` makes it a warning. Its threads and buffers live as long as ``fit``; with Fabric,
    from the first save to the end of the program.
    """

    @spells_out(Settings)
    def __init__(self, **knobs: Unpack[Settings]) -> None:
        self._config = settings.config_of(type(self), knobs, "ModelCheckpoint counts its checkpoints; use save_top_k")
        self._knobs = knobs
        self._start_anew()

    def _start_anew(self) -> None:
        gate.install()  # now, not for the first save: only what was seen to step before is copied lazily
        self._saver: lazyckpt.Saver | None = None  # its threads run while there is something to save
        self._at_the_end: Any = None  # closes _saver
        self._pid = os.getpid()
        self._attended: bool | None = None  # by the callback, now; None: there was no Trainer yet
        self._failure: lazyckpt.SaveError | None = None  # for the callback
        self._unreported: list[lazyckpt.SaveHandle] = []  # for the callback
        self._failed_at_once: Path | None = None  # the newest save, if it blocked and failed
        self._removed: set[Path] = set()  # may still be there
        self._links: set[Path] = set()  # may not be there yet
        self._linked: dict[Path, int] = {}  # the number of the newest link() that was made
        self._link_numbers = itertools.count(1)
        self._lock = threading.Lock()  # of _linked
        self._saving = False
        self.on_all_ranks = False  # each rank saves a part of every checkpoint, not rank 0 all of it

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Returns when ``checkpoint`` may change, apart from tensors that optimizers step; it is durable soon after.

        Raises SaveError, of this or an earlier save, and TypeError for ``storage_options`` of a local path.
        """
        target = local_path(path)
        if target is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        elif self._saving or target.name.startswith(_SLURM_PREFIX):
            _save_in_signal_handler(checkpoint, target)
        else:
            self._saving = True
            try:
                self._save(checkpoint, target)
            finally:
                self._saving = False

    def _save(self, checkpoint: dict[str, Any], target: Path) -> None:
        if target in self._removed:
            self.wait()  # or it might be this one that is removed
        if self._must_block(checkpoint):
            self._save_at_once(checkpoint, target)
            return
        self._failed_at_once = None
        step = checkpoint.get("global_step")
        handle = self._open_saver().save(checkpoint, target, step=step if isinstance(step, int) else None)
        if self._attended:
            self._unreported.append(handle)

    def save_shards(self, sharded: dict[str, Any], rest: dict[str, Any], target: Path, *, first: bool) -> None:
        """For ``LazyModelParallelStrategy``: saves what all ranks hold together, and the ``rest`` of the ``first``
        rank, as a folder of torch.distributed.checkpoint with a file META."""
        if target in self._removed:
            self.wait()
        blocking = self._attended is not True
        with self._open_saver().stage(target, step=rest.get("global_step"), all_ranks=True) as staged:
            staged.add_shards(".", sharded)
            if first:
                staged.add(META, rest)
            handle = staged.save(blocking=blocking)
        if blocking:
            self._close_saver()  # ``teardown`` may not be called after this
        else:
            self._unreported.append(handle)

    def check(self) -> None:
        """Raises the first SaveError that was not raised yet, without waiting."""
        if (saver := self._own_saver()) is not None:
            saver.check()

    def _must_block(self, checkpoint: dict[str, Any]) -> bool:
        if self._attended is not None or _TRAINER_CHECKPOINT not in checkpoint:
            return self._attended is False
        if checkpoint.get("global_step"):  # otherwise it may still come: Lightning has not set up its callbacks
            warn(
                "LazyCheckpointIO: every save blocks, since this Trainer has no LazyCheckpointCallback. It comes by "
                "itself where lazyckpt is installed with its entry points; otherwise add it to the callbacks"
            )
        return True

    def _save_at_once(self, checkpoint: dict[str, Any], target: Path) -> None:
        """Saves without a Saver, since ``teardown`` may not be called after this."""
        self.wait()
        self._failed_at_once = None
        try:
            folders.make_folder(target.parent)
            lazyckpt.save(checkpoint, target)
        except lazyckpt.SaveError as error:
            if self._config.on_error == "raise":
                raise
            self._failed_at_once = target
            warn(str(error))

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> Any:
        """Waits for pending saves, then loads and verifies every checksum. All ranks must call it, as Lightning does.

        Raises LoadError, FileNotFoundError, or the SaveError of a save that failed.
        """
        try:
            self.wait()
        finally:
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.barrier()  # only rank 0 knows what is pending
        target = local_path(path)
        if target is not None and not os.path.isdir(target):
            try:
                return lazyckpt.load(target, map_location, weights_only=weights_only)
            except lazyckpt.UnsupportedFormatError:
                pass
            except lazyckpt.LoadError as error:
                if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                    raise
        return super().load_checkpoint(path, map_location, weights_only)  # torch may read it, or raises its own error

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes ``path`` once everything saved so far is durable; if that fails, keeps it and warns."""
        if self._failed_at_once is not None:
            warn(f"{path} is kept, since the checkpoint after it was not saved ({self._failed_at_once})")
            return
        target = local_path(path)
        saver = self._own_saver()
        if target is None or saver is None:
            super().remove_checkpoint(path)
            return
        saver.remove(target)
        self._removed.add(target)

    def wait(self) -> None:
        """Waits until everything saved is durable. Raises the first SaveError that was not raised yet."""
        saver = self._own_saver()
        if saver is None:
            return
        try:
            saver.wait()  # also for the removals, and for what handles call when they are done: link()
        finally:
            self._links.clear()
            self._removed.clear()

    def teardown(self) -> None:
        """Waits; stops the threads. The next save starts new ones."""
        attended, self._attended = self._attended, False
        try:
            try:
                self.wait()
            finally:
                self._close_saver()
        except lazyckpt.SaveError as error:
            if not attended:
                raise
            self._failure = error  # the callback raises it on every rank

    def _close_saver(self) -> None:
        saver, self._saver = self._own_saver(), None
        if saver is not None:
            self._at_the_end.detach()
            saver.close()

    # for the callback

    def exists(self, target: Path) -> bool:
        """Whether the local file would exist now if saves and removals took no time."""
        there = target in self._links or any(handle.path == target for handle in self._pending())
        return target not in self._removed and (there or os.path.exists(target))

    def link(self, path: str | Path, link: str | Path) -> None:
        """Makes ``link`` a durable symbolic link to ``path`` once ``path`` is durable.

        Until then, and if the save of ``path`` fails, ``link`` stays as it was. Removals that are requested later come
        after the link.
        """
        target, name = Path(path).absolute(), Path(link).absolute()
        if name in self._removed:
            self.wait()
        number = next(self._link_numbers)
        self._links.add(name)

        def make(_: object = None) -> None:
            with self._lock:
                if number < self._linked.get(name, 0) or not os.path.exists(target):
                    return
                self._linked[name] = number
                try:
                    commit.publish_link(name, target)
                except OSError as error:
                    warn(f"{name} could not be made a link to {target}: {error}")

        pending = [handle for handle in self._pending() if handle.path == target]
        if pending:
            pending[-1].add_done_callback(make)
        else:
            make()

    def _own_saver(self) -> lazyckpt.Saver | None:
        return self._saver if self._pid == os.getpid() else None  # not what a forked process inherited

    def _drain(self) -> None:
        """Waits as ``wait`` does, and raises nothing."""
        saver = self._own_saver()
        if saver is not None:
            saver.drain()

    def _pending(self) -> list[lazyckpt.SaveHandle]:
        saver = self._own_saver()
        return saver.pending() if saver is not None else []

    def _open_saver(self) -> lazyckpt.Saver:
        saver = self._own_saver()
        if saver is None:
            saver = self._saver = lazyckpt.Saver(**self._knobs)
            self._pid = os.getpid()
            self._at_the_end = weakref.finalize(self, close_and_warn, saver)  # Fabric calls no teardown()
        return saver


def _save_in_signal_handler(checkpoint: dict[str, Any], target: Path) -> None:
    """Saves durably without the Saver, whose save() the signal may have interrupted."""
    # Not a temporary name of lazyckpt's: after a crash Lightning would take the digits in it for a version.
    unfinished = target.with_name(f".unfinished-{os.getpid()}")
    folders.make_folder(target.parent)
    lazyckpt.save(checkpoint, unfinished)
    commit.publish_file(unfinished, target)


class LazyCheckpointCallback(StartsAnew, Callback):
    """Completes ``LazyCheckpointIO`` in a Trainer; does nothing with another. Lightning adds it by itself.

    - copies end before weights are swapped with no optimizer step: validation, WeightAveraging, SWA, and wherever you
      have a hook at the start or the end of an epoch. Such a hook finds the files of checkpoints of less than 16 MiB
    - a ModelCheckpoint sees pending files as if they existed; ``save_last="link"`` never points at what is not durable
    - loggers hear of a checkpoint when its file exists, and log what it cost: ``checkpoint/blocked_ms``,
      ``checkpoint/durable_s``, ``checkpoint/eager_mb``, ``checkpoint/mb``
    - after an exception saves block; at ``on_train_end`` everything is durable, on every rank; what failed by the end
      of ``fit`` is raised there

    It moves to the front of ``trainer.callbacks``, before callbacks that swap weights. Code that writes to weights
    elsewhere must call ``lazyckpt.wait_captured`` first.
    """

    def __init__(self) -> None:
        self._start_anew()

    def _start_anew(self) -> None:
        self._io: LazyCheckpointIO | None = None
        self._news: list[tuple[lazyckpt.SaveHandle, Callable[[], None]]] = []  # for loggers, when it is durable
        self._undo = contextlib.ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        io = trainer.strategy.checkpoint_io
        first = next(callback for callback in trainer.callbacks if isinstance(callback, LazyCheckpointCallback))
        if not isinstance(io, LazyCheckpointIO) or first is not self:
            return
        self._io = io
        io._attended, io._failure = True, None
        # A new list: Lightning is just now iterating over the old one.
        trainer.callbacks = [self, *(callback for callback in trainer.callbacks if callback is not self)]
        for logger in trainer.loggers:
            if _overrides(logger, "after_save_checkpoint", Logger):
                own = logger.after_save_checkpoint
                logger.after_save_checkpoint = _Late(functools.partial(self._tell, io, own), own)
                self._undo.callback(delattr, logger, "after_save_checkpoint")

    def _tell(self, io: LazyCheckpointIO, after_save_checkpoint: Callable[[Any], None], callback: Any) -> None:
        pending = io._pending()
        if pending:
            self._news.append((pending[-1], functools.partial(after_save_checkpoint, callback)))
        else:
            after_save_checkpoint(callback)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._io is None or not (trainer.is_global_zero or self._io.on_all_ranks):
            return
        saver = self._io._open_saver()
        saver.watch(pl_module)
        if any(isinstance(c, ModelCheckpoint) and not c.save_weights_only for c in trainer.checkpoint_callbacks):
            saver.expect(pl_module, *trainer.optimizers)
        for callback in trainer.callbacks:
            if isinstance(callback, WeightAveraging) and callback._average_model is not None:
                saver.watch(callback._average_model)

    # before weights are swapped, and before hooks look for files

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._make_way("on_train_epoch_start", trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._make_way("on_train_epoch_end", trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Nothing is left to overlap with, and users look for the best model. teardown() raises. What ModelCheckpoint
        # saves after this is durable at on_fit_end.
        if self._io is not None:
            self._io._drain()
            trainer.strategy.barrier()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._io is not None:
            lazyckpt.wait_captured()

    on_validation_epoch_end = on_validation_start

    def _make_way(self, hook: str, trainer: Trainer) -> None:
        # Most checkpoints are saved around here, and are copied during the next epoch. So this waits only if a callback
        # or the module may write to weights, or list the folder.
        if self._io is None:
            return
        others = [c for c in trainer.callbacks if c is not self and not isinstance(c, _ONLY_READ)]
        if any(_overrides(callback, hook, Callback) for callback in others) or _overrides(
            trainer.lightning_module, hook, LightningModule
        ):
            lazyckpt.wait_captured()
            if sum(handle.metrics.bytes for handle in self._io._pending()) < _SMALL_BYTES:
                self._io._drain()  # a hook that lists the folder finds the files that it finds without lazyckpt

    # what became of the saves

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        """Logs finished saves on the training thread: loggers are not made for other threads."""
        if self._io is None:
            return
        handles = self._io._unreported
        while handles and handles[0].done():
            handle = handles.pop(0)
            if Future.exception(handle) is not None:
                continue
            metrics = {
                "checkpoint/blocked_ms": handle.metrics.blocked_s * 1e3,
                "checkpoint/durable_s": handle.metrics.durable_s,
                "checkpoint/eager_mb": handle.metrics.eager_bytes / 1e6,
                "checkpoint/mb": handle.metrics.bytes / 1e6,
            }
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        while self._news and self._news[0][0].done():
            handle, tell = self._news.pop(0)
            if Future.exception(handle) is None:
                tell()

    # the end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        io = self._io
        if io is None:
            return
        io._attended = False  # callbacks that save on an exception come after this one; they block
        if io._failure is not None:
            warn(str(io._failure))
        while True:
            try:
                io.wait()
                break
            except lazyckpt.SaveError as error:  # the exception that ended training matters more
                warn(str(error))
        self._end(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning has called LazyCheckpointIO.teardown by now.
        io = self._io
        if io is None:
            return
        self._end(trainer)
        # Also a barrier: the other ranks may look for the files as soon as this returns.
        if trainer.strategy.reduce_boolean_decision(io._failure is not None, all=False):
            raise io._failure or lazyckpt.SaveError("rank 0 says why", path=trainer.default_root_dir)

    def _end(self, trainer: Trainer) -> None:
        self._report(trainer)
        self._undo.close()
        self._io = None


class _Late:
    """Calls a logger's method later. A copy of the logger has its own method instead, and needs no lazyckpt."""

    def __init__(self, call: Callable[..., Any], own: Callable[..., Any]) -> None:
        self._call = call
        self._own = own

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (self._own,)


def _overrides(obj: Any, method: str, base: type) -> bool:
    return method in vars(obj) or getattr(type(obj), method) is not getattr(base, method)


lightning_last.install(LazyCheckpointIO)
