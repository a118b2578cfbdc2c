"""A writer to a watched page waits until the page is copied, and neither tears nor fails the checkpoint."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import pytest
import torch

import lazyckpt
import watched
from lazyckpt import _engine
from watched import PAGE, WRITERS, Memory, Save, is_protected, map_anew

pytestmark = pytest.mark.skipif(bool(_engine.page_witness(True)), reason=f"refused: {_engine.page_witness(True)}")


def make_engine() -> _engine.Engine:
    return watched.make_engine(copy_on_write=True)


@pytest.fixture
def engine() -> _engine.Engine:
    return make_engine()


@pytest.mark.parametrize("shift", [0, 64, PAGE - 64])
@pytest.mark.parametrize("writer", WRITERS)
def test_no_writer_tears_or_fails_the_checkpoint(
    writer: str, shift: int, engine: _engine.Engine, tmp_path: Path
) -> None:
    other, memory = Memory.of(5 * PAGE), Memory.of(40 * PAGE, at=shift)
    for number, at in enumerate((0, PAGE, 20 * PAGE, 40 * PAGE - 1)):
        save = Save(engine, [other, memory], tmp_path / str(number))
        WRITERS[writer](memory, at)
        assert save.finish() == []
        assert not any(is_protected(memory)) and not any(is_protected(other))


def test_threads_that_write_all_of_it_while_it_is_copied(engine: _engine.Engine, tmp_path: Path) -> None:
    memory = Memory.of(512 * PAGE, at=64)
    for number in range(10):
        save = Save(engine, [memory], tmp_path / str(number))
        threads = [
            threading.Thread(target=memory.array[at::4].__setitem__, args=(slice(None), number)) for at in range(4)
        ]
        for thread in threads:
            thread.start()
        assert save.finish() == []
        for thread in threads:
            thread.join()
        assert (memory.array == number).all()
    assert not any(is_protected(memory))


def test_memory_that_nobody_touched_and_huge_pages(engine: _engine.Engine, tmp_path: Path) -> None:
    for number, advice in enumerate((None, mmap.MADV_HUGEPAGE)):
        size = 6 << 20
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if advice is not None:
            mapping.madvise(advice)
        memory = Memory.within(mapping, size)
        if advice is not None:
            memory.array[:] = 3
        save = Save(engine, [memory], tmp_path / f"{number}")
        memory.array[::50_000] = 4
        assert save.finish() == []
        assert not any(is_protected(memory))


@pytest.mark.parametrize("first_ends", [True, False])
def test_two_snapshots_of_the_same_pages_get_each_its_own(first_ends: bool, tmp_path: Path) -> None:
    engines = make_engine(), make_engine()
    memory = Memory.of(60 * PAGE)
    first = Save(engines[0], [memory], tmp_path / "a")
    memory.array[3 * PAGE] = 101
    memory.array[40 * PAGE] = 101
    second = Save(engines[1], [memory], tmp_path / "b")
    memory.array[3 * PAGE] = 102
    memory.array[50 * PAGE] = 102
    one, other = (first, second) if first_ends else (second, first)
    assert one.finish() == []
    memory.array[:] = 103
    assert other.finish() == []
    assert not any(is_protected(memory))


def test_memory_that_is_thrown_away_fails_the_checkpoint(engine: _engine.Engine, tmp_path: Path) -> None:
    """Discarding pages causes no fault that could be held."""
    memory = Memory.of(30 * PAGE)
    save = Save(engine, [memory], tmp_path / "a")
    memory.mapping.madvise(mmap.MADV_DONTNEED)
    assert save.finish() == [0]


def test_after_a_fork_parent_and_child_write_as_ever(engine: _engine.Engine, tmp_path: Path) -> None:
    memory = Memory.of(30 * PAGE)
    save = Save(engine, [memory], tmp_path / "a")
    child = os.fork()
    if child == 0:
        memory.array[:] = 0
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    memory.array[20 * PAGE] = 77
    assert save.finish() == []


def test_a_checkpoint_that_fails_lets_writers_go(engine: _engine.Engine, tmp_path: Path) -> None:
    memory = Memory.of(100 * PAGE)
    save = Save(engine, [memory], tmp_path / "a")
    save.job.fail(5, "tried")
    assert save.job.wait_released(30)
    assert not any(is_protected(memory))
    memory.array[:] = 1


@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_both_modes_in_one_process_take_turns(order: tuple[bool, bool], tmp_path: Path) -> None:
    """A mapping belongs to one mode. The other takes it over if no window is open, and copies at once otherwise."""
    memory = Memory.of(30 * PAGE)
    engines = [watched.make_engine(copy_on_write=copy) for copy in order]
    for number in range(2):
        for copy, engine in zip(order, engines, strict=True):
            save = Save(engine, [memory], tmp_path / f"{number}{copy}")
            memory.array[9 * PAGE] ^= 255
            assert save.finish() == ([] if copy else [0])
    waiting = Save(engines[0], [memory], tmp_path / "waits")
    at_once = Save(engines[1], [memory], tmp_path / "at-once")
    assert at_once.job.stats()["eager_bytes"] == memory.size
    assert at_once.finish() == [] and waiting.finish() == []


def test_memory_that_the_other_mode_registered_since_is_registered_anew(tmp_path: Path) -> None:
    """Regression: the kernel protects the memory for either mode but reports to the one that registered it."""
    memory = Memory.of(30 * PAGE)
    copies, reports = make_engine(), watched.make_engine()
    assert Save(copies, [memory], tmp_path / "a").finish() == []
    map_anew(memory.address, 30)
    memory.array[:] = 1
    assert Save(reports, [memory], tmp_path / "b").finish() == []
    save = Save(copies, [memory], tmp_path / "c")
    memory.array[9 * PAGE] = 2
    assert save.finish() == []


def test_a_training_whose_weights_are_written_right_after_every_save(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 300)).square().sum().backward()
        optimizer.step()

    ring = {"chunk_bytes": 64 << 10, "host_buffer_bytes": 256 << 10}
    with lazyckpt.Checkpointer(tmp_path, witness="copy", keep_last=2, **ring) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        for number in range(4):
            step()
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            handle = ckpt.save(number)
            for parameter in model.parameters():
                parameter.data.normal_()
            saved = torch.load(handle.result() / "state.pt")["model"]
            assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())
            assert handle.metrics.eager_bytes < 0.2 * handle.metrics.bytes
