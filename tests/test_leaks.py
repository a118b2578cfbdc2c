"""Nothing grows with the number of saves: descriptors, threads, memory, Python objects, the ring's occupancy."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.background import in_flight
from lazyckpt.gate import gate
from trials import Trials

TINY = {"chunk_bytes": 16 << 10, "host_buffer_bytes": 64 << 10, "copy_threads": 1, "io_depth": 2}
WINDOWS = 10
# What an allocator may keep between windows, of pools that grew once: glibc gives arenas back in pieces of 1 MiB. A
# leak of one page in each save is 40 MB in the 10,000 of `make torture`.
SLACK_BYTES = 8 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


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
            saver._swept.add(gone)
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


QUICK = (saves, failures)


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=() if way in QUICK else pytest.mark.slow) for way in WAYS],
    ids=lambda way: way.__name__,
)
@pytest.mark.timeout(1200)
def test_nothing_grows(
    way: Callable[[Path], Any], tmp_path: Path, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("lazyckpt"), "disabled", True)  # pytest keeps what is logged
    count = trials.count(*WAYS[way])
    running = way(tmp_path)
    for _ in range(count // WINDOWS + 10):  # caches and pools fill
        saver = next(running)

    def settled() -> None:
        if saver is not None:
            saver.drain()
            assert saver.engine.ring_used_bytes == 0
        assert gate._pending == () and not in_flight

    found = []
    for _ in range(WINDOWS):
        for _ in range(count // WINDOWS):
            saver = next(running)
        settled()
        found.append((len(os.listdir("/proc/self/fd")), threading.active_count(), objects(), resident_bytes()))
    descriptors, threads, alive, resident = map(list, zip(*found, strict=True))
    assert max(descriptors) <= descriptors[0] + 2, descriptors  # of a removal that is under way
    assert max(threads) <= threads[0], threads
    # One object in ten saves would be a leak; less is a cache of somebody else's.
    assert alive[-1] - alive[0] < max(count // 10, 20), alive
    half = WINDOWS // 2
    assert max(resident[half:]) - max(resident[:half]) < SLACK_BYTES, resident
    running.close()
    assert len(os.listdir(tmp_path)) <= 4
    grown = max(resident[half:]) - max(resident[:half])
    trials.report(
        f"{way.__name__} without growth", count, tmp_path, resident_kib=grown >> 10, objects=alive[-1] - alive[0]
    )


def test_a_leak_would_be_seen(tmp_path: Path, trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above with something that keeps what it should not."""
    kept: list[Any] = []
    make = lazyckpt.SaveHandle.__init__

    def keeping(self: Any, *args: Any) -> None:
        make(self, *args)
        kept.append(self)

    monkeypatch.setattr(lazyckpt.SaveHandle, "__init__", keeping)
    with pytest.raises(AssertionError, match=r"\["):
        test_nothing_grows(saves, tmp_path, trials, monkeypatch)
