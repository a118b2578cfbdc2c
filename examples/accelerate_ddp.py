"""Train a small GPT with Accelerate on two processes (DDP), which write each checkpoint together. Kill it at any time.

    python examples/accelerate_ddp.py [FOLDER] [STEPS]    # default runs/accelerate-ddp and 12; a quarter of a minute

Starts the two processes itself, on the CPU. Only `enable` differs from a script without lazyckpt, and `load_state` of
plain Accelerate reads the folders. Run it again with more steps: it goes on from the newest folder.
"""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn

from lazyckpt.integrations.accelerate import enable

FOLDER = sys.argv[1] if len(sys.argv) > 1 else "runs/accelerate-ddp"
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


def train():
    """Runs on every rank."""
    torch.set_num_threads(1)
    project = ProjectConfiguration(FOLDER, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    saver = enable(accelerator, writers="all")  # each process copies and writes a half of the large files
    torch.manual_seed(accelerator.process_index)  # masks and batches of its own on each rank
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()

    step = 0
    found = list(Path(FOLDER, "checkpoints").glob("checkpoint_*"))
    if found:
        newest = max(int(path.name.split("_")[1]) for path in found)
        accelerator.load_state()  # model, optimizer, and random states
        step = (newest + 1) * EVERY
        accelerator.project_configuration.iteration = newest + 1
        accelerator.print(f"goes on from step {step}", flush=True)
    while step < STEPS:
        begins = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1))
        loss = model(text[begins + torch.arange(CONTEXT + 1)])
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()  # waits only for what this rank has not copied yet
        step += 1
        if step % EVERY == 0:
            accelerator.save_state()  # on every rank
            blocked = saver.last_save.metrics.save_blocked_s * 1e3
            accelerator.print(f"step {step}: loss {loss.item():.3f}, save() took {blocked:.1f} ms", flush=True)
    saver.wait()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for path in sorted(Path(FOLDER, "checkpoints").iterdir()):
            print(f"{path}: {', '.join(sorted(entry.name for entry in path.iterdir()))}")
    accelerator.end_training()


def on_rank(rank, port):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    train()


if __name__ == "__main__":
    if "RANK" in os.environ:  # under accelerate launch or torchrun
        train()
    else:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # finds a free port
        port = store.port
        del store
        torch.multiprocessing.spawn(on_rank, (port,), nprocs=RANKS)
