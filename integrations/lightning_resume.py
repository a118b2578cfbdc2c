"""Random states and positions of loaders in Lightning's checkpoints, so that a resumed run ends in the same bits.

Lightning saves neither. It begins the data of an interrupted epoch anew, in another order, and dropout draws other
numbers. Under a key of its own, which Lightning ignores, a checkpoint holds for each rank: the states of the random
number generators, and for each DataLoader of the training data the position and the random states at the beginning of
its epoch. Loaders that have a ``state_dict()`` themselves are saved by Lightning.

lightning_loops.py calls this where Lightning's loops begin, fetch and go on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import DataLoader

import lazyckpt
from lazyckpt.warn import warn

KEY = "lazyckpt"  # of the checkpoint
_TUNER = (".lr_find_", ".scale_batch_size_")  # the files from which the tuner puts a Trainer back to where it was


class ExactResume:
    """The state that a Trainer saves and restores beyond Lightning's own.

    ``alone``: this rank cannot expect the others to save now, too.
    """

    def __init__(self) -> None:
        self.alone = False
        self.owes_validation = False  # the run that was interrupted was about to validate
        self._random = lazyckpt.RandomStates()
        self._tracked: list[Any] = []  # for each loader of the training data; None for one that is not tracked
        self._saved: dict[str, Any] | None = None  # of this rank, until training goes on from it
        self._random_saved: Any = None
        self._put_off = False  # the iterators of the loaders are not those with which training goes on

    def begin(self) -> None:
        """Forgets an earlier run."""
        self.alone = self.owes_validation = False
        self._tracked = []
        self.end()

    def end(self) -> None:
        """Ends the run: later saves hold its state."""
        self._saved = self._random_saved = None

    # saving

    def save(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Adds the state of all ranks on rank 0, which saves it. Every rank calls it, unless it is ``alone``."""
        loop = trainer.fit_loop.epoch_loop
        own = self._saved or {
            "loaders": [self._position(tracked, trainer) if tracked is not None else None for tracked in self._tracked],
            "workers": [_keeps_workers(loader) for loader in _validation_loaders(loop)],
            "batch": 0 if _is_over(loop) else loop.batch_progress.current.ready,  # of the epoch that goes on
        }
        own = {**own, "random": self._random_saved or self._random.state_dict()}
        ranks: list[Any] = [None] * trainer.world_size
        ranks[trainer.global_rank] = own
        if trainer.world_size > 1 and not self.alone and torch.distributed.is_initialized():
            torch.distributed.gather_object(own, ranks if trainer.global_rank == 0 else None)
        checkpoint[KEY] = {"ranks": ranks}

    def _position(self, tracked: Any, trainer: Trainer) -> dict[str, Any]:
        state: dict[str, Any] = tracked.state_dict()
        if _is_over(trainer.fit_loop.epoch_loop):
            return _behind_its_epoch(state)
        if state["start"] is not None:
            # Without a known length, Lightning fetches a batch ahead.
            state["yielded"] -= len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))
        return state

    # restoring

    def load(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Takes this rank's state from the checkpoint, until ``go_on``."""
        path = str(trainer.ckpt_path or "")
        ranks = checkpoint.get(KEY, {}).get("ranks")
        if ranks is None or trainer.state.fn != TrainerFn.FITTING or os.path.basename(path).startswith(_TUNER):
            return
        if len(ranks) != trainer.world_size or None in ranks:
            which = f"{len(ranks)} ranks" if None not in ranks else f"{len(ranks) - ranks.count(None)} of its ranks"
            warn(
                f"random numbers go on from this run's seed, and an epoch that {path} is in the middle of begins anew: "
                f"the checkpoint has the states of {which}, and there are {trainer.world_size} ranks now"
            )
            return
        self._put_off = True
        self._saved = ranks[trainer.global_rank]
        self._random_saved = self._saved["random"]

    def restore_random(self) -> None:
        """Puts the random number generators back, once."""
        state, self._random_saved = self._random_saved, None
        if state is not None:
            try:
                self._random.load_state_dict(state)
            except lazyckpt.RestoreError as error:
                warn(f"random numbers go on from this run's seed: {error}")

    def go_on(self, loop: _TrainingEpochLoop, fetcher: Any, begin: Callable[[Any], None]) -> None:
        """Calls ``begin``, which begins or resumes an epoch, with the loaders and random states as they were."""
        saved, self._saved = self._saved, None
        assert saved is not None
        self._restore_loaders(loop, saved)
        self._start_workers(loop, saved.get("workers", []))
        if not (saved["batch"] and loop.batch_progress.current.ready):
            self.restore_random()  # a new epoch begins with these numbers
        begin(fetcher)
        if self._put_off:
            iter(fetcher)
            fetcher.fetched += loop.batch_progress.current.ready  # as ``begin`` does
        self.restore_random()  # a loader that goes on may have drawn numbers for its iterator
        # Otherwise a ModelCheckpoint would save its last save again, in the middle of the next step.
        for callback in loop.trainer.checkpoint_callbacks:
            # A class that imitates ModelCheckpoint may lack the attribute.
            every = getattr(callback, "_every_n_train_steps", 0) if isinstance(callback, ModelCheckpoint) else 0
            if every and loop.global_step % every == 0:
                callback._last_global_step_saved = loop.global_step
        # A checkpoint is saved before the validation that its batch is followed by.
        due = loop.batch_progress.current.ready and loop.restarted_on_train_batch_end
        self.owes_validation = bool(due and loop._should_check_val_fx(fetcher))

    def _start_workers(self, loop: _TrainingEpochLoop, lived: list[bool]) -> None:
        """Starts the persistent workers for validation that lived. They draw a number, and only when they start."""
        if not any(lived):
            return
        with self.drawing_nothing():
            loop.trainer.validating = True
            loop.val_loop.setup_data()
            loop.trainer.training = True
            for loader, alive in zip(_validation_loaders(loop), lived, strict=False):
                if alive and getattr(loader, "persistent_workers", False) and not _keeps_workers(loader):
                    iter(loader)

    @contextlib.contextmanager
    def drawing_nothing(self) -> Iterator[None]:
        """A context whose code draws numbers that the interrupted run did not draw here: it restores the random
        states."""
        before = self._random.state_dict()
        yield
        self._random.load_state_dict(before)

    def _restore_loaders(self, loop: _TrainingEpochLoop, saved: dict[str, Any]) -> None:
        here = loop.batch_progress.current.ready
        states = [state and _at(state, here, saved["batch"]) for state in saved["loaders"]]
        failure: str | None = None
        try:
            if [state is None for state in states] != [tracked is None for tracked in self._tracked]:
                raise lazyckpt.RestoreError(f"it had {len(states)} loaders, and there are {len(self._tracked)}")
            for tracked, state in zip(self._tracked, states, strict=True):
                if tracked is not None:
                    tracked.check(state)
        except lazyckpt.RestoreError as error:
            failure = str(error)
        if not loop.trainer.strategy.reduce_boolean_decision(failure is None, all=True):
            if here:
                warn(f"the data of this epoch begin anew: {failure or 'another rank says why'}")
            return
        again = 0
        for tracked, state in zip(self._tracked, states, strict=True):
            if tracked is not None:
                tracked.load_state_dict(state)
                # Lightning has told the samplers the epoch before, and it may be another than that of the checkpoint.
                _set_sampler_epoch(tracked, loop.trainer.fit_loop.epoch_progress.current.processed)
                again = max(again, state["yielded"])
        if again:
            rank_zero_info(f"lazyckpt: the first {again} batches of this epoch are fetched again and dropped")

    # the loaders of the training data

    def track(self, combined: CombinedLoader) -> None:
        """Counts the batches of iterators of these loaders from now on. The loaders themselves stay unchanged."""
        loaders = combined.flattened
        # With "max_size", a loader that has ended stays so until the longest ends, which its position does not tell.
        known = combined._mode != "max_size" or len(loaders) == 1
        self._tracked = [
            lazyckpt.track_loader(loader)
            if known and isinstance(loader, DataLoader) and not isinstance(loader, _Stateful)
            else None
            for loader in loaders
        ]

    @property
    def waits(self) -> bool:
        """Whether training has yet to go on from a checkpoint."""
        return self._saved is not None

    def resumable(self, combined: CombinedLoader) -> bool:
        """Whether every loader goes on where it was."""
        pairs = zip(self._tracked, combined.flattened, strict=True)
        return all(tracked is not None or isinstance(loader, _Stateful) for tracked, loader in pairs)

    def sources(self, combined: CombinedLoader) -> list[_Source]:
        return [_Source(self, *pair) for pair in zip(combined.flattened, self._tracked, strict=True)]

    def batches(self, loader: Any, tracked: Any) -> Iterator[Any]:
        self._put_off = self.waits
        if self._put_off:
            return iter(())  # go_on() asks again: numbers that are drawn before it are not those of the checkpoint
        return iter(loader) if tracked is None else _Batches(tracked.begin())


class _Source:
    """Stands for a loader where Lightning makes an iterator of it."""

    def __init__(self, resume: ExactResume, loader: Any, tracked: Any) -> None:
        self._resume = resume
        self._loader = loader
        self._tracked = tracked

    def __iter__(self) -> Iterator[Any]:
        return self._resume.batches(self._loader, self._tracked)

    def __len__(self) -> int:
        return len(self._loader)


class _Batches:
    """An iterator that a copy of the Trainer lacks, as it lacks that of a DataLoader."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def __reduce__(self) -> tuple[Any, ...]:
        return iter, ((),)


def _validation_loaders(loop: _TrainingEpochLoop) -> list[Any]:
    combined = loop.val_loop._combined_loader
    return combined.flattened if combined is not None else []


def _keeps_workers(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and loader._iterator is not None  # DataLoader keeps only persistent ones


def _is_over(loop: _TrainingEpochLoop) -> bool:
    """Whether Lightning fetches no more batches in this epoch, although the loader may have some."""
    return bool(loop._num_ready_batches_reached())


def _behind_its_epoch(state: dict[str, Any]) -> dict[str, Any]:
    if state["start"] is None:
        return state
    return {**state, "epoch": state["epoch"] + 1, "start": None, "yielded": 0}


def _at(state: dict[str, Any], here: int, saved_at: int) -> dict[str, Any]:
    """The state of a loader where Lightning goes on, at batch ``here``, if that is not where it was saved: a checkpoint
    from inside a batch repeats it, one of an epoch that was stopped early may begin the next one."""
    if state["start"] is None or here == saved_at:
        return state
    return {**state, "yielded": state["yielded"] - (saved_at - here)} if here else _behind_its_epoch(state)
