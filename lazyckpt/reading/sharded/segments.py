"""Reads parts of records, and checks every byte: it reads the whole segments around a part, or the whole record.

A record has a CRC-32 of all its bytes. lazyckpt also writes one of each of its segments, into a table behind the item
(formats/distcp.py). Without a table, as in files of plain torch.distributed.checkpoint, the record is one segment.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from lazyckpt import _engine
from lazyckpt.devices import HOST
from lazyckpt.formats.distcp import Place, read_segments
from lazyckpt.formats.reader import FileReader, Record
from lazyckpt.reading.ranges import ParallelRead, compare


class Span(NamedTuple):
    """The requested bytes of a file, and the bytes around them that share their checksum."""

    name: str  # of the tensor, for messages
    offset: int
    nbytes: int
    before: int = 0  # bytes
    after: int = 0
    crc32: int | None = None  # of all; None: the file has no checksum


class Segments:
    """The checksums of a record in parts. Raises CorruptFileError if its table does not fit it, or its CRC-32."""

    def __init__(self, file: FileReader, place: Place, record: Record) -> None:
        self._record = record
        table = read_segments(file, place, record)
        self._nbytes, self._crcs = table or (max(record.nbytes, 1), (0,))
        if table is not None and self._crc_of(0, len(self._crcs)) != record.crc32:
            raise file.corrupt(f"the checksums of the segments of {record.name} are not that of the record")

    def around(self, name: str, begin: int, nbytes: int) -> Span:
        """The segments that hold ``nbytes`` bytes of the record, at least one, from ``begin`` on."""
        record, end = self._record, begin + nbytes
        if record.crc32 is None:
            return Span(name, record.offset + begin, nbytes)
        first, last = begin // self._nbytes, -(-end // self._nbytes)
        crc = record.crc32 if last - first == len(self._crcs) else self._crc_of(first, last)
        after = min(last * self._nbytes, record.nbytes) - end
        return Span(name, record.offset + begin, nbytes, begin - first * self._nbytes, after, crc)

    def _crc_of(self, first: int, last: int) -> int:
        crc = self._crcs[first]
        for number in range(first + 1, last):
            nbytes = min(self._nbytes, self._record.nbytes - number * self._nbytes)
            crc = _engine.crc32_combine(crc, self._crcs[number], nbytes)
        return crc


def read_spans(
    path: str | os.PathLike[str],
    spans: Sequence[Span],
    pointers: Sequence[int],
    ordinals: Sequence[int],
    engine: _engine.Engine,
) -> None:
    """Reads the wanted bytes of each span to its pointer, on the device that ``ordinals`` names.

    Raises CorruptFileError, which names the spans whose checksum does not match, and LoadError. The bytes have landed
    then."""
    records: list[Record] = []
    to: list[int] = []
    on: list[int] = []
    owners: list[int] = []
    for owner, (span, pointer, ordinal) in enumerate(zip(spans, pointers, ordinals, strict=True)):
        at = span.offset - span.before
        for nbytes, where in ((span.before, 0), (span.nbytes, pointer), (span.after, 0)):
            if nbytes:
                records.append(Record(span.name, at, nbytes, None))
                to.append(where)
                on.append(ordinal if where else HOST)
                owners.append(owner)
            at += nbytes
    read = ParallelRead(path, records, engine)
    try:
        crcs = read.read_into(to, on)
    finally:
        read.close()
    found: list[int | None] = [None] * len(spans)
    for owner, record, crc in zip(owners, records, crcs, strict=True):
        before = found[owner]
        found[owner] = crc if before is None else _engine.crc32_combine(before, crc, record.nbytes)
    compare(path, spans, found)
