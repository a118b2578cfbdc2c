"""Ranges of a file, in any order and shape, are read byte for byte, or the error says why not."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import signal
import threading
import time
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazyckpt import _engine
from trials import TORTURE

BLOCK = 4096
UNIT = 2 << 20  # what the reader reads at once
UNITS = 6  # of the big file
BACKENDS = ("io_uring", "posix")
EXAMPLES = 200 if TORTURE else 30
GUARD = 64  # bytes around each target that must stay as they are


def evict(path: Path) -> None:
    """Drops the file from the page cache, so that it is read with O_DIRECT."""
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    with mmap.mmap(fd, 0) as view:
        pages = (ctypes.c_ubyte * -(-len(view) // mmap.PAGESIZE))()
        start = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(view)))
        assert ctypes.CDLL(None).mincore(start, ctypes.c_size_t(len(view)), pages) == 0
    os.close(fd)
    if all(pages):
        pytest.skip(f"{path.parent} keeps all files in memory")


def warm(path: Path) -> None:
    path.read_bytes()


def read_file(
    path: str,
    offsets: array[int],
    sizes: array[int],
    pointers: array[int],
    *,
    threads: int = 0,
    io_depth: int = 0,
    **knobs: object,
) -> list[int]:
    if knobs.get("fault") and not _engine.FAULTS:
        pytest.skip("the engine was built without fault injection")
    engine = _engine.Engine(ring_bytes=4 * UNIT, chunk_bytes=UNIT, io_depth=1, copy_threads=0, **knobs)  # type: ignore[arg-type]
    engine.reserve(4 * UNIT)
    try:
        return _engine.RangeReader(engine, path, offsets, sizes, threads=threads, io_depth=io_depth).read_into(pointers)
    finally:
        assert engine.ring_used_bytes == 0
        del engine  # a traceback must not keep it alive


def read(path: Path, ranges: list[tuple[int, int]], **knobs: object) -> tuple[list[np.ndarray], list[int]]:
    targets = [np.full(size + 2 * GUARD, 0xA5, np.uint8) for _, size in ranges]
    crcs = read_file(
        str(path),
        array("Q", [offset for offset, _ in ranges]),
        array("Q", [size for _, size in ranges]),
        array("Q", [t.ctypes.data + GUARD for t in targets]),
        **knobs,  # type: ignore[arg-type]
    )
    for target in targets:
        assert (target[:GUARD] == 0xA5).all() and (target[-GUARD:] == 0xA5).all(), "written beyond a range"
    return [t[GUARD:-GUARD] for t in targets], crcs


def check(path: Path, data: bytes, ranges: list[tuple[int, int]], **knobs: object) -> None:
    parts, crcs = read(path, ranges, **knobs)
    for (offset, size), part, crc in zip(ranges, parts, crcs, strict=True):
        assert part.tobytes() == data[offset : offset + size]
        assert crc == _engine.crc32(data[offset : offset + size])


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """Returns a file of two and a half units and a bit."""
    data = np.random.default_rng(1).bytes((UNITS - 1) * UNIT + 1234)
    path = tmp_path_factory.mktemp("reader") / "big"
    path.write_bytes(data)
    return path, data


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_shapes(big: tuple[Path, bytes], backend: str, cold: bool, direct: bool, threads: int) -> None:
    path, data = big
    size = len(data)
    for ranges in (
        [(0, size)],
        [(1, size - 1)],
        [(size - 1, 1), (0, 1), (UNIT - 1, 2), (UNIT, 1), (size, 0), (0, 0)],  # the edges, out of order
        [(i * 1000, 1000) for i in range(500)],  # adjacent
        [(i * 100_003, 77) for i in range(80)],  # far apart
        [(0, UNIT + 5), (UNIT - 5, 10), (100, 50), (100, 50), (0, size)],  # overlapping
        [(size - 10, 10), (3, UNIT), (2 * UNIT - 1, UNIT // 2)],
        [],
    ):
        (evict if cold else warm)(path)
        check(path, data, ranges, backend=backend, direct=direct, threads=threads)


@pytest.mark.parametrize("backend", BACKENDS)
@given(st.data())
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_ranges(backend: str, big: tuple[Path, bytes], data: st.DataObject) -> None:
    path, content = big
    edges = st.sampled_from([0, 1, BLOCK - 1, BLOCK, 65_536, UNIT - 1, UNIT, UNIT + 1, len(content) - 1, len(content)])
    point = st.one_of(edges, st.integers(0, len(content)))
    pairs = data.draw(st.lists(st.tuples(point, point), max_size=8))
    if data.draw(st.booleans()):
        evict(path)
    else:  # partly in memory: some units are read one way, some the other
        fd = os.open(path, os.O_RDONLY)
        os.pread(fd, data.draw(st.integers(0, UNIT)), data.draw(point))
        os.close(fd)
    check(
        path,
        content,
        [(min(p), max(p) - min(p)) for p in pairs],
        backend=backend,
        threads=data.draw(st.integers(0, 3)),
        io_depth=data.draw(st.integers(0, 5)),
    )


@pytest.mark.parametrize("cold", [True, False])
def test_checksum_only(big: tuple[Path, bytes], cold: bool) -> None:
    path, data = big
    (evict if cold else warm)(path)
    offsets, sizes = array("Q", [5, 0, len(data) - 7]), array("Q", [UNIT + 100, 0, 7])
    crcs = read_file(str(path), offsets, sizes, array("Q", [0, 0, 0]))
    assert crcs == [_engine.crc32(data[o : o + s]) for o, s in zip(offsets, sizes, strict=True)]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("offset", "size"), [(0, 101), (100, 1), (101, 0), (1 << 63, 1), (1, (1 << 64) - 1)])
def test_beyond_the_end(tmp_path: Path, direct: bool, offset: int, size: int) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(100))
    target = np.full(200, 0xA5, np.uint8)
    with pytest.raises(OSError, match="short read") as caught:
        places = array("Q", [0, target.ctypes.data])
        read_file(str(path), array("Q", [0, offset]), array("Q", [10, size]), places, direct=direct)
    assert caught.value.filename == str(path)
    assert (target == 0xA5).all(), "everything is checked before the first byte lands"


@pytest.mark.parametrize("name", ["missing", "folder"])
def test_not_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError) as caught:
        read(tmp_path / name, [(0, 10)])
    assert caught.value.errno in (errno.ENOENT, errno.EISDIR)
    assert caught.value.filename == str(tmp_path / name)


def test_malformed_arguments(big: tuple[Path, bytes]) -> None:
    path = str(big[0])
    with pytest.raises(ValueError, match="length"):
        read_file(path, array("Q", [0]), array("Q"), array("Q"))
    evict(big[0])
    for knobs in ({"fault": "nonsense"}, {"backend": "aio"}):  # regression: the first succeeded without reading
        with pytest.raises(OSError) as caught:
            read_file(path, array("Q", [0]), array("Q", [10]), array("Q", [0]), **knobs)  # type: ignore[arg-type]
        assert caught.value.errno == errno.EINVAL


# failures of the disk


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("nth", range(1, UNITS + 2))
@pytest.mark.parametrize("effect", ["EIO", "ENOMEM"])
def test_every_failing_read_is_told(big: tuple[Path, bytes], backend: str, nth: int, effect: str) -> None:
    path, data = big
    before = len(os.listdir("/proc/self/fd"))
    evict(path)
    knobs: dict[str, object] = {"backend": backend, "threads": 1, "fault": f"read:{nth}:{effect}"}
    if nth > UNITS:
        check(path, data, [(0, len(data))], **knobs)
    else:
        with pytest.raises(OSError, match="read") as caught:
            read(path, [(0, len(data))], **knobs)
        assert caught.value.errno == getattr(errno, effect)
        assert caught.value.filename == str(path)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", ["short", "EINTR", "EAGAIN", "EINVAL", "stall"])
def test_passing_troubles_are_overcome(big: tuple[Path, bytes], backend: str, fault: str) -> None:
    """EINVAL stands for a file system that opens with O_DIRECT but does not read so."""
    path, data = big
    for nth in (1, 2, 3):
        evict(path)
        faults = f"read:{nth}:{fault},read:{nth + 1}:short"
        check(path, data, [(0, len(data))], backend=backend, threads=1, fault=faults)


def test_a_read_that_never_moves_anything_is_given_up(big: tuple[Path, bytes]) -> None:
    path, data = big
    evict(path)
    faults = ",".join(f"read:{n}:EAGAIN" for n in range(1, 3000))
    with pytest.raises(OSError, match="short read"):
        read(path, [(0, len(data))], backend="posix", threads=1, io_depth=1, fault=faults)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("left", [0, BLOCK, 3 * BLOCK + 512])
def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, backend: str, direct: bool, left: int) -> None:
    """Regression: with O_DIRECT and an end off the block boundary, the last bytes were read again and again."""
    path = tmp_path / "shrinking"
    path.write_bytes(bytes(3 * UNIT))
    evict(path)

    def shrink() -> None:
        time.sleep(0.02)
        os.truncate(path, left)

    thread = threading.Thread(target=shrink)
    thread.start()
    fault = "read:1:stall" if direct else ""
    try:
        # A buffered read may win the race; it must not hang or return other bytes.
        parts, _ = read(path, [(0, 3 * UNIT)], backend=backend, direct=direct, threads=1, fault=fault)
        assert not direct and not parts[0].any()
    except OSError as error:
        assert "short read" in str(error)
    thread.join()


# reading ahead


@pytest.fixture
def engine() -> _engine.Engine:
    engine = _engine.Engine(ring_bytes=4 * UNIT, chunk_bytes=UNIT, io_depth=1, copy_threads=0)
    engine.reserve(4 * UNIT)
    return engine


def begin(engine: _engine.Engine, path: Path, size: int) -> _engine.RangeReader:
    return _engine.RangeReader(engine, str(path), array("Q", [0]), array("Q", [size]))


def test_nothing_lands_before_it_is_said_where(engine: _engine.Engine, big: tuple[Path, bytes]) -> None:
    path, data = big
    evict(path)
    reader = begin(engine, path, len(data))
    assert engine.ring_used_bytes == 4 * UNIT
    target = np.full(len(data), 0xA5, np.uint8)
    time.sleep(0.05)
    assert (target == 0xA5).all()
    assert reader.read_into(array("Q", [target.ctypes.data])) == [_engine.crc32(data)]
    assert target.tobytes() == data
    assert engine.ring_used_bytes == 0
    with pytest.raises(RuntimeError, match="once"):
        reader.read_into(array("Q", [target.ctypes.data]))


@pytest.mark.timeout(60)
def test_a_file_that_shrinks_in_the_page_cache(engine: _engine.Engine, tmp_path: Path) -> None:
    path = tmp_path / "shrinking"
    path.write_bytes(bytes(8 << 20))
    reader = begin(engine, path, 8 << 20)
    os.truncate(path, 3 << 20)
    target = np.ones(8 << 20, np.uint8)
    with pytest.raises(OSError, match="short read"):
        reader.read_into(array("Q", [target.ctypes.data]))


def test_given_up(engine: _engine.Engine, big: tuple[Path, bytes]) -> None:
    path, data = big
    evict(path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        begin(engine, path, len(data))
    assert engine.ring_used_bytes == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_room_in_the_ring(engine: _engine.Engine, big: tuple[Path, bytes]) -> None:
    path, data = big
    first, second = begin(engine, path, len(data)), begin(engine, path, len(data))
    for reader in (second, first):
        target = np.zeros(len(data), np.uint8)
        assert reader.read_into(array("Q", [target.ctypes.data])) == [_engine.crc32(data)]
        assert target.tobytes() == data


def fetching(data: bytes, fetch: Any, size: int | None = None) -> _engine.RangeReader:
    engine = _engine.Engine(ring_bytes=32 << 20, chunk_bytes=2 << 20, io_depth=8, copy_threads=1)
    return _engine.RangeReader(
        engine,
        "s3://bucket/x",
        array("Q", [0, len(data) // 2]),
        array("Q", [len(data) // 2, len(data) - len(data) // 2]),
        io_depth=4,
        fetch=fetch,
        size=len(data) if size is None else size,
    )


def test_bytes_from_elsewhere_are_read_in_requests_and_summed() -> None:
    data = os.urandom((13 << 20) + 5)
    asked: list[tuple[int, int]] = []

    def fetch(begin: int, end: int) -> Iterator[bytes]:
        asked.append((begin, end))
        middle = begin + (end - begin) // 3
        yield from (data[begin:middle], b"", data[middle:end])

    into = bytearray(len(data))
    begin = ctypes.addressof(ctypes.c_char.from_buffer(into))
    crcs = fetching(data, fetch).read_into(array("Q", [begin, begin + len(data) // 2]))
    assert into == data
    assert crcs == [zlib.crc32(data[: len(data) // 2]), zlib.crc32(data[len(data) // 2 :])]
    assert max(end - begin for begin, end in asked) == 8 << 20 and max(end for _, end in asked) == len(data)


def test_the_error_of_a_request_is_raised_and_an_answer_of_another_length_is_one() -> None:
    def broken(begin: int, end: int) -> Iterator[bytes]:
        yield bytes(1)
        raise OSError(errno.EACCES, "expired", "s3://bucket/x")

    with pytest.raises(OSError, match="expired"):
        fetching(bytes(100), broken).read_into(array("Q", [0, 0]))
    with pytest.raises(OSError, match="short read"):
        fetching(bytes(100), lambda begin, end: [bytes(end - begin - 1)]).read_into(array("Q", [0, 0]))
    for parts in ([bytes(101)], [bytes(100), bytes(1)]):
        with pytest.raises(OSError, match="more bytes than were asked for"):
            fetching(bytes(100), lambda begin, end, parts=parts: parts).read_into(array("Q", [0, 0]))
    with pytest.raises(OSError, match="short read"):
        fetching(bytes(100), lambda begin, end: [bytes(end - begin)], size=99)
    for no_bytes in (None, [None]):
        with pytest.raises(TypeError):
            fetching(bytes(100), lambda begin, end, answer=no_bytes: answer).read_into(array("Q", [0, 0]))


class Stalled:
    """Requests that the server answers when the test lets it. Tells when the engine has let go of the answers."""

    def __init__(self, requests: int) -> None:
        self.asked, self.answer = threading.Semaphore(0), threading.Event()
        self._left, self._requests, self.dropped = 0, requests, threading.Event()

    def all_asked(self) -> bool:
        return all(self.asked.acquire(timeout=60) for _ in range(self._requests))

    def fetch(self, begin: int, end: int) -> Any:
        self.asked.release()
        assert self.answer.wait(60)
        answer = np.full(end - begin, 7, np.uint8)
        weakref.finalize(answer, self._drop)
        return iter([answer])

    def _drop(self) -> None:
        self._left += 1
        if self._left == self._requests:
            self.dropped.set()


@contextlib.contextmanager
def interrupted_when(begun: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C, once ``begun`` is true."""
    entered = threading.Event()

    def interrupt() -> None:
        entered.wait()
        time.sleep(0.05)  # so that it comes inside the call, usually
        while not begun():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it
    thread = threading.Thread(target=interrupt)
    thread.start()
    entered.set()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_a_read_whose_requests_stall_and_nothing_is_written_later() -> None:
    stalled, into = Stalled(2), np.zeros(16 << 20, np.uint8)
    reader = fetching(bytes(16 << 20), stalled.fetch)
    with pytest.raises(KeyboardInterrupt), interrupted_when(stalled.all_asked):
        reader.read_into(array("Q", [into.ctypes.data, into.ctypes.data + (8 << 20)]))
    assert not stalled.answer.is_set()
    stalled.answer.set()
    assert stalled.dropped.wait(60)
    assert not into.any()


def test_an_error_does_not_wait_for_requests_that_stall() -> None:
    stalled, into = Stalled(1), np.zeros(16 << 20, np.uint8)

    def fetch(begin: int, end: int) -> Any:
        if begin == 0:
            return stalled.fetch(begin, end)
        assert stalled.all_asked()
        raise OSError(errno.EACCES, "expired", "s3://bucket/x")

    with pytest.raises(OSError, match="expired"):
        fetching(bytes(16 << 20), fetch).read_into(array("Q", [into.ctypes.data, into.ctypes.data + (8 << 20)]))
    assert not stalled.answer.is_set()
    stalled.answer.set()
    assert stalled.dropped.wait(60) and not into.any()


def test_ctrl_c_waits_for_bytes_that_are_being_copied() -> None:
    """Into memory of the caller, who may use it for something else then."""
    stalled, into = Stalled(8), np.zeros(64 << 20, np.uint8)
    half = into.nbytes // 2
    reader = fetching(bytes(into.nbytes), stalled.fetch)
    stalled.answer.set()
    with contextlib.suppress(KeyboardInterrupt), interrupted_when(lambda: into[0] or into[half]):
        reader.read_into(array("Q", [into.ctypes.data, into.ctypes.data + half]))
    before = into.copy()
    for _ in range(20):
        assert np.array_equal(into, before)


def test_ctrl_c_ends_a_read_of_a_file(tmp_path: Path) -> None:
    stalls = ",".join(f"read:{number}:stall" for number in range(2, 40))
    engine = _engine.Engine(
        ring_bytes=8 << 20, chunk_bytes=2 << 20, io_depth=8, copy_threads=1, backend="posix", fault=stalls
    )
    path = tmp_path / "file"
    path.write_bytes(bytes([7]) * (64 << 20))
    evict(path)
    into = np.zeros(64 << 20, np.uint8)
    reader = _engine.RangeReader(engine, path, array("Q", [0]), array("Q", [into.nbytes]), threads=1, io_depth=1)
    with pytest.raises(KeyboardInterrupt), interrupted_when(lambda: into[0]):
        reader.read_into(array("Q", [into.ctypes.data]))
    assert not into.all()
    assert engine.ring_used_bytes == 0


def test_nothing_is_asked_for_before_the_places_are_known() -> None:
    """A server drops an answer that is not read."""
    stalled = Stalled(1)
    reader = fetching(bytes(100), stalled.fetch)
    del reader
    assert not stalled.asked.acquire(blocking=False)


def test_what_is_left_of_an_answer_is_not_asked_for_after_a_cancel() -> None:
    began, goes_on, ended, parts = threading.Event(), threading.Event(), threading.Event(), []

    def fetch(begin: int, end: int) -> Iterator[bytes]:
        try:
            began.set()
            assert goes_on.wait(60)
            for number in range(begin, end):
                parts.append(number)
                yield bytes(1)
        finally:
            ended.set()

    reader = fetching(bytes(100), fetch)
    with ThreadPoolExecutor(1) as thread:
        read = thread.submit(reader.read_into, array("Q", [0, 0]))
        assert began.wait(60)
        reader.cancel()
        with pytest.raises(OSError):
            read.result(60)
    goes_on.set()
    assert ended.wait(60) and parts == [0]


def test_another_thread_cancels_a_read_and_nothing_is_written_later() -> None:
    stalled, into = Stalled(2), np.zeros(16 << 20, np.uint8)
    reader = fetching(bytes(16 << 20), stalled.fetch)
    with ThreadPoolExecutor(1) as thread:
        read = thread.submit(reader.read_into, array("Q", [into.ctypes.data, into.ctypes.data + (8 << 20)]))
        assert stalled.all_asked()
        reader.cancel()
        with pytest.raises(OSError) as caught:
            read.result(60)
    assert caught.value.errno == errno.ECANCELED
    reader.cancel()
    stalled.answer.set()
    assert stalled.dropped.wait(60) and not into.any()


def test_a_cancel_may_come_in_the_moment_in_which_the_read_ends(tmp_path: Path) -> None:
    path, into = tmp_path / "file", np.zeros(5000, np.uint8)
    path.write_bytes(bytes(into.nbytes))
    engine = _engine.Engine(ring_bytes=8 << 20, chunk_bytes=2 << 20, io_depth=8, copy_threads=1)
    readers: list[_engine.RangeReader] = []
    over = threading.Event()

    def cancel() -> None:
        while not over.is_set():
            for reader in readers[-1:]:
                reader.cancel()

    with ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            threads.submit(cancel)
        for _ in range(300):
            reader = _engine.RangeReader(engine, path, array("Q", [0]), array("Q", [into.nbytes]))
            readers[:] = [reader]
            with contextlib.suppress(OSError):
                assert reader.read_into(array("Q", [into.ctypes.data])) == [zlib.crc32(bytes(into.nbytes))]
        over.set()


DATA = np.random.default_rng(0).integers(0, 256, 17 << 20, np.uint8)
NEAR = st.sampled_from([0, 8 << 20, 16 << 20]).flatmap(lambda at: st.integers(max(0, at - 5000), at + 5000))
RANGES = st.lists(st.tuples(NEAR, st.sampled_from([0, 1, 100, 5000, 1 << 20, 9 << 20])), min_size=1, max_size=8)


@given(RANGES, st.integers(1000, 9 << 20), st.sampled_from([1, 3]))
@settings(max_examples=25)
def test_ranges_that_overlap_and_span_requests_are_read_from_parts_of_any_size(
    ranges: list[tuple[int, int]], part: int, depth: int
) -> None:
    ranges = [(begin, min(nbytes, DATA.nbytes - begin)) for begin, nbytes in ranges]
    engine = _engine.Engine(ring_bytes=8 << 20, chunk_bytes=2 << 20, io_depth=8, copy_threads=1)
    into = [np.zeros(max(nbytes, 1), np.uint8) for _, nbytes in ranges]
    reader = _engine.RangeReader(
        engine,
        "s3://bucket/x",
        array("Q", [begin for begin, _ in ranges]),
        array("Q", [nbytes for _, nbytes in ranges]),
        io_depth=depth,
        fetch=lambda begin, end: (DATA[at : min(at + part, end)] for at in range(begin, end, part)),
        size=DATA.nbytes,
    )
    crcs = reader.read_into(array("Q", [place.ctypes.data for place in into]))
    for (begin, nbytes), place, crc in zip(ranges, into, crcs, strict=True):
        expected = DATA[begin : begin + nbytes]
        assert np.array_equal(place[:nbytes], expected) and crc == zlib.crc32(expected)
