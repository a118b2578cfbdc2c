"""``lazyckpt bench``: what this disk can do, what lazyckpt makes of it, and what to expect of a checkpoint here."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

import lazyckpt
from lazyckpt import _engine
from lazyckpt.capture.budget import available_memory_bytes
from lazyckpt.cli.flags import path_argument
from lazyckpt.cli.output import columns, count, plain, print_json, progress, show, size, stdout
from lazyckpt.config import MIB
from lazyckpt.errors import ConfigError
from lazyckpt.storage import commit, folders

if TYPE_CHECKING:
    import torch

_ROUNDS = 3
_PATIENCE_S = 15.0  # a round begins no later
_ROUND_S = 1.0  # of one way to write or read
_MIN_BYTES, _MAX_BYTES = 64 * MIB, 4096 * MIB
_CHUNK_BYTES = 8 * MIB
_DEPTH = 8
_TENSORS = 64
_SIZES = (10**9, 10**10, 10**11)  # of the checkpoints that are told about

RAW_WRITE, WRITE, RAW_READ = "raw write", "lazyckpt.save", "raw read"
RESTORE, LOAD = "restore", "lazyckpt.load"
_RAW_OF = {RAW_WRITE: RAW_WRITE, WRITE: RAW_WRITE, RAW_READ: RAW_READ, RESTORE: RAW_READ, LOAD: RAW_READ}


def bench(
    directory: Annotated[Path, path_argument("[DIR]", "Where checkpoints are to go.")] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure this disk and what lazyckpt reaches of it, for some seconds; tell what to expect of a checkpoint.

    Raw is the disk's ceiling: a file written or read past the page cache (O_DIRECT), eight requests of 8 MiB at once,
    nothing copied, nothing checked. Writes end when they are durable. A restore reads into tensors that are there, as
    Checkpointer.restore() does; lazyckpt.load takes new memory, and waits for the system to make room and clear it.
    What is written is removed again.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory}: not a folder; give one on the disk that is to be measured")
    staging = commit.Staging(directory / "bench")  # locked, and swept by the next run if this one is killed
    try:
        direct = _engine.probe(directory)["o_direct"] == "yes"
        raw = _Raw(direct)
        try:
            nbytes = _choose_bytes(staging.path, raw)
            rates = _measure(staging.path, nbytes, raw)
        finally:
            raw.close()
    finally:
        staging.discard()
    median = {name: statistics.median(found) for name, found in rates.items()}
    expected = {n: {name: n / median[name] for name in (WRITE, RESTORE, LOAD)} for n in _SIZES}
    if as_json:
        print_json(
            {
                "directory": str(directory),
                "o_direct": direct,
                "bytes": nbytes,
                "bytes_per_s": {name: {"median": median[name], "all": found} for name, found in rates.items()},
                "expected": [
                    {"bytes": n, "durable_s": s[WRITE], "restored_s": s[RESTORE], "loaded_s": s[LOAD]}
                    for n, s in expected.items()
                ],
            }
        )
        return
    _show(directory, nbytes, direct, rates, expected)


def _show(
    directory: Path,
    nbytes: int,
    direct: bool,
    rates: dict[str, list[float]],
    expected: dict[int, dict[str, float]],
) -> None:
    console = stdout()
    title = Text.assemble((plain(directory), "bold"), f"  {count(len(rates[WRITE]), 'round')} of {size(nbytes)}")
    console.print(title, soft_wrap=True)
    if not direct:
        console.print(Text("no O_DIRECT here: all goes through the page cache, reads come from memory", style="yellow"))
    table = columns("", "median", "least", "most", "of raw", right=("median", "least", "most", "of raw"))
    for name, raw in _RAW_OF.items():
        found = rates[name]
        share = statistics.median(ours / theirs for ours, theirs in zip(found, rates[raw], strict=True))
        numbers = [f"{rate / 1e9:.2f} GB/s" for rate in (statistics.median(found), min(found), max(found))]
        table.add_row(name, *numbers, f"{share:.0%}" if name != raw else "")
    show(console, table)
    for checkpoint, seconds in expected.items():
        told = f"durable in {_seconds(seconds[WRITE])}, restored in {_seconds(seconds[RESTORE])}"
        console.print(f"a checkpoint of {checkpoint // 10**9} GB: {told}, loaded in {_seconds(seconds[LOAD])}")


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def _choose_bytes(folder: Path, raw: _Raw) -> int:
    """So many that one way takes about a second. Raises OSError if the disk has no room for twice as much."""
    disk = os.statvfs(folder)
    room = min(disk.f_bavail * disk.f_frsize, available_memory_bytes()) // 4
    if room < _MIN_BYTES:
        if available_memory_bytes() // 4 < _MIN_BYTES:
            raise ConfigError(f"needs {size(4 * _MIN_BYTES)} of memory; {size(available_memory_bytes())} are available")
        what = f"needs {size(4 * _MIN_BYTES)} for a moment; {size(disk.f_bavail * disk.f_frsize)} are free"
        raise OSError(errno.ENOSPC, what, str(folder.parent))
    begin = time.perf_counter()
    raw.write(folder / "try", _MIN_BYTES)
    rate = _MIN_BYTES / (time.perf_counter() - begin)
    (folder / "try").unlink()
    wanted = min(max(int(rate * _ROUND_S), _MIN_BYTES), _MAX_BYTES, room)
    return wanted // (_TENSORS * mmap.PAGESIZE) * _TENSORS * mmap.PAGESIZE


def _measure(folder: Path, nbytes: int, raw: _Raw) -> dict[str, list[float]]:
    """Bytes a second. The ways take turns in every round, so that a disk that becomes slower does so for all."""
    import torch  # takes seconds

    random = torch.frombuffer(bytearray(os.urandom(nbytes // _TENSORS)), dtype=torch.uint8)  # some disks know zeros
    state = {f"t{i}": random.clone() for i in range(_TENSORS)}
    plain_file, saved = folder / "raw", folder / "saved.pt"
    arms: list[tuple[str, Path, Callable[[], Any]]] = [
        (RAW_WRITE, plain_file, lambda: raw.write(plain_file, nbytes)),
        (WRITE, saved, lambda: lazyckpt.save(state, saved)),
        (RAW_READ, plain_file, lambda: raw.read(plain_file, nbytes)),
        (RESTORE, saved, lambda: _restore(state, saved)),
        (LOAD, saved, lambda: lazyckpt.load(saved)),
    ]
    rates: dict[str, list[float]] = defaultdict(list)
    latest = time.perf_counter() + _PATIENCE_S
    with progress() as bar:
        task = bar.add_task("", total=_ROUNDS * len(arms) * nbytes)
        for number in range(_ROUNDS):
            if number and time.perf_counter() > latest:
                break
            for name, path, run in arms:
                bar.update(task, description=name)
                if name in (RAW_WRITE, WRITE):
                    path.unlink(missing_ok=True)
                    os.sync()
                begin = time.perf_counter()
                run()
                rates[name].append(nbytes / (time.perf_counter() - begin))
                bar.advance(task, nbytes)
    return dict(rates)


def _restore(state: dict[str, torch.Tensor], path: Path) -> None:
    from lazyckpt.formats.reader import FileReader
    from lazyckpt.providers.training import provider_for
    from lazyckpt.reading.archive import Archive
    from lazyckpt.reading.ranges import process_engine
    from lazyckpt.reading.restore import restore_archive

    with FileReader(path) as file, Archive(file, "cpu", True, engine=process_engine(), lands=True) as archive:
        restore_archive(archive, provider_for("state", state), path)


class _Raw:
    """Threads with one request each under way, and their memory: page-aligned, as O_DIRECT wants it; none of it new."""

    def __init__(self, direct: bool) -> None:
        self._flags = os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._memory = mmap.mmap(-1, _DEPTH * _CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them
            self._memory.madvise(mmap.MADV_HUGEPAGE)  # a request over small pages is cut into many
        self._memory[:] = os.urandom(mmap.PAGESIZE) * (len(self._memory) // mmap.PAGESIZE)  # some disks know zeros
        self._pool = ThreadPoolExecutor(_DEPTH)

    def close(self) -> None:
        self._pool.shutdown()
        self._memory.close()

    def write(self, path: Path, nbytes: int) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            self.run(nbytes, lambda part, at: os.pwrite(fd, part, at))
            os.fsync(fd)
        finally:
            os.close(fd)
        folders.sync_path(path.parent)

    def read(self, path: Path, nbytes: int) -> None:
        fd = os.open(path, os.O_RDONLY | self._flags)
        try:
            self.run(nbytes, lambda part, at: os.preadv(fd, [part], at))
        finally:
            os.close(fd)

    def run(self, nbytes: int, transfer: Callable[[memoryview, int], int]) -> None:
        """All chunks of a file."""
        offsets = iter(range(0, nbytes, _CHUNK_BYTES))

        def work(number: int) -> None:
            own = number * _CHUNK_BYTES
            for at in offsets:  # a thread that is slow takes fewer
                length = min(_CHUNK_BYTES, nbytes - at)
                with memoryview(self._memory) as whole, whole[own : own + length] as part:
                    if transfer(part, at) != length:
                        raise OSError(f"a transfer of {length} bytes at {at} was cut short")

        list(self._pool.map(work, range(_DEPTH)))
