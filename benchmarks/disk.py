"""How much of the disk is used: durable write of host tensors.

All arms take turns in every round, in shuffled order; every file written is new, and what came before is synced.
The raw disk is the floor library's own loop: the same chunks, depth and O_DIRECT, no copy.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from benchmarks.floor import CHUNK_BYTES, IO_DEPTH, Floor
from benchmarks.paired import Progress, interleaved, ratios, spread
from benchmarks.pictures import Picture
from benchmarks.report import Table
from benchmarks.settings import Settings

TENSORS = 300
RAW = "raw O_DIRECT loop"

Timed = Callable[[Path], float]  # seconds to write the file


def measure(settings: Settings, progress: Progress) -> Iterator[Table]:
    state = {f"t{i}": torch.randn(settings.disk_bytes // TENSORS // 4) for i in range(TENSORS)}
    nbytes = sum(t.nbytes for t in state.values())
    path = settings.directory / "file"

    def prepare() -> None:
        path.unlink(missing_ok=True)
        os.sync()

    with Floor(nbytes) as floor:
        writers = _writers(floor, state)
        arms = {name: partial(write, path) for name, write in writers.items()}
        seconds, failures = interleaved(arms, settings.pairs, progress, prepare=prepare)
    title = f"Durable write of {nbytes / 1e9:.2f} GB of host tensors"
    table = rates_table(title, seconds, failures, nbytes)
    table.notes.append(
        "From the call to fdatasync and, for lazyckpt, the commit. fio: its own rate, without file creation."
    )
    yield table


def rates_table(title: str, seconds: Mapping[str, Sequence[float]], failures: Mapping[str, str], nbytes: int) -> Table:
    """GB/s of every arm, and over the arm `RAW` in the same round."""
    table = Table(title, ["arm", "GB/s", "of raw"], picture=Picture("", "GB/s"))
    assert table.picture is not None
    for name, values in seconds.items():
        if name in failures:
            table.missing(name, failures[name])
            continue
        rates = [nbytes / s / 1e9 for s in values]
        of_raw = spread([100 * ratio for ratio in ratios(seconds[RAW], values)], 0)
        table.add(name, spread(rates), f"{of_raw} %")
        table.picture.add("", name, rates)
    return table


def _writers(floor: Floor, state: dict[str, torch.Tensor]) -> dict[str, Timed]:
    nbytes = sum(t.nbytes for t in state.values())
    ranges = [(t.data_ptr(), t.nbytes) for t in state.values()]

    def write_floor(path: Path) -> float:
        with timed() as seconds:
            floor.save(path, ranges)
            floor.wait()
            floor.drain()
        return seconds[0]

    def write_lazyckpt(path: Path) -> float:
        import lazyckpt

        with timed() as seconds:
            lazyckpt.save(state, path)
        return seconds[0]

    def write_torch(path: Path) -> float:
        with timed() as seconds, open(path, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        return seconds[0]

    writers: dict[str, Timed] = {RAW: lambda path: floor.raw_write(path, nbytes)}
    if shutil.which("fio"):
        writers["fio"] = lambda path: _fio_write_s(path, nbytes)
    writers |= {"floor": write_floor, "lazyckpt.save": write_lazyckpt, "torch.save + fsync": write_torch}
    return writers


@contextmanager
def timed() -> Iterator[list[float]]:
    """Yields a list that holds the seconds once the block is left."""
    seconds: list[float] = []
    start = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - start)


def _fio_write_s(path: Path, nbytes: int) -> float:
    """Seconds at the rate fio reports for the same chunks, depth and size on the same disk."""
    command = [
        "fio",
        "--name=ceiling",
        f"--filename={path}",
        "--rw=write",
        "--direct=1",
        "--ioengine=io_uring",
    ]
    command += [f"--bs={CHUNK_BYTES}", f"--iodepth={IO_DEPTH}", f"--size={nbytes}", "--fallocate=native"]
    command += ["--end_fsync=1", "--output-format=json"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return nbytes / float(json.loads(output[output.index("{") :])["jobs"][0]["write"]["bw_bytes"])
