"""Lightning with DeepSpeed: ``Trainer(strategy=LazyDeepSpeedStrategy(stage=2), plugins=[LazyCheckpointIO()])``.

``DeepSpeedStrategy`` lets the engine write a folder, past the CheckpointIO. This strategy stages that folder on all
ranks, and the engine adds its files to it (deepspeed_host.py). ``LazyCheckpointIO`` and its callback (lightning.py)
handle pending checkpoints for the Trainer and ModelCheckpoint. Lightning runs DeepSpeed on CUDA only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lazyckpt
from lazyckpt import private_names
from lazyckpt.integrations.deepspeed_host import Host
from lazyckpt.integrations.lightning import LazyCheckpointIO
from lazyckpt.integrations.lightning_last import local_path
from lazyckpt.integrations.lightning_ranks import raised_on_all
from lazyckpt.integrations.lightning_resume import KEY

with private_names.needed("lightning"):
    from lightning.pytorch.strategies import DeepSpeedStrategy


class LazyDeepSpeedStrategy(DeepSpeedStrategy):
    """Lightning's ``DeepSpeedStrategy``, but checkpoints are lazy and durable, and appear whole or not at all.

    Arguments are those of DeepSpeedStrategy. Settings are those of a ``LazyCheckpointIO`` among the Trainer's plugins,
    and not those under "lazyckpt" in DeepSpeed's JSON; without the plugin, the defaults. Raises ConfigError for another
    CheckpointIO, and for an engine that lazyckpt cannot save.

    Saves block outside ``fit`` and its like, and after an exception. A save that fails raises SaveError on every rank,
    at the next save or load, or at the end of ``fit``. Plain DeepSpeedStrategy and this strategy load each other's
    checkpoints.
    """

    _host: Host

    @property
    def checkpoint_io(self) -> LazyCheckpointIO:
        if self._checkpoint_io is None:  # the Trainer had none among its plugins
            self.checkpoint_io = LazyCheckpointIO()
        io: LazyCheckpointIO = self._checkpoint_io
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        if not isinstance(io, LazyCheckpointIO):
            raise lazyckpt.ConfigError(f"LazyDeepSpeedStrategy takes a LazyCheckpointIO, not {type(io).__name__}")
        io.on_all_ranks = True
        self._checkpoint_io = io
        self._host = Host(io._open_saver, io._own_saver)

    def _setup_model_and_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        from lazyckpt.integrations import deepspeed_trainer  # here, since it imports DeepSpeed

        self.checkpoint_io.check()  # also makes _host
        with deepspeed_trainer.joined(self._host, []):
            return super()._setup_model_and_optimizer(*args, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Returns, on every rank, when the state is captured or guarded; the folder appears when it is durable.

        Raises SaveError, of this or an earlier save, on every rank."""
        path = local_path(self.broadcast(filepath))
        if storage_options is not None or path is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return

        def fill(staged: lazyckpt.StagedFolder) -> None:
            with self._host.collecting(staged.path) as files:
                super(LazyDeepSpeedStrategy, self).save_checkpoint(checkpoint, str(staged.path))
            files.add_to(staged)

        with raised_on_all(self, self.checkpoint_io, path):
            self.checkpoint_io.check()
        with raised_on_all(self, self.checkpoint_io, path):
            self.checkpoint_io.save_folder(path, fill, checkpoint.get("global_step"))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Waits for pending saves, then loads; in ``fit``, every file is verified first. Raises LoadError, or the
        SaveError of a save that failed."""
        with raised_on_all(self, self.checkpoint_io, Path(checkpoint_path)):
            self.checkpoint_io.wait()
        lazyckpt.wait_captured()
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        # With ZeRO-3 each rank has read its own file, and only rank 0's says where all ranks were.
        if (resume := self.broadcast(loaded.get(KEY))) is not None:
            loaded[KEY] = resume
        return loaded

    def teardown(self) -> None:
        self.checkpoint_io.teardown()  # Lightning's strategy has none that it calls
        super().teardown()
