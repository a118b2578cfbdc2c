"""Train a small GPT that is sharded over two processes (FSDP2), and resume it on one.

    python examples/train_fsdp.py [FOLDER]    # default runs/fsdp; two processes with gloo on the CPU; half a minute

Starts the two processes itself; with torchrun: torchrun --nproc-per-node 2 examples/train_fsdp.py. `train` is the whole
of what a script needs: every rank makes a Checkpointer, tracks its shards, and saves. No rank waits for another in
`save()`: the ranks agree in the background, and a checkpoint appears on all or on none.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lazyckpt

STEPS, EVERY, RANKS = 12, 3, 2
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


def train(folder, steps):
    """Trains up to step `steps`, from the newest checkpoint on. Runs on every rank."""
    torch.manual_seed(0)
    model = GPT()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    torch.manual_seed(dist.get_rank())  # masks and batches of its own on each rank
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()

    with lazyckpt.Checkpointer(folder, keep_last=2) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        step = ckpt.restore() or 0  # whatever number of ranks has saved it
        if step and dist.get_rank() == 0:
            print(f"{dist.get_world_size()} rank(s) go on from step {step}", flush=True)
        while step < steps:
            begins = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1))
            loss = model(text[begins + torch.arange(CONTEXT + 1)])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # waits only for shards of this rank that are not copied yet
            step += 1
            if step % EVERY == 0:
                handle = ckpt.save(step)  # returns in milliseconds, on every rank
                if dist.get_rank() == 0:
                    blocked = handle.metrics.save_blocked_s * 1e3
                    print(f"step {step}: loss {loss.item():.3f}, save() took {blocked:.1f} ms", flush=True)


def on_rank(rank, world_size, store, folder, steps):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    train(folder, steps)
    dist.destroy_process_group()


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else "runs/fsdp"
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("gloo")
        train(folder, STEPS)
        dist.destroy_process_group()
        return
    for world_size, steps in ((RANKS, STEPS), (1, STEPS + 4)):
        with tempfile.TemporaryDirectory() as store:
            args = world_size, f"{store}/store", folder, steps
            torch.multiprocessing.spawn(on_rank, args, nprocs=world_size)
    newest = max(Path(folder).glob("step-*"))
    whole = lazyckpt.load(newest)["model"]  # on one process, without the ranks
    print(f"{newest}: {', '.join(sorted(path.name for path in newest.iterdir()))}")
    print(f"head.weight, put together again: {tuple(whole['head.weight'].shape)}")


if __name__ == "__main__":
    main()
