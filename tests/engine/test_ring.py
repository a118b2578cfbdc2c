"""The staging ring never hands out memory in use and always hands out free memory."""

from __future__ import annotations

import itertools
import random
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from lazyckpt import _engine
from lazyckpt.formats.program import CRC32_LE, SOURCE
from trials import TORTURE

BLOCK = 4096


def rounded(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


class RingModel(RuleBasedStateMachine):
    """Compares random allocations and frees with a model of the ring."""

    regions = Bundle("regions")

    def __init__(self) -> None:
        super().__init__()
        self.ring: _engine.Ring | None = None
        self.live: dict[int, int] = {}  # offset -> bytes, in the order of allocation

    @rule(blocks=st.integers(1, 24), slice_blocks=st.integers(1, 24))
    @precondition(lambda self: self.ring is None)
    def create(self, blocks: int, slice_blocks: int) -> None:
        self.capacity = blocks * BLOCK
        self.slice = slice_blocks * BLOCK
        self.ring = _engine.Ring(self.capacity, self.slice)

    @rule(target=regions, nbytes=st.integers(1, 12 * BLOCK))
    @precondition(lambda self: self.ring is not None)
    def allocate(self, nbytes: int) -> int | None:
        assert self.ring is not None
        offset = self.ring.allocate(nbytes)
        if offset is None:
            # An empty ring refuses only sizes that never fit.
            assert self.live or rounded(nbytes) > min(self.capacity, self.slice)
            return None
        end = offset + rounded(nbytes)
        assert offset % BLOCK == 0
        assert end <= self.capacity
        assert offset // self.slice == (end - 1) // self.slice, "crosses a slice"
        for other, size in self.live.items():
            assert end <= other or other + size <= offset, "overlaps a live region"
        self.live[offset] = rounded(nbytes)
        return offset

    @rule(offset=consumes(regions))
    def free(self, offset: int | None) -> None:
        if offset is not None:
            assert self.ring is not None
            self.ring.free(offset)
            del self.live[offset]

    @rule(size=st.integers(12 * BLOCK + 1, 1 << 62))
    @precondition(lambda self: self.ring is not None)
    def too_large(self, size: int) -> None:
        assert self.ring is not None
        if size > min(self.capacity, self.slice):
            assert self.ring.allocate(size) is None

    @invariant()
    def accounts(self) -> None:
        if self.ring is not None:
            assert sum(self.live.values()) <= self.ring.used <= self.capacity
            assert self.live or self.ring.used == 0, "space does not come back"


RingModel.TestCase.settings = settings(max_examples=300 if TORTURE else 60, stateful_step_count=60, deadline=None)
test_random_allocations = RingModel.TestCase


@given(
    blocks=st.integers(2, 40),
    slice_blocks=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 8 * BLOCK), min_size=1, max_size=80),
)
@example(blocks=4, slice_blocks=4, sizes=[3 * BLOCK, 2 * BLOCK, 3 * BLOCK])
@settings(max_examples=300 if TORTURE else 100, deadline=None)
def test_first_in_first_out_never_gets_stuck(blocks: int, slice_blocks: int, sizes: list[int]) -> None:
    """Freeing the oldest region and retrying makes room for every size that fits an empty ring."""
    ring = _engine.Ring(blocks * BLOCK, slice_blocks * BLOCK)
    live: list[int] = []
    for size in sizes:
        if rounded(size) > min(blocks, slice_blocks) * BLOCK:
            continue
        while (offset := ring.allocate(size)) is None:
            ring.free(live.pop(0))
        live.append(offset)
    random.Random(0).shuffle(live)
    for offset in live:
        ring.free(offset)
    assert ring.used == 0


def test_wraps_while_the_oldest_region_is_live() -> None:
    """In DataStates' code the second region after a wrap overlapped the live one."""
    ring = _engine.Ring(8 * BLOCK, 8 * BLOCK)
    a, b, c = (ring.allocate(2 * BLOCK), ring.allocate(3 * BLOCK), ring.allocate(2 * BLOCK))
    assert (a, b, c) == (0, 2 * BLOCK, 5 * BLOCK)
    ring.free(a)
    assert ring.allocate(2 * BLOCK) == 0  # one block at the end is too little
    assert ring.allocate(1) is None  # [0, 2) and [2, 5) are live
    ring.free(c)  # out of order: b still holds the space behind it
    assert ring.allocate(1) is None
    ring.free(b)
    assert ring.allocate(3 * BLOCK) == 2 * BLOCK


def test_uses_every_byte_of_its_capacity() -> None:
    ring = _engine.Ring(16 * BLOCK, 4 * BLOCK)
    offsets = [ring.allocate(2 * BLOCK) for _ in range(9)]
    assert offsets == [*range(0, 16 * BLOCK, 2 * BLOCK), None]
    assert ring.used == 16 * BLOCK
    for lap in itertools.chain(*[range(8)] * 5):
        ring.free(lap * 2 * BLOCK)
        assert ring.allocate(2 * BLOCK) == lap * 2 * BLOCK


@pytest.mark.parametrize("backend", ["io_uring", "posix"])
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_checkpoints_in_flight_share_a_wrapping_ring(backend: str, seed: int, tmp_path: Path) -> None:
    """Several jobs, each many times the ring, are in flight at once. Every byte of every file is right."""
    rng = np.random.default_rng(seed)
    engine = _engine.Engine(ring_bytes=5 * BLOCK, chunk_bytes=2 * BLOCK, io_depth=3, copy_threads=2, backend=backend)
    jobs = []
    for number in range(4):
        sources = [rng.integers(0, 256, int(rng.integers(1, 8 * BLOCK)), np.uint8) for _ in range(6)]
        rows = array("q")
        for index, source in enumerate(sources):
            rows.extend((SOURCE, source.nbytes, index, CRC32_LE, 4, index))
        job = engine.begin(
            array("Q", [s.ctypes.data for s in sources]),
            array("Q", [s.nbytes for s in sources]),
            array("Q", [index % 3 for index in range(6)]),
            1,
        )
        job.append(0, 0, rows, b"")
        job.seal()
        jobs.append((job, sources, tmp_path / f"{seed}-{number}"))
    # Open the files in another order: their bytes wait in the ring, and other bytes wait for the ring.
    for job, sources, path in jobs:
        job.open(0, str(path), sum(s.nbytes + 4 for s in sources))
    for job, sources, path in jobs:
        assert job.wait_settled(60)
        job.raise_error()
        expected = b"".join(s.tobytes() + _engine.crc32(s).to_bytes(4, "little") for s in sources)
        assert path.read_bytes() == expected
        assert job.files() == [(len(expected), _engine.crc32(expected))]
        path.unlink()
    assert engine.ring_used_bytes == 0
