"""Checkpoints in a folder of another file system, by the protocol of the run's own folder (storage/commit.py)."""

from __future__ import annotations

import json
import os
import socket
import uuid
from pathlib import Path

from lazyckpt.errors import LoadError, MirrorError
from lazyckpt.storage import direct, folders, manifest, removal
from lazyckpt.storage.catalog import Catalog
from lazyckpt.storage.commit import FileStaging, Staging
from lazyckpt.storage.manifest import MANIFEST, Checkpoint
from lazyckpt.tiers.tier import Parts, Tier

RUN = ".lazyckpt-run"
WRITER = ".lazyckpt-writer"


class MountedFolder(Tier):
    """The checkpoints in a folder, which is made if it is missing."""

    copies_at_once = True

    def __init__(self, root: Path) -> None:
        self._root = root
        self._catalog = Catalog(root, missing_ok=True)
        self._run, self._claimed = "", False
        self._writer = f"process {os.getpid()} on {socket.gethostname()} ({uuid.uuid4().hex})"
        self.broken: list[LoadError] = []

    def run(self) -> str | None:
        return run_of(self._root)

    def belong(self, run: str) -> str:
        folders.make_folder(self._root)
        self._run = claimed(self._root, run)
        return self._run

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
        found = self._catalog.scan()
        self.broken = self._catalog.broken
        return found

    def upload(self, checkpoint: Checkpoint, text: bytes, parts: Parts) -> None:
        name = checkpoint.path.name
        self._check_writer()
        there = self._root / name / MANIFEST
        if not manifest.is_missing(there) and manifest.read_manifest(there) == text:
            return
        staging = Staging(self._root / name)
        try:
            for file in checkpoint.files:
                direct.write_parts(staging.path / file.name, parts(file))
            staging.describe(json.loads(text), [file.name for file in checkpoint.files])
            self._check_writer()
            replaced = staging.publish()
        except BaseException:
            staging.discard()
            raise
        if replaced is not None:
            removal.remove(replaced)

    def remove(self, checkpoint: Checkpoint) -> None:
        self._check_writer()
        removal.remove(self._root / checkpoint.path.name)

    def tidy(self) -> None:
        pass  # ``claim`` has, and ``upload`` does


def run_of(root: Path) -> str | None:
    """The id of the run whose checkpoints lie in a folder; None if it has none yet. Raises OSError."""
    return read_word(root / RUN)


def claimed(root: Path, run: str) -> str:
    """Gives the folder the id ``run``, durably, unless it has one. Returns the one that it has. Raises OSError."""
    if (there := run_of(root)) is not None:
        return there
    write_word(root / RUN, run)
    return run


def read_word(file: Path) -> str | None:
    """The contents of a file of ``write_word``; None if it is missing. Raises OSError."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip() or None
    except FileNotFoundError:
        return None


def write_word(file: Path, word: str) -> None:
    """Replaces the contents of a small file, atomically and durably. Raises OSError."""
    staging = FileStaging(file)
    try:
        with folders.create(staging.path / file.name) as unfinished:
            unfinished.write(f"{word}\n")
            unfinished.flush()
            os.fsync(unfinished.fileno())
        staging.publish()
    except BaseException:
        staging.discard()
        raise
