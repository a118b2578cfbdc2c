"""Checkpoints in an object store: the files of a checkpoint first, its manifest last. That is the commit."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from lazyckpt.errors import LoadError, MirrorError, load_error
from lazyckpt.formats.reader import unique_keys
from lazyckpt.storage import manifest
from lazyckpt.storage.manifest import LONE, MANIFEST, PIN, Checkpoint, FileEntry
from lazyckpt.stores.calls import Answer, Item, each
from lazyckpt.stores.store import Entry, Store, StorePath, UnlistableError
from lazyckpt.tiers.described import tells_the_same
from lazyckpt.tiers.tier import Parts, Tier

if TYPE_CHECKING:
    from lazyckpt.tiers.others import Others

RUN = "run.json"
WRITER = "writer.json"
INDEX = "index.json"
BEGUN = ".begun"  # the suffix of an empty object: a trainer's folder of this name is being uploaded
OWN = (RUN, WRITER, INDEX)
_NEW_IN_INDEX = 32  # manifests that a listing reads one by one, before a new index is worth its upload
_READS = 16  # manifests in flight
_FEW = 4  # manifests that are read one after the other
_ABANDONED_S = 86_400.0  # since the last object of an upload that was cut off; less, and it may be under way
_MAX_INDEX_BYTES = 32 << 20  # more than 10,000 manifests of one file each; in memory it takes a few times as much
_MAX_SMALL_BYTES = 4096


class Bucket(Tier):
    """The checkpoints at a URL."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._root = StorePath(store, "")
        self.broken: list[LoadError] = []
        self._unlisted: list[LoadError] = []
        self._manifests: dict[str, bytes] = {}  # the text of each, by the tag of its object
        self._indexed: set[str] = set()  # tags
        self._sound: set[str] = set()  # tags of manifests that describe a checkpoint
        self._run = ""
        self._claimed = False
        self.halves: dict[str, int] = {}  # bytes of the checkpoints that were not committed when last listed, by name
        self._abandoned: list[str] = []  # their objects
        self._writer = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "id": uuid.uuid4().hex}).encode()

    @property
    def heard(self) -> float:
        return self._store.heard

    def run(self) -> str | None:
        told = self._small(RUN)
        return None if told is None else str(told["id"])

    def belong(self, run: str) -> str:
        if (there := self.run()) is None:
            there = run if self._store.create(RUN, json.dumps({"id": run}).encode()) else self.run()
        self._run = there or run
        return self._run

    def claim(self) -> None:
        self._store.write(WRITER, [self._writer], len(self._writer))
        self._claimed = True

    def release(self) -> None:
        if self._small(WRITER) == json.loads(self._writer):
            self._store.remove([WRITER])

    def _check_writer(self) -> None:
        """Raises MirrorError if another process has claimed the place since this one. Claims it again if no process
        has it: it was emptied by hand, or the other one has ended."""
        if not self._claimed:
            return
        told = self._small(WRITER)
        if told is None and self.belong(self._run) == self._run:
            self.claim()
        elif told != json.loads(self._writer):
            who = "another run" if told is None else f"process {told.get('pid')} on {told.get('host')}"
            raise MirrorError(f"{who} uploads to it now; one process at a time does", mirror=str(self._root))

    def _small(self, name: str) -> Any:
        """The contents of a small object of ours; None if it is missing. Raises LoadError."""
        try:
            told = json.loads(self._store.whole(name, _MAX_SMALL_BYTES))
            told["id"]  # all have one
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise LoadError(f"not an object of lazyckpt ({type(error).__name__})", path=self._root / name) from error
        return told

    def checkpoints(self) -> list[Checkpoint]:
        folders = self._folders()
        self._read_manifests(folders)
        found, self.broken, self.halves, self._abandoned = [], list(self._unlisted), {}, []
        self._sound.clear()
        lone = folders.get("", {})
        for name, described in self._described(folders).items():
            objects = lone if described.name.endswith(LONE) else folders[name]
            sizes = {file: entry.nbytes for file, entry in objects.items()}
            text = self._manifests.get(described.tag)
            try:
                if text is None:
                    raise LoadError(f"has no readable {MANIFEST}", path=self._root / name)
                pinned = f"{name}{PIN}" in lone
                found.append(manifest.parsed(self._root / name, text, pinned=pinned, size_of=sizes.get))
                self._sound.add(described.tag)
            except LoadError as error:
                self.broken.append(error)
        for name, objects in folders.items():
            if name and MANIFEST not in objects:
                self._note_half(name, objects, lone.get(f"{name}{BEGUN}"))
        return found

    def _described(self, folders: Mapping[str, Mapping[str, Entry]]) -> dict[str, Entry]:
        """The manifests, by the name of the folder or of the lone file that each describes."""
        found = {name: objects[MANIFEST] for name, objects in folders.items() if MANIFEST in objects and name}
        for name, entry in folders.get("", {}).items():
            if name.endswith(LONE):
                found.setdefault(name.removesuffix(LONE), entry)
        return found

    def _note_half(self, name: str, objects: Mapping[str, Entry], begun: Entry | None) -> None:
        """Notes a folder without a manifest, if an upload has made it: it has the name of a checkpoint, or it was
        announced (``begun``)."""
        found = [entry for rest, entry in objects.items() if begun is not None or "/" not in rest]
        if not found or (begun is None and not manifest.is_folder_name(name)):
            return
        self.halves[name] = sum(entry.nbytes for entry in found)
        found += [begun] if begun is not None else []
        if time.time() - max(entry.modified for entry in found) > _ABANDONED_S:
            self._abandoned += [entry.name for entry in found]

    def upload(self, checkpoint: Checkpoint, text: bytes, parts: Parts, others: Others | None = None) -> None:
        self._check_writer()
        described = self._described_by(checkpoint)
        there = self._objects(checkpoint)
        sent = self._sent(there, checkpoint.files)
        if described in there:
            known = self._text(there[described])
            if len(sent) == len(checkpoint.files) and known is not None and tells_the_same(known, text):
                return  # uploaded before this process was started
            self._store.remove([there[described].name])
        if checkpoint.layout == "folder":
            self._store.create(f"{checkpoint.path.name}{BEGUN}", b"")
        self._store.remove([entry.name for name, entry in there.items() if name not in sent and name != described])
        if others is not None:
            others.begin()
        for file in checkpoint.files:
            if file.name not in sent and not (others is not None and others.bring(file.name)):
                self._send(checkpoint, file, parts)
        if others is not None:
            for file in others.late(lambda files: self._lacking(checkpoint, files)):
                self._send(checkpoint, file, parts)
        self._check_writer()
        if not self._store.create(self._key(checkpoint, described), text):
            there = self._objects(checkpoint)  # an answer may have been lost
            if described not in there or self._text(there[described]) != text:
                what = "another process has uploaded this step"
                raise MirrorError(what, mirror=str(self._root), step=checkpoint.step)
        if checkpoint.layout == "folder":
            self._store.remove([f"{checkpoint.path.name}{BEGUN}"])
        self._check_whole(checkpoint)

    def _send(self, checkpoint: Checkpoint, file: FileEntry, parts: Parts) -> None:
        self._store.write(self._key(checkpoint, file.name), parts(file), file.nbytes, manifest.label_of(file))

    def _lacking(self, checkpoint: Checkpoint, files: Sequence[FileEntry]) -> list[FileEntry]:
        """Those of these files that are not there. Where objects have no labels, one of the right size is taken: what
        was there before, ``upload`` has removed."""
        sent = self._sent(self._objects(checkpoint), files, "")
        return [file for file in files if file.name not in sent]

    def share(self, checkpoint: Checkpoint, files: Sequence[FileEntry], parts: Parts, place: str) -> None:
        for file in files:
            entry: Entry | None = None
            with contextlib.suppress(FileNotFoundError):  # a list would name the files of a thousand ranks
                entry = self._store.entry(self._key(checkpoint, file.name))
            if not self._is_sent(entry, file, ""):
                self._send(checkpoint, file, parts)

    def mend(self, checkpoint: Checkpoint, files: Sequence[FileEntry], parts: Parts) -> None:
        there = self._objects(checkpoint)
        described = there.get(self._described_by(checkpoint))
        text = None if described is None else self._text(described)
        if text is None or (told := json.loads(text))["sequence"] == checkpoint.sequence:
            return
        ours = {file.name for file in files}
        for file in (FileEntry(f["name"], f["bytes"], int(f["crc32"], 16)) for f in told["files"]):
            if file.name in ours and not self._is_sent(there.get(file.name), file):
                self._send(checkpoint, file, parts)

    def _check_whole(self, checkpoint: Checkpoint) -> None:
        """Raises OSError, and takes the commit back, if files have disappeared meanwhile."""
        there = self._objects(checkpoint)
        for file in checkpoint.files:
            if file.name not in there or there[file.name].nbytes != file.nbytes:
                self._store.remove([self._key(checkpoint, self._described_by(checkpoint))])
                what = "was removed or replaced while the checkpoint was uploaded"
                raise OSError(errno.EIO, f"{file.name} {what}", f"{self._root}/{checkpoint.path.name}")

    def _described_by(self, checkpoint: Checkpoint) -> str:
        """The name of the manifest beside the files."""
        return checkpoint.manifest.name

    def _key(self, checkpoint: Checkpoint, name: str) -> str:
        return name if checkpoint.layout == "file" else f"{checkpoint.path.name}/{name}"

    def _objects(self, checkpoint: Checkpoint) -> dict[str, Entry]:
        """The objects of a checkpoint by name; of a Checkpointer's, none of its subfolders."""
        if checkpoint.layout == "file":
            return self._lone_objects(checkpoint)
        folder = checkpoint.path.name
        entries = ((entry.name.removeprefix(f"{folder}/"), entry) for entry in self._entries(folder))
        return {name: entry for name, entry in entries if "/" not in name or checkpoint.layout == "folder"}

    def _lone_objects(self, checkpoint: Checkpoint) -> dict[str, Entry]:
        found = {}
        for name in (checkpoint.path.name, self._described_by(checkpoint)):
            with contextlib.suppress(FileNotFoundError):
                found[name] = self._store.entry(name)
        return found

    def _is_sent(self, entry: Entry | None, file: FileEntry, *labels: str) -> bool:
        """Whether an upload that was cut off has brought this file there whole. ``labels``: that also do."""
        if entry is None or entry.nbytes != file.nbytes:
            return False
        return self._store.label(entry.name) in (manifest.label_of(file), *labels)

    def _sent(self, there: Mapping[str, Entry], files: Sequence[FileEntry], *labels: str) -> set[str]:
        """The names of those of these files that are whole there; ``there``: the objects by name. ``labels``: as in
        ``_is_sent``."""
        found = [file for file in files if file.name in there]
        whole = _asked(lambda file: self._is_sent(there[file.name], file, *labels), found)
        return {file.name for file, is_sent in zip(found, whole, strict=True) if is_sent}

    def remove(self, checkpoint: Checkpoint) -> None:
        self._check_writer()
        described = self._described_by(checkpoint)
        names = [self._key(checkpoint, described)]
        if checkpoint.layout == "file":
            names.append(checkpoint.path.name)
        else:
            names += [entry.name for entry in self._entries(checkpoint.path.name) if entry.name != names[0]]
        self._store.remove(names)

    def tidy(self) -> None:
        if self._abandoned:
            self._check_writer()
            self._store.remove(self._abandoned)
        self._write_index()

    def _write_index(self) -> None:
        """Uploads the text of the manifests, if a listing would have to read many of them one by one: as many as may be
        in an index, the small ones first."""
        if len(self._sound - self._indexed) < _NEW_IN_INDEX:
            return
        told, left = {}, _MAX_INDEX_BYTES - 1024
        for tag in sorted(self._sound, key=lambda tag: len(self._manifests[tag])):
            text = self._manifests[tag].decode()
            left -= len(json.dumps({tag: text})) + 1
            if left < 0:
                break
            told[tag] = text
        data = json.dumps({"format": 1, "manifests": told}).encode()
        self._store.write(INDEX, [data], len(data))
        self._indexed = set(self._sound)

    def _all(self) -> Iterable[Entry]:
        """All objects. Where a foreign one has a name that makes this impossible: those of each folder by itself. Notes
        the folders that cannot be listed even so. Raises UnlistableError if such an object is in no folder."""
        self._unlisted.clear()
        with contextlib.suppress(UnlistableError):
            return self._store.entries()

        def inside(folder: str) -> list[Entry]:
            try:
                return self._entries(folder)
            except UnlistableError as error:
                with contextlib.suppress(FileNotFoundError):  # then it is foreign, too
                    self._store.entry(f"{folder}/{MANIFEST}")
                    self._unlisted.append(LoadError(f"cannot be listed: {error.strerror}", path=self._root / folder))
                return []

        lone, names = self._store.level()
        return [*lone, *chain.from_iterable(each(inside, names, _READS))]

    def _entries(self, folder: str) -> list[Entry]:
        """The objects below a folder; only those directly in it, if a foreign one deeper makes more impossible."""
        try:
            return self._store.entries(folder)
        except UnlistableError:
            return self._store.level(folder)[0]

    def _folders(self) -> dict[str, dict[str, Entry]]:
        """The objects by folder, the first part of their name, and the rest; those of no folder under ""."""
        found: dict[str, dict[str, Entry]] = defaultdict(dict)
        for entry in self._all():
            folder, slash, rest = entry.name.partition("/")
            found[folder if slash else ""][rest if slash else folder] = entry
        return found

    def _read_manifests(self, folders: Mapping[str, Mapping[str, Entry]]) -> None:
        wanted = {entry.tag: entry for entry in self._described(folders).values()}
        self._manifests = {tag: text for tag, text in self._manifests.items() if tag in wanted}
        if len(wanted.keys() - self._manifests.keys()) > _NEW_IN_INDEX and INDEX in folders.get("", {}):
            known = self._index()
            self._indexed = set(known)
            self._manifests |= {tag: text.encode() for tag, text in known.items() if tag in wanted}
        left = [entry for tag, entry in wanted.items() if tag not in self._manifests]
        for entry, text in zip(left, _asked(self._text, left), strict=True):
            if text is not None:
                self._manifests[entry.tag] = text

    def _text(self, entry: Entry) -> bytes | None:
        """The text of a manifest; None if it is gone, or is none."""
        try:
            return self._store.whole(entry.name, manifest.MAX_MANIFEST_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.EFBIG:
                return None
            raise load_error("cannot be read", error, path=self._root / entry.name) from error

    def _index(self) -> dict[str, str]:
        """The manifests in the index, by tag: what it says of an object that was replaced is never looked up."""
        try:
            told = json.loads(self._store.whole(INDEX, _MAX_INDEX_BYTES), object_pairs_hook=unique_keys)
            found: Any = told["manifests"]
            return {str(tag): str(text) for tag, text in found.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}  # the manifests themselves are there


def _asked(call: Callable[[Item], Answer], items: list[Item]) -> list[Answer]:
    """The answers of the store, many at a time."""
    return each(call, items, _READS) if len(items) > _FEW else list(map(call, items))
