"""Small files with one word each: the id of a run, the process that uploads."""

from __future__ import annotations

import os
from pathlib import Path

from lazyckpt.storage import folders
from lazyckpt.storage.commit import FileStaging

RUN = ".lazyckpt-run"


def home_of(folder: Path) -> Path:
    """The folder that keeps the run of what trainers save in ``folder``. Accelerate takes every name in its folder
    ``checkpoints`` for that of a checkpoint."""
    return folder.parent if folder.name == "checkpoints" else folder


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
    write_text(file, f"{word}\n".encode())


def write_text(file: Path, text: bytes) -> None:
    """As ``write_word``, of any text."""
    staging = FileStaging(file)
    try:
        with folders.create(staging.path / file.name) as unfinished:
            unfinished.write(text.decode())
            unfinished.flush()
            os.fsync(unfinished.fileno())
        staging.publish()
    except BaseException:
        staging.discard()
        raise
