"""How the ranks of Lightning save a part of each checkpoint: errors on all of them, and, under DDP, one file that they
write together (``LazyCheckpointIO(writers=…)``).

Lightning's strategies call the CheckpointIO on rank 0 alone, although every rank has the whole checkpoint in its hands
then. So for the time of a run the callback puts ``save_together`` in the place of the strategy's ``save_checkpoint``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy

import lazyckpt
from lazyckpt.integrations.lightning_last import local_path
from lazyckpt.storage import commit, folders

SLURM_PREFIX = "hpc_ckpt_"  # of files that Lightning saves in a signal handler, and looks for after a requeue
EVERYONES = ("state_dict", "optimizer_states")  # equal on all ranks under DDP; of the rest rank 0's is saved


class _Saves(Protocol):
    writers: Any

    def check(self) -> None: ...
    def wait(self) -> None: ...
    def save_together(self, checkpoint: dict[str, Any], target: Path) -> None: ...


@contextlib.contextmanager
def raised_on_all(strategy: Strategy, io: _Saves, path: Path) -> Iterator[None]:
    """A context that raises on all ranks if it fails on one. They would wait for it otherwise."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if strategy.reduce_boolean_decision(failure is not None, all=False):
        if failure is None:
            io.wait()  # usually raises: a save fails on all ranks, but they learn of it one by one
        raise failure or lazyckpt.SaveError("another rank says why", path=path)


def check(trainer: Trainer, writers: Any) -> None:
    """Raises ConfigError, on every rank, for a strategy that does not keep the whole state on all of them."""
    strategy = trainer.strategy
    if not isinstance(strategy, DDPStrategy) or type(strategy).save_checkpoint is not Strategy.save_checkpoint:
        raise lazyckpt.ConfigError(
            f"LazyCheckpointIO(writers={writers!r}) takes Lightning's DDPStrategy, on whose ranks the whole state is, "
            f"and not {type(strategy).__name__}; without writers, rank 0 saves"
        )


def check_optimizers(trainer: Trainer, writers: Any) -> None:
    """Raises ConfigError, on every rank, for an optimizer whose state differs from rank to rank."""
    for optimizer in trainer.optimizers:
        if hasattr(optimizer, "consolidate_state_dict"):
            raise lazyckpt.ConfigError(
                f"LazyCheckpointIO(writers={writers!r}): {type(optimizer).__name__} holds a part of its state on each "
                "rank; without writers, rank 0 saves"
            )


def save_together(
    strategy: Strategy,
    io: _Saves,
    original: Callable[..., None],
    checkpoint: dict[str, Any],
    filepath: Any,
    storage_options: Any = None,
) -> None:
    """``Strategy.save_checkpoint``, on every rank. Raises SaveError, of this or an earlier save, on all of them."""
    if os.path.basename(filepath).startswith(SLURM_PREFIX):
        original(checkpoint, filepath, storage_options=storage_options)
        return
    path = local_path(strategy.broadcast(filepath))  # a metric in the name may differ
    if path is None or storage_options is not None:
        original(checkpoint, filepath, storage_options=storage_options)
        return
    with raised_on_all(strategy, io, path):
        io.check()
    with raised_on_all(strategy, io, path):
        io.save_together(checkpoint, path)


def save_in_signal_handler(checkpoint: dict[str, Any], target: Path) -> None:
    """Saves durably without the Saver, whose save() the signal may have interrupted."""
    # Not a temporary name of lazyckpt's: after a crash Lightning would take the digits in it for a version.
    unfinished = target.with_name(f".unfinished-{os.getpid()}")
    folders.make_folder(target.parent)
    lazyckpt.save(checkpoint, unfinished)
    commit.publish_file(unfinished, target)
