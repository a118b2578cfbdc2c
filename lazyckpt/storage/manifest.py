"""Writes, reads and checks the manifest of a checkpoint. docs/format.md describes it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from lazyckpt._version import __version__
from lazyckpt.errors import CorruptFileError, LoadError, UnsupportedFormatError, load_error
from lazyckpt.formats.reader import FileReader, unique_keys
from lazyckpt.storage import fields
from lazyckpt.storage.fields import MANIFEST as MANIFEST
from lazyckpt.storage.fields import MAX_NUMBER as MAX_NUMBER
from lazyckpt.storage.fields import Layout
from lazyckpt.stores.store import AnyPath, StorePath

FORMAT = 1
STATE = "state.pt"
DCP_FILE = ".distcp"  # the suffix of the files that it describes
DCP_METADATA = ".metadata"  # in the place of STATE: many ranks wrote the state, as torch.distributed.checkpoint does
DEEPSPEED_FILES = ("model_states.pt", "optim_states.pt")  # the ends of the names of DeepSpeed's files
NO_STEP = -1  # of a file that was saved without one
_OWN = re.compile(r"rank-([1-9][0-9]*)\.pt")  # beside STATE: the state that a rank other than rank 0 has of its own
MAX_MANIFEST_BYTES = 16 << 20
PIN = ".pin"
LONE = f".{MANIFEST}"  # the suffix of the manifest of a lone file, in a mirror
_MAX_SEQUENCE = 2**62  # so that there is always a next one
_FOLDER = re.compile(r"step-([0-9]{8,})")


def manifest_of(path: AnyPath, layout: Layout) -> AnyPath:
    """The place of the manifest of a checkpoint with this layout."""
    return path.with_name(f"{path.name}{LONE}") if layout == "file" else path / MANIFEST


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def own_file(rank: int) -> str:
    """The name of the file with the state that a rank has of its own; that of rank 0 is in ``STATE``."""
    return f"rank-{rank}.pt"


def is_folder_name(name: str) -> bool:
    return _FOLDER.fullmatch(name) is not None


def step_of(name: str) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(name.removeprefix("step-"))


class FileEntry(NamedTuple):
    """A durable file, as the manifest describes it."""

    name: str
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint, as its manifest describes it."""

    path: AnyPath
    step: int
    sequence: int
    parent: int | None
    created: datetime
    files: tuple[FileEntry, ...]
    pinned: bool = False  # kept by retention, whatever the settings
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)  # given to save()
    kinds: Mapping[str, str] = field(default_factory=dict, compare=False)  # classes of tracked optimizers and such

    world_size: int = 1  # ranks that wrote it
    layout: Layout = "state"

    @property
    def base(self) -> AnyPath:
        """The folder that holds the files."""
        return self.path.parent if self.layout == "file" else self.path

    @property
    def manifest(self) -> AnyPath:
        """The file that describes this."""
        return manifest_of(self.path, self.layout)

    @property
    def folder(self) -> Path:
        """``path``, of a checkpoint that a file system has."""
        assert isinstance(self.path, Path)
        return self.path

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def is_sharded(self) -> bool:
        """Whether this is a folder of torch.distributed.checkpoint, and not one file."""
        return any(file.name == DCP_METADATA for file in self.files)

    @property
    def has_own_state(self) -> bool:
        """Whether ranks have files with their own state beside that of all."""
        return not self.is_sharded and any(_OWN.fullmatch(file.name) for file in self.files)

    @property
    def state(self) -> AnyPath:
        """The file that holds the state, or says which files do."""
        return self.path / (DCP_METADATA if self.is_sharded else STATE)


def describe(
    *,
    step: int | None,
    sequence: int,
    parent: int | None,
    files: list[FileEntry],
    layout: Layout = "state",
    metrics: Mapping[str, float] = MappingProxyType({}),
    kinds: Mapping[str, str] = MappingProxyType({}),
    world_size: int = 1,
    writers: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Returns the contents of manifest.json. ``files``: name, bytes and CRC-32 of each; ``writers``: the ranks that
    wrote them, if not rank 0. A metric that is not finite becomes null: JSON has neither NaN nor infinity."""
    told = {
        "format": FORMAT,
        "lazyckpt": __version__,
        "sequence": sequence,
        "parent": parent,
        "step": step,
        "world_size": world_size,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "files": [
            {"name": name, "bytes": nbytes, "crc32": f"{crc:08x}", "writers": list(writers.get(name, (0,)))}
            for name, nbytes, crc in files
        ],
    }
    if layout != "state":
        told["layout"] = layout
    if metrics:
        told["metrics"] = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    if kinds:
        told["kinds"] = dict(kinds)
    return {**told, "crc32": checksum(told)}


def checksum(manifest: dict[str, Any]) -> str:
    """Returns the CRC-32 of a manifest without its own checksum, whatever the order of keys and the white space."""
    told = {key: value for key, value in manifest.items() if key != "crc32"}
    return f"{zlib.crc32(json.dumps(told, sort_keys=True, separators=(',', ':')).encode()):08x}"


def read_checkpoint(path: AnyPath) -> Checkpoint:
    """Reads the manifest of a Checkpointer, and compares the lengths of the files with it; reads no other byte.

    Raises a LoadError that names the fault.
    """
    checkpoint = read_described(path)
    if checkpoint.layout != "state":
        what = (
            "was saved by a trainer, and not by a Checkpointer; lazyckpt.pull() copies it to where the trainer loads it"
        )
        raise LoadError(what, path=path)
    return checkpoint


def read_described(path: AnyPath) -> Checkpoint:
    """As ``read_checkpoint``, of any layout."""
    layouts: tuple[Layout, ...] = ("state", "file")
    for layout in layouts:
        if not is_missing(file := manifest_of(path, layout)):
            return checkpoint_of(path, read_manifest(file), layout)
    raise LoadError(f"no checkpoint: there is no {MANIFEST}{_hint_at_run(path)}", path=path)


def checkpoint_of(path: AnyPath, text: bytes, layout: Layout = "state") -> Checkpoint:
    """As ``read_checkpoint``; ``text``: of the manifest."""
    pinned = not is_missing(path.with_name(f"{path.name}{PIN}"))
    base = path.parent if layout == "file" else path
    return parsed(path, text, pinned=pinned, size_of=lambda name: _size(base / name))


def parsed(path: AnyPath, text: bytes, *, pinned: bool, size_of: Callable[[str], int | None]) -> Checkpoint:
    """The checkpoint in the folder ``path`` that a manifest describes. ``size_of``: the bytes of a file there; None if
    it is missing. Raises a LoadError that names the fault."""
    with _told_by(text, path / MANIFEST) as data:
        created = datetime.fromisoformat(data["created"])
        layout = fields.layout(data.get("layout", "state"))
        file = manifest_of(path, layout)
        checkpoint = Checkpoint(
            path,
            NO_STEP if data["step"] is None and layout != "state" else fields.whole(data["step"]),
            fields.whole(data["sequence"], _MAX_SEQUENCE),
            None if data["parent"] is None else fields.whole(data["parent"]),
            created if created.tzinfo is not None else created.replace(tzinfo=timezone.utc),
            tuple(
                FileEntry(fields.file_name(f["name"], layout), fields.whole(f["bytes"]), fields.crc(f["crc32"]))
                for f in data["files"]
            ),
            pinned,
            {str(k): math.nan if v is None else float(v) for k, v in data.get("metrics", {}).items()},
            {str(k): str(v) for k, v in data.get("kinds", {}).items()},
            fields.whole(data.get("world_size", 1)),
            layout,
        )
    names = [entry.name for entry in checkpoint.files]
    wanted = {"state": {STATE, DCP_METADATA}, "folder": set(names), "file": {path.name}}[layout]
    if not wanted & set(names) or len(set(names)) != len(names):
        raise CorruptFileError(f"does not name {STATE if layout == 'state' else 'a file'}, or one twice", path=file)
    if layout == "state" and (named := _FOLDER.fullmatch(path.name)) is not None and int(named[1]) != checkpoint.step:
        raise CorruptFileError(f"the folder was renamed: its manifest says step {checkpoint.step}", path=path)
    for entry in checkpoint.files:
        nbytes = size_of(entry.name)
        if nbytes != entry.nbytes:
            found = "is missing" if nbytes is None else f"has {nbytes} bytes"
            raise CorruptFileError(f"{entry.name} {found}, the manifest says {entry.nbytes} bytes", path=path)
    return checkpoint


def state_in(folder: AnyPath) -> tuple[AnyPath, int | None]:
    """The file in a checkpoint's folder that holds the state, or says which files do, and its CRC-32 as the manifest
    says; None in a folder of torch.distributed.checkpoint without a manifest. Raises a LoadError if it is neither."""
    if is_missing(folder / MANIFEST) and not is_missing(folder / DCP_METADATA):
        return folder / DCP_METADATA, None
    checkpoint = read_checkpoint(folder)
    check_labels(checkpoint)
    return checkpoint.state, next(file.crc32 for file in checkpoint.files if file.name == checkpoint.state.name)


def crc_of(folder: AnyPath, name: str) -> int | None:
    """The CRC-32 of a file, as the manifest beside it says; None if there is no manifest, or none that names the file.

    Raises a LoadError for a manifest that is damaged."""
    file = folder / MANIFEST
    if is_missing(file):
        return None
    with _told_by(read_manifest(file), file) as data:
        return next((fields.crc(entry["crc32"]) for entry in data["files"] if entry["name"] == name), None)


def read_manifest(file: AnyPath) -> bytes:
    """The text of a manifest. Raises a LoadError."""
    if isinstance(file, Path) and file.is_symlink():
        raise CorruptFileError("a symbolic link, not a manifest", path=file)
    with FileReader(file) as reader:
        if reader.size > MAX_MANIFEST_BYTES:
            raise reader.corrupt("too large for a manifest")
        return reader.read(0, reader.size)


@contextlib.contextmanager
def _told_by(text: bytes, file: AnyPath) -> Iterator[dict[str, Any]]:
    """Yields the contents of a manifest, after comparing its own checksum. Raises a LoadError, also if the body fails
    on contents that no manifest has."""
    try:
        data = json.loads(text.decode(), object_pairs_hook=unique_keys)
        if type(data["format"]) is not int or data["format"] != FORMAT:
            raise UnsupportedFormatError(f"manifest format {data['format']!r}; this version reads {FORMAT}", path=file)
        if data["crc32"] != checksum(data):
            raise CorruptFileError("checksum does not match", path=file)
        yield data
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise CorruptFileError(f"not a manifest ({type(error).__name__}: {error})", path=file) from error


def _hint_at_run(path: AnyPath) -> str:
    """Names a checkpoint in ``path`` if that is the folder of a run."""
    with contextlib.suppress(OSError):
        if steps := [name for name in os.listdir(path) if is_folder_name(name)]:
            return f"; it is the folder of a run: name a checkpoint in it, such as {path / max(steps, key=step_of)}"
    return ""


def _lstat(path: Path) -> os.stat_result | None:
    """Returns None if nothing has this name. Raises ReadError if the system does not tell."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise load_error("cannot be read", error, path=path) from error


def is_missing(path: AnyPath) -> bool:
    """Whether nothing has this name. Raises ReadError if the system does not tell."""
    return (_size(path) if isinstance(path, StorePath) else _lstat(path)) is None


def check_labels(checkpoint: Checkpoint) -> None:
    """Raises CorruptFileError if an object of a checkpoint in a store is not the one that its manifest means: two
    processes may have uploaded one step. An object that another program has copied tells nothing."""
    if not isinstance(base := checkpoint.base, StorePath):
        return
    for file in checkpoint.files:
        place = base / file.name
        try:
            label = place.store.label(place.key)
        except OSError as error:
            raise load_error("cannot be read", error, path=place) from error
        if label not in ("", label_of(file)):
            raise CorruptFileError(f"not the file that the manifest means: {label}, not {label_of(file)}", path=place)


def label_of(file: FileEntry) -> str:
    """The label of the object that holds this file."""
    return f"crc32-{file.crc32:08x}"


def is_directory(path: AnyPath) -> bool:
    """Whether this is a folder; in a store, one with a checkpoint. Raises ReadError."""
    if isinstance(path, StorePath):
        return any(not is_missing(path / name) for name in (MANIFEST, DCP_METADATA))
    return os.path.isdir(path)  # Path.is_dir() raises what load_error() is for


def _size(path: AnyPath) -> int | None:
    """The bytes of a regular file or of an object; None if there is none of this name. Raises ReadError."""
    if isinstance(path, Path):
        status = _lstat(path)
        return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None
    try:
        return path.store.entry(path.key).nbytes
    except FileNotFoundError:
        return None
    except OSError as error:
        raise load_error("cannot be read", error, path=path) from error


def pin_of(checkpoint: Path) -> Path:
    """The empty file beside a checkpoint that pins it. It belongs to the name, so it also pins a later checkpoint of
    the same step."""
    return checkpoint.with_name(checkpoint.name + PIN)
