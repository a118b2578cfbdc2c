"""Train a small network on Python's own source under Accelerate, save every few steps, resume where it stopped.

    accelerate launch examples/accelerate_loop.py [--folder runs/accelerate] [--steps 60] [--every 10]

Kill it at any instant and run it again: it goes on from the newest checkpoint, with the losses of a run that was never
stopped. Without the two lines that say lazyckpt it is a plain script; such a one is run as it is by
`accelerate launch -m lazyckpt.run script.py`, and what is saved is what accelerate itself would have saved.
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
    """How far the run is; saved with the rest, since only the script knows."""

    def __init__(self):
        self.epoch = self.batch = self.step = 0

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


def train(folder, steps, every, width):
    """Returns the loss of every step that this run took."""
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
    # Given a generator, the loader takes no random numbers from the one that dropout uses: a resumed run starts
    # an epoch once more than one that was not stopped.
    loader = torch.utils.data.DataLoader(windows, BATCH, shuffle=True, drop_last=True, generator=torch.Generator())
    model = NextByte(width)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps * accelerator.num_processes)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    position = Position()
    accelerator.register_for_checkpointing(position)

    saved = [int(path.name.removeprefix("checkpoint_")) for path in folder.glob("checkpoints/checkpoint_*")]
    if saved:
        accelerator.load_state()  # the newest; only whole ones are there
        accelerator.project_configuration.iteration = max(saved) + 1
        accelerator.print(f"resumed after step {position.step}")

    losses = {}
    while position.step < steps:
        loader.set_epoch(position.epoch)
        for batch in accelerator.skip_first_batches(loader, position.batch):
            with accelerator.accumulate(model):
                loss = model(batch)
                accelerator.backward(loss)
                optimizer.step()  # waits only for what is not copied yet
                scheduler.step()
                optimizer.zero_grad()
            position.batch += 1
            if accelerator.sync_gradients:
                position.step += 1
                losses[position.step] = loss.item()
                if position.step % every == 0:
                    accelerator.save_state()  # back in milliseconds; durable soon after
                    accelerator.print(f"step {position.step}, loss {loss.item():.3f}")
                if position.step == steps:
                    break
        else:
            position.epoch, position.batch = position.epoch + 1, 0
    accelerator.end_training()  # waits until all is durable

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
