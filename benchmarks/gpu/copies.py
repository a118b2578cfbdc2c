"""The copy alone: how fast the engine empties a GPU into its ring, over what torch does with one large copy.

The state fits into the ring and the checkpoint has no file, so that neither a disk nor a file system is measured. On a
GPU a copy ends when the training stream, which waits for it, continues; the checksums that follow are in the second
figure.
"""

from __future__ import annotations

import errno
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.part import Part, main
from benchmarks.paired import median, ratios, spread
from benchmarks.report import Table
from benchmarks.workload import Mark, seconds_between
from lazyckpt import _engine, devices
from lazyckpt.config import Config
from lazyckpt.formats.program import SOURCE

TENSORS = 100
ROUNDS = 10
OWNER = 1  # the bit of a gate: all of the state is lazy
MIB = 1 << 20
DEFAULT = Config()
CHUNKS_MIB = (1, 2, 4, 8, 16, 32, 64)
THREADS = (1, 2, 4, 8, 12)
DEPTH = 4  # the engine's, of chunks in flight
DEPTHS = (1, 2, 3, 4, 8)
CHUNKS_BY_DEPTH_MIB = (2, 8, 32)
ITEM_ROUNDS = 4  # copies during which .item() is called


class Copier:
    """An engine, and a state on the device or the host that fits into its ring."""

    def __init__(
        self, device: torch.device, state_bytes: int, chunk_bytes: int, copy_threads: int, **knobs: Any
    ) -> None:
        self.device = device
        self.tensors = [torch.rand(state_bytes // TENSORS // 4, device=device) for _ in range(TENSORS)]
        self.nbytes = sum(t.nbytes for t in self.tensors)
        ring_bytes = (-(-self.nbytes // chunk_bytes) + 2) * chunk_bytes
        self.engine = _engine.Engine(
            ring_bytes=ring_bytes,
            chunk_bytes=chunk_bytes,
            io_depth=DEFAULT.io_depth,
            copy_threads=copy_threads,
            **knobs,
        )
        self.engine.reserve(ring_bytes)
        storages = [t.untyped_storage() for t in self.tensors]
        self._pointers, self._devices, self._streams, *_ = devices.sources(
            storages,
            list(map(devices.data_ptr, storages)),
            devices.locate(storages, [s.device for s in storages], self.engine),
        )

    def begin(self) -> _engine.Job:
        """Of all tensors, lazily. There is no file."""
        sizes = [t.nbytes for t in self.tensors]
        job = self.engine.begin(
            self._pointers,
            array("Q", sizes),
            array("Q", [OWNER] * len(sizes)),
            1,
            devices=self._devices,
            streams=self._streams,
        )
        rows = array("q", [n for source, nbytes in enumerate(sizes) for n in (SOURCE, nbytes, source)])
        job.append(0, 0, rows, b"")
        job.seal()
        return job

    def until_landed(self, job: _engine.Job) -> None:
        """The host, or the stream of the device, gets no further before that."""
        if self._streams is None:
            job.wait_captured(OWNER)
        else:
            job.wait_enqueued(OWNER, self._streams)

    def copy(self) -> tuple[float, float]:
        """Seconds until everything has landed in the ring, and until it is checksummed, too."""
        synchronize(self.device)
        begun, start = mark(self.device), time.perf_counter()
        job = self.begin()
        self.until_landed(job)
        landed = mark(self.device)
        job.wait_captured(OWNER)
        captured_s = time.perf_counter() - start
        synchronize(self.device)
        drop(job)
        return seconds_between(begun, landed), captured_s


def drop(job: _engine.Job) -> None:
    """Its chunks leave the ring. Raises OSError if it has failed by itself."""
    job.raise_error()
    job.fail(errno.ECANCELED, "measured")
    job.wait_settled()


def mark(device: torch.device) -> Mark:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, work: Callable[[], object]) -> float:
    synchronize(device)
    begin = mark(device)
    work()
    end = mark(device)
    synchronize(device)
    return seconds_between(begin, end)


def host_memory(device: torch.device, nbytes: int) -> torch.Tensor:
    """Pinned if there is a GPU; touched."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda").zero_()


# the parts


def measure_peak(part: Part) -> None:
    state_bytes = part.fitting_bytes(in_memory=3.5)
    rate = Table(f"Copies of {state_bytes / 1e9:.2f} GB, within the ring", ["copy", "GB/s", "of the peak"])
    rate.notes.append(
        "The peak is torch's copy of one tensor into pinned memory. The engine's is of "
        f"{TENSORS} tensors in chunks of {DEFAULT.chunk_bytes // MIB} MiB; 'and checksummed' has CRC-32 on its "
        f"{DEFAULT.copy_threads} copy threads in it. All take turns, {ROUNDS} rounds."
    )
    copier = Copier(part.device, state_bytes, DEFAULT.chunk_bytes, DEFAULT.copy_threads)
    start = time.perf_counter()
    copier.copy()
    rate.notes.append(f"The engine's first copy, its ring faulted in and pinned: {time.perf_counter() - start:.2f} s.")
    if copier.engine.unpinned:
        way = "copies pass a small pinned buffer" if copier.engine.bounces else "copies are pageable"
        rate.notes.append(f"The ring is not pinned ({copier.engine.unpinned}): {way}.")
    on_device = torch.cat(copier.tensors)
    pinned, pageable = host_memory(part.device, copier.nbytes), torch.zeros(copier.nbytes, dtype=torch.uint8)
    flat = on_device.view(torch.uint8)
    seconds: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        seconds.setdefault("torch, pinned", []).append(
            timed(part.device, lambda: pinned.copy_(flat, non_blocking=True))
        )
        landed, captured = copier.copy()
        seconds.setdefault("lazyckpt", []).append(landed)
        seconds.setdefault("lazyckpt, and checksummed", []).append(captured)
        seconds.setdefault("torch, to the device", []).append(
            timed(part.device, lambda: flat.copy_(pinned, non_blocking=True))
        )
        seconds.setdefault("torch, pageable", []).append(timed(part.device, lambda: pageable.copy_(flat)))
        rate.rows.clear()
        for name, values in seconds.items():
            shares = spread([100 * share for share in ratios(seconds["torch, pinned"], values)], 0)
            rate.add(name, spread([copier.nbytes / s / 1e9 for s in values]), f"{shares} %")
        part.publish([rate])
        if part.left_s < 0.25 * part.seconds:
            break
    part.publish([rate, _latency(copier, flat, pinned)])


def _latency(copier: Copier, flat: torch.Tensor, pinned: torch.Tensor) -> Table:
    table = Table("A small tensor's .item(), ms", ["meanwhile", "median", "slowest", "calls"])
    small = torch.zeros(1, device=copier.device)

    until = 0.8 * min(copier.copy()[0] for _ in range(ITEM_ROUNDS))  # copies are under way for so long

    @contextmanager
    def nothing() -> Iterator[Callable[[], bool]]:
        start = time.perf_counter()
        yield lambda: time.perf_counter() - start < until

    @contextmanager
    def lazyckpt_copies() -> Iterator[Callable[[], bool]]:
        start = time.perf_counter()
        job = copier.begin()
        yield lambda: time.perf_counter() - start < until
        job.wait_captured(OWNER)
        drop(job)

    @contextmanager
    def one_copy() -> Iterator[Callable[[], bool]]:
        with torch.cuda.stream(torch.cuda.Stream()):
            pinned.copy_(flat, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        yield lambda: not done.query()
        done.synchronize()

    cases = [("nothing", nothing), ("lazyckpt copies", lazyckpt_copies)]
    if copier.device.type == "cuda":
        cases.append(("one large copy by torch on another stream", one_copy))
    for name, meanwhile in cases:
        times: list[float] = []
        for _ in range(ITEM_ROUNDS):
            with meanwhile() as busy:
                while busy():
                    start = time.perf_counter()
                    small.item()
                    times.append(1e3 * (time.perf_counter() - start))
            synchronize(copier.device)
        table.add(name, f"{median(times):.3f}", f"{max(times, default=float('nan')):.3f}", str(len(times)))
    return table


def measure_sweep(part: Part) -> None:
    state_bytes = part.fitting_bytes(in_memory=3.5) // 8  # a second for each case
    engine = Table(
        f"The engine's copies of {state_bytes / 1e9:.2f} GB by chunk, copy threads and depth, GB/s",
        ["chunk, copy threads, in flight", "landed", "and checksummed"],
    )
    by_depth = Table("torch's copies by chunk and depth, GB/s", ["chunk", *(f"{depth} in flight" for depth in DEPTHS)])
    engine.notes.append(
        "Landed: nothing reads the training state any more. Not pinned: by way of the small buffer, as where the ring "
        "cannot be pinned."
    )
    by_depth.notes.append("A loop over pinned chunks, each awaited before it is used again: what a depth can give.")
    default = DEFAULT.chunk_bytes // MIB, DEFAULT.copy_threads
    cases = [(chunk, default[1], DEPTH, True) for chunk in CHUNKS_MIB]
    cases += [(chunk, default[1], depth, True) for depth in DEPTHS for chunk in CHUNKS_BY_DEPTH_MIB if depth != DEPTH]
    cases += [(default[0], threads, DEPTH, False) for threads in (default[1], 4 * default[1])]
    cases += [(default[0], threads, DEPTH, True) for threads in THREADS if threads != default[1]]
    for chunk, threads, in_flight, pinned in cases:
        if part.left_s < 0.3 * part.seconds or state_bytes < 4 * chunk * MIB:
            continue
        knobs = {"copies_in_flight": in_flight, "copies_ahead": in_flight, "pin_ring": pinned}
        copier = Copier(part.device, state_bytes, chunk * MIB, threads, **knobs)
        copier.copy()
        times = [copier.copy() for _ in range(ROUNDS // 2)]
        rates = [spread([copier.nbytes / s / 1e9 for s in column]) for column in zip(*times, strict=True)]
        engine.add(f"{chunk} MiB, {threads}, {in_flight}" + ("" if pinned else ", not pinned"), *rates)
        part.publish([engine, by_depth])
        del copier  # before the next one takes its memory
    source = torch.zeros(state_bytes, dtype=torch.uint8, device=part.device)
    for chunk in CHUNKS_MIB:
        if part.left_s < 3 or state_bytes < 4 * chunk * MIB:
            break
        cells = []
        for slots in DEPTHS:
            ring = [host_memory(part.device, chunk * MIB) for _ in range(slots)]
            seconds = [timed(part.device, partial(_through, ring, source)) for _ in range(ROUNDS // 2)]
            cells.append(f"{source.nbytes / median(seconds) / 1e9:.2f}")
        by_depth.add(f"{chunk} MiB", *cells)
        part.publish([engine, by_depth])


def _through(ring: list[torch.Tensor], source: torch.Tensor) -> None:
    on_gpu = source.device.type == "cuda"
    done: list[torch.cuda.Event | None] = [None] * len(ring)
    for number, piece in enumerate(source.split(ring[0].nbytes)):
        slot = number % len(ring)
        if (event := done[slot]) is not None:
            event.synchronize()
        ring[slot][: piece.nbytes].copy_(piece, non_blocking=True)
        if on_gpu:
            done[slot] = torch.cuda.Event()
            done[slot].record()  # type: ignore[union-attr]


if __name__ == "__main__":
    main({"peak": measure_peak, "sweep": measure_sweep})
