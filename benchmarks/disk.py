"""How much of the disk is used: durable write of host tensors, and restore from a cold cache.

All arms of a table take turns in every round, in shuffled order; every file written is new, and what came
before is synced. The raw disk is the floor library's own loop: the same chunks, depth and O_DIRECT, no copy.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.floor import CHUNK_BYTES, IO_DEPTH, Floor
from benchmarks.paired import ratios, rounds, spread
from benchmarks.report import Table

TENSORS = 300
RAW = "raw O_DIRECT loop"

Timed = Callable[[Path], float]  # seconds to write the file, or to read it


def measure(*, pairs: int, state_bytes: int, directory: Path, progress: Callable[[str], None]) -> list[Table]:
    directory.mkdir(parents=True, exist_ok=True)
    state = {f"t{i}": torch.randn(state_bytes // TENSORS // 4) for i in range(TENSORS)}
    nbytes = sum(t.nbytes for t in state.values())
    with Floor(nbytes) as floor:
        writers = _writers(floor, state)
        title = f"Durable write of {nbytes / 1e9:.2f} GB of host tensors, GB/s"
        write_table = _contest(title, writers, pairs, nbytes, directory, progress, keep=False)
    write_table.notes.append(
        "From the call to fdatasync and, for lazyckpt, the commit. fio: its own rate, without file creation."
    )
    with Floor(4 * CHUNK_BYTES, copy_threads=0) as floor, _readers(floor, state, directory) as readers:
        title = f"Restore of {nbytes / 1e9:.2f} GB with a cold cache, GB/s"
        read_table = _contest(title, readers, pairs, nbytes, directory, progress, keep=True)
    read_table.notes.append(f"Before each: {_drop_caches()}. New tensors cost page faults, which in-place does not.")
    return [write_table, read_table]


def _writers(floor: Floor, state: dict[str, torch.Tensor]) -> dict[str, Timed]:
    nbytes = sum(t.nbytes for t in state.values())
    ranges = [(t.data_ptr(), t.nbytes) for t in state.values()]

    def write_floor(path: Path) -> float:
        with _timed() as seconds:
            floor.save(path, ranges)
            floor.wait()
            floor.drain()
        return seconds[0]

    def write_lazyckpt(path: Path) -> float:
        import lazyckpt

        with _timed() as seconds:
            lazyckpt.save(state, path)
        return seconds[0]

    def write_torch(path: Path) -> float:
        with _timed() as seconds, open(path, "wb") as file:
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
def _readers(floor: Floor, state: dict[str, torch.Tensor], directory: Path) -> Iterator[dict[str, Timed]]:
    """All of them read one file, since a disk is not equally fast everywhere: a checkpoint written here. The path they
    are given is not used.

    The Checkpointer stays, as the raw loop does: to fault the pages of a new ring in is no part of reading."""
    import lazyckpt

    def timed(read: Callable[[], object]) -> Timed:
        def seconds(_: Path) -> float:
            with _timed() as elapsed:
                read()
            return elapsed[0]

        return seconds

    def load_mmap() -> float:
        loaded = torch.load(file, mmap=True)["model"]
        return sum(float(t[::1024].sum()) for t in loaded.values())  # one element of every page

    with lazyckpt.Checkpointer(directory / "checkpoints") as checkpointer:
        checkpointer.track(model=torch.nn.ParameterList(torch.nn.Parameter(t) for t in state.values()))
        handle = checkpointer.save(1, blocking=True)
        file = handle.result() / "state.pt"
        yield {
            RAW: lambda _: floor.raw_read(file),
            "lazyckpt restore, in place": timed(checkpointer.restore),
            "lazyckpt.load, new tensors": timed(lambda: lazyckpt.load(file)),
            "torch.load": timed(lambda: torch.load(file)),
            "torch.load, mmap, every page touched": timed(load_mmap),
        }


def _contest(
    title: str,
    arms: dict[str, Timed],
    pairs: int,
    nbytes: int,
    directory: Path,
    progress: Callable[[str], None],
    *,
    keep: bool,
) -> Table:
    """One round more than asked is run; the first warms up. `keep`: the arms read and leave files alone."""
    rates: dict[str, list[float]] = {name: [] for name in arms}
    failures: dict[str, str] = {}
    path = directory / "file"
    for number, names in enumerate(rounds(list(arms), pairs + 1)):
        for name in names:
            if name in failures:
                continue
            progress(f"round {number + 1}/{pairs + 1}: {name}")
            if keep:
                _drop_caches()
            else:
                path.unlink(missing_ok=True)
            os.sync()
            try:
                seconds = arms[name](path)
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}"
                continue
            if number:
                rates[name].append(nbytes / seconds / 1e9)
    path.unlink(missing_ok=True)
    table = Table(title, ["arm", "GB/s", "of raw"])
    for name in arms:
        if name in failures:
            table.missing(name, failures[name])
        else:
            of_raw = spread([100 * ratio for ratio in ratios(rates[name], rates[RAW])], 0)
            table.add(name, spread(rates[name]), f"{of_raw} %")
    return table


@contextmanager
def _timed() -> Iterator[list[float]]:
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


def _drop_caches() -> str:
    """Empty the page cache; returns how."""
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return "nothing (dropping the page cache needs root)"
    return "page cache dropped by /proc/sys/vm/drop_caches"
