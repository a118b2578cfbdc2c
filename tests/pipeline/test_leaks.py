"""Nothing grows with the number of saves: descriptors, threads, memory, Python objects, the ring's occupancy."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.gate.gate import gate
from lazyckpt.pipeline.handle import in_flight
from lazyckpt.storage import commit
from memory import allocated_bytes
from trials import Trials

pytestmark = pytest.mark.usefixtures("small_tensors_are_lazy")

TINY = {"chunk_bytes": 16 << 10, "host_buffer_bytes": 64 << 10, "copy_threads": 1, "io_depth": 2}
WINDOWS = 10
WARM = 60  # saves
PAGE_BYTES = 4096
# What an allocator may keep between windows, of pools that grew once: glibc gives arenas back in pieces of 1 MiB. A
# leak of one page in each save is 40 MB in the 10,000 of `make torture`; a short run asks malloc for the bytes in use.
SLACK_BYTES = 8 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def objects() -> int:
    """The fewest within a moment: a thread that has just said that it is done still holds what it did it with."""
    found = []
    for _ in range(3):
        gc.collect()
        found.append(len(gc.get_objects()))
        time.sleep(0.01)
    return min(found)


def training(folder: Path) -> tuple[Any, Any, Callable[[], None]]:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()

    step()
    return model, optimizer, step


def saves(folder: Path) -> Any:
    model, optimizer, step = training(folder)
    with lazyckpt.Checkpointer(folder, keep_last=1, **TINY) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        number = 0
        while True:
            number += 1
            ckpt.save(number)
            step()
            yield ckpt._saver


def restores(folder: Path) -> Any:
    model, optimizer, _ = training(folder)
    with lazyckpt.Checkpointer(folder, **TINY) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        ckpt.save(1).result()
        while True:
            assert ckpt.restore() == 1
            yield ckpt._saver


def files_and_folders(folder: Path) -> Any:
    model, _, step = training(folder)
    with lazyckpt.Saver(**TINY) as saver:
        while True:
            saver.save(model.state_dict(), folder / "a.pt")
            step()
            with saver.stage(folder / "both") as staged:
                staged.add("b.pt", model.state_dict())
                staged.add("c.safetensors", dict(model.state_dict()))
                staged.save()
            with saver.stage(folder / "given-up") as staged:
                staged.add("d.pt", 1)
            yield saver


def functions(folder: Path) -> Any:
    model, _, _ = training(folder)
    while True:
        lazyckpt.save(model.state_dict(), folder / "a.pt")
        lazyckpt.load(folder / "a.pt")
        yield None


def failures(folder: Path) -> Any:
    """One save in two finds the folder gone: at once, or in the background."""
    model, _, step = training(folder)
    with lazyckpt.Saver(**TINY) as saver:
        while True:
            gone = folder / "gone"
            gone.mkdir()
            saver._prepared.add(gone)
            with contextlib.suppress(lazyckpt.SaveError):
                handle = saver.save(model.state_dict(), gone / "a.pt")
                shutil.rmtree(gone, ignore_errors=True)
                handle.exception()
            shutil.rmtree(gone, ignore_errors=True)
            with contextlib.suppress(lazyckpt.SerializationError):
                saver.save({"model": model.state_dict(), "lock": threading.Lock()}, folder / "b.pt")
            step()
            yield saver


def openings(folder: Path) -> Any:
    model, optimizer, step = training(folder)
    number = 0
    while True:
        number += 1
        with lazyckpt.Checkpointer(folder, keep_last=1, **TINY) as ckpt:
            ckpt.track(model=model, optimizer=optimizer)
            ckpt.save(number)
            step()
        yield None


WAYS = {saves: (200, 10_000), restores: (60, 2_000), files_and_folders: (60, 2_000), functions: (60, 4_000)}
WAYS |= {failures: (60, 2_000), openings: (40, 1_000)}


@pytest.mark.parametrize("fails", [False, True])
def test_a_checkpoint_that_is_done_keeps_nothing(
    fails: bool, tmp_path: Path, disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's part of it is as large as the state has pieces, and freeing it takes its time: not in a save().
    Regression: the traceback of an error kept the engine with its ring, and pages that no later checkpoint could watch.
    """
    model, optimizer, step = training(tmp_path)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EIO, "tried")

    with lazyckpt.Checkpointer(tmp_path, **TINY) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        step()
        disk.hold()
        if fails:
            monkeypatch.setattr(commit.Staging, "describe", refuse)
        handle = ckpt.save(1)
        (task,) = ckpt._saver._background._tasks
        flight = weakref.ref(task.run.args[0])  # type: ignore[attr-defined]
        del task
        gc.disable()
        disk.release()
        try:
            error = handle.exception()
            assert (error is not None and "tried" in str(error)) is fails
            end = time.monotonic() + 10
            while flight() is not None and time.monotonic() < end:  # the thread that settled it may still hold it
                time.sleep(0.001)
            assert flight() is None and handle._snapshot is None
        finally:
            gc.enable()


@pytest.mark.long(first=3)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.timeout(1200)
def test_nothing_grows(
    way: Callable[[Path], Any], tmp_path: Path, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("lazyckpt"), "disabled", True)  # pytest keeps log records
    check_that_nothing_grows(way.__name__, way(tmp_path), trials.count(*WAYS[way]), tmp_path, trials)


def check_that_nothing_grows(name: str, running: Any, count: int, folder: Path, trials: Trials) -> None:
    saver = next(running)
    gc.collect()
    gc.freeze()  # what it and other tests imported: it need not be counted thirty times
    for _ in range(count // WINDOWS + WARM):  # caches and pools fill
        saver = next(running)

    def settled() -> None:
        if saver is not None:
            saver.drain()
            assert saver.engine.ring_used_bytes == 0
        assert gate._pending == () and not in_flight()

    found = []
    for _ in range(WINDOWS):
        for _ in range(count // WINDOWS):
            saver = next(running)
        settled()
        descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        found.append((descriptors, threads, objects(), sys.getallocatedblocks(), allocated_bytes(), resident_bytes()))
    descriptors, threads, alive, blocks, allocated, resident = map(list, zip(*found, strict=True))
    assert max(descriptors) <= descriptors[0] + 2, descriptors  # of a removal that is under way
    assert max(threads) <= threads[0], threads
    half = WINDOWS // 2
    # One object in ten saves would be a leak; less is a cache of somebody else's.
    assert median(alive[half:]) - median(alive[:half]) < max(count // 20, 20), alive
    assert min(blocks[half:]) - min(blocks[:half]) < 4 * count, blocks
    assert min(allocated[half:]) - min(allocated[:half]) < count // 4 * PAGE_BYTES, allocated
    assert max(resident[half:]) - max(resident[:half]) < SLACK_BYTES, resident
    running.close()
    assert len(os.listdir(folder)) <= 4
    grown = {
        "resident_kib": max(resident[half:]) - max(resident[:half]) >> 10,
        "allocated_kib": allocated[-1] - allocated[0] >> 10,
        "objects": alive[-1] - alive[0],
    }
    trials.report(f"{name} without growth", count, folder, **grown)
