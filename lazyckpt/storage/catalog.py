"""What is committed in a folder of checkpoints: found by scan, ordered by sequence.

The newest checkpoint is the one with the highest sequence, not the highest step: after a rollback from step 200 to
step 100 and twenty steps of training, step 120 is the newest. A checkpoint's parent is the one that training had
last saved or restored; the parents of the newest form the chain along which retention counts.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from collections.abc import Container
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from lazyckpt._version import __version__
from lazyckpt.errors import CorruptFileError, LoadError, ReadError, UnsupportedFormatError, load_error
from lazyckpt.formats.base import FileReader, unique_keys
from lazyckpt.storage import commit

FORMAT = 1
STATE = "state.pt"
_MAX_MANIFEST_BYTES = 16 << 20
SCANS = 10  # at most, of a folder from which another process removes what was just listed
MAX_NUMBER = 2**63 - 1  # a step, a sequence
_FOLDER = re.compile(r"step-([0-9]{8,})")


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def is_folder_name(name: str) -> bool:
    return _FOLDER.fullmatch(name) is not None


@dataclass(frozen=True)
class FileEntry:
    """A file as the manifest tells of it."""

    name: str
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint, as its manifest tells."""

    path: Path
    step: int
    sequence: int
    parent: int | None
    created: datetime
    files: tuple[FileEntry, ...]
    pinned: bool = False  # kept by retention, whatever the settings

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def manifest(*, step: int, sequence: int, parent: int | None, files: list[tuple[str, int, int]]) -> dict[str, Any]:
    """What manifest.json says; ``files`` are name, bytes, CRC-32. docs/format.md describes it."""
    told = {
        "format": FORMAT,
        "lazyckpt": __version__,
        "sequence": sequence,
        "parent": parent,
        "step": step,
        "world_size": 1,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "files": [
            {"name": name, "bytes": nbytes, "crc32": f"{crc:08x}", "writers": [0]} for name, nbytes, crc in files
        ],
    }
    return {**told, "crc32": checksum(told)}


def checksum(manifest: dict[str, Any]) -> str:
    """Of all that a manifest says besides: its CRC-32, whatever the order of its keys and the space between them."""
    told = {key: value for key, value in manifest.items() if key != "crc32"}
    return f"{zlib.crc32(json.dumps(told, sort_keys=True, separators=(',', ':')).encode()):08x}"


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads a manifest and compares the lengths of the files with it; no other byte is read.

    Raises CorruptFileError or UnsupportedFormatError that names what is wrong.
    """
    file = path / commit.MANIFEST
    status = _lstat(file)
    if status is None:
        raise LoadError(f"no checkpoint: there is no {commit.MANIFEST}", path=path)
    if stat.S_ISLNK(status.st_mode):
        raise CorruptFileError("a symbolic link, not a manifest", path=file)
    with FileReader(file) as reader:
        if reader.size > _MAX_MANIFEST_BYTES:
            raise reader.corrupt("too large for a manifest")
        text = reader.read(0, reader.size)
    try:
        data = json.loads(text.decode(), object_pairs_hook=unique_keys)
        if type(data["format"]) is not int or data["format"] != FORMAT:
            raise UnsupportedFormatError(f"manifest format {data['format']!r}; this version reads {FORMAT}", path=file)
        if data["crc32"] != checksum(data):
            raise CorruptFileError("checksum does not match", path=file)
        checkpoint = Checkpoint(
            path,
            _whole(data["step"]),
            _whole(data["sequence"]),
            None if data["parent"] is None else _whole(data["parent"]),
            _as_utc(datetime.fromisoformat(data["created"])),
            tuple(FileEntry(_name(f["name"]), _whole(f["bytes"]), _crc(f["crc32"])) for f in data["files"]),
            os.path.lexists(pin_of(path)),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"not a manifest ({type(error).__name__}: {error})", path=file) from error
    names = [entry.name for entry in checkpoint.files]
    if STATE not in names or len(set(names)) != len(names):
        raise CorruptFileError(f"does not name {STATE}, or names a file twice", path=file)
    if (named := _FOLDER.fullmatch(path.name)) is not None and int(named[1]) != checkpoint.step:
        raise CorruptFileError(f"the folder was renamed: its manifest says step {checkpoint.step}", path=path)
    for entry in checkpoint.files:
        status = _lstat(path / entry.name)
        nbytes = status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None
        if nbytes != entry.nbytes:
            found = "is missing" if nbytes is None else f"has {nbytes} bytes"
            raise CorruptFileError(f"{entry.name} {found}, the manifest says {entry.nbytes}", path=path)
    return checkpoint


def _lstat(path: Path) -> os.stat_result | None:
    """None if there is nothing. Raises ReadError if nobody can tell."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise load_error("cannot be read", error, path=path) from error


def is_missing(path: Path) -> bool:
    """Raises ReadError if nobody can tell."""
    return _lstat(path) is None


def _name(value: Any) -> str:
    """A name in the checkpoint's folder."""
    if not isinstance(value, str) or value in ("", ".", "..", commit.MANIFEST) or "/" in value or "\0" in value:
        raise ValueError(f"{value!r} is no name of a file in this folder")
    value.encode()  # not half a character
    return value


def _crc(value: Any) -> int:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{8}", value):
        raise ValueError(f"{value!r} is not a CRC-32")
    return int(value, 16)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _as_utc(time: datetime) -> datetime:
    return time if time.tzinfo is not None else time.replace(tzinfo=timezone.utc)


def pin_of(checkpoint: Path) -> Path:
    """The empty file beside a checkpoint that pins it. It belongs to the name: who saves the step again, keeps it."""
    return checkpoint.with_name(checkpoint.name + ".pin")


def pin(checkpoint: Path) -> None:
    """Retention keeps this checkpoint from now on; durable when this returns. Raises OSError."""
    os.close(os.open(pin_of(checkpoint), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
    commit.sync_path(checkpoint.parent)


def unpin(checkpoint: Path) -> None:
    """Undoes ``pin``; of one that is not pinned nothing happens. Raises OSError."""
    pin_of(checkpoint).unlink(missing_ok=True)
    commit.sync_path(checkpoint.parent)


class Catalog:
    """The checkpoints of one folder. Reads the folder anew at every call of ``scan``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.broken: list[LoadError] = []  # what the last scan could not read
        self.damaged: set[tuple[int, int]] = set()  # step and sequence of those whose files restore() found damaged
        self._sequences: dict[tuple[str, int], int] = {}  # by name and inode: nothing is written into a final name

    def scan(self) -> list[Checkpoint]:
        """All committed checkpoints, newest first. Raises LoadError if the folder itself cannot be read."""
        for _ in range(SCANS):
            found = self._read_all()
            if all(isinstance(error, ReadError) or os.path.lexists(error.path) for error in self.broken):
                break  # otherwise another process removes while we read, and what it has committed may not be listed
        return sorted(found, key=lambda c: c.sequence, reverse=True)

    def _read_all(self) -> list[Checkpoint]:
        found = []
        self.broken = []
        try:
            entries = list(os.scandir(self.root))
        except OSError as error:
            raise load_error("cannot be read", error, path=self.root) from error
        for entry in entries:
            try:
                if not _FOLDER.fullmatch(entry.name) or not entry.is_dir():
                    continue
                if entry.is_symlink():
                    raise LoadError("a symbolic link, which is not followed; restore(path=…) does", path=entry.path)
                found.append(read_checkpoint(Path(entry.path)))
                self._sequences[entry.name, entry.inode()] = found[-1].sequence
            except LoadError as error:
                self.broken.append(error)
            except OSError as error:
                self.broken.append(load_error("cannot be read", error, path=entry.path))
        return found

    def last_sequence(self) -> int:
        """The highest of a committed checkpoint, 0 without one. Reads only manifests that neither the last call nor
        ``scan`` has read: it is asked for at every save. A damaged one counts as 0, since nothing restores it. Raises
        LoadError if the folder cannot be read, ReadError if a manifest cannot: its sequence may be the highest."""
        found = {}
        try:
            entries = [e for e in os.scandir(self.root) if _FOLDER.fullmatch(e.name)]
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    continue
                key = entry.name, entry.inode()
                found[key] = self._sequences[key] if key in self._sequences else _sequence_of(Path(entry.path))
        except OSError as error:
            raise load_error("cannot be read", error, path=self.root) from error
        self._sequences = found
        return max(found.values(), default=0)


def _sequence_of(checkpoint: Path) -> int:
    try:
        return read_checkpoint(checkpoint).sequence
    except ReadError as error:
        what = f"{error.what}; it may be the newest checkpoint, so none can follow it. If it is lost, move it away"
        raise ReadError(what, path=error.path, errno=error.errno) from error
    except LoadError:
        return 0


def chain(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """The newest checkpoint, its parent, its parent's parent, …, as far as they still exist."""
    by_sequence = {c.sequence: c for c in checkpoints}
    result: list[Checkpoint] = []
    current = max(checkpoints, key=lambda c: c.sequence, default=None)
    while current is not None and current not in result:
        result.append(current)
        older = [s for s in by_sequence if current.parent is not None and s <= current.parent]
        # A parent that was pruned or replaced: its nearest elder stands in for it.
        current = by_sequence[max(older)] if older else None
    return result


class Verdict(NamedTuple):
    """Whether retention keeps a checkpoint, and why, as a phrase for people."""

    stays: bool
    why: str


def retention(
    checkpoints: list[Checkpoint],
    keep_last: int | None,
    keep_every: int | None,
    damaged: Container[tuple[int, int]] = (),
) -> dict[Checkpoint, Verdict]:
    """What becomes of each checkpoint.

    Keeps the newest ``keep_last`` of the chain; if the chain is shorter, also the newest others, until ``keep_last``
    are kept. ``damaged``, by step and sequence, stay, and do not count. Keeps besides those of the chain whose step is
    a multiple of ``keep_every``, and what is pinned. Keeps everything without ``keep_last``.
    """
    lineage = chain(checkpoints)
    on_chain = set(lineage)
    others = sorted(set(checkpoints) - on_chain, key=lambda c: c.sequence, reverse=True)
    line = f"the line to step {lineage[0].step}" if lineage else ""
    verdicts = {}
    whole = 0
    for c in (*lineage, *others):
        if keep_last is None:
            verdicts[c] = Verdict(True, "no keep_last")
        elif (c.step, c.sequence) in damaged:
            verdicts[c] = Verdict(True, "damaged: restore() passed it over")
        elif whole < keep_last:
            whole += 1
            short = f"fills up keep_last={keep_last}, since {line} is shorter"
            verdicts[c] = Verdict(True, f"within keep_last={keep_last}" if c in on_chain else short)
        elif c.pinned:
            verdicts[c] = Verdict(True, "pinned")
        elif c in on_chain and keep_every is not None and c.step % keep_every == 0:
            verdicts[c] = Verdict(True, f"a multiple of keep_every={keep_every}")
        elif c in on_chain:
            verdicts[c] = Verdict(False, f"beyond keep_last={keep_last}")
        else:
            verdicts[c] = Verdict(False, f"off {line}")
    return {c: verdicts[c] for c in checkpoints}


def superfluous(
    checkpoints: list[Checkpoint],
    keep_last: int | None,
    keep_every: int | None,
    damaged: Container[tuple[int, int]] = (),
) -> list[Checkpoint]:
    """What ``retention`` lets go of."""
    return [c for c, verdict in retention(checkpoints, keep_last, keep_every, damaged).items() if not verdict.stays]
