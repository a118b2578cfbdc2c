"""The training that the tests of Lightning's plugin share, and what it leaves."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lazyckpt.integrations.lightning import LazyCheckpointIO

# Holds a third of the state. A smaller chunk would hold no whole page, and nothing in it would be copied lazily.
SMALL_RING = {"host_buffer_bytes": 4 * 8192, "chunk_bytes": 8192, "copy_threads": 1}
WIDTH = 64


class Net(LightningModule):
    """Six batches an epoch; the validation loss differs from one time to the next, up and down."""

    def __init__(self, normalize: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        norm = nn.BatchNorm1d(WIDTH) if normalize else nn.Identity()
        self.layer = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), norm, nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        )
        self.validated = 0
        self.lr = 0.01
        self.batch_size = 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def on_validation_epoch_end(self) -> None:
        self.validated += 1
        self.log("score", torch.tensor([0.5, 0.3, 0.5, 0.2, 0.3, 0.4, 0.1, 0.5][self.validated % 8]))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.layer.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    def train_dataloader(self) -> Any:
        data = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(2))
        return DataLoader(TensorDataset(data), self.batch_size)

    val_dataloader = test_dataloader = train_dataloader


def lazy_io(**knobs: Any) -> LazyCheckpointIO:
    return LazyCheckpointIO(**SMALL_RING, **knobs)


def state_of(trainer: Trainer) -> Any:
    return trainer.lightning_module.state_dict(), [o.state_dict() for o in trainer.optimizers]


def names_in(folder: Path) -> dict[str, str]:
    """The files of a folder; for a link, what it points at."""
    return {p.name: str(os.readlink(p)) if p.is_symlink() else "" for p in folder.iterdir()}


class Each(Callback):
    """Calls something after every batch."""

    def __init__(self, call: Callable[[Trainer], None]) -> None:
        self.call = call

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.call(trainer)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1  # in the middle of a tensor
    path.write_bytes(data)
