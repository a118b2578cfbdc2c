"""Train a small GPT, kill it while it writes a checkpoint, and resume it bit for bit.

    python examples/train_gpt.py [FOLDER]    # default runs/demo; needs matplotlib, rich; 1 minute on 2 cores

Runs three processes: an uninterrupted run, a run killed with SIGKILL at a random moment of a checkpoint, and a run that
resumes it. `train` has everything that a training script needs of lazyckpt.

    lazyckpt trace runs/demo/runs/whole.json -o timeline.png    # draws one checkpoint beside the training
"""

import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt
import torch
from rich import get_console, progress, table
from torch import nn
from torch.utils.data import DataLoader

import lazyckpt

STEPS, EVERY = 24, 4  # each checkpoint is durable well before the next
LAYERS, WIDTH, HEADS, BATCH, CONTEXT = 6, 640, 10, 8, 64  # 0.36 GB of state, about half a second a step
LEARNING_RATE, DROPOUT, SEED = 6e-4, 0.1, 1337  # with dropout, a forgotten random state would show


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, DROPOUT, "gelu", 1e-5, True, True)
        self.blocks = nn.TransformerEncoder(block, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text):  # (BATCH, CONTEXT + 1) bytes -> mean loss of predicting each next byte
        x = self.token(text[:, :-1]) + self.position.weight
        x = self.blocks(x, nn.Transformer.generate_square_subsequent_mask(CONTEXT), is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())


def train(folder, log):
    torch.manual_seed(SEED)
    text = b"".join(f.read_bytes() for f in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT).long()
    model, handles = GPT(), []
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, STEPS)
    with lazyckpt.Checkpointer(folder, keep_last=2, trace=f"{folder}.json") as ckpt:
        ckpt.track(model=model, optimizer=optimizer, scheduler=scheduler)
        loader = ckpt.track_loader(DataLoader(windows, BATCH, shuffle=True, drop_last=True))
        start = ckpt.restore() or 0
        for step, batch in zip(range(start + 1, STEPS + 1), loader, strict=False):  # an epoch is longer
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if step % EVERY == 0:
                handles.append(ckpt.save(step))
            log(step=step, loss=loss.item())
    for m in (handle.metrics for handle in handles):
        log(checkpoint=[m.blocked_s, m.durable_s, m.bytes])


def compare(state, nbytes, path, block=16 << 20):
    """Returns seconds for torch.save + fsync, and for the disk alone: as many bytes, O_DIRECT, two threads."""
    with open(path, "wb") as file:
        start = time.perf_counter()
        torch.save(state, file)
        os.fsync(file.fileno())
        plain_s = time.perf_counter() - start
    buffer = mmap.mmap(-1, block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # page-aligned, as O_DIRECT requires
    with suppress(OSError):  # a kernel without huge pages
        buffer.madvise(mmap.MADV_HUGEPAGE)  # the kernel splits requests over small pages
    buffer.write(random.randbytes(block))
    file = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_DIRECT)
    start = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        written = sum(pool.map(lambda at: os.pwrite(file, buffer, at), range(0, nbytes, block)))
    os.fdatasync(file)
    disk_s = (time.perf_counter() - start) * nbytes / written
    os.close(file)
    path.unlink()
    return plain_s, disk_s


def run(name, folder, bar, kill_at=STEPS + 1, write_s=0.0):
    """Runs `train` in a process. From step `kill_at` on, kills it up to `write_s` after a checkpoint began."""
    task, entries = bar.add_task(name, total=STEPS), []
    process = subprocess.Popen([sys.executable, __file__, "train", folder], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        entries.append(json.loads(line))
        step = entries[-1].get("step", STEPS)
        bar.update(task, completed=step)
        if step >= kill_at and step % EVERY == 0:
            while process.poll() is None and not any(folder.glob(".tmp-step-*")):
                time.sleep(0.001)
            time.sleep(random.uniform(0, write_s))
            process.send_signal(signal.SIGSTOP)  # freezes it, so that the check and the kill see the same state
            os.waitpid(process.pid, os.WUNTRACED)
            if any(folder.glob(".tmp-step-*")):
                process.kill()
                break
            process.send_signal(signal.SIGCONT)
    assert process.wait() in (0, -signal.SIGKILL), f"the {name} run failed"
    checkpoints = [entry["checkpoint"] for entry in entries if "checkpoint" in entry]
    return {entry["step"]: entry["loss"] for entry in entries if "step" in entry}, checkpoints


def main(out):
    shutil.rmtree(out / "runs", ignore_errors=True)
    with progress.Progress() as bar:
        whole, checkpoints = run("uninterrupted", out / "runs/whole", bar)
        blocked_s, durable_s, nbytes = (median(values) for values in zip(*checkpoints, strict=True))
        killed, _ = run("killed", out / "runs/killed", bar, random.randint(STEPS // 3, STEPS // 2), durable_s)
        resumed, _ = run("resumed", out / "runs/killed", bar)
    state = torch.load(newest := max(out.glob("runs/killed/step-*/state.pt")))
    print(f"torch.load({str(newest)!r}) holds {', '.join(state)}")
    pairs = [compare(state, int(nbytes), out / "scratch") for _ in range(3)]
    plain_s, disk_s = (median(seconds) for seconds in zip(*pairs, strict=True))
    results = table.Table(f"{nbytes / 1e9:.2f} GB", "blocked ms", "durable s", "GB/s", "of the disk's own")
    for name, blocked, s in ("lazyckpt", blocked_s, durable_s), ("torch.save + fsync", plain_s, plain_s):
        results.add_row(name, *f"{blocked * 1e3:.1f} {s:.2f} {nbytes / s / 1e9:.2f} {disk_s / s:.0%}".split())
    get_console().print(results)
    figure, axes = plt.subplots(figsize=(10, 5), layout="constrained")
    axes.plot(whole.keys(), whole.values(), "#b8c4d6", lw=8, label="uninterrupted")
    axes.plot(killed.keys(), killed.values(), "#d1495b", lw=3.5, label="killed")
    axes.plot(resumed.keys(), resumed.values(), "#1b4965", lw=1.2, label="resumed")
    axes.plot(*max(killed.items()), "X", color="#d1495b", ms=14, label="SIGKILL while writing a checkpoint")
    axes.vlines(range(EVERY, STEPS + 1, EVERY), *axes.get_ylim(), "0.88", zorder=0, label="checkpoint")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Killed and resumed, bit for bit")
    axes.legend(frameon=False)
    figure.savefig(out / "losses.png", dpi=150)
    print(f"killed at step {max(killed)} while writing a checkpoint, resumed after step {min(resumed) - 1}")
    assert whole == {**killed, **resumed} == {**resumed, **killed}, "the losses differ"
    print(f"all {STEPS} losses agree bit for bit, to the last {whole[STEPS].hex()}: {out / 'losses.png'}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(Path(sys.argv[2]), lambda **entry: print(json.dumps(entry), flush=True))
    else:
        main(Path(*sys.argv[1:2] or ["runs/demo"]))
