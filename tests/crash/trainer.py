"""A small real training that test_sigkill.py kills: ``python trainer.py RUN LOG``, forked many times.

Importing torch takes longer than a whole trial. So this process imports it once, forks a trainer for each line on its
standard input, and answers with the process id. It computes nothing itself, and ends with its input.

A trainer resumes from RUN and saves at every step until it is killed. LOG is the oracle: before each save a line
"saving STEP DIGEST", after each result "durable STEP", both written at once, so that they survive the kill.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers would import it, a second for each trainer
import torch.profiler

import lazyckpt
from lazyckpt import _engine

# Some saves dawdle where they otherwise pass too quickly to be killed: before the file exists, and before it is synced.
STALLS = "create:2:stall,sync:3:stall,create:5:stall,sync:6:stall"
CHUNK_BYTES = 256 << 10
WIDTH = 704  # two layers, with AdamW's state 12 MB


def tensors_in(obj: Any) -> list[torch.Tensor]:
    if isinstance(obj, torch.Tensor):
        return [obj]
    children = obj.values() if isinstance(obj, dict) else obj if isinstance(obj, list | tuple) else []
    return [tensor for child in children for tensor in tensors_in(child)]


def digest(state: dict[str, Any]) -> str:
    """The digest of everything that a step changes: ``model`` and ``optimizer``, as a checkpoint holds them."""
    hashed = hashlib.blake2b(digest_size=8)
    for tensor in tensors_in([state["model"], state["optimizer"]]):
        hashed.update(tensor.detach().contiguous().numpy())
    return hashed.hexdigest()


def train(run: Path, log: int) -> None:
    def note(*words: object) -> None:
        os.write(log, (" ".join(map(str, words)) + "\n").encode())

    _engine.Engine = functools.partial(_engine.Engine, fault=STALLS)  # type: ignore
    torch.set_num_threads(1)  # the pool of threads did not survive the fork
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state_bytes = 3 * 4 * sum(p.numel() for p in model.parameters())
    checkpointer = lazyckpt.Checkpointer(
        run, chunk_bytes=CHUNK_BYTES, host_buffer_bytes=state_bytes // 4, keep_last=2, io_depth=2
    )
    checkpointer.track(model=model, optimizer=optimizer)
    step = checkpointer.restore()
    note("resumed", step)
    step = step or 0

    def acknowledge(handle: Future[Path]) -> None:
        handle.result()
        note("durable", handle.step)  # type: ignore[attr-defined]

    while True:
        step += 1
        batch = torch.randn(4, WIDTH)  # the generator's state is part of the checkpoint
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        note("saving", step, digest({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
        checkpointer.save(step).add_done_callback(acknowledge)


def serve(run: Path, log_path: Path) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                train(run, log)
            finally:
                os._exit(1)
        print(pid, flush=True)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(code, flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]))
