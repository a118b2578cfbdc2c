"""Memory that another process may write to is copied inside ``save()``, whatever torch knows of it."""

from __future__ import annotations

import mmap
import multiprocessing.shared_memory
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import lazyckpt
from lazyckpt import _engine, warn
from lazyckpt.capture import shared

NUMEL = 64 << 10
NBYTES = 4 * NUMEL
Make = Callable[[Path], tuple[Any, Any]]  # two views of one memory, as two processes have them


def by_mmap(folder: Path) -> tuple[Any, Any]:
    file = os.open(folder / "shared", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, NBYTES)
    return tuple(torch.frombuffer(mmap.mmap(file, NBYTES), dtype=torch.float32) for _ in range(2))  # type: ignore[return-value]


def by_memfd(folder: Path) -> tuple[Any, Any]:
    file = os.memfd_create("shared")
    os.ftruncate(file, NBYTES)
    return tuple(torch.frombuffer(mmap.mmap(file, NBYTES), dtype=torch.float32) for _ in range(2))  # type: ignore[return-value]


def by_memmap(folder: Path) -> tuple[Any, Any]:
    first = numpy.memmap(folder / "shared", dtype="float32", mode="w+", shape=NUMEL)
    second = numpy.memmap(folder / "shared", dtype="float32", mode="r+", shape=NUMEL)
    return torch.from_numpy(first), torch.from_numpy(second)


def from_file(folder: Path) -> tuple[Any, Any]:
    path = str(folder / "shared")
    first, second = (torch.from_file(path, shared=True, size=NUMEL, dtype=torch.float32) for _ in range(2))
    return first, second


def by_multiprocessing(folder: Path) -> tuple[Any, Any]:
    first = multiprocessing.shared_memory.SharedMemory(create=True, size=NBYTES)
    second = multiprocessing.shared_memory.SharedMemory(name=first.name)
    first.unlink()
    kept.extend((first, second))
    one, other = (torch.from_numpy(numpy.ndarray(NUMEL, "float32", buffer=m.buf)) for m in (first, second))
    return one, other


def with_a_child(folder: Path) -> tuple[Any, Any]:
    """Anonymous, as a forked child inherits it."""
    whole = torch.frombuffer(mmap.mmap(-1, NBYTES), dtype=torch.float32)
    return whole, whole


WAYS = (by_mmap, by_memfd, by_memmap, from_file, by_multiprocessing, with_a_child)
kept: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shared, "_known", {})
    yield
    kept.clear()


class Lone(torch.nn.Module):
    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__()
        memory.fill_(1)
        self.weight = torch.nn.Parameter(memory)
        self.private = torch.nn.Parameter(torch.zeros(NUMEL))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()


def write_in_a_child(view: torch.Tensor) -> None:
    child = os.fork()
    if child == 0:
        view.numpy()[:] = 2
        os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.parametrize("make", WAYS)
@pytest.mark.parametrize("witness", ["auto", "versions"])
def test_another_process_that_writes_changes_no_checkpoint(make: Make, witness: str, tmp_path: Path, disk: Any) -> None:
    """Regression: with versions, memory that torch does not flag as shared was copied lazily."""
    mine, theirs = make(tmp_path)
    model = Lone(mine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with lazyckpt.Checkpointer(
        tmp_path / "run", witness=witness, chunk_bytes=16 << 10, host_buffer_bytes=1 << 20
    ) as ckpt:
        ckpt.track(model=model)
        for step in range(3):
            model.step(optimizer)
            mine.detach().numpy()[:] = 1
            disk.hold()
            disk.release(after_s=0.02)
            handle = ckpt.save(step)
            write_in_a_child(theirs)
            saved = lazyckpt.load(handle.result())["model"]
            assert set(saved["weight"].tolist()) == {1.0}
            assert NBYTES <= handle.metrics.eager_bytes < 2 * NBYTES, "the private one is lazy"


def may_be_shared(storages: list[torch.UntypedStorage]) -> list[bool]:
    return shared.may_be_shared(storages, [s._cdata for s in storages], [s.data_ptr() for s in storages])


def test_the_mappings_are_read_when_there_is_a_new_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    look = shared._shared_mappings
    monkeypatch.setattr(shared, "_shared_mappings", lambda: reads.append(1) or look())
    storages = [torch.zeros(5000).untyped_storage() for _ in range(3)]
    assert may_be_shared(storages) == [False] * 3
    assert may_be_shared(storages) == [False] * 3
    assert len(reads) == 1
    storages.append(torch.zeros(5000).share_memory_().untyped_storage())
    assert may_be_shared(storages) == [False, False, False, True]
    assert len(reads) == 2
    storages[0].resize_(1 << 20)  # elsewhere
    assert may_be_shared(storages) == [False, False, False, True]
    assert len(reads) == 3
    storages[1]._share_fd_cpu_()
    assert may_be_shared(storages) == [False, True, False, True]
    del storages[2:]
    storages.append(torch.zeros(5000).untyped_storage())
    assert may_be_shared(storages) == [False, True, False]
    assert len(shared._known) == 3, "freed storages are forgotten"


def test_where_nothing_tells_all_memory_may_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_MAPS", "/proc/nothing/maps")
    assert may_be_shared([torch.zeros(5000).untyped_storage()]) == [True]


@pytest.mark.parametrize(
    ("mappings", "begin", "nbytes", "expected"),
    [
        ([], 10, 5, False),
        ([(10, 20)], 5, 5, False),
        ([(10, 20)], 5, 6, True),
        ([(10, 20)], 19, 1, True),
        ([(10, 20)], 20, 1, False),
        ([(10, 20), (30, 40)], 15, 100, True),
        ([(10, 20), (30, 40)], 20, 10, False),
        ([(10, 20), (30, 40)], 0, 100, True),
    ],
)
def test_overlaps(mappings: list[tuple[int, int]], begin: int, nbytes: int, expected: bool) -> None:
    assert shared._overlaps(mappings, begin, nbytes) is expected


def test_a_machine_with_the_weaker_witness_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warn, "_given", set())
    monkeypatch.setattr(_engine, "page_witness", lambda: "userfaultfd: Operation not permitted")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(2):
            lazyckpt.Checkpointer(tmp_path / str(number)).close()
        lazyckpt.Checkpointer(tmp_path / "chosen", witness="versions").close()
    (message,) = [str(w.message) for w in told]
    assert "does not watch host memory here (userfaultfd: Operation not permitted)" in message
