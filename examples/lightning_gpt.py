"""Train a small GPT with Lightning, saving while training continues.

    python examples/lightning_gpt.py [FOLDER]             # default runs/lightning; needs lightning; a minute on 2 cores
    python examples/lightning_gpt.py [FOLDER] --resume    # after Ctrl-C, kill -9 or --epochs: resumes bit for bit

lazyckpt needs one line: ``plugins=[LazyCheckpointIO()]``. With it, a resumed run goes on with the same order of the
data and the same dropout. FOLDER/metrics.csv has the cost of each checkpoint: blocked_ms is the time that training
waited.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lazyckpt.integrations.lightning import LazyCheckpointIO

CONTEXT, BATCH, HEADS = 64, 8, 8


class GPT(LightningModule):
    def __init__(self, layers: int, width: int):
        super().__init__()
        self.save_hyperparameters()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(width, HEADS, 4 * width, 0.1, "gelu", 1e-5, True, True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, text):  # (batch, length) bytes -> (batch, length, 256) scores of the next byte
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        x = self.token(text) + self.position.weight[:length]
        return self.head(self.blocks(x, mask, is_causal=True))

    def loss(self, text):
        return nn.functional.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, text, _):
        loss = self.loss(text)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, text, _):
        self.log("val_loss", self.loss(text), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=6e-4, fused=True)


def library() -> tuple[DataLoader, DataLoader]:
    """Returns loaders over the text of the standard library, cut into windows; the last 64 are for validation."""
    text = b"".join(f.read_bytes() for f in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT).long()
    train, validation = windows[:-64], windows[-64:]
    return DataLoader(train, BATCH, shuffle=True), DataLoader(validation, BATCH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="runs/lightning", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="of an epoch; a checkpoint after each")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    args = parser.parse_args()

    seed_everything(1337)
    train, validation = library()
    trainer = Trainer(
        max_epochs=args.epochs,
        limit_train_batches=args.steps,
        accelerator="cpu",
        plugins=[LazyCheckpointIO()],
        # Keeps the best three by validation loss, and a link to the last durable one.
        callbacks=[ModelCheckpoint(args.folder, monitor="val_loss", save_top_k=3, save_last="link")],
        logger=CSVLogger(args.folder.parent, args.folder.name, version="", flush_logs_every_n_steps=args.steps),
        log_every_n_steps=1,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(GPT(args.layers, args.width), train, validation, ckpt_path="last" if args.resume else None)
    # When fit() returns, everything is durable. The result is an ordinary Lightning checkpoint.
    best = GPT.load_from_checkpoint(trainer.checkpoint_callback.best_model_path).eval()
    with torch.inference_mode():
        text = torch.tensor([list(b"def ")])
        for _ in range(CONTEXT - text.shape[1]):
            text = torch.cat([text, best(text)[:, -1:].argmax(-1)], dim=1)
    print(f"step {trainer.global_step}, validation loss {trainer.callback_metrics['val_loss']:.3f}")
    print(bytes(text[0].tolist()).decode("utf-8", "replace"))


if __name__ == "__main__":
    main()
