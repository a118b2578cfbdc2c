"""The code that every part shares: its settings, its time, and how it hands over its figures so far."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.report import Table
from lazyckpt.pipeline.budget import available_memory_bytes

GB = 1_000_000_000


@dataclass
class Part:
    """`seconds` from now on it may take; it is stopped soon after."""

    name: str
    device: torch.device
    seconds: float
    state_bytes: int  # at most
    directory: Path  # where checkpoints go
    output: Path  # its tables, as JSON
    arms: tuple[str, ...] = ("lazyckpt",)  # of a comparison

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.seconds

    @property
    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    def publish(self, tables: Sequence[Table]) -> None:
        """Hands over all figures so far. A part that is stopped loses only its last ones."""
        unfinished = self.output.with_suffix(".part")
        unfinished.write_text(json.dumps([asdict(table) for table in tables]))
        os.replace(unfinished, self.output)

    def fitting_bytes(self, *, in_memory: float, on_disk: float = 0) -> int:
        """The largest state of which so many copies fit into host memory and into `directory`, which may be in memory
        itself, with room to spare. On a GPU, two and a half have to fit there: gradients, and what some peer clones."""
        free = shutil.disk_usage(self.directory).free
        memory = available_memory_bytes()
        fitting = memory / (in_memory + on_disk if on_tmpfs(self.directory) else in_memory)
        if on_disk:
            fitting = min(fitting, free / on_disk)
        if self.device.type == "cuda":
            fitting = min(fitting, torch.cuda.mem_get_info(self.device)[0] / 2.5)
        return int(min(0.8 * fitting, self.state_bytes))


def _mounts() -> list[tuple[str, str]]:
    """Folder and type of each."""
    lines = Path("/proc/mounts").read_text().splitlines()
    return [(mount, kind) for _, mount, kind, *_ in map(str.split, lines)]


def on_tmpfs(directory: Path) -> bool:
    above = [(len(mount), kind) for mount, kind in _mounts() if directory.resolve().is_relative_to(mount)]
    return max(above)[1] == "tmpfs"


def main(parts: dict[str, Callable[[Part], None]]) -> None:
    """The command line of a part: `python benchmarks/gpu/day.py` starts it, and a person may."""
    parser = argparse.ArgumentParser(description="One part of `python benchmarks/gpu/day.py`, by itself.")
    parser.add_argument("name", choices=parts)
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--state-bytes", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--arms", type=lambda names: tuple(names.split(",")), default=("lazyckpt",))
    part = Part(**vars(parser.parse_args()))
    if part.device.type == "cpu":
        torch.set_num_threads(1)  # busy cores make OpenMP's barriers spin
    parts[part.name](part)
