"""Back onto the GPU from a cold cache: restore in place and load, over reading the file's bytes off the disk alone."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

import lazyckpt
from benchmarks.gpu.copies import synchronize
from benchmarks.gpu.part import Part, main
from benchmarks.paired import ratios, rounds, spread
from benchmarks.report import Table

TENSORS = 100
ROUNDS = 6  # at most, after one to warm up
RAW = "the disk alone"
READ_BYTES = 8 << 20
READERS = 8


def measure_restore(part: Part) -> None:
    state_bytes = part.fitting_bytes(in_memory=2, on_disk=1.3)
    tensors = [torch.rand(state_bytes // TENSORS // 4, device=part.device) for _ in range(TENSORS)]
    nbytes = sum(t.nbytes for t in tensors)
    table = Table(
        f"Onto the {part.device.type}, {nbytes / 1e9:.2f} GB from a cold cache", ["what", "GB/s", "of the disk"]
    )
    table.notes.append(
        f"From {part.directory}; the file's pages were dropped before each (posix_fadvise). {RAW}: {READERS} threads, "
        f"O_DIRECT, {READ_BYTES >> 20} MiB each. All take turns. torch.load reads through the cache."
    )
    with lazyckpt.Checkpointer(part.directory) as checkpointer:
        checkpointer.track(model=torch.nn.ParameterList(map(torch.nn.Parameter, tensors)))
        file = checkpointer.save(1, blocking=True).result() / "state.pt"
        arms: dict[str, Callable[[], object]] = {
            RAW: lambda: read_past_cache(file),
            "lazyckpt restore, in place": checkpointer.restore,
            "lazyckpt.load": lambda: lazyckpt.load(file, map_location=part.device),
            "torch.load": lambda: torch.load(file, map_location=part.device),
        }
        gbps: dict[str, list[float]] = {name: [] for name in arms}
        failures: dict[str, str] = {}
        longest_s = 0.0
        for number, names in enumerate(rounds(list(arms), ROUNDS + 1)):
            for name in names:
                if name in failures or part.left_s < 2 * longest_s:
                    continue
                forget(file)
                start = time.perf_counter()
                try:
                    arms[name]()
                    synchronize(part.device)
                except Exception as error:
                    failures[name] = f"{type(error).__name__}: {error}"
                    continue
                seconds = time.perf_counter() - start
                longest_s = max(longest_s, seconds)
                if number:
                    gbps[name].append(nbytes / seconds / 1e9)
            table.rows.clear()
            for name, values in gbps.items():
                shares = spread([100 * share for share in ratios(values, gbps[RAW])], 0)
                table.add(name, failures.get(name, spread(values)), f"{shares} %")
            part.publish([table])


def forget(file: Path) -> None:
    """Drops its pages from the cache."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def read_past_cache(file: Path) -> int:
    """Reads all of it, in no order, and returns how many bytes that were."""
    descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    local = threading.local()

    def read(at: int) -> int:
        if not hasattr(local, "buffer"):
            local.buffer = mmap.mmap(-1, READ_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # begins on a page
            with suppress(OSError):  # a kernel without huge pages
                local.buffer.madvise(mmap.MADV_HUGEPAGE)  # a request over small ones is cut into many
        return os.preadv(descriptor, [local.buffer], at)

    try:
        with ThreadPoolExecutor(READERS) as pool:
            return sum(pool.map(read, range(0, file.stat().st_size, READ_BYTES)))
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main({"restore": measure_restore})
