"""A training script for accelerate that has never heard of lazyckpt; the tests run it with ``-m lazyckpt.run``.

    plain_accelerate.py FOLDER STEPS EVERY [kill-at=N] [hook=die|raise]

Prints one line of JSON per optimizer step. ``kill-at``: from that step on it kills itself with SIGKILL once a
temporary folder is there. ``hook``: what rank 1 does while the state is saved.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch import nn

torch.set_num_threads(1)


class Position:
    """Where in the data the run is."""

    def __init__(self) -> None:
        self.epoch = self.batch = self.step = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def main(folder: Path, steps: int, every: int, *options: str) -> None:
    chosen = dict(option.split("=") for option in options)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2),
    )
    set_seed(7)
    data = torch.randn(64, 256)
    # A generator of its own, or every epoch would begin with a draw from that of dropout.
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator())
    model = nn.Sequential(nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.Dropout(0.2), nn.Linear(1024, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, steps * accelerator.num_processes)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    set_seed(accelerator.process_index)  # each rank draws its own dropout
    position = Position()
    accelerator.register_for_checkpointing(position)
    if "hook" in chosen and accelerator.process_index == 1:
        accelerator.register_save_state_pre_hook(lambda models, weights, output_dir: misbehave(chosen["hook"]))
    newest = max(folder.glob("checkpoints/*"), key=lambda path: int(path.name.split("_")[1]), default=None)
    if newest is not None:
        accelerator.load_state()
        accelerator.project_configuration.iteration = int(newest.name.split("_")[1]) + 1
    while position.step < steps:
        loader.set_epoch(position.epoch)
        for batch in accelerator.skip_first_batches(loader, position.batch) if position.batch else loader:
            with accelerator.accumulate(model):
                loss = (model(batch) - batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            position.batch += 1
            if not accelerator.sync_gradients:
                continue
            position.step += 1
            print(json.dumps({"step": position.step, "loss": loss.item().hex()}), flush=True)
            if position.step % every == 0:
                accelerator.save_state()
                if position.step >= int(chosen.get("kill-at", steps + 1)) and any(folder.rglob(".tmp-*")):
                    os.kill(os.getpid(), signal.SIGKILL)
            if position.step == steps:
                break
        position.epoch, position.batch = position.epoch + 1, 0
    accelerator.end_training()


def misbehave(how: str) -> None:
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("the hook of rank 1 failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
