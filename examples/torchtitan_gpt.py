"""Train a small GPT with torchtitan's components, sharded over two processes (FSDP2). Kill it, and it resumes.

    python examples/torchtitan_gpt.py [FOLDER] [STEPS]    # default runs/torchtitan and 12; a quarter of a minute

Starts the two processes itself, on the CPU. torchtitan's own Trainer needs a GPU; `Trainer` below makes the calls that
it makes of its checkpointer, and takes the same Config. With `CheckpointManager.Config` instead, torchtitan alone goes
on from the same folders. Run it again with more steps: it goes on from the newest checkpoint.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides

from lazyckpt.integrations.torchtitan import LazyCheckpointManager

EVERY, RANKS = 3, 2
LAYERS, WIDTH, HEADS, BATCH, CONTEXT = 4, 256, 4, 4, 32


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", 1e-5, True, True) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text):  # (BATCH, CONTEXT + 1) bytes -> mean loss of predicting each next byte
        x = self.token(text[:, :-1])
        for layer in self.layers:
            x = layer(x, nn.Transformer.generate_square_subsequent_mask(CONTEXT), is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())


class Text(torch.utils.data.IterableDataset, Stateful):
    """Pieces of a file, as bytes, at random places of this rank's own."""

    def __init__(self, rank):
        self.random = torch.Generator().manual_seed(rank)
        self.bytes = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()

    def __iter__(self):
        while True:
            begin = torch.randint(len(self.bytes) - CONTEXT, (), generator=self.random)
            yield self.bytes[begin : begin + CONTEXT + 1]

    def state_dict(self):
        return {"random": self.random.get_state()}

    def load_state_dict(self, state):
        self.random.set_state(state["random"])


class Trainer(Stateful, Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        dump_folder: str
        steps: int
        checkpoint: BaseCheckpointManager.Config
        override: OverrideConfig = field(default_factory=OverrideConfig)

    def __init__(self, config):
        apply_overrides(config.override, config)
        self.config, self.step, rank = config, 0, dist.get_rank()
        torch.manual_seed(0)
        self.model = GPT()
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.dataloader = ParallelAwareDataloader(Text(rank), rank, dist.get_world_size(), batch_size=BATCH)
        self.optimizers = default_adamw(3e-4).build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2, total_steps=100)
        self.lr_schedulers = schedule.build(optimizers=self.optimizers, training_steps=config.steps)
        self.checkpointer = config.checkpoint.build(
            dataloader=self.dataloader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=config.dump_folder,
        )

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]

    def train_step(self, text):
        self.optimizers.zero_grad()
        loss = self.model(text)
        loss.backward()
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()  # waits only for shards of this rank that are not copied yet
        self.lr_schedulers.step()
        return loss.item()

    def train(self):
        if self.checkpointer.load(self.config.checkpoint.load_step) and dist.get_rank() == 0:
            print(f"goes on from step {self.step}", flush=True)
        batches = iter(self.dataloader)
        while self.step < self.config.steps:
            self.step += 1
            loss = self.train_step(next(batches))
            saved = self.checkpointer.save(self.step, last_step=self.step == self.config.steps)  # milliseconds
            if saved and dist.get_rank() == 0:
                print(f"step {self.step}: loss {loss:.3f}", flush=True)


def main(folder="runs/torchtitan", steps="12"):
    """Runs on every rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    checkpoint = LazyCheckpointManager.Config(
        enable=True,
        interval=EVERY,
        keep_latest_k=2,
        last_save_model_only=False,  # else a run cannot go on at its end
    )
    trainer = Trainer.Config(dump_folder=folder, steps=int(steps), checkpoint=checkpoint).build()
    trainer.train()
    trainer.checkpointer.close()  # before the group is destroyed, as torchtitan does
    dist.destroy_process_group()


def on_rank(rank, port):
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{RANKS}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    main(*sys.argv[1:])


if __name__ == "__main__":
    if "RANK" in os.environ:  # under torchrun
        main(*sys.argv[1:])
    else:
        port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port  # a free one
        torch.multiprocessing.spawn(on_rank, (port,), nprocs=RANKS)
