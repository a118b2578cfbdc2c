"""The engine runs programs: every byte of every file is right, whatever the cuts, the order and the threads."""

from __future__ import annotations

import errno
import fcntl
import gc
import itertools
import os
import struct
import threading
import time
import traceback
import weakref
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazyckpt import _engine
from lazyckpt.formats.program import CRC32_HEX, CRC32_LE, LITERAL, SEGMENT_BYTES, SEGMENTS, SOURCE, segments_of
from trials import TORTURE

BLOCK = 4096
BACKENDS = ("io_uring", "posix")
EXAMPLES = 400 if TORTURE else 50
Rows = list[tuple[int, int, int]]


@dataclass
class Program:
    """The sources and the layout of a checkpoint. The extents (file, offset, rows, blob) are appended in this order."""

    sources: list[np.ndarray]
    owners: list[int]
    files: int = 1
    extents: list[tuple[int, int, Rows, bytes]] = field(default_factory=list)

    def begin(self, engine: _engine.Engine, *, eager_by_caller: bool = False) -> _engine.Job:
        job = engine.begin(
            array("Q", [s.ctypes.data for s in self.sources]),
            array("Q", [s.nbytes for s in self.sources]),
            array("Q", self.owners),
            self.files,
            eager_by_caller,
        )
        weakref.finalize(job, tuple, self.sources)  # the caller keeps them alive
        return job

    def start(self, engine: _engine.Engine, *, eager_by_caller: bool = False) -> _engine.Job:
        """Begins a job and lays all of it out."""
        job = self.begin(engine, eager_by_caller=eager_by_caller)
        self.append(job)
        job.seal()
        return job

    def append(self, job: _engine.Job) -> None:
        for file, offset, rows, blob in self.extents:
            job.append(file, offset, array("q", [n for row in rows for n in row]), blob)

    def expected(self) -> list[bytes]:
        """Returns the contents of the files, made in Python."""
        files = [bytearray() for _ in range(self.files)]
        for file, start, rows, blob in self.extents:
            offset = start
            for kind, nbytes, arg in rows:
                if kind == LITERAL:
                    data = blob[arg : arg + nbytes]
                elif kind == SOURCE:
                    data = self.sources[arg].tobytes()
                elif kind == SEGMENTS:
                    data = segments_of(self.sources[arg].tobytes())
                else:
                    crc = _engine.crc32(self.sources[arg])
                    data = crc.to_bytes(4, "little") if kind == CRC32_LE else f"{crc:08x}".encode()
                files[file].extend(bytes(max(0, offset + nbytes - len(files[file]))))
                files[file][offset : offset + nbytes] = data
                offset += nbytes
        return [bytes(f) for f in files]


def random_source(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def simple(sizes: list[int], owners: list[int] | None = None) -> Program:
    """Returns a program of one file that holds each source, followed by its checksum."""
    program = Program([random_source(n, i) for i, n in enumerate(sizes)], owners or [0] * len(sizes))
    rows: Rows = []
    for index, nbytes in enumerate(sizes):
        rows += [(SOURCE, nbytes, index)] if nbytes else []
        rows += [(CRC32_LE, 4, index)]
    program.extents.append((0, 0, rows, b""))
    return program


def make_engine(**knobs: Any) -> _engine.Engine:
    if "fault" in knobs and not _engine.FAULTS:
        pytest.skip("the engine was built without fault injection")
    knobs = {"ring_bytes": 8 * BLOCK, "chunk_bytes": 2 * BLOCK, "io_depth": 4, "copy_threads": 1, **knobs}
    return _engine.Engine(**knobs)


def save(engine: _engine.Engine, program: Program, folder: Path) -> list[Path]:
    job = program.start(engine)
    paths = [folder / f"file-{i}" for i in range(program.files)]
    for index, path in enumerate(paths):
        job.open(index, str(path), len(program.expected()[index]))
    check(job, program, paths)
    return paths


def check(job: _engine.Job, program: Program, paths: list[Path]) -> None:
    """Waits for the job and compares its files and checksums with those made in Python."""
    assert job.wait_settled(30)
    job.raise_error()
    expected = program.expected()
    assert all(p.read_bytes() == data for p, data in zip(paths, expected, strict=True))
    assert job.files() == [(len(data), _engine.crc32(data)) for data in expected]
    assert job.source_crcs() == [_engine.crc32(s) for s in program.sources]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_for(condition: Any, timeout_s: float = 10) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.001)


# programs


@st.composite
def programs(draw: st.DrawFn) -> Program:
    sizes = draw(st.lists(st.one_of(st.just(0), st.integers(1, 200), st.integers(1, 6 * BLOCK)), max_size=8))
    program = Program(
        [random_source(n, i) for i, n in enumerate(sizes)],
        [draw(st.sampled_from([0, 1, 2, 3, 1 << 63])) for _ in sizes],
        files=draw(st.integers(1, 3)),
    )
    # Parts begin at block boundaries. They are appended in the order of this list, not in that of the file.
    parts = draw(st.lists(st.integers(0, program.files - 1), min_size=1, max_size=6))
    parts += [f for f in range(program.files) if f not in parts]
    order_in_file = {f: draw(st.permutations([i for i, g in enumerate(parts) if g == f])) for f in range(program.files)}
    todo = [i for i, n in enumerate(sizes) if n]
    known = [i for i, n in enumerate(sizes) if not n]
    contents: list[tuple[Rows, bytes]] = []
    for number, file in enumerate(parts):
        rows: Rows = []
        blob = bytearray()
        last = number == len(parts) - 1
        kinds = draw(st.lists(st.sampled_from([LITERAL, SOURCE, CRC32_LE, CRC32_HEX, SEGMENTS]), max_size=8))
        for kind in kinds + [SOURCE] * (len(todo) if last else 0):
            if kind == LITERAL:
                data = draw(st.binary(max_size=40)) * draw(st.sampled_from([1, 1, 300]))
                rows.append((LITERAL, len(data), len(blob)))
                blob += data
            elif kind == SOURCE and todo:
                index = todo.pop(draw(st.integers(0, len(todo) - 1)))
                rows.append((SOURCE, sizes[index], index))
                known.append(index)
            elif kind == SEGMENTS and (here := [arg for kind, _, arg in rows if kind == SOURCE]):
                rows.append((SEGMENTS, 4, draw(st.sampled_from(here))))
            elif kind in (CRC32_LE, CRC32_HEX) and known:
                rows.append((kind, 4 if kind == CRC32_LE else 8, draw(st.sampled_from(known))))
        if number != order_in_file[file][-1]:
            padding = -sum(n for _, n, _ in rows) % BLOCK
            rows.append((LITERAL, padding, len(blob)))
            blob += b" " * padding
        contents.append((rows, bytes(blob)))
    offsets = {}
    for order in order_in_file.values():
        end = 0
        for number in order:
            offsets[number] = end
            end += sum(n for _, n, _ in contents[number][0])
    for number, file in enumerate(parts):
        rows, blob = contents[number]
        # Where an extent continues the one before; not between a source and the checksums of its segments.
        cut = draw(st.integers(0, 0 if SEGMENTS in {kind for kind, _, _ in rows} else len(rows)))
        middle = offsets[number] + sum(n for _, n, _ in rows[:cut])
        if rows[:cut]:
            program.extents.append((file, offsets[number], rows[:cut], bytes(blob)))
        if rows[cut:] and (middle % BLOCK == 0 or sum(n for _, n, _ in rows[:cut])):
            program.extents.append((file, middle, rows[cut:], bytes(blob)))
    return program


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    program=programs(),
    chunk_blocks=st.integers(1, 4),
    ring_chunks=st.integers(1, 4),
    copy_threads=st.integers(0, 3),
    io_depth=st.integers(1, 4),
    direct=st.booleans(),
)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_program(
    backend: str,
    program: Program,
    chunk_blocks: int,
    ring_chunks: int,
    copy_threads: int,
    io_depth: int,
    direct: bool,
    tmp_path: Path,
) -> None:
    engine = make_engine(
        ring_bytes=ring_chunks * chunk_blocks * BLOCK,
        chunk_bytes=chunk_blocks * BLOCK,
        io_depth=io_depth,
        copy_threads=copy_threads,
        backend=backend,
        direct=direct,
    )
    engine.reserve(1 << 30)
    job = program.begin(engine)
    paths = [tmp_path / f"file-{i}" for i in range(program.files)]
    for index, path in enumerate(paths):
        path.unlink(missing_ok=True)
        job.open(index, str(path), len(program.expected()[index]))
    program.append(job)
    job.seal()
    job.wait_eager()
    for owners in (1, 2, 1 << 63):
        assert job.wait_captured(owners, 10)
        assert job.pending_chunks(owners) == 0
    assert job.wait_released(10)
    check(job, program, paths)
    assert engine.ring_used_bytes == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("direct", [True, False])
def test_on_tmpfs(backend: str, direct: bool, shm: Path) -> None:
    save(make_engine(backend=backend, direct=direct), simple([5 * BLOCK + 17, 0, 3, 2 * BLOCK]), shm)


def test_checksum_cut_by_a_chunk_boundary(tmp_path: Path) -> None:
    for cut in range(1, 8):
        program = Program([random_source(100)], [1])
        lead = 2 * BLOCK - 100 - cut
        rows = [(LITERAL, lead, 0), (SOURCE, 100, 0), (CRC32_HEX, 8, 0), (CRC32_LE, 4, 0)]
        program.extents.append((0, 0, rows, bytes(lead)))
        for path in save(make_engine(), program, tmp_path):
            path.unlink()


@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("chunk_bytes", [3 * BLOCK, 1 << 20, 8 << 20])
def test_each_segment_has_its_checksum_wherever_chunks_cut_it(chunk_bytes: int, owner: int, shm: Path) -> None:
    """Eager bytes behind lazy ones split a chunk at a block, in the midst of a source and just behind a segment."""
    mib = SEGMENT_BYTES
    for number, nbytes in enumerate([1, mib - 1, mib, mib + 1, 2 * mib + 100, 3 * mib + BLOCK, 0]):
        small = [random_source(7, 1), random_source(7, 2)]
        program = Program([random_source(nbytes), *small], [owner, 1 - owner, owner])
        table = (SEGMENTS, 4 * -(-nbytes // mib), 0)
        rows = [(SOURCE, nbytes, 0)] if nbytes else []
        rows = [(LITERAL, 100, 0), *rows, (SOURCE, 7, 1), table, (CRC32_LE, 4, 0), (SOURCE, 7, 2), table]
        program.extents.append((0, 0, rows, bytes(100)))
        engine = make_engine(ring_bytes=2 * chunk_bytes, chunk_bytes=chunk_bytes, copy_threads=2)
        (shm / f"{number}").mkdir()
        (path,) = save(engine, program, shm / f"{number}")
        path.unlink()


def test_checksum_waits_for_a_source_that_another_thread_copies(shm: Path) -> None:
    """The chunk with the checksum is ready long before the big one in front of it."""
    program = simple([16 << 20], [1])
    for number in range(10):
        engine = make_engine(ring_bytes=64 << 20, chunk_bytes=16 << 20)
        job = program.start(engine)
        assert job.wait_captured(1, 10)  # this thread helps
        job.open(0, str(shm / f"{number}"), 0)
        check(job, program, [shm / f"{number}"])


def test_a_checksum_is_that_of_the_copy_whoever_writes_to_the_source_meanwhile(shm: Path) -> None:
    """A torn source must never produce an archive that no reader opens."""
    engine = make_engine(ring_bytes=512 * BLOCK, chunk_bytes=256 * BLOCK)
    source = np.zeros(256 << 10, np.uint8)  # within a core's cache, so that the writer passes it often
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            np.invert(source, out=source)  # without the GIL

    writer = threading.Thread(target=write)
    writer.start()
    try:
        torn = 0
        for index in range(240):
            program = Program([source], [0])
            program.extents.append((0, 0, [(SOURCE, source.nbytes, 0)], b""))
            job = program.start(engine)
            path = shm / f"file-{index}"
            job.open(0, str(path), source.nbytes)
            assert job.wait_settled(10)
            job.raise_error()
            data = path.read_bytes()
            assert job.source_crcs() == [_engine.crc32(data)]
            torn += len(set(data)) > 1
    finally:
        stop.set()
        writer.join()
    assert torn, "nothing was written meanwhile"


@pytest.mark.parametrize("backend", BACKENDS)
def test_ring_of_one_chunk(backend: str, tmp_path: Path) -> None:
    engine = make_engine(ring_bytes=BLOCK, chunk_bytes=BLOCK, backend=backend, copy_threads=0)
    save(engine, simple([3 * BLOCK + 1, 9, 70_000], [0, 1, 2]), tmp_path)


def test_small_sources_share_chunks(tmp_path: Path) -> None:
    job = simple([1000] * 1000).start(make_engine(ring_bytes=1 << 20, chunk_bytes=1 << 18))
    assert job.stats()["chunks"] == 4


def test_eager_bytes_do_not_wait_for_lazy_ones() -> None:
    """Without copy threads, wait_eager copies the eager bytes and at most one chunk of lazy ones."""
    engine = make_engine(ring_bytes=64 * BLOCK, copy_threads=0)
    program = simple([100, 50 * BLOCK], [0, 1])
    job = program.start(engine)
    before = job.pending_chunks(1)
    job.wait_eager()
    assert 0 < job.pending_chunks(1) <= before
    assert not job.wait_captured(1, 0)
    assert job.stats()["eager_bytes"] == 100


def test_eager_bytes_of_a_later_file_do_not_wait_for_lazy_ones_of_an_earlier(tmp_path: Path) -> None:
    """The lazy file is ten times the ring and nothing is written yet, so not all of its chunks could be copied."""
    engine = make_engine(copy_threads=0)
    program = Program([random_source(80 * BLOCK, 1), random_source(3000, 2)], [1, 0], files=2)
    program.extents = [
        (0, 0, [(SOURCE, 80 * BLOCK, 0), (CRC32_LE, 4, 0)], b""),
        (1, 0, [(SOURCE, 3000, 1), (CRC32_LE, 4, 1)], b""),
    ]
    job = program.start(engine)
    before = job.pending_chunks(1)
    job.wait_eager()
    assert job.pending_chunks(1) == before
    paths = [tmp_path / "lazy", tmp_path / "eager"]
    for index, path in enumerate(paths):
        job.open(index, str(path), len(program.expected()[index]))
    check(job, program, paths)


def test_lazy_bytes_beside_eager_ones_stay_lazy(tmp_path: Path) -> None:
    """A safetensors file alternates weights and small biases: only the block that they share is eager."""
    weights, bias, more = random_source(3 * BLOCK + 100, 0), random_source(50, 1), random_source(2 * BLOCK, 2)
    program = Program([weights, bias, more], [1, 0, 1])
    program.extents = [(0, 0, [(SOURCE, s.nbytes, index) for index, s in enumerate(program.sources)], b"")]
    job = program.start(make_engine(ring_bytes=16 * BLOCK, chunk_bytes=8 * BLOCK, copy_threads=0))
    job.wait_eager()
    saved = bias.copy()
    weights[: 3 * BLOCK] ^= 0xFF
    bias ^= 0xFF
    more[BLOCK:] ^= 0xFF
    job.open(0, str(tmp_path / "a"), 6 * BLOCK)
    assert job.wait_settled(10)
    assert (tmp_path / "a").read_bytes() == weights.tobytes() + saved.tobytes() + more.tobytes()


@pytest.mark.parametrize("copy_threads", [0, 2])
def test_eager_chunks_in_front_never_wait_for_lazy_ones(copy_threads: int, tmp_path: Path) -> None:
    """Eager and lazy sources and their checksums stand in any order. A ring of two chunks never deadlocks."""
    random = np.random.default_rng(0)
    for trial in range(30):
        engine = make_engine(ring_bytes=4 * BLOCK, copy_threads=copy_threads)
        sizes = [int(n) for n in random.integers(1, 4 * BLOCK, 8)]
        owners = [int(random.integers(0, 2)) for _ in sizes]
        program = Program([random_source(n, i) for i, n in enumerate(sizes)], owners, files=2)
        for file in range(2):
            rows: Rows = []
            for index in range(4 * file, 4 * file + 4):
                rows += [(SOURCE, sizes[index], index)]
                rows += [(CRC32_HEX, 8, int(random.integers(4 * file, index + 1)))]
            program.extents.append((file, 0, rows, b""))
        folder = tmp_path / str(trial)
        folder.mkdir()
        save(engine, program, folder)


@pytest.mark.parametrize(
    ("sizes", "extents"),
    [
        ([], [(1, 0, [(LITERAL, 1, 0)], b"x")]),  # no such file
        ([], [(0, 0, [(LITERAL, 2, 0)], b"x")]),  # beyond the blob
        ([], [(0, 0, [(LITERAL, 1, 2)], b"x")]),
        ([], [(0, 0, [(LITERAL, -1, 0)], b"x")]),
        ([], [(0, 0, [(LITERAL, 1, -1)], b"x")]),
        ([], [(0, 1, [(LITERAL, 1, 0)], b"x")]),  # continues nothing
        ([5], [(0, 0, [(SOURCE, 5, 1)], b"")]),  # no such source
        ([5], [(0, 0, [(SOURCE, 4, 0)], b"")]),  # of another size
        ([5], [(0, 0, [(SOURCE, 5, 0), (SOURCE, 5, 0)], b"")]),  # twice
        ([5], [(0, 0, [(CRC32_LE, 4, 0), (SOURCE, 5, 0)], b"")]),  # a checksum before its source
        ([5], [(0, 0, [(SOURCE, 5, 0), (CRC32_LE, 8, 0)], b"")]),  # of the wrong length
        ([5], [(0, 0, [(SOURCE, 5, 0), (CRC32_HEX, 4, 0)], b"")]),
        ([5], [(0, 0, [(SOURCE, 5, 0), (SEGMENTS, 8, 0)], b"")]),
        ([5], [(0, 0, [(SEGMENTS, 4, 0), (SOURCE, 5, 0)], b"")]),
        ([BLOCK], [(0, 0, [(SOURCE, BLOCK, 0)], b""), (0, BLOCK, [(SEGMENTS, 4, 0)], b"")]),  # of an earlier extent
        ([5], [(0, 0, [(SOURCE, 5, 0), (SEGMENTS, 4, 1)], b"")]),
        ([5], [(0, 0, [(SOURCE, 5, 0), (7, 8, 0)], b"")]),  # unknown kinds
        ([5], [(0, 0, [(SOURCE, 5, 0), (-1, 8, 0)], b"")]),
        ([5], []),  # a source left out
        ([], [(0, BLOCK, [(LITERAL, 1, 0)], b"x")]),  # holes
        ([], [(0, 0, [(LITERAL, 1, 0)], b"x"), (0, BLOCK, [(LITERAL, 1, 0)], b"x")]),
        ([], [(0, 0, [(LITERAL, 1, 0)], b"x"), (0, BLOCK, [], b"")]),
        ([], [(0, 0, [(LITERAL, 1, 0)], b"x"), (0, 0, [(LITERAL, 1, 0)], b"y")]),  # overlaps
        ([], [(0, 0, [(LITERAL, BLOCK + 1, 0)], bytes(BLOCK + 1)), (0, BLOCK, [(LITERAL, 9, 0)], bytes(9))]),
    ],
)
def test_invalid_programs_are_refused(
    sizes: list[int], extents: list[tuple[int, int, Rows, bytes]], tmp_path: Path
) -> None:
    engine = make_engine()
    program = Program([random_source(n) for n in sizes], [0] * len(sizes), 1, extents)
    job = program.begin(engine)
    job.open(0, str(tmp_path / "file"), BLOCK)
    with pytest.raises(OSError, match="program") as caught:
        program.append(job)
        job.seal()
    assert caught.value.errno == errno.EINVAL
    assert job.wait_settled(10)
    with pytest.raises(OSError, match="program"):
        job.raise_error()
    with pytest.raises(RuntimeError, match="not durable"):
        job.files()
    wait_for(lambda: engine.ring_used_bytes == 0)


def test_an_append_after_seal_is_refused(tmp_path: Path) -> None:
    job = simple([100]).start(make_engine())
    job.seal()
    with pytest.raises(OSError, match="program"):
        job.append(0, 2 * BLOCK, array("q", [LITERAL, 1, 0]), b"x")


def test_malformed_arguments() -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="triples"):
        engine.begin(array("Q"), array("Q"), array("Q"), 1).append(0, 0, array("q", [0, 0]), b"")
    with pytest.raises(ValueError, match="length"):
        engine.begin(array("Q", [0]), array("Q"), array("Q"), 1)
    with pytest.raises(ValueError, match="flat"):
        engine.begin(array("I", [0, 0]), array("I", [0, 0]), array("I", [0, 0]), 1)
    strided = np.arange(6, dtype=np.uint64)[::2]
    with pytest.raises(ValueError, match="flat"):  # regression: the items were read as neighbours
        engine.begin(strided, strided, strided, 1)
    with pytest.raises(ValueError, match="contiguous"):
        _engine.crc32(memoryview(b"abcdef")[::2])


@pytest.mark.parametrize(
    "knobs",
    [
        {"chunk_bytes": 0},
        {"chunk_bytes": 100},
        {"chunk_bytes": 2 << 30},
        {"ring_bytes": BLOCK},
        {"io_depth": 0},
        {"backend": "aio"},  # regression: io_uring was used
        {"backend": ""},
        {"fault": "nonsense"},
        {"fault": "write:x:EIO"},
        {"fault": "write:1:EWHAT"},
    ],
)
def test_knobs_that_make_no_sense(knobs: dict[str, Any]) -> None:
    with pytest.raises(OSError) as caught:
        make_engine(**knobs)
    assert caught.value.errno == errno.EINVAL


def test_a_file_is_created_once_and_never_overwritten(tmp_path: Path) -> None:
    engine = make_engine()
    existing = tmp_path / "there"
    existing.write_bytes(b"precious")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for path in (existing, link):
        job = simple([10]).begin(engine)
        with pytest.raises(FileExistsError) as caught:
            job.open(0, str(path), 100)
        assert caught.value.filename == str(path)
        with pytest.raises(FileExistsError):
            job.raise_error()
    assert existing.read_bytes() == b"precious"
    gc.collect()  # closes engines of earlier tests
    before = descriptors()
    job = simple([10]).begin(engine)
    job.open(0, str(tmp_path / "a"), 100)
    for file, name in ((0, "b"), (1, "c")):
        with pytest.raises(OSError) as error:
            job.open(file, str(tmp_path / name), 100)
        assert error.value.errno == errno.EINVAL
    assert {p.name for p in tmp_path.iterdir()} == {"there", "link", "a"}
    del job
    wait_for(lambda: descriptors() == before)


def test_umask_decides_who_may_read(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        (path,) = save(make_engine(), simple([10]), tmp_path)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o640


def test_an_empty_file(tmp_path: Path) -> None:
    """Regression: fallocate of no bytes is EINVAL."""
    save(make_engine(), Program([random_source(0)], [0]), tmp_path)


def test_a_job_without_files_is_durable_at_once() -> None:
    """Regression: the destructor of the engine waited for such a job forever."""
    engine = make_engine()
    job = engine.begin(array("Q"), array("Q"), array("Q"), 0)
    job.seal()
    assert job.wait_settled(5)
    del job, engine


def unwritten_extents(path: Path) -> int:
    """Counts the extents of a file that have blocks on the disk but bytes only in the page cache (FIEMAP)."""
    request = bytearray(struct.pack("=QQ4I", 0, (1 << 64) - 1, 0, 0, 256, 0) + bytes(56 * 256))
    with path.open("rb") as file:
        fcntl.ioctl(file, 0xC020660B, request)
    (extents,) = struct.unpack_from("=I", request, 20)
    flags = [struct.unpack_from("=I", request, 32 + 56 * n + 40)[0] for n in range(extents)]
    return sum(flag & 0x804 != 0 for flag in flags)  # delayed allocation, or unwritten


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_has_settled_is_on_the_disk(backend: str, tmp_path: Path) -> None:
    """Injected failures show that a sync is requested; the file system shows that it happens."""
    control = tmp_path / "control"
    with control.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
        file.write(os.urandom(1 << 20))
    try:
        tells = unwritten_extents(control) > 0
    except OSError:
        tells = False
    if not tells:
        pytest.skip("this file system does not tell which bytes are written")
    engine = make_engine(backend=backend, direct=False)
    for path in save(engine, simple([1 << 20]), tmp_path):
        assert unwritten_extents(path) == 0


# failing and letting go; test_faults.py has the rest


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stage", ["begun", "appended", "sealed", "opened", "writing"])
def test_a_dropped_job_releases_everything(backend: str, stage: str, tmp_path: Path) -> None:
    engine = make_engine(backend=backend, fault="write:2:stall,write:3:stall")
    gc.collect()  # closes engines of earlier tests
    before = descriptors()
    program = simple([20 * BLOCK, 300], [1, 0])
    job = program.begin(engine)
    if stage != "begun":
        program.append(job)
    if stage in ("opened", "writing"):
        job.open(0, str(tmp_path / "file"), 21 * BLOCK)
    if stage in ("sealed", "writing"):
        job.seal()
    if stage == "writing":
        while not any(event[6] > 0 for event in job.timeline()):
            time.sleep(0.001)
    del job
    gc.collect()
    program.sources.clear()  # nothing reads them any more
    wait_for(lambda: engine.ring_used_bytes == 0)
    wait_for(lambda: descriptors() == before)
    (tmp_path / "file").unlink(missing_ok=True)
    save(engine, simple([7 * BLOCK + 5]), tmp_path / ".")


def test_failed_by_the_caller(tmp_path: Path) -> None:
    engine = make_engine(copy_threads=0)
    program = simple([20 * BLOCK], [1])
    job = program.start(engine)
    job.fail(errno.ECANCELED, "because")
    job.fail(errno.EIO, "again")  # the first reason stands
    assert job.wait_captured(1, 5)
    assert job.wait_released(5)
    assert job.wait_settled(5)
    job.wait_eager()
    job.open(0, str(tmp_path / "late"), 100)  # closed at once
    with pytest.raises(OSError, match="because") as caught:
        job.raise_error()
    assert caught.value.errno == errno.ECANCELED
    assert engine.ring_used_bytes == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failed_truncate_does_not_stall_other_jobs(backend: str, tmp_path: Path) -> None:
    """Regression: the writer went to sleep although another job had chunks to write."""
    engine = make_engine(backend=backend, io_depth=1, fault="write:1:stall,truncate:1:EIO")
    programs = [simple([100]), simple([3 * BLOCK])]
    jobs = []
    for number, program in enumerate(programs):
        job = program.start(engine)
        job.open(0, str(tmp_path / f"{number}"), 4 * BLOCK)
        jobs.append(job)
    assert jobs[0].wait_settled(10)
    with pytest.raises(OSError, match="ftruncate"):
        jobs[0].raise_error()
    assert jobs[1].wait_settled(10)
    check(jobs[1], programs[1], [tmp_path / "1"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_job_that_fails_twice_is_let_go(backend: str, tmp_path: Path) -> None:
    """Regression: a job that failed while its truncate was failing kept its descriptor, and the engine never closed."""
    engine = make_engine(backend=backend, fault="truncate:1:stall,truncate:1:EIO")
    gc.collect()  # closes engines of earlier tests
    before = descriptors()
    program = simple([100])
    job = program.begin(engine)
    program.append(job)
    job.open(0, str(tmp_path / "file"), 100)
    job.seal()
    while not job.stats()["written_s"] > 0:
        time.sleep(0.001)
    job.fail(errno.ECANCELED, "no longer wanted")
    assert job.wait_settled(10)
    wait_for(lambda: descriptors() == before)
    del job, engine


@pytest.mark.parametrize("backend", BACKENDS)
def test_hundreds_of_jobs_leave_nothing_behind(backend: str, shm: Path) -> None:
    engine = make_engine(backend=backend, ring_bytes=64 * BLOCK)
    program = simple([100, 5000])
    gc.collect()  # closes engines of earlier tests
    before = descriptors()
    for number in range(300):
        job = program.start(engine)
        job.open(0, str(shm / "file"), 0)
        if number % 3:
            assert job.wait_settled(10)
            job.raise_error()
        os.unlink(shm / "file")
    del job
    wait_for(lambda: engine.ring_used_bytes == 0)
    wait_for(lambda: descriptors() == before)


# fork


def in_child(action: Any) -> None:
    """Runs ``action`` in a forked child, which must not raise."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            action()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forked_child_has_an_inert_engine(backend: str, tmp_path: Path) -> None:
    engine = make_engine(backend=backend, fault="write:2:stall")
    program = simple([30 * BLOCK], [1])
    job = program.start(engine)
    job.open(0, str(tmp_path / "file"), 31 * BLOCK)
    mine = [engine, job]

    def child() -> None:
        for use in (
            lambda: engine.reserve(1),
            lambda: engine.ring_bytes,
            lambda: engine.ring_used_bytes,
            lambda: program.begin(engine),
            lambda: program.append(job),
            lambda: job.seal(),
            lambda: job.open(0, "/nowhere", 1),
            lambda: job.wait_eager(),
            lambda: job.wait_captured(1),
            lambda: job.wait_released(),
            lambda: job.wait_settled(),
            lambda: job.fail(1, ""),
            lambda: job.raise_error(),
            lambda: job.files(),
            lambda: job.stats(),
            lambda: job.timeline(),
            lambda: job.source_crcs(),
            lambda: job.pending_chunks(1),
        ):
            with pytest.raises(RuntimeError, match="parent"):
                use()
        mine.clear()
        gc.collect()
        # A child may have an engine of its own.
        folder = tmp_path / f"child-{os.getpid()}"
        folder.mkdir()
        save(make_engine(backend=backend), simple([100]), folder)

    for _ in range(4):
        in_child(child)
    check(job, program, [tmp_path / "file"])


def mapped_bytes() -> int:
    """Returns the size of the address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("backend", BACKENDS)
def test_forks_do_not_inherit_the_ring(backend: str, tmp_path: Path) -> None:
    """A child never inherits the ring, neither while it is faulted in nor while it is written."""
    ring_bytes = 1 << 30
    without = mapped_bytes()
    engine = make_engine(backend=backend, ring_bytes=ring_bytes, chunk_bytes=1 << 20, fault="write:2:stall")
    assert mapped_bytes() >= without + ring_bytes

    def child() -> None:
        assert mapped_bytes() < without + ring_bytes // 2  # threads have memory of their own

    assert engine.reserve(256 << 20)
    for _ in range(4):
        in_child(child)
    program = simple([8 << 20, (1 << 20) + 1], [1, 0])
    for number in range(3):
        job = program.start(engine)
        job.open(0, str(tmp_path / f"{number}"), 0)
        forks = 0
        while not job.wait_settled(0):
            in_child(child)
            forks += 1
        assert forks or number, "the first save takes as long as its ring needs, and as a write stalls"
        check(job, program, [tmp_path / f"{number}"])


def chunks_copied(job: _engine.Job) -> int:
    return sum(copy_end > 0 for _, _, _, _, copy_end, *_ in job.timeline())


def roomy_engine(copy_threads: int = 2) -> _engine.Engine:
    engine = make_engine(copy_threads=copy_threads)
    assert engine.reserve(8 * BLOCK)
    return engine


def test_copy_threads_begin_when_told_to(tmp_path: Path) -> None:
    engine = roomy_engine()
    program = simple([2 * BLOCK, 2 * BLOCK], [1, 1])
    job = program.start(engine, eager_by_caller=True)
    time.sleep(0.1)
    assert chunks_copied(job) == 0
    job.go()
    wait_for(lambda: chunks_copied(job) == len(job.timeline()))
    job.open(0, str(tmp_path / "a"), len(program.expected()[0]))
    check(job, program, [tmp_path / "a"])


def test_who_waits_for_a_checkpoint_copies_it_before_the_copy_threads_may() -> None:
    engine = roomy_engine()
    program = simple([2 * BLOCK, 2 * BLOCK], [1, 1])
    job = program.start(engine, eager_by_caller=True)
    assert job.wait_captured(1, 10)
    assert chunks_copied(job) == len(job.timeline())
    job.fail(errno.ECANCELED, "over")


@pytest.mark.parametrize("fits", [True, False])
def test_half_of_the_cores_are_trainings_until_the_ring_is_full(fits: bool, tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:2])
    try:
        engine = make_engine(ring_bytes=(64 if fits else 16) << 20, chunk_bytes=1 << 20, copy_threads=2)
    finally:
        os.sched_setaffinity(0, cores)
    assert engine.reserve(64 << 20)
    program = simple([10 << 20] * 5, [1] * 5)
    together = 0
    for number in range(5 if fits else 200):  # two copies at once need two free cores
        job = program.start(engine)
        job.open(0, str(tmp_path / f"{number}"), 0)
        assert job.wait_settled(30)
        (tmp_path / f"{number}").unlink()
        copies = sorted((row[3], row[4]) for row in job.timeline())
        together += sum(after < end for (_, end), (after, _) in itertools.pairwise(copies))
        if together:
            break
    assert (together == 0) == fits, together


def test_what_does_not_fit_into_the_ring_makes_room_before_the_copy_threads_may(tmp_path: Path) -> None:
    """Regression: the writer slept until go(), and the caller waited for eager bytes forever."""
    engine = make_engine()
    program = simple([40 * BLOCK])
    job = program.begin(engine, eager_by_caller=True)
    job.open(0, str(tmp_path / "a"), len(program.expected()[0]))
    program.append(job)
    job.seal()
    assert job.wait_eager(10)
    job.go()
    check(job, program, [tmp_path / "a"])


def test_the_last_eager_chunk_is_left_to_the_caller() -> None:
    engine = roomy_engine(copy_threads=1)  # with two, one may take the last while the other copies
    program = simple([2 * BLOCK - 4] * 3)
    job = program.start(engine, eager_by_caller=True)
    job.go()
    wait_for(lambda: chunks_copied(job) == 2)
    time.sleep(0.05)
    assert chunks_copied(job) == 2 < len(job.timeline())
    assert job.wait_eager(10)
    assert chunks_copied(job) == len(job.timeline())
    job.fail(errno.ECANCELED, "over")


def test_a_path_that_cannot_be_converted_says_why() -> None:
    """Regression: every error was a TypeError, lack of memory too."""

    class NoMemory:
        def __fspath__(self) -> str:
            raise MemoryError

    with pytest.raises(MemoryError):
        simple([BLOCK]).begin(make_engine()).open(0, NoMemory(), BLOCK)


def test_a_reason_that_is_no_utf_8(tmp_path: Path) -> None:
    """Regression: the name of a torn tensor may hold a lone surrogate; then no later save worked."""
    job = simple([BLOCK], [0]).begin(make_engine())
    job.fail(errno.ECANCELED, "w\udc80 was written")
    with pytest.raises(OSError) as caught:
        job.raise_error()
    assert caught.value.errno == errno.ECANCELED


# a file that several processes write


def part_of(
    program: Program, begin: int, end: int, folder: Path, name: str, *, shift: int | None = None
) -> _engine.Job:
    """Begins a job that writes one part of a file; ``shift``: of a file that exists."""
    engine = make_engine()
    job = engine.begin(
        array("Q", [s.ctypes.data for s in program.sources]),
        array("Q", [s.nbytes for s in program.sources]),
        array("Q", program.owners),
        1,
        parts=[(0, begin, end)],
    )
    weakref.finalize(job, tuple, program.sources)
    program.append(job)
    job.seal()
    if shift is None:
        job.open(0, folder / name, end)
    else:
        job.open_existing(0, folder / name, shift)
    assert job.wait_settled(10)
    return job


def one_extent(nbytes: int, offset: int, seed: int) -> Program:
    return Program([random_source(nbytes, seed)], [0], 1, [(0, offset, [(SOURCE, nbytes, 0)], b"")])


@pytest.mark.parametrize("shift", [0, 2 * BLOCK, -BLOCK])
def test_two_jobs_write_one_file_without_touching_the_other_ones_bytes(tmp_path: Path, shift: int) -> None:
    head, tail, middle = 3 * BLOCK, 5 * BLOCK + 123, 7 * BLOCK
    begin = head + middle
    first = Program(
        [random_source(head, 1), random_source(tail, 2)],
        [0, 0],
        1,
        [(0, 0, [(SOURCE, head, 0)], b""), (0, begin, [(SOURCE, tail, 1)], b"")],
    )
    engine = make_engine()
    job = engine.begin(
        array("Q", [s.ctypes.data for s in first.sources]),
        array("Q", [head, tail]),
        array("Q", [0, 0]),
        1,
        parts=[(0, 0, head), (0, begin, begin + tail)],
    )
    first.append(job)
    job.seal()
    job.open(0, tmp_path / "file", begin + tail)
    second = one_extent(middle, head - shift, 3)
    other = part_of(second, head - shift, head - shift + middle, tmp_path, "file", shift=shift)
    assert job.wait_settled(10)
    job.raise_error()
    other.raise_error()
    expected = first.sources[0].tobytes() + second.sources[0].tobytes() + first.sources[1].tobytes()
    assert (tmp_path / "file").read_bytes() == expected
    crcs = [_engine.crc32(source) for source in (first.sources[0], second.sources[0], first.sources[1])]
    assert job.runs(0) == [(0, head, crcs[0]), (begin, tail, crcs[2])]
    assert other.runs(0) == [(head, middle, crcs[1])]
    assert job.read_back(0) == other.read_back(0) == []


def test_a_hole_in_the_part_of_a_job_is_refused(tmp_path: Path) -> None:
    for begin, end in ((0, 3 * BLOCK), (BLOCK, 2 * BLOCK), (BLOCK, 4 * BLOCK), (2 * BLOCK, 3 * BLOCK)):
        with pytest.raises(OSError, match="holes or overlaps") as caught:
            part_of(one_extent(2 * BLOCK, BLOCK, 0), begin, end, tmp_path, "file")
        assert caught.value.errno == errno.EINVAL


def test_a_part_that_ends_inside_a_block_is_refused_where_others_write(tmp_path: Path) -> None:
    """Its padding would replace the bytes of another process."""
    (tmp_path / "file").write_bytes(bytes(9 * BLOCK))
    for nbytes, shift in ((BLOCK + 1, 0), (BLOCK, 7), (BLOCK, -2 * BLOCK)):
        with pytest.raises(OSError, match="parts of a file") as caught:
            part_of(one_extent(nbytes, BLOCK, 0), BLOCK, BLOCK + nbytes, tmp_path, "file", shift=shift)
        assert caught.value.errno == errno.EINVAL
    assert (tmp_path / "file").read_bytes() == bytes(9 * BLOCK)


def test_an_existing_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        part_of(one_extent(BLOCK, 0, 0), 0, BLOCK, tmp_path, "missing", shift=0)
    assert not (tmp_path / "missing").exists()


def test_a_job_without_a_part_of_its_own_ends(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"others'")
    job = part_of(Program([], [], 1), 0, 0, tmp_path, "file", shift=0)
    job.raise_error()
    assert job.runs(0) == [] and (tmp_path / "file").read_bytes() == b"others'"


def test_a_file_is_copied_for_its_checksums_and_not_written(tmp_path: Path) -> None:
    """Its bytes pass through a ring that is smaller; beside it a file is written as ever."""
    written, checked = random_source(5 * BLOCK, 1), random_source(99 * BLOCK + 7, 2)
    program = Program([written, checked], [0, 1], 2)
    program.extents = [(0, 0, [(SOURCE, written.nbytes, 0)], b""), (1, 0, [(SOURCE, checked.nbytes, 1)], b"")]
    for dropped_first in (True, False):
        job = program.start(make_engine())
        path = tmp_path / f"file-{dropped_first}"
        if dropped_first:
            job.drop(1)
        job.open(0, path, written.nbytes)
        if not dropped_first:
            job.drop(1)
        assert job.wait_settled(10)
        job.raise_error()
        assert path.read_bytes() == written.tobytes()
        assert job.source_crcs() == [_engine.crc32(written), _engine.crc32(checked)]
        assert job.stats()["bytes"] == written.nbytes
        assert job.read_back(1) == []
    alone = Program([checked], [1], 1, [(0, 0, [(SOURCE, checked.nbytes, 0)], b"")])
    job = alone.start(make_engine())
    job.drop(0)
    assert job.wait_settled(10) and job.source_crcs() == [_engine.crc32(checked)]
