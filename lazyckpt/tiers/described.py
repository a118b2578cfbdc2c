"""Describes a file or a folder as a trainer has it saved: the manifest of its copy in a mirror."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from lazyckpt import _engine
from lazyckpt.errors import ConfigError
from lazyckpt.storage import direct, fields, folders, manifest
from lazyckpt.storage.manifest import LONE, MANIFEST, PIN, FileEntry

_PUBLISHED = (".safetensors", ".json", ".jinja", ".md", ".model", ".py", ".txt")
_OF_TRAINING = ("trainer_state.json",)
_OURS = ".lazyckpt-"  # of files that say which process has staged a folder
_TAKEN = (LONE, PIN, ".begun")  # suffixes of other objects


class Stamp(NamedTuple):
    """Tells whether a file was replaced or written to."""

    inode: int
    nbytes: int
    modified_ns: int

    @staticmethod
    def of(path: Path) -> Stamp:
        """Raises OSError."""
        found = os.stat(path)
        return Stamp(found.st_ino, found.st_size, found.st_mtime_ns)


class Saved:
    """A file or a folder that was just saved, and the checksums of the files in it that the engine has written."""

    def __init__(
        self,
        path: Path,
        step: int | None,
        crcs: Mapping[str, int],
        writers: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        """``crcs``: by name, relative to the folder. ``writers``: the ranks that wrote each, if not rank 0. Call it
        before other code may change the files. Raises OSError."""
        self._writers = writers
        self.path = path
        self.step = step
        self.layout: fields.Layout = "folder" if path.is_dir() else "file"
        self._base = path if self.layout == "folder" else path.parent
        self._crcs = {name: (Stamp.of(self._base / name), crc) for name, crc in crcs.items()}
        self._inode = os.stat(path).st_ino

    def is_replaced(self) -> bool:
        """Whether something else has this name now. Raises OSError."""
        return os.stat(self.path).st_ino != self._inode

    def described(self, sequence: int, parent: int | None, what: Literal["all", "model"] = "all") -> bytes:
        """The manifest, of all files or of those that ``from_pretrained`` reads. Reads the files whose checksum is not
        known, or that other code has changed since.

        Raises OSError, and ConfigError for a name that a mirror cannot give, and if there are no weights."""
        if self.path.name.endswith(_TAKEN) or (self.path / MANIFEST).exists():
            names = f"{MANIFEST}, {', '.join(_TAKEN)}"
            raise ConfigError(f"{self.path} cannot go to a mirror, which uses such names itself: {names}")
        files = self.entries(what)
        if what == "model" and not any(file.name.endswith(".safetensors") for file in files):
            raise ConfigError(f"{self.path} holds no weights as safetensors: what='model' publishes those")
        told = manifest.describe(
            step=self.step,
            sequence=sequence,
            parent=parent,
            files=files,
            layout=self.layout,
            writers=self._writers,
        )
        return json.dumps(told, indent=2).encode() + b"\n"

    def entries(self, what: Literal["all", "model"] = "all") -> list[FileEntry]:
        """The files. Reads them, and raises, as ``described``."""
        names = [name for name in sorted(self._names()) if what == "all" or _is_published(name)]
        for name in names:
            if not name.isprintable():  # nor are bytes that are no text
                raise ConfigError(f"{self.path} cannot go to a mirror: {name!r} is no name for an object; rename it")
        return [self._entry(name) for name in names]

    def _names(self) -> Iterator[str]:
        if self.layout == "file":
            yield self.path.name
            return
        for folder, subfolders, names in os.walk(self.path, onerror=folders.reraise):
            subfolders[:] = [name for name in subfolders if not folders.is_unfinished(name)]
            for name in (name for name in names if not name.startswith(_OURS)):
                with contextlib.suppress(FileNotFoundError):  # a link that leads nowhere
                    if stat.S_ISREG(os.stat(os.path.join(folder, name)).st_mode):
                        yield str(Path(folder, name).relative_to(self.path))

    def _entry(self, name: str) -> FileEntry:
        stamp = Stamp.of(self._base / name)
        known = self._crcs.get(name)
        if known is None or known[0] != stamp:
            crc = 0
            for part in direct.parts_in(self._base / name, stamp.nbytes, reuse=True):
                crc = _engine.crc32(part, crc)
            known = self._crcs[name] = stamp, crc
        return FileEntry(name, stamp.nbytes, known[1])


def _is_published(name: str) -> bool:
    """Whether a file in a trainer's folder is of the model, its tokenizer or its card."""
    return name.endswith(_PUBLISHED) and "/" not in name and name not in _OF_TRAINING


def number_in(name: str) -> int | None:
    """The number at the end of a name, as in checkpoint_3 or epoch-3.pt, which stands for a step that is not told."""
    found = re.search(r"(\d{1,18})(?:\.[A-Za-z]\w*)?$", name)
    return None if found is None else int(found[1])


def tells_the_same(text: bytes, other: bytes) -> bool:
    """Whether two manifests describe the same files; of a trainer's, also if they were described at another time."""
    if text == other:
        return True
    with contextlib.suppress(ValueError, KeyError, TypeError):
        told, also = json.loads(text), json.loads(other)
        return "layout" in told and all(told[name] == also[name] for name in ("layout", "step", "files"))
    return False
