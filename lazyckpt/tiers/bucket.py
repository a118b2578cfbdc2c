"""Checkpoints in an object store: the files of a checkpoint first, its manifest last. That is the commit."""

from __future__ import annotations

import errno
import json
import os
import socket
import uuid
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lazyckpt.errors import LoadError, MirrorError, load_error
from lazyckpt.formats.reader import unique_keys
from lazyckpt.storage import manifest
from lazyckpt.storage.manifest import MANIFEST, Checkpoint, FileEntry
from lazyckpt.stores.store import AnyPath, Entry, Store, StorePath
from lazyckpt.tiers.tier import Parts, Tier

RUN = "run.json"
WRITER = "writer.json"
INDEX = "index.json"
_NEW_IN_INDEX = 32  # manifests that a listing reads one by one, before a new index is worth its upload
_READS = 16  # manifests in flight
_MAX_INDEX_BYTES = 256 << 20
_MAX_SMALL_BYTES = 4096


class Bucket(Tier):
    """The checkpoints at a URL."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._root = StorePath(store, "")
        self.broken: list[LoadError] = []
        self._manifests: dict[str, bytes] = {}  # the text of each, by the tag of its object
        self._indexed: set[str] = set()  # tags
        self._claimed = False
        self.halves: dict[str, int] = {}  # bytes of the checkpoints that were not committed when last listed, by name
        self._abandoned: list[str] = []  # their objects
        self._writer = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "id": uuid.uuid4().hex}).encode()

    def run(self) -> str | None:
        told = self._small(RUN)
        return None if told is None else str(told["id"])

    def belong(self, run: str) -> str:
        if (there := self.run()) is None:
            there = run if self._store.create(RUN, json.dumps({"id": run}).encode()) else self.run()
        return there or run

    def claim(self) -> None:
        self._store.write(WRITER, [self._writer], len(self._writer))
        self._claimed = True

    def _check_writer(self) -> None:
        """Raises MirrorError if another process has claimed the place since this one has."""
        if not self._claimed:
            return
        told = self._small(WRITER) or {}
        if told != json.loads(self._writer):
            who = f"process {told.get('pid')} on {told.get('host')}"
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
        found, self.broken, self.halves, self._abandoned = [], [], {}, []
        for name, objects in folders.items():
            if not manifest.is_folder_name(name):
                continue
            if MANIFEST not in objects:
                self.halves[name] = sum(entry.nbytes for entry in objects.values())
                self._abandoned += [entry.name for entry in objects.values()]
                continue
            sizes = {file: entry.nbytes for file, entry in objects.items()}
            text = self._manifests.get(objects[MANIFEST].tag)
            try:
                if text is None:
                    raise LoadError(f"has no readable {MANIFEST}", path=self._root / name)
                pinned = f"{name}.pin" in folders.get("", {})
                found.append(manifest.parsed(self._root / name, text, pinned=pinned, size_of=sizes.get))
            except LoadError as error:
                self.broken.append(error)
        return found

    def upload(self, source: AnyPath, checkpoint: Checkpoint, parts: Parts) -> None:
        folder, text = source.name, manifest.read_manifest(source / MANIFEST)
        self._check_writer()
        there = {entry.name.rpartition("/")[2]: entry for entry in self._store.entries(folder)}
        if MANIFEST in there:
            if self._text(there[MANIFEST]) == text:
                return  # uploaded before this process was started
            self._store.remove([there[MANIFEST].name])
        known = {file.name: file for file in checkpoint.files}
        self._store.remove([entry.name for name, entry in there.items() if name not in known and name != MANIFEST])
        for name, file in known.items():
            if not (name in there and there[name].nbytes == file.nbytes and self._is_sent(folder, file)):
                self._store.write(f"{folder}/{name}", parts(file), file.nbytes, _label(file))
        self._check_writer()
        if not self._store.create(f"{folder}/{MANIFEST}", text):
            raise MirrorError("another process has uploaded this step", mirror=str(self._root), step=checkpoint.step)

    def _is_sent(self, folder: str, file: FileEntry) -> bool:
        """Whether an upload that was cut off has brought this file there whole."""
        return self._store.label(f"{folder}/{file.name}") == _label(file)

    def remove(self, checkpoint: Checkpoint) -> None:
        names = [entry.name for entry in self._store.entries(checkpoint.path.name)]
        self._store.remove(sorted(names, key=lambda name: not name.endswith(f"/{MANIFEST}")))

    def tidy(self) -> None:
        self._store.remove(self._abandoned)
        self._write_index()

    def _write_index(self) -> None:
        """Uploads the text of all manifests, if a listing would have to read many of them one by one."""
        if len(self._manifests.keys() - self._indexed) < _NEW_IN_INDEX:
            return
        told = {tag: text.decode() for tag, text in self._manifests.items()}
        data = json.dumps({"format": 1, "manifests": told}).encode()
        self._store.write(INDEX, [data], len(data))
        self._indexed = set(told)

    def _folders(self) -> dict[str, dict[str, Entry]]:
        """The objects by folder and name; those of no folder under ""."""
        found: dict[str, dict[str, Entry]] = defaultdict(dict)
        for entry in self._store.entries():
            folder, _, name = entry.name.rpartition("/")
            if "/" not in folder:
                found[folder][name] = entry
        return found

    def _read_manifests(self, folders: Mapping[str, Mapping[str, Entry]]) -> None:
        wanted = {objects[MANIFEST].tag: name for name, objects in folders.items() if MANIFEST in objects}
        self._manifests = {tag: text for tag, text in self._manifests.items() if tag in wanted}
        if len(wanted.keys() - self._manifests.keys()) > _NEW_IN_INDEX and INDEX in folders.get("", {}):
            known = self._index()
            self._indexed = set(known)
            self._manifests |= {tag: text.encode() for tag, text in known.items() if tag in wanted}
        left = [name for tag, name in wanted.items() if tag not in self._manifests]
        if not left:
            return
        with ThreadPoolExecutor(min(_READS, len(left))) as pool:
            texts = pool.map(lambda name: self._text(folders[name][MANIFEST]), left)
            for name, text in zip(left, texts, strict=True):
                if text is not None:
                    self._manifests[folders[name][MANIFEST].tag] = text

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


def _label(file: FileEntry) -> str:
    return f"crc32-{file.crc32:08x}"
