"""``lazyckpt verify``: reads every byte and compares it with the checksums that were written with it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from lazyckpt import _engine
from lazyckpt.cli.flags import path_argument
from lazyckpt.cli.output import count, plain, print_error, print_json, progress, size, stdout
from lazyckpt.errors import CorruptFileError, LoadError, ReadError, UnsupportedFormatError
from lazyckpt.formats.reader import FileReader, Record
from lazyckpt.reading.ranges import ParallelRead, process_engine
from lazyckpt.reading.records import records_of, tensor_names
from lazyckpt.storage import manifest
from lazyckpt.storage.catalog import Catalog
from lazyckpt.storage.manifest import FileEntry, read_checkpoint
from lazyckpt.tools.contents import files_in, is_distributed, model_of, nothing_in, read_shard, shards_of

_READ_BYTES = 128 << 20  # read at once, between two moves of the progress bar

Advance = Callable[[int], None]


def verify(
    paths: Annotated[
        list[Path],
        path_argument("FILE|DIR...", "Files, checkpoints, or folders: all that is in them."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read files and checkpoints, and compare every checksum in them.

    Exit code: 0 all is whole, 1 something is damaged (it is named), 2 something could not be read.
    """
    findings = []
    for path in paths:
        for target in _targets(path):
            finding = _verify(target, named=target == path)
            findings.append(finding)
            if not as_json:
                _print(finding)
    codes = [_CODES[finding.state] for finding in findings]
    if as_json:
        print_json({"targets": [finding.to_json() for finding in findings]})
    elif len(findings) > 1:
        whole, damaged, unreadable = (codes.count(code) for code in (0, 1, 2))
        stdout().print(f"{whole} ok, {damaged} damaged, {unreadable} unreadable")
    # Damage is what was looked for: it is not hidden by a path that could not be read.
    raise typer.Exit(1 if 1 in codes else max(codes))


_CODES = {"ok": 0, "gone": 0, "damaged": 1, "unreadable": 2}


@dataclass
class _Report:
    """What reading found: of a file, or of all files of a checkpoint."""

    nbytes: int = 0
    records: int = 0
    without_checksum: int = 0
    whole_file_checked: bool = False
    damage: list[str] = field(default_factory=list)

    def add(self, other: _Report) -> None:
        self.nbytes += other.nbytes
        self.records += other.records
        self.without_checksum += other.without_checksum
        self.whole_file_checked = self.whole_file_checked or other.whole_file_checked
        self.damage += other.damage


def _targets(path: Path) -> Iterator[Path | LoadError]:
    """Files and checkpoints under ``path``, or why there are none."""
    found = list(_found_in(path))
    yield from found or [nothing_in(path)]


def _found_in(path: Path) -> Iterator[Path | LoadError]:
    """Checkpoints newest first; of a folder that is not a Checkpointer's, what is inside by its name."""
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
    if is_distributed(path):
        yield nothing_in(path)
    files = set(files_in(path).values())  # a trainer's: by their names, since damage may be anywhere
    for entry in sorted(path.iterdir()):
        if entry in files:
            yield entry
        elif os.path.isdir(entry) and not os.path.islink(entry) and not entry.name.startswith("."):
            yield from _found_in(entry)


@dataclass
class _Finding:
    """Of one target. ``why`` says in one line what is wrong, if nothing was read."""

    target: Path
    state: str  # of _CODES
    report: _Report = field(default_factory=_Report)
    why: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        report = self.report
        about = {"path": str(self.target), "state": self.state, "bytes": report.nbytes, "records": report.records}
        about["without_checksum"] = report.without_checksum
        return {**about, "damage": [self.why] if self.why else report.damage}


def _verify(target: Path | LoadError, *, named: bool) -> _Finding:
    """``named``: the user asked for just this, it was not found in a run's folder."""
    begin = time.perf_counter()
    path = target if isinstance(target, Path) else target.path
    try:
        if isinstance(target, LoadError):
            raise target
        report = _verify_target(target)
    except CorruptFileError as error:
        return _Finding(path, "damaged", why=str(error))
    except ReadError as error:
        return _Finding(path, "unreadable", why=str(error))
    except LoadError as error:
        if isinstance(target, Path) and not named and not os.path.exists(target):
            return _Finding(path, "gone", why="removed meanwhile: the run goes on, and keeps only some")
        return _Finding(path, "unreadable", why=str(error))
    return _Finding(path, "damaged" if report.damage else "ok", report, seconds=time.perf_counter() - begin)


def _print(finding: _Finding) -> None:
    report = finding.report
    if finding.state == "gone":
        stdout().print(f"gone  {plain(finding.target)}  {finding.why}", soft_wrap=True)
        return
    if finding.state == "unreadable":
        print_error(finding.why)
        return
    if finding.why:
        stdout().print(Text.assemble(("damaged", "bold red"), f"  {plain(finding.why)}"), soft_wrap=True)
        return
    facts = f"{count(report.records, 'record')}, {size(report.nbytes)}"
    if report.nbytes > 1e6:  # of less it would be that of opening the file
        facts += f", {report.nbytes / finding.seconds / 1e9:.2f} GB/s"
    word = ("damaged", "bold red") if report.damage else ("ok", "green")
    text = Text.assemble(word, "  ", (plain(finding.target), "bold"), f"  {facts}")
    if report.without_checksum == report.records and not report.whole_file_checked:
        text.append("\n    carries no checksums: it can be read, more cannot be told", style="yellow")
    elif report.without_checksum and not report.whole_file_checked:
        text.append(
            f"\n    {count(report.without_checksum, 'record')} without a checksum: not compared", style="yellow"
        )
    for line in report.damage:
        text.append(f"\n    {plain(line)}")
    stdout().print(text, soft_wrap=True)


def _verify_target(target: Path) -> _Report:
    if os.path.isdir(target):
        return _verify_checkpoint(target)
    return _verify_file(target) if model_of(target) is None else _verify_shards(target)


def _verify_checkpoint(folder: Path) -> _Report:
    checkpoint = read_checkpoint(folder)  # compares the lengths
    report = _Report()
    for entry in checkpoint.files:
        report.add(_verify_file(folder / entry.name, entry, prefix=f"{entry.name}: "))
    return report


def _verify_shards(index: Path) -> _Report:
    report = _Report()
    for file, names in shards_of(index).items():
        try:
            part = _verify_file(file, prefix=f"{file.name}: ")
            report.add(part)
            if not part.damage:
                read_shard(file, names)
        except UnsupportedFormatError:
            raise
        except LoadError as error:  # also if it is missing: the others may be whole
            report.damage.append(str(error).removeprefix(f"{file.parent}/"))
    return report


def _verify_file(file: Path, entry: FileEntry | None = None, *, prefix: str = "") -> _Report:
    """``entry`` is what the manifest tells of the file, ``prefix`` stands in front of its damage. Raises LoadError if
    it cannot be read; CorruptFileError, if there is no manifest and its structure is damaged."""
    report = _Report()
    records: list[Record] = []
    try:
        records = records_of(file)
    except (CorruptFileError, UnsupportedFormatError) as error:
        if entry is None:
            raise
        report.damage.append(str(error).removeprefix(f"{file.parent}/"))
    with FileReader(file) as opened:
        report.nbytes = opened.size
    with progress() as bar:
        task = bar.add_task(plain(f"{file.parent.name}/{file.name}"), total=report.nbytes)
        whole, found = _checksums(file, records, report.nbytes, lambda nbytes: bar.advance(task, nbytes))
    report.records = len(records)
    report.without_checksum = sum(record.crc32 is None for record in records)
    damaged = [(r, crc) for r, crc in zip(records, found, strict=True) if r.crc32 is not None and r.crc32 != crc]
    names = tensor_names(file) if damaged else {}
    for record, crc in damaged:
        meaning = f" ({names[record.name]})" if record.name in names else ""
        told = f"checksum {crc:08x}, written was {record.crc32:08x}"
        report.damage.append(f"{prefix}record {record.name}{meaning}: {told}")
    if entry is not None:
        report.whole_file_checked = True
        if whole != entry.crc32:
            told = f"checksum {whole:08x}, the manifest says {entry.crc32:08x}"
            where = "" if damaged else " (the damage is outside the records, or in the manifest)"
            report.damage.append(f"{prefix}the whole file: {told}{where}")
    return report


def _checksums(file: Path, records: list[Record], nbytes: int, advance: Advance) -> tuple[int, list[int]]:
    """CRC-32 of the whole file and of each record, from one reading."""
    whole = 0
    found = [0] * len(records)
    for batch in _batches(_pieces(records, nbytes)):
        crcs = ParallelRead(file, [piece for _, piece in batch], process_engine()).read_into([0] * len(batch))
        for (owner, piece), crc in zip(batch, crcs, strict=True):
            whole = _engine.crc32_combine(whole, crc, piece.nbytes)
            if owner is not None:
                found[owner] = _engine.crc32_combine(found[owner], crc, piece.nbytes)
        advance(sum(piece.nbytes for _, piece in batch))
    return whole, found


Piece = tuple[int | None, Record]  # index of the record that it is a part of; None: between records


def _pieces(records: list[Record], nbytes: int) -> Iterator[Piece]:
    """The whole file from front to end, in pieces of at most _READ_BYTES."""
    end = 0
    for index, record in enumerate([*records, Record("", nbytes, 0, None)]):
        for owner, begin, stop in ((None, end, record.offset), (index, record.offset, record.offset + record.nbytes)):
            for at in range(begin, stop, _READ_BYTES):
                yield owner, Record(record.name, at, min(_READ_BYTES, stop - at), None)
        end = record.offset + record.nbytes


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    total = 0
    for piece in pieces:
        batch.append(piece)
        total += piece[1].nbytes
        if total >= _READ_BYTES:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
