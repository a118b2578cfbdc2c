"""Train a small GPT with DeepSpeed ZeRO on two processes, which save it lazily, and resume it with plain DeepSpeed.

    torchrun --nproc-per-node 2 examples/deepspeed_zero.py [FOLDER] [STEPS] [--stage 3]

Default: runs/deepspeed, 12 steps, stage 2; half a minute on a CPU. Needs `pip install deepspeed`; `make setup` puts it
into .venv/deepspeed, for PYTHONPATH. Only the import of lazyckpt and the key "lazyckpt" in the JSON differ from a
script without it. Kill it at any time and run it again: it goes on from the tag that `latest` names.
"""

import argparse
import os
import time
import warnings
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # this example trains on CPUs
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import lazyckpt.integrations.deepspeed  # noqa: F401  # reads "lazyckpt" in the JSON

warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # about names DeepSpeed calls
EVERY = 3
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


def config(stage):
    """The JSON of DeepSpeed."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}},  # DeepSpeed would compile its own
        "zero_optimization": {"stage": stage},
        "lazyckpt": {"max_in_flight": 2},
    }


def engine_of(settings):
    torch.manual_seed(0)
    model = GPT()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    return engine


def train(arguments):
    """Trains up to step `steps`, from the tag that `latest` names on. Runs on every rank."""
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # DeepSpeed would compile it
    deepspeed.init_distributed("gloo", verbose=False)
    rank = dist.get_rank()
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    engine = engine_of(config(arguments.stage))
    if Path(arguments.folder, "latest").exists():
        engine.load_checkpoint(arguments.folder)
        if rank == 0:
            print(f"goes on from step {engine.global_steps}", flush=True)

    torch.manual_seed(rank)  # masks and batches of its own on each rank
    while engine.global_steps < arguments.steps:
        begins = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1))
        loss = engine(text[begins + torch.arange(CONTEXT + 1)])
        engine.backward(loss)
        engine.step()  # waits only for the tensors of this rank that are not copied yet
        if engine.global_steps % EVERY == 0:
            start = time.perf_counter()
            engine.save_checkpoint(arguments.folder)  # returns before the tag appears
            whole_ms = 1e3 * (time.perf_counter() - start)
            if rank == 0:
                own_ms = 1e3 * engine.checkpoint_engine.last_save.metrics.save_blocked_s
                took = f"save_checkpoint() took {whole_ms:.1f} ms, {own_ms:.1f} of them in lazyckpt"
                print(f"step {engine.global_steps}: loss {loss.item():.3f}, {took}", flush=True)
    engine.checkpoint_engine.wait()  # until the last one is durable
    newest = engine.global_steps // EVERY * EVERY
    engine.destroy()

    plain = engine_of({key: value for key, value in config(arguments.stage).items() if key != "lazyckpt"})
    plain.load_checkpoint(arguments.folder)
    assert plain.global_steps == newest, f"resumed at step {plain.global_steps}, not {newest}"
    if rank == 0:
        files = sorted(os.listdir(Path(arguments.folder, f"global_step{newest}")))
        print(f"plain DeepSpeed resumes at step {newest}, from {', '.join(files)}")
    plain.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", default="runs/deepspeed")
    parser.add_argument("steps", nargs="?", type=int, default=12)
    parser.add_argument("--stage", type=int, default=2)
    train(parser.parse_args())
