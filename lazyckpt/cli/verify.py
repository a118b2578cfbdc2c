"""``lazyckpt verify``: reads every byte and compares it with the checksums that were written with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from lazyckpt import _engine, commit
from lazyckpt.archive import Reading
from lazyckpt.catalog import Catalog, FileEntry, read_checkpoint
from lazyckpt.cli.output import count, plain, print_error, size, stderr, stdout
from lazyckpt.cli.skeleton import read_skeleton
from lazyckpt.cli.tree import Tree
from lazyckpt.containers import safetensors, sniff
from lazyckpt.containers.base import FileReader, Record
from lazyckpt.containers.torch_zip_reader import read_directory
from lazyckpt.errors import CorruptFileError, LoadError, UnsupportedFormatError
from lazyckpt.functional import process_engine

_READ_BYTES = 128 << 20  # read at once, between two moves of the progress bar

_SUFFIXES = (".bin", ".ckpt", ".pkl", ".pt", ".pth", ".safetensors")

Advance = Callable[[int], None]


def verify(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE|DIR...", help="Files, checkpoints, or folders: all checkpoints in them, or else all files."
        ),
    ],
) -> None:
    """Read files and checkpoints, and compare every checksum in them.

    Exit code: 0 all is whole, 1 something is damaged (it is named), 2 something could not be read.
    """
    findings = [_verify_and_print(target, named=target == path) for path in paths for target in _targets(path)]
    if len(findings) > 1:
        whole, damaged, unreadable = (findings.count(code) for code in (0, 1, 2))
        stdout().print(f"{whole} ok, {damaged} damaged, {unreadable} unreadable")
    # Damage is what was looked for: it is not hidden by a path that could not be read.
    raise typer.Exit(1 if 1 in findings else max(findings))


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
    """Files and checkpoints under ``path``, newest first, or why there are none."""
    if not path.is_dir() or (path / commit.MANIFEST).exists():
        yield path
        return
    catalog = Catalog(path)
    try:
        checkpoints = catalog.scan()
    except OSError as error:
        yield LoadError(f"cannot be read: {error.strerror}", path=path)
        return
    if not checkpoints and not catalog.broken:  # a trainer's: by the names of its files, since damage may be anywhere
        files = [entry for entry in sorted(path.iterdir()) if entry.suffix in _SUFFIXES and not entry.is_symlink()]
        yield from files
        if not files:
            yield LoadError("no checkpoint in this folder", path=path)
    yield from catalog.broken
    yield from (checkpoint.path for checkpoint in checkpoints)


def _verify_and_print(target: Path | LoadError, *, named: bool) -> int:
    """Returns the exit code. ``named``: the user asked for just this, it was not found in a run's folder."""
    begin = time.perf_counter()
    try:
        if isinstance(target, LoadError):
            raise target
        report = _verify_checkpoint(target) if target.is_dir() else _verify_file(target, None)
    except CorruptFileError as error:
        stdout().print(Text.assemble(("damaged", "bold red"), f"  {plain(error)}"))
        return 1
    except LoadError as error:
        if isinstance(target, Path) and not named and not target.exists():
            stdout().print(f"gone  {plain(target)}  removed meanwhile: the run goes on, and keeps only some")
            return 0
        print_error(str(error))
        return 2
    seconds = time.perf_counter() - begin
    facts = f"{count(report.records, 'record')}, {size(report.nbytes)}, {report.nbytes / seconds / 1e9:.2f} GB/s"
    word = ("damaged", "bold red") if report.damage else ("ok", "green")
    text = Text.assemble(word, "  ", (plain(target), "bold"), f"  {facts}")
    if report.without_checksum == report.records and not report.whole_file_checked:
        text.append("\n    carries no checksums: it can be read, more cannot be told", style="yellow")
    elif report.without_checksum and not report.whole_file_checked:
        text.append(
            f"\n    {count(report.without_checksum, 'record')} without a checksum: not compared", style="yellow"
        )
    for line in report.damage:
        text.append(f"\n    {plain(line)}")
    stdout().print(text)
    return 1 if report.damage else 0


def _verify_checkpoint(folder: Path) -> _Report:
    checkpoint = read_checkpoint(folder)  # compares the lengths
    report = _Report()
    for entry in checkpoint.files:
        report.add(_verify_file(folder / entry.name, entry))
    return report


def _verify_file(file: Path, entry: FileEntry | None) -> _Report:
    """``entry`` is what the manifest tells of the file. Raises LoadError if it cannot be read; CorruptFileError,
    if there is no manifest and its structure is damaged."""
    report = _Report()
    records: list[Record] = []
    prefix = f"{file.name}: " if entry is not None else ""
    try:
        records = _records_of(file)
    except (CorruptFileError, UnsupportedFormatError) as error:
        if entry is None:
            raise
        report.damage.append(str(error).removeprefix(f"{file.parent}/"))
    with FileReader(file) as opened:
        report.nbytes = opened.size
    with _progress() as progress:
        task = progress.add_task(plain(file), total=report.nbytes)
        whole, found = _checksums(file, records, report.nbytes, lambda nbytes: progress.advance(task, nbytes))
    report.records = len(records)
    report.without_checksum = sum(record.crc32 is None for record in records)
    damaged = [(r, crc) for r, crc in zip(records, found, strict=True) if r.crc32 is not None and r.crc32 != crc]
    names = _meanings(file) if damaged else {}
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


def _records_of(file: Path) -> list[Record]:
    """In file order; they do not overlap."""
    kind = sniff(file)
    if kind == "torch_legacy":
        raise UnsupportedFormatError("written by torch before 1.6: such a file has no checksums", path=file)
    if kind == "safetensors":
        return [info.record for info in safetensors.read_header(file).tensors.values()]
    return sorted(read_directory(file).records.values(), key=lambda record: record.offset)


def _checksums(file: Path, records: list[Record], nbytes: int, advance: Advance) -> tuple[int, list[int]]:
    """CRC-32 of the whole file and of each record, from one reading."""
    whole = 0
    found = [0] * len(records)
    for batch in _batches(_pieces(records, nbytes)):
        crcs = Reading(file, [piece for _, piece in batch], process_engine()).read_into([0] * len(batch))
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


def _meanings(file: Path) -> dict[str, str]:
    """Record to the name of a tensor in it, as far as the pickle tells."""
    if sniff(file) != "torch_zip":
        return {}
    names: dict[str, str] = {}
    try:
        for node in Tree(file.name, read_skeleton(file, read_directory(file))).root.walk():
            if node.record is not None:
                names.setdefault(node.record.name, node.path)
    except (LoadError, ValueError):
        pass  # damage in the pickle: the records have no names then
    return names


def _progress() -> Progress:
    """By bytes; on a terminal only, and gone when it is done."""
    console = stderr()
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,
        redirect_stderr=False,
    )
