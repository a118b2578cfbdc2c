"""Train a small GPT with the Hugging Face Trainer on two processes (DDP), which write each checkpoint together.

    python examples/hf_trainer_ddp.py [FOLDER] [STEPS]    # default runs/hf-ddp and 12; half a minute on a CPU

Starts the two processes itself, on the CPU. Only the callback differs from a script without lazyckpt, and a plain
Trainer resumes from the folders. Kill it at any time and run it again: it goes on from the newest folder.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from lazyckpt.integrations.transformers import LazyCheckpointCallback

FOLDER = sys.argv[1] if len(sys.argv) > 1 else "runs/hf-ddp"
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

    def forward(self, text, labels=None):  # (BATCH, CONTEXT + 1) bytes -> mean loss of predicting each next byte
        x = self.token(text[:, :-1])
        for layer in self.layers:
            x = layer(x, nn.Transformer.generate_square_subsequent_mask(CONTEXT), is_causal=True)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())}


def train():
    """Runs on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    windows = [{"text": window} for window in text.unfold(0, CONTEXT + 1, CONTEXT)]
    arguments = TrainingArguments(
        FOLDER,
        max_steps=STEPS,
        save_steps=EVERY,
        logging_steps=EVERY,
        save_total_limit=2,
        learning_rate=3e-4,
        per_device_train_batch_size=BATCH,
        ddp_backend="gloo",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    callback = LazyCheckpointCallback(writers="all")  # each process copies and writes a half of weights and optimizer
    trainer = Trainer(GPT(), arguments, train_dataset=windows, callbacks=[callback])
    newest = get_last_checkpoint(FOLDER) if os.path.isdir(FOLDER) else None
    begin = 0 if newest is None else int(newest.rpartition("-")[2])
    if begin and trainer.is_world_process_zero():
        print(f"goes on from step {begin}", flush=True)
    trainer.train(resume_from_checkpoint=newest)
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "loss" in entry and entry["step"] > begin:
                print(f"step {entry['step']}: loss {float(entry['loss']):.3f}")
        for path in sorted(Path(FOLDER).glob("checkpoint-*")):
            print(f"{path}: {', '.join(sorted(entry.name for entry in path.iterdir()))}")
    torch.distributed.destroy_process_group()


def on_rank(rank, port):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    train()


if __name__ == "__main__":
    if "RANK" in os.environ:  # under torchrun
        train()
    else:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # finds a free port
        port = store.port
        del store
        torch.multiprocessing.spawn(on_rank, (port,), nprocs=RANKS)
