"""Builds and loads the fake CUDA driver, and plays PyTorch's part in a training process. See README.md."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
# Thread-local variables lie in static TLS: GCC 12's ThreadSanitizer guesses a header before other blocks and crashes if
# a block begins 16 bytes into a page.
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-pthread", "-ftls-model=initial-exec")


class Mode(IntEnum):
    """Which permitted order of the operations is run."""

    RANDOM = 0
    COPIES_LATE = 1  # kernels as early, copies as late as can be
    COPIES_EARLY = 2  # the other way round


class Capture(IntEnum):
    """What other threads may do during a capture; the driver's numbers."""

    GLOBAL = 0
    THREAD_LOCAL = 1
    RELAXED = 2


class Ran(NamedTuple):
    """A kernel or a copy that has ended."""

    number: int
    kind: str  # kernel, d2h, h2d
    device: int
    stream: int
    nbytes: int  # copied
    name: str  # of a kernel


class FakeError(RuntimeError):
    """A control function refused: the driver's error code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"CUDA error {code}")
        self.code = code


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++"))


def build(*without: str) -> Path:
    """Returns the library, built once for these sources, ``without`` functions that an older driver lacks."""
    sources = sorted(HERE.glob("*.cc"))
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sorted([*sources, *HERE.glob("*.h")]):
        digest.update(source.read_bytes())
    folder = HERE.parent.parent / "build" / "fake_cuda" / digest.hexdigest()[:16]
    target = folder / ("-without-".join(["libfakecuda", *without]) + ".so")
    if target.exists():
        return target
    command = compiler()
    if command is None:
        raise FileNotFoundError("no C++ compiler")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:

        def compiled(source: Path) -> Path:
            made = folder / f"{source.stem}.o"
            if not made.exists():
                fresh = Path(scratch, made.name)
                subprocess.run([command, *FLAGS, "-c", source, "-o", fresh], check=True)
                fresh.replace(made)
            return made

        with ThreadPoolExecutor(len(sources)) as pool:
            objects = list(pool.map(compiled, sources))
        exports = Path(scratch, "exports")
        exports.write_text("{ global: *; local: " + "".join(f"{name}; " for name in without) + "};")
        script = [f"-Wl,--version-script={exports}"] if without else []
        library = Path(scratch, target.name)
        subprocess.run([command, "-shared", "-pthread", *objects, *script, "-o", library], check=True)
        library.replace(target)
    return target


def _check(code: int) -> int:
    """Returns the value of a control function, or raises its error, which is negative."""
    if code < 0:
        raise FakeError(-code)
    return code


class FakeCuda:
    """The fake driver of this process. An engine that opens the same file meets the same devices."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or build()
        self.lib = lib = ctypes.CDLL(str(self.path))
        u64, text = ctypes.c_uint64, ctypes.c_char_p
        u64s = ctypes.POINTER(u64)
        signatures: dict[str, tuple[Any, ...]] = {
            "reset": (None, u64, ctypes.c_int),
            "deinit": (None,),
            "configure": (ctypes.c_int, text, ctypes.c_double),
            "hold": (None, ctypes.c_int, ctypes.c_int),
            "fail": (None, text, u64, ctypes.c_int, ctypes.c_int),
            "delay": (None, text, ctypes.c_double),
            "malloc": (u64, ctypes.c_int, u64),
            "free": (ctypes.c_int, u64, ctypes.c_int, u64),
            "write": (ctypes.c_int, u64, text, u64),
            "read": (ctypes.c_int, u64, ctypes.c_void_p, u64),
            "stream": (u64, ctypes.c_int, ctypes.c_int),
            "kernel": (ctypes.c_int, ctypes.c_int, u64, text, ctypes.c_double, u64s, u64, ctypes.c_int),
            "synchronize": (ctypes.c_int, ctypes.c_int, ctypes.c_int),
            "begin_capture": (ctypes.c_int, ctypes.c_int, u64, ctypes.c_int),
            "end_capture": (ctypes.c_int, ctypes.c_int, u64),
            "replay": (ctypes.c_int, ctypes.c_int, u64, ctypes.c_int),
            "violations": (text,),
            "forget_violations": (None,),
            "calls": (text,),
            "live": (text,),
            "statistics": (text,),
            "log": (text,),
            "context_depth": (ctypes.c_int,),
        }
        for name, (result, *arguments) in signatures.items():
            function = getattr(lib, f"fake_{name}")
            function.restype, function.argtypes = result, arguments

    def reset(self, seed: int = 0, devices: int = 2) -> None:
        """Forgets memory, streams, events and settings. Earlier handles are invalid."""
        self.lib.fake_reset(seed, devices)

    def configure(self, **settings: float) -> None:
        """``mode``, ``bandwidth`` (bytes/s), ``latency_us``, ``delay_us`` (of a ready operation), ``driver_version``,
        ``host_pointers`` (attribute 91), ``registration_limit`` (bytes), ``registration_error``."""
        for key, value in settings.items():
            _check(-self.lib.fake_configure(key.encode(), value))

    @contextlib.contextmanager
    def hold(self, copies: bool = True, kernels: bool = False) -> Iterator[None]:
        """Inside, no copy (no kernel) starts."""
        self.lib.fake_hold(copies, kernels)
        try:
            yield
        finally:
            self.lib.fake_hold(False, False)

    def fail(self, name: str, nth: int = 1, code: int = 999, sticky: bool = False) -> None:
        """Makes the ``nth`` next call of ``name`` return ``code`` and do nothing; sticky: all later ones, too."""
        self.lib.fake_fail(name.encode(), nth, code, sticky)

    def delay(self, name: str, microseconds: float) -> None:
        """Delays each call of ``name`` before it does anything, so that others get in between."""
        self.lib.fake_delay(name.encode(), microseconds)

    def deinit(self) -> None:
        """Makes every call return CUDA_ERROR_DEINITIALIZED until reset, as at the end of a process."""
        self.lib.fake_deinit()

    # Memory

    def device_malloc(self, device: int, nbytes: int) -> int:
        """Returns a device pointer, which the host cannot access."""
        pointer: int = self.lib.fake_malloc(device, nbytes)
        assert pointer
        return pointer

    def device_free(self, pointer: int, stream: int | None = None) -> None:
        """Frees in the order of ``stream``, like PyTorch's allocator; without one nothing may be in flight."""
        _check(-self.lib.fake_free(pointer, stream is not None, stream or 0))

    def write(self, pointer: int, data: Any) -> None:
        """Sets device memory from bytes or an array, outside every order."""
        raw = bytes(data) if isinstance(data, bytes | bytearray | memoryview) else data.tobytes()
        _check(-self.lib.fake_write(pointer, raw, len(raw)))

    def read(self, pointer: int, nbytes: int) -> bytes:
        """Returns device memory as it is now, outside every order."""
        buffer = ctypes.create_string_buffer(nbytes)
        _check(-self.lib.fake_read(pointer, buffer, nbytes))
        return buffer.raw

    # Streams, kernels, graphs; stream 0 is the device's NULL stream

    def stream(self, device: int = 0, blocking: bool = False) -> int:
        """Returns a stream's handle, like ``torch.cuda.Stream.cuda_stream``."""
        handle: int = self.lib.fake_stream(device, blocking)
        assert handle
        return handle

    def kernel(
        self,
        stream: int,
        writes: Sequence[tuple[int, int, int]] = (),
        microseconds: float = 0,
        device: int = 0,
        name: str = "kernel",
        fault: int = 0,
    ) -> None:
        """Launches a kernel that fills ``(pointer, nbytes, byte)`` ranges, or breaks its context with the error
        ``fault``."""
        flat = [number for write in writes for number in write]
        numbers = (ctypes.c_uint64 * len(flat))(*flat)
        _check(-self.lib.fake_kernel(device, stream, name.encode(), microseconds, numbers, len(writes), fault))

    def synchronize(self, device: int = -1, timeout_s: int = 30) -> None:
        """Waits on the host for a device, or for all."""
        _check(-self.lib.fake_synchronize(device, timeout_s))

    def begin_capture(self, stream: int, mode: Capture = Capture.GLOBAL, device: int = 0) -> None:
        _check(-self.lib.fake_begin_capture(device, stream, mode))

    def end_capture(self, stream: int, device: int = 0) -> int:
        """Returns the graph; raises FakeError with code 901 if the capture is broken."""
        return _check(self.lib.fake_end_capture(device, stream))

    def replay(self, graph: int, stream: int, device: int = 0) -> None:
        _check(-self.lib.fake_replay(device, stream, graph))

    # Reports

    def violations(self) -> list[str]:
        """Returns the violations since reset, including those of forked children."""
        text: bytes = self.lib.fake_violations()
        return text.decode().splitlines()

    def forget_violations(self) -> None:
        self.lib.fake_forget_violations()

    def calls(self) -> dict[str, int]:
        """Counts the calls of each function of the driver since reset."""
        counts: dict[str, int] = json.loads(self.lib.fake_calls())
        return counts

    def live(self) -> dict[str, int]:
        """Counts streams, events, registrations, registered bytes and retained contexts that were not returned."""
        counts: dict[str, int] = json.loads(self.lib.fake_live())
        return counts

    def statistics(self) -> dict[str, int]:
        counts: dict[str, int] = json.loads(self.lib.fake_statistics())
        return counts

    def log(self) -> list[Ran]:
        """Returns kernels and copies in the order in which they ended."""
        text: bytes = self.lib.fake_log()
        lines = (line.split(" ", 5) for line in text.decode().splitlines())
        return [Ran(int(a), kind, int(b), int(c), int(d), name) for a, kind, b, c, d, name in lines]

    def context_depth(self) -> int:
        """Returns the depth of the calling thread's stack of contexts."""
        depth: int = self.lib.fake_context_depth()
        return depth
