"""What mirrors cost a training while they upload, and how fast a run is restored from an object store."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import fmean
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
from lazyckpt.tiers.bucket import Bucket

BYTES_PER_S = 100e6
STEPS = 4  # before a save, and at least behind it
NONE, FOLDER, STORE = "no mirror", "a folder, at 100 MB/s", "an object store, at 100 MB/s"
LISTED = 10_000
GET_BYTES, GETS = 4 << 20, 16  # of the raw loop, as lazyckpt asks


@dataclass(frozen=True)
class Save:
    blocked_s: float
    step: float  # while the mirror is at work, over those before the save


def measure(settings: Settings, progress: Progress) -> Iterator[Table]:
    with object_server() as server:
        yield _training(settings, server, progress)
    with object_server() as server:
        yield _restores(settings, server, progress)
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
    upload_s = nbytes / BYTES_PER_S
    arms = {name: partial(_save, ckpt, training, upload_s) for name, ckpt in open_ones.items()}
    samples, failures = interleaved(arms, settings.pairs, progress, prepare=os.sync)
    for ckpt in open_ones.values():
        ckpt.close()
    table = Table(f"A save of {nbytes / 1e9:.2f} GB, and the steps behind it", ["mirror", "blocked, ms", "step"])
    for name in places:
        if name in failures:
            table.missing(name, failures[name])
            continue
        saves = samples[name]
        table.add(name, spread([1e3 * save.blocked_s for save in saves], 1), spread([save.step for save in saves], 3))
    table.notes.append(
        f"{settings.pairs} rounds. Step: the mean of the steps in the {upload_s:.1f} s behind the durable save, while "
        "the upload is under way, over those before it. The server shares the cores with the training."
    )
    return table


def _save(ckpt: lazyckpt.Checkpointer, training: Training, upload_s: float) -> Save:
    before = fmean(_step(training) for _ in range(STEPS))
    handle = ckpt.save((ckpt.latest_step(local=True) or 0) + 1)
    while not handle.done():
        _step(training)
    begin, behind = time.perf_counter(), []
    while time.perf_counter() - begin < upload_s or len(behind) < STEPS:
        behind.append(_step(training))
    handle.mirrored().result(TIMEOUT_S)
    return Save(handle.metrics.blocked_s, fmean(behind) / before)


def _step(training: Training) -> float:
    start = time.perf_counter()
    training.compute()
    training.optimizer.step()
    return time.perf_counter() - start


# Restores


def _restores(settings: Settings, server: ObjectServer, progress: Progress) -> Table:
    training = Training(settings.state_bytes)
    mirror = lazyckpt.Mirror("s3://bucket/a", options=server.options)
    here, there = settings.directory / "here", settings.directory / "there"
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
