"""Checkpoints in a folder of another file system, by the protocol of the run's own folder (storage/commit.py)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lazyckpt.errors import LoadError, MirrorError
from lazyckpt.storage import direct, folders, manifest, removal
from lazyckpt.storage.catalog import Catalog
from lazyckpt.storage.commit import FileStaging, Staging
from lazyckpt.storage.manifest import LONE, MANIFEST, Checkpoint, FileEntry
from lazyckpt.tiers import in_use
from lazyckpt.tiers.described import tells_the_same
from lazyckpt.tiers.tier import Parts, Tier
from lazyckpt.tiers.words import claimed, read_word, run_of, write_text, write_word

if TYPE_CHECKING:
    from lazyckpt.tiers.others import Others

WRITER = ".lazyckpt-writer"
_UNFINISHED = ".unfinished"  # in a staged folder: the files that ranks are writing


class _Heard(Catalog):
    """Notes when the file system last answered."""

    heard = 0.0

    def _read(self, checkpoint: Path) -> Checkpoint:
        self.heard = time.monotonic()
        return manifest.read_described(checkpoint)  # a trainer's folder may have such a name, too


class MountedFolder(Tier):
    """The checkpoints in a folder, which is made if it is missing, but not the folders above it."""

    copies_at_once = True

    def __init__(self, root: Path, of: Path | None = None) -> None:
        """``of``: the folder of the run whose mirror it is."""
        self._root, self._of = root, of
        self._catalog = _Heard(root, missing_ok=True)
        self._run, self._claimed = "", False
        self._writer = f"process {os.getpid()} on {socket.gethostname()} ({uuid.uuid4().hex})"
        self.broken: list[LoadError] = []

    @property
    def heard(self) -> float:
        return self._catalog.heard

    def run(self) -> str | None:
        return run_of(self._root)

    def belong(self, run: str) -> str:
        self._check_mounted()
        folders.make_folder(self._root)
        self._run = claimed(self._root, run)
        if self._of is not None and self._run == run:
            in_use.remember(self._root, self._of)
        return self._run

    def _check_mounted(self) -> None:
        """Raises OSError if the file system is not mounted."""
        if run_of(self._root) is None:
            in_use.check(self._root, self._of)

    def claim(self) -> None:
        removal.sweep(self._root)
        write_word(self._root / WRITER, self._writer)
        self._claimed = True

    def release(self) -> None:
        if read_word(self._root / WRITER) == self._writer:
            (self._root / WRITER).unlink()

    def _check_writer(self) -> None:
        """Raises MirrorError if another process has claimed the folder since this one. Claims it again if no process
        has it: it was emptied by hand, or the other one has ended."""
        if not self._claimed or (there := read_word(self._root / WRITER)) == self._writer:
            return
        if there is None and self.belong(self._run) == self._run:
            self.claim()
        else:
            who = there or "another run"
            raise MirrorError(f"{who} uploads to it now; one process at a time does", mirror=str(self._root))

    def checkpoints(self) -> list[Checkpoint]:
        if self._of is not None:
            self._check_mounted()
        found = self._catalog.scan()
        self.broken = self._catalog.broken
        for path in self._described():
            try:
                checkpoint = manifest.read_described(path)
            except LoadError as error:
                self.broken.append(error)
            else:
                found.append(checkpoint)
        return found

    def _described(self) -> Iterator[Path]:
        """The folders and files of trainers."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self._root) as entries:
            for entry in entries:
                if entry.name.endswith(LONE):
                    yield self._root / entry.name.removesuffix(LONE)
                elif manifest.is_folder_name(entry.name) or folders.is_unfinished(entry.name):
                    continue
                elif os.path.lexists(os.path.join(entry.path, MANIFEST)):
                    yield Path(entry.path)

    def upload(self, checkpoint: Checkpoint, text: bytes, parts: Parts, others: Others | None = None) -> None:
        self._check_writer()
        copy = replace(checkpoint, path=self._root / checkpoint.path.name)
        described = Path(copy.manifest)
        if not manifest.is_missing(described):
            if tells_the_same(manifest.read_manifest(described), text) and _is_whole(copy):
                return
            if copy.layout == "file":
                described.unlink()
        told = None if copy.layout == "file" else text
        replaced = write_copy(copy, parts, told, before=self._check_writer, others=others)
        if copy.layout == "file":
            write_text(described, text)
        if replaced is not None:
            removal.remove(replaced)

    def share(self, checkpoint: Checkpoint, files: Sequence[FileEntry], parts: Parts, place: str) -> None:
        staged = self._root / place
        try:
            for file in _lacking(staged, files):
                _bring(staged, file, parts)
            folders.sync_path(staged)
        except FileNotFoundError:
            if (staged / _UNFINISHED).exists():
                raise
            # published or discarded meanwhile

    def mend(self, checkpoint: Checkpoint, files: Sequence[FileEntry], parts: Parts) -> None:
        pass  # ``share`` writes into no folder that has its final name

    def remove(self, checkpoint: Checkpoint) -> None:
        self._check_writer()
        copy = replace(checkpoint, path=self._root / checkpoint.path.name)
        if copy.layout == "file":
            removal.remove(Path(copy.manifest))
        removal.remove(copy.folder)

    def tidy(self) -> None:
        pass  # ``claim`` has, and ``upload`` does


def write_copy(
    copy: Checkpoint,
    parts: Parts,
    text: bytes | None,
    *,
    before: Callable[[], None] = lambda: None,
    others: Others | None = None,
) -> Path | None:
    """Writes the file or the folder ``copy``, which appears whole, with a manifest of this text unless that is None.
    Calls ``before`` before it appears. ``others``: as in ``Tier.upload``. Returns the new name of the folder that it
    replaces. Raises OSError, and what ``parts`` and ``before`` raise."""
    staging = (FileStaging if copy.layout == "file" else Staging)(copy.folder)
    try:
        for folder in sorted({folder for file in copy.files for folder in Path(file.name).parents[:-1]}):
            (staging.path / folder).mkdir(exist_ok=True)
        if others is not None:
            (staging.path / _UNFINISHED).mkdir()
            others.begin(staging.path.name)
        for file in copy.files:
            if others is None or not others.bring(file.name):
                direct.write_parts(staging.path / file.name, parts(file))
        if others is not None:
            for file in others.late(lambda files: _lacking(staging.path, files)):
                _bring(staging.path, file, parts)
            removal.remove(staging.path / _UNFINISHED, inside=staging.path.parent)  # now no rank can add anything
        told = None if text is None else json.loads(text)
        staging.describe(told, [file.name for file in copy.files])
        before()
        return staging.publish()
    except BaseException:
        staging.discard()
        raise


def _lacking(staged: Path, files: Sequence[FileEntry]) -> list[FileEntry]:
    """Those of these files that are not there. Lists the folder: a node may remember that a name was missing."""
    there = {folder: set(os.listdir(staged / folder)) for folder in {os.path.dirname(file.name) for file in files}}
    return [file for file in files if os.path.basename(file.name) not in there[os.path.dirname(file.name)]]


def _bring(staged: Path, file: FileEntry, parts: Parts) -> None:
    """Writes a file of a folder that several ranks fill, and gives it its name when it is durable."""
    unfinished = staged / _UNFINISHED / uuid.uuid4().hex
    try:
        direct.write_parts(unfinished, parts(file))
        os.rename(unfinished, staged / file.name)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def _is_whole(copy: Checkpoint) -> bool:
    """Whether the files have their lengths."""
    try:
        manifest.read_described(copy.path)
    except LoadError:
        return False
    return True
