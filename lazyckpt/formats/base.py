"""What formats and the engine tell each other: programs on the way out, records on the way back.

A container lays a file out once, from names and sizes alone, as a *program*: a few ``Extent``, each a
table of rows that the engine runs with live pointers. A program holds no pointer and no tensor, so it can be
cached and run for every checkpoint whose metadata is the same.

    kind        nbytes       arg             what the engine writes
    LITERAL     n            blob offset     ``blob[arg:arg + n]``
    SOURCE      size of i    source i        the i-th storage of the checkpoint, whole
    CRC32_LE    4            source i        its CRC-32, little-endian
    CRC32_HEX   8            source i        its CRC-32, lower-case hex digits

A source of n > 0 bytes has one SOURCE row, an empty one has none. The extents of a file are run in the order
given, whatever their offsets; a CRC row refers only to a source whose SOURCE row was run before.
"""

from __future__ import annotations

import os
import stat
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

from lazyckpt.errors import CorruptFileError, LoadError, load_error

LITERAL, SOURCE, CRC32_LE, CRC32_HEX = 0, 1, 2, 3
PAGE_BYTES = 4096
_MAX_SIZE = 2**63 - 1


def count_elements(shape: Iterable[int]) -> int:
    """Their product. Raises ValueError if any prefix of it is more than 63 bits have, as in the safetensors library;
    so it takes no longer than the shape is long."""
    count = 1
    for size in shape:
        count *= size
        if count > _MAX_SIZE:
            raise ValueError("a shape of more elements than 63 bits can count")
    return count


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``json.loads``: of two equal keys one reader takes the first, another the last."""
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise ValueError("a key stands there twice")
    return tree


@dataclass(frozen=True)
class Extent:
    """A contiguous part of a file.

    ``offset`` is a multiple of 4096 or the exact end of the extent run before it. ``rows`` is flat:
    kind, nbytes, arg, kind, nbytes, arg, … (see the module's table).
    """

    offset: int
    rows: array[int]
    blob: bytes

    @property
    def nbytes(self) -> int:
        """Bytes this extent occupies in the file."""
        return sum(self.rows[1::3])


class ExtentBuilder:
    """Collects the rows of one extent; literals that touch become one row."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._blob = bytearray()
        self._pending = 0  # where in the blob the literal begins that has no row yet

    def literal(self, data: bytes) -> None:
        self._blob += data

    def source(self, index: int, nbytes: int) -> None:
        self._row(SOURCE, nbytes, index)

    def crc32_le(self, index: int) -> None:
        self._row(CRC32_LE, 4, index)

    def crc32_hex(self, index: int) -> None:
        self._row(CRC32_HEX, 8, index)

    def build(self, offset: int) -> Extent:
        self._flush()
        return Extent(offset, array("q", self._rows), bytes(self._blob))

    def _row(self, kind: int, nbytes: int, arg: int) -> None:
        begin, end = self._pending, len(self._blob)
        if end > begin:
            self._rows += (LITERAL, end - begin, begin, kind, nbytes, arg)
            self._pending = end
        else:
            self._rows += (kind, nbytes, arg)

    def _flush(self) -> None:
        end = len(self._blob)
        if end > self._pending:
            self._rows += (LITERAL, end - self._pending, self._pending)
            self._pending = end


class Record(NamedTuple):
    """A named byte range of a file. ``crc32`` is None if the file holds no checksum for it."""

    name: str
    offset: int
    nbytes: int
    crc32: int | None


def _open_without_waiting(path: str, flags: int) -> int:
    """For the writer of a FIFO that was opened by mistake."""
    return os.open(path, flags | os.O_NONBLOCK)


class FileReader:
    """A regular file open for parsing: bounded, exact reads whose failures are typed errors.

    Use it as a context manager. Raises ``LoadError`` if ``path`` is missing, a folder, or unreadable,
    and ``CorruptFileError`` if it is empty.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        try:
            # With an opener, so that it is closed in the end whatever fails, for lack of memory, too.
            self._file = open(path, "rb", buffering=0, opener=_open_without_waiting)  # noqa: SIM115
        except IsADirectoryError as error:
            raise LoadError("not a regular file", path=path) from error
        except OSError as error:
            raise load_error("cannot be opened", error, path=path) from error
        self.fd = self._file.fileno()
        status = os.fstat(self.fd)
        self.size = status.st_size
        if not stat.S_ISREG(status.st_mode) or not self.size:
            self._file.close()
            if stat.S_ISREG(status.st_mode):
                raise CorruptFileError("the file is empty", path=path)
            raise LoadError("not a regular file", path=path)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes at ``offset``; ``CorruptFileError`` if the file ends before."""
        if offset < 0 or offset + nbytes > self.size:
            wanted = f"{nbytes} bytes at offset {offset}, " if offset >= 0 else ""
            raise self.corrupt(f"truncated: {wanted}file has {self.size} bytes")
        parts = []
        while nbytes:
            try:
                part = os.pread(self.fd, nbytes, offset)
            except MemoryError as error:  # a hole in a file costs its writer nothing
                raise LoadError(
                    f"{nbytes} bytes at offset {offset} take more memory than there is", path=self.path
                ) from error
            except OSError as error:
                raise load_error(f"cannot be read at offset {offset}", error, path=self.path) from error
            if not part:
                raise self.corrupt(f"truncated while being read, at offset {offset}")
            parts.append(part)
            offset += len(part)
            nbytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def corrupt(self, what: str) -> CorruptFileError:
        return CorruptFileError(what, path=self.path)
