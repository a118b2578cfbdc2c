"""``Engine.capture`` takes all eager bytes in one call, or watches those that are left."""

from __future__ import annotations

import errno
from array import array
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lazyckpt import _engine
from lazyckpt.formats.program import CRC32_LE, LITERAL, SOURCE
from trials import TORTURE
from watched import PAGE, Memory, is_protected, make_engine

pytestmark = pytest.mark.skipif(bool(_engine.page_witness()), reason=f"no page witness: {_engine.page_witness()}")

Program = list[tuple[int, int, array, bytes, int]]  # as Engine.capture takes it


def program_of(data: st.DataObject, sources: list[Memory]) -> Program:
    """Every source in the order given, with texts and checksums between them."""
    rows: list[int] = []
    blob = bytes(9000)
    for at, source in enumerate(sources):
        if text := data.draw(st.sampled_from([0, 64, 1000, PAGE, 9000])):
            rows += (LITERAL, text, 0)
        rows += (SOURCE, source.size, at)
        if data.draw(st.booleans()):
            rows += (CRC32_LE, 4, at)
    return [(0, 0, array("q", rows), blob, 0)]


def capture(engine: _engine.Engine, sources: list[Memory], lazy: list[bool], program: Program) -> _engine.Job:
    addresses, sizes = ([getattr(source, name) for source in sources] for name in ("address", "size"))
    return engine.capture(array("Q", addresses), array("Q", sizes), array("Q", lazy), 1, program, None, None)


def is_safe(
    engine: _engine.Engine,
    sources: list[Memory],
    lazy: list[bool],
    program: Program,
    path: Path,
    before: _engine.Job | None = None,
) -> bool:
    """Whether the engine found room for all eager bytes. Writes to them behind the call, and fails if the write is in
    the file. ``before`` leaves the ring after that."""
    eager = [source for source, is_lazy in zip(sources, lazy, strict=True) if not is_lazy]
    for source in sources:
        source.array[:] = 1
    job = capture(engine, sources, lazy, program)
    untouched = not any(any(is_protected(source)) for source in eager)
    for source in eager:
        source.array[:] = 7
    if before is not None:
        before.fail(errno.ECANCELED, "done")
    job.go()
    path.unlink(missing_ok=True)
    job.open(0, path, sum(program[0][2][1::3]))
    assert job.wait_eager(30) and job.wait_released(30) and job.wait_settled(30)
    torn = job.torn()
    assert torn or b"\7\7\7" not in path.read_bytes()
    return untouched and not torn


@pytest.mark.parametrize("pages", range(9, 20))
def test_eager_bytes_that_wait_for_a_lazy_checksum_need_room_for_lazy_bytes(pages: int, tmp_path: Path) -> None:
    """They share a chunk with the checksum, which is known when the lazy bytes were copied."""
    sizes, lazy = (2 * PAGE, 2 * PAGE, 2 * PAGE, 20_077, 14_624), [False, False, False, True, False]
    rows = [number for at, size in enumerate(sizes) for number in (SOURCE, size, at)]
    rows[12:12] = CRC32_LE, 4, 3
    engine = make_engine(chunk_bytes=PAGE, ring_bytes=pages * PAGE)
    assert engine.reserve(pages * PAGE)
    is_safe(engine, list(map(Memory.of, sizes)), lazy, [(0, 0, array("q", rows), b"", 0)], tmp_path / "a")


@settings(
    max_examples=400 if TORTURE else 25, deadline=None, derandomize=not TORTURE, phases=[Phase.explicit, Phase.generate]
)
@given(data=st.data())
def test_no_write_behind_it_reaches_the_file(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With every size of the ring, from one that is too small to one in which all eager bytes fit: a write to eager
    memory is too late, or it fails the checkpoint."""
    chunk = data.draw(st.sampled_from([PAGE, 2 * PAGE, 7 * PAGE]))
    count = data.draw(st.integers(1, 8))
    sources = [Memory.of(data.draw(st.integers(2 * PAGE, 9 * PAGE))) for _ in range(count)]
    lazy = [data.draw(st.booleans()) for _ in sources]
    program = program_of(data, sources)
    eager = sum(source.size for source, is_lazy in zip(sources, lazy, strict=True) if not is_lazy)
    occupied = data.draw(st.booleans())
    least = max(eager // PAGE * PAGE - 2 * PAGE, 2 * chunk)
    path = tmp_path_factory.mktemp("file") / "a"
    for ring in range(least, least + 4 * chunk + 60 * PAGE, PAGE):
        engine = make_engine(chunk_bytes=chunk, ring_bytes=ring)
        assert engine.reserve(ring)
        before = None
        if occupied:  # without a file, it stays in the ring
            other = Memory.of(PAGE)
            before = capture(engine, [other], [False], [(0, 0, array("q", (SOURCE, other.size, 0)), b"", 0)])
        if is_safe(engine, sources, lazy, program, path, before):
            return
    assert not eager, "the ring holds everything"
