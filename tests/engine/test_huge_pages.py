"""Huge pages are made of watched memory, stay whole from save to save, and hide no write."""

from __future__ import annotations

import mmap
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lazyckpt import _engine
from watched import CHUNK, PAGE, Memory, Save, is_protected, make_engine, map_anew

HUGE = 2 << 20
pytestmark = [
    pytest.mark.skipif(bool(_engine.page_witness()), reason=f"no page witness: {_engine.page_witness()}"),
    pytest.mark.skipif(bool(_engine.huge_pages()), reason=f"no huge pages: {_engine.huge_pages()}"),
]


def huge_engine(**knobs: object) -> _engine.Engine:
    return make_engine(huge_pages=True, **knobs)


def memory_with_rooms(rooms: int) -> Memory:
    """Memory that begins and ends inside a huge page, and touches this many whole ones."""
    mapping = mmap.mmap(-1, (rooms + 3) * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = Memory.within(mapping, 0).address
    memory = Memory.within(mapping, (rooms + 2) * HUGE - 10 * PAGE, at=-start % HUGE + 5 * PAGE)
    memory.array[:] = 3
    return memory


def huge_bytes(memory: Memory) -> int:
    """Bytes in huge pages in the mapping of this memory."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= memory.address + HUGE < int(found[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the memory is not mapped")


def wait_for_huge_pages(memory: Memory, rooms: int) -> None:
    deadline = time.monotonic() + 30
    while huge_bytes(memory) < rooms * HUGE:
        assert time.monotonic() < deadline, f"{huge_bytes(memory)} bytes are in huge pages"
        time.sleep(0.01)


@pytest.fixture
def engine() -> _engine.Engine:
    return huge_engine()


@pytest.mark.parametrize("copy_threads", [1, 2])
@pytest.mark.parametrize("chunk", [CHUNK, 24 * CHUNK + PAGE], ids=["many chunks in one", "one over several"])
def test_huge_pages_are_made_after_a_save_and_stay_whole(chunk: int, copy_threads: int, tmp_path: Path) -> None:
    engine = huge_engine(ring_bytes=4 * chunk, chunk_bytes=chunk, copy_threads=copy_threads)
    memory, other = memory_with_rooms(3), Memory.of(5 * PAGE, at=64)
    assert Save(engine, [other, memory], tmp_path / "first").finish() == []
    wait_for_huge_pages(memory, 3)
    for number in range(10):
        save = Save(engine, [other, memory], tmp_path / str(number))
        assert all(is_protected(memory))
        assert save.finish() == []
        assert not any(is_protected(memory))
        memory.array[:] = number
        assert huge_bytes(memory) == 3 * HUGE


def test_huge_pages_that_training_had_already_stay_whole(tmp_path: Path) -> None:
    memory = memory_with_rooms(3)
    memory.mapping.madvise(mmap.MADV_DONTNEED)
    memory.mapping.madvise(mmap.MADV_HUGEPAGE)
    memory.array[:] = 3
    assert huge_bytes(memory) >= 3 * HUGE
    engine = make_engine()  # without huge_pages
    for number in range(3):
        assert Save(engine, [memory], tmp_path / str(number)).finish() == []
        memory.array[:] = number
        assert huge_bytes(memory) >= 3 * HUGE


@pytest.mark.parametrize("at", [0, HUGE - 5 * PAGE, HUGE, HUGE + 100 * PAGE, 2 * HUGE - 6 * PAGE, 2 * HUGE + 8])
def test_a_write_to_any_part_of_a_huge_page_fails_the_checkpoint(
    at: int, engine: _engine.Engine, tmp_path: Path
) -> None:
    memory = memory_with_rooms(2)
    assert Save(engine, [memory], tmp_path / "first").finish() == []
    wait_for_huge_pages(memory, 2)
    save = Save(engine, [memory], tmp_path / "torn")
    memory.array[at] = 7
    assert save.finish() == [0]
    assert not any(is_protected(memory))
    assert Save(engine, [memory], tmp_path / "again").finish() == []


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("first_ends", [True, False], ids=["the first ends first", "the last ends first"])
def test_two_snapshots_of_one_huge_page_keep_each_others_evidence(
    first_ends: bool, written: bool, tmp_path: Path
) -> None:
    engines = huge_engine(), huge_engine()
    memory = memory_with_rooms(1)
    assert Save(engines[0], [memory], tmp_path / "first").finish() == []
    wait_for_huge_pages(memory, 1)
    saves = [Save(engine, [memory], tmp_path / str(at)) for at, engine in enumerate(engines)]
    one, other = saves if first_ends else reversed(saves)
    assert one.finish() == []
    assert all(is_protected(memory))
    if written:
        memory.array[HUGE] = 1
    assert other.finish() == ([0] if written else [])
    assert not any(is_protected(memory))


def test_new_memory_gets_huge_pages_too(engine: _engine.Engine, tmp_path: Path) -> None:
    memory = memory_with_rooms(2)
    for number in range(3):
        assert Save(engine, [memory], tmp_path / str(number)).finish() == []
        wait_for_huge_pages(memory, 2)
        map_anew(memory.address - 5 * PAGE, 4 * HUGE // PAGE)
        memory.array[:] = 5
        assert huge_bytes(memory) == 0


def test_small_pages_stay_small_unless_asked(tmp_path: Path) -> None:
    memory = memory_with_rooms(2)
    engine = make_engine()
    for number in range(2):
        assert Save(engine, [memory], tmp_path / str(number)).finish() == []
    del engine  # its threads have ended
    assert huge_bytes(memory) == 0


REFUSED = """
import ctypes, sys, warnings
assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0  # PR_SET_THP_DISABLE
import torch, lazyckpt
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for name in "ab":
        with lazyckpt.Checkpointer(sys.argv[1] + "/" + name, huge_pages=True) as checkpointer:
            checkpointer.track(model=torch.nn.Linear(8, 8))
            checkpointer.save(1).result(timeout=60)
said = [str(warning.message) for warning in said if "huge_pages" in str(warning.message)]
assert len(said) == 1 and "MADV_COLLAPSE: Invalid argument" in said[0], said
"""


def test_a_kernel_that_refuses_is_named_once_and_saves_go_on(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", REFUSED, str(tmp_path)], check=True)
