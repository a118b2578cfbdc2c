"""The ``.distcp`` file of one rank, as torch.distributed.checkpoint (DCP) reads it: items, one behind the other.

    item     an archive of ``torch.save`` (torch_zip.py) of one tensor: its storage data/0, data.pkl, the directory
    table    of the tensor's segments, behind the item, if it has more than one: the CRC-32 of each
    …        each begins on a page, so that it can be read with direct I/O and copied in any order
    bytes    DCP's BYTE_IO: ready-made archives, without a gap between them

The file has no directory: the record ``.metadata`` of the DCP folder says where each item begins and ends. DCP reads an
item by itself, so gaps are legal, and offsets inside an archive count from the item's first byte. A read of a part of a
tensor is checked by the table, which stands in a gap.

All files that one save has written, ``.metadata`` too, have one *stamp* at their end. It tells them from files of equal
length that another save of the same step has written.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from lazyckpt.formats import torch_zip
from lazyckpt.formats.program import (
    CRC32_LE,
    LITERAL,
    PAGE_BYTES,
    SEGMENT_BYTES,
    SEGMENTS,
    SOURCE,
    Extent,
    ExtentBuilder,
    literal,
)
from lazyckpt.formats.reader import FileReader, FileSlice, Record
from lazyckpt.formats.torch_zip_reader import Directory, directory_of

STORAGE_KEY = "0"  # of an item's only storage
_ARCHIVE_NAME = "archive"
_STAMP = b"lazyckpt save "
_STAMP_BYTES = len(_STAMP) + 32
_TABLE = struct.Struct("<16sQ")  # of segments: the magic, and the bytes of a segment
_TABLE_MAGIC = b"lazyckpt crc32s "
_MAX_SEGMENTS = 1 << 20  # a tebibyte; the file of a hostile table may be full of holes


class Place(NamedTuple):
    """Where an item lies in its file, in bytes."""

    offset: int
    nbytes: int


class Layout:
    """Where the tensors of one file lie: a pure function of sizes and pickles, so cache it.

    ``tensors`` has, for each item in file order, the bytes of its storage and its ``data.pkl``; the i-th is source i of
    the program. ``head`` holds them: one extent at offset 0, or none if there is no tensor. ``places`` are theirs, and
    ``finish`` continues at ``head_end``.
    """

    def __init__(self, tensors: Sequence[tuple[int, bytes]]) -> None:
        forms: dict[tuple[int, bytes], _Form] = {}  # few: layers repeat themselves
        rows: array[int] = array("q")
        blobs: list[bytes] = []
        blob_bytes = offset = 0
        self.places: list[Place] = []
        for index, tensor in enumerate(tensors):
            form = forms.get(tensor)
            if form is None:
                form = forms[tensor] = _Form(*tensor, blob_at=blob_bytes)
                blobs.append(form.blob)
                blob_bytes += len(form.blob)
            first = len(rows)
            rows.extend(form.rows)
            for at in form.source_at:
                rows[first + at] = index
            self.places.append(Place(offset, form.nbytes))
            offset += form.padded
        self.head = [Extent(0, rows, b"".join(blobs))] if tensors else []
        self.head_end = offset

    def finish(self, contents: Iterable[bytes]) -> tuple[list[Extent], list[Place]]:
        """The rest of the file: items that are ready-made. Returns its extents (none, if it is empty), and the place of
        each item."""
        places, offset = [], self.head_end
        blob = b"".join(contents := list(contents))
        for content in contents:
            places.append(Place(offset, len(content)))
            offset += len(content)
        tail = [literal(self.head_end, blob)] if blob else []
        return tail, places


class _Form:
    """The program of one item, whatever its source and its place: a template."""

    def __init__(self, nbytes: int, data_pkl: bytes, *, blob_at: int) -> None:
        """``blob_at``: where the literals of this item begin in the file's blob."""
        archive = torch_zip.Layout(_ARCHIVE_NAME, [STORAGE_KEY], [nbytes])
        tail = archive.finish(torch_zip.small_records(data_pkl))
        self.nbytes = tail[-1].end
        count = -(-nbytes // SEGMENT_BYTES)
        table_bytes = _TABLE.size + 4 * count if 1 < count <= _MAX_SEGMENTS else 0
        padding = -(self.nbytes + table_bytes) % PAGE_BYTES
        self.padded = self.nbytes + table_bytes + padding
        item = ExtentBuilder()
        for extent in (*archive.head, *tail):
            for at in range(0, len(extent.rows), 3):
                kind, size, arg = extent.rows[at : at + 3]
                if kind == LITERAL:
                    item.literal(extent.blob[arg : arg + size])
                else:
                    item.row(kind, size, arg)
        if table_bytes:
            item.literal(_TABLE.pack(_TABLE_MAGIC, SEGMENT_BYTES))
            item.row(SEGMENTS, table_bytes - _TABLE.size, 0)
        item.literal(bytes(padding))
        whole = item.build(0)
        self.blob, self.rows = whole.blob, whole.rows.tolist()
        self.source_at = [at + 2 for at in range(0, len(self.rows), 3) if self.rows[at] != LITERAL]
        for at in range(0, len(self.rows), 3):
            self.rows[at + 2] += blob_at if self.rows[at] == LITERAL else 0


class Frame:
    """The bytes of an item of ``Layout`` around the storage of its tensor. A reader that expects such an item reads all
    of it at once, and compares. ``nbytes``: of the storage."""

    def __init__(self, nbytes: int, data_pkl: bytes) -> None:
        form = _Form(nbytes, data_pkl, blob_at=0)
        self.nbytes = form.nbytes  # of the item
        self.head = b""  # before the storage
        self._tail: list[bytes | int] = []  # behind it; a kind stands for the storage's CRC-32
        found = False
        left = form.nbytes
        for at in range(0, len(form.rows), 3):
            kind, size, arg = form.rows[at : at + 3]
            size = min(size, left)  # only a table of segments and padding follow the item
            if size == 0:
                break
            left -= size
            if kind == SOURCE:
                found = True
            elif not found:
                self.head += form.blob[arg : arg + size]
            else:
                self._tail.append(form.blob[arg : arg + size] if kind == LITERAL else kind)
        self.tail_bytes = form.nbytes - len(self.head) - nbytes

    def tail(self, crc32: int) -> bytes:
        """The bytes behind a storage with this CRC-32."""
        written = {CRC32_LE: crc32.to_bytes(4, "little")}
        return b"".join(written.get(row, b"%08x" % crc32) if isinstance(row, int) else row for row in self._tail)


@lru_cache(maxsize=1 << 14)
def frame_of(nbytes: int, data_pkl: bytes) -> Frame:
    return Frame(nbytes, data_pkl)


def stamp_of(save: str) -> bytes:
    """The stamp of a save with this name, which no other save has."""
    return _STAMP + hashlib.sha256(save.encode()).hexdigest()[:32].encode()


def stamp_before(file: FileReader, end: int) -> bytes | None:
    """The stamp in a file just before the offset ``end``; None if there is none, as in files of plain DCP."""
    begin = end - _STAMP_BYTES
    found = file.read(begin, _STAMP_BYTES) if begin >= 0 else b""
    return found if found.startswith(_STAMP) else None


def open_item(file: FileReader, place: Place) -> FileSlice:
    """Returns the item at ``place``. Raises CorruptFileError unless it begins as an archive does."""
    item = FileSlice(file, *place)
    if item.read(0, min(place.nbytes, len(torch_zip.LOCAL_MAGIC))) != torch_zip.LOCAL_MAGIC:
        raise item.corrupt("no archive of torch.save")
    return item


def item_directory(file: FileReader, place: Place) -> Directory:
    """Returns the records of the item at ``place``, with offsets in ``file``.

    Raises what ``torch_zip_reader.directory_of`` raises: CorruptFileError unless the item is exactly one archive."""
    found = directory_of(open_item(file, place))
    records = {name: record._replace(offset=record.offset + place.offset) for name, record in found.records.items()}
    return Directory(records, found.archive_name)


def read_segments(file: FileReader, place: Place, record: Record) -> tuple[int, Sequence[int]] | None:
    """The table of segments behind the item at ``place``, if there is one: how many bytes of its ``record`` a segment
    has, and the CRC-32 of each. Raises CorruptFileError unless it fits the length of the record and of the file."""
    at = place.offset + place.nbytes
    if at + _TABLE.size > file.size or not (head := file.read(at, _TABLE.size)).startswith(_TABLE_MAGIC):
        return None
    _, nbytes = _TABLE.unpack(head)
    count = -(-record.nbytes // max(nbytes, 1))
    if nbytes % PAGE_BYTES or not 1 < count <= _MAX_SEGMENTS:
        raise file.corrupt(f"{record.name} has {record.nbytes} bytes, and a table of segments of {nbytes}")
    return nbytes, struct.unpack(f"<{count}I", file.read(at + _TABLE.size, 4 * count))


def is_archive(file: FileReader, place: Place) -> bool:
    """Whether an item is an archive, even one that is damaged at one end."""
    item = FileSlice(file, *place)
    if place.nbytes < torch_zip.END.size:
        return False
    ends = item.read(place.nbytes - torch_zip.END.size, len(torch_zip.END_MAGIC)) == torch_zip.END_MAGIC
    return ends or item.read(0, len(torch_zip.LOCAL_MAGIC)) == torch_zip.LOCAL_MAGIC
