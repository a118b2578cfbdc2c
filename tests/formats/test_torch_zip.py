"""torch, unzip and zipfile read the archives that we write. We read only archives that are exactly what they claim."""

from __future__ import annotations

import io
import shutil
import struct
import subprocess
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from attacks.zips import CENTRAL, END, LOCAL, patched
from lazyckpt.errors import CorruptFileError, LoadError, UnsupportedFormatError
from lazyckpt.formats import sniff
from lazyckpt.formats.reader import FileReader
from lazyckpt.formats.torch_zip import LOCAL_HEADER, Layout, SmallRecord, small_record, small_records
from lazyckpt.formats.torch_zip_reader import Directory, read_directory
from marks import OFFSETS
from programs import Sparse, run_program

GIB = 2**30


def write_archive(
    path: Path, sources: dict[str, bytes | Sparse], records: list[SmallRecord], name: str = "state"
) -> Layout:
    sizes = tuple(s.nbytes if isinstance(s, Sparse) else len(s) for s in sources.values())
    layout = Layout(name, tuple(sources), sizes)
    tail = layout.finish(records)
    extents = [*layout.head, *tail]
    assert sum(extent.nbytes for extent in layout.head) == layout.head_end == tail[0].offset
    assert [extent.offset for extent in extents] == [0, *(extent.end for extent in extents[:-1])]
    run_program(path, extents, list(sources.values()))
    return layout


def take_apart(obj: object) -> tuple[bytes, dict[str, bytes]]:
    """The pickle and the storages, in torch's order, that torch.save writes for ``obj``."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    with zipfile.ZipFile(buffer) as archive:
        prefix = "archive/data/"
        names = [name for name in archive.namelist() if name.startswith(prefix)]
        storages = {name.removeprefix(prefix): archive.read(name) for name in names}
        return archive.read("archive/data.pkl"), storages


def save(obj: object, path: Path) -> Path:
    pickle, storages = take_apart(obj)
    write_archive(path, dict(storages), small_records(pickle))
    return path


def example() -> dict[str, Any]:
    base = torch.arange(200_000, dtype=torch.float32)
    return {
        "large": base,
        "view": base[7:1007:10],
        "empty": torch.zeros(0, 5),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "bf16": torch.randn(33).bfloat16(),
        "fp8": torch.randn(7).to(torch.float8_e4m3fn),
        "complex": torch.randn(3, dtype=torch.complex64),
        "nan": torch.tensor([0x7FC01234, -1], dtype=torch.int32).view(torch.float32),
        "bool": torch.tensor([True, False]),
        "text": ["some", ("plain", 1.5), None],
    }


def assert_same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if not isinstance(value, torch.Tensor):
            assert found[key] == value
            continue
        assert found[key].dtype == value.dtype and found[key].shape == value.shape
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found[key], value)]
        assert torch.equal(*raw), key


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return save(example(), tmp_path / "state.pt")


# Writing: other readers


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("weights_only", [False, True])
def test_torch_loads_it(archive: Path, mmap: bool, weights_only: bool) -> None:
    torch.manual_seed(0)
    loaded = torch.load(archive, mmap=mmap, weights_only=weights_only)
    assert_same(loaded, example())
    assert loaded["view"].untyped_storage().data_ptr() == loaded["large"].untyped_storage().data_ptr()


@OFFSETS
def test_torch_finds_offsets_without_loading(archive: Path) -> None:
    found = read_directory(archive).records
    with FakeTensorMode():
        fake = torch.load(archive)
    meta = torch.load(archive, map_location="meta")
    _, storages = take_apart(example())
    keys = {key: torch_key for key, torch_key in zip(("large", "empty", "scalar"), storages, strict=False)}
    for key, storage_key in keys.items():
        expected = found[f"data/{storage_key}"].offset
        assert fake[key].untyped_storage()._checkpoint_offset == expected
        assert meta[key].untyped_storage()._checkpoint_offset in (expected, None)  # None until torch 2.10
    assert meta["large"].is_meta


@OFFSETS
def test_torch_must_not_calculate_offsets(archive: Path) -> None:
    """Regression: with the record .format_version, torch loaded wrong tensors from this order."""
    from torch.utils.serialization import config

    torch.manual_seed(0)
    with config.patch("load.calculate_storage_offsets", True):
        assert_same(torch.load(archive, mmap=True), example())
    assert not any("format_version" in name or "alignment" in name for name in read_directory(archive).records)


def test_zip_tools_read_it(archive: Path) -> None:
    with zipfile.ZipFile(archive) as file:
        assert file.testzip() is None
        assert all(info.filename.startswith("state/") for info in file.infolist())
    assert_unzip_agrees(archive)


def assert_unzip_agrees(path: Path) -> None:
    unzip = shutil.which("unzip")
    if unzip is None:
        pytest.skip("unzip is not installed")
    done = subprocess.run([unzip, "-tqq", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_data_is_aligned(archive: Path) -> None:
    records = read_directory(archive).records
    assert any(record.nbytes >= 65536 for record in records.values())
    for record in records.values():
        assert record.offset % (4096 if record.nbytes >= 65536 else 64) == 0


@pytest.mark.parametrize("storages", [{}, {"0": b""}, {"0": b"", "1": b""}, {"0": b"", "1": b"x", "2": b""}])
def test_few_or_empty_storages(tmp_path: Path, storages: dict[str, bytes | Sparse]) -> None:
    path = tmp_path / "state.pt"
    pickle, _ = take_apart({"no": "tensors"})
    write_archive(path, storages, small_records(pickle))
    assert torch.load(path) == {"no": "tensors"}
    assert_unzip_agrees(path)
    records = read_directory(path).records
    assert {k: v.nbytes for k, v in records.items() if k.startswith("data/")} == {
        f"data/{key}": len(content) for key, content in storages.items() if isinstance(content, bytes)
    }


def test_more_records_than_a_zip_has_room_for(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    pickle, _ = take_apart([torch.zeros(2), torch.zeros(3)])
    sources: dict[str, bytes | Sparse] = {"0": struct.pack("<2f", 1, 2), "1": struct.pack("<3f", 3, 4, 5)}
    sources |= {str(key): b"%d" % key for key in range(2, 66_000)}
    write_archive(path, sources, small_records(pickle))
    for mmap in (False, True):
        first, second = torch.load(path, mmap=mmap)
        assert first.tolist() == [1, 2] and second.tolist() == [3, 4, 5]
    assert len(read_directory(path).records) == 66_004
    with zipfile.ZipFile(path) as file:
        assert len(file.infolist()) == 66_004 and file.read("state/data/65999") == b"65999"
    assert_unzip_agrees(path)


def large_archive(path: Path) -> bytes:
    """A storage above 4 GiB, and behind it an ordinary one and the small records."""
    large = 4 * GIB + 12345
    with torch.serialization.skip_data():  # a sparse file; only its pickle is needed
        torch.save({"large": torch.empty(large, dtype=torch.uint8), "small": torch.zeros(1)}, path)
    with zipfile.ZipFile(path) as file:
        pickle = file.read(f"{path.stem}/data.pkl")
    page = bytes(range(256)) * 16
    pages = {0: page, 2**32 - 4096: page, 2**32: page[::-1], large - 5: b"tail!"}
    write_archive(path, {"0": Sparse(large, pages), "1": struct.pack("<f", 2.5)}, small_records(pickle))
    return page


def test_storage_above_4_gib(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    page = large_archive(path)
    loaded = torch.load(path, mmap=True)
    large = loaded["large"].untyped_storage()
    assert large.nbytes() == 4 * GIB + 12345 and loaded["small"].item() == 2.5
    assert bytes(large[2**32 - 4096 : 2**32]) == page and bytes(large[2**32 : 2**32 + 4096]) == page[::-1]
    assert bytes(large[large.nbytes() - 5 :]) == b"tail!"
    record = read_directory(path).records["data/0"]
    with zipfile.ZipFile(path) as file:
        info = file.getinfo("state/data/0")
        assert (info.file_size, info.CRC) == (record.nbytes, record.crc32)
        assert file.read("state/data/1") == struct.pack("<f", 2.5)


@pytest.mark.slow
def test_zip_tools_read_a_storage_above_4_gib(tmp_path: Path) -> None:
    large_archive(tmp_path / "state.pt")
    assert_unzip_agrees(tmp_path / "state.pt")
    with zipfile.ZipFile(tmp_path / "state.pt") as file:
        assert file.testzip() is None


@pytest.mark.parametrize("nbytes", [2**32 - 2, 2**32 - 1, 2**32])
def test_the_edge_of_zip64(tmp_path: Path, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sparse, "write", lambda self, file: file.seek(self.nbytes, 1) and 0x12345678)
    write_archive(tmp_path / "x", {"0": Sparse(nbytes, {}), "1": b"abc"}, small_records(b""))
    records = read_directory(tmp_path / "x").records
    assert (records["data/0"].nbytes, records["data/0"].crc32) == (nbytes, 0x12345678)
    with zipfile.ZipFile(tmp_path / "x") as file:
        assert file.getinfo("state/data/0").file_size == nbytes and file.read("state/data/1") == b"abc"


DTYPES = [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.float8_e5m2]
TENSORS = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 300), max_size=2), st.integers(0, 2**31)),
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(TENSORS)
def test_round_trip(specs: list[tuple[torch.dtype, list[int], int]]) -> None:
    state = {}
    for index, (dtype, shape, seed) in enumerate(specs):
        count = int(torch.tensor(shape).prod()) * dtype.itemsize
        noise = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        state[str(index)] = noise.view(dtype).reshape(shape)
    with tempfile.TemporaryDirectory() as folder:
        path = save(state, Path(folder) / "state.pt")
        assert_same(torch.load(path), state)
        _, storages = take_apart(state)
        content = path.read_bytes()
        for key, storage in storages.items():
            record = read_directory(path).records[f"data/{key}"]
            assert content[record.offset : record.offset + record.nbytes] == storage
            assert record.crc32 == zlib.crc32(storage)


# Reading: archives of others


def assert_as_zipfile_sees_it(path: Path) -> Directory:
    directory = read_directory(path)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        assert len(file.infolist()) == len(directory.records)
        for info in file.infolist():
            record = directory.records[info.filename.removeprefix(directory.archive_name + "/")]
            data = content[record.offset : record.offset + record.nbytes]
            assert data == file.read(info) and record.crc32 in (None, zlib.crc32(data))
    return directory


def test_reads_torch_save(tmp_path: Path) -> None:
    path = tmp_path / "of_torch.pt"
    torch.save(example(), path)
    directory = assert_as_zipfile_sees_it(path)
    assert directory.archive_name == "of_torch"
    assert all(record.crc32 is not None for record in directory.records.values())


def test_reads_many_storages_of_torch_save(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save([torch.full((index % 50,), index) for index in range(3000)], buffer)
    (tmp_path / "x").write_bytes(buffer.getvalue())
    assert len(assert_as_zipfile_sees_it(tmp_path / "x").records) > 3000


@OFFSETS
def test_reads_storage_above_4_gib_of_torch_save(tmp_path: Path) -> None:
    with torch.serialization.skip_data():  # sparse
        torch.save([torch.empty(5 * GIB, dtype=torch.uint8), torch.ones(10)], tmp_path / "x")
    records = read_directory(tmp_path / "x").records
    assert records["data/0"].nbytes == 5 * GIB and records["data/0"].crc32 is None
    with FakeTensorMode():
        fake = torch.load(tmp_path / "x")
    for key, tensor in enumerate(fake):
        assert records[f"data/{key}"].offset == tensor.untyped_storage()._checkpoint_offset


@pytest.mark.parametrize("seekable", [True, False])
def test_reads_what_zipfile_stored(archive: Path, tmp_path: Path, seekable: bool) -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return seekable

        def tell(self) -> int:
            if not seekable:
                raise io.UnsupportedOperation
            return super().tell()

    target = Pipe()
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(target, "w") as copy:
        for info in source.infolist():
            with copy.open(info.filename, "w") as record:
                record.write(source.read(info))
    (tmp_path / "copy.pt").write_bytes(target.getvalue())
    assert_as_zipfile_sees_it(tmp_path / "copy.pt")
    torch.load(tmp_path / "copy.pt")


# Reading: damage


def small_archive(path: Path) -> bytes:
    write_archive(path, {"0": b"a" * 100, "1": b"", "2": b"b" * 7}, small_records(b"a pickle"))
    return path.read_bytes()


def replace(path: Path, content: bytes) -> None:
    path.unlink()  # ext4 flushes a file that is truncated and written again: thousands of disk writes
    path.write_bytes(content)


def test_every_truncation_and_extension_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    content = small_archive(path)
    for changed in [*(content[:n] for n in range(len(content))), content + b"\0", b"\0" + content]:
        replace(path, changed)
        with pytest.raises(LoadError):
            read_directory(path)


@pytest.mark.parametrize("writer", ["lazyckpt", "torch"])
def test_every_bit_flip_is_refused_or_found_or_harmless(tmp_path: Path, writer: str) -> None:
    path = tmp_path / "x"
    if writer == "torch":
        torch.save([torch.arange(9), torch.zeros(0)], path)
        content = path.read_bytes()
    else:
        content = small_archive(path)
    expected = read_directory(path).records
    seen = {"refused": 0, "found": 0, "harmless": 0}
    for bit in range(0, 8 * len(content), 7):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        replace(path, changed)
        try:
            records = read_directory(path).records
        except LoadError:
            seen["refused"] += 1
            continue
        assert records == expected, f"bit {bit}"
        damaged = [
            record
            for record in records.values()
            if zlib.crc32(changed[record.offset : record.offset + record.nbytes]) != record.crc32
        ]
        inside = any(r.offset <= bit // 8 < r.offset + r.nbytes for r in records.values())
        assert bool(damaged) == inside
        seen["found" if inside else "harmless"] += 1
    assert all(seen.values()), seen


# Reading: attacks


def with_gap(content: bytes) -> bytes:
    directory = content.index(CENTRAL)
    content = content[:directory] + b"junk" + content[directory:]
    return patched(content, END, 16, struct.pack("<L", directory + 4))


def nested(content: bytes) -> bytes:
    """The second record inside the data of the first. A reader that trusts the directory would accept it."""
    second = content[content.index(LOCAL, 1) :][: LOCAL_HEADER.size + len("state/data/1")]
    second = patched(second, LOCAL, 28, b"\0\0")  # no extra field
    content = patched(content, b"a" * 100, 8, second)
    return patched(content, CENTRAL, 42, struct.pack("<L", content.index(b"a" * 8) + 8), nth=1)


# name -> the change, and the reason that the error must give
ATTACKS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "prefix": (lambda c: b"#!/bin/sh\n" + c, "not a zip archive"),
    "suffix": (lambda c: c + b"junk", "followed by other bytes"),
    "comment": (lambda c: patched(c, END, 20, b"\4\0") + b"junk", "followed by other bytes"),
    "end as comment": (lambda c: patched(c, END, 20, b"\x16\0") + c[-22:], "does not end at"),
    "gap before the directory": (with_gap, "not its descriptor"),
    "compressed": (lambda c: patched(patched(c, LOCAL, 8, b"\x08"), CENTRAL, 10, b"\x08"), "method 8"),
    "encrypted": (lambda c: patched(patched(c, LOCAL, 6, b"\x09"), CENTRAL, 8, b"\x09"), "flags 0x809"),
    "flags differ": (lambda c: patched(c, CENTRAL, 8, b"\0"), "contradicts the directory"),
    "names differ": (lambda c: patched(c, LOCAL, 30, b"statf"), "contradicts the directory"),
    "local size differs": (lambda c: patched(c, LOCAL, 18, struct.pack("<2L", 5, 5)), "contradicts the dir"),
    "same header twice": (lambda c: patched(c, CENTRAL, 42, bytes(4), nth=1), "contradicts the directory"),
    "nested": (nested, "overlaps what follows"),
    "no header there": (lambda c: patched(c, LOCAL, 0, b"QK", nth=1), "no local header"),
    "outside the file": (lambda c: patched(c, CENTRAL, 42, b"\xff\xff\xff\x7f", nth=1), "reach into"),
    "inside the directory": (
        lambda c: patched(c, CENTRAL, 42, struct.pack("<L", c.index(CENTRAL)), nth=1), "reach into",
    ),
    "longer": (lambda c: patched(c, CENTRAL, 20, struct.pack("<2L", 101, 101)), "not its descriptor"),
    "much longer": (lambda c: patched(c, CENTRAL, 20, struct.pack("<2L", 2**31, 2**31)), "overlaps what"),
    "shorter": (lambda c: patched(c, CENTRAL, 20, struct.pack("<2L", 99, 99)), "not its descriptor"),
    "sizes differ": (lambda c: patched(c, CENTRAL, 20, struct.pack("<2L", 99, 100)), "99 bytes stored"),
    "descriptor differs": (lambda c: patched(c, b"PK\7\x08", 8, b"\1"), "not its descriptor"),
    "no zip64 field": (lambda c: patched(c, CENTRAL, 20, b"\xff" * 8), "zip64 extra field"),
    "no zip64 end": (lambda c: patched(c, END, 8, b"\xff" * 4), "65535 entries"),
    "symlink": (lambda c: patched(c, CENTRAL, 38, struct.pack("<L", 0o120777 << 16)), "not a plain file"),
    "two disks": (lambda c: patched(c, END, 4, b"\1"), "several disks"),
    "absurd count": (lambda c: patched(c, END, 8, b"\xfe\xff\xfe\xff"), "65534 entries"),
    "too few entries": (lambda c: patched(c, END, 8, b"\1\0\1\0"), "behind the last entry"),
    "no entries": (lambda c: patched(c, END, 8, bytes(4)), "0 entries"),
    "entry comment": (lambda c: patched(c, CENTRAL, 32, b"\1"), "entry 0: damaged"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_are_refused(tmp_path: Path, attack: str) -> None:
    content = small_archive(tmp_path / "x")
    change, reason = ATTACKS[attack]
    (tmp_path / "x").write_bytes(change(content))
    with pytest.raises((CorruptFileError, UnsupportedFormatError), match=reason):
        read_directory(tmp_path / "x")


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/evil", "a//b", "./a", "a\\b", "a\0b", "folder/"])
def test_unsafe_names_are_refused(tmp_path: Path, name: str) -> None:
    write_archive(tmp_path / "x", {}, [small_record("data.pkl", b""), small_record(name, b"")])
    with pytest.raises(CorruptFileError, match="unsafe record name"):
        read_directory(tmp_path / "x")


@pytest.mark.parametrize("name", ["data.pkl", "DATA.PKL"])
def test_names_twice_are_refused(tmp_path: Path, name: str) -> None:
    write_archive(tmp_path / "x", {}, [small_record("data.pkl", b"benign"), small_record(name, b"evil")])
    with pytest.raises(CorruptFileError, match="same name"):
        read_directory(tmp_path / "x")


def zip64_ends(count: int, nbytes: int, offset: int, zip64: dict[str, int]) -> bytes:
    """The end records of a directory at ``offset``. ``zip64`` overrides fields of the zip64 ones."""
    told = {"count": count, "nbytes": nbytes, "offset": offset, "rest": 44, "at": offset + nbytes, "disks": 1}
    told |= zip64
    long = struct.pack(
        "<4sQ2H2L4Q", b"PK\6\6", told["rest"], 45, 45, 0, 0, told["count"], told["count"], told["nbytes"],
        told["offset"],
    )  # fmt: skip
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, told["at"], told["disks"])
    return long + locator + struct.pack("<4s4H2LH", END, 0, 0, count, count, nbytes, offset, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": 2},
        {"count": 2**60},
        {"nbytes": 2**63},
        {"offset": 2**64 - 1},
        {"rest": 45},
        {"at": 0},
        {"disks": 2},
    ],
)
def test_zip64_end_that_contradicts_is_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    content = small_archive(tmp_path / "x")
    _, _, _, count, _, nbytes, offset, _ = struct.unpack("<4s4H2LH", content[-22:])
    for override in ({}, wrong):
        (tmp_path / "x").write_bytes(content[:-22] + zip64_ends(count, nbytes, offset, override))
        if override:
            with pytest.raises(CorruptFileError):
                read_directory(tmp_path / "x")
        else:
            read_directory(tmp_path / "x")


def test_end_that_contradicts_the_zip64_end_is_refused(tmp_path: Path) -> None:
    content = small_archive(tmp_path / "x")
    _, _, _, count, _, nbytes, offset, _ = struct.unpack("<4s4H2LH", content[-22:])
    true = {"count": count, "nbytes": nbytes, "offset": offset, "at": offset + nbytes}
    for told in ((count + 1, nbytes, offset), (count, nbytes - 1, offset), (count, nbytes, offset + 1)):
        (tmp_path / "x").write_bytes(content[:-22] + zip64_ends(*told, true))
        with pytest.raises(CorruptFileError, match="contradict each other"):
            read_directory(tmp_path / "x")
    (tmp_path / "x").write_bytes(content[:-22] + zip64_ends(0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, true))
    read_directory(tmp_path / "x")


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (b"FB\0\0", None),
        (b"\1\0\0", "extra fields are damaged"),
        (b"FB\5\0abcd", "extra fields are damaged"),
        (b"\1\0\x08\0" + bytes(8), "zip64 extra field"),
        (b"\1\0\x08\0" + bytes(8) + b"\1\0\0\0", "extra fields are damaged"),
    ],
)
def test_extra_fields_are_checked(tmp_path: Path, extra: bytes, reason: str | None) -> None:
    content = small_archive(tmp_path / "x")
    content = patched(content, CENTRAL, 30, struct.pack("<H", len(extra)))
    second = content.index(CENTRAL, content.index(CENTRAL) + 1)
    size = int.from_bytes(content[-10:-6], "little") + len(extra)
    content = content[:second] + extra + content[second:]
    (tmp_path / "x").write_bytes(patched(content, END, 12, struct.pack("<L", size)))
    if reason is None:
        assert len(read_directory(tmp_path / "x").records) == 7
    else:
        with pytest.raises(CorruptFileError, match=reason):
            read_directory(tmp_path / "x")


def test_archives_of_other_kinds_are_not_supported(tmp_path: Path) -> None:
    kinds = {
        "TorchScript": [small_record("data.pkl", b""), small_record("constants.pkl", b"")],
        "no data.pkl": [small_record("version", b"3\n")],
    }
    for what, records in kinds.items():
        write_archive(tmp_path / "x", {}, records)
        with pytest.raises(UnsupportedFormatError, match=what):
            read_directory(tmp_path / "x")
    with zipfile.ZipFile(tmp_path / "x", "w") as file:
        file.writestr("state/data.pkl", b"")
        file.writestr("elsewhere/data", b"")
    with pytest.raises(UnsupportedFormatError, match="outside the folder"):
        read_directory(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"not a zip" * 10)
    with pytest.raises(UnsupportedFormatError, match="not a zip"):
        read_directory(tmp_path / "x")


# Telling formats apart


def kinds_of_file() -> Iterator[tuple[str, Callable[[Path], object]]]:
    import safetensors.torch

    yield "torch_zip", lambda path: torch.save([torch.ones(1)], path)
    yield "torch_zip", small_archive
    yield "safetensors", lambda path: safetensors.torch.save_file({"a": torch.ones(1)}, path)
    yield "safetensors", lambda path: safetensors.torch.save_file({}, path)
    for protocol in (2, 4):
        yield (
            "torch_legacy",
            lambda path, protocol=protocol: torch.save(
                [torch.ones(1)], path, _use_new_zipfile_serialization=False, pickle_protocol=protocol
            ),
        )


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 1 << 62), (0, 5), (3, 2), (-1, 2), (1 << 70, 1)])
def test_a_read_beyond_the_end_asks_for_no_memory(offset: int, nbytes: int, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abcd")
    with FileReader(tmp_path / "x") as file, pytest.raises(CorruptFileError, match="truncated: "):
        file.read(offset, nbytes)


def test_sniff(tmp_path: Path) -> None:
    for expected, make in kinds_of_file():
        make(tmp_path / "x")
        assert sniff(tmp_path / "x") == expected


def test_sniff_refuses_what_cannot_be_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello, world\n" * 10)
    (tmp_path / "short").write_bytes(b"P")
    for name, error, message in (
        ("missing", LoadError, "No such file"),
        (".", LoadError, "not a regular file"),
        ("empty", CorruptFileError, "empty"),
        ("text", UnsupportedFormatError, "neither"),
        ("short", UnsupportedFormatError, "neither"),
    ):
        with pytest.raises(error, match=message):
            sniff(tmp_path / name)
