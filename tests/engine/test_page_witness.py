"""A write to a watched page before its copy fails the job, however it is done; no other write does."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyckpt import _engine
from lazyckpt.formats.program import SOURCE
from trials import TORTURE
from watched import CHUNK, LIBC, PAGE, WRITERS, Memory, Save, is_protected, make_engine, map_anew

pytestmark = pytest.mark.skipif(bool(_engine.page_witness()), reason=f"no page witness: {_engine.page_witness()}")


@pytest.fixture
def engine() -> _engine.Engine:
    return make_engine()


@pytest.mark.parametrize("size", [3 * PAGE, 40 * PAGE], ids=["one chunk", "three chunks"])
@pytest.mark.parametrize("shift", [0, 64, PAGE - 64])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_write_to_any_watched_page_fails_the_checkpoint(
    writer: str, shift: int, size: int, engine: _engine.Engine, tmp_path: Path
) -> None:
    other, memory = Memory.of(5 * PAGE), Memory.of(size, at=shift)
    for number, at in enumerate((PAGE, size // 2, size - PAGE - 1)):
        save = Save(engine, [other, memory], tmp_path / str(number))
        WRITERS[writer](memory, at)
        assert save.finish() == [1]
        assert Save(engine, [other, memory], tmp_path / f"{number}-again").finish() == []


@pytest.mark.parametrize("shift", [0, 64])
def test_writes_after_the_copy_and_reads_at_any_time_do_no_harm(
    shift: int, engine: _engine.Engine, tmp_path: Path
) -> None:
    memory = Memory.of(CHUNK + 9 * PAGE, at=shift)  # the ring holds it
    save = Save(engine, [memory], tmp_path / "a")
    assert memory.array.sum() > 0
    assert any(is_protected(memory))
    save.job.wait_captured(1)
    memory.array[:] = 7
    assert save.finish() == []
    assert not any(is_protected(memory))


def test_memory_that_nobody_touched_yet_may_be_watched(engine: _engine.Engine, tmp_path: Path) -> None:
    """Optimizers allocate zeros: a page does not exist yet, or is the shared zero page."""
    memory = Memory.within(mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), 60 * PAGE)
    for number in range(2):
        path = tmp_path / str(number)
        job = engine.begin(array("Q", [memory.address]), array("Q", [memory.size]), array("Q", [1]), 1, True)
        assert job.watch_s > 0
        job.append(0, 0, array("q", [SOURCE, memory.size, 0]), b"")
        job.seal()
        if number:
            memory.array[30 * PAGE] = 1
        job.go()
        job.open(0, path, memory.size)
        assert job.wait_released(30) and job.wait_settled(30)
        assert job.torn() == ([0] if number else [])
    assert (tmp_path / "0").read_bytes() == bytes(memory.size)


def test_memory_with_huge_pages_is_watched(engine: _engine.Engine, tmp_path: Path) -> None:
    size = 8 << 20
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = Memory.within(mapping, size)
    memory.array[:] = 3
    assert Save(engine, [memory], tmp_path / "a").finish() == []
    save = Save(engine, [memory], tmp_path / "b")
    memory.array[5 << 20] = 4
    assert save.finish() == [0]
    assert not any(is_protected(memory))


def test_memory_that_was_unmapped_and_mapped_again_is_watched_anew(engine: _engine.Engine, tmp_path: Path) -> None:
    memory = Memory.of(30 * PAGE)
    assert Save(engine, [memory], tmp_path / "a").finish() == []
    for number, (first, pages) in enumerate(((0, 30), (8, 4))):  # all of it, a part in the middle
        map_anew(memory.address + first * PAGE, pages)
        memory.array[:] = 9
        save = Save(engine, [memory], tmp_path / f"b{number}")
        memory.array[9 * PAGE] = 255
        assert save.finish() == [0]
        assert Save(engine, [memory], tmp_path / f"c{number}").finish() == []


def test_memory_that_is_replaced_while_it_waits_fails_the_checkpoint(engine: _engine.Engine, tmp_path: Path) -> None:
    memory = Memory.of(30 * PAGE)
    give_back = memory.mapping.madvise, lambda advice: map_anew(memory.address + 5 * PAGE, 1)
    for number, replace in enumerate(give_back):
        save = Save(engine, [memory], tmp_path / str(number))
        replace(mmap.MADV_DONTNEED)
        assert save.finish() == [0]
        memory.array[:] = 5


def test_shared_memory_is_copied_at_once(engine: _engine.Engine, tmp_path: Path) -> None:
    """The kernel does not report what another process writes."""
    memory = Memory.of(30 * PAGE, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    save = Save(engine, [memory], tmp_path / "a")
    save.job.wait_eager()
    memory.array[:] = 0
    assert save.finish() == []
    assert save.job.stats()["eager_bytes"] == memory.size


def of_file(path: Path, written: int, read: int = 0) -> Memory:
    """Returns a private mapping of a file of 12 pages: the first are written, some are read, the rest is untouched."""
    path.write_bytes(bytes(12 * PAGE))
    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), 12 * PAGE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    memory = Memory.within(mapping, 12 * PAGE)
    for page in range(written + read):
        if page < written:
            memory.array[page * PAGE] = 1
        else:
            assert memory.array[page * PAGE] == 0
    return memory


@pytest.mark.parametrize("page", [0, 5, 11])
def test_a_private_mapping_of_a_file_is_watched_once_all_of_it_is_written(
    page: int, engine: _engine.Engine, tmp_path: Path
) -> None:
    """Training writes so to weights that safetensors has loaded."""
    memory = of_file(tmp_path / "weights", written=12)
    assert Save(engine, [memory], tmp_path / "untouched").finish() == []
    save = Save(engine, [memory], tmp_path / "file")
    assert all(is_protected(memory))
    memory.array[page * PAGE + 7] += 1
    assert save.finish() == [0]
    assert not any(is_protected(memory))


@pytest.mark.parametrize(("written", "read"), [(0, 0), (0, 12), (11, 0), (11, 1), (6, 3)])
def test_what_the_file_below_a_mapping_may_change_is_copied_at_once(
    written: int, read: int, engine: _engine.Engine, tmp_path: Path
) -> None:
    memory = of_file(tmp_path / "weights", written, read)
    expected = b"".join(bytes([page < written]) + bytes(PAGE - 1) for page in range(12))
    save = Save(engine, [memory], tmp_path / "file", expected=expected)
    assert not any(is_protected(memory))
    save.job.wait_eager()
    (tmp_path / "weights").write_bytes(bytes([7]) * 12 * PAGE)
    assert save.finish() == []


def test_a_page_that_is_given_back_to_the_file_fails_the_checkpoint(engine: _engine.Engine, tmp_path: Path) -> None:
    memory = of_file(tmp_path / "weights", written=12)
    save = Save(engine, [memory], tmp_path / "file")
    memory.mapping.madvise(mmap.MADV_DONTNEED, 3 * PAGE, PAGE)
    assert save.finish() == [0]


def test_memory_that_lies_in_a_file_and_beside_it_is_copied_at_once(engine: _engine.Engine, tmp_path: Path) -> None:
    memory = of_file(tmp_path / "weights", written=12)
    map_anew(memory.address + 6 * PAGE, 6)
    memory.array[:] = 3
    save = Save(engine, [memory], tmp_path / "file")
    save.job.wait_eager()
    memory.array[:] = 4
    assert save.finish() == []


def test_pages_of_hugetlbfs_are_copied_at_once(engine: _engine.Engine, tmp_path: Path) -> None:
    """A storage covers a part of a huge page, and the kernel protects only whole ones."""
    pool = Path("/proc/sys/vm/nr_hugepages")
    before = pool.read_text()
    try:
        pool.write_text("4")
        mapping = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)  # MAP_HUGETLB
    except OSError as error:
        pytest.skip(f"no huge pages to be had: {error}")
    finally:
        pool.write_text(before) if os.access(pool, os.W_OK) else None
    memory = Memory.within(mapping, 600 * PAGE, at=5 * PAGE)
    memory.array[:] = 3
    large = make_engine(ring_bytes=64 * CHUNK)
    assert large.reserve(64 * CHUNK)
    save = Save(large, [memory], tmp_path / "file")
    save.job.wait_eager()
    memory.array[:] = 4
    assert save.finish() == []
    assert save.job.stats()["eager_bytes"] == memory.size


def test_after_a_fork_the_writes_of_this_process_count_and_those_of_the_child_do_not(
    engine: _engine.Engine, tmp_path: Path
) -> None:
    memory = Memory.of(30 * PAGE)
    for number, parent_writes in enumerate((False, True)):
        save = Save(engine, [memory], tmp_path / str(number))
        child = os.fork()
        if child == 0:
            memory.array[:] = 0
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        if parent_writes:
            memory.array[20 * PAGE] = 77
        assert save.finish() == ([0] if parent_writes else [])


def test_a_forked_child_watches_its_own_memory(engine: _engine.Engine, tmp_path: Path) -> None:
    memory = Memory.of(30 * PAGE)
    child = os.fork()
    if child == 0:
        try:
            save = Save(make_engine(), [memory], tmp_path / "a")
            memory.array[20 * PAGE] = 77
            os._exit(0 if save.finish() == [0] else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("first_ends", ["first", "last"])
def test_two_snapshots_of_the_same_pages_keep_each_others_evidence(
    first_ends: str, written: bool, tmp_path: Path
) -> None:
    """The first copy, by another Saver or another save, must not lift the protection that the second needs."""
    engines = make_engine(), make_engine()
    memory = Memory.of(30 * PAGE)
    first, second = (Save(engine, [memory], tmp_path / str(at)) for at, engine in enumerate(engines))
    one, other = (first, second) if first_ends == "first" else (second, first)
    assert one.finish() == []
    assert all(is_protected(memory)[:30])
    if written:
        memory.array[3 * PAGE] = 1
    assert other.finish() == ([0] if written else [])
    assert not any(is_protected(memory))


def test_what_was_written_before_a_second_snapshot_tears_the_first_alone(tmp_path: Path) -> None:
    engines = make_engine(), make_engine()
    memory = Memory.of(30 * PAGE)
    first = Save(engines[0], [memory], tmp_path / "a")
    memory.array[3 * PAGE] = 1
    second = Save(engines[1], [memory], tmp_path / "b")
    assert second.finish() == []
    assert first.finish() == [0]
    assert not any(is_protected(memory))


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_write_tears_every_snapshot_that_began_before_it(written: int, tmp_path: Path) -> None:
    """Regression: a third snapshot kept the evidence for the first one alone."""
    memory = Memory.of(30 * PAGE)
    saves = []
    for number in range(4):
        saves.append(Save(make_engine(), [memory], tmp_path / str(number)))
        if number == written:
            memory.array[3 * PAGE] = 1
    assert [save.finish() for save in saves] == [[0] if number <= written else [] for number in range(4)]
    assert not any(is_protected(memory))


def test_a_snapshot_whose_pages_another_watches_in_part_is_copied_at_once(tmp_path: Path) -> None:
    engines = make_engine(), make_engine()
    memory = Memory.of(30 * PAGE)
    part = Memory(memory.mapping, memory.address + 4 * PAGE, 10 * PAGE)
    first, second = Save(engines[0], [memory], tmp_path / "a"), Save(engines[1], [part], tmp_path / "b")
    assert second.job.stats()["eager_bytes"] == part.size
    assert second.finish() == [] and first.finish() == []


@pytest.mark.parametrize("times", [2, 3, 6])
@pytest.mark.parametrize("written", [True, False])
def test_a_storage_in_several_files_is_watched_for_each(
    times: int, written: bool, engine: _engine.Engine, tmp_path: Path
) -> None:
    """A Trainer saves the weights twice. From the fifth time on they are copied at once."""
    other, memory = Memory.of(5 * PAGE), Memory.of(6 * PAGE)
    save = Save(engine, [memory, other, *[memory] * (times - 1)], tmp_path / "a")
    assert save.job.stats()["eager_bytes"] == max(0, times - 4) * memory.size
    if written:
        memory.array[3 * PAGE] = 1
    of_memory = [0, *range(2, times + 1)]
    assert save.finish() == (of_memory[:4] if written else [])
    assert not any(is_protected(memory))


def test_a_write_behind_one_of_two_copies_tears_the_other(tmp_path: Path) -> None:
    """The first copy must not lift the protection that the second needs."""
    engine = make_engine(chunk_bytes=30 * PAGE, ring_bytes=60 * PAGE)  # for one copy and what lies between
    memory, between = Memory.of(30 * PAGE), Memory.of(30 * PAGE)
    save = Save(engine, [memory, between, memory], tmp_path / "a")
    save.job.wait_eager()
    save.job.go()
    while save.job.pending_chunks(1) > 1:  # the ring is full then
        time.sleep(0.001)
    memory.array[3 * PAGE] = 1
    assert save.finish() == [2]


def test_parts_of_a_watched_storage_are_copied_at_once(engine: _engine.Engine, tmp_path: Path) -> None:
    """Regression: of three that overlap, the last was compared with the second alone, which was not watched."""
    whole = Memory.of(30 * PAGE)
    parts = [Memory(whole.mapping, whole.address + at * PAGE, 4 * PAGE) for at in (1, 7, 20)]
    save = Save(engine, [whole, *parts], tmp_path / "a")
    assert save.job.stats()["eager_bytes"] == sum(part.size for part in parts)
    whole.array[21 * PAGE + 5] ^= 255
    assert save.finish() == [0]


def neighbours(count: int, gap: int) -> tuple[Memory, list[Memory]]:
    """Returns a mapping and storages of ten pages in it, with gaps of this size between them."""
    whole = Memory.of(count * (10 * PAGE + gap))
    starts = range(whole.address, whole.address + whole.size, 10 * PAGE + gap)
    return whole, [Memory(whole.mapping, start, 10 * PAGE) for start in starts]


def inside(memory: Memory) -> Memory:
    """Returns the whole pages of a memory."""
    begin = -(-memory.address // PAGE) * PAGE
    return Memory(memory.mapping, begin, (memory.address + memory.size) // PAGE * PAGE - begin)


@pytest.mark.parametrize("gap", [16, PAGE, 4 * PAGE, 8 * PAGE])
def test_each_of_many_neighbours_is_watched_by_itself(gap: int, engine: _engine.Engine, tmp_path: Path) -> None:
    """Neighbours are protected and opened together with the gaps between them."""
    whole, storages = neighbours(100, gap)
    for written in ([], list(range(3, 100, 7))):
        save = Save(engine, storages, tmp_path / str(len(written)))
        assert all(all(is_protected(inside(memory))) for memory in storages)
        for number in range(100):
            whole.array[number * (10 * PAGE + gap) + 10 * PAGE + 8] = 1  # behind it
        for number in written:
            storages[number].array[5 * PAGE] += 1
        assert save.finish() == written
        assert not any(any(is_protected(inside(memory))) for memory in storages)


def test_what_lies_between_neighbours_may_be_unmapped(engine: _engine.Engine, tmp_path: Path) -> None:
    """Nothing in the gap is watched. It may be mapped anew, too."""
    _, storages = neighbours(6, 2 * PAGE)
    for anew in (False, True):
        save = Save(engine, storages, tmp_path / str(anew))
        for memory in storages[:3]:
            gap = memory.address + memory.size
            assert LIBC.munmap(ctypes.c_void_p(gap), ctypes.c_size_t(2 * PAGE)) == 0
            if anew:
                map_anew(gap, 2)
        storages[4].array[PAGE] += 1
        assert save.finish() == [4]
        assert not any(any(is_protected(memory)) for memory in storages)


def test_what_another_snapshot_watches_between_two_neighbours_is_left_to_it(tmp_path: Path) -> None:
    engines = make_engine(), make_engine()
    whole = Memory.of(30 * PAGE)
    left, between, right = (
        Memory(whole.mapping, whole.address + begin * PAGE, (end - begin) * PAGE)
        for begin, end in ((0, 10), (11, 13), (14, 24))
    )
    first = Save(engines[0], [between], tmp_path / "a")
    between.array[PAGE] = 1
    second = Save(engines[1], [left, right], tmp_path / "b")  # earlier writes tear the first alone
    assert second.finish() == []
    assert first.finish() == [0]
    first = Save(engines[0], [between], tmp_path / "c")
    assert Save(engines[1], [left, right], tmp_path / "d").finish() == []
    assert all(is_protected(between)), "the second has ended, and opened its own pages alone"
    between.array[0] += 1
    assert first.finish() == [0]


def test_a_dropped_checkpoint_leaves_no_page_protected(engine: _engine.Engine, tmp_path: Path) -> None:
    """As when save() is interrupted."""
    memory = Memory.of(100 * PAGE)
    save = Save(engine, [memory], tmp_path / "a")
    del save.job
    assert not any(is_protected(memory))


def test_a_failed_checkpoint_that_somebody_keeps_watches_no_more(engine: _engine.Engine, tmp_path: Path) -> None:
    """Regression: as long as somebody kept the error, later users of its memory were copied at once."""
    memory = Memory.of(100 * PAGE)
    failed = Save(engine, [memory], tmp_path / "a")
    failed.job.fail(errno.EIO, "tried")
    assert failed.job.wait_settled(30)
    assert not any(is_protected(memory))
    part = Memory(memory.mapping, memory.address + 4 * PAGE, 10 * PAGE)
    save = Save(engine, [part], tmp_path / "b")
    assert save.job.stats()["eager_bytes"] == 0
    assert save.finish() == []


def test_what_is_written_after_a_failure_is_not_blamed(engine: _engine.Engine, tmp_path: Path) -> None:
    """Regression: the gate is open then, and the step of the training looked like a stranger's write."""
    memory = Memory.of(100 * PAGE)
    save = Save(engine, [memory], tmp_path / "a")
    save.job.fail(errno.EIO, "tried")
    assert save.job.wait_captured(1, 30)
    memory.array[:] = 0
    assert save.job.wait_released(30)
    assert save.job.torn() == []


def test_all_that_was_written_is_named(engine: _engine.Engine, tmp_path: Path) -> None:
    """Sources that are not copied any more after the first failure are named, too."""
    memories = [Memory.of(100 * PAGE) for _ in range(3)]
    save = Save(engine, memories, tmp_path / "a")
    memories[0].array[0] = 1
    memories[2].array[50 * PAGE] = 1
    assert save.finish() == [0, 2]


def test_it_registers_whole_mappings(engine: _engine.Engine, tmp_path: Path) -> None:
    """Registering each storage would split the mapping, and a process may have only 65,530."""
    mapping = mmap.mmap(-1, 2000 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    sources = [Memory.within(mapping, 3 * PAGE, at=4 * at * PAGE) for at in range(400)]
    before = len(Path("/proc/self/maps").read_text().splitlines())
    assert Save(engine, sources, tmp_path / "a").finish() == []
    assert len(Path("/proc/self/maps").read_text().splitlines()) < before + 20


@settings(max_examples=200 if TORTURE else 30, deadline=None)
@given(data=st.data())
def test_any_write_between_save_and_copy_is_found_and_no_other(data: st.DataObject, tmp_path_factory: object) -> None:
    """Random storages in one mapping, random cuts, random writes."""
    folder = tmp_path_factory.mktemp("any")  # type: ignore[attr-defined]
    chunk = data.draw(st.sampled_from([PAGE, 2 * PAGE, 5 * PAGE]))
    engine = make_engine(chunk_bytes=chunk, ring_bytes=20 * PAGE)
    whole = Memory.of(200 * PAGE)
    sources, starts, at = [], [], 0
    for _ in range(data.draw(st.integers(1, 6))):
        at += data.draw(st.integers(0, 2 * PAGE))
        size = data.draw(st.integers(2 * PAGE, 20 * PAGE))  # so that each has a page of its own
        starts.append(sum(source.size for source in sources))
        sources.append(Memory(whole.mapping, whole.address + at, size))
        at += size
    for _ in range(data.draw(st.integers(0, 3))):  # several files hold it
        starts.append(sum(source.size for source in sources))
        sources.append(data.draw(st.sampled_from(sources)))
    for number in range(4):
        save = Save(engine, sources, folder / str(number))
        position = data.draw(st.integers(0, at - 1))
        whole.array[position] ^= 255
        torn = save.finish()  # checks the file unless it is torn
        page = (whole.address + position) // PAGE * PAGE
        expected, whole_pages = [], []
        for i, (source, start) in enumerate(zip(sources, starts, strict=True)):
            in_file = start + page - source.address
            is_whole = source.address <= page and page + PAGE <= source.address + source.size
            is_cut = is_whole and in_file // chunk != (in_file + PAGE - 1) // chunk
            whole_pages += [i] if is_whole else []
            expected += [i] if is_whole and not is_cut else []
        # A job that fails looks at all that is not copied yet, also at a page that it would copy in two.
        assert torn == expected or (expected and {*expected} <= {*torn} <= {*whole_pages})
    assert not any(any(is_protected(inside(source))) for source in sources)
