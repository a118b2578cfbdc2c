"""Calls lightning_resume.py where Lightning's loops begin, fetch and go on.

A hook of a callback does not suffice. Lightning fetches the batch after the checkpoint before it calls any hook, and
whenever a hook looks at the training data, it must see the user's own DataLoader. So this wraps a few methods of the
loops, for Trainers that are attached here.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lazyckpt.integrations import wrap
from lazyckpt.integrations.lightning_resume import ExactResume

_attached: weakref.WeakKeyDictionary[Trainer, ExactResume] = weakref.WeakKeyDictionary()
_training_data: weakref.WeakKeyDictionary[CombinedLoader, ExactResume] = weakref.WeakKeyDictionary()


def attach(trainer: Trainer, resume: ExactResume) -> Callable[[], None]:
    """Begins a run. Returns a function that ends it."""
    resume.begin()
    _attached[trainer] = resume

    def detach() -> None:
        _attached.pop(trainer, None)
        resume.end()
        for combined in [combined for combined, owner in _training_data.items() if owner is resume]:
            _training_data.pop(combined)

    return detach


def _of_loop(loop: Any, *_: Any) -> ExactResume | None:
    return _attached.get(loop.trainer)


def _waiting(loop: Any, *_: Any) -> ExactResume | None:
    resume = _of_loop(loop)
    return resume if resume is not None and resume.waits else None


@wrap(_FitLoop, "_load_combined_loader_states", _of_loop)
def _track(resume: ExactResume, original: Any, loop: _FitLoop) -> None:
    original()
    if loop._combined_loader is not None:
        resume.track(loop._combined_loader)
        _training_data[loop._combined_loader] = resume


@wrap(CombinedLoader, "__iter__", _training_data.get)
def _iterate(resume: ExactResume, original: Any, combined: CombinedLoader) -> Any:
    loaders = combined._flattened
    combined._flattened = resume.sources(combined)  # for the iterator alone
    try:
        return original()
    finally:
        combined._flattened = loaders


@wrap(_TrainingEpochLoop, "reset", _waiting)
def _reset(resume: ExactResume, original: Any, loop: _TrainingEpochLoop) -> None:
    for callback in loop.trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler):  # Lightning does so only where an epoch begins
            callback.on_train_epoch_start(loop.trainer)
    combined = loop.trainer.fit_loop._combined_loader
    with warnings.catch_warnings() if resume.resumable(combined) else contextlib.nullcontext():
        if resume.resumable(combined):
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
        original()


@wrap(_TrainingEpochLoop, "on_run_start", _waiting)
def _on_run_start(resume: ExactResume, original: Any, loop: _TrainingEpochLoop, fetcher: Any) -> None:
    if loop.done:  # no batch of this epoch is left
        original(fetcher)
    else:
        resume.go_on(loop, fetcher, original)


def _owing(loop: Any, *_: Any) -> ExactResume | None:
    resume = _of_loop(loop)
    return resume if resume is not None and resume.owes_validation else None


@wrap(_TrainingEpochLoop, "advance", _owing)
def _advance(resume: ExactResume, original: Any, loop: _TrainingEpochLoop, fetcher: Any) -> None:
    """Trains no batch, so that Lightning validates next, as it would have behind the batch of the checkpoint."""
    resume.owes_validation = False
    loop.val_loop.restarting = False  # validation begins
    if not loop._should_accumulate():
        loop._batches_that_stepped -= 1  # Lightning counts this when it resumes, and behind the validation


@wrap(_EvaluationLoop, "increment_progress_to_evaluation_end", _of_loop)
def _pass_over(resume: ExactResume, original: Any, _: _EvaluationLoop) -> None:
    """Where a run goes on, Lightning begins a validation to count it as done."""
    with resume.drawing_nothing():
        original()


@wrap(_SignalConnector, "_slurm_sigusr_handler_fn", lambda connector, *_: _attached.get(connector.trainer))
def _in_signal_handler(resume: ExactResume, original: Any, connector: Any, *args: Any) -> None:
    """The signal interrupts every rank somewhere else, maybe in the middle of a collective operation."""
    resume.alone = True
    try:
        original(*args)
    finally:
        resume.alone = False
