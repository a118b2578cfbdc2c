"""Two ranks of Lightning, each with random numbers and a loader of its own, go on after a checkpoint of theirs."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("lightning", minversion="2.6")

import lightning
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from processes import Ranks
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lazyckpt.integrations.lightning import LazyCheckpointIO
from lazyckpt.integrations.lightning_sharded import LazyModelParallelStrategy
from trainers import lightning_trainer

BATCHES = 6  # of an epoch of each rank
SETTINGS: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 1, "val_check_interval": 4}


class Net(lightning.LightningModule):
    def __init__(self, sharded: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 1))
        self.sharded = sharded
        self.seen: list[float] = []

    def configure_model(self) -> None:
        if self.sharded:
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch[0, 0].item())
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.layer(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def train_dataloader(self) -> Any:
        rows = torch.arange(16.0 * BATCHES).view(-1, 1).expand(-1, 8) / 100
        return DataLoader(rows, batch_size=8, shuffle=True)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


def fit(folder: Path, sharded: bool, seed: int, resumed: Any = None, *callbacks: Callback) -> tuple[Net, Any]:
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # else Lightning starts processes of its own
    net = Net(sharded)
    torch.manual_seed(100 * seed + dist.get_rank())
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    strategy = LazyModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if sharded else DDPStrategy()
    io = None if sharded else LazyCheckpointIO()
    trainer = lightning_trainer(folder, io, *callbacks, checkpoint, strategy=strategy, devices=2, **SETTINGS)
    trainer.fit(net, ckpt_path=resumed)
    return net, trainer


def weights(net: Net) -> list[list[float]]:
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters())
    return [parameter.detach().flatten().tolist() for parameter in whole]


def go_on(folder: Path, sharded: bool, step: int) -> Any:
    whole, _ = fit(folder / "run", sharded, 7)
    resumed, _ = fit(folder / "again", sharded, 8, folder / f"run/step={step}.ckpt")
    return whole.seen, resumed.seen, weights(whole) == weights(resumed)


@pytest.mark.long
@pytest.mark.parametrize("step", [10, 6])
@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_each_rank_goes_on_with_its_own_numbers_and_data(
    sharded: bool, step: int, ranks: Ranks, tmp_path: Path
) -> None:
    found = ranks.run(2, go_on, tmp_path, sharded, step)
    assert found[0][0] != found[1][0]
    for whole, resumed, equal in found:
        assert resumed == whole[step:] and equal


class RaiseOnRank0(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            dist.barrier()  # the other rank is behind its collective operations
            raise RuntimeError("on purpose")


def save_alone(folder: Path) -> Any:
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(folder / "run", False, 7, None, RaiseOnRank0(), OnExceptionCheckpoint(folder / "run", "raised"))
    saved = torch.load(folder / "run/raised.ckpt")["lazyckpt"]["ranks"]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _, trainer = fit(folder / "again", False, 8, folder / "run/raised.ckpt")
    return [own is None for own in saved], trainer.global_step, [str(w.message) for w in said]


def test_a_checkpoint_of_an_exception_asks_no_other_rank(ranks: Ranks, tmp_path: Path) -> None:
    """The others may have raised nothing: a rank that waited for them would write no file."""
    for missing, steps, said in ranks.run(2, save_alone, tmp_path):
        assert missing == [False, True] and steps == 3 + 3 + BATCHES
        assert any("the states of 1 of its ranks, and there are 2 ranks now" in text for text in said)
