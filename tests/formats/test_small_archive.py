"""The quick reader of small archives accepts what the careful one accepts, and finds every flipped bit of a value."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lazyckpt import _engine
from lazyckpt.formats.distcp import Place, item_directory
from lazyckpt.formats.reader import FileReader
from lazyckpt.pipeline.plan import ArchiveCache, archive_of

VALUES: list[Any] = [None, 7, 1e-8, "text", (1, "x"), {"a": [1, 2], "b": {}}, "long " * 30_000]


def of_torch(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def ours(value: Any) -> bytes:
    return archive_of(value, ArchiveCache())


def careful(data: bytes, path: Path) -> bytes:
    """The pickle, as the careful reader finds it. Raises LoadError."""
    path.write_bytes(data)
    with FileReader(path) as file:
        records = item_directory(file, Place(0, len(data))).records
        contents = {name: file.read_record(record) for name, record in records.items()}
    assert None not in {record.crc32 for record in records.values()}
    return contents["data.pkl"]


@pytest.mark.parametrize("write", [of_torch, ours])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_the_pickle_is_found(write: Any, value: Any, tmp_path: Path) -> None:
    data = write(value)
    assert _engine.pickle_in(data) == careful(data, tmp_path / "a")
    assert torch.load(io.BytesIO(data), weights_only=True) == value


@pytest.mark.parametrize("write", [of_torch, ours])
def test_a_changed_archive_is_refused_unless_the_careful_reader_takes_it(write: Any, tmp_path: Path) -> None:
    data = write({"a": [1, "x"]})
    pickled = careful(data, tmp_path / "a")
    accepted = 0
    random.seed(1)
    changed = [data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in range(len(data))]
    changed += [data[:end] for end in range(len(data))] + [data[begin:] for begin in range(1, 200)]
    changed += [data + b"\0", b"\0" + data, data + data, b""]
    for _ in range(2000):  # several bytes of what says where everything is
        other = bytearray(data)
        for _ in range(random.randint(1, 4)):
            other[random.randrange(len(data))] = random.choice([0, 1, 0xFF, random.randrange(256)])
        changed.append(bytes(other))
    for other in changed:
        if other != data and (found := _engine.pickle_in(other)) is not None:
            accepted += 1
            assert found == careful(other, tmp_path / "a") == pickled
    assert accepted, "not even in the padding"


def test_what_is_not_of_this_kind_is_left_to_the_careful_reader() -> None:
    with_storage = of_torch([torch.ones(2)])
    compressed = io.BytesIO()
    with zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", bytes(100))
    without = io.BytesIO()
    with zipfile.ZipFile(without, "w") as file:
        file.writestr("archive/version", "3\n")
    for data in (with_storage, compressed.getvalue(), without.getvalue(), b"PK\5\6" + bytes(18), b"x" * 22):
        assert _engine.pickle_in(data) is None
