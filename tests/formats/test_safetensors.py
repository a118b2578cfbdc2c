"""The safetensors files we write are read by safetensors; those we read are exactly what they claim."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import lazyckpt
from lazyckpt.errors import ConfigError, CorruptFileError, LoadError, UnsupportedFormatError
from lazyckpt.formats.safetensors import Layout, read_header
from programs import run_program
from trials import Trials

DTYPE_NAMES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16",
    "float32", "float64", "complex64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn_x2",
]  # fmt: skip
DTYPES = [getattr(torch, name) for name in DTYPE_NAMES if hasattr(torch, name)]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> Layout:
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    layout = Layout(
        tuple(ordered),
        [tensor.dtype for tensor in ordered.values()],
        [tuple(tensor.shape) for tensor in ordered.values()],
        metadata,
    )
    assert layout.header.nbytes == layout.header_bytes == layout.data.offset
    run_program(path, [layout.data, layout.header], [raw(tensor) for tensor in ordered.values()])
    return layout


def noise(dtype: torch.dtype, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    count = math.prod(shape) * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def example() -> dict[str, torch.Tensor]:
    return {
        "b": noise(torch.float32, (3, 5)),
        "a": noise(torch.bfloat16, (70_000,)),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(7),
        'quote " and ü': noise(torch.uint8, (3,)),
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert raw(found[name]) == raw(tensor), name


def assert_as_written(path: Path, tensors: dict[str, torch.Tensor], with_checksums: bool = True) -> None:
    header = read_header(path)
    content = path.read_bytes()
    assert header.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        info = header.tensors[name]
        assert (str(info.dtype), info.shape, info.record.name) == (str(tensor.dtype), tuple(tensor.shape), name)
        assert content[info.record.offset : info.record.offset + info.record.nbytes] == raw(tensor)
        assert info.record.crc32 == (zlib.crc32(raw(tensor)) if with_checksums else None)


def rewritten(path: Path, change: Any = None, text: bytes | None = None) -> None:
    """The file with its JSON header changed by ``change``, or replaced by ``text``."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    if text is None:
        tree = json.loads(content[8:end])
        change(tree)
        text = json.dumps(tree).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


# Writing


def test_safetensors_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(example(), path, {"format": "pt", "note": "ü"})
    assert_same(load_file(path), example())
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt" and file.metadata()["note"] == "ü"
        assert torch.equal(file.get_slice("b")[1:], example()["b"][1:])
    assert_as_written(path, example())
    assert read_header(path).metadata == {"format": "pt", "note": "ü"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"x": noise(dtype, (3, 8))}
    save(tensors, tmp_path / "x")
    assert_as_written(tmp_path / "x", tensors)
    with safe_open(tmp_path / "x", "pt") as file:
        assert_same({"x": file.get_tensor("x")}, tensors)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex128, torch.qint8], ids=str)
def test_dtypes_it_lacks(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=f"'layer.weight'.*{dtype}"):
        Layout(["layer.weight"], [dtype], [(2, 2)])


def test_no_tensors(tmp_path: Path) -> None:
    save({}, tmp_path / "x")
    assert read_header(tmp_path / "x").tensors == {} == load_file(tmp_path / "x")


def test_header_has_room_for_its_padding() -> None:
    for n in range(3700, 4200):
        layout = Layout(["n" * n], [torch.int8], [(1,)])
        assert layout.header_bytes % 4096 == 0 and layout.header.blob.endswith(b" " * 8)


def test_header_too_long_for_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyckpt.formats.safetensors._MAX_HEADER_BYTES", 5000)
    Layout(["n" * 3000], [torch.int8], [(1,)])
    with pytest.raises(ConfigError, match="8192 bytes"):
        Layout(["n" * 5000], [torch.int8], [(1,)])


@pytest.mark.parametrize(
    ("names", "dtypes", "metadata", "message"),
    [
        (["a", "b"], [torch.uint8, torch.int16], None, "order by element size"),
        (["a", "a"], [torch.int16, torch.int16], None, "used twice"),
        (["__metadata__", "a"], [torch.int16, torch.int16], None, "reserved"),
        (["a", "b"], [torch.int16, torch.int16], {"k": 1}, "strings"),
        (["a"], [torch.int16, torch.int16], None, "zip"),
    ],
)
def test_arguments_that_make_no_file(names: Any, dtypes: Any, metadata: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(names, dtypes, [(1,), (1,)], metadata)


TEXT = st.text(st.characters(exclude_categories=["Cs"])).filter(
    lambda text: text not in ("__metadata__", "lazyckpt.crc32")
)
SPECS = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3), st.integers(0, 2**31))


@pytest.mark.timeout(1800)  # with all trials
def test_round_trip(trials: Trials, shm: Path) -> None:
    """Laid out here, read by safetensors; saved by lazyckpt, transposed ones too, read by both."""
    path, saved = shm / "x", shm / "x.safetensors"
    packed = getattr(torch, "float4_e2m1fn_x2", None)
    tried = 0

    @trials.examples(80, 4000)
    @given(st.dictionaries(TEXT, SPECS, max_size=8), st.dictionaries(TEXT, TEXT))
    def round_trip(specs: dict[str, tuple[torch.dtype, list[int], int]], metadata: dict[str, str]) -> None:
        nonlocal tried
        tried += 1
        tensors = {
            name: noise(dtype, shape if shape or dtype != packed else [2], seed)
            for name, (dtype, shape, seed) in specs.items()
        }
        save(tensors, path, metadata)
        assert_as_written(path, tensors)
        assert read_header(path).metadata == metadata
        with safe_open(path, "pt") as file:
            assert_same({name: file.get_tensor(name) for name in file.keys()}, tensors)  # noqa: SIM118
        turned = {name: t.t() if t.dim() == 2 and t.dtype != packed else t for name, t in tensors.items()}
        lazyckpt.save(turned, saved)
        assert_same(lazyckpt.load(saved), turned)
        assert_same(load_file(saved), turned)

    round_trip()
    trials.report("round trips of safetensors, bit for bit", tried, shm)


# Reading: files of others


def test_reads_what_safetensors_saved(tmp_path: Path) -> None:
    save_file(example(), tmp_path / "x", {"format": "pt"})
    assert_as_written(tmp_path / "x", example(), with_checksums=False)
    assert read_header(tmp_path / "x").metadata == {"format": "pt"}


def test_checksums_that_another_tool_carried_over_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save(example(), path, {"format": "pt"})
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    changed = {name: tensor.clone().zero_() for name, tensor in example().items()}
    save_file(changed, path, metadata)
    assert_as_written(path, changed, with_checksums=False)
    save(changed, path, metadata)
    assert_as_written(path, changed)


# Reading: damage


def replace(path: Path, content: bytes) -> None:
    path.unlink()  # ext4 flushes a file that is truncated and written again: thousands of disk writes
    path.write_bytes(content)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save({"a": noise(torch.int32, (9,))}, path)
    content = path.read_bytes()
    lengths = [*range(300), *range(300, len(content) - 60, 97), *range(len(content) - 60, len(content))]
    for changed in [*(content[:n] for n in lengths), content + b"\0"]:
        replace(path, changed)
        with pytest.raises(LoadError):
            read_header(path)


def test_every_bit_flip_is_refused_or_found(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save({"a": noise(torch.int32, (9,)), "b": noise(torch.int8, (3,))}, path, {"format": "pt"})
    content = path.read_bytes()
    header_end = content.index(b"}} ") + 20  # and a few of the spaces
    data = int.from_bytes(content[:8], "little") + 8
    for at in [*range(header_end), *range(data, len(content))]:
        for bit in range(8):
            changed = bytearray(content)
            changed[at] ^= 1 << bit
            replace(path, changed)
            try:
                tensors = read_header(path).tensors
            except LoadError:
                continue
            records = [info.record for info in tensors.values()]
            assert any(
                zlib.crc32(changed[record.offset : record.offset + record.nbytes]) != record.crc32 for record in records
            ), f"byte {at}, bit {bit}"


# Reading: attacks


def entry(dtype: Any = "F32", shape: Any = (3,), offsets: Any = (0, 12)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": entry(offsets=[0, 8])}, "8 bytes for shape"),
        ({"a": entry(offsets=[12, 0])}, "bytes for shape"),
        ({"a": entry(), "b": entry()}, "gap or an overlap"),
        ({"a": entry(offsets=[4, 16])}, "gap or an overlap"),
        ({"a": entry("U8", [4], [0, 4]), "b": entry("U8", [8], [3, 11])}, "gap or an overlap"),
        ({"a": entry("U8", [11], [0, 11])}, "tensors end at"),
        ({"a": entry("U8", [13], [0, 13])}, "tensors end at"),
        ({}, "tensors end at"),
        ({"a": entry(shape=[2**62, 2**62, 0])}, "63 bits"),
        ({"a": entry(shape=[2**64])}, "malformed"),
        ({"a": entry(shape=[-3], offsets=[0, -12])}, "malformed"),
        ({"a": entry(shape=[3.0])}, "malformed"),
        ({"a": entry(shape=[True, 3])}, "malformed"),
        ({"a": entry(shape=3)}, "malformed"),
        ({"a": entry(offsets=[0, 12, 12])}, "malformed"),
        ({"a": entry(dtype=["F32"])}, "malformed"),
        ({"a": {**entry(), "more": 1}}, "must have"),
        ({"a": {"dtype": "F32"}}, "must have"),
        ({"a": [1]}, "must have"),
        ({"a": entry(), "__metadata__": {"k": 1}}, "strings"),
        ({"a": entry(), "__metadata__": []}, "strings"),
        ({"a": entry("F4", [], [0, 12])}, "even last"),
        ({"a": entry("F4", [23], [0, 12])}, "even last"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path: Path, tensors: dict[str, Any], message: str) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "x")
    rewritten(tmp_path / "x", text=json.dumps(tensors).encode())
    with pytest.raises(CorruptFileError, match=message):
        read_header(tmp_path / "x")


ENTRY = json.dumps(entry()).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b" " + b'{"a":%s}' % ENTRY,
        b'{"a":%s}x' % ENTRY,
        b'{"a":%s,"a":%s}' % (ENTRY, ENTRY),
        b'{"a":{"dtype":"F32","dtype":"F32","shape":[3],"data_offsets":[0,12]}}',
        b'{"a":' * 100_000,
        b'{"a":' + b"[" * 100_000,
        b'{"\xff":%s}' % ENTRY,
        b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,12]}}' % (b"9" * 5000),
    ],
    ids=range(10),
)
def test_text_that_is_no_header_is_refused(tmp_path: Path, text: bytes) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "x")
    rewritten(tmp_path / "x", text=text)
    with pytest.raises(CorruptFileError):
        read_header(tmp_path / "x")


def test_a_header_longer_than_allowed_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little") + b"{")
        file.truncate(200_000_000)  # sparse
    with pytest.raises(CorruptFileError, match="100000001"):
        read_header(tmp_path / "x")


def test_dtypes_that_torch_lacks_are_not_supported(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "x")
    rewritten(tmp_path / "x", change=lambda tree: tree["a"].update(dtype="F6_E2M3"))
    with pytest.raises(UnsupportedFormatError, match="F6_E2M3"):
        read_header(tmp_path / "x")
