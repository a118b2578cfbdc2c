"""The Hugging Face Trainer, saving lazily: ``Trainer(..., callbacks=[LazyCheckpointCallback()])``.

The folders ``checkpoint-N`` hold the same files under the same names. Training goes on while they are written, and a
folder gets its name only when all of it is durable.

A callback does not see its Trainer and cannot replace a save. So importing this module wraps a few methods of
``transformers.Trainer``, which behave as before without the callback. With it, they call the callback
(transformers_callback.py): ``_save_checkpoint`` writes a staged folder (transformers_staging.py), and a ``Saver`` takes
the large objects (weights, optimizer). ``push_to_hub`` and ``save_total_limit`` run when the folder is durable, at the
beginning of the next training step or at the end of training (transformers_save.py). Other callbacks get their
``on_save`` at its time; for those that may need the folder the Trainer waits until it is durable
(transformers_on_save.py).

Supported: transformers 4.50 to 5.x, in one process, under DistributedDataParallel, where rank 0 saves, or with
``writers`` several ranks do (replicas.py), or under FSDP2 and DeepSpeed, where every rank saves its shards (fsdp2.py,
deepspeed_host.py). With FSDP 1, XLA, SageMaker model parallelism or ``save_on_each_node`` the Trainer saves as it does
without the callback.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

from lazyckpt import private_names
from lazyckpt.integrations import wrap
from lazyckpt.storage import hidden, removal, unfinished
from lazyckpt.stores.urls import is_url
from lazyckpt.warn import warn

with private_names.needed("transformers"):
    from transformers import Trainer
    from transformers.trainer_callback import CallbackHandler, TrainerState

    from lazyckpt.integrations.transformers_callback import LazyCheckpointCallback
    from lazyckpt.integrations.transformers_staging import oldest_first, staging_folder

    if not hasattr(TrainerState, "best_global_step"):
        raise ImportError("TrainerState has no best_global_step")

__all__ = ["LazyCheckpointCallback", "LazyCheckpointTrainerMixin"]


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
    """Skips callbacks after a failed save: they would find no folder, or make half of one."""
    if callback._failed_step == state.global_step:
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
    if "train_loss" in logs:
        callback.wait()  # the last time that loggers are called: also for the last checkpoint
    if "loss" in logs or "train_loss" in logs:
        metrics, callback._metrics = callback._metrics, metrics
    logs.update(metrics)
    try:
        return original(args, state, control, logs, **kwargs)
    finally:
        for name in metrics:
            logs.pop(name, None)


@wrap(Trainer, "_load_from_checkpoint", _callback_of)
def _load(callback: LazyCheckpointCallback, original: Any, trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    callback.wait()
    trainer.accelerator.wait_for_everyone()
    resume = args[0] if args else kwargs["resume_from_checkpoint"]
    callback.resumed(os.path.abspath(resume))
    return original(*args, **kwargs)


if hasattr(Trainer, "_load_optimizer_and_scheduler"):

    @wrap(Trainer, "_load_optimizer_and_scheduler", _callback_of)
    def _load_optimizer(
        callback: LazyCheckpointCallback, original: Any, trainer: Trainer, *args: Any, **kwargs: Any
    ) -> Any:
        with callback.loading(trainer):
            return original(*args, **kwargs)


@wrap(Trainer, "_load_best_model", _callback_of)
def _load_best(callback: LazyCheckpointCallback, original: Any, trainer: Trainer) -> Any:
    callback.wait()
    trainer.accelerator.wait_for_everyone()
    return original() if _has_best(trainer) else None


def _finish(callback: LazyCheckpointCallback, trainer: Trainer, run_dir: str) -> None:
    """Waits for all saves, before the Trainer looks at its checkpoints for the last time."""
    callback.close()
    trainer.accelerator.wait_for_everyone()
    best, args = trainer.state.best_model_checkpoint, trainer.args
    if _has_best(trainer) and args.should_save and args.save_total_limit == 1:
        # The Trainer would remove the last checkpoint now, in place, and a kill would leave half of it under its name.
        for checkpoint in oldest_first(run_dir):
            if not os.path.samefile(checkpoint, best):
                _remove_at_once(checkpoint, staging_folder(args))


def _has_best(trainer: Trainer) -> bool:
    best = trainer.state.best_model_checkpoint
    if best is not None and not os.path.isdir(best):  # it failed, and on_error="warn" let training go on
        warn(f"the best checkpoint, {best}, was not saved")
        trainer.state.best_model_checkpoint = best = None
    return best is not None


def _remove_at_once(checkpoint: str, inside: Path) -> None:
    with contextlib.suppress(OSError):
        hidden.make(inside)
        removal.remove(Path(checkpoint).absolute(), inside=inside)
    hidden.remove(inside)


if hasattr(Trainer, "_finalize_training"):

    @wrap(Trainer, "_finalize_training", _callback_of)
    def _finalize(callback: LazyCheckpointCallback, original: Any, trainer: Trainer, trial: Any, *args: Any) -> Any:
        _finish(callback, trainer, trainer._get_output_dir(trial))
        return original(trial, *args)

else:  # transformers 4.50 to 5.2: after training it calls no other method before it looks at the folders

    @wrap(Trainer, "_sorted_checkpoints", _callback_of)
    def _sorted(callback: LazyCheckpointCallback, original: Any, trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        if not trainer.is_in_train:
            _finish(callback, trainer, kwargs["output_dir"])
        return original(*args, **kwargs)


@wrap(Trainer, "train", _callback_of)
def _train(callback: LazyCheckpointCallback, original: Any, trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    resume = args[0] if args else kwargs.get("resume_from_checkpoint")
    if isinstance(resume, str | os.PathLike) and not is_url(resume):
        unfinished.refuse(resume)
    callback.wait()  # it is about to look for the last checkpoint
    trainer.accelerator.wait_for_everyone()
    if (found := callback.fetched(trainer, resume)) is not resume:
        args, kwargs = args[1:], {**kwargs, "resume_from_checkpoint": found}
    try:
        with callback.engines(trainer):
            return original(*args, **kwargs)
    except BaseException:
        try:
            callback.close()  # saves in flight become durable all the same
        except Exception as failure:  # the error that ended training matters more
            warn(str(failure))
        raise
