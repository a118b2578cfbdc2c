"""Sources that are float32 in memory and bfloat16 in the file."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyckpt import _engine
from lazyckpt.formats.program import CRC32_LE, LITERAL, SOURCE

WATCHES = not _engine.page_witness()
CHUNK = 64 << 10


def special(count: int) -> torch.Tensor:
    """Values of every kind: NaNs with payloads, infinities, subnormals, ties, and random bits."""
    torch.manual_seed(count)
    bits = torch.randint(-(1 << 31), 1 << 31, (count,), dtype=torch.int64)
    known = [0x7F800001, 0xFFC12345, 0x7F800000, 0xFF800000, 1, 0x80000001, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0]
    bits[: len(known)] = torch.tensor(known)[:count]
    return bits.to(torch.int32).view(torch.float32)


def save(
    path: Path, tensors: list[torch.Tensor], casts: list[int], *, lazy: bool, watch: bool, prefix: bytes = b""
) -> _engine.Job:
    engine = _engine.Engine(ring_bytes=8 * CHUNK, chunk_bytes=CHUNK, io_depth=2, copy_threads=1, watch_pages=watch)
    sizes = [t.nbytes // (2 if at in casts else 1) for at, t in enumerate(tensors)]
    job = engine.begin(
        array("Q", [t.data_ptr() for t in tensors]),
        array("Q", sizes),
        array("Q", [int(lazy)] * len(tensors)),
        1,
        False,
        to_bfloat16=casts,
    )
    rows = [LITERAL, len(prefix), 0] if prefix else []
    for at, size in enumerate(sizes):
        rows += [SOURCE, size, at] if size else []
        rows += [CRC32_LE, 4, at]
    job.append(0, 0, array("q", rows), prefix)
    job.seal()
    job.open(0, path, len(prefix) + sum(sizes) + 4 * len(sizes))
    assert job.wait_settled(30)
    return job


@pytest.mark.parametrize(
    "watch", [False, pytest.param(True, marks=pytest.mark.skipif(not WATCHES, reason="no witness"))]
)
@pytest.mark.parametrize("lazy", [False, True])
@given(counts=st.lists(st.integers(1, 100_000), min_size=1, max_size=4), casts=st.sets(st.integers(0, 3)))
@settings(max_examples=25, deadline=None)
def test_the_file_holds_what_torch_makes_of_it(
    lazy: bool, watch: bool, counts: list[int], casts: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    tensors = [special(count) for count in counts]
    chosen = sorted(at for at in casts if at < len(tensors))
    path = tmp_path_factory.mktemp("cast") / "file"
    job = save(path, tensors, chosen, lazy=lazy, watch=watch)
    job.raise_error()
    data = path.read_bytes()
    assert job.files() == [(len(data), _engine.crc32(data))]
    at = 0
    for number, tensor in enumerate(tensors):
        expected = tensor.bfloat16() if number in chosen else tensor
        found = torch.frombuffer(bytearray(data[at : at + expected.nbytes]), dtype=expected.dtype)
        assert torch.equal(found.isnan(), expected.isnan())  # whose payload is up to torch's vector unit
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())
        end = at + expected.nbytes
        assert data[end : end + 4] == _engine.crc32(data[at:end]).to_bytes(4, "little")
        at = end + 4


@pytest.mark.skipif(not WATCHES, reason="no page witness")
def test_a_write_to_any_page_before_the_copy_fails_the_job(tmp_path: Path) -> None:
    for place in (5000, 60_000, 190_000):  # the second half of the memory is watched, too
        tensor = special(200_000)
        engine = _engine.Engine(ring_bytes=2 * CHUNK, chunk_bytes=CHUNK, io_depth=2, copy_threads=1, watch_pages=True)
        job = engine.begin(
            array("Q", [tensor.data_ptr()]), array("Q", [400_000]), array("Q", [1]), 1, True, to_bfloat16=[0]
        )
        job.append(0, 0, array("q", [SOURCE, 400_000, 0]), b"")
        job.seal()
        tensor[place] = 1.0
        job.wait_eager()
        job.go()
        job.open(0, tmp_path / str(place), 400_000)
        assert job.wait_released(30) and job.wait_settled(30) and job.torn() == [0]


def test_no_chunk_cuts_a_value(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="program"):
        save(tmp_path / "file", [special(100_000)], [0], lazy=False, watch=False, prefix=b"x").raise_error()
