"""Reads files of any format: bounded, exact reads, and the records that they find."""

from __future__ import annotations

import os
import stat
import zlib
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from lazyckpt.errors import CorruptFileError, LoadError, load_error
from lazyckpt.stores.calls import each
from lazyckpt.stores.store import StorePath

_MAX_SIZE = 2**63 - 1
_BLOCK_BYTES = 256 << 10  # of a store, in one request
_BLOCKS = 64  # kept
_SPAN_BYTES = 1 << 20  # the most of several announced spans that one request brings
_SPANS_AT_ONCE = 16


def count_elements(shape: Iterable[int]) -> int:
    """Returns the product of ``shape``. Raises ValueError, as the safetensors library does, if a partial product needs
    more than 63 bits, so hostile shapes take no longer than others."""
    count = 1
    for size in shape:
        count *= size
        if count > _MAX_SIZE:
            raise ValueError("a shape of more elements than 63 bits can count")
    return count


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses duplicate keys (ValueError), for ``json.loads``: one reader takes the first, another the last."""
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise ValueError("duplicate key")
    return tree


class Record(NamedTuple):
    """A named byte range of a file. ``crc32`` is None if the file has no checksum for it."""

    name: str
    offset: int
    nbytes: int
    crc32: int | None


def _open_without_waiting(path: str, flags: int) -> int:
    """Opens ``path`` without waiting for the writer of a FIFO that was given by mistake."""
    return os.open(path, flags | os.O_NONBLOCK)


class FileReader:
    """A regular file or an object of a store, open for parsing. Use it as a context manager.

    Raises LoadError if ``path`` is missing, a folder, or unreadable, and CorruptFileError if it is empty.
    """

    begin = 0  # where its first byte lies in the file ``path``

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        self.stamp: object  # another one when the file has changed
        self._object: _Blocks | None = None
        if isinstance(path, StorePath):
            try:
                self._object = _Blocks(path)
            except OSError as error:
                raise load_error("cannot be opened", error, path=path) from error
            self.size, self.stamp = self._object.size, self._object.stamp
        else:
            self._open(path)
        if not self.size:
            self.__exit__()
            raise self.corrupt("the file is empty")

    def _open(self, path: str | os.PathLike[str]) -> None:
        try:
            self._file = open(path, "rb", buffering=0, opener=_open_without_waiting)  # noqa: SIM115
        except IsADirectoryError as error:
            raise LoadError("not a regular file", path=path) from error
        except OSError as error:
            raise load_error("cannot be opened", error, path=path) from error
        self.fd = self._file.fileno()
        status = os.fstat(self.fd)
        self.size, self.stamp = status.st_size, status.st_mtime_ns
        if not stat.S_ISREG(status.st_mode):
            self._file.close()
            raise LoadError("not a regular file", path=path)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._object is None:
            self._file.close()

    def read(self, offset: int, nbytes: int) -> bytes:
        """Returns exactly ``nbytes`` bytes from ``offset`` on. Raises CorruptFileError if the file ends before."""
        if offset < 0 or offset + nbytes > self.size:
            wanted = f"{nbytes} bytes at offset {offset}, " if offset >= 0 else ""
            raise self.corrupt(f"truncated: {wanted}file has {self.size} bytes")
        parts = []
        while nbytes:
            try:
                part = self._pread(nbytes, offset)
            except MemoryError as error:  # a hole in a file costs its writer nothing
                what = f"{nbytes} bytes at offset {offset} take more memory than there is"
                raise LoadError(what, path=self.path) from error
            except OSError as error:
                raise load_error(f"cannot be read at offset {offset}", error, path=self.path) from error
            if not part:
                raise self.corrupt(f"truncated while being read, at offset {offset}")
            parts.append(part)
            offset += len(part)
            nbytes -= len(part)
        return b"".join(parts)

    def _pread(self, nbytes: int, offset: int) -> bytes:
        return os.pread(self.fd, nbytes, offset) if self._object is None else self._object.read(offset, nbytes)

    def read_record(self, record: Record) -> bytes:
        """Returns the bytes of a small record. Raises CorruptFileError if its checksum does not match."""
        data = self.read(record.offset, record.nbytes)
        if record.crc32 not in (None, zlib.crc32(data)):
            raise self.corrupt(f"record {record.name}: checksum does not match")
        return data

    def will_need(self, spans: Iterable[tuple[int, int]]) -> None:
        """Announces reads (begin, end), in ascending order, so that a cold disk or a store serves them together. Passes
        over those that are not in the file, as the reads will say."""
        spans = [(begin, end) for begin, end in spans if 0 <= begin < end <= self.size]
        if self._object is not None:
            return self._object.will_need(spans)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
        for begin, end in spans:
            os.posix_fadvise(self.fd, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def forget(self) -> None:
        """Frees what it keeps in memory of an object."""
        if self._object is not None:
            self._object.forget()

    def corrupt(self, what: str) -> CorruptFileError:
        return CorruptFileError(what, path=self.path)


class _Blocks:
    """An object of a store, read in blocks: parsers read a few bytes at a time, next to each other."""

    def __init__(self, path: StorePath) -> None:
        self._path = path
        entry = path.store.entry(path.key)
        self.size, self.stamp = entry.nbytes, entry.tag
        self.forget()

    def forget(self) -> None:
        self._kept: dict[int, bytes] = {}
        self._announced: deque[tuple[int, int]] = deque()
        self._ahead: list[tuple[int, bytes]] = []  # what was announced and has come, as (begin, bytes)

    def will_need(self, spans: Iterable[tuple[int, int]]) -> None:
        joined: list[tuple[int, int]] = []
        for begin, end in spans:
            if joined and begin - joined[-1][1] <= _BLOCK_BYTES and end - joined[-1][0] <= _SPAN_BYTES:
                joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
            else:
                joined.append((begin, end))
        self._announced = deque(joined)

    def _was_announced(self, offset: int, nbytes: int) -> bytes | None:
        """These bytes, if they were announced; then others that were, too, are on their way in the same moment."""
        while self._announced and self._announced[0][1] < offset + nbytes:
            self._announced.popleft()
        if self._announced and self._announced[0][0] <= offset:
            count = min(len(self._announced), _SPANS_AT_ONCE)
            spans = [self._announced.popleft() for _ in range(count)]
            found = each(lambda span: bytes(self._path.store.read(self._path.key, *span)), spans, count)
            new = [(begin, part) for (begin, _), part in zip(spans, found, strict=True)]
            self._ahead = [*self._ahead[-_SPANS_AT_ONCE:], *new]  # a parser goes back to the beginning of its item
        for begin, part in self._ahead:
            if begin <= offset and offset + nbytes <= begin + len(part):
                return part[offset - begin :][:nbytes]
        return None

    def read(self, offset: int, nbytes: int) -> bytes:
        """Returns at least one of these bytes, unless there is none. Raises OSError."""
        if (found := self._was_announced(offset, nbytes)) is not None:
            return found
        if nbytes > _BLOCK_BYTES:
            return bytes(self._path.store.read(self._path.key, offset, offset + nbytes))
        begin = offset // _BLOCK_BYTES * _BLOCK_BYTES
        if begin not in self._kept:
            if len(self._kept) >= _BLOCKS:
                self._kept.pop(next(iter(self._kept)))
            end = min(begin + _BLOCK_BYTES, self.size)
            self._kept[begin] = bytes(self._path.store.read(self._path.key, begin, end))
        return self._kept[begin][offset - begin :][:nbytes]


class FileSlice(FileReader):
    """A part of an open file, read as if it were a file by itself. Lives no longer than the file.

    Raises CorruptFileError if the file ends before the part does."""

    def __init__(self, file: FileReader, begin: int, nbytes: int) -> None:
        self.path = file.path
        self._object = None
        self._whole = file
        self.begin = begin
        self.size = nbytes
        if begin < 0 or nbytes <= 0 or begin + nbytes > file.size:
            raise self.corrupt(f"no {nbytes} bytes at offset {begin}: the file has {file.size} bytes")

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise self.corrupt(f"truncated: {nbytes} bytes at offset {offset} of an item of {self.size} bytes")
        return self._whole.read(self.begin + offset, nbytes)

    def will_need(self, spans: Iterable[tuple[int, int]]) -> None:
        pass  # an item is small, or is about to be read whole

    def corrupt(self, what: str) -> CorruptFileError:
        return super().corrupt(f"item at offset {self.begin}: {what}")
