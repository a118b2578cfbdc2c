"""A ``.distcp`` file is archives of ``torch.save`` at known places, each whole by itself."""

from __future__ import annotations

import io
import tempfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyckpt.errors import LoadError
from lazyckpt.formats import distcp
from lazyckpt.formats.distcp import Place
from lazyckpt.formats.program import PAGE_BYTES
from lazyckpt.formats.reader import FileReader
from lazyckpt.providers.plain_tensors import tensor_pickle
from programs import run_program

SIZES = [0, 1, 63, 4096, 64 * 1024 - 1, 64 * 1024, 300_000]


def pickle_of(nbytes: int) -> bytes:
    return tensor_pickle(torch.uint8, (nbytes,), (1,), nbytes, distcp.STORAGE_KEY)


def make(sizes: list[int], contents: list[bytes]) -> tuple[bytes, list[Place], list[bytes]]:
    """A file, the places of its items, and the bytes of its tensors."""
    sources = [bytes([1 + number % 255]) * nbytes for number, nbytes in enumerate(sizes)]
    layout = distcp.Layout([(nbytes, pickle_of(nbytes)) for nbytes in sizes])
    tail, places = layout.finish(contents)
    with tempfile.NamedTemporaryFile() as file:
        run_program(Path(file.name), [*layout.head, *tail], sources)
        return file.read(), [*layout.places, *places], sources


@settings(deadline=None)
@given(st.lists(st.sampled_from(SIZES), max_size=6), st.lists(st.binary(min_size=1, max_size=5000), max_size=3))
def test_torch_loads_each_item_from_its_place(sizes: list[int], contents: list[bytes]) -> None:
    data, places, sources = make(sizes, contents)
    for place, source in zip(places, sources, strict=False):
        assert place.offset % PAGE_BYTES == 0
        item = io.BytesIO(data[place.offset : place.offset + place.nbytes])
        loaded = torch.load(item, weights_only=True)
        assert loaded.numpy().tobytes() == source
    for place, content in zip(places[len(sizes) :], contents, strict=True):
        assert data[place.offset : place.offset + place.nbytes] == content


@settings(deadline=None)
@given(st.lists(st.sampled_from([size for size in SIZES if size]), min_size=1, max_size=6))
def test_a_frame_is_what_an_item_holds_around_its_tensor(sizes: list[int]) -> None:
    data, places, sources = make(sizes, [])
    for place, source in zip(places, sources, strict=True):
        frame = distcp.frame_of(len(source), pickle_of(len(source)))
        assert frame.head + source + frame.tail(zlib.crc32(source)) == data[place.offset :][: place.nbytes]
        assert (frame.nbytes, frame.tail_bytes) == (place.nbytes, len(frame.tail(0)))


def test_large_tensors_begin_on_a_page_of_the_file(tmp_path: Path) -> None:
    data, places, _ = make(SIZES, [])
    (tmp_path / "f").write_bytes(data)
    with FileReader(tmp_path / "f") as file:
        for nbytes, place in zip(SIZES, places, strict=True):
            record = distcp.item_directory(file, place).records["data/0"]
            assert record.nbytes == nbytes
            assert nbytes < 64 * 1024 or record.offset % PAGE_BYTES == 0


def test_what_is_known_before_the_bytes_depends_on_sizes_only() -> None:
    first, second = make(SIZES, [b"x"]), make(SIZES, [b"y" * 9])
    assert first[1][: len(SIZES)] == second[1][: len(SIZES)]


@pytest.mark.parametrize("size", [63, 64 * 1024])
def test_every_other_place_is_refused(size: int, tmp_path: Path) -> None:
    data, places, _ = make([size, size], [b"not an archive"])
    (tmp_path / "f").write_bytes(data)
    offset, nbytes = places[1]
    with FileReader(tmp_path / "f") as file:
        distcp.item_directory(file, places[1])
        for wrong in (
            Place(offset, nbytes - 1),
            Place(offset + 1, nbytes),
            Place(offset, len(data)),
            Place(offset, 0),
            Place(-1, nbytes),
            Place(0, offset + nbytes),  # two archives
            Place(len(data) + 5, nbytes),
            places[2],
        ):
            with pytest.raises(LoadError):
                distcp.item_directory(file, wrong)


@pytest.mark.parametrize("before", [b"", b"x", b"x" * 100])
def test_a_stamp_tells_saves_apart_and_other_files_have_none(tmp_path: Path, before: bytes) -> None:
    stamp = distcp.stamp_of("run/1/2")
    assert stamp != distcp.stamp_of("run/1/3")
    (tmp_path / "ours").write_bytes(before + stamp + b"behind")
    with FileReader(tmp_path / "ours") as file:
        assert distcp.stamp_before(file, file.size - len(b"behind")) == stamp
        assert all(distcp.stamp_before(file, end) is None for end in range(-30, file.size - len(b"behind")))
