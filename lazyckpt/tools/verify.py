"""Reads every byte of files and checkpoints, and compares it with the checksums that were written with it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lazyckpt import _engine
from lazyckpt.errors import CorruptFileError, LoadError, ReadError, UnsupportedFormatError
from lazyckpt.formats.distcp import Place
from lazyckpt.formats.reader import FileReader, Record
from lazyckpt.formats.records import records_of
from lazyckpt.reading.ranges import ParallelRead, process_engine
from lazyckpt.storage import manifest
from lazyckpt.storage.catalog import Catalog
from lazyckpt.storage.manifest import DCP_METADATA, FileEntry, read_checkpoint
from lazyckpt.tools import Progress
from lazyckpt.tools.contents import as_path, files_in, model_of, nothing_in, read, read_shard, shards_of

if TYPE_CHECKING:
    from lazyckpt.reading.sharded.metadata import Stamps

_READ_BYTES = 128 << 20  # read between two reports of progress


@dataclass(frozen=True)
class Finding:
    """The finding on one file, one index of shards or one checkpoint."""

    path: Path
    state: Literal["ok", "damaged", "unreadable", "gone"]  # "unreadable" may be whole; a running job removed "gone"
    bytes: int = 0  # read
    records: int = 0
    without_checksum: int = 0  # how many of the records carry none
    whole_file_checked: bool = False  # a manifest held the checksum of each file
    damage: tuple[str, ...] = ()  # one line for each fault; for "unreadable" and "gone" the reason
    seconds: float = 0.0


@dataclass(frozen=True)
class Verification:
    """The result of ``verify``: one finding for each file and checkpoint."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged and everything could be read."""
        return all(finding.state in ("ok", "gone") for finding in self.findings)


def verify(path: str | os.PathLike[str], *, progress: Progress | None = None) -> Verification:
    """Reads files and checkpoints and compares every checksum in them.

    ``path`` is a file, the index of shards, a checkpoint, a folder of torch.distributed.checkpoint, or another folder,
    which means everything in it. Damage and files that cannot be read are findings, not errors. Raises ConfigError for
    a URL.
    """
    return Verification(tuple(verify_each(as_path(path), progress)))


def verify_each(path: Path, progress: Progress | None = None) -> Iterator[Finding]:
    """Yields the findings one by one, each as soon as its file or checkpoint is read."""
    for target in list(_targets(path)) or [nothing_in(path)]:
        yield _verify(target, progress or (lambda name, done, total: None), in_folder=target != path)


def _targets(path: Path) -> Iterator[Path | LoadError]:
    """Yields checkpoints, newest first; the documents of other folders by name."""
    if not os.path.isdir(path) or os.path.exists(path / manifest.MANIFEST):
        yield path
        return
    catalog = Catalog(path)
    try:
        checkpoints = catalog.scan()
    except LoadError as error:
        yield error
        return
    yield from catalog.broken
    yield from (checkpoint.path for checkpoint in checkpoints)
    if checkpoints or catalog.broken:
        return
    files = set(files_in(path).values())
    if not files and any(path.glob("*.distcp")):
        yield nothing_in(path)
    for entry in sorted(path.iterdir()):
        if entry in files:
            yield entry
        elif os.path.isdir(entry) and not os.path.islink(entry) and not entry.name.startswith("."):
            yield from _targets(entry)


def _verify(target: Path | LoadError, progress: Progress, *, in_folder: bool) -> Finding:
    begin = time.perf_counter()
    path = target if isinstance(target, Path) else target.path
    try:
        if isinstance(target, LoadError):
            raise target
        if os.path.isdir(path):  # reading the manifest compares the lengths
            checkpoint = read_checkpoint(path)
            if checkpoint.is_sharded:
                parts = _verify_folder(path, progress, {entry.name: entry for entry in checkpoint.files})
            else:
                parts = [_verify_file(path / entry.name, progress, entry) for entry in checkpoint.files]
        elif path.name == DCP_METADATA:
            parts = _verify_folder(path.parent, progress, {})
        elif model_of(path) is not None:
            parts = [_verify_shard(file, names, progress) for file, names in shards_of(path).items()]
        else:
            parts = [_verify_file(path, progress)]
    except CorruptFileError as error:
        return Finding(path, "damaged", damage=(str(error),))
    except LoadError as error:
        if not isinstance(error, ReadError) and target is path and in_folder and not os.path.exists(path):
            return Finding(path, "gone", damage=("removed meanwhile by a job that keeps only some",))
        return Finding(path, "unreadable", damage=(str(error),))
    alone = len(parts) == 1 and parts[0].path == path
    damage = tuple(line if alone else f"{part.path.name}: {line}" for part in parts for line in part.damage)
    return Finding(
        path=path,
        state="damaged" if damage else "ok",
        bytes=sum(part.bytes for part in parts),
        records=sum(part.records for part in parts),
        without_checksum=sum(part.without_checksum for part in parts),
        whole_file_checked=any(part.whole_file_checked for part in parts),
        damage=damage,
        seconds=time.perf_counter() - begin,
    )


def _verify_shard(file: Path, names: set[str], progress: Progress) -> Finding:
    """Verifies a shard, and that it holds these tensors. A missing one is damage, so that the others are verified."""
    try:
        finding = _verify_file(file, progress)
        if not finding.damage:
            read_shard(file, names)
        return finding
    except UnsupportedFormatError:
        raise
    except LoadError as error:
        return Finding(file, "damaged", damage=(error.what,))


def _verify_folder(folder: Path, progress: Progress, entries: Mapping[str, FileEntry]) -> list[Finding]:
    """Verifies the files of a folder of torch.distributed.checkpoint, each item in them. ``entries``: their rows in the
    manifest, by name, if there is one."""
    from lazyckpt.reading.sharded.folder import open_folder  # imports torch, which takes seconds

    items: dict[str, dict[Place, str]] = {name: {} for name in entries}
    index = folder / DCP_METADATA
    damage: list[str] = []
    stamps: Stamps | None = None
    try:
        opened = open_folder(folder)
        stamps = opened.stamps
        for name, entry in opened.entries.items():
            for file, place in entry.items.values():
                items.setdefault(file, {}).setdefault(place, name)
    except (CorruptFileError, UnsupportedFormatError) as error:
        if not entries:
            raise
        damage.append(error.what)
    parts = [_compare(index, [], damage, progress, entries.get(DCP_METADATA))]
    for name, places in items.items():
        if name == DCP_METADATA:
            continue
        try:
            records, damage = _records_of_items(folder / name, places, stamps)
            parts.append(_compare(folder / name, records, damage, progress, entries.get(name)))
        except ReadError:
            raise
        except LoadError as error:
            parts.append(Finding(folder / name, "damaged", damage=(error.what,)))
    return parts


def _records_of_items(file: Path, places: Mapping[Place, str], stamps: Stamps | None) -> tuple[list[Record], list[str]]:
    """The records of the items of a file, in file order; and the damage of items without records, of tables of
    segments, and of the file's stamp."""
    from lazyckpt.reading.sharded.segments import Segments
    from lazyckpt.tools.inert_folder import records_at  # imports torch, which takes seconds

    records: list[Record] = []
    damage: list[str] = []
    with FileReader(file) as reader:
        for place, name in sorted(places.items()):
            try:
                found = records_at(reader, place, name).records
                records += found.values()
                for key, record in found.items():
                    if key.startswith("data/"):
                        Segments(reader, place, record)  # compares its table, if there is one
            except (CorruptFileError, UnsupportedFormatError) as error:
                damage.append(error.what)
        try:
            if stamps is not None:
                stamps.check(reader)
        except CorruptFileError as error:
            damage.append(error.what)
    return sorted(records, key=lambda record: record.offset), damage


def _verify_file(file: Path, progress: Progress, entry: FileEntry | None = None) -> Finding:
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
    return _compare(file, records, damage, progress, entry, names=lambda: _tensor_names(file))


def _tensor_names(file: Path) -> dict[str, str]:
    """Returns the name of a tensor for each record that has another; nothing if the pickle is damaged."""
    names: dict[str, str] = {}
    try:
        for node in read(file).tree().walk():
            if node.storage is not None and node.storage.record.name != node.path:
                names.setdefault(node.storage.record.name, node.path)
    except LoadError:
        return {}
    return names


def _compare(
    file: Path,
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
    file: Path, records: list[Record], nbytes: int, progress: Callable[[int], None]
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
