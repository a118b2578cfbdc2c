"""The half of Lightning's plugin that needs the Trainer.

``LazyCheckpointIO`` (lightning.py) saves; this callback tells it when training begins and ends, waits before other
callbacks swap weights, and tells the loggers. Trainers get it by themselves if their plugin is ours.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.connectors.callback_connector import _CallbackConnector

import lazyckpt
from lazyckpt.integrations import StartsAnew, announce, lightning_loops, lightning_ranks, wrap
from lazyckpt.integrations.lightning_resume import ExactResume
from lazyckpt.warn import warn

_SMALL_BYTES = 16 << 20
# Lightning's callbacks with a hook at the start or the end of an epoch that do not write to weights.
_ONLY_READ = (
    *(callbacks.Checkpoint, callbacks.EarlyStopping, callbacks.GradientAccumulationScheduler),
    *(callbacks.LearningRateMonitor, callbacks.ProgressBar, callbacks.Timer),
)


class Attended:
    """The members of the plugin that the callback uses."""

    on_all_ranks: bool  # each rank saves a part of every checkpoint, not rank 0 all of it
    mirrors: list[Any]
    writers: Any  # the ranks that write each file together, if several do
    _attended: bool | None  # by the callback, now; None: there was no Trainer yet
    _failure: lazyckpt.SaveError | None  # which the callback raises on every rank
    _unreported: list[lazyckpt.SaveHandle]
    _news: list[tuple[lazyckpt.SaveHandle | None, Callable[[], None]]]  # for loggers, when the file is durable

    def tell(self) -> None:
        raise NotImplementedError

    def wait(self) -> None:
        raise NotImplementedError

    def _drain(self) -> None:
        raise NotImplementedError

    def _pending(self) -> list[lazyckpt.SaveHandle]:
        raise NotImplementedError

    def _open_saver(self) -> lazyckpt.Saver:
        raise NotImplementedError

    def check(self) -> None:
        raise NotImplementedError

    def keep_best(self, paths: Iterable[str]) -> None:
        raise NotImplementedError

    def save_together(self, checkpoint: dict[str, Any], target: Path) -> None:
        raise NotImplementedError


class LazyCheckpointCallback(StartsAnew, Callback):
    """Completes ``LazyCheckpointIO`` in a Trainer; does nothing with another. A Trainer with the plugin has one.

    - copies end before weights are swapped with no optimizer step: validation, WeightAveraging, SWA, and wherever you
      have a hook at the start or the end of an epoch. Such a hook finds the files of checkpoints of less than 16 MiB
    - a ModelCheckpoint sees pending files as if they existed; ``save_last="link"`` never points at a file that is not
    durable - loggers learn of a checkpoint when its file exists, and log its cost: ``checkpoint/blocked_ms``,
      ``checkpoint/durable_s``, ``checkpoint/eager_mb``, ``checkpoint/mb``
    - after an exception saves block; at ``on_train_end`` everything is durable, on every rank; failures up to the end
      of ``fit`` are raised there

    - checkpoints hold the random states and the positions of the training data, and ``fit(ckpt_path=…)`` goes on from
      them; with ``exact_resume=False`` it does what Lightning does

    It moves to the front of ``trainer.callbacks``, before callbacks that swap weights. Code that writes to weights
    elsewhere must call ``lazyckpt.wait_captured`` first.
    """

    def __init__(self, *, exact_resume: bool = True) -> None:
        self._exact = exact_resume
        self._start_anew()

    def _start_anew(self) -> None:
        self._io: Attended | None = None
        self._resume = ExactResume()
        self._undo = contextlib.ExitStack()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        io = trainer.strategy.checkpoint_io
        first = next(callback for callback in trainer.callbacks if isinstance(callback, LazyCheckpointCallback))
        if not isinstance(io, Attended) or first is not self:
            return
        self._end(trainer)  # of a run that ended without a call
        self._io = io
        io._attended, io._failure = True, None
        self._move_to_the_front(trainer)
        if io.writers is not None and trainer.world_size > 1:
            self._save_on_all_ranks(trainer, io)
        if self._exact:
            self._undo.callback(lightning_loops.attach(trainer, self._resume))
        for logger in trainer.loggers:
            if _overrides(logger, "after_save_checkpoint", Logger):
                own = logger.after_save_checkpoint
                self._replace(logger, "after_save_checkpoint", _Late(functools.partial(self._tell, io, own), own))

    def _save_on_all_ranks(self, trainer: Trainer, io: Attended) -> None:
        lightning_ranks.check(trainer, io.writers)
        own = trainer.strategy.save_checkpoint
        together = functools.partial(lightning_ranks.save_together, trainer.strategy, io, own)
        self._replace(trainer.strategy, "save_checkpoint", together)
        io.on_all_ranks = True
        self._undo.callback(setattr, io, "on_all_ranks", False)

    def _move_to_the_front(self, trainer: Trainer) -> None:
        before, at = trainer.callbacks, trainer.callbacks.index(self)
        # A new list: Lightning is just now iterating over the old one.
        trainer.callbacks = [self, *(callback for callback in before if callback is not self)]

        def move_back() -> None:
            now = [callback for callback in trainer.callbacks if callback is not self]  # a hook may add some
            before[:] = [*now[:at], self, *now[at:]]
            trainer.callbacks = before

        self._undo.callback(move_back)

    def _replace(self, obj: Any, name: str, value: Any) -> None:
        """Replaces an attribute until the end of the run."""
        before = vars(obj).get(name)
        if before is not None and not _is_copy_of_late(before, obj, name):
            self._undo.callback(setattr, obj, name, before)
        else:
            self._undo.callback(delattr, obj, name)
        setattr(obj, name, value)

    def _tell(self, io: Attended, after_save_checkpoint: Callable[[Any], None], callback: Any) -> None:
        pending = io._pending()
        if not (pending or io._news):
            after_save_checkpoint(callback)
            return
        then = AsItWas(callback)

        def tell() -> None:
            try:
                after_save_checkpoint(then)
            finally:
                then.is_over()

        io._news.append((pending[-1] if pending else None, tell))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._io is None or not (trainer.is_global_zero or self._io.on_all_ranks):
            return
        if self._io.on_all_ranks and self._io.writers is not None:
            lightning_ranks.check_optimizers(trainer, self._io.writers)
        saver = self._io._open_saver()
        saver.watch(pl_module)
        announce(saver, lambda: [pl_module, *trainer.optimizers] if _saves_all(trainer) else [])
        for callback in trainer.callbacks:
            average = getattr(callback, "_average_model", None) if isinstance(callback, WeightAveraging) else None
            if average is not None:
                saver.watch(average)

    # state that Lightning does not save

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._exact and isinstance(trainer.strategy.checkpoint_io, Attended):
            self._resume.save(trainer, checkpoint)
        if self._io is not None and self._io.mirrors:
            self._io.keep_best(str(getattr(c, "best_model_path", "")) for c in trainer.checkpoint_callbacks)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._exact and self._io is not None:
            self._resume.load(trainer, checkpoint)

    # before weights are swapped, and before hooks look for files

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._resume.restore_random()  # before the hooks of other code, as in an uninterrupted run
        self._make_way("on_train_epoch_start", trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._make_way("on_train_epoch_end", trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Nothing is left to overlap with, and users look for the best model. teardown() raises. Later saves of
        # ModelCheckpoint are durable at on_fit_end.
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

    # the outcome of saves

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
        self._io.tell()

    # the end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        io = self._io
        if io is None:
            return
        self._resume.alone = True  # the other ranks may have raised nothing
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
        # Lightning has already called LazyCheckpointIO.teardown.
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


class AsItWas:
    """A ModelCheckpoint as it was when it had saved, for a logger that is told later; as it is, after that."""

    def __init__(self, checkpoint: Any) -> None:
        self._checkpoint = checkpoint  # Lightning gives loggers a weak reference
        self._then: dict[str, Any] | None = {
            name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(checkpoint).items()
        }

    def is_over(self) -> None:
        self._then = None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance
        return self._checkpoint.__class__

    def __getattr__(self, name: str) -> Any:
        if name in ("_checkpoint", "_then"):
            raise AttributeError(name)  # of a copy that is not made yet
        if self._then is None:
            return getattr(self._checkpoint, name)
        if name in self._then:
            return self._then[name]
        found = inspect.getattr_static(self._checkpoint.__class__, name, None)
        if isinstance(found, property):
            return found.__get__(self)
        return types.MethodType(found, self) if inspect.isfunction(found) else getattr(self._checkpoint, name)


class _Late:
    """Calls a logger's method later. A copy of the logger has its own method instead, and needs no lazyckpt."""

    def __init__(self, call: Callable[..., Any], own: Callable[..., Any]) -> None:
        self._call = call
        self._own = own

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (self._own,)


def _is_copy_of_late(value: Any, obj: Any, name: str) -> bool:
    return isinstance(value, functools.partial) and value.func == getattr(type(obj), name).__get__(obj)


def _saves_all(trainer: Trainer) -> bool:
    return any(not getattr(callback, "save_weights_only", True) for callback in trainer.checkpoint_callbacks)


def _overrides(obj: Any, method: str, base: type) -> bool:
    return method in vars(obj) or getattr(type(obj), method) is not getattr(base, method)


def _with_our_plugin(connector: _CallbackConnector, *_: Any) -> bool | None:
    return isinstance(connector.trainer.strategy.checkpoint_io, Attended) or None


@wrap(_CallbackConnector, "on_trainer_init", _with_our_plugin)
def _add_the_callback(_: bool, original: Any, connector: _CallbackConnector, *args: Any, **kwargs: Any) -> None:
    """Gives a Trainer its callback. Lightning's entry points would add it to every Trainer, with a message."""
    original(*args, **kwargs)
    trainer = connector.trainer
    if not any(isinstance(callback, LazyCheckpointCallback) for callback in trainer.callbacks):
        trainer.callbacks = connector._reorder_callbacks([*trainer.callbacks, LazyCheckpointCallback()])
