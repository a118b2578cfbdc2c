"""Train a small network under Accelerate with a checkpoint every few steps.

    accelerate launch examples/accelerate_loop.py [--folder runs/accelerate] [--steps 60] [--every 10]

Kill it at any moment and run it again: it resumes with the losses of an uninterrupted run. ``accelerate launch -m
lazyckpt.run script.py`` runs a script without the two lines of lazyckpt, and saves in the same way.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch import nn

from lazyckpt.integrations.accelerate import enable

CONTEXT, BATCH, SEED = 16, 32, 1337


class NextByte(nn.Module):
    """Predicts a byte from the CONTEXT bytes before it."""

    def __init__(self, width):
        super().__init__()
        self.token = nn.Embedding(256, 32)
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(32 * CONTEXT, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 256)
        )

    def forward(self, text):  # (BATCH, CONTEXT + 1) bytes -> mean loss
        return nn.functional.cross_entropy(self.layers(self.token(text[:, :-1])), text[:, -1])


class Position:
    """The progress of the run, saved with the rest because only the script knows it."""

    def __init__(self):
        self.epoch = self.batch = self.step = 0

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


def train(folder, steps, every, width):
    """Returns the loss of every step of this run."""
    folder = Path(folder)
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2),
    )
    checkpoints = enable(accelerator)
    set_seed(SEED)
    text = b"".join(f.read_bytes() for f in sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py")))
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT).long()
    # With its own generator, the loader does not consume dropout's random numbers. A resumed run starts one epoch more
    # than an uninterrupted one.
    loader = torch.utils.data.DataLoader(windows, BATCH, shuffle=True, drop_last=True, generator=torch.Generator())
    model = NextByte(width)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps * accelerator.num_processes)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    position = Position()
    accelerator.register_for_checkpointing(position)

    saved = [int(path.name.removeprefix("checkpoint_")) for path in folder.glob("checkpoints/checkpoint_*")]
    if saved:
        accelerator.load_state()  # the newest; all of them are whole
        accelerator.project_configuration.iteration = max(saved) + 1
        accelerator.print(f"resumed after step {position.step}")

    losses = {}
    while position.step < steps:
        loader.set_epoch(position.epoch)
        for batch in accelerator.skip_first_batches(loader, position.batch):
            with accelerator.accumulate(model):
                loss = model(batch)
                accelerator.backward(loss)
                optimizer.step()  # waits only for tensors that are not copied yet
                scheduler.step()
                optimizer.zero_grad()
            position.batch += 1
            if accelerator.sync_gradients:
                position.step += 1
                losses[position.step] = loss.item()
                if position.step % every == 0:
                    accelerator.save_state()  # returns in milliseconds; durable soon after
                    accelerator.print(f"step {position.step}, loss {loss.item():.3f}")
                if position.step == steps:
                    break
        else:
            position.epoch, position.batch = position.epoch + 1, 0
    accelerator.end_training()  # waits until everything is durable

    if checkpoints is not None and checkpoints.last_save is not None:  # the main process saves
        metrics = checkpoints.last_save.metrics
        print(
            f"last checkpoint: {metrics.bytes / 1e6:.1f} MB, save_state took {metrics.save_blocked_s * 1e3:.1f} ms, "
            f"durable after {metrics.durable_s * 1e3:.1f} ms"
        )
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="runs/accelerate")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--width", type=int, default=2048)
    train(**vars(parser.parse_args()))
