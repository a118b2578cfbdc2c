"""What mirrors cost a training while they upload, and how fast a run is restored from an object store."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import fmean, stdev
from typing import Any

import torch

import lazyckpt
from benchmarks.latency import TIMEOUT_S
from benchmarks.object_server import ObjectServer, object_server
from benchmarks.paired import Progress, interleaved, median, ratios, spread
from benchmarks.report import Table
from benchmarks.settings import Settings
from benchmarks.workload import Training
from lazyckpt.storage import manifest
from lazyckpt.stores.urls import opened
from lazyckpt.tiers import uploads
from lazyckpt.tiers.bucket import Bucket

BYTES_PER_S = 100e6
WINDOW_S = 1.0
WINDOWS = 10  # pairs of them, for each round of blocked time
NONE, FOLDER, STORE = "no mirror", "a folder, at 100 MB/s", "an object store, at 100 MB/s"
LISTED = 10_000
GET_BYTES, GETS = 8 << 20, 16  # of the raw loop, as lazyckpt asks


def measure(settings: Settings, progress: Progress) -> Iterator[Table]:
    with object_server() as server:
        yield _training(settings, server, progress)
    for nbytes in (settings.state_bytes, 4 * settings.state_bytes):
        with object_server() as server:
            yield _restores(settings, nbytes, server, progress)
    with object_server() as server:
        yield _listing(server)


# Training


def _training(settings: Settings, server: ObjectServer, progress: Progress) -> Table:
    training = Training(settings.state_bytes // 2)
    nbytes = sum(t.nbytes for t in training.tensors().values())
    places: dict[str, list[Any]] = {
        NONE: [],
        FOLDER: [lazyckpt.Mirror(settings.directory / "mirror", keep_last=1, max_bytes_per_s=BYTES_PER_S)],
        STORE: [lazyckpt.Mirror("s3://bucket/a", keep_last=1, max_bytes_per_s=BYTES_PER_S, options=server.options)],
    }
    open_ones = {}
    for at, (name, mirrors) in enumerate(places.items()):
        open_ones[name] = lazyckpt.Checkpointer(settings.directory / str(at), keep_last=1, mirrors=mirrors)
        open_ones[name].track(model=training.model, optimizer=training.optimizer)
    arms = {name: partial(_blocked_s, ckpt, training) for name, ckpt in open_ones.items()}
    samples, failures = interleaved(arms, settings.pairs, progress, prepare=os.sync)
    table = Table(
        f"A save of {nbytes / 1e9:.2f} GB, and steps beside its upload", ["mirror", "blocked, ms", "step, median", "±"]
    )
    for name, ckpt in open_ones.items():
        if name in failures:
            table.missing(name, failures[name])
            continue
        blocked = spread([1e3 * blocked_s for blocked_s in samples[name]], 1)
        if name == NONE:
            table.add(name, blocked, "", "")
        else:
            window_s = min(WINDOW_S, nbytes / BYTES_PER_S / 3)
            found = _steps(ckpt, training, WINDOWS * settings.pairs, window_s)
            table.add(name, blocked, f"{median(found):.3f}", f"{stdev(found) / len(found) ** 0.5:.3f}")
        ckpt.close()
    table.notes.append(
        f"{settings.pairs} saves each. Step: in {WINDOWS * settings.pairs} pairs of at most {WINDOW_S:.0f} s "
        "that follow each other, the mean of the steps while the upload goes on, over those while it is held. ±: the "
        "standard error of their mean. The server shares the cores with the training."
    )
    return table


def _blocked_s(ckpt: lazyckpt.Checkpointer, training: Training) -> float:
    handle = _saved(ckpt, training)
    handle.mirrored().result(TIMEOUT_S)
    return handle.metrics.blocked_s


def _saved(ckpt: lazyckpt.Checkpointer, training: Training) -> lazyckpt.SaveHandle:
    handle = ckpt.save((ckpt.latest_step(local=True) or 0) + 1)
    while not handle.done():
        _step(training)
    return handle


def _steps(ckpt: lazyckpt.Checkpointer, training: Training, pairs: int, window_s: float) -> list[float]:
    """Steps beside an upload, over those while it is held, for so many pairs of windows."""
    goes_on, found = threading.Event(), list[float]()
    paced = uploads.paced

    def held(parts: Iterator[memoryview], mirror: lazyckpt.Mirror) -> Iterator[memoryview]:
        begin, sent = time.monotonic(), 0
        for part in parts:
            if not goes_on.is_set():
                goes_on.wait()
                begin, sent = time.monotonic(), 0  # not to make up for the pause
            yield part
            sent += len(part)
            time.sleep(max(0.0, begin + sent / BYTES_PER_S - time.monotonic()))

    def window(upload: bool) -> float:
        (goes_on.set if upload else goes_on.clear)()
        end, steps = time.perf_counter() + window_s, list[float]()
        while time.perf_counter() < end:
            steps.append(_step(training))
        return fmean(steps)

    uploads.paced = held
    try:
        for _ in range(pairs):  # saves, at most
            if len(found) == pairs:
                break
            goes_on.set()
            mirrored = _saved(ckpt, training).mirrored()
            while not mirrored.done() and len(found) < pairs:
                first = len(found) % 2 == 0
                times = {upload: window(upload) for upload in (first, not first)}
                if not mirrored.done():
                    found.append(times[True] / times[False])
            goes_on.set()
            mirrored.result(TIMEOUT_S)
    finally:
        uploads.paced = paced
    return found


def _step(training: Training) -> float:
    start = time.perf_counter()
    training.compute()
    training.optimizer.step()
    return time.perf_counter() - start


# Restores


def _restores(settings: Settings, state_bytes: int, server: ObjectServer, progress: Progress) -> Table:
    training = Training(state_bytes)
    mirror = lazyckpt.Mirror("s3://bucket/a", options=server.options)
    here, there = settings.directory / f"here-{state_bytes}", settings.directory / f"there-{state_bytes}"
    with lazyckpt.Checkpointer(here, mirrors=[mirror]) as ckpt:
        ckpt.track(model=training.model, optimizer=training.optimizer)
        path = ckpt.save(1).mirrored().result(TIMEOUT_S)
    nbytes = (path / manifest.STATE).stat().st_size
    into = torch.empty(nbytes, dtype=torch.uint8)
    with lazyckpt.Checkpointer(there, mirrors=[mirror], read_only=True) as far, lazyckpt.Checkpointer(here) as near:
        for ckpt in (far, near):
            ckpt.track(model=training.model, optimizer=training.optimizer)
        arms: Mapping[str, Callable[[], float]] = {
            "a raw loop of ranged requests": partial(_timed, partial(_raw, server, into)),
            "restore() from the store": partial(_timed, far.restore),
            "restore() from the folder": partial(_timed, near.restore),
        }
        samples, failures = interleaved(arms, settings.pairs, progress)
    table = Table(f"{nbytes / 1e9:.2f} GB into memory", ["from", "s", "GB/s", "raw loop ÷ it"])
    raw = samples[next(iter(arms))]
    for name in arms:
        if name in failures:
            table.missing(name, failures[name])
            continue
        seconds = samples[name]
        speed = f"{nbytes / median(seconds) / 1e9:.2f}"
        table.add(name, spread(seconds), speed, spread(ratios(raw, seconds)))
    table.notes.append(
        f"{settings.pairs} rounds. The raw loop has {GETS} requests of {GET_BYTES >> 20} MiB in flight and compares no "
        "checksum. The server is a process of Python on the same cores. The folder is in the page cache."
    )
    return table


def _raw(server: ObjectServer, into: torch.Tensor) -> None:
    store = opened("s3://bucket/a", server.options)
    name = f"{manifest.folder_name(1)}/{manifest.STATE}"

    def get(begin: int) -> None:
        end = min(begin + GET_BYTES, into.nbytes)
        into[begin:end] = torch.frombuffer(store.read(name, begin, end), dtype=torch.uint8)

    with ThreadPoolExecutor(GETS) as pool:
        list(pool.map(get, range(0, into.nbytes, GET_BYTES)))


def _timed(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


# Listings


def _listing(server: ObjectServer) -> Table:
    server.put(dict(_checkpoints(LISTED)))
    table = Table(f"Listing {LISTED:,} checkpoints in a bucket", ["listing", "s", "requests"])
    before = server.put({})
    bucket = Bucket(opened("s3://bucket/a", server.options))
    table.add("the first: it reads every manifest", f"{_timed(bucket.checkpoints):.2f}", str(server.put({}) - before))
    bucket.tidy()
    before = server.put({})
    fresh = Bucket(opened("s3://bucket/a", server.options))
    table.add("of another process, with the index", f"{_timed(fresh.checkpoints):.2f}", str(server.put({}) - before))
    assert len(fresh.checkpoints()) == LISTED
    return table


def _checkpoints(count: int) -> Iterator[tuple[str, bytes]]:
    for step in range(1, count + 1):
        entry = manifest.FileEntry(manifest.STATE, 1, 0)
        told = manifest.describe(step=step, sequence=step, parent=step - 1 or None, files=[entry])
        yield f"a/{manifest.folder_name(step)}/{manifest.MANIFEST}", json.dumps(told).encode()
        yield f"a/{manifest.folder_name(step)}/{manifest.STATE}", b"x"
