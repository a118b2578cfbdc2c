"""Lightning with FSDP2 and tensor parallelism: ``Trainer(strategy=LazyModelParallelStrategy())`` saves lazily.

``ModelParallelStrategy`` writes sharded checkpoints by itself, past the CheckpointIO, and first copies the state of
every rank to host memory. This strategy hands out the live state, and stages the folder on all ranks: the files of
torch.distributed.checkpoint and ``meta.pt``, as Lightning lays them out. ``LazyCheckpointIO`` and its
callback (lightning.py) handle pending checkpoints for the Trainer and ModelCheckpoint, with this strategy, too.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import lazyckpt
from lazyckpt import private_names
from lazyckpt.config import Settings, spells_out
from lazyckpt.integrations.dcp import LazyStorageReader
from lazyckpt.integrations.lightning import LazyCheckpointIO
from lazyckpt.integrations.lightning_last import META, is_sharded, local_path
from lazyckpt.integrations.lightning_ranks import raised_on_all

with private_names.needed("lightning"):
    from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import ModelParallelStrategy

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MODEL = "state_dict"  # where Lightning keeps it; that of optimizer i is under optimizer_i


class LazyModelParallelStrategy(ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy``, but checkpoints are lazy and durable, and appear whole or not at all.

    Keyword arguments are those of ModelParallelStrategy and the fields of ``Config``, except ``keep_last`` and
    ``keep_every``: retention is ``ModelCheckpoint(save_top_k=…)``. Raises ConfigError for an invalid one.

    Saves block outside ``fit`` and its like, and after an exception. A save that fails raises SaveError on every rank,
    at the next save or load, or at the end of ``fit``; ``on_error="warn"`` makes it a warning. Plain
    ModelParallelStrategy and this strategy load each other's checkpoints. With
    ``save_distributed_checkpoint=False`` the file with the whole state goes through LazyCheckpointIO.
    """

    @spells_out(Settings)
    def __init__(
        self,
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int | Literal["auto"] = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **knobs: Unpack[Settings],
    ) -> None:
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        # Beside a plugin of the Trainer, Lightning refuses it.
        self._checkpoint_io = LazyCheckpointIO(**knobs)
        self._checkpoint_io.on_all_ranks = self._save_distributed_checkpoint

    # the state as it is, not a copy

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self._save_distributed_checkpoint:
            whole: dict[str, Any] = super().lightning_module_state_dict()
            return whole
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if not self._save_distributed_checkpoint:
            whole: dict[str, Any] = super().optimizer_state(optimizer)
            return whole
        own = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return get_optimizer_state_dict(self.model, own)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Returns, on every rank, when the state is captured or guarded; the folder appears when it is durable.

        Raises SaveError, of this or an earlier save, on every rank."""
        path = local_path(self.broadcast(filepath))
        if not self._save_distributed_checkpoint or storage_options is not None or path is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        with raised_on_all(self, self.checkpoint_io, path):
            self.checkpoint_io.check()
        sharded = {_MODEL: checkpoint.pop(_MODEL)}
        for number, state in enumerate(checkpoint.pop("optimizer_states", [])):
            sharded[f"optimizer_{number}"] = state

        def fill(staged: lazyckpt.StagedFolder) -> None:
            staged.add_shards(".", sharded)
            if self.is_global_zero:
                staged.add(META, checkpoint)

        with raised_on_all(self, self.checkpoint_io, path):
            self.checkpoint_io.save_folder(path, fill, checkpoint.get("global_step"))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Waits for pending saves, then loads in parallel, and verifies the checksum of every tensor that a rank reads
        whole. Raises LoadError, or the SaveError of a save that failed."""
        path = Path(self.broadcast(checkpoint_path))
        with raised_on_all(self, self.checkpoint_io, path):
            self.checkpoint_io.wait()
        if not is_sharded(path):
            whole: dict[str, Any] = super().load_checkpoint(path, weights_only)
            return whole
        lazyckpt.wait_captured()
        model = {_MODEL: get_model_state_dict(self.model)}
        self._read(model, path, weights_only)
        self.model.load_state_dict(model[_MODEL], strict=self.lightning_module.strict_loading)
        for number, optimizer in enumerate(self.optimizers):
            name = f"optimizer_{number}"
            state = {name: get_optimizer_state_dict(self.model, optimizer)}
            self._read(state, path, weights_only)
            set_optimizer_state_dict(self.model, optimizer, state[name], options=StateDictOptions())
        rest: dict[str, Any] = self.checkpoint_io.load_checkpoint(path / META, weights_only=weights_only)
        return rest

    def _read(self, state: dict[str, Any], path: Path, weights_only: bool | None) -> None:
        state_dict_loader.load(state, storage_reader=LazyStorageReader(path, weights_only=weights_only is not False))

    def teardown(self) -> None:
        self.checkpoint_io.teardown()  # Lightning's strategy has none that it calls
        super().teardown()
