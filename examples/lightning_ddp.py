"""Train a small GPT in Lightning on two processes (DDP), which write each checkpoint together. Kill it at any time.

    python examples/lightning_ddp.py [FOLDER] [STEPS]    # default runs/lightning-ddp and 12; half a minute on a CPU

Lightning starts the processes. Only the plugin differs from a script without lazyckpt. Checkpoints are the files that
Lightning writes. Run it again with more steps: it goes on from the newest one, with the same dropout on each process.
"""

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lazyckpt.integrations.lightning import LazyCheckpointIO

STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 12
EVERY, RANKS = 3, 2
LAYERS, WIDTH, HEADS, BATCH, CONTEXT = 4, 256, 4, 4, 32


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.1, "gelu", 1e-5, True, True) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text):  # (BATCH, CONTEXT + 1) bytes -> mean loss of predicting each next byte
        x = self.token(text[:, :-1])
        for layer in self.layers:
            x = layer(x, nn.Transformer.generate_square_subsequent_mask(CONTEXT), is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())


class Training(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = GPT()

    def training_step(self, text, _):
        loss = self.model(text)
        if self.global_rank == 0 and self.global_step % EVERY == 0:
            print(f"step {self.global_step}: loss {loss.item():.3f}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4)

    def train_dataloader(self):
        text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
        windows = text.unfold(0, CONTEXT + 1, CONTEXT)
        return torch.utils.data.DataLoader(windows, batch_size=BATCH, shuffle=True, drop_last=True)


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else "runs/lightning-ddp"
    newest = ModelCheckpoint(folder, every_n_train_steps=EVERY, save_last="link")
    trainer = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        plugins=[LazyCheckpointIO(writers="all")],  # each process copies and writes a half of every file
        callbacks=[newest],
        max_steps=STEPS,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Training(), ckpt_path="last")  # starts anew if there is no checkpoint
    if trainer.is_global_zero:
        print(f"trained to step {trainer.global_step}; {folder} holds {', '.join(sorted(os.listdir(folder)))}")


if __name__ == "__main__":
    main()
