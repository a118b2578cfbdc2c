"""The pass that copies and checksums, byte by byte, in each build of it."""

from __future__ import annotations

import ctypes
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SOURCE = Path(__file__).parents[2] / "csrc" / "engine" / "checksum.cc"
BUILDS = {
    "x86 with libdeflate": ("-DLAZYCKPT_HAVE_LIBDEFLATE", "-ldeflate"),
    "x86 with zlib": (),
    "another processor": ("-U__SSE2__",),
}
PAGE = 4096
Copy = Callable[[int, int, int, int], int]  # CRC so far, to, from, bytes


@pytest.fixture(scope="module", params=BUILDS)
def copy_crc32(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Copy:
    library = tmp_path_factory.mktemp("checksum") / "checksum.so"
    command = (
        "c++",
        "-std=c++20",
        "-O2",
        "-shared",
        "-fPIC",
        f"-I{SOURCE.parent.parent}",
        SOURCE,
        "-o",
        library,
        *BUILDS[request.param],
        "-lz",
    )
    subprocess.run(list(map(str, command)), check=True, timeout=60)
    # CopyCrc32(uint32_t, void*, const void*, size_t)
    function = ctypes.CDLL(str(library))["_ZN8lazyckpt9CopyCrc32EjPvPKvm"]
    function.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_uint32
    return function  # type: ignore[no-any-return]


@given(
    size=st.one_of(st.integers(0, 200), st.integers(0, 5 * PAGE), st.integers(2**18 - 70, 2**18 + 70)),
    to=st.integers(0, 130),
    source=st.integers(0, 130),
    so_far=st.binary(max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=200, deadline=None)
def test_every_byte_arrives_and_none_beside(
    copy_crc32: Copy, size: int, to: int, source: int, so_far: bytes, seed: int
) -> None:
    random = np.random.default_rng(seed)
    given = random.integers(0, 256, source + size, np.uint8)  # which may end with a page
    found = random.integers(0, 256, to + size + 100, np.uint8)
    expected = found.copy()
    expected[to : to + size] = given[source:]
    crc = copy_crc32(zlib.crc32(so_far), found.ctypes.data + to, given.ctypes.data + source, size)
    assert np.array_equal(found, expected)
    assert crc == zlib.crc32(so_far + given[source:].tobytes())


def test_a_source_at_the_end_of_memory(copy_crc32: Copy) -> None:
    """Prefetching beyond the source must not fault."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    begin = libc.mmap(None, 4 * PAGE, 3, 0x22, -1, 0)  # readable and writable, private, of no file
    try:
        assert libc.mprotect(begin + 3 * PAGE, PAGE, 0) == 0
        ctypes.memset(begin, 7, 3 * PAGE)
        copy = np.zeros(3 * PAGE, np.uint8)
        assert copy_crc32(0, copy.ctypes.data, begin, 3 * PAGE) == zlib.crc32(b"\7" * 3 * PAGE)
        assert (copy == 7).all()
    finally:
        libc.munmap(begin, 4 * PAGE)
