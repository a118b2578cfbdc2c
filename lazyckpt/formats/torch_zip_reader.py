"""Finds the records of a ``torch.save`` archive, and refuses any file that is not exactly such an archive.

Zip lets two readers see two contents: junk in front or behind, local headers that contradict the directory, entries on
top of each other, duplicate names. This parser accounts for every byte of the file: local headers, data and descriptors
follow one another from offset 0 without a gap, then comes the directory, then the end records, then nothing. All torch
versions since 1.6 write such archives, and so do zip tools without compression.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lazyckpt.errors import UnsupportedFormatError
from lazyckpt.formats.reader import FileReader, Record
from lazyckpt.formats.torch_zip import (
    CENTRAL_ENTRY,
    CENTRAL_MAGIC,
    DESCRIPTOR,
    DESCRIPTOR_64,
    DESCRIPTOR_MAGIC,
    END,
    END_64,
    END_64_MAGIC,
    END_64_REST,
    END_MAGIC,
    EXTRA_ZIP64,
    FLAG_DESCRIPTOR,
    FLAG_UTF8,
    LOCAL_HEADER,
    LOCAL_MAGIC,
    LOCATOR_64,
    LOCATOR_64_MAGIC,
    MAX_16,
    MAX_32,
)

_MAX_DIRECTORY_BYTES = 64 * 2**20  # a million records
_JOIN_READS_WITHIN_BYTES = 16 * 1024
_MAX_READ_BYTES = 2**20


@dataclass(frozen=True)
class Directory:
    """The records of one archive, by name without the archive's folder, in file order."""

    records: dict[str, Record]
    archive_name: str


class _Entry(NamedTuple):
    """A record as the central directory describes it."""

    offset: int  # of the local header
    nbytes: int
    crc32: int
    flags: int
    name: bytes

    def __str__(self) -> str:
        return f"record {self.name.decode(errors='replace')!r} at offset {self.offset}"


def read_directory(path: str | os.PathLike[str]) -> Directory:
    """Opens the archive ``path`` and returns its directory; see ``directory_of``. Raises LoadError if it cannot."""
    with FileReader(path) as file:
        return directory_of(file)


def directory_of(file: FileReader) -> Directory:
    """Reads the directory and every local header of the archive, but no data.

    A checksum of zero for data that is not empty counts as none: torch writes it when its checksums are switched off,
    and under ``skip_data``.

    Raises CorruptFileError if the archive is damaged, truncated or ambiguous, UnsupportedFormatError if it is
    no archive of ``torch.save`` or is compressed or encrypted.
    """
    if file.read(0, min(file.size, 4)) != LOCAL_MAGIC:
        raise UnsupportedFormatError("not a zip archive: it does not begin with a record", path=file.path)
    count, directory_offset, directory_bytes = _read_end(file)
    raw = file.read(directory_offset, directory_bytes)
    if b"/constants.pkl" in raw and b"/code/" in raw:
        raise UnsupportedFormatError(
            "a TorchScript module: torch.jit.load reads it, and runs code from it", path=file.path
        )
    entries = sorted(_parse_entries(file, raw, count))
    offsets = list(_data_offsets(file, entries, directory_offset))
    archive_name, names = _strip_folder(file, entries)
    records = {
        name: Record(name, offset, entry.nbytes, entry.crc32 if entry.crc32 or not entry.nbytes else None)
        for name, offset, entry in zip(names, offsets, entries, strict=True)
    }
    return Directory(records, archive_name)


def _read_end(file: FileReader) -> tuple[int, int, int]:
    """Number of entries, offset and length of the central directory, from the end record(s)."""
    end_offset = file.size - END.size
    end = file.read(end_offset, END.size)
    magic, disk, first_disk, here, count, nbytes, offset, comment = END.unpack(end)
    if magic != END_MAGIC:
        raise file.corrupt("truncated, or followed by other bytes: it does not end with a zip end record")
    if disk or first_disk or here != count or comment:
        raise file.corrupt("zip end record: several disks or a comment")
    directory_end = end_offset
    locator_offset = end_offset - LOCATOR_64.size
    locator = file.read(locator_offset, LOCATOR_64.size) if locator_offset >= END_64.size else b""
    if locator.startswith(LOCATOR_64_MAGIC):
        directory_end = locator_offset - END_64.size
        if locator != LOCATOR_64.pack(LOCATOR_64_MAGIC, 0, directory_end, 1):
            raise file.corrupt("zip64 locator does not point to a record in front of it")
        told = (count, nbytes, offset)
        magic, rest, _, _, disk, first_disk, here, count, nbytes, offset = END_64.unpack(
            file.read(directory_end, END_64.size)
        )
        if magic != END_64_MAGIC or rest != END_64_REST or disk or first_disk or here != count:
            raise file.corrupt("zip64 end record is damaged")
        for short, long, maximum in zip(told, (count, nbytes, offset), (MAX_16, MAX_32, MAX_32), strict=True):
            if short not in (maximum, long):
                raise file.corrupt(f"end records contradict each other: {short} and {long}")
    if offset + nbytes != directory_end:
        raise file.corrupt(f"zip directory at {offset} with {nbytes} bytes does not end at {directory_end}")
    if not 0 < count * CENTRAL_ENTRY.size <= nbytes <= _MAX_DIRECTORY_BYTES:
        raise file.corrupt(f"a zip directory of {count} entries in {nbytes} bytes")
    return count, offset, nbytes


def _parse_entries(file: FileReader, raw: bytes, count: int) -> Iterator[_Entry]:
    position = 0
    for index in range(count):
        data = position + CENTRAL_ENTRY.size
        if data > len(raw):
            raise file.corrupt(f"zip directory, entry {index}: cut off")
        (
            magic, _, _, flags, method, _, _, crc, packed, nbytes, name_len, extra_len, comment_len, disk, _,
            attributes, offset,
        ) = CENTRAL_ENTRY.unpack_from(raw, position)  # fmt: skip
        name = raw[data : data + name_len]
        extra = raw[data + name_len : data + name_len + extra_len]
        position = data + name_len + extra_len
        if magic != CENTRAL_MAGIC or comment_len or disk or position > len(raw):
            raise file.corrupt(f"zip directory, entry {index}: damaged")
        if method or flags & ~(FLAG_DESCRIPTOR | FLAG_UTF8):
            what = f"compressed or encrypted (method {method}, flags {flags:#x}); save it with torch.save"
            raise UnsupportedFormatError(f"zip directory, entry {index}: {what}", path=file.path)
        # The file type of a Unix mode: unknown, or a regular file. For DOS's mark of a folder torch reads no data.
        if attributes >> 28 not in (0, 8) or attributes & 0x10:
            raise file.corrupt(f"zip directory, entry {index}: not a plain file")
        if extra or MAX_32 in (packed, nbytes, offset):
            where = f"zip directory, entry {index}"
            nbytes, packed, offset = _zip64(file, where, extra, [nbytes, packed, offset])
        if packed != nbytes:
            raise file.corrupt(f"zip directory, entry {index}: {packed} bytes stored for {nbytes}")
        yield _Entry(offset, nbytes, crc, flags, name)
    if position != len(raw):
        raise file.corrupt("zip directory: bytes behind the last entry")


def _zip64(file: FileReader, where: str, extra: bytes, fields: list[int]) -> list[int]:
    """Replaces the fields that say "see zip64" by the values of the zip64 extra field."""
    values = b""
    position = 0
    while position < len(extra):
        if position + 4 > len(extra):
            raise file.corrupt(f"{where}: extra fields are damaged")
        kind, nbytes = struct.unpack_from("<2H", extra, position)
        position += 4 + nbytes
        if position > len(extra) or (kind == EXTRA_ZIP64 and values):
            raise file.corrupt(f"{where}: extra fields are damaged")
        if kind == EXTRA_ZIP64:
            values = extra[position - nbytes : position]
    if len(values) != 8 * fields.count(MAX_32):
        raise file.corrupt(f"{where}: zip64 extra field does not fit the entry")
    longs = iter(struct.unpack(f"<{len(values) // 8}Q", values))
    return [next(longs) if field == MAX_32 else field for field in fields]


def _data_offsets(file: FileReader, entries: list[_Entry], directory_offset: int) -> Iterator[int]:
    """Where each record's data begins. Checks that headers, data and descriptors follow without a gap.

    Between the data of two records lie a descriptor and a local header, so one read serves both.
    """
    starts = [entry.offset for entry in entries]
    # Extra fields of unknown length end a header. Only large records need them, and they are read apart.
    spans = [
        (max(0, entry.offset - DESCRIPTOR_64.size), entry.offset + LOCAL_HEADER.size + len(entry.name))
        for entry in entries
    ]
    spans.append((max(0, directory_offset - DESCRIPTOR_64.size), directory_offset))
    if starts[0] != 0 or spans[-2][1] > directory_offset:
        raise file.corrupt("zip entries do not begin with the file or reach into the directory")
    windows = _read_spans(file, spans)
    window_offset, window = next(windows)
    for entry, next_start in zip(entries, [*starts[1:], directory_offset], strict=True):
        header = entry.offset - window_offset
        magic, _, flags, method, _, _, crc, packed, nbytes, name_len, extra_len = LOCAL_HEADER.unpack_from(
            window, header
        )
        if magic != LOCAL_MAGIC:
            raise file.corrupt(f"{entry}: no local header there")
        name = window[header + LOCAL_HEADER.size : header + LOCAL_HEADER.size + len(entry.name)]
        if (name_len, name) != (len(entry.name), entry.name) or flags != entry.flags or method:
            raise file.corrupt(f"{entry}: local header contradicts the directory")
        data = entry.offset + LOCAL_HEADER.size + name_len + extra_len
        end = data + entry.nbytes
        if end > next_start:
            raise file.corrupt(f"{entry}: overlaps what follows at {next_start}")
        if nbytes == MAX_32 or packed == MAX_32:
            extra = file.read(data - extra_len, extra_len)
            nbytes, packed = _zip64(file, str(entry), extra, [nbytes, packed])
        deferred = bool(flags & FLAG_DESCRIPTOR)
        for found, expected in ((crc, entry.crc32), (packed, entry.nbytes), (nbytes, entry.nbytes)):
            if found != expected and not (deferred and found == 0):
                raise file.corrupt(f"{entry}: local header contradicts the directory")
        window_offset, window = next(windows)
        gap = next_start - end
        if gap:
            descriptor = window[next_start - window_offset - gap : next_start - window_offset]
            if not deferred or gap > DESCRIPTOR_64.size or descriptor not in _descriptors(entry):
                raise file.corrupt(f"{entry}: {gap} bytes behind the data are not its descriptor")
        elif deferred and entry.nbytes:
            raise file.corrupt(f"{entry}: its descriptor is missing")
        yield data


def _descriptors(entry: _Entry) -> tuple[bytes, ...]:
    long = DESCRIPTOR_64.pack(DESCRIPTOR_MAGIC, entry.crc32, entry.nbytes, entry.nbytes)
    if entry.nbytes >= MAX_32:
        return (long,)
    return DESCRIPTOR.pack(DESCRIPTOR_MAGIC, entry.crc32, entry.nbytes, entry.nbytes), long


def _read_spans(file: FileReader, spans: list[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
    """Yields a window (offset, bytes) for each (begin, end), in ascending order. Near ones share one read."""
    reads: list[tuple[int, int, int]] = []  # begin, end, how many spans
    for begin, end in spans:
        if reads:
            first, last, shared = reads[-1]
            if begin - last <= _JOIN_READS_WITHIN_BYTES and end - first <= _MAX_READ_BYTES:
                reads[-1] = (first, max(last, end), shared + 1)
                continue
        reads.append((begin, end, 1))
    file.will_need((begin, end) for begin, end, _ in reads)
    for begin, end, shared in reads:
        window = (begin, file.read(begin, end - begin))
        for _ in range(shared):
            yield window


def _strip_folder(file: FileReader, entries: list[_Entry]) -> tuple[str, list[str]]:
    """The archive's folder, and the names inside it: all safe, unique, and in that one folder."""
    try:
        full_names = [entry.name.decode() for entry in entries]
    except UnicodeDecodeError as error:
        raise file.corrupt("a record's name is not UTF-8") from error
    archive_name, slash, _ = full_names[0].partition("/")
    prefix = archive_name + slash
    for name in full_names:
        parts = name.split("/")
        if "" in parts or "." in parts or ".." in parts or "\\" in name or "\0" in name:
            raise file.corrupt(f"unsafe record name {name!r}")
        if not slash or not name.startswith(prefix):
            what = f"not an archive of torch.save: record {name!r} is outside the folder {archive_name!r}"
            raise UnsupportedFormatError(what, path=file.path)
    # torch looks records up without regard to case
    if len({name.lower() for name in full_names}) != len(full_names):
        raise file.corrupt("two records have the same name")
    names = [name[len(prefix) :] for name in full_names]
    if "constants.pkl" in names:
        raise UnsupportedFormatError("a TorchScript archive; use torch.jit.load", path=file.path)
    if "data.pkl" not in names:
        raise UnsupportedFormatError("a zip archive, but not of torch.save: it has no data.pkl", path=file.path)
    return archive_name, names
