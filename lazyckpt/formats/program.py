"""A file as a *program*: a few extents of rows, which the engine runs with live pointers.

A format lays a file out once, from names and sizes alone. A program holds no pointer and no tensor, so it can be kept
and run for every checkpoint with the same names and sizes.

    kind        nbytes       arg             what the engine writes
    LITERAL     n            blob offset     ``blob[arg:arg + n]``
    SOURCE      size of i    source i        the i-th storage of the checkpoint, whole
    CRC32_LE    4            source i        its CRC-32, little-endian
    CRC32_HEX   8            source i        its CRC-32, lower-case hex digits
    SEGMENTS    4 each       source i        the CRC-32 of each of its segments, little-endian

A source of n > 0 bytes has one SOURCE row, an empty one has none. The engine runs the extents of a file in the order
given, whatever their offsets. A row of checksums refers only to a source whose SOURCE row stands before it; SEGMENTS,
to one in the same extent. A segment is 1 MiB of a source; the last one may be shorter.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count, repeat
from typing import NamedTuple

LITERAL, SOURCE, CRC32_LE, CRC32_HEX, SEGMENTS = 0, 1, 2, 3, 4
PAGE_BYTES = 4096
SEGMENT_BYTES = 1 << 20


@dataclass(frozen=True)
class Extent:
    """A contiguous part of a file.

    ``offset`` is a multiple of 4096, or the exact end of the extent run before it. ``rows`` is flat: kind, nbytes, arg,
    kind, nbytes, arg, … (see the module's table).
    """

    offset: int
    rows: array[int]
    blob: bytes

    @property
    def nbytes(self) -> int:
        """The bytes that this extent takes in the file."""
        return sum(self.rows[1::3])

    @property
    def end(self) -> int:
        """The offset behind it."""
        return self.offset + self.nbytes


def literal(offset: int, data: bytes) -> Extent:
    """The extent that holds ``data``."""
    return Extent(offset, array("q", (LITERAL, len(data), 0) if data else ()), data)


def run(extents: Iterable[Extent], sources: Sequence[bytes]) -> bytes:
    """The file, in memory. Extents follow one another without a gap."""
    crcs = list(map(zlib.crc32, sources))
    written = []
    for extent in extents:
        for at in range(0, len(extent.rows), 3):
            kind, nbytes, arg = extent.rows[at : at + 3]
            if kind == LITERAL:
                written.append(extent.blob[arg : arg + nbytes])
            elif kind == SOURCE:
                written.append(sources[arg])
            elif kind == SEGMENTS:
                written.append(segments_of(sources[arg]))
            else:
                written.append(crcs[arg].to_bytes(4, "little") if kind == CRC32_LE else b"%08x" % crcs[arg])
    return b"".join(written)


class Cut(NamedTuple):
    """Some ranges of an extent."""

    extents: list[Extent]  # one for each range; their sources are ``parts``
    parts: list[tuple[int, int, int]]  # source of the whole extent, begin and end in it
    late: list[tuple[int, int]]  # offsets of checksums that are 0 in ``extents``, since these lack a byte, and source


def cut(extent: Extent, ranges: Iterable[tuple[int, int]]) -> Cut:
    """The program of some ranges, in the order of the file, of an extent with LITERAL, SOURCE and CRC32_LE rows.

    No range begins or ends inside a checksum. Of one source, only the first part may have the checksum."""
    found = Cut([], [], [])
    whole: dict[int, int] = {}  # parts, by source
    todo = iter(ranges)
    begin, end = next(todo, (-1, -1))
    builder, offset = ExtentBuilder(), extent.offset
    for at in range(0, len(extent.rows), 3):
        kind, nbytes, arg = extent.rows[at : at + 3]
        while 0 <= begin < offset + nbytes:
            first, last = max(begin - offset, 0), min(end - offset, nbytes)
            if kind == LITERAL:
                builder.literal(extent.blob[arg + first : arg + last])
            elif kind == SOURCE:
                if (first, last) == (0, nbytes):
                    whole[arg] = len(found.parts)
                builder.source(len(found.parts), last - first)
                found.parts.append((arg, first, last))
            elif arg in whole:
                builder.crc32_le(whole[arg])
            else:
                found.late.append((offset, arg))
                builder.literal(bytes(4))
            if end > offset + nbytes:
                break
            found.extents.append(builder.build(begin))
            builder = ExtentBuilder()
            begin, end = next(todo, (-1, -1))
        offset += nbytes
    return found


def rendered(extent: Extent, crcs: Sequence[int]) -> bytes:
    """The bytes of an extent with LITERAL, CRC32_LE and CRC32_HEX rows. ``crcs``: of the sources."""
    written = []
    for at in range(0, len(extent.rows), 3):
        kind, nbytes, arg = extent.rows[at : at + 3]
        if kind == LITERAL:
            written.append(extent.blob[arg : arg + nbytes])
        else:
            written.append(crcs[arg].to_bytes(4, "little") if kind == CRC32_LE else b"%08x" % crcs[arg])
    return b"".join(written)


def segments_of(source: bytes) -> bytes:
    """The contents of a SEGMENTS row."""
    parts = (source[at : at + SEGMENT_BYTES] for at in range(0, len(source), SEGMENT_BYTES))
    return b"".join(zlib.crc32(part).to_bytes(4, "little") for part in parts)


class ExtentBuilder:
    """Collects the rows of one extent, and joins adjacent literals into one row."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._blob = bytearray()
        self._pending = 0  # where in the blob the literal without a row begins

    def literal(self, data: bytes) -> None:
        self._blob += data

    def source(self, index: int, nbytes: int) -> None:
        self.row(SOURCE, nbytes, index)

    def sources(self, sizes: Iterable[int]) -> None:
        """All sources, one behind the other."""
        self._end_literal()
        self._rows += chain.from_iterable(zip(repeat(SOURCE), sizes, count()))

    def crc32_le(self, index: int) -> None:
        self.row(CRC32_LE, 4, index)

    def crc32_hex(self, index: int) -> None:
        self.row(CRC32_HEX, 8, index)

    def row(self, kind: int, nbytes: int, arg: int) -> None:
        """Any row but LITERAL."""
        self._end_literal()
        self._rows += (kind, nbytes, arg)

    def build(self, offset: int) -> Extent:
        self._end_literal()
        return Extent(offset, array("q", self._rows), bytes(self._blob))

    def _end_literal(self) -> None:
        end = len(self._blob)
        if end > self._pending:
            self._rows += (LITERAL, end - self._pending, self._pending)
            self._pending = end
