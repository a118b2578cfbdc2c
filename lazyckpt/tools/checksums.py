"""Reads every byte of a file, and compares its checksums: those of its records, and that of a manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from lazyckpt import _engine
from lazyckpt.errors import CorruptFileError, LoadError, UnsupportedFormatError
from lazyckpt.formats.reader import FileReader, Record
from lazyckpt.formats.records import records_of
from lazyckpt.reading.ranges import ParallelRead, process_engine
from lazyckpt.storage.manifest import FileEntry
from lazyckpt.stores.store import AnyPath
from lazyckpt.tools import Progress
from lazyckpt.tools.contents import read

_READ_BYTES = 128 << 20  # read between two reports of progress


@dataclass(frozen=True)
class Finding:
    """The finding on one file, one index of shards or one checkpoint."""

    path: AnyPath
    state: Literal["ok", "damaged", "unreadable", "gone"]  # "unreadable" may be whole; a running job removed "gone"
    bytes: int = 0  # read
    records: int = 0
    without_checksum: int = 0  # how many of the records carry none
    whole_file_checked: bool = False  # a manifest held the checksum of each file
    damage: tuple[str, ...] = ()  # one line for each fault; for "unreadable" and "gone" the reason
    seconds: float = 0.0


def verify_file(file: AnyPath, progress: Progress, entry: FileEntry | None = None) -> Finding:
    """Verifies one file. ``entry`` is its row in the manifest. Raises LoadError if the file cannot be read, and
    CorruptFileError for a broken structure unless there is an ``entry``."""
    damage: list[str] = []
    records: list[Record] = []
    try:
        records = records_of(file)
    except (CorruptFileError, UnsupportedFormatError) as error:
        if entry is None:
            raise
        damage.append(error.what)
    return compare(file, records, damage, progress, entry, names=lambda: _tensor_names(file))


def _tensor_names(file: AnyPath) -> dict[str, str]:
    """Returns the name of a tensor for each record that has another; nothing if the pickle is damaged."""
    names: dict[str, str] = {}
    try:
        for node in read(file).tree().walk():
            if node.storage is not None and node.storage.record.name != node.path:
                names.setdefault(node.storage.record.name, node.path)
    except LoadError:
        return {}
    return names


def compare(
    file: AnyPath,
    records: list[Record],
    damage: list[str],
    progress: Progress,
    entry: FileEntry | None,
    names: Callable[[], dict[str, str]] = dict,
) -> Finding:
    """Reads a file, and compares the checksums of its records and that of ``entry``. ``damage`` is the damage
    already found, ``names`` maps records to tensors. Raises LoadError if the file cannot be read."""
    with FileReader(file) as opened:
        nbytes = opened.size
    shown = f"{file.parent.name}/{file.name}"
    whole, found = _checksums(file, records, nbytes, lambda done: progress(shown, done, nbytes))
    damaged = [(r, crc) for r, crc in zip(records, found, strict=True) if r.crc32 is not None and r.crc32 != crc]
    meanings = names() if damaged else {}
    for record, crc in damaged:
        meaning = f" ({meanings[record.name]})" if record.name in meanings else ""
        damage.append(f"record {record.name}{meaning}: checksum {crc:08x}, written was {record.crc32:08x}")
    if entry is not None and whole != entry.crc32:
        where = "" if damaged else " (the damage is outside the records, or in the manifest)"
        damage.append(f"the whole file: checksum {whole:08x}, the manifest says {entry.crc32:08x}{where}")
    return Finding(
        path=file,
        state="damaged" if damage else "ok",
        bytes=nbytes,
        records=len(records),
        without_checksum=sum(record.crc32 is None for record in records),
        whole_file_checked=entry is not None,
        damage=tuple(damage),
    )


def _checksums(
    file: AnyPath, records: list[Record], nbytes: int, progress: Callable[[int], None]
) -> tuple[int, list[int]]:
    """Reads a file once; returns the CRC-32 of the whole and of each record."""
    whole = done = 0
    found = [0] * len(records)
    for batch in _batches(records, nbytes):
        crcs = ParallelRead(file, [piece for _, piece in batch], process_engine()).read_into([0] * len(batch))
        for (owner, piece), crc in zip(batch, crcs, strict=True):
            whole = _engine.crc32_combine(whole, crc, piece.nbytes)
            if owner is not None:
                found[owner] = _engine.crc32_combine(found[owner], crc, piece.nbytes)
            done += piece.nbytes
        progress(done)
    return whole, found


_Piece = tuple[int | None, Record]  # the index of the record that it is a part of; None between records


def _batches(records: list[Record], nbytes: int) -> Iterator[list[_Piece]]:
    """Cuts a whole file into pieces of at most _READ_BYTES, front to end, and yields as many at a time."""
    spans: list[tuple[int | None, int, int]] = []  # owner, begin, end
    end = 0
    for index, record in enumerate(records):
        spans += (None, end, record.offset), (index, record.offset, record.offset + record.nbytes)
        end = record.offset + record.nbytes
    batch: list[_Piece] = []
    held = 0
    for owner, begin, stop in [*spans, (None, end, nbytes)]:
        for at in range(begin, stop, _READ_BYTES):
            piece = Record("", at, min(_READ_BYTES, stop - at), None)
            batch.append((owner, piece))
            held += piece.nbytes
            if held >= _READ_BYTES:
                yield batch
                batch, held = [], 0
    if batch:
        yield batch
