"""Reads a ``torch.save`` archive back: its directory, its pickle, its storages.

The directory at the end of the file says where every storage is, so the parallel read of all of them begins at once,
into a few staging buffers. Then ``load`` and ``restore`` differ:

- ``load`` finishes the read, verifies it, and unpickles. So every object finds its bytes.
- ``restore`` unpickles first (``lands=True``). Every tensor gets a storage that is allocated but not touched, so it
  costs addresses, not memory. The caller then says which storages have a better place to land (live parameters), and
  the read fills everything. This works only for pickles that name nothing but plain tensors: to rebuild a nested
  tensor, for one, torch looks at bytes. For other pickles ``restore`` works like ``load``. A ``load`` of all ranks
  works like ``restore``, unless torch has to copy the storages to another device.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lazyckpt import _engine, devices
from lazyckpt.collector import collector_paused
from lazyckpt.errors import CorruptFileError, UnsupportedFormatError
from lazyckpt.formats.plain_pickle import NotPlain, read_plain
from lazyckpt.formats.reader import FileReader, Record
from lazyckpt.formats.torch_zip_reader import directory_of
from lazyckpt.reading.part import tensors_in
from lazyckpt.reading.ranges import ParallelRead
from lazyckpt.reading.unpickle import NeedsBytes, load_errors, unpickle

_MAX_VERSION = 10  # torch's kMaxSupportedFileFormatVersion
_MAX_SMALL_BYTES = 1024
_SMALL_RECORDS = {
    "byteorder": rb"little|big",
    "version": rb"[0-9]{1,2}\n?",
    ".storage_alignment": rb"[0-9]+",
    ".data/serialization_id": rb"[\x20-\x7e]*",
}

MapLocation = Any  # as torch.load takes it: None, a device, a string, a dict or a function


@dataclass(slots=True)
class Slot:
    """One storage of an archive and the memory that it is read into."""

    record: Record
    memory: torch.UntypedStorage  # the engine reads into it
    final: torch.UntypedStorage | None = None  # the tensors view it; not ``memory`` if torch copies that to a device
    typed: torch.storage.TypedStorage | None = None  # ``final``, as the last persistent id called it
    references: int = 0  # how many tensors of the archive view it


class Place(NamedTuple):
    """Where the bytes of a storage go."""

    memory: torch.UntypedStorage
    offset: int  # bytes
    device: int  # as the engine numbers them

    @property
    def pointer(self) -> int:
        return devices.data_ptr(self.memory) + self.offset


class Archive:
    """An archive with its pickle read: ``tree`` is the saved object, ``slots`` are its storages by key. ``file`` may be
    a part of a larger one.

    With ``lands``, ``fill`` reads the storages, unless the pickle needed their bytes (``filled``). Without ``ahead``,
    the disk begins only then. ``choose`` returns a part of the tree, which becomes ``tree``: only the storages that
    the part views are read, unless the pickle needs more. It is called twice, and its errors are raised here.

    Raises CorruptFileError for a damaged or hostile file, UnsupportedFormatError for a type that ``weights_only``
    forbids and for a file that only ``torch.load`` reads (another byte order), and LoadError if unpickling fails
    otherwise.
    """

    def __init__(
        self,
        file: FileReader,
        map_location: MapLocation,
        weights_only: bool,
        *,
        engine: _engine.Engine,
        lands: bool = False,
        ahead: bool = True,
        choose: Callable[[Any], Any] | None = None,
    ) -> None:
        self.path = file.path
        self.engine = engine
        self.slots: dict[str, Slot] = {}
        self._device = devices.target(map_location, engine)  # the device that every storage is read to
        with collector_paused():
            records = directory_of(file).records
        self._data = {
            name[len("data/") :]: r._replace(offset=file.begin + r.offset) if file.begin else r
            for name, r in records.items()
            if name.startswith("data/")
        }
        self.wanted = self._data  # the storages that are read
        self.filled = False
        self._read: ParallelRead | None = None
        verified = records["data.pkl"].crc32 is not None
        try:
            if choose is None and ahead:
                self._read = self._begin()
            self._restore_location = torch.serialization._get_restore_location(map_location)
            check_small_records(file, records)
            data = file.read_record(records["data.pkl"])
            if choose is not None:
                self.wanted = self._chosen(choose, data, verified, weights_only)
                self._read = self._begin() if ahead else None
            tree = self._load(data, verified, map_location, weights_only, lands)
            self.tree = tree if choose is None else choose(tree)
            self._check_sizes()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> ParallelRead:
        return ParallelRead(self.path, list(self.wanted.values()), self.engine)

    def _chosen(
        self, choose: Callable[[Any], Any], data: bytes, verified: bool, weights_only: bool
    ) -> dict[str, Record]:
        """The records of the storages that the chosen part views, by key; all if the pickle needs their bytes.

        Unpickles with storages that are allocated but not touched. Raises the errors of ``choose``."""
        storages: dict[str, torch.UntypedStorage] = {}

        def load(saved_id: Any) -> torch.storage.TypedStorage:
            key, dtype, _ = self._parse(saved_id)
            storage = storages.setdefault(key, torch.UntypedStorage(self._data[key].nbytes))
            return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

        with load_errors(self.path, weights_only=weights_only, verified=verified):
            try:
                with collector_paused():
                    tree = read_plain(data, load)
            except NotPlain:
                storages.clear()
                try:
                    tree = unpickle(data, self.path, load, "cpu", weights_only=True, needs_no_bytes=True)
                except NeedsBytes:
                    return self._data
        views = set(filter(None, map(_storage_of, tensors_in(choose(tree)))))
        return {key: self._data[key] for key, storage in storages.items() if storage._cdata in views}

    def _load(self, data: bytes, verified: bool, map_location: MapLocation, weights_only: bool, lands: bool) -> Any:
        path, load = self.path, self._persistent_load
        with load_errors(path, weights_only=weights_only, verified=verified):
            if not lands:
                self._read_all()
            if weights_only:
                with contextlib.suppress(NotPlain, NeedsBytes), collector_paused():
                    return read_plain(data, load)
                for slot in self.slots.values():
                    slot.references = 0
            if lands:
                with contextlib.suppress(NeedsBytes):
                    return unpickle(data, path, load, map_location, weights_only=True, needs_no_bytes=True)
                self._read_all()
            return unpickle(data, path, load, map_location, weights_only=weights_only)

    def _read_all(self) -> None:
        self.slots = {
            key: Slot(record, devices.new_storage(record.nbytes, self._device)) for key, record in self.wanted.items()
        }
        self.fill({})

    def _check_sizes(self) -> None:
        """Raises CorruptFileError if torch has enlarged a storage that is too small for a tensor: the bytes beyond the
        record would be undefined."""
        for key, slot in self.slots.items():
            if slot.final is not None and slot.final.nbytes() != slot.record.nbytes:
                raise CorruptFileError(f"record data/{key}: too short for a tensor that views it", path=self.path)

    def fill(self, elsewhere: Mapping[str, Place]) -> None:
        """Reads every storage that is wanted, and verifies its CRC-32. Does nothing if ``filled``.

        ``elsewhere``: live memory to read into instead, by key. Raises CorruptFileError that names the damaged records.
        Bytes that were read before the error stay where they landed.
        """
        if self.filled:
            return
        self.filled = True
        places = [elsewhere.get(key) or self.place(key) for key in self.wanted]
        try:
            self._read = self._read or self._begin()
            self._read.read_into(
                [0 if place is None else place.pointer for place in places],
                [devices.HOST if place is None else place.device for place in places],
            )
        finally:
            self.close()

    def skip(self, keys: Iterable[str]) -> None:
        """Leaves these storages to the caller, who has read and verified them."""
        left = {*keys}
        self.wanted = {key: record for key, record in self.wanted.items() if key not in left}

    def place(self, key: str) -> Place | None:
        """The memory of a storage; None if no tensor views it."""
        slot = self.slots.get(key)
        return None if slot is None else Place(slot.memory, 0, self._device)

    def keys_in(self, obj: Any) -> set[str]:
        """The keys of the storages that the tensors in ``obj`` view."""
        keys = {slot.final._cdata: key for key, slot in self.slots.items() if slot.final is not None}
        return {keys[storage] for storage in map(_storage_of, tensors_in(obj)) if storage in keys}

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abandons pending reads and returns their part of the engine's ring. Call it explicitly: an exception keeps
        this object alive, and the thread that holds the exception may save next."""
        read, self._read = self._read, None
        if read is not None:
            read.close()

    def _parse(self, saved_id: Any) -> tuple[str, torch.dtype, str]:
        """The key, dtype and location that a persistent id of the pickle names. Raises CorruptFileError if the file has
        no such storage."""
        if not (isinstance(saved_id, tuple) and len(saved_id) == 5 and _text(saved_id[0]) == "storage"):
            raise CorruptFileError(f"unknown persistent id {saved_id!r}", path=self.path)
        _, storage_type, key, location, numel = saved_id
        dtype = torch.uint8 if storage_type is torch.UntypedStorage else storage_type.dtype
        if not isinstance(key, str | bytes):  # to torch 0 and "0" are two storages with the same bytes
            raise CorruptFileError("a storage's key is no text", path=self.path)
        key = _text(key)
        record = self._data.get(key)
        nbytes = numel * dtype.itemsize
        if record is None or record.nbytes != nbytes:
            found = "missing" if record is None else f"{record.nbytes} bytes"
            raise CorruptFileError(f"record data/{key}: {found}, the pickle says {nbytes} bytes", path=self.path)
        return key, dtype, location

    def _persistent_load(self, saved_id: Any) -> torch.storage.TypedStorage:
        key, dtype, location = self._parse(saved_id)
        slot = self.slots.get(key)
        if slot is None:
            record = self._data[key]
            device = self._device if key in self.wanted else devices.HOST
            slot = self.slots[key] = Slot(record, devices.new_storage(record.nbytes, device))
        if slot.final is None:
            there = self._device != devices.HOST or key not in self.wanted
            slot.final = slot.memory if there else self._restore_location(slot.memory, _text(location))
            if slot.final is not slot.memory and not self.filled:
                raise NeedsBytes  # torch has copied them to a device, or a function has
        slot.references += 1
        if slot.typed is None or slot.typed.dtype != dtype:
            slot.typed = torch.storage.TypedStorage(wrap_storage=slot.final, dtype=dtype, _internal=True)
        return slot.typed


def _storage_of(obj: Any) -> int | None:
    """The identity of the storage that a tensor views, or that ``obj`` is; None if a tensor views none."""
    if isinstance(obj, torch.TypedStorage | torch.UntypedStorage):
        return getattr(obj, "_untyped_storage", obj)._cdata  # type: ignore[no-any-return]
    try:
        identity: int = obj.untyped_storage()._cdata
        return identity
    except (NotImplementedError, RuntimeError, ValueError):  # ValueError: of a lazy module, not initialized yet
        return None


def check_small_records(file: FileReader, records: dict[str, Record]) -> None:
    """Refuses an archive that torch refuses for a small record that nothing here needs."""
    small = {}
    for name, pattern in _SMALL_RECORDS.items():
        if name not in records:
            continue
        if records[name].nbytes > _MAX_SMALL_BYTES:  # a hole of any size costs its writer nothing
            raise file.corrupt(f"record {name}: {records[name].nbytes} bytes, for a few characters")
        small[name] = file.read_record(records[name])
        if not re.fullmatch(pattern, small[name]):
            raise file.corrupt(f"record {name}: not what torch.save writes")
    if small.get("byteorder", sys.byteorder.encode()) != sys.byteorder.encode():
        raise UnsupportedFormatError("written on a machine of another byte order; use torch.load", path=file.path)
    if not 1 <= int(small.get("version", 0)) <= _MAX_VERSION:
        raise file.corrupt(f"record version: missing, or not within 1 to {_MAX_VERSION}")


def _text(value: Any) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else str(value)
