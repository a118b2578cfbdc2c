"""Reads every byte of files and checkpoints, and compares it with the checksums that were written with it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lazyckpt.errors import CorruptFileError, LoadError, ReadError, UnsupportedFormatError
from lazyckpt.formats.distcp import Place
from lazyckpt.formats.reader import FileReader, Record
from lazyckpt.storage import manifest
from lazyckpt.storage.catalog import Catalog
from lazyckpt.storage.manifest import DCP_METADATA, FileEntry, read_described
from lazyckpt.stores.store import AnyPath, StorePath
from lazyckpt.stores.urls import located
from lazyckpt.tools import Progress, deepspeed
from lazyckpt.tools.checksums import Finding, compare, verify_file
from lazyckpt.tools.contents import files_in, model_of, nothing_in, read_shard, shards_of
from lazyckpt.tools.deepspeed_layout import UNIVERSAL
from lazyckpt.tools.verify_deepspeed import verify_latest, verify_tag

if TYPE_CHECKING:
    from lazyckpt.reading.sharded.metadata import Stamps


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

    ``path`` is a file, the index of shards, a checkpoint, a folder of torch.distributed.checkpoint, the folder of a tag
    of DeepSpeed, or another folder, which means everything in it. Damage and files that cannot be read are findings,
    not errors. Also takes the URL of a run, a checkpoint or a file. Raises ConfigError for a URL that it cannot read.
    """
    return Verification(tuple(verify_each(located(path), progress)))


def verify_each(path: AnyPath, progress: Progress | None = None) -> Iterator[Finding]:
    """Yields the findings one by one, each as soon as its file or checkpoint is read."""
    if isinstance(path, StorePath):
        from lazyckpt.tools.verify_url import verify_url

        yield from verify_url(path, progress or (lambda name, done, total: None))
        return
    states: dict[AnyPath, str] = {}
    for target in list(_targets(path)) or [nothing_in(path)]:
        if isinstance(target, _SaveDir):
            yield from verify_latest(target.path, states)
            continue
        finding = _verify(target, progress or (lambda name, done, total: None), in_folder=target != path)
        states[finding.path] = finding.state
        yield finding


@dataclass(frozen=True)
class _SaveDir:
    """A folder into which DeepSpeed saves, whose tags are verified: its ``latest`` is verified last."""

    path: Path


def _targets(path: Path) -> Iterator[Path | LoadError | _SaveDir]:
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
    yield from (checkpoint.folder for checkpoint in checkpoints)
    if checkpoints or catalog.broken:
        return
    files = set(files_in(path).values())
    known: set[Path] = set()
    if deepspeed.is_tag(path):
        tag = deepspeed.open_tag(path)
        known = {path / name for name in tag.files} | ({path / UNIVERSAL} if tag.is_universal else set())
        yield path
    for tag in deepspeed.tags(path):
        known.add(tag.path)
        yield tag.path
    if not files and any(path.glob("*.distcp")):
        yield nothing_in(path)
    for entry in sorted(path.iterdir()):
        if entry in known:
            continue
        if entry in files:
            yield entry
        elif os.path.isdir(entry) and not os.path.islink(entry) and not entry.name.startswith("."):
            yield from _targets(entry)
    if deepspeed.is_save_dir(path):
        yield _SaveDir(path)


def _verify(target: Path | LoadError, progress: Progress, *, in_folder: bool) -> Finding:
    begin = time.perf_counter()
    path: Path = target if isinstance(target, Path) else target.path
    try:
        if isinstance(target, LoadError):
            raise target
        if os.path.isdir(path) and deepspeed.is_tag(path):
            parts = verify_tag(path, progress)
        elif os.path.isdir(path):  # reading the manifest compares the lengths
            checkpoint = read_described(path)
            if checkpoint.layout == "folder":
                parts = [compare(path / entry.name, [], [], progress, entry) for entry in checkpoint.files]
            elif checkpoint.is_sharded:
                parts = _verify_folder(path, progress, {entry.name: entry for entry in checkpoint.files})
            else:
                parts = [verify_file(path / entry.name, progress, entry) for entry in checkpoint.files]
        elif path.name == DCP_METADATA:
            parts = _verify_folder(path.parent, progress, {})
        elif model_of(path) is not None:
            parts = [_verify_shard(file, names, progress) for file, names in shards_of(path).items()]
        else:
            described = not manifest.is_missing(manifest.manifest_of(path, "file"))
            parts = [verify_file(path, progress, read_described(path).files[0] if described else None)]
    except CorruptFileError as error:
        return Finding(path, "damaged", damage=(str(error),))
    except LoadError as error:
        if not isinstance(error, ReadError) and target is path and in_folder and not os.path.exists(path):
            return Finding(path, "gone", damage=("removed meanwhile by a job that keeps only some",))
        return Finding(path, "unreadable", damage=(str(error),))
    alone = len(parts) == 1 and parts[0].path == path
    damage = tuple(line if alone else f"{_short(part.path, path)}: {line}" for part in parts for line in part.damage)
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


def _short(file: AnyPath, target: Path) -> str:
    return str(file.relative_to(target)) if isinstance(file, Path) and file.is_relative_to(target) else file.name


def _verify_shard(file: Path, names: set[str], progress: Progress) -> Finding:
    """Verifies a shard, and that it holds these tensors. A missing one is damage, so that the others are verified."""
    try:
        finding = verify_file(file, progress)
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
    parts = [compare(index, [], damage, progress, entries.get(DCP_METADATA))]
    for name, places in items.items():
        if name == DCP_METADATA:
            continue
        try:
            records, damage = _records_of_items(folder / name, places, stamps)
            parts.append(compare(folder / name, records, damage, progress, entries.get(name)))
        except ReadError:
            raise
        except LoadError as error:
            parts.append(Finding(folder / name, "damaged", damage=(error.what,)))
    return parts


def _records_of_items(file: Path, places: Mapping[Place, str], stamps: Stamps | None) -> tuple[list[Record], list[str]]:
    """The records of the items of a file, in file order; and the damage of items without records, of tables of
    segments, and of the file's stamp."""
    from lazyckpt.conversion.inert_folder import records_at  # imports torch, which takes seconds
    from lazyckpt.reading.sharded.segments import Segments

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
