"""A Lightning training that test_lightning.py kills: ``python killed_lightning.py RUN LOG SAVE_LAST``, forked many
times: one for each line on its standard input. It answers with the process id and, later, the exit code.

Each trainer goes on from ``ckpt_path="last"`` in RUN, and notes in LOG the step at which it begins.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers would import it, a second for each trainer
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lazyckpt.integrations.lightning import LazyCheckpointCallback, LazyCheckpointIO

WIDTH = 128


class Net(LightningModule):
    def __init__(self, log: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.log_file = log

    def on_train_start(self) -> None:
        os.write(self.log_file, f"{self.global_step}\n".encode())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(10_000, WIDTH), 2)  # type: ignore[arg-type]


def train(run: str, log: int, save_last: Any) -> None:
    torch.set_num_threads(1)  # the pool of threads did not survive the fork
    checkpoint = ModelCheckpoint(run, filename="{step}", every_n_train_steps=1, save_last=save_last)
    callbacks = [checkpoint, LazyCheckpointCallback()]  # if it is installed there are two, and the other keeps still
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(
        default_root_dir=run, accelerator="cpu", devices=1, plugins=[LazyCheckpointIO()], callbacks=callbacks, **quiet
    )
    trainer.fit(Net(log), ckpt_path="last")


def serve(run: str, log: str, save_last: str) -> None:
    log_file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                train(run, log_file, save_last if save_last == "link" else True)
            finally:
                os._exit(1)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(exist_ok=True)
    serve(*sys.argv[1:])
