"""torchtitan: a checkpoint manager whose ``save`` returns in milliseconds, and whose checkpoints are durable and whole.

Take it in a function of a config registry, or activate it for any config from the command line:

    checkpoint=LazyCheckpointManager.Config(enable=True, interval=500)
    ./run_train.sh --checkpoint.enable --override.imports lazyckpt.integrations.torchtitan.lazy

torchtitan's own manager decides when to save and to load, and which state. Here ``dcp_save`` stages the folder on all
ranks and hands over the live state. The ranks agree by votes on background threads, so a save has no collective. (The
StorageWriter of dcp.py would need a plan of all ranks for each save, and stages beside the checkpoint.)

torchtitan finds checkpoints by ``re.search(r"step-(\\d+)")``, which also finds ``.tmp-step-20-…`` and takes it for step
20. So folders are staged in a subfolder, where it does not look, and this manager looks for whole names only.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.stateful import Stateful

import lazyckpt
from lazyckpt import private_names, settings
from lazyckpt.config import Settings, spells_out
from lazyckpt.gate import hooks
from lazyckpt.integrations import announce, close_and_warn
from lazyckpt.storage import hidden, removal
from lazyckpt.warn import warn

with private_names.needed("torchtitan"):
    from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager
    from torchtitan.config.override import derive, override
    from torchtitan.tools import filesystem

    from lazyckpt.integrations.dcp import LazyStorageReader

if TYPE_CHECKING:
    from typing_extensions import Unpack

STAGING = "_lazyckpt"  # in the folder of the checkpoints, since it must be on the same file system
_STEP = re.compile(r"step-(\d+)")
_WHOLE = (".metadata", "model.safetensors.index.json")  # a checkpoint of torchtitan has one of them

hooks.install()  # only optimizers that were seen to step are copied lazily


class LazyCheckpointManager(CheckpointManager):
    """torchtitan's ``CheckpointManager``, but saves are lazy and durable, and appear whole or not at all.

    Plain ``CheckpointManager`` and this manager load each other's checkpoints. All options of its Config hold. A save
    that fails in the background raises SaveError at the next save (which saves all the same) or load or at the end of
    training, on each rank as soon as it learns of the failure; ``on_error="warn"`` of the settings makes it a warning.
    Raises ConfigError for a folder that is not local, and for settings that torchtitan has options for (``keep_last``).
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's options, and lazyckpt's."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """"async" and "async_with_pinned_mem" save lazily; if there is a GPU, host memory is pinned in any case.
        With "disabled" a save returns when it is durable."""

        weights_only: bool = True
        """Refuse a checkpoint with pickles that could run code when it is loaded."""

        settings: lazyckpt.Config = dataclasses.field(default_factory=lazyckpt.Config)
        """lazyckpt's settings. ``keep_latest_k`` is the retention."""

    save_future: lazyckpt.SaveHandle | None
    last_save: lazyckpt.SaveHandle | None = None
    """The handle of the last save, with its metrics."""

    def __init__(self, config: Config, **components: Any) -> None:
        # Without its process group and its thread, which are for its own asynchronous saves and removals.
        without = copy.copy(config)
        without.async_mode, without.keep_latest_k = "disabled", 0
        super().__init__(without, **components)
        if not self.enable:
            return
        if filesystem.is_remote(self.folder):
            raise lazyckpt.ConfigError(
                f"checkpoint.folder={self.folder}: LazyCheckpointManager saves to a local or mounted file system; "
                "use torchtitan's CheckpointManager for object stores"
            )
        knobs = {field.name: getattr(config.settings, field.name) for field in dataclasses.fields(config.settings)}
        settings.config_of(type(self), knobs, "checkpoint.keep_latest_k says how many checkpoints stay")
        self.async_mode = AsyncMode.DISABLED if config.async_mode == "disabled" else AsyncMode.ASYNC
        self.keep_latest_k = config.keep_latest_k
        self._folder = Path(self.folder).absolute()
        self._weights_only = config.weights_only
        self._rank = dist.get_rank()
        self._saver = lazyckpt.Saver(**knobs)
        self._at_the_end = weakref.finalize(
            self, close_and_warn, self._saver
        )  # for a script that does not call close()
        for model in self.states[MODEL].model:
            self._saver.watch(model)
        if not self.load_only:
            announce(self._saver, lambda: [*self.states[MODEL].model, *components["optimizers"]])

    def __del__(self) -> None:
        """Leaves the close to the finalizer: an error raised here would be lost."""

    # saves

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Returns when the state is captured or guarded, unless this is the last step, whose save is durable on return.

        Raises SaveError, of this save, or of an earlier one after this one has begun: if only one rank left it out,
        the others would fail it."""
        if self._should_save(curr_step, last_step):
            self.save_future = None  # CheckpointManager would wait until the last save is durable
        saved: bool = super()._save(curr_step, last_step)
        return saved

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> lazyckpt.SaveHandle:
        """Saves ``state_dict`` as the folder ``checkpoint_id``, on every rank. Returns when it is durable if
        ``async_mode`` is DISABLED. Raises SaveError."""
        target = Path(checkpoint_id).absolute()
        step = int(match[1]) if (match := _STEP.fullmatch(target.name)) else None
        with self._saver.stage(
            target, inside=hidden.place(self._folder, STAGING), step=step, all_ranks=True, keep_others=False
        ) as staged:
            if to_hf:
                super().dcp_save(state_dict, str(staged.path), AsyncMode.DISABLED, enable_garbage_collection, to_hf)
            else:
                staged.add_shards(".", {name: _state_of(value) for name, value in state_dict.items()})
            self.last_save = staged.save(blocking=async_mode == AsyncMode.DISABLED)
        return self.last_save

    def _wait_for_saving(self) -> None:
        """Waits until every save is durable. Raises the first SaveError that was not raised yet."""
        self.save_future = None
        self._saver.wait()

    def _purge_stale_checkpoints(self) -> None:
        """Removes checkpoints that ``keep_latest_k`` newer ones follow, once all pending saves are durable. Keeps them
        if the last of these fails, and always keeps the checkpoint that was saved last."""
        if not self._should_purge():
            return
        pending = [handle.path.name for handle in self._saver.pending()]
        found = {*_steps(os.listdir(self._folder)), *_steps(pending)}
        whole = [step for step, name in found if name in pending or _is_whole(self._folder / name)]
        newest = self.last_save.path.name if self.last_save is not None else None
        for step, name in found:
            if sum(other > step for other in whole) >= self.keep_latest_k and name != newest:
                self._saver.remove(self._folder / name)

    def _close(self) -> None:
        """Waits until everything is durable. Raises the SaveError of a save that failed; warns, if an exception has
        ended training."""
        if not hasattr(self, "_at_the_end"):
            return  # __init__ raised
        self._at_the_end.detach()
        self._saver.__exit__(*sys.exc_info())

    # loads

    def _load(self, step: int = -1) -> bool:
        """Waits for pending saves, and restores a checkpoint whose replacement a crash cut off. Raises SaveError of a
        failed save, LoadError (within DCP's CheckpointException), and the errors of CheckpointManager."""
        self._saver.wait()
        lazyckpt.wait_captured()  # other Savers may still be copying tensors that this overwrites
        if self._rank == 0 and not self.load_only:
            try:
                removal.sweep(self._folder)
            except FileNotFoundError:
                pass
            except OSError as error:
                warn(f"what dead processes left in {self._folder} is not removed: {error}")
        dist.barrier()  # the other ranks look into the folder, too
        loaded: bool = super()._load(step)
        return loaded

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Loads in parallel, and verifies the checksum of every tensor that a rank reads whole."""
        if from_hf or filesystem.is_remote(checkpoint_id):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        reader = LazyStorageReader(checkpoint_id, weights_only=self._weights_only)
        state_dict_loader.load(state_dict, storage_reader=reader)
        self.states[MODEL].load_state_dict(state_dict)
        folder = Path(checkpoint_id).absolute()
        if folder.parent == self._folder and (match := _STEP.fullmatch(folder.name)) is not None:
            self._saver.resumed(folder, int(match[1]))  # a mirror that lacks it gets it

    def _find_load_step(self, folder: str = "") -> int:
        where = Path(folder or self._folder)
        names = os.listdir(where) if where.is_dir() else []
        return max((step for step, name in _steps(names) if _is_whole(where / name)), default=-1)


@spells_out(Settings)
def lazy(config: CheckpointManager.Config, **knobs: Unpack[Settings]) -> LazyCheckpointManager.Config:
    """Replaces the Config of torchtitan's ``CheckpointManager`` by ours with the same options.

    ``knobs`` are lazyckpt's settings. ``async_mode`` is dropped: saves are lazy."""
    own = lazyckpt.Config.of(knobs, "lazyckpt.integrations.torchtitan.lazy")
    ours: LazyCheckpointManager.Config = derive(config, LazyCheckpointManager.Config, async_mode="async", settings=own)
    return ours


override(target=CheckpointManager.Config, exact=True, description="Saves lazily and durably, with lazyckpt")(lazy)


def _state_of(value: Any) -> Any:
    return value.state_dict() if isinstance(value, Stateful) else value


def _steps(names: list[str]) -> Iterator[tuple[int, str]]:
    """The names of checkpoints, with their steps."""
    return ((int(match[1]), name) for name in names if (match := _STEP.fullmatch(name)))


def _is_whole(checkpoint: Path) -> bool:
    return any((checkpoint / name).is_file() for name in _WHOLE)
