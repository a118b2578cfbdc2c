"""The zip archive of ``torch.save``, written tensors first: storages, then the pickle, then the directory.

    archive/data/<key>    one per storage, in the caller's order: local header, padding, bytes, descriptor
    archive/data.pkl, byteorder, version, .data/serialization_id
    central directory, zip64 end record and locator (where needed), end record

Records are stored, never compressed; data begins on a multiple of 64 bytes, as torch writes it, and on a page
if the storage is large, so that it can be read with direct I/O. A storage's CRC-32 is not known before it was
copied: it stands in the data descriptor behind the bytes and in the central directory, both written later.

There is no ``.format_version`` record and must never be one: where it says 1 or more, torch *computes* the
offsets of storages from the order in which its own writer lays them out, which is not this order, and loads
wrong tensors without an error.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lazyckpt import _engine
from lazyckpt.formats.program import PAGE_BYTES, Extent, ExtentBuilder, literal

# APPNOTE.TXT 4.3.7, 4.3.9, 4.3.12, 4.3.14, 4.3.15, 4.3.16
LOCAL_HEADER = struct.Struct("<4s5H3L2H")
DESCRIPTOR = struct.Struct("<4s3L")
DESCRIPTOR_64 = struct.Struct("<4sL2Q")
CENTRAL_ENTRY = struct.Struct("<4s6H3L5H2L")
END_64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR_64 = struct.Struct("<4sLQL")
END = struct.Struct("<4s4H2LH")
LOCAL_MAGIC, DESCRIPTOR_MAGIC, CENTRAL_MAGIC = b"PK\3\4", b"PK\7\x08", b"PK\1\2"
END_64_MAGIC, LOCATOR_64_MAGIC, END_MAGIC = b"PK\6\6", b"PK\6\7", b"PK\5\6"

MAX_16, MAX_32 = 0xFFFF, 0xFFFFFFFF  # in a field: the value is in its zip64 twin
FLAG_DESCRIPTOR, FLAG_UTF8 = 1 << 3, 1 << 11
EXTRA_ZIP64 = 0x0001
END_64_REST = END_64.size - 12  # the record's own length field leaves out itself and the magic

_EXTRA_PADDING = 0x4246  # "FB", as torch has it
_VERSION, _VERSION_ZIP64 = 20, 45
_DATE = 0x21  # 1980-01-01: archives depend on their content only
_CRC_OFFSET_IN_DESCRIPTOR, _CRC_OFFSET_IN_ENTRY = 4, 16
_ALIGNMENT = 64
_PAGE_ALIGNED_FROM = 64 * 1024


class SmallRecord(NamedTuple):
    """A record without a storage."""

    name: str  # without the archive's prefix
    content: bytes
    crc: int  # of the content


def small_record(name: str, content: bytes) -> SmallRecord:
    return SmallRecord(name, content, _engine.crc32(content))


_OF_EVERY_ARCHIVE = (small_record("byteorder", sys.byteorder.encode()), small_record("version", b"3\n"))


def small_records(data_pkl: bytes) -> list[SmallRecord]:
    """The records that ``torch.save`` writes beside the storages.

    The id is the pickle's length and CRC-32 (torch hashes names and checksums); torch reports it to telemetry and
    nothing reads it.
    """
    pickled = small_record("data.pkl", data_pkl)
    identity = b"%020d%020d" % (len(data_pkl), pickled.crc)
    return [pickled, *_OF_EVERY_ARCHIVE, small_record(".data/serialization_id", identity)]


def file_order(sizes: Sequence[int], owned: Sequence[bool]) -> list[int]:
    """The places of the storages in the order in which they should lie in the file.

    The order depends on sizes (bytes), on whether an optimizer owns each storage, and on the order given: ranks that
    hold the same state agree on it. It says nothing of the order in which bytes are copied. Storages that begin on a
    page can be copied in any order; so the smaller ones stand first. Among them, those that ``save()`` usually copies
    before it returns come first, since a chunk with the checksum of a lazy storage can be copied no sooner than that.
    """
    small = [at for at, nbytes in enumerate(sizes) if nbytes < _PAGE_ALIGNED_FROM]
    large = [at for at, nbytes in enumerate(sizes) if nbytes >= _PAGE_ALIGNED_FROM]
    small.sort(key=lambda at: (owned[at], sizes[at]))
    large.sort(key=lambda at: (owned[at], -sizes[at]))
    return small + large


class Layout:
    """Where everything of one archive lies: a pure function of names and sizes, so cache it.

    ``archive_name`` is the folder inside the archive; ``keys`` and ``sizes`` (bytes) are the storages', in
    file order; the i-th is source i of the program.

    ``head`` holds the storages: one extent at offset 0, or none if there is no storage. ``head_end`` is the
    exact offset behind it, where ``finish`` continues. ``begins`` are the offsets of the storages.
    """

    def __init__(self, archive_name: str, keys: Sequence[str], sizes: Sequence[int]) -> None:
        self._prefix = f"{archive_name}/".encode()
        self._count = len(keys)
        self.begins = array("Q")
        head, directory = ExtentBuilder(), ExtentBuilder()
        offset, alignment = 0, _ALIGNMENT
        for index, (key, nbytes) in enumerate(zip(keys, sizes, strict=True)):
            name = self._prefix + b"data/" + key.encode()
            flags = FLAG_UTF8 | FLAG_DESCRIPTOR if nbytes else FLAG_UTF8
            alignment = PAGE_BYTES if nbytes >= _PAGE_ALIGNED_FROM else _ALIGNMENT
            header = _local_header(offset, name, flags, 0, nbytes, alignment)
            entry = _central_entry(offset, name, flags, 0, nbytes)
            head.literal(header)
            self.begins.append(offset + len(header))
            offset += len(header) + nbytes
            if nbytes:
                head.source(index, nbytes)
                form = DESCRIPTOR_64 if nbytes >= MAX_32 else DESCRIPTOR
                descriptor = form.pack(DESCRIPTOR_MAGIC, 0, nbytes, nbytes)
                _literal_with_crc(head, descriptor, _CRC_OFFSET_IN_DESCRIPTOR, index)
                _literal_with_crc(directory, entry, _CRC_OFFSET_IN_ENTRY, index)
                offset += len(descriptor)
            else:
                directory.literal(entry)
        # The directory holds every checksum; it shares no page with the last storage, if that is large.
        self._tail_alignment = alignment
        self.head = [head.build(0)] if keys else []
        self.head_end = offset
        self._directory = directory.build(0)
        self._directory_bytes = self._directory.nbytes

    def finish(self, records: Iterable[SmallRecord]) -> list[Extent]:
        """The rest of the file, beginning at ``head_end``: small ``records`` and the whole directory.

        Neither the prepared directory nor the content of the first record, which may be a large pickle, is copied."""
        local: list[bytes] = []
        entries: list[bytes] = []
        offset, alignment = self.head_end, self._tail_alignment
        for record in records:
            name = self._prefix + record.name.encode()
            nbytes = len(record.content)
            header = _local_header(offset, name, FLAG_UTF8, record.crc, nbytes, alignment)
            entries.append(_central_entry(offset, name, FLAG_UTF8, record.crc, nbytes))
            local += (header, record.content)
            offset += len(header) + nbytes
            alignment = _ALIGNMENT
        directory = Extent(offset, self._directory.rows, self._directory.blob)
        directory_bytes = self._directory_bytes + sum(map(len, entries))
        end = _end(self._count + len(entries), directory_bytes, offset)
        tail: list[Extent] = []
        offset = self.head_end
        for data in (*local[:2], b"".join(local[2:])):
            tail.append(literal(offset, data))
            offset += len(data)
        return [*tail, directory, literal(offset + self._directory_bytes, b"".join((*entries, end)))]


def _literal_with_crc(builder: ExtentBuilder, data: bytes, crc_offset: int, source: int) -> None:
    builder.literal(data[:crc_offset])
    builder.crc32_le(source)
    builder.literal(data[crc_offset + 4 :])


def _local_header(offset: int, name: bytes, flags: int, crc: int, nbytes: int, alignment: int) -> bytes:
    """Header, name and extra fields of a record at ``offset``, ending where the data is aligned."""
    told, extra, version = nbytes, b"", _VERSION
    if flags & FLAG_DESCRIPTOR:
        told = 0
    if nbytes >= MAX_32:
        # even with a descriptor, this field must be here: it says that the descriptor's sizes have 64 bits
        extra, told, version = struct.pack("<2H2Q", EXTRA_ZIP64, 16, told, told), MAX_32, _VERSION_ZIP64
    padding = -(offset + LOCAL_HEADER.size + len(name) + len(extra) + 4) % alignment
    extra += struct.pack("<2H", _EXTRA_PADDING, padding)
    fixed = LOCAL_HEADER.pack(
        LOCAL_MAGIC, version, flags, 0, 0, _DATE, crc, told, told, len(name), len(extra) + padding
    )  # fmt: skip
    return b"".join((fixed, name, extra, bytes(padding)))


def _central_entry(offset: int, name: bytes, flags: int, crc: int, nbytes: int) -> bytes:
    """The directory's entry of the record whose local header is at ``offset``."""
    extra, version = b"", _VERSION
    if nbytes >= MAX_32 or offset >= MAX_32:
        large = (nbytes, nbytes) * (nbytes >= MAX_32) + (offset,) * (offset >= MAX_32)
        extra = struct.pack(f"<2H{len(large)}Q", EXTRA_ZIP64, 8 * len(large), *large)
        version = _VERSION_ZIP64
    told = min(nbytes, MAX_32)
    fixed = CENTRAL_ENTRY.pack(
        CENTRAL_MAGIC, version, version, flags, 0, 0, _DATE, crc, told, told, len(name), len(extra),
        0, 0, 0, 0, min(offset, MAX_32),
    )  # fmt: skip
    return fixed + name + extra


def _end(count: int, directory_bytes: int, directory_offset: int) -> bytes:
    """The end records of the archive, behind the directory."""
    end = END.pack(
        END_MAGIC, 0, 0, min(count, MAX_16), min(count, MAX_16), min(directory_bytes, MAX_32),
        min(directory_offset, MAX_32), 0,
    )  # fmt: skip
    if count < MAX_16 and directory_bytes < MAX_32 and directory_offset < MAX_32:
        return end
    end_64 = END_64.pack(
        END_64_MAGIC, END_64_REST, _VERSION_ZIP64, _VERSION_ZIP64, 0, 0, count, count, directory_bytes,
        directory_offset,
    )  # fmt: skip
    return end_64 + LOCATOR_64.pack(LOCATOR_64_MAGIC, 0, directory_offset + directory_bytes, 1) + end
