"""The Hugging Face Trainer, saving lazily: ``Trainer(..., callbacks=[LazyCheckpointCallback()])``.

The folders ``checkpoint-N`` hold the same files under the same names. Training goes on while they are written, and a
folder gets its name only when all of it is durable.

A callback does not see its Trainer and cannot replace a save. So importing this module wraps a few methods of
``transformers.Trainer``, which do what they always did without the callback. With it, ``_save_checkpoint`` writes a
staged folder, and a ``Saver`` takes the large objects (weights, optimizer). Code that needs the folder on disk (other
callbacks' ``on_save``, ``push_to_hub``, ``save_total_limit``) runs when the folder is durable, at the beginning of the
next training step or at the end of training.

Supported: transformers 5.23 and newer 5.x, in one process, under DistributedDataParallel, or under FSDP2, where every
rank saves its shards (fsdp2.py). With FSDP 1, DeepSpeed, XLA, SageMaker model parallelism or ``save_on_each_node`` the
Trainer saves as it does without the callback.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import shutil
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import lazyckpt
from lazyckpt import settings
from lazyckpt.config import Settings, spells_out
from lazyckpt.integrations import StartsAnew, wrap
from lazyckpt.integrations.redirect import safetensors_into
from lazyckpt.storage import removal
from lazyckpt.warn import warn

try:
    import transformers.trainer
    from accelerate.utils import broadcast_object_list, gather_object
    from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
    from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
    from transformers.trainer_callback import CallbackHandler
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, sort_checkpoints
    from transformers.training_args import ParallelMode
    from transformers.utils import WEIGHTS_NAME
    from transformers.utils.peft_utils import ADAPTER_WEIGHTS_NAME

    from lazyckpt.integrations.fsdp2 import is_sharded, shards_into

    if not hasattr(Trainer, "_finalize_training"):
        raise ImportError(f"there is transformers {transformers.__version__}")
except ImportError as error:
    raise ImportError(
        "lazyckpt.integrations.transformers needs the Trainer of transformers 5.23 or newer: "
        f"pip install 'transformers[torch]>=5.23,<6' ({error})"
    ) from error

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Inside output_dir, since it must be on the same file system. Neither resumption nor rotation looks at it, and
# push_to_hub, which uploads output_dir, leaves out what begins with "_".
STAGING = "_lazyckpt"
_JIT_SENTINEL = "checkpoint-is-incomplete.txt"  # of transformers.trainer_jit_checkpoint
_LARGE = {OPTIMIZER_NAME, WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME}  # written by torch.save


@dataclass
class _Save:
    """A checkpoint from ``_save_checkpoint`` until it is durable and announced."""

    trainer: Trainer
    state: TrainerState  # as it was then
    target: str  # the folder's final name, as the Trainer spells it
    handle: lazyckpt.SaveHandle
    blocked_s: float  # in _save_checkpoint
    on_save: bool = False  # the other callbacks wait for it


class LazyCheckpointCallback(StartsAnew, TrainerCallback):
    """Makes its Trainer save lazily.

    Keyword arguments are the fields of ``Config``, except ``keep_last`` and ``keep_every``: retention is
    ``TrainingArguments.save_total_limit``. Raises ConfigError for an invalid one.

    A checkpoint that fails in the background raises its SaveError when the next one is saved, or at the end of
    ``train()``; with ``on_error="warn"`` it is a warning. The Trainer's loggers (``report_to``, ``on_log``) get, with
    the next training loss, ``checkpoint/step``, ``checkpoint/blocked_ms`` (how long training waited for it) and
    ``checkpoint/durable_s`` (from the beginning of the save until it was durable).

    With several processes, ``on_save`` of the other callbacks runs later on the process that writes than on the others,
    so it must not make them communicate.
    """

    @spells_out(Settings)
    def __init__(self, **knobs: Unpack[Settings]) -> None:
        settings.config_of(type(self), knobs, "the Trainer counts its checkpoints; use save_total_limit")
        self._knobs = knobs
        self._start_anew()

    def _start_anew(self) -> None:
        self.newest: lazyckpt.SaveHandle | None = None  # of the save that began last
        self._saver: lazyckpt.Saver | None = None
        self._saves: list[_Save] = []  # not announced yet, oldest first
        self._saving: Trainer | None = None
        self._inside: Path | None = None  # where folders are staged
        self._metrics: dict[str, float] = {}  # not logged yet

    # What the Trainer calls

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **objects: Any) -> None:
        if args.should_save or is_sharded(objects["model"]):
            saver = self._open(objects["model"])  # now: it has to see the optimizer's steps
            if args.save_strategy != SaveStrategy.NO and not args.save_only_model:
                saver.expect(objects["model"], objects["optimizer"])
        if args.should_save:
            _tidy(_staging_folder(args))

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._announce()

    # What the wrapped methods call

    def save(self, trainer: Any, trial: Any, write: Callable[[], None]) -> None:
        """Calls ``write``, a ``_save_checkpoint``, with a staged folder, and saves that folder."""
        if self._saving is trainer or not _is_supported(trainer):
            write()
            return
        begin = time.perf_counter()
        self._announce()
        state = trainer.state
        target = os.path.join(trainer._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        sharded = trainer.is_fsdp_enabled
        with self._on_all_ranks(target, sharded):
            if self._saver is not None:
                self._saver.check()  # before the work is done, if there is an earlier failure to tell of
        trainer.accelerator.wait_for_everyone()  # every rank has made its sentinel
        blocking = False
        if trainer.args.should_save:
            blocking = _is_just_in_time(Path(target))
            self._inside = _staging_folder(trainer.args)
        if sharded:
            (blocking,) = broadcast_object_list([blocking])
        with contextlib.ExitStack() as stack:
            staged = None
            with self._on_all_ranks(target, sharded):
                if trainer.args.should_save or sharded:
                    staging = self._open(trainer.model).stage(
                        Path(target).absolute(),
                        inside=_staging_folder(trainer.args),
                        step=state.global_step,
                        all_ranks=sharded,
                    )
                    staged = stack.enter_context(staging)
            self._write(trainer, staged, target, write)
            if staged is None:
                return
            with self._on_all_ranks(target, sharded):
                handle = self.newest = staged.save(blocking=blocking)
        blocked_s = time.perf_counter() - begin
        if trainer.args.should_save:
            self._saves.append(_Save(trainer, copy.copy(state), target, handle, blocked_s))
        if blocking:
            self._announce()

    def wait(self) -> None:
        """Waits until every checkpoint is durable and announced. Raises the first SaveError that was not raised yet."""
        if self._saver is not None:
            try:
                self._saver.wait()
            finally:
                self._announce()

    def close(self) -> None:
        """Waits, also for removals, and stops the threads. The next save starts new ones."""
        if self._saver is None:
            return
        try:
            with self._saver:
                self.wait()
        finally:
            self._saver = None
            self._saves.clear()
            if self._inside is not None:
                _tidy(self._inside)

    # The parts

    @contextlib.contextmanager
    def _on_all_ranks(self, target: str, sharded: bool) -> Iterator[None]:
        """A context that raises on all ranks if it fails on one, and they save together."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        if sharded and any(gather_object([failure is not None])) and failure is None:
            if self._saver is not None:
                self._saver.wait()  # usually raises: a save fails on all ranks, but they hear of it one by one
            raise lazyckpt.SaveError("another rank says why", path=target)
        if failure is not None:
            raise failure

    def _open(self, model: Any) -> lazyckpt.Saver:
        if self._saver is None:
            self._saver = lazyckpt.Saver(**self._knobs)
        self._saver.watch(model)
        return self._saver

    def _write(
        self, trainer: Any, staged: lazyckpt.StagedFolder | None, target: str, write: Callable[[], None]
    ) -> None:
        """Redirects ``write`` into the staged folder, which rank 0 has, and under FSDP2 every rank."""
        state = trainer.state
        main, sharded = (staged if which else None for which in (trainer.args.should_save, trainer.is_fsdp_enabled))
        (folder,) = broadcast_object_list([staged and str(staged.path)])
        written = os.path.join(folder, os.path.basename(target))
        # _save_checkpoint would do this if it did not look in the staged folder.
        best = os.path.join(os.path.dirname(target), f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
        if os.path.isdir(best):
            state.best_model_checkpoint = best
        self._saving = trainer
        try:
            # A rank that does not see the folder is on another node: what it writes stays there.
            with (
                _writing_into(folder, main, trainer) if os.path.isdir(folder) else contextlib.nullcontext(),
                shards_into(sharded, written, transformers.trainer),
            ):
                write()
        finally:
            self._saving = None
        trainer.accelerator.wait_for_everyone()  # every rank has written its part
        if main is not None:
            if state.best_model_checkpoint == written:
                state.best_model_checkpoint = target
                state.save_to_json(os.path.join(written, TRAINER_STATE_NAME))
            for entry in list(Path(written).iterdir()):
                entry.rename(main.path / entry.name)
            os.rmdir(written)
        # Only rank 0 knows of pending folders, and all ranks will load the best one.
        (state.best_model_checkpoint,) = broadcast_object_list([state.best_model_checkpoint])

    def _announce(self) -> None:
        """Announces the checkpoints that have become durable."""
        while self._saves and self._saves[0].handle.done():
            save = self._saves.pop(0)
            # Not handle.exception(), which would mark the error as reported.
            if Future.exception(save.handle) is None:
                self._announce_one(save)

    def _announce_one(self, save: _Save) -> None:
        trainer, handle = save.trainer, save.handle
        self._metrics = {
            "checkpoint/step": save.state.global_step,
            "checkpoint/blocked_ms": (save.blocked_s + handle.metrics.gate_blocked_s) * 1e3,
            "checkpoint/durable_s": handle.metrics.durable_s,
        }
        control = trainer.control
        should_save = control.should_save
        now, trainer.state = trainer.state, save.state
        try:
            if trainer.args.push_to_hub:
                trainer._push_from_checkpoint(save.target)
            if save.on_save:
                trainer.control = trainer.callback_handler.on_save(trainer.args, save.state, control)
        finally:
            trainer.state = now
        trainer.control.should_save = should_save  # which on_save clears, and a save may be about to begin
        self._rotate(save)

    def _rotate(self, save: _Save) -> None:
        """Removes old checkpoints in the background, as transformers.trainer_utils.rotate_checkpoints does."""
        limit = save.trainer.args.save_total_limit
        if self._saver is None or not limit or limit < 0:
            return
        # Keep the durable ones after this: they are not announced yet.
        later = {str(Path(s.target)) for s in self._saves}
        checkpoints = [path for path in _oldest_first(os.path.dirname(save.target)) if path not in later]
        protected = set(checkpoints[-1:])
        if save.state.best_model_checkpoint is not None:
            protected.add(str(Path(save.state.best_model_checkpoint)))
        surplus = len(checkpoints) - max(limit, len(protected))
        for old in [path for path in checkpoints if path not in protected][: max(surplus, 0)]:
            self._saver.remove(Path(old).absolute())


class LazyCheckpointTrainerMixin:
    """For a Trainer with a ``_save_checkpoint`` of its own: ``class Lazy(LazyCheckpointTrainerMixin, MyTrainer): ...``

    Files that it writes to ``self._get_output_dir(trial)``, as the Trainer does, become part of the staged folder. Adds
    a ``LazyCheckpointCallback`` unless there is one among ``callbacks``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if _callback_in(self.callback_handler) is None:  # type: ignore[attr-defined]
            self.add_callback(LazyCheckpointCallback())  # type: ignore[attr-defined]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        write = functools.partial(super()._save_checkpoint, model, trial)  # type: ignore[misc]
        callback = _callback_in(self.callback_handler)  # type: ignore[attr-defined]
        write() if callback is None else callback.save(self, trial, write)


def _staging_folder(args: TrainingArguments) -> Path:
    return Path(str(args.output_dir), STAGING).absolute()


def _tidy(inside: Path) -> None:
    """Removes what dead runs left in the staging folder, and the folder unless a live run stages in it."""
    try:
        removal.sweep(inside)
    except FileNotFoundError:
        return
    except OSError as error:
        warn(f"what dead runs left in {inside} is not removed: {error}")
    with contextlib.suppress(OSError):  # not empty
        inside.rmdir()


def _oldest_first(run_dir: str) -> list[str]:
    while True:
        try:
            found: list[str] = sort_checkpoints(run_dir, use_mtime=True)
            return found
        except FileNotFoundError:
            pass  # one of them was removed in the background meanwhile


# Where files go while a checkpoint is written


@contextlib.contextmanager
def _writing_into(folder: str, staged: lazyckpt.StagedFolder | None, trainer: Trainer) -> Iterator[None]:
    """A context in which the Trainer writes ``folder/checkpoint-N`` instead of ``output_dir/checkpoint-N``, and large
    objects go to ``staged``."""
    root = os.path.join(folder, f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}")
    torch_save = torch.save

    def stage_object(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        name = redirected.name(f) if redirected is not None else None
        if redirected is None or name is None or os.path.basename(name) not in _LARGE:
            torch_save(obj, f, *args, **kwargs)
        else:
            redirected.add(name, obj)

    with contextlib.ExitStack() as stack:
        redirected = stack.enter_context(safetensors_into(staged, root))
        stack.enter_context(_attribute(trainer, "_get_output_dir", lambda trial: folder))
        # There is nothing to push yet, and in the staged folder nothing to rotate.
        stack.enter_context(_attribute(trainer, "_push_from_checkpoint", lambda checkpoint_folder: None))
        stack.enter_context(_attribute(torch, "save", stage_object))
        yield


_ABSENT = object()


@contextlib.contextmanager
def _attribute(obj: Any, name: str, value: Any) -> Iterator[None]:
    """A context in which ``obj`` has another attribute."""
    before = vars(obj).get(name, _ABSENT)
    setattr(obj, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(obj, name)
        else:
            setattr(obj, name, before)


def _is_just_in_time(target: Path) -> bool:
    """Whether ``enable_jit_checkpoint`` saves: the process was told to end, so it has to be durable at once.

    The folder with its sentinel would be taken for a checkpoint if the process were killed now.
    """
    sentinel = target / _JIT_SENTINEL
    if not os.path.exists(sentinel):
        return False
    sentinel.unlink()
    with contextlib.suppress(OSError):  # not empty: the same step was saved before, and still counts
        target.rmdir()
    return True


# Several processes


def _is_supported(trainer: Trainer) -> bool:
    """Whether one process writes the weights and the optimizer, with torch.save and safetensors, or FSDP2 does."""
    alone = trainer.args.world_size == 1 and trainer.args.parallel_mode is not ParallelMode.TPU
    data_parallel = trainer.args.parallel_mode is ParallelMode.DISTRIBUTED and not trainer.args.save_on_each_node
    if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version != 2:
        return False
    return (alone or data_parallel) and not (trainer.is_deepspeed_enabled or trainer.is_fsdp_xla_enabled)


# The way in


def _callback_in(handler: CallbackHandler, *_: Any) -> LazyCheckpointCallback | None:
    return next((c for c in handler.callbacks if isinstance(c, LazyCheckpointCallback)), None)


def _callback_of(trainer: Trainer, *_: Any) -> LazyCheckpointCallback | None:
    return _callback_in(trainer.callback_handler)


@wrap(Trainer, "_save_checkpoint", _callback_of)
def _save(callback: LazyCheckpointCallback, original: Any, trainer: Trainer, model: Any, trial: Any) -> None:
    callback.save(trainer, trial, functools.partial(original, model, trial))


@wrap(CallbackHandler, "on_save", _callback_in)
def _on_save(
    callback: LazyCheckpointCallback, original: Any, handler: Any, args: Any, state: Any, control: Any, **kwargs: Any
) -> Any:
    """Puts off ``on_save`` of the other callbacks until the save that has just begun is durable."""
    for save in callback._saves:
        if save.trainer.callback_handler is handler and save.state.global_step == state.global_step:
            save.on_save = True
            control.should_save = False
            return control
    return original(args, state, control, **kwargs)


@wrap(CallbackHandler, "on_log", _callback_in)
def _on_log(
    callback: LazyCheckpointCallback,
    original: Any,
    handler: Any,
    args: Any,
    state: Any,
    control: Any,
    logs: Any,
    **kwargs: Any,
) -> Any:
    # For the loggers alone: state.log_history is a part of the checkpoint, and the same whenever the run is the same.
    # Not an entry of its own, and not with the results of an evaluation: a hyperparameter search adds those up.
    metrics: dict[str, float] = {}
    if "loss" in logs or "train_loss" in logs:
        metrics, callback._metrics = callback._metrics, metrics
    logs.update(metrics)
    try:
        return original(args, state, control, logs, **kwargs)
    finally:
        for name in metrics:
            logs.pop(name, None)


@wrap(Trainer, "_load_best_model", _callback_of)
@wrap(Trainer, "_load_from_checkpoint", _callback_of)
def _load(callback: LazyCheckpointCallback, original: Any, trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    callback.wait()
    trainer.accelerator.wait_for_everyone()
    return original(*args, **kwargs)


@wrap(Trainer, "_finalize_training", _callback_of)
def _finalize(callback: LazyCheckpointCallback, original: Any, trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    callback.close()
    trainer.accelerator.wait_for_everyone()
    best = trainer.state.best_model_checkpoint
    if best is not None and not os.path.isdir(best):  # it failed, and on_error="warn" let training go on
        warn(f"the best checkpoint, {best}, was not saved")
        trainer.state.best_model_checkpoint = None
    # With save_total_limit=1 the Trainer now removes the last checkpoint if it is not the best one. It would do so in
    # place, and a kill would leave half of it under its name.
    atomic = types.SimpleNamespace(**{**vars(shutil), "rmtree": _remove_at_once})
    with _attribute(transformers.trainer, "shutil", atomic):
        return original(*args, **kwargs)


def _remove_at_once(checkpoint: str, ignore_errors: bool = True) -> None:
    with contextlib.suppress(OSError):
        removal.remove(Path(checkpoint))


@wrap(Trainer, "train", _callback_of)
def _train(callback: LazyCheckpointCallback, original: Any, trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    callback.wait()  # it is about to look for the last checkpoint
    trainer.accelerator.wait_for_everyone()
    try:
        return original(*args, **kwargs)
    except BaseException:
        try:
            callback.close()  # what was begun becomes durable all the same
        except Exception as failure:  # what ended training matters more
            warn(str(failure))
        raise
