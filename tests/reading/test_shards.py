"""Parts of saved tensors are read from our files and from plain DCP's, bit for bit, and damage is found."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("this torch has no distributed", allow_module_level=True)

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: E402
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex  # noqa: E402

import lazyckpt  # noqa: E402
from attacks.sharded import published  # noqa: E402
from lazyckpt.errors import CorruptFileError, LoadError, UnsupportedFormatError  # noqa: E402
from lazyckpt.formats.distcp import Place  # noqa: E402
from lazyckpt.reading import shards as reading  # noqa: E402
from lazyckpt.reading.shard_metadata import read_metadata  # noqa: E402
from lazyckpt.reading.shards import Part  # noqa: E402
from lazyckpt.shards import read_parts, write_shard  # noqa: E402

SAVED = {
    "matrix": torch.randn(40, 30),
    "transposed": torch.randn(30, 40).t(),
    "cube": torch.randn(6, 7, 8),
    "scalar": torch.tensor(5),
    "empty": torch.zeros(0, 3),
    "bfloat16": torch.randn(300, 200).bfloat16(),
    "complex": torch.randn(5, 4, dtype=torch.complex64),
    "sparse": torch.eye(4).to_sparse(),
}


@pytest.fixture(scope="module", params=["ours", "plain"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Place]]:
    """A file with all of them, and where each is."""
    folder = tmp_path_factory.mktemp("saved")
    if request.param == "ours":
        return folder / "a.distcp", dict(write_shard(SAVED.items(), folder, "a.distcp", target=folder))
    dense = {name: tensor for name, tensor in SAVED.items() if not tensor.is_sparse}  # DCP asks for strides
    dcp.save(dense, checkpoint_id=folder)
    items = read_metadata(folder / ".metadata").storage_data
    return folder / "__0_0.distcp", {index.fqn: Place(info.offset, info.length) for index, info in items.items()}


def target(shape: list[int], dtype: torch.dtype, how: str) -> torch.Tensor:
    if how == "gaps" and shape:
        return torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]
    return torch.zeros(shape, dtype=dtype).conj() if how == "conjugate" else torch.zeros(shape, dtype=dtype)


@given(data=st.data())
def test_any_part_lands_in_any_tensor(saved: tuple[Path, dict[str, Place]], data: st.DataObject) -> None:
    path, places = saved
    parts, expected = [], []
    for name in data.draw(st.lists(st.sampled_from(sorted(places.keys() - {"sparse"})), min_size=1, max_size=5)):
        tensor = SAVED[name]
        offsets, shape = [], []
        for size in tensor.shape:
            offsets.append(data.draw(st.integers(0, size)))
            shape.append(data.draw(st.integers(0, size - offsets[-1])))
        dtype = data.draw(st.sampled_from([tensor.dtype, torch.float64 if not tensor.is_complex() else tensor.dtype]))
        how = data.draw(st.sampled_from(["plain", "gaps", "conjugate"]))
        parts.append(Part(name, places[name], tuple(offsets), target(shape, dtype, how)))
        for dimension, (begin, n) in enumerate(zip(offsets, shape, strict=True)):
            tensor = tensor.narrow(dimension, begin, n)
        expected.append(tensor.to(dtype))
    read_parts(path, parts)
    for part, wanted in zip(parts, expected, strict=True):
        assert torch.equal(part.target.resolve_conj(), wanted), part


def test_whole_items_of_ours_are_read_in_one_piece_and_others_step_by_step(
    saved: tuple[Path, dict[str, Place]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, places = saved
    stepwise: list[str] = []
    parse = reading._parse
    monkeypatch.setattr(reading, "_parse", lambda file, part: stepwise.append(part.name) or parse(file, part))
    names = ["matrix", "cube", "scalar", "bfloat16", "complex"]
    parts = [Part(n, places[n], (0,) * SAVED[n].dim(), torch.zeros_like(SAVED[n])) for n in names]
    read_parts(path, parts)
    assert all(torch.equal(part.target, SAVED[part.name]) for part in parts)
    assert stepwise == ([] if path.name == "a.distcp" else names)


def test_every_bit_of_an_item_is_checked_although_it_is_read_in_one_piece(tmp_path: Path) -> None:
    """Those of the padding between records, too: then it is not what lazyckpt writes, and is read step by step."""
    tensor = torch.arange(5000.0)
    place = write_shard([("tensor", tensor)], tmp_path, "a.distcp", target=tmp_path)["tensor"]
    sound = (tmp_path / "a.distcp").read_bytes()
    for at in (*range(80), *range(80, place.nbytes, 997), *range(place.nbytes - 300, place.nbytes)):
        damaged = bytearray(sound)
        damaged[place.offset + at] ^= 16
        (tmp_path / "a.distcp").write_bytes(damaged)
        found = torch.zeros(5000)
        try:
            read_parts(tmp_path / "a.distcp", [Part("tensor", place, (0,), found)])
        except (CorruptFileError, UnsupportedFormatError):
            continue
        assert torch.equal(found, tensor), at  # a field that says nothing


def test_a_sparse_tensor_is_read_whole(saved: tuple[Path, dict[str, Place]]) -> None:
    path, places = saved
    if "sparse" in places:
        at = torch.zeros(4, 4).to_sparse()
        read_parts(path, [Part("sparse", places["sparse"], (0, 0), at)])
        assert torch.equal(at.to_dense(), torch.eye(4))


def test_a_shard_along_the_first_dimension_reads_no_other_bytes(
    saved: tuple[Path, dict[str, Place]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, places = saved
    ranges: list[Any] = []

    class Recording(reading.ParallelRead):
        def __init__(self, path: Any, records: Any, engine: Any) -> None:
            ranges.extend(records)
            super().__init__(path, records, engine)

        def read_into(self, pointers: list[int], ordinals: list[int] | None = None) -> list[int]:
            assert pointers == [at.data_ptr()]
            return super().read_into(pointers, ordinals)

    monkeypatch.setattr(reading, "ParallelRead", Recording)
    at = torch.zeros(10, 30)
    read_parts(path, [Part("matrix", places["matrix"], (20, 0), at)])
    assert [record.nbytes for record in ranges] == [at.nbytes]
    assert torch.equal(at, SAVED["matrix"][20:30])


@pytest.mark.parametrize(
    ("offsets", "shape"),
    [((0,), (40,)), ((1, 0), (40, 30)), ((0, -1), (1, 1)), ((0, 0, 0), (1, 1, 1)), ((0, 29), (1, 2))],
)
def test_a_part_that_is_not_there_is_refused(
    offsets: tuple[int, ...], shape: tuple[int, ...], saved: tuple[Path, dict[str, Place]]
) -> None:
    path, places = saved
    with pytest.raises(CorruptFileError, match="matrix"):
        read_parts(path, [Part("matrix", places["matrix"], offsets, torch.zeros(shape))])


def test_every_damaged_byte_of_a_tensor_is_found(saved: tuple[Path, dict[str, Place]], tmp_path: Path) -> None:
    path, places = saved
    data = path.read_bytes()
    begin = data.index(SAVED["matrix"].numpy().tobytes())
    for at in (begin, begin + 2000, begin + SAVED["matrix"].nbytes - 1):
        damaged = tmp_path / "damaged"
        damaged.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(CorruptFileError, match=r"damaged.*matrix"):
            read_parts(damaged, [Part("matrix", places["matrix"], (0, 0), torch.zeros(40, 30))])


def test_a_cut_off_file_is_refused(saved: tuple[Path, dict[str, Place]], tmp_path: Path) -> None:
    path, places = saved
    data = path.read_bytes()
    for end in (1, len(data) // 2, len(data) - 1):
        (tmp_path / "cut").write_bytes(data[:end])
        parts = [Part(name, places[name], (0,) * SAVED[name].dim(), SAVED[name].clone()) for name in places]
        with pytest.raises(CorruptFileError):
            read_parts(tmp_path / "cut", parts)


# .metadata


def metadata_with(info: Any, **others: Any) -> bytes:
    return pickle.dumps(Metadata({}, storage_data={MetadataIndex("w"): info}, **others))


def transformed(info: _StorageInfo) -> _StorageInfo:
    """As a newer torch pickles it; the class of torch 2.6 has no such field."""
    vars(info)["transform_descriptors"] = ["zstd"]
    return info


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", LoadError),
        (b"junk", CorruptFileError),
        (pickle.dumps({"a": 1}), CorruptFileError),
        (pickle.dumps(Metadata({})), UnsupportedFormatError),
        (pickle.dumps(Metadata([])), CorruptFileError),  # type: ignore[arg-type]
        (metadata_with(_StorageInfo("../secret", 0, 1)), CorruptFileError),
        (metadata_with(_StorageInfo("/etc/passwd", 0, 1)), CorruptFileError),
        (metadata_with(_StorageInfo("a", "0", 1)), CorruptFileError),  # type: ignore[arg-type]
        (metadata_with("elsewhere"), UnsupportedFormatError),
        (metadata_with(transformed(_StorageInfo("a", 0, 1))), UnsupportedFormatError),
        (b"cposix\nsystem\n(S'true'\ntR.", UnsupportedFormatError),
        (b"cbuiltins\ngetattr\n.", UnsupportedFormatError),
        (b"ctorch\nload\n.", UnsupportedFormatError),
        (b"ctorch.serialization\n_get_layout\n(S'torch.load'\ntR.", CorruptFileError),
    ],
)
def test_metadata_that_is_not_what_it_should_be_is_refused(
    content: bytes, what: type[Exception], tmp_path: Path
) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(what, match="metadata"):
        read_metadata(tmp_path / ".metadata")


@pytest.mark.parametrize(
    "name",
    [
        "torch.distributed.checkpoint.metadata\nMetadata",
        "torch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING",
        "torch.serialization\n_get_layout",
        "pathlib\nPosixPath",
        "torch\nSize",
        "torch\nfloat32",
    ],
)
def test_a_pickle_changes_no_class(name: str, tmp_path: Path) -> None:
    """BUILD sets attributes of whatever a pickle names."""
    (tmp_path / ".metadata").write_bytes(f"c{name}\n".encode() + b"(N}S'marked'\nI1\nstb.")
    with pytest.raises(LoadError):
        read_metadata(tmp_path / ".metadata")
    for kind in (Metadata, dcp.metadata._MEM_FORMAT_ENCODING, torch.serialization._get_layout, Path, torch.Size):
        assert not hasattr(kind, "marked")


@pytest.mark.parametrize("kind", ["of DCP", "of a run"])
def test_a_flipped_bit_of_the_metadata_is_found(kind: str, tmp_path: Path) -> None:
    """Regression: one in 25 gave other names or values, and nobody was told."""
    from lazyckpt.integrations.dcp import LazyStorageWriter

    folder = tmp_path / "saved"
    dcp.save({"model": {"w": torch.ones(3)}, "lr": 1e-8}, storage_writer=LazyStorageWriter(folder))
    if kind == "of a run":
        published(folder)
    file = folder / ".metadata"
    good = file.read_bytes()
    for at in range(len(good)):
        file.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        try:
            assert lazyckpt.load(folder) == {"model": {"w": Equal()}, "lr": 1e-8}
            assert kind == "of DCP" and at >= len(good) - 23  # only what says where the checksum is
        except CorruptFileError as error:
            assert "checksum" in str(error), str(error)


class Equal:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Tensor) and torch.equal(other, torch.ones(3))
