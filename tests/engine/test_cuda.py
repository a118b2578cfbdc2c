"""The engine and CUDA devices: a fake driver (tests/fake_cuda) runs every order that the streams permit and reports
whatever they do not permit."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_cuda import Capture, FakeCuda, FakeError, Mode, build
from lazyckpt import _engine
from lazyckpt.formats.program import CRC32_LE, LITERAL, SEGMENT_BYTES, SEGMENTS, SOURCE, segments_of

pytestmark = pytest.mark.skipif(not _engine.FAULTS, reason="only the test build looks for another driver")

BLOCK = 4096
CHUNK = 4 * BLOCK
HOST = -1
ALL = (1 << 64) - 1


@pytest.fixture
def driver(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """The fake, which every engine opens. At the end the engines have returned everything that they took from it."""
    monkeypatch.setenv("LAZYCKPT_CUDA_LIBRARY", str(cuda.path))
    yield cuda
    left = cuda.live()
    assert not any(left.values()), left


def make_engine(**knobs: Any) -> _engine.Engine:
    knobs = {"ring_bytes": 64 * CHUNK, "chunk_bytes": CHUNK, "io_depth": 4, "copy_threads": 2, **knobs}
    engine = _engine.Engine(**knobs)
    engine.reserve(knobs["ring_bytes"])
    return engine


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


class State:
    """Sources on devices and on the host with random bytes, and a file of them, each followed by its checksum, and by
    those of its segments if it is ``segmented``."""

    segmented = False

    def __init__(self, driver: FakeCuda, sources: list[tuple[int, int, int]], seed: int = 0) -> None:
        """``sources``: device, bytes, owners."""
        self.driver = driver
        self.devices = [device for device, _, _ in sources]
        self.owners = [owners for _, _, owners in sources]
        random = np.random.default_rng(seed)
        self.data = [random.integers(0, 256, nbytes, np.uint8) for _, nbytes, _ in sources]
        self.pointers = []
        for device, data in zip(self.devices, self.data, strict=True):
            self.pointers.append(data.ctypes.data if device == HOST else driver.device_malloc(device, data.nbytes))
            if device != HOST:
                driver.write(self.pointers[-1], data)
        # Streams of training, by device; the default stream unless a test says otherwise.
        self.streams = {device: 0 for device in sorted(set(self.devices) - {HOST})}

    def nbytes(self) -> int:
        return sum(data.nbytes for data in self.data)

    def refs(self) -> array[int]:
        return array("Q", [number for pair in self.streams.items() for number in pair])

    def overwrite(self, byte: int, owners: bool | None = None, microseconds: float = 0) -> None:
        """Launches a kernel on every device's stream that writes to the first halves of lazy, eager or all sources."""
        for device, stream in self.streams.items():
            writes = [
                (pointer, -(-data.nbytes // 2), byte)
                for pointer, data, d, o in zip(self.pointers, self.data, self.devices, self.owners, strict=True)
                if d == device and owners in (None, o != 0)
            ]
            self.driver.kernel(stream, writes, device=device, microseconds=microseconds)

    def expect_half(self, byte: int) -> None:
        for data, device in zip(self.data, self.devices, strict=True):
            if device != HOST:
                data[: -(-data.nbytes // 2)] = byte

    def attach(self, engine: _engine.Engine) -> None:
        for device in self.streams:
            assert engine.attach(device)

    def begin(self, engine: _engine.Engine, **knobs: Any) -> _engine.Job:
        self.attach(engine)
        job = engine.begin(
            array("Q", self.pointers),
            array("Q", [data.nbytes for data in self.data]),
            array("Q", self.owners),
            1,
            devices=array("q", self.devices),
            streams=self.refs(),
            **knobs,
        )
        rows = [(LITERAL, 5, 0)]
        for index, data in enumerate(self.data):
            rows += [(SOURCE, data.nbytes, index), (CRC32_LE, 4, index)]
            if self.segmented:
                rows += [(SEGMENTS, 4 * -(-data.nbytes // SEGMENT_BYTES), index)]
        job.append(0, 0, array("q", [n for row in rows for n in row]), b"begin")
        job.seal()
        return job

    def expected(self) -> bytes:
        return b"begin" + b"".join(
            d.tobytes() + _engine.crc32(d).to_bytes(4, "little") + (segments_of(d.tobytes()) if self.segmented else b"")
            for d in self.data
        )

    def save(self, engine: _engine.Engine, path: Path) -> None:
        self.commit(self.begin(engine), path)

    def commit(self, job: _engine.Job, path: Path) -> None:
        job.open(0, str(path), 0)
        self.check(job, path)

    def check(self, job: _engine.Job, path: Path) -> None:
        """Checks that the file is whole and holds the state as it was at begin()."""
        assert job.wait_settled(30)
        job.raise_error()
        assert path.read_bytes() == self.expected()
        assert job.files() == [(len(self.expected()), _engine.crc32(self.expected()))]


def mixed(driver: FakeCuda, seed: int = 0, devices: int = 2) -> State:
    """Returns large and small, eager and lazy sources of two owners on two devices and the host."""
    random = np.random.default_rng(seed)
    sources = [
        (int(random.integers(HOST, devices)), int(random.integers(1, 3 * CHUNK)), int(random.choice([0, 1, 2])))
        for _ in range(24)
    ]
    sources += [(0, 100 + n, n % 2) for n in range(40)]
    return State(driver, sources, seed)


def train_through(state: State, engine: _engine.Engine, path: Path) -> None:
    """Saves while kernels write before and after it; the file holds the bytes at the moment of the save."""
    state.overwrite(1, microseconds=3000)
    job = state.begin(engine)
    job.wait_eager()
    state.overwrite(2, owners=False)
    for owners in (1, 2):
        job.wait_enqueued(owners, state.refs())
    state.overwrite(3, owners=True)
    job.open(0, str(path), 0)
    state.expect_half(1)
    state.check(job, path)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("seed", range(2))
def test_a_checkpoint_is_what_the_streams_made_of_it_at_save(
    driver: FakeCuda, mode: Mode, seed: int, tmp_path: Path
) -> None:
    """The file holds the writes of earlier kernels and none of later ones, to eager memory at once or to lazy memory
    behind the gate. The host waits for no kernel."""
    driver.configure(mode=mode)
    state = mixed(driver, seed)
    state.streams = {0: driver.stream(0), 1: 0} if seed % 2 else {0: 0, 1: driver.stream(1, blocking=True)}
    train_through(state, make_engine(copy_threads=1 + seed % 2), tmp_path / "file")
    driver.synchronize()
    assert driver.context_depth() == 0


def test_segments_on_devices_have_checksums_of_their_own(driver: FakeCuda, tmp_path: Path) -> None:
    sources = [(0, 2 * SEGMENT_BYTES + 700, 1), (HOST, SEGMENT_BYTES + 9, 0), (1, SEGMENT_BYTES, 0), (0, 50, 2)]
    state = State(driver, sources)
    state.segmented = True
    state.save(make_engine(), tmp_path / "file")


def test_many_threads_and_each_waits_for_its_own(driver: FakeCuda, tmp_path: Path) -> None:
    """Each thread has its own stream, on one device, in one engine."""
    engine = make_engine()
    states = [State(driver, [(0, 2 * CHUNK, 1), (0, CHUNK, 2), (0, 100, 0)], seed) for seed in range(4)]

    def train(engine: _engine.Engine, state: State, path: Path) -> None:
        state.streams = {0: driver.stream(0)}
        for n in range(15):
            train_through(state, engine, path.with_suffix(f".{n}"))

    with ThreadPoolExecutor(len(states)) as pool:
        trainings = [pool.submit(train, engine, state, tmp_path / f"{n}") for n, state in enumerate(states)]
    for training in trainings:
        training.result()


def test_more_than_the_ring_waits_for_the_disk_on_the_host(driver: FakeCuda, tmp_path: Path) -> None:
    """A device can wait only for enqueued copies, so save() and the gate wait for the others."""
    state = State(driver, [(0, 20 * CHUNK, 0), (1, 20 * CHUNK, 1)])
    engine = make_engine(ring_bytes=2 * CHUNK)
    job = state.begin(engine)
    assert not job.wait_eager(0.1)
    assert not job.wait_enqueued(1, state.refs(), 0.1)
    job.open(0, str(tmp_path / "file"), 0)
    job.wait_eager()
    state.overwrite(7, owners=False)
    job.wait_enqueued(1, state.refs())
    state.overwrite(8, owners=True)
    state.check(job, tmp_path / "file")


def test_a_few_chunks_are_in_flight_on_a_stream(driver: FakeCuda, tmp_path: Path) -> None:
    """The number is an option, and applies while no thread waits for the copies."""
    state = State(driver, [(0, 30 * CHUNK, 1)])
    engine = make_engine(copies_in_flight=7)
    with driver.hold(copies=True):
        job = state.begin(engine)
        wait_until(lambda: driver.statistics()["peak_in_flight"] == 7)
        time.sleep(0.1)
    state.commit(job, tmp_path / "file")
    assert driver.statistics()["peak_in_flight"] == 7


def test_a_thread_that_waits_enqueues_more(driver: FakeCuda, tmp_path: Path) -> None:
    """Regression: save() and steps waited for a busy device that had more than four chunks to copy. Now 64 chunks, or
    as many as the option says, wait on the device instead."""
    most = 9
    engine = make_engine(ring_bytes=4 * most * CHUNK, copies_ahead=most)
    eager = State(driver, [(0, (most - 1) * CHUNK, 0)])
    lazy = State(driver, [(0, (most - 1) * CHUNK, 1)])
    more = State(driver, [(0, (most + 1) * CHUNK, 1)])
    eager.attach(engine)
    wait_until(lambda: driver.live()["registered_bytes"] == 4 * most * CHUNK)
    with driver.hold(copies=True):
        jobs = [eager.begin(engine), lazy.begin(engine)]
        assert jobs[0].wait_eager(10)
        assert jobs[1].wait_enqueued(1, lazy.refs(), 10)
        for state in (eager, lazy):
            state.overwrite(9)
    for number, (state, job) in enumerate(zip((eager, lazy), jobs, strict=True)):
        state.commit(job, tmp_path / str(number))
    with driver.hold(copies=True):
        job = more.begin(engine)
        assert not job.wait_enqueued(1, more.refs(), 0.2)
    more.commit(job, tmp_path / "more")
    assert driver.statistics()["peak_in_flight"] == most


SIDE_BY_SIDE = [(0, 3 * CHUNK, 0), (1, 50, 0), (0, CHUNK, 1), (0, 100, 0)]


def take_streams_that_wait_for_nothing(state: State) -> None:
    state.streams = {device: state.driver.stream(device) for device in state.streams}


@pytest.mark.parametrize("mode", Mode)
def test_a_wait_on_the_host_covers_eager_bytes_on_devices(driver: FakeCuda, mode: Mode, tmp_path: Path) -> None:
    """Regression: it returned while eager copies were enqueued, and a stream that nothing orders behind them tore the
    file."""
    driver.configure(mode=mode)
    for number, sources in enumerate([SIDE_BY_SIDE, SIDE_BY_SIDE[:2]]):
        state, engine = State(driver, sources), make_engine()
        with driver.hold(copies=True):
            job = state.begin(engine)
            job.wait_eager()
            for owners in (0, 1, 2, ALL):
                assert not job.wait_captured(owners, 0.01)
        assert job.wait_captured(2)
        take_streams_that_wait_for_nothing(state)
        state.overwrite(8, owners=False)
        state.commit(job, tmp_path / str(number))


@pytest.mark.parametrize("mode", Mode)
def test_a_step_in_another_stream_comes_behind_eager_copies(driver: FakeCuda, mode: Mode, tmp_path: Path) -> None:
    """Regression: the gate told that stream nothing if the optimizer's own lazy storages were copied. The device waits,
    and not the host."""
    driver.configure(mode=mode)
    state, engine = State(driver, SIDE_BY_SIDE), make_engine()
    with driver.hold(copies=True):
        job = state.begin(engine)
        job.wait_eager()
        take_streams_that_wait_for_nothing(state)
        assert job.wait_enqueued(2, state.refs(), 10)
        state.overwrite(8, owners=False)
    state.commit(job, tmp_path / "file")


def test_host_memory_is_written_while_a_device_copies(driver: FakeCuda, tmp_path: Path) -> None:
    state = State(driver, [(0, 6 * CHUNK, 0), (HOST, 4 * CHUNK - 4, 0)])
    engine = make_engine(copies_ahead=4)
    with driver.hold(copies=True):
        job = state.begin(engine)
        job.open(0, str(tmp_path / "file"), 0)
        # Host bytes follow the device's in the file, and only the chunk with a checksum waits.
        wait_until(lambda: any(event[6] > 0 for event in job.timeline()))
        assert not job.wait_eager(0.05), "of six chunks four are in flight"
    job.wait_eager()
    state.check(job, tmp_path / "file")


@pytest.mark.parametrize("waits", [False, True])
def test_the_copy_engine_runs_dry_now_and_then(driver: FakeCuda, waits: bool, tmp_path: Path) -> None:
    """Otherwise values that training reads from the device would arrive after all copies. A waiting thread disables
    this."""
    driver.delay("cuEventSynchronize", 3e4)  # copies land one by one
    state = State(driver, [(0, 16 * CHUNK, 1)])
    engine = make_engine(copies_ahead=8)
    job = state.begin(engine)
    job.open(0, str(tmp_path / "file"), 0)
    waiter = threading.Thread(target=job.wait_captured, args=(1,))
    if waits:
        waiter.start()
    ahead = []
    while (begun := driver.statistics()["copies"]) < 16:
        landed = driver.calls().get("cuEventSynchronize", 0)  # or about to
        ahead.append(begun - landed // 4 * 4)
    assert (max(ahead) <= 4) != waits
    if waits:
        waiter.join()
    state.check(job, tmp_path / "file")


def test_many_small_copies_are_one_call(driver: FakeCuda, tmp_path: Path) -> None:
    """A call has at most 256 copies, since drivers crashed on longer ones."""
    state = State(driver, [(0, 1 + n % 20, 1) for n in range(1000)])
    engine = make_engine()
    state.save(engine, tmp_path / "file")
    assert driver.calls()["cuMemcpyBatchAsync"] > 0
    assert driver.calls().get("cuMemcpyDtoHAsync_v2", 0) == 0
    assert driver.statistics()["largest_batch"] == 256


@pytest.mark.parametrize("code", [1, 801])
def test_a_driver_that_refuses_a_batch_is_given_no_other(driver: FakeCuda, code: int, tmp_path: Path) -> None:
    """The remaining copies are enqueued one by one, in the same order of the stream."""
    driver.fail("cuMemcpyBatchAsync", nth=2, code=code, sticky=True)
    engine = make_engine(copy_threads=2)
    given = []
    for number in range(3):
        state = State(driver, [(0, 50 + n, 1) for n in range(300)], number)
        state.save(engine, tmp_path / str(number))
        given.append(driver.calls()["cuMemcpyBatchAsync"])
    # One that it took, and one that it refused of each thread that enqueues: two that copy, and the device's.
    assert 2 <= given[0] <= 4
    assert given == given[:1] * 3
    name = "CUDA_ERROR_INVALID_VALUE (1)" if code == 1 else "CUDA_ERROR_NOT_SUPPORTED (801)"
    assert engine.unbatched == f"cuMemcpyBatchAsync: {name}"


def test_copies_that_fail_one_by_one_say_nothing_of_batches(driver: FakeCuda, tmp_path: Path) -> None:
    """Regression: one batch with a bad address, and the process copied all small pieces one by one from then on."""
    engine = make_engine()
    state = State(driver, [(0, 50 + n, 1) for n in range(300)])
    driver.fail("cuMemcpyBatchAsync", code=1)
    driver.fail("cuMemcpyDtoHAsync_v2", code=1)
    with pytest.raises(OSError, match="cuMemcpyDtoHAsync_v2: CUDA_ERROR_INVALID_VALUE"):
        state.save(engine, tmp_path / "bad")
    single = driver.calls()["cuMemcpyDtoHAsync_v2"]
    state.save(engine, tmp_path / "good")
    assert driver.calls()["cuMemcpyDtoHAsync_v2"] == single
    assert engine.unbatched == ""


def test_a_drivers_queue_is_not_filled(driver: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One by one, 64 chunks of small pieces would be more calls than a driver queues; training's launches would wait
    behind the thread that waits inside the driver."""
    monkeypatch.setenv("LAZYCKPT_CUDA_BATCHES", "0")
    engine = make_engine()
    state = State(driver, [(0, 80, 1)] * 3000)
    with driver.hold(copies=True):
        job = state.begin(engine)
        assert not job.wait_enqueued(1, state.refs(), 0.1)
        assert driver.statistics()["copies"] > 256
    assert job.wait_enqueued(1, state.refs(), 30)
    state.commit(job, tmp_path / "file")
    assert driver.statistics()["peak_in_flight"] <= 512


def test_a_checkpoint_is_written_while_the_ring_is_still_being_pinned(driver: FakeCuda, tmp_path: Path) -> None:
    """Regression: the writer pinned all of a large ring before it wrote anything."""
    driver.delay("cuMemHostRegister_v2", 2e5)
    state = State(driver, [(0, 3 * CHUNK, 1), (0, CHUNK, 0)])
    engine = make_engine(ring_bytes=1 << 30)
    state.save(engine, tmp_path / "file")
    pinned = driver.live()["registered_bytes"]
    assert pinned < 512 << 20, "it waited for most of sixteen ranges"
    wait_until(lambda: driver.live()["registered_bytes"] > pinned)  # the rest is pinned without a request


@pytest.mark.parametrize("which", [1, 2])
def test_the_contexts_of_the_caller_stay(driver: FakeCuda, which: int) -> None:
    """If a call that restores the caller's context fails, it is repeated and removes no other context."""
    lib = driver.lib
    contexts = [ctypes.c_void_p(), ctypes.c_void_p()]
    engine = make_engine()
    assert engine.attach(0)
    wait_until(lambda: driver.live()["registered_bytes"] == 64 * CHUNK)  # from then on no other thread calls the driver
    for device, context in enumerate(contexts):
        assert lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert lib.cuCtxPushCurrent_v2(context) == 0
    driver.fail("cuCtxSetCurrent", nth=which, code=719)
    state = State(driver, [(0, 100, 1)])
    with pytest.raises(OSError, match="719"):
        state.begin(engine)
    for context in reversed(contexts):
        found = ctypes.c_void_p()
        assert lib.cuCtxPopCurrent_v2(ctypes.byref(found)) == 0
        assert found.value == context.value
    assert driver.context_depth() == 0
    for device in (0, 1):
        assert lib.cuDevicePrimaryCtxRelease_v2(device) == 0


@pytest.mark.parametrize("reason", ["no such function", "an older driver", "other addresses", "switched off"])
def test_without_batches_they_are_copied_one_by_one(
    driver: FakeCuda, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Older drivers have other arguments. Under WSL, a batch would break the context of the process later."""
    if reason == "no such function":
        driver = FakeCuda(build("cuMemcpyBatchAsync"))
        driver.reset()
        monkeypatch.setenv("LAZYCKPT_CUDA_LIBRARY", str(driver.path))
    elif reason == "an older driver":
        driver.configure(driver_version=12040)
    elif reason == "other addresses":
        driver.configure(host_pointers=0)
    else:
        monkeypatch.setenv("LAZYCKPT_CUDA_BATCHES", "0")
    state = State(driver, [(0, 50 + n, 1) for n in range(300)])
    engine = make_engine()
    state.save(engine, tmp_path / "file")
    assert driver.calls()["cuMemcpyDtoHAsync_v2"] >= 300
    assert driver.calls().get("cuMemcpyBatchAsync", 0) == 0
    assert driver.violations() == []


def test_the_ring_is_pinned_once_in_slices(driver: FakeCuda, tmp_path: Path) -> None:
    state = State(driver, [(0, 70 << 20, 1)])
    engine = make_engine(ring_bytes=160 << 20, chunk_bytes=24 << 20)
    state.save(engine, tmp_path / "file")
    assert engine.unpinned == ""
    assert driver.live()["registered_bytes"] == 160 << 20
    assert driver.calls()["cuMemHostRegister_v2"] == 3
    assert driver.statistics()["pageable_copies"] == 0


@pytest.fixture
def unpinnable(driver: FakeCuda) -> FakeCuda:
    """Devices that refuse to pin existing memory, as in confidential computing."""
    driver.configure(registration_limit=0, registration_error=801)
    return driver


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("allocates", [True, False])
def test_where_pinning_is_refused_a_small_buffer_is_pinned(
    unpinnable: FakeCuda, mode: Mode, allocates: bool, tmp_path: Path
) -> None:
    """Copies pass the buffer, or are slow if that is refused, too. Their order is the same."""
    unpinnable.configure(mode=mode)
    if not allocates:
        unpinnable.fail("cuMemHostAlloc", code=2, sticky=True)
    for seed in range(2):
        state = mixed(unpinnable, seed)
        engine = make_engine(copy_threads=1 + seed)
        train_through(state, engine, tmp_path / f"{seed}")
        assert engine.unpinned == "cuMemHostRegister_v2: CUDA_ERROR_NOT_SUPPORTED (801)"
        assert engine.bounces == allocates
        assert unpinnable.live()["host_allocations"] == allocates
        del engine
    pageable, batches = unpinnable.statistics()["pageable_copies"], unpinnable.calls().get("cuMemcpyBatchAsync", 0)
    assert (pageable == 0, batches > 0) == (allocates, allocates), "not all devices take batches of pageable memory"


def test_what_does_not_fit_the_small_buffer_is_not_enqueued(unpinnable: FakeCuda, tmp_path: Path) -> None:
    """The buffer holds four chunks until their bytes are in the ring. The step waits on the host for earlier chunks and
    on the device for the last four."""
    state = State(unpinnable, [(0, 6 * CHUNK, 1), (1, 6 * CHUNK, 2)])
    engine = make_engine()
    with unpinnable.hold(copies=True):
        job = state.begin(engine)
        assert not job.wait_enqueued(1, state.refs(), 0.2)
        assert unpinnable.statistics()["copies"] == 4
    for owners in (1, 2):
        assert job.wait_enqueued(owners, state.refs(), 30)
    state.overwrite(9)
    state.commit(job, tmp_path / "file")


def test_the_small_buffer_keeps_bytes_until_they_are_in_the_ring(unpinnable: FakeCuda, tmp_path: Path) -> None:
    """Several threads copy many large chunks, and the next copies arrive at once."""
    unpinnable.configure(bandwidth=1e12, latency_us=0, delay_us=0)
    state = State(unpinnable, [(0, 24 << 20, 1)])
    state.save(make_engine(ring_bytes=32 << 20, chunk_bytes=1 << 20), tmp_path / "file")


def test_a_limit_in_the_middle_leaves_the_rest_to_the_small_buffer(driver: FakeCuda, tmp_path: Path) -> None:
    driver.configure(registration_limit=64 << 20)
    state = State(driver, [(0, 80 << 20, 1)])
    engine = make_engine(ring_bytes=128 << 20, chunk_bytes=24 << 20)
    state.save(engine, tmp_path / "file")
    assert "cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY" in engine.unpinned and engine.bounces
    assert driver.statistics()["pageable_copies"] == 0


FUNCTIONS = [
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuInit",
    "cuMemcpyBatchAsync",
    "cuMemcpyDtoHAsync_v2",
    "cuStreamCreate",
    "cuStreamIsCapturing",
    "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
]


def attempt(state: State, engine: _engine.Engine, path: Path) -> None:
    """Runs a whole save; raises the error that made it fail."""
    job = state.begin(engine)
    try:
        job.wait_eager()
        state.overwrite(2, owners=False)
        job.wait_enqueued(3, state.refs())
        job.open(0, str(path), 0)
        state.overwrite(3, owners=True)
        assert job.wait_settled(30)
        job.raise_error()
    finally:
        job.fail(5, "over")
        assert job.wait_released(30)


@pytest.mark.long(first=27)
@pytest.mark.parametrize("pinnable", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_call_that_fails_fails_its_checkpoint_alone(
    driver: FakeCuda, name: str, pinnable: bool, tmp_path: Path
) -> None:
    """The first, second, … call of each function fails in turn. Afterwards nothing reads the sources (they are freed at
    once), nothing leaks, and the next checkpoint is whole."""
    if not pinnable:
        driver.configure(registration_limit=0)
    failures, nth, too_late = 0, 1, 0
    while nth < 100:
        state = State(driver, [(0, 100 + n, n % 2) for n in range(20)] + [(0, 2 * CHUNK, 1), (0, CHUNK, 0)])
        before = driver.calls().get(name, 0)
        engine = make_engine()
        driver.fail(name, nth, code=999)
        raised = ""
        try:
            attempt(state, engine, tmp_path / f"{nth}-{too_late}")
        except OSError as error:
            raised = str(error)
        for pointer in state.pointers:
            driver.device_free(pointer, 0)  # after the work of training; it must not precede a copy
        driver.synchronize()
        called = driver.calls().get(name, 0) - before
        if raised:
            failures += 1
            assert f"{name}: CUDA_ERROR_UNKNOWN" in raised
        driver.fail(name, 1 << 40)  # if it was not reached
        again = State(driver, [(0, 3 * CHUNK, 1), (HOST, 50, 0)], nth)
        again.save(engine, tmp_path / f"{nth}-{too_late}-again")
        del engine
        assert driver.context_depth() == 0
        assert not any(driver.live().values()), driver.live()
        if called >= nth:
            nth += 1
        elif failures or too_late == 50:
            break
        else:  # the copies were done before anybody waited, so the call did not happen
            too_late += 1
    assert failures > 0


def test_a_wait_that_fails_after_a_copy_that_failed_is_repeated(driver: FakeCuda) -> None:
    """Regression: the engine took the copies before the failed one for done."""
    state = State(driver, [(0, 100, 1), (0, 100, 1)])
    engine = make_engine()
    driver.fail("cuMemcpyDtoHAsync_v2", 2, code=1)
    driver.fail("cuEventSynchronize", code=1)
    with driver.hold(copies=True):
        job = state.begin(engine)
        assert not job.wait_released(0.2), "the first copy is under way"
    assert job.wait_released(10)
    with pytest.raises(OSError, match="cuMemcpyDtoHAsync_v2: CUDA_ERROR_INVALID_VALUE"):
        job.raise_error()
    for pointer in state.pointers:
        driver.device_free(pointer)


def test_a_lost_device_fails_checkpoints_not_the_process(driver: FakeCuda, tmp_path: Path) -> None:
    state = State(driver, [(1, CHUNK, 0), (0, 8 * CHUNK, 1)])
    engine = make_engine()
    with driver.hold(copies=True):
        job = state.begin(engine)
        job.wait_eager()
        driver.kernel(driver.stream(0), fault=700)
        time.sleep(0.05)
    job.open(0, str(tmp_path / "file"), 0)
    assert job.wait_settled(30)
    with pytest.raises(OSError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        job.raise_error()
    with pytest.raises(OSError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        state.begin(engine)
    other = State(driver, [(1, CHUNK, 0)])  # the other device is well
    other.save(engine, tmp_path / "second")
    del job, engine
    driver.reset()


def test_an_abandoned_checkpoint_lets_go_of_its_sources_after_its_copies(driver: FakeCuda) -> None:
    state = State(driver, [(0, 30 * CHUNK, 1)])
    engine = make_engine(copies_ahead=4)
    with driver.hold(copies=True):
        job = state.begin(engine)
        assert not job.wait_enqueued(1, state.refs(), 0.1)
        job.fail(5, "abandoned")
        assert not job.wait_released(0.1), "copies are under way"
    assert job.wait_released(10)
    driver.device_free(state.pointers[0])


@pytest.mark.parametrize("engine_ends", [False, True])
def test_what_nobody_holds_lets_go_after_its_copies(driver: FakeCuda, engine_ends: bool) -> None:
    """The sources may be freed as soon as the job is gone, while the engine goes on or ends."""
    state = State(driver, [(0, 30 * CHUNK, 1)])
    engine: _engine.Engine | None = make_engine(copies_ahead=4)
    with driver.hold(copies=True):
        job = state.begin(engine)
        assert not job.wait_enqueued(1, state.refs(), 0.1)
        release = threading.Timer(0.1, driver.lib.fake_hold, (0, 0))
        release.start()
        del job
        engine = None if engine_ends else engine
        driver.device_free(state.pointers[0], 0)
        release.join()
    driver.synchronize()


@pytest.mark.parametrize("mode", [Capture.GLOBAL, Capture.THREAD_LOCAL])
def test_a_graph_that_is_captured_meanwhile_stays_whole(driver: FakeCuda, mode: Capture, tmp_path: Path) -> None:
    """A stepping thread that captures waits on the host and only asks the driver whether it captures. A capture of
    another thread is no obstacle."""
    state = State(driver, [(0, 12 * CHUNK, 1), (0, CHUNK, 0)])
    state.streams = {0: driver.stream(0)}
    engine = make_engine()
    with driver.hold(copies=True):
        job = state.begin(engine)
        job.open(0, str(tmp_path / "file"), 0)
        driver.begin_capture(state.streams[0], mode)
        assert not job.wait_enqueued(1, state.refs(), 0.2)
    assert job.wait_enqueued(1, state.refs())
    assert job.pending_chunks(1) == 0, "captured: nothing on the device keeps the graph from running too early"
    driver.end_capture(state.streams[0])
    state.check(job, tmp_path / "file")

    other = driver.stream(0)
    driver.begin_capture(other, mode)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(train_and_check, state, engine, tmp_path / "second").result()
    driver.end_capture(other)


@pytest.mark.parametrize("pinnable", [True, False])
@pytest.mark.parametrize("mode", [Capture.GLOBAL, Capture.THREAD_LOCAL])
def test_an_engine_that_ends_on_a_capturing_thread(driver: FakeCuda, mode: Capture, pinnable: bool) -> None:
    """Regression: a Saver that the garbage collector took during a capture unregistered its memory in a mode that
    spoiled that capture, and left it registered."""
    driver.configure(registration_limit=1e18 if pinnable else 0)
    state = State(driver, [(0, 3 * CHUNK, 1)])
    engine = make_engine()
    job = state.begin(engine)
    job.wait_captured(1)
    stream = driver.stream(0)
    driver.begin_capture(stream, mode)
    del job, engine
    assert not any(driver.live().values()), driver.live()
    driver.kernel(stream, [(state.pointers[0], 8, 1)])
    driver.replay(driver.end_capture(stream), stream)
    driver.synchronize()


def train_and_check(state: State, engine: _engine.Engine, path: Path) -> None:
    job = state.begin(engine)
    job.wait_eager()
    job.wait_enqueued(1, state.refs())
    state.commit(job, path)


def test_the_default_stream_may_not_be_asked_during_a_capture(driver: FakeCuda, tmp_path: Path) -> None:
    """Asking it returns error 906, which means that something is being captured."""
    state = State(driver, [(0, 12 * CHUNK, 1)])
    engine = make_engine()
    with driver.hold(copies=True):
        job = state.begin(engine)
        job.open(0, str(tmp_path / "file"), 0)
        blocking = driver.stream(0, blocking=True)
        driver.begin_capture(blocking)
        assert not job.wait_enqueued(1, state.refs(), 0.2)
    assert job.wait_enqueued(1, state.refs())
    driver.end_capture(blocking)
    state.check(job, tmp_path / "file")


def test_a_device_that_is_not_attached_is_refused(driver: FakeCuda) -> None:
    engine = make_engine()
    assert engine.attach(0)
    one, zero = array("Q", [1]), array("Q", [0])
    with pytest.raises(OSError, match="without a stream"):
        engine.begin(one, one, zero, 1, devices=array("q", [0]))
    with pytest.raises(OSError, match="not attached"):
        engine.begin(one, one, zero, 1, devices=array("q", [1]), streams=array("Q", [1, 0]))
    with pytest.raises(ValueError, match="differ in length"):
        engine.begin(one, one, zero, 1, devices=array("q"))
    with pytest.raises(OSError, match="CUDA_ERROR_INVALID_DEVICE"):
        engine.attach(2)
    driver.forget_violations()
    for ordinal in (-1, 64):
        with pytest.raises(OSError, match="ordinal"):
            engine.attach(ordinal)


def test_a_reader_writes_only_after_streams_that_it_knows(driver: FakeCuda, tmp_path: Path) -> None:
    """Training may still use the place on the device; only its stream tells when it is done."""
    engine = make_engine()
    assert engine.attach(0)
    data = np.arange(CHUNK, dtype=np.uint8)
    data.tofile(tmp_path / "file")
    place = driver.device_malloc(0, CHUNK)
    reader = _engine.RangeReader(engine, str(tmp_path / "file"), array("Q", [0]), array("Q", [CHUNK]))
    where = array("Q", [place]), array("q", [0])
    for streams in (None, array("Q"), array("Q", [1, 0])):
        with pytest.raises(ValueError, match="without a stream"):
            reader.read_into(*where, streams)
    assert reader.read_into(*where, array("Q", [0, 0])) == [_engine.crc32(data)]
    assert driver.read(place, CHUNK) == data.tobytes()
    driver.device_free(place)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("pinnable", [True, False])
@pytest.mark.parametrize("mode", Mode)
def test_a_read_waits_once_for_all_that_it_copies_to_a_device(
    driver: FakeCuda, mode: Mode, pinnable: bool, direct: bool, tmp_path: Path
) -> None:
    """Regression: the reader waited for every tensor. It reuses a buffer only after its copies (two for 8 MiB)."""
    driver.configure(mode=mode, registration_limit=1e18 if pinnable else 0)
    random = np.random.default_rng(0)
    sizes = [int(n) for n in random.integers(1, 2000, 2000)] + [5 << 20, 1 << 20]
    data = random.integers(0, 256, sum(sizes), np.uint8)
    data.tofile(tmp_path / "file")
    offsets = np.cumsum([0, *sizes[:-1]])
    # The host takes every tenth, and neighbours on the other device share the large ones' units.
    devices = [HOST if n % 10 == 0 else n // 1500 for n in range(len(sizes))]
    places, host = [], np.zeros(len(data), np.uint8)
    for offset, nbytes, device in zip(offsets, sizes, devices, strict=True):
        on_host = host.ctypes.data + int(offset)
        places.append(on_host if device == HOST else driver.device_malloc(device, nbytes))
    engine = make_engine(ring_bytes=4 << 20, direct=direct)
    assert engine.attach(0) and engine.attach(1)
    reader = _engine.RangeReader(engine, tmp_path / "file", array("Q", offsets.tolist()), array("Q", sizes), threads=1)
    crcs = reader.read_into(array("Q", places), array("q", devices), array("Q", [0, 0, 1, 0]))
    for offset, nbytes, device, place, crc in zip(offsets, sizes, devices, places, crcs, strict=True):
        expected = data[offset : offset + nbytes].tobytes()
        found = host[offset : offset + nbytes].tobytes() if device == HOST else driver.read(place, nbytes)
        assert (found, crc) == (expected, _engine.crc32(expected))
        if device != HOST:
            driver.device_free(place)
    assert driver.statistics()["pageable_copies"] == 0
    reads = 4  # of 2 MiB
    through_small_buffer = 8 * (1 << 20) // CHUNK
    assert driver.calls()["cuEventSynchronize"] <= reads + 1 + (0 if pinnable else through_small_buffer)


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("pinnable", [True, False])
@pytest.mark.parametrize("mode", Mode)
def test_bytes_from_elsewhere_reach_a_device_through_pinned_memory(
    driver: FakeCuda, mode: Mode, pinnable: bool, room: bool
) -> None:
    """Without room in the ring they come from where they are. Parts lie across places, and exceed a buffer."""
    part = 2_500_001
    driver.configure(mode=mode, registration_limit=1e18 if pinnable else 0)
    data = np.random.default_rng(0).integers(0, 256, 9 << 20, np.uint8)
    sizes = [5 << 20, 1 << 20, 3 << 20]
    offsets, host = [0, 5 << 20, 6 << 20], np.zeros(1 << 20, np.uint8)
    places = [driver.device_malloc(0, sizes[0]), host.ctypes.data, driver.device_malloc(1, sizes[2])]
    engine = make_engine(ring_bytes=16 << 20 if room else 1 << 20)
    assert engine.attach(0) and engine.attach(1)
    reader = _engine.RangeReader(
        engine,
        "s3://bucket/x",
        array("Q", offsets),
        array("Q", sizes),
        io_depth=4,
        fetch=lambda begin, end: (data[at : min(at + part, end)].tobytes() for at in range(begin, end, part)),
        size=data.nbytes,
    )
    crcs = reader.read_into(array("Q", places), array("q", [0, HOST, 1]), array("Q", [0, 0, 1, 0]))
    found = [driver.read(places[0], sizes[0]), host.tobytes(), driver.read(places[2], sizes[2])]
    expected = [data[begin : begin + nbytes].tobytes() for begin, nbytes in zip(offsets, sizes, strict=True)]
    assert found == expected and crcs == [_engine.crc32(part) for part in expected]
    assert driver.statistics()["pageable_copies"] == 0 or not room
    for place in (places[0], places[2]):
        driver.device_free(place)


def test_without_a_driver_there_are_no_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LAZYCKPT_CUDA_LIBRARY", str(tmp_path / "libcuda.so.1"))
    assert not make_engine().attach(0)
    # One that lacks most of the functions.
    monkeypatch.setenv("LAZYCKPT_CUDA_LIBRARY", "libc.so.6")
    assert not make_engine().attach(0)


def test_what_doctor_is_told(driver: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def facts() -> dict[str, str]:
        return {key: text for key, text in _engine.probe(str(tmp_path)).items() if key.startswith("cuda")}

    there = {"cuda_driver": "yes", "cuda_version": "12.8", "cuda_devices": "2"}
    assert facts() == {**there, "cuda_batches": "yes", "cuda_pinning": "yes"}
    assert driver.statistics()["contexts_created"] == 0, "a context takes memory on the device"
    driver.configure(driver_version=12020)
    driver.fail("cuDeviceGetAttribute", 1, 1)
    refused = "no: cuDeviceGetAttribute: CUDA_ERROR_INVALID_VALUE (1)"
    assert facts() == {**there, "cuda_version": "12.2", "cuda_batches": "no", "cuda_pinning": refused}
    driver.reset(devices=0)
    assert facts() == {"cuda_driver": "no: cuInit: CUDA_ERROR_NO_DEVICE (100)"}
    monkeypatch.setenv("LAZYCKPT_CUDA_LIBRARY", str(tmp_path / "libcuda.so.1"))
    assert facts() == {"cuda_driver": f"no: no CUDA driver: {tmp_path}/libcuda.so.1"}


CHILD = """
    import importlib.util, os, sys
    from array import array
    from fake_cuda import FakeCuda
    spec = importlib.util.spec_from_file_location("_engine", sys.argv[2])  # without torch, which takes seconds
    _engine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_engine)
    driver = FakeCuda()
    driver.reset()
    engine = _engine.Engine(ring_bytes=1 << 20, chunk_bytes=1 << 14, io_depth=4, copy_threads=2)
    assert engine.attach(0)
    pointer = driver.device_malloc(0, 1 << 19)
    def begin():
        job = engine.begin(array("Q", [pointer]), array("Q", [1 << 19]), array("Q", [1]), 1,
                           devices=array("q", [0]), streams=array("Q", [0, 0]))
        job.append(0, 0, array("q", [1, 1 << 19, 0]), b"")
        job.seal()
        return job
    job = begin()
    job.open(0, sys.argv[1], 0)
"""


def run_child(code: str, path: Path, driver: FakeCuda) -> None:
    """Runs code in its own process, whose violations fail this one."""
    report = path.with_suffix(".violations")
    environment = {**os.environ, "LAZYCKPT_CUDA_LIBRARY": str(driver.path), "FAKE_CUDA_REPORT": str(report)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    script = textwrap.dedent(CHILD) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", script, path, _engine.__file__],
        env=environment,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not report.exists(), report.read_text()


def test_a_forked_child_calls_nothing(driver: FakeCuda, tmp_path: Path) -> None:
    code = """
        for _ in range(10):
            pid = os.fork()
            if pid == 0:
                try:
                    job.wait_captured(1)
                except RuntimeError:
                    del job, engine
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(pid, 0)[1] == 0
        job.wait_settled()
        job.raise_error()
        assert driver.live()["registrations"] == 1
    """
    run_child(code, tmp_path / "file", driver)


@pytest.mark.parametrize("end", ["", "del job, engine", "sys.exit()", "os._exit(0)", "driver.deinit()"])
def test_a_process_may_end_in_the_middle(driver: FakeCuda, end: str, tmp_path: Path) -> None:
    run_child(f"job = begin()\n{end}\n", tmp_path / "file", driver)


def test_without_the_gate_the_same_steps_are_reported(driver: FakeCuda) -> None:
    """The fake really checks the orders above."""
    state = State(driver, [(0, 4 * CHUNK, 1)])
    engine = make_engine()
    with driver.hold(copies=True):
        job = state.begin(engine)
        wait_until(lambda: driver.statistics()["copies"] > 0)
        state.overwrite(1)
    job.wait_captured(ALL)
    assert driver.violations()
    driver.forget_violations()
    with pytest.raises(FakeError):
        driver.end_capture(0)
