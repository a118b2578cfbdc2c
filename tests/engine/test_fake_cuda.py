"""Each breach of a rule of the fake driver is reported. The engine's tests show the rules kept."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fake_cuda import Capture, FakeCuda, FakeError, Mode

INVALID_VALUE, DEINITIALIZED, INVALID_CONTEXT = 1, 4, 201
INVALID_HANDLE, ILLEGAL_ADDRESS, ALREADY_REGISTERED, NOT_REGISTERED = 400, 700, 712, 713
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_UNJOINED = 900, 901, 904
CAPTURE_ISOLATION, CAPTURE_IMPLICIT, CAPTURED_EVENT = 905, 906, 907
NON_BLOCKING, PORTABLE, DISABLE_TIMING = 1, 1, 2
STREAM, DURING_API_CALL, ANY = 1, 2, 3
LONG = 50_000  # microseconds: longer than a test takes to enqueue its work


class Attributes(ctypes.Structure):
    _fields_ = (
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", ctypes.c_int * 2),
        ("dstLocHint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


TYPES = {
    "i": ctypes.c_int,
    "u": ctypes.c_uint,
    "n": ctypes.c_size_t,
    "d": ctypes.c_uint64,
    "p": ctypes.c_void_p,
}
FUNCTIONS = {
    "cuInit": "u",
    "cuDevicePrimaryCtxRetain": "pi",
    "cuDevicePrimaryCtxRelease_v2": "i",
    "cuCtxSetCurrent": "p",
    "cuCtxGetCurrent": "p",
    "cuCtxPopCurrent_v2": "p",
    "cuStreamCreate": "pu",
    "cuStreamDestroy_v2": "p",
    "cuStreamWaitEvent": "ppu",
    "cuStreamIsCapturing": "pp",
    "cuEventCreate": "pu",
    "cuEventDestroy_v2": "p",
    "cuEventRecord": "pp",
    "cuEventSynchronize": "p",
    "cuMemcpyDtoHAsync_v2": "pdnp",
    "cuMemcpyHtoDAsync_v2": "dpnp",
    "cuMemHostRegister_v2": "pnu",
    "cuMemHostUnregister": "p",
    "cuMemcpyBatchAsync": "pppnppnpp",
}


class Driver:
    """The driver's functions with their types. Retains the contexts of both devices; the first one is current."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.lib = lib
        for name, types in FUNCTIONS.items():
            getattr(lib, name).argtypes = [TYPES[t] for t in types]

    def __getattr__(self, name: str) -> Callable[..., int]:
        """Returns a function of the driver, which returns its error."""
        function: Callable[..., int] = getattr(self.lib, name)
        return function

    def made(self, name: str, *arguments: Any) -> int:
        """Returns the value that a function stores through its first argument."""
        value = ctypes.c_void_p()
        assert getattr(self.lib, name)(ctypes.byref(value), *arguments) == 0, name
        return value.value or 0

    def stream(self, flags: int = NON_BLOCKING) -> int:
        return self.made("cuStreamCreate", flags)

    def event(self) -> int:
        return self.made("cuEventCreate", DISABLE_TIMING)

    def capturing(self, stream: int) -> tuple[int, int]:
        value = ctypes.c_int(-1)
        return self.cuStreamIsCapturing(stream, ctypes.byref(value)), value.value

    def order(self, before: int, after: int) -> None:
        """Makes later work on one stream wait for the work on the other."""
        event = self.event()
        assert self.cuEventRecord(event, before) == 0
        assert self.cuStreamWaitEvent(after, event, 0) == 0
        assert self.cuEventDestroy_v2(event) == 0

    def finish(self, stream: int) -> None:
        event = self.event()
        assert self.cuEventRecord(event, stream) == 0
        assert self.cuEventSynchronize(event) == 0
        assert self.cuEventDestroy_v2(event) == 0


@pytest.fixture
def drv(cuda: FakeCuda) -> Iterator[Driver]:
    driver = Driver(cuda.lib)
    assert driver.cuInit(0) == 0
    for device in (1, 0):
        context = driver.made("cuDevicePrimaryCtxRetain", device)
        driver.cuCtxSetCurrent(context)
    yield driver
    for _ in range(cuda.context_depth()):
        driver.cuCtxPopCurrent_v2(None)


def host_memory(nbytes: int) -> tuple[mmap.mmap, int]:
    """Returns pages of the host and their address."""
    pages = mmap.mmap(-1, nbytes)
    return pages, ctypes.addressof(ctypes.c_char.from_buffer(pages))


@pytest.fixture
def ring(drv: Driver) -> tuple[mmap.mmap, int]:
    """Returns a registered MiB."""
    pages, address = host_memory(1 << 20)
    assert drv.cuMemHostRegister_v2(address, 1 << 20, PORTABLE) == 0
    return pages, address


def expect(cuda: FakeCuda, *texts: str) -> None:
    """Checks that there are these violations, in this order, and no others."""
    violations = cuda.violations()
    assert len(violations) == len(texts), violations
    for violation, text in zip(violations, texts, strict=True):
        assert text in violation
    cuda.forget_violations()


def in_thread(work: Callable[[], Any]) -> Any:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(work()))
    thread.start()
    thread.join(30)
    return result[0]


def run_script(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in its own process, with a fake in ``f`` and its functions in ``lib``."""
    prologue = f"""
        import ctypes, os, sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from fake_cuda import FakeCuda
        f = FakeCuda()
        lib = f.lib
    """
    code = textwrap.dedent(prologue) + textwrap.dedent(script)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )


# What there is


def test_what_is_alive_is_counted(cuda: FakeCuda, drv: Driver, ring: Any) -> None:
    stream, event = drv.stream(), drv.event()
    cuda.stream(0)  # not the caller's
    made = ctypes.c_void_p()
    assert drv.cuMemHostAlloc(ctypes.byref(made), 4096, 1) == 0
    counted = {"contexts": 2, "streams": 1, "events": 1, "registrations": 1, "registered_bytes": 1 << 20}
    assert cuda.live() == {**counted, "host_allocations": 1}
    assert drv.cuMemHostUnregister(made) == 713
    assert drv.cuMemFreeHost(ring[1]) == INVALID_VALUE
    expect(cuda, "no such registration", "not memory of the driver")
    assert drv.cuMemFreeHost(made) == 0
    assert drv.cuStreamDestroy_v2(stream) == drv.cuEventDestroy_v2(event) == drv.cuMemHostUnregister(ring[1]) == 0
    assert drv.cuStreamDestroy_v2(stream) == drv.cuEventDestroy_v2(event) == INVALID_HANDLE
    expect(cuda, "no such stream", "no such event")
    assert drv.cuDevicePrimaryCtxRelease_v2(1) == 0
    assert cuda.live() == {**dict.fromkeys(cuda.live(), 0), "contexts": 1}
    assert drv.cuDevicePrimaryCtxRelease_v2(1) == INVALID_CONTEXT
    expect(cuda, "not retained")
    assert cuda.calls()["cuDevicePrimaryCtxRelease_v2"] == 2


# Contexts


def test_a_call_needs_a_current_context(cuda: FakeCuda, drv: Driver) -> None:
    event = drv.event()

    def elsewhere() -> list[int]:
        out = ctypes.c_void_p()
        return [
            drv.cuStreamCreate(ctypes.byref(out), NON_BLOCKING),
            drv.cuEventRecord(event, cuda.stream(0)),
            drv.cuStreamIsCapturing(0, ctypes.byref(out)),
        ]

    assert in_thread(elsewhere) == [INVALID_CONTEXT] * 3
    expect(cuda, "no context is current", "no context is current", "needs a current context")


def test_a_released_context_is_gone(cuda: FakeCuda, drv: Driver) -> None:
    assert drv.cuDevicePrimaryCtxRelease_v2(0) == 0
    assert drv.cuEventCreate(ctypes.byref(ctypes.c_void_p()), 0) == INVALID_CONTEXT
    expect(cuda, "the current context was released")


def test_an_event_is_recorded_in_its_own_context(cuda: FakeCuda, drv: Driver) -> None:
    event = drv.event()
    assert drv.cuEventRecord(event, cuda.stream(1)) == INVALID_HANDLE
    expect(cuda, "of different contexts")
    assert drv.cuEventRecord(event, cuda.stream(0)) == 0
    assert drv.cuStreamWaitEvent(cuda.stream(1), event, 0) == 0  # across devices is fine


def test_memory_is_copied_by_its_own_device(cuda: FakeCuda, drv: Driver, ring: Any) -> None:
    there = cuda.device_malloc(1, 64)
    assert drv.cuMemcpyDtoHAsync_v2(ring[1], there, 64, drv.stream()) == INVALID_VALUE
    expect(cuda, "memory of device 1 on a stream of device 0")


# Orders


class Training:
    """A tensor, a stream that trains it, and a copy stream."""

    def __init__(self, cuda: FakeCuda, drv: Driver, ring: tuple[mmap.mmap, int], nbytes: int = 64 << 10) -> None:
        self.cuda, self.drv, self.nbytes = cuda, drv, nbytes
        self.pages, self.host = ring
        self.stream, self.side = cuda.stream(0), drv.stream()
        self.tensor = cuda.device_malloc(0, nbytes)

    def step(self, byte: int, microseconds: float = 300) -> None:
        self.cuda.kernel(self.stream, [(self.tensor, self.nbytes, byte)], microseconds=microseconds)

    def copy(self) -> None:
        assert self.drv.cuMemcpyDtoHAsync_v2(self.host, self.tensor, self.nbytes, self.side) == 0

    def copied(self) -> set[int]:
        self.cuda.synchronize()
        return set(self.pages[: self.nbytes])


@pytest.fixture
def training(cuda: FakeCuda, drv: Driver, ring: Any) -> Training:
    return Training(cuda, drv, ring)


@pytest.mark.parametrize("mode", Mode)
def test_a_step_that_does_not_wait_for_the_copy(cuda: FakeCuda, drv: Driver, training: Training, mode: Mode) -> None:
    cuda.configure(mode=mode, delay_us=LONG)
    training.step(1)
    drv.order(training.stream, training.side)
    training.copy()
    training.step(2)
    copied = training.copied()
    if mode is not Mode.RANDOM:
        assert copied == {2 if mode is Mode.COPIES_LATE else 1}  # the right bytes, by luck: reported all the same
    expect(cuda, "neither waits for the other")


@pytest.mark.parametrize("mode", Mode)
def test_a_copy_that_does_not_wait_for_the_step(cuda: FakeCuda, training: Training, mode: Mode) -> None:
    cuda.configure(mode=mode, delay_us=LONG)
    training.step(1)
    training.copy()
    copied = training.copied()
    if mode is not Mode.RANDOM:
        assert copied == {1 if mode is Mode.COPIES_LATE else 0xA5}  # what fresh memory holds
    expect(cuda, "neither waits for the other")


def test_seeds_explore_both_orders(cuda: FakeCuda, drv: Driver) -> None:
    orders = set()
    for seed in range(12):
        cuda.reset(seed)
        cuda.configure(delay_us=LONG)
        context = drv.made("cuDevicePrimaryCtxRetain", 0)
        drv.cuCtxSetCurrent(context)
        _pages, address = host_memory(4096)
        drv.cuMemHostRegister_v2(address, 4096, PORTABLE)
        drv.cuMemcpyDtoHAsync_v2(address, cuda.device_malloc(0, 4096), 4096, drv.stream())
        cuda.kernel(cuda.stream(0), microseconds=100)
        cuda.synchronize()
        orders.add(tuple(ran.kind for ran in cuda.log()))
    assert orders == {("kernel", "d2h"), ("d2h", "kernel")}


def test_the_api_does_not_wait(cuda: FakeCuda, drv: Driver, training: Training, ring: Any) -> None:
    event = drv.event()
    with cuda.hold(copies=True, kernels=True):
        training.step(1)
        drv.order(training.stream, training.side)
        training.copy()
        assert drv.cuEventRecord(event, training.side) == 0
        time.sleep(0.05)
        assert set(ring[0][: training.nbytes]) == {0xDB}  # a reader finds no bytes there before they arrive
    assert drv.cuEventSynchronize(event) == 0
    assert training.copied() == {1}


def test_what_has_ended_unseen_is_not_ordered(cuda: FakeCuda, training: Training) -> None:
    training.copy()
    while not cuda.log():
        time.sleep(0.001)
    training.step(2)
    expect(cuda, "neither waits for the other")


# Events


def test_an_event_that_was_never_recorded_is_complete(cuda: FakeCuda, drv: Driver, training: Training) -> None:
    event = drv.event()
    assert drv.cuEventSynchronize(event) == 0
    training.copy()
    assert drv.cuStreamWaitEvent(training.stream, event, 0) == 0  # waits for nothing
    training.step(1)
    expect(cuda, "neither waits for the other")


def test_an_event_is_a_snapshot(cuda: FakeCuda, drv: Driver) -> None:
    stream, event = cuda.stream(0), drv.event()
    cuda.kernel(stream)
    assert drv.cuEventRecord(event, stream) == 0
    cuda.synchronize()
    with cuda.hold(kernels=True):
        cuda.kernel(stream)  # after the record: not waited for
        assert drv.cuEventSynchronize(event) == 0


def test_a_wait_means_the_record_of_its_time(cuda: FakeCuda, drv: Driver, ring: Any) -> None:
    """An event that is recorded again before the wait misses the first record; after the wait it does not."""
    for again_before_wait in (True, False):
        training, event, other = Training(cuda, drv, ring), drv.event(), drv.stream()
        training.copy()
        assert drv.cuEventRecord(event, training.side) == 0
        if again_before_wait:
            assert drv.cuEventRecord(event, other) == 0
        assert drv.cuStreamWaitEvent(training.stream, event, 0) == 0
        if not again_before_wait:
            assert drv.cuEventRecord(event, other) == 0
        training.step(1)
        training.copied()
        expect(cuda, *["neither waits for the other"][:again_before_wait])


# The NULL stream


@pytest.mark.parametrize("blocking", [True, False])
def test_the_null_stream_and_others(cuda: FakeCuda, drv: Driver, training: Training, blocking: bool) -> None:
    """Blocking streams and the NULL stream wait for each other, and non-blocking ones do not."""
    training.stream, training.side = 0, drv.stream(0 if blocking else NON_BLOCKING)
    training.step(5)
    training.copy()
    training.step(6)
    copied = training.copied()
    if blocking:
        assert copied == {5}
    expect(cuda, *["neither waits for the other"] * (0 if blocking else 2))


def test_handle_0_is_that_of_the_current_context(cuda: FakeCuda, drv: Driver, training: Training) -> None:
    contexts = [drv.made("cuDevicePrimaryCtxRetain", device) for device in (0, 1)]
    for current in (0, 1):
        cuda.kernel(0, [(training.tensor, training.nbytes, 7)])
        drv.cuCtxSetCurrent(contexts[current])
        drv.order(0, training.side)
        drv.cuCtxSetCurrent(contexts[0])
        training.copy()
        training.copied()
        expect(cuda, *["neither waits for the other"][: current == 1])


# Host memory


def test_a_copy_to_pageable_memory_blocks(cuda: FakeCuda, drv: Driver) -> None:
    pages, address = host_memory(4096)
    tensor, stream, context = cuda.device_malloc(0, 4096), drv.stream(), drv.made("cuCtxGetCurrent")
    cuda.kernel(stream, [(tensor, 4096, 9)])

    def copy() -> int:
        drv.cuCtxSetCurrent(context)
        return drv.cuMemcpyDtoHAsync_v2(address, tensor, 4096, stream)

    with cuda.hold():
        thread = threading.Thread(target=copy)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
    thread.join(30)
    assert set(pages[:]) == {9}
    cuda.kernel(cuda.stream(0), [(tensor, 4096, 0)])  # the caller knows that the copy is over
    assert cuda.statistics()["pageable_copies"] == 1


def test_registration(cuda: FakeCuda, drv: Driver) -> None:
    _pages, address = host_memory(64 << 10)
    register, unregister = drv.cuMemHostRegister_v2, drv.cuMemHostUnregister
    assert register(address, 32 << 10, PORTABLE) == register(address + (32 << 10), 32 << 10, PORTABLE) == 0
    assert register(address + 4096, 4096, PORTABLE) == ALREADY_REGISTERED
    assert unregister(address + 4096) == NOT_REGISTERED
    assert register(address, 0, PORTABLE) == register(4096, 4096, PORTABLE) == INVALID_VALUE
    expect(cuda, "registered in part", "no such registration", "arguments", "not mapped")
    assert unregister(address) == unregister(address + (32 << 10)) == 0
    cuda.configure(registration_limit=16 << 10, registration_error=801)
    assert register(address, 32 << 10, PORTABLE) == 801
    assert register(address, 16 << 10, PORTABLE) == 0


def test_no_copy_crosses_a_registration(cuda: FakeCuda, drv: Driver) -> None:
    _pages, address = host_memory(64 << 10)
    tensor, stream = cuda.device_malloc(0, 8192), drv.stream()
    for start in (0, 32 << 10):
        assert drv.cuMemHostRegister_v2(address + start, 32 << 10, PORTABLE) == 0
    assert drv.cuMemcpyDtoHAsync_v2(address + (32 << 10) - 8192, tensor, 8192, stream) == 0
    assert drv.cuMemcpyDtoHAsync_v2(address + (32 << 10) - 4096, tensor, 8192, stream) == INVALID_VALUE
    assert drv.cuMemcpyHtoDAsync_v2(tensor, address + (32 << 10) - 4096, 8192, stream) == INVALID_VALUE
    expect(cuda, "crosses the end", "crosses the end")
    drv.finish(stream)


def test_a_registration_that_is_not_portable(cuda: FakeCuda, drv: Driver) -> None:
    _pages, address = host_memory(4096)
    assert drv.cuMemHostRegister_v2(address, 4096, 0) == 0
    for device in (0, 1):
        drv.cuCtxSetCurrent(drv.made("cuDevicePrimaryCtxRetain", device))
        stream = drv.stream()
        assert drv.cuMemcpyDtoHAsync_v2(address, cuda.device_malloc(device, 64), 64, stream) == 0
        drv.finish(stream)
        assert cuda.statistics()["pageable_copies"] == device


@pytest.mark.parametrize("waits", [True, False])
def test_memory_is_unregistered_after_its_copies(
    cuda: FakeCuda, drv: Driver, training: Training, ring: Any, waits: bool
) -> None:
    training.copy()
    if waits:
        drv.finish(training.side)
    assert drv.cuMemHostUnregister(ring[1]) == 0
    cuda.synchronize()
    expect(cuda, *["unregistered while"][waits:])


def test_memory_is_unmapped_last(cuda: FakeCuda, drv: Driver) -> None:
    libc = ctypes.CDLL(None)
    libc.mmap.restype, libc.mmap.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long],
    )
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = libc.mmap(None, 4096, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0)
    assert drv.cuMemHostRegister_v2(address, 4096, PORTABLE) == 0
    stream = drv.stream()
    with cuda.hold():
        assert drv.cuMemcpyDtoHAsync_v2(address, cuda.device_malloc(0, 4096), 4096, stream) == 0
        libc.munmap(address, 4096)
    drv.finish(stream)
    assert drv.cuMemHostUnregister(address) == 0
    expect(cuda, "was unmapped while", "unmapped before it was unregistered")


def test_the_host_leaves_memory_in_flight_alone(cuda: FakeCuda, drv: Driver, ring: Any) -> None:
    pages, address = ring
    tensor, stream = cuda.device_malloc(0, 4096), drv.stream()
    for meddle in (False, True):
        with cuda.hold():
            assert drv.cuMemcpyDtoHAsync_v2(address, tensor, 4096, stream) == 0
            assert drv.cuMemcpyHtoDAsync_v2(tensor, address + 4096, 4096, stream) == 0
            if meddle:
                pages[100], pages[4196] = 1, 1
        drv.finish(stream)
        expect(cuda, *["wrote to the destination", "changed the source"][: 2 * meddle])


def test_two_copies_to_one_place(cuda: FakeCuda, drv: Driver, ring: Any) -> None:
    tensor, streams = cuda.device_malloc(0, 4096), [drv.stream(), drv.stream()]
    for ordered in (True, False):
        assert drv.cuMemcpyDtoHAsync_v2(ring[1], tensor, 4096, streams[0]) == 0
        if ordered:
            drv.order(*streams)
        assert drv.cuMemcpyDtoHAsync_v2(ring[1] + 4000, tensor, 96, streams[1]) == 0
        cuda.synchronize()
        expect(cuda, *["neither waits for the other"][ordered:])


# Device memory


def test_a_device_pointer_is_none_of_the_host(cuda: FakeCuda) -> None:
    done = run_script("ctypes.string_at(f.device_malloc(0, 4096), 1)")
    assert done.returncode == -signal.SIGSEGV


def test_not_device_memory(cuda: FakeCuda, drv: Driver, ring: Any) -> None:
    tensor, stream = cuda.device_malloc(0, 4096), drv.stream()
    assert drv.cuMemcpyDtoHAsync_v2(ring[1], tensor + 1, 4096, stream) == INVALID_VALUE  # one byte too far
    assert drv.cuMemcpyDtoHAsync_v2(tensor, tensor, 4096, stream) == INVALID_VALUE
    expect(cuda, "not a range", "a device pointer in the host's place")


def test_memory_is_freed_after_its_copies(cuda: FakeCuda, drv: Driver, ring: Any) -> None:
    """The host must wait before it frees; a free in the order of a stream must come after the copies."""
    for by_host, waits in ((True, True), (True, False), (False, True), (False, False)):
        training = Training(cuda, drv, ring)
        training.copy()
        if by_host and waits:
            drv.finish(training.side)
        elif waits:
            drv.order(training.side, training.stream)
        cuda.device_free(training.tensor, None if by_host else training.stream)
        cuda.synchronize()
        expect(cuda, *["freed while" if by_host else "free"][waits:])
        assert set(cuda.read(training.tensor, training.nbytes)) == {0xDE}
        assert drv.cuMemcpyDtoHAsync_v2(ring[1], training.tensor, 1, training.side) == INVALID_VALUE
        expect(cuda, "after its free")


# Batches


def batch(
    drv: Driver, to: Sequence[int], source: Sequence[int], sizes: Sequence[int], stream: int, order: int = STREAM
) -> tuple[int, int]:
    """Returns the error and the index of the copy at fault."""
    fail, first = ctypes.c_size_t(77), ctypes.c_size_t(0)
    error = drv.cuMemcpyBatchAsync(
        (ctypes.c_uint64 * len(to))(*to),
        (ctypes.c_uint64 * len(source))(*source),
        (ctypes.c_size_t * len(sizes))(*sizes),
        len(to),
        ctypes.byref(Attributes(srcAccessOrder=order)),
        ctypes.byref(first),
        1,
        ctypes.byref(fail),
        stream,
    )
    return error, fail.value


NOWHERE = (1 << 64) - 1


def test_a_batch_that_is_wrong(cuda: FakeCuda, drv: Driver, ring: Any) -> None:
    address, tensor, stream = ring[1], cuda.device_malloc(0, 4096), drv.stream()
    to, source, sizes = [address, address + 64], [tensor, tensor + 64], [64, 64]
    for violation, index, arguments in (
        ("NULL stream", NOWHERE, (to, source, sizes, 0)),
        ("empty", 1, (to, source, [64, 0], stream)),
        ("no copies", NOWHERE, ([], [], [], stream)),
        ("not a range", 1, (to, [tensor, tensor + 4090], sizes, stream)),
    ):
        assert batch(drv, *arguments) == (INVALID_VALUE, index)
        expect(cuda, violation)
    assert batch(drv, [address, address + 63], source, sizes, stream) == (0, NOWHERE)
    assert "two copies of a batch write the same memory" in cuda.violations()[0]
    cuda.synchronize()
    cuda.forget_violations()


@pytest.mark.parametrize("order", [STREAM, DURING_API_CALL, ANY])
def test_when_a_batch_reads(cuda: FakeCuda, drv: Driver, training: Training, ring: Any, order: int) -> None:
    """Only STREAM order is safe: in others the driver may read before the stream has waited."""
    training.step(8)
    drv.order(training.stream, training.side)
    assert batch(drv, [ring[1]], [training.tensor], [training.nbytes], training.side, order) == (0, NOWHERE)
    drv.order(training.side, training.stream)
    training.step(9)
    assert training.copied() == {8}
    expect(cuda, *["before the stream has waited"][: order != STREAM])


# Captures


def in_other_thread(drv: Driver, work: Callable[[], Any]) -> Any:
    context = drv.made("cuCtxGetCurrent")

    def run() -> Any:
        drv.cuCtxSetCurrent(context)
        return work()

    return in_thread(run)


def unsafe_calls(drv: Driver, event: int) -> list[Callable[[], int]]:
    pages, address = host_memory(4096)
    return [
        lambda: drv.cuEventSynchronize(event),
        lambda: drv.cuMemHostRegister_v2(address, 4096, PORTABLE),
        lambda: drv.cuMemHostUnregister(address) if pages else 0,  # which live as long as this list
        lambda: drv.cuStreamCreate(ctypes.byref(ctypes.c_void_p()), NON_BLOCKING),
    ]


@pytest.mark.parametrize("which", range(4))
def test_a_capture_forbids_other_threads_unsafe_calls(cuda: FakeCuda, drv: Driver, which: int) -> None:
    stream, event = cuda.stream(0), drv.event()
    call = unsafe_calls(drv, event)[which]
    cuda.begin_capture(stream)
    assert in_other_thread(drv, call) == CAPTURE_UNSUPPORTED
    assert drv.capturing(stream) == (0, 2)
    with pytest.raises(FakeError) as failed:
        cuda.kernel(stream)
    assert failed.value.code == CAPTURE_INVALIDATED
    with pytest.raises(FakeError) as failed:
        cuda.end_capture(stream)
    assert failed.value.code == CAPTURE_INVALIDATED
    expect(cuda, "invalidated a capture of another thread")
    assert drv.capturing(stream) == (0, 0)


def test_a_replay_that_does_not_wait_for_the_copy(cuda: FakeCuda, drv: Driver, training: Training) -> None:
    cuda.begin_capture(training.stream)
    training.step(1)
    graph = cuda.end_capture(training.stream)
    for ordered in (True, False):
        training.copy()
        if ordered:
            drv.order(training.side, training.stream)
        cuda.replay(graph, training.stream)
        cuda.synchronize()
        expect(cuda, *["neither waits for the other"][ordered:])


def test_no_dependency_crosses_into_a_capture(cuda: FakeCuda, drv: Driver, training: Training) -> None:
    event = drv.event()
    training.copy()
    assert drv.cuEventRecord(event, training.side) == 0
    cuda.begin_capture(training.stream)
    assert drv.cuStreamWaitEvent(training.stream, event, 0) == CAPTURE_ISOLATION
    assert drv.capturing(training.stream) == (0, 2)
    expect(cuda, "from outside")


def test_no_dependency_crosses_out_of_a_capture(cuda: FakeCuda, drv: Driver, training: Training) -> None:
    """An event recorded in a capture draws the streams that wait for it into the capture."""
    event = drv.event()
    cuda.begin_capture(training.stream, Capture.RELAXED)
    assert drv.cuEventRecord(event, training.stream) == 0
    assert drv.cuEventSynchronize(event) == CAPTURED_EVENT
    with pytest.raises(FakeError):
        cuda.end_capture(training.stream)
    expect(cuda, "recorded in a capture")

    cuda.begin_capture(training.stream)
    assert drv.cuEventRecord(event, training.stream) == 0
    assert drv.cuStreamWaitEvent(training.side, event, 0) == 0
    assert drv.capturing(training.side) == (0, 1)
    training.copy()
    with pytest.raises(FakeError) as failed:
        cuda.end_capture(training.stream)
    assert failed.value.code == CAPTURE_UNJOINED
    expect(cuda, "joined a capture", "captured instead of run")
    assert drv.cuStreamWaitEvent(training.side, event, 0) == CAPTURE_ISOLATION  # the capture is over
    expect(cuda, "from inside")


def test_the_null_stream_while_a_blocking_stream_is_captured(cuda: FakeCuda, drv: Driver) -> None:
    stream, event = cuda.stream(0, blocking=True), drv.event()
    cuda.begin_capture(stream)
    assert drv.capturing(0)[0] == CAPTURE_IMPLICIT  # asking is free
    assert drv.capturing(stream) == (0, 1)
    assert drv.cuEventRecord(event, 0) == CAPTURE_IMPLICIT
    assert drv.capturing(stream) == (0, 2)
    expect(cuda, "the NULL stream was used")


# Errors


def test_a_faulty_kernel_breaks_its_context(cuda: FakeCuda, drv: Driver, training: Training, ring: Any) -> None:
    event = drv.event()
    with cuda.hold(kernels=True):
        cuda.kernel(training.stream, fault=ILLEGAL_ADDRESS)
        drv.order(training.stream, training.side)
        training.copy()
        assert drv.cuEventRecord(event, training.side) == 0
    assert drv.cuEventSynchronize(event) == ILLEGAL_ADDRESS
    out = ctypes.c_void_p()
    assert drv.cuEventCreate(ctypes.byref(out), 0) == ILLEGAL_ADDRESS
    assert drv.cuMemcpyDtoHAsync_v2(ring[1], training.tensor, 4, training.side) == ILLEGAL_ADDRESS
    assert drv.cuMemHostUnregister(ring[1]) == ILLEGAL_ADDRESS
    assert set(ring[0][: training.nbytes]) == {0xDB}  # nothing was copied
    drv.cuCtxSetCurrent(drv.made("cuDevicePrimaryCtxRetain", 1))
    assert drv.cuEventCreate(ctypes.byref(out), 0) == 0  # the other device is well


def test_after_the_driver_has_shut_down(cuda: FakeCuda, drv: Driver, ring: Any) -> None:
    """A caller that is told so must stop calling; a waiting caller returns."""
    stream, event, codes = drv.stream(), drv.event(), []
    context = drv.made("cuCtxGetCurrent")

    def wait() -> None:
        drv.cuCtxSetCurrent(context)
        codes.append(drv.cuEventSynchronize(event))

    with cuda.hold():
        assert drv.cuMemcpyDtoHAsync_v2(ring[1], cuda.device_malloc(0, 64), 64, stream) == 0
        assert drv.cuEventRecord(event, stream) == 0
        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.05)
        cuda.deinit()
        waiting.join(30)
    assert codes == [DEINITIALIZED]
    assert drv.cuEventRecord(event, stream) == DEINITIALIZED
    assert cuda.violations() == []
    assert drv.cuEventRecord(event, stream) == DEINITIALIZED
    expect(cuda, "after CUDA_ERROR_DEINITIALIZED")
    cuda.reset()


def test_a_forked_child_calls_nothing(tmp_path: Path) -> None:
    script = """
        lib.cuInit(0)
        child = os.fork()
        if not child:
            os._exit(lib.cuInit(0))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert f.violations() == ["cuInit was called in a forked child"], f.violations()
    """
    report = tmp_path / "report"
    done = run_script(script, FAKE_CUDA_REPORT=str(report))
    assert done.returncode == 0, done.stderr
    assert report.read_text() == "cuInit was called in a forked child\n"
