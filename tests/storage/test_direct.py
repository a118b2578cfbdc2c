"""Copies past the page cache, and where there is no way past it."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lazyckpt.storage import direct
from lazyckpt.storage.direct import PART_BYTES, parts_in, write_parts

SIZES = [0, 1, 4096, 5000, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES + 4096, 2 * PART_BYTES + 70_001]


@pytest.fixture(params=["disk", "memory", "opens only", "refuses"])
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shm: Path
) -> Iterator[Path]:
    """A disk; tmpfs; file systems that open with O_DIRECT and move nothing so, or do not open."""
    real = {name: getattr(os, name) for name in ("open", "write", "preadv")}

    def refuse(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if name == "open" and arguments[1] & os.O_DIRECT:
                if arguments[1] & os.O_CREAT:  # some make the file first
                    os.close(real["open"](arguments[0], arguments[1] & ~os.O_DIRECT, 0o666))
                raise OSError(errno.EINVAL, "no O_DIRECT")
            if name != "open" and direct._is_direct(arguments[0]):
                raise OSError(errno.EINVAL, "no O_DIRECT")
            return real[name](*arguments, **options)

        return call

    for name in {"opens only": ("write", "preadv"), "refuses": ("open",)}.get(request.param, ()):
        monkeypatch.setattr(direct.os, name, refuse(name))
    yield shm if request.param == "memory" else tmp_path


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("reuse", [True, False])
def test_a_file_is_copied_whole(folder: Path, nbytes: int, reuse: bool) -> None:
    data = os.urandom(nbytes)
    (folder / "a").write_bytes(data)
    found = [bytes(part) for part in parts_in(folder / "a", nbytes, reuse=reuse)]
    assert b"".join(found) == data and all(len(part) == PART_BYTES for part in found[:-1])
    write_parts(folder / "b", parts_in(folder / "a", nbytes, reuse=True))
    assert (folder / "b").read_bytes() == data


def test_parts_that_are_not_reused_stay(tmp_path: Path) -> None:
    data = os.urandom(2 * PART_BYTES)
    (tmp_path / "a").write_bytes(data)
    assert b"".join(list(parts_in(tmp_path / "a", len(data), reuse=False))) == data


def test_a_shorter_file_ends_early_and_an_existing_one_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 5000)
    assert b"".join(map(bytes, parts_in(tmp_path / "a", 9000, reuse=True))) == b"x" * 5000
    assert b"".join(map(bytes, parts_in(tmp_path / "a", 3000, reuse=True))) == b"x" * 3000
    with pytest.raises(FileExistsError):
        write_parts(tmp_path / "a", [b"y"])


@pytest.mark.parametrize(("call", "number"), [("write", errno.ENOSPC), ("fsync", errno.EIO), ("preadv", errno.EIO)])
def test_an_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    (tmp_path / "a").write_bytes(b"x" * 5000)

    def fail(*_: Any) -> Any:
        raise OSError(number, "injected")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="injected") as caught:
        patch.setattr(direct.os, call, fail)
        write_parts(tmp_path / "b", parts_in(tmp_path / "a", 5000, reuse=True))
    assert caught.value.errno == number
    assert caught.value.filename == str(tmp_path / ("a" if call == "preadv" else "b"))


def test_the_memory_of_parts_begins_with_a_huge_page(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 5000)
    (part,) = parts_in(tmp_path / "a", 5000, reuse=True)
    assert ctypes.addressof(ctypes.c_char.from_buffer(part)) % (2 << 20) == 0
