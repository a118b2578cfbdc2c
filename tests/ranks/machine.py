"""One rank of a job on two machines: saves, restores, loads, and saves again after the network has been cut.

python machine.py RANK WORLD_SIZE ADDRESS FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lazyckpt
from lazyckpt.reading import relay, together


class Training:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(6)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()


def count_ways(used: Counter[str]) -> None:
    for way in (together.Broadcasts, together.SharedMemory):

        def start(self: Any, *args: Any, name: str = way.__name__, original: Any = way.start) -> None:
            used[name] += 1
            original(self, *args)

        way.start = start  # type: ignore[method-assign]


def main(rank: int, world: int, address: str, folder: Path) -> None:
    relay.LEAST_BYTES = 100_000
    used: Counter[str] = Counter()
    count_ways(used)
    patience = timedelta(seconds=60)
    dist.init_process_group("gloo", f"tcp://{address}", patience, world, rank)
    training, other = Training(1), Training(2 + rank)
    with lazyckpt.Checkpointer(folder / "run", writers="node", rank_timeout_s=10) as ckpt:
        ckpt.track(model=training.model, optimizer=training.optimizer)
        for step in (1, 2, 3, 4):  # the ranks share only what they saw change
            training.step()
            handle = ckpt.save(step)
            handle.result()
    told: dict[str, Any] = {"host": os.uname().nodename, "copied": handle.metrics.copied_bytes}
    with lazyckpt.Checkpointer(folder / "run", writers="node", rank_timeout_s=10) as ckpt:
        ckpt.track(model=other.model, optimizer=other.optimizer)
        told["restored"] = ckpt.restore()
        weights = lazyckpt.load(ckpt.checkpoint(4).path, "cpu", key="model", all_ranks=True)
        told["ways"] = sorted(used)
        for found in (other.model.state_dict(), weights):
            assert all(torch.equal(found[name], tensor) for name, tensor in training.model.state_dict().items())
        (folder / f"ready-{rank}").touch()
        while not (folder / "cut").exists():
            time.sleep(0.01)
        other.step()
        try:
            ckpt.save(5).result()
        except lazyckpt.RankError as error:
            told["error"] = str(error)
            (folder / f"told-{rank}").write_text(json.dumps(told))
            os._exit(0)  # whatever gloo still waits for


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
