"""First contact with a real CUDA driver: what lazyckpt takes for granted, one question at a time, each in a process of
its own, so that one that crashes or hangs answers with that. No part of lazyckpt is used. Prints one line for each."""

from __future__ import annotations

import ctypes
import mmap
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

P, N, MIB = ctypes.c_void_p, ctypes.c_size_t, 1 << 20
cu = ctypes.CDLL("libcuda.so.1") if len(sys.argv) > 1 and sys.argv[1] != "room" else None


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Attributes(ctypes.Structure):
    _fields_ = [("order", ctypes.c_int), ("src", Location), ("dst", Location), ("flags", ctypes.c_uint)]


def ok(result: int, what: str) -> None:
    if result:
        raise SystemExit(f"{what}: {result}")


MAPPINGS: list[mmap.mmap] = []  # until the process ends


def ring(nbytes: int) -> int:
    """The address of memory that is mapped as the engine maps it."""
    m = mmap.mmap(-1, nbytes + 2 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    m.madvise(mmap.MADV_HUGEPAGE)
    m.madvise(mmap.MADV_DONTFORK)
    MAPPINGS.append(m)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(m))
    return (begin + 2 * MIB - 1) // (2 * MIB) * (2 * MIB)


def register(at: int, nbytes: int) -> None:
    ok(cu.cuMemHostRegister_v2(P(at), N(nbytes), 1), "cuMemHostRegister")


def stream() -> P:
    made = P()
    ok(cu.cuStreamCreate(ctypes.byref(made), 1), "cuStreamCreate")
    return made


def attributes() -> None:
    """91: batches may be given registered host memory (0: not); 99 registering; 134 NUMA node; 100 page tables."""
    found = {}
    for which in (91, 99, 134, 100, 41):
        value = ctypes.c_int(-99)
        found[which] = (cu.cuDeviceGetAttribute(ctypes.byref(value), which, 0), value.value)
    version = ctypes.c_int()
    cu.cuDriverGetVersion(ctypes.byref(version))
    names = [n for n in ("cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2") if hasattr(cu, n)]
    print("driver", version.value, "attributes {which: (result, value)}", found, "exports", names)


def batch(count: int, each: int, calls: int) -> None:
    """The nine arguments of CUDA 12.8, into registered memory; then the same one by one."""
    import torch

    source = torch.randint(256, (count, max(each, 512)), dtype=torch.uint8, device="cuda")
    at = ring(count * each + 64 * MIB)
    register(at, (count * each + 4095) // 4096 * 4096)
    s, A = stream(), ctypes.c_ulonglong * count
    dst, src = A(*(at + n * each for n in range(count))), A(*(source[n].data_ptr() for n in range(count)))
    sizes, attrs, first, failed = (N * count)(*[each] * count), Attributes(order=1), N(0), N(0)
    torch.cuda.synchronize()
    seconds = []
    for _ in range(calls):
        ctypes.memset(at, 0, count * each)
        start = time.perf_counter()
        ok(
            cu.cuMemcpyBatchAsync(
                dst, src, sizes, N(count), ctypes.byref(attrs), ctypes.byref(first), N(1), ctypes.byref(failed), s
            ),
            "cuMemcpyBatchAsync",
        )
        called = time.perf_counter()
        ok(cu.cuStreamSynchronize(s), "synchronize")
        seconds.append((called - start, time.perf_counter() - start))
    same = ctypes.string_at(at, count * each) == source[:, :each].contiguous().cpu().numpy().tobytes()
    start = time.perf_counter()
    for n in range(count):
        ok(cu.cuMemcpyDtoHAsync_v2(P(dst[n]), ctypes.c_ulonglong(src[n]), N(each), s), "one by one")
    called = time.perf_counter()
    ok(cu.cuStreamSynchronize(s), "synchronize")
    one = (called - start, time.perf_counter() - start)
    call, all_ = (statistics.median(x) for x in zip(*seconds, strict=True))
    print(
        f"bytes right: {same}; batch {1e3 * call:.2f} ms to call, {1e3 * all_:.2f} in all; "
        f"one by one {1e3 * one[0]:.2f}, {1e3 * one[1]:.2f} (ctypes' own cost in it)"
    )


def pin(step_mib: int) -> None:
    """4 GiB, range by range, while this process launches kernels: what pinning costs, and whom."""
    import torch

    total = 4096 * MIB
    at = ring(total)
    start = time.perf_counter()
    ctypes.memset(at, 1, total)
    faulted = time.perf_counter() - start
    x = torch.zeros(1, device="cuda")
    launches: list[float] = []
    done = False

    def launch() -> None:
        while not done:
            begin = time.perf_counter()
            x.add_(1)
            launches.append(time.perf_counter() - begin)
            time.sleep(0.0002)

    x.add_(1)
    torch.cuda.synchronize()
    context = P()
    ok(cu.cuCtxGetCurrent(ctypes.byref(context)), "context")
    thread = threading.Thread(target=launch)
    thread.start()
    time.sleep(0.2)
    quiet, seconds = max(launches), []
    launches.clear()
    for n in range(0, total, step_mib * MIB):
        begin = time.perf_counter()
        register(at + n, step_mib * MIB)
        seconds.append(time.perf_counter() - begin)
    busy = max(launches, default=0)
    done = True
    thread.join()
    torch.cuda._sleep(500_000_000)
    begin = time.perf_counter()
    ok(cu.cuMemHostUnregister(P(at)), "unregister")
    first = time.perf_counter() - begin
    torch.cuda.synchronize()
    print(
        f"faulting in {total / faulted / 1e9:.1f} GB/s; pinning {total / sum(seconds) / 1e9:.1f} GB/s, slowest range "
        f"{1e3 * max(seconds):.1f} ms; slowest launch {1e3 * quiet:.2f} ms before, {1e3 * busy:.2f} meanwhile; "
        f"unpinning one range beside a busy stream {1e3 * first:.1f} ms"
    )


def lock() -> None:
    """Whether a copy by another thread is held up while a first launch loads its module behind a busy stream."""
    import torch

    device = torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda")
    host = torch.empty(8 * MIB, dtype=torch.uint8, pin_memory=True)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        host.copy_(device, non_blocking=True)
    matrix = torch.ones(512, 512, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    slowest = [0.0]
    done = False

    def copy() -> None:
        with torch.cuda.stream(other):
            while not done:
                begin = time.perf_counter()
                host.copy_(device, non_blocking=True)
                slowest[0] = max(slowest[0], time.perf_counter() - begin)
                time.sleep(0.001)

    thread = threading.Thread(target=copy)
    thread.start()
    time.sleep(0.1)
    quiet, slowest[0] = slowest[0], 0.0
    torch.cuda._sleep(1_000_000_000)
    begin = time.perf_counter()
    torch.linalg.inv(matrix.float())
    torch.mm(matrix, matrix)
    first = time.perf_counter() - begin
    done = True
    thread.join()
    torch.cuda.synchronize()
    print(
        f"first launches of new modules behind half a second of work: {first:.2f} s; slowest copy call of another "
        f"thread {1e3 * quiet:.2f} ms before, {1e3 * slowest[0]:.1f} meanwhile"
    )


def wake() -> None:
    """How late a thread wakes that waits for an event with CU_EVENT_BLOCKING_SYNC, and one that spins."""
    import torch

    device = torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda")
    at = ring(64 * MIB)
    register(at, 64 * MIB)
    s, line = stream(), []
    for flags in (3, 2):
        event, seconds = P(), []
        ok(cu.cuEventCreate(ctypes.byref(event), flags), "event")
        for _ in range(200):
            begin = time.perf_counter()
            ok(cu.cuMemcpyDtoHAsync_v2(P(at), ctypes.c_ulonglong(device.data_ptr()), N(8 * MIB), s), "copy")
            cu.cuEventRecord(event, s)
            cu.cuEventSynchronize(event)
            seconds.append(time.perf_counter() - begin)
        line.append(f"{1e6 * statistics.median(seconds):.0f} us (slowest {1e6 * max(seconds):.0f})")
    print(f"8 MiB and its event: blocking {line[0]}, spinning {line[1]}")


def room() -> None:
    """Whether this machine's memory grows as it is used: 80 GiB are touched, 2 at a time, and given back."""

    def fields() -> dict[str, int]:
        lines = (line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return {key: int(value.split()[0]) >> 20 for key, value in lines}

    before, held = fields(), []
    while len(held) < 40 and fields()["MemAvailable"] > 6:
        m = mmap.mmap(-1, 2048 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        m.madvise(mmap.MADV_HUGEPAGE)
        m.madvise(23)  # MADV_POPULATE_WRITE
        held.append(m)
    after = fields()
    print(
        f"GiB: MemTotal {before['MemTotal']} -> {after['MemTotal']}, available {before['MemAvailable']}, "
        f"touched {2 * len(held)}"
    )


LIMIT_S = 60  # for one question; the first use of a large library may take half a minute
QUESTIONS = [("room",), ("attributes",), ("wake",), ("lock",), ("pin", 64), ("pin", 512)]
QUESTIONS += [("batch", n, e, c) for n, e, c in ((8, 4096, 200), (300, 4, 500), (1000, 1024, 200), (40000, 64, 5))]

if len(sys.argv) > 1:
    if sys.argv[1] not in ("room",):
        import torch

        torch.zeros(1, device="cuda") if torch.cuda.is_available() else cu.cuInit(0)
    globals()[sys.argv[1]](*map(int, sys.argv[2:]))
else:
    for question in QUESTIONS:
        name, start = " ".join(map(str, question)), time.perf_counter()
        try:
            ran = subprocess.run(
                [sys.executable, __file__, *map(str, question)], capture_output=True, text=True, timeout=LIMIT_S
            )
            answer = (
                ran.stdout.strip() if ran.returncode == 0 else f"exit {ran.returncode}: {ran.stderr.strip()[-300:]}"
            )
        except subprocess.TimeoutExpired:
            answer = f"no answer in {LIMIT_S} s"
        print(f"[{time.perf_counter() - start:4.1f} s] {name}: {answer}", flush=True)
