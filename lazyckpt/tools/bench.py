"""Measures a disk and how fast lazyckpt uses it, and predicts the time of a checkpoint there."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lazyckpt import _engine, functional, waits
from lazyckpt.config import MIB
from lazyckpt.errors import ConfigError
from lazyckpt.formats.reader import FileReader
from lazyckpt.pipeline.budget import available_memory_bytes
from lazyckpt.providers.training import provider_for
from lazyckpt.reading.archive import Archive
from lazyckpt.reading.ranges import process_engine
from lazyckpt.reading.restore import restore_archive
from lazyckpt.storage import commit, folders
from lazyckpt.tools import Progress
from lazyckpt.tools.units import size

_ROUNDS = 3
_ROUND_S = 1.0  # for one way to write or read
_MIN_BYTES, _MAX_BYTES = 64 * MIB, 4096 * MIB
_CHUNK_BYTES = 8 * MIB
_DEPTH = 8
_TENSORS = 64

RAW_WRITE, WRITE, RAW_READ = "raw write", "lazyckpt.save", "raw read"
RESTORE, LOAD = "restore", "lazyckpt.load"
RAW_OF = {RAW_WRITE: RAW_WRITE, WRITE: RAW_WRITE, RAW_READ: RAW_READ, RESTORE: RAW_READ, LOAD: RAW_READ}


@dataclass(frozen=True)
class Bench:
    """The results of ``bench``."""

    o_direct: bool  # without it, everything went through the page cache
    bytes: int  # written and read in each round
    bytes_per_s: dict[str, list[float]]  # of every round, by the ways in ``RAW_OF``

    @property
    def median(self) -> dict[str, float]:
        """The median rates, in bytes per second."""
        return {name: statistics.median(found) for name, found in self.bytes_per_s.items()}


def bench(directory: Path, progress: Progress | None = None) -> Bench:
    """Writes and reads files in ``directory`` for some seconds, and removes them. Raises ConfigError and OSError."""
    if not directory.is_dir():
        raise ConfigError(f"{directory}: not a folder; give one on the disk to measure")
    staging = commit.Staging(directory / "bench")  # locked; the next run sweeps it if this one is killed
    try:
        direct = _engine.probe(directory)["o_direct"] == "yes"
        with contextlib.closing(_Raw(direct)) as raw:
            nbytes = _choose_bytes(staging.path, raw)
            rates = _measure(staging.path, nbytes, raw, progress or (lambda name, done, total: None))
    finally:
        staging.discard()
    return Bench(direct, nbytes, rates)


def _choose_bytes(folder: Path, raw: _Raw) -> int:
    """Chooses a size that takes about a second to write. Raises OSError if the disk has no room for four times that."""
    disk = os.statvfs(folder)
    room = min(disk.f_bavail * disk.f_frsize, available_memory_bytes()) // 4
    if room < _MIN_BYTES:
        if available_memory_bytes() // 4 < _MIN_BYTES:
            available = size(available_memory_bytes())
            raise ConfigError(f"expected {size(4 * _MIN_BYTES)} of free memory; {available} are available")
        what = f"needs {size(4 * _MIN_BYTES)} for a moment; {size(disk.f_bavail * disk.f_frsize)} are free"
        raise OSError(errno.ENOSPC, what, str(folder.parent))
    begin = time.perf_counter()
    raw.write(folder / "try", _MIN_BYTES)
    rate = _MIN_BYTES / (time.perf_counter() - begin)
    (folder / "try").unlink()
    wanted = min(max(int(rate * _ROUND_S), _MIN_BYTES), _MAX_BYTES, room)
    return wanted // (_TENSORS * mmap.PAGESIZE) * _TENSORS * mmap.PAGESIZE


def _measure(folder: Path, nbytes: int, raw: _Raw, progress: Progress) -> dict[str, list[float]]:
    """Measures bytes per second. All ways take turns in every round, so that a disk that slows down affects all."""
    random = torch.frombuffer(bytearray(os.urandom(nbytes // _TENSORS)), dtype=torch.uint8)  # some disks skip zeros
    state = {f"t{i}": random.clone() for i in range(_TENSORS)}
    plain_file, saved = folder / "raw", folder / "saved.pt"
    arms: list[tuple[str, Path, Callable[[], Any]]] = [
        (RAW_WRITE, plain_file, lambda: raw.write(plain_file, nbytes)),
        (WRITE, saved, lambda: functional.save(state, saved)),
        (RAW_READ, plain_file, lambda: raw.read(plain_file, nbytes)),
        (RESTORE, saved, lambda: _restore(state, saved)),
        (LOAD, saved, lambda: functional.load(saved)),
    ]
    rates: dict[str, list[float]] = defaultdict(list)
    latest = time.perf_counter() + waits.BENCH_LAST_ROUND_S
    total = _ROUNDS * len(arms) * nbytes
    for number in range(_ROUNDS):
        if number and time.perf_counter() > latest:
            break
        for turn, (name, path, run) in enumerate(arms):
            if name in (RAW_WRITE, WRITE):
                path.unlink(missing_ok=True)
                os.sync()
            begin = time.perf_counter()
            run()
            rates[name].append(nbytes / (time.perf_counter() - begin))
            progress("rounds", (number * len(arms) + turn + 1) * nbytes, total)
    return dict(rates)


def _restore(state: dict[str, torch.Tensor], path: Path) -> None:
    with FileReader(path) as file, Archive(file, "cpu", True, engine=process_engine(), lands=True) as archive:
        restore_archive(archive, provider_for("state", state), path)


class _Raw:
    """Threads with one request in flight each, and their memory, which is page-aligned for O_DIRECT and faulted in."""

    def __init__(self, direct: bool) -> None:
        self._flags = os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._memory = mmap.mmap(-1, _DEPTH * _CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them
            self._memory.madvise(mmap.MADV_HUGEPAGE)  # the kernel cuts a request over small pages into many
        self._memory[:] = os.urandom(mmap.PAGESIZE) * (len(self._memory) // mmap.PAGESIZE)  # some disks skip zeros
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
        """Transfers all chunks of a file."""
        offsets = iter(range(0, nbytes, _CHUNK_BYTES))

        def work(number: int) -> None:
            own = number * _CHUNK_BYTES
            for at in offsets:  # a slow thread takes fewer
                length = min(_CHUNK_BYTES, nbytes - at)
                with memoryview(self._memory) as whole, whole[own : own + length] as part:
                    if transfer(part, at) != length:
                        raise OSError(f"a transfer of {length} bytes at {at} was cut short")

        list(self._pool.map(work, range(_DEPTH)))
