"""A ``torch.save`` archive on the way back.

The directory at the end of the file says where every storage is: the parallel read of all of them begins at once,
into a few staging buffers. Two orders of what follows. For ``load`` the read ends and is checked, then is unpickled:
whatever is unpickled finds its bytes. For ``restore`` it is the other way round: unpickling gives every tensor a
storage that is allocated but not touched, so that it costs addresses, not memory; whoever restores then says which
storages have a better place to land (live parameters), and the read fills everything. That is only for pickles which
name nothing but plain tensors: a nested tensor, for one, looks at bytes to be rebuilt.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import sys
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from lazyckpt import _engine
from lazyckpt.capture import devices
from lazyckpt.errors import CorruptFileError, LoadError, UnsupportedFormatError
from lazyckpt.formats.pickle_guard import CONSENT, GuardedPickle
from lazyckpt.formats.reader import FileReader, Record
from lazyckpt.formats.safe_globals import WITHOUT_STORAGES, RestrictedUnpickler, sparse_tensors_to_validate
from lazyckpt.formats.torch_zip_reader import read_directory
from lazyckpt.reading.ranges import Reading

_MAX_VERSION = 10  # kMaxSupportedFileFormatVersion of torch
_MAX_SMALL_BYTES = 1024
_SMALL_RECORDS = {".storage_alignment": rb"[0-9]+", ".data/serialization_id": rb"[\x20-\x7e]*"}

# What pickle writes and the restricted unpickler does not read.
_BEYOND = re.compile("Unsupported operand|nested too deep")
_BEYOND_US = (
    "holds an integer of more than 255 bytes, a key nested more than 100 deep or an unknown opcode; load it with "
    "weights_only=False, which runs code from the file: only if you trust its origin"
)

MapLocation = Any  # what torch.load takes: None, a device, a string, a dict or a function


@dataclass
class Slot:
    """One storage of the archive: what is to be filled, and from where."""

    record: Record
    memory: torch.UntypedStorage  # what the engine reads into
    final: torch.UntypedStorage | None = None  # where the tensors look; another one if torch copies them to a device
    references: int = 0  # how many tensors of the archive view it


class Archive:
    """``tree`` is what was saved; ``slots`` are its storages by key.

    With ``lands`` the storages are not filled until ``fill`` is called, unless they had to be (``filled``).

    Raises CorruptFileError for what is damaged or hostile, UnsupportedFormatError for what ``weights_only`` forbids
    and for what only ``torch.load`` reads (another byte order), and LoadError if unpickling fails otherwise.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        map_location: MapLocation,
        weights_only: bool,
        *,
        engine: _engine.Engine,
        lands: bool = False,
    ) -> None:
        self.path = path
        self.engine = engine
        self.slots: dict[str, Slot] = {}
        self._device = devices.target(map_location, engine)  # all is read to there
        self._records = read_directory(path).records
        self._data = {name.removeprefix("data/"): r for name, r in self._records.items() if name.startswith("data/")}
        self._reading: Reading | None = Reading(path, list(self._data.values()), engine)
        try:
            self.tree = self._load(map_location, weights_only, lands)
        except BaseException:
            self.close()
            raise

    def _load(self, map_location: MapLocation, weights_only: bool, lands: bool) -> Any:
        path = self.path
        self._restore_location = torch.serialization._get_restore_location(map_location)
        if "byteorder" in self._records and self._read_small("byteorder") != sys.byteorder.encode():
            raise UnsupportedFormatError("written on a machine of another byte order; use torch.load", path=path)
        self._check_what_torch_reads()
        if "data.pkl" not in self._records:
            raise CorruptFileError("no record data.pkl: not an archive of torch.save", path=path)
        data = self._read_small("data.pkl")
        try:
            if lands:
                with contextlib.suppress(_NeedsBytes):
                    return self._unpickle(_PlainTensors(data, path), map_location, weights_only=True)
            self._read_all()
            stream = GuardedPickle(data, path) if weights_only else io.BytesIO(data)
            tree = self._unpickle(stream, map_location, weights_only)
            # torch checks only on request; an index outside of its tensor is a write outside of its memory.
            with torch.sparse.check_sparse_tensor_invariants(weights_only or _checks_sparse_tensors()):
                torch._utils._validate_loaded_sparse_tensors()
            return tree
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            # If the checksum is right, the pickle is as it was saved: restore() must not take it for damaged.
            if weights_only and self._records["data.pkl"].crc32 is not None and _BEYOND.search(str(error)):
                raise UnsupportedFormatError(f"{_BEYOND_US} ({error})", path=path) from error
            if isinstance(error, LoadError):
                raise
            if weights_only and ("weights_only" in str(error) or "allowed global" in str(error)):
                raise UnsupportedFormatError(f"is not to be unpickled: {error} ({CONSENT})", path=path) from error
            why = "it takes more memory than there is" if isinstance(error, MemoryError) else error
            raise LoadError(f"cannot be unpickled: {why}", path=path) from error
        finally:
            sparse_tensors_to_validate().clear()

    def slot_of(self, tensor: torch.Tensor) -> Slot | None:
        """The slot that a tensor of the tree views."""
        if not hasattr(self, "_by_storage"):
            self._by_storage = {slot.final._cdata: slot for slot in self.slots.values() if slot.final is not None}
        try:
            return self._by_storage.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return None

    def fill(self, elsewhere: dict[str, tuple[int, int]]) -> None:
        """Reads every storage and checks its CRC-32. Does nothing if ``filled``.

        ``elsewhere`` maps keys to live memory to read into instead: a pointer and its device. Raises
        CorruptFileError that names the damaged records; what was read by then stays where it landed.
        """
        if self._reading is None:
            return
        places = {key: (devices.data_ptr(slot.memory), self._device) for key, slot in self.slots.items()} | elsewhere
        found = [places.get(key, (0, devices.HOST)) for key in self._data]
        try:
            self._reading.read_into([pointer for pointer, _ in found], [device for _, device in found])
        finally:
            self.close()

    @property
    def filled(self) -> bool:
        return self._reading is None

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives up what is not read yet, and with it the part of the engine's ring that it was read into: who holds
        the exception holds this object, and may want to save."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.close()

    def _read_all(self) -> None:
        self.slots = {
            key: Slot(record, devices.new_storage(record.nbytes, self._device)) for key, record in self._data.items()
        }
        self.fill({})

    def _unpickle(self, stream: io.BytesIO, map_location: MapLocation, weights_only: bool) -> Any:
        self._typed: dict[str, torch.storage.TypedStorage] = {}
        kind: Any = RestrictedUnpickler if weights_only else _Unpickler
        unpickler = kind(stream, encoding="utf-8")
        unpickler.persistent_load = self._persistent_load
        torch.serialization._serialization_tls.map_location = map_location
        if isinstance(stream, GuardedPickle):
            stream.unpickler = unpickler
        try:
            tree = unpickler.load()
        finally:
            if isinstance(stream, GuardedPickle):
                del stream.unpickler  # a cycle: this object, and its part of the ring, would outlive an error
            torch.serialization._serialization_tls.map_location = None
        for key, slot in self.slots.items():
            # torch enlarges a storage that is too small for a tensor; what is behind the record is nobody's data.
            if slot.final is not None and slot.final.nbytes() != slot.record.nbytes:
                raise CorruptFileError(f"record data/{key}: too short for a tensor that views it", path=self.path)
        return tree

    def _check_what_torch_reads(self) -> None:
        """The small records that nothing here needs: where they make no sense, torch refuses the archive."""
        version = self._read_small("version") if "version" in self._records else b""
        if not re.fullmatch(rb"[0-9]{1,2}\n?", version) or not 1 <= int(version) <= _MAX_VERSION:
            raise CorruptFileError(f"record version: missing, or not within 1 to {_MAX_VERSION}", path=self.path)
        for name, pattern in _SMALL_RECORDS.items():
            if name in self._records and not re.fullmatch(pattern, self._read_small(name)):
                raise CorruptFileError(f"record {name}: not what torch.save writes", path=self.path)

    def _read_small(self, name: str) -> bytes:
        record = self._records[name]
        if name != "data.pkl" and record.nbytes > _MAX_SMALL_BYTES:  # also a hole, which costs its writer nothing
            raise CorruptFileError(f"record {name}: {record.nbytes} bytes, for a few characters", path=self.path)
        with FileReader(self.path) as file:
            data = file.read(record.offset, record.nbytes)
        if record.crc32 not in (None, zlib.crc32(data)):
            raise CorruptFileError(f"record {name}: checksum does not match", path=self.path)
        return data

    def _persistent_load(self, saved_id: Any) -> torch.storage.TypedStorage:
        if not (isinstance(saved_id, tuple) and len(saved_id) == 5 and _text(saved_id[0]) == "storage"):
            raise CorruptFileError(f"unknown persistent id {saved_id!r}", path=self.path)
        _, storage_type, key, location, numel = saved_id
        dtype = torch.uint8 if storage_type is torch.UntypedStorage else storage_type.dtype
        if not isinstance(key, str | bytes):  # to torch 0 and "0" are two storages with the same bytes
            raise CorruptFileError("a storage's key is no text", path=self.path)
        key = _text(key)
        record = self._data.get(key)
        nbytes = numel * torch._utils._element_size(dtype)
        if record is None or record.nbytes != nbytes:
            found = "missing" if record is None else f"{record.nbytes} bytes"
            raise CorruptFileError(f"record data/{key}: {found}, the pickle says {nbytes} bytes", path=self.path)
        slot = self.slots.get(key)
        if slot is None:
            slot = self.slots[key] = Slot(record, torch.UntypedStorage(nbytes))
        if slot.final is None:
            there = self._device != devices.HOST
            slot.final = slot.memory if there else self._restore_location(slot.memory, _text(location))
        slot.references += 1
        typed = self._typed.get(key)
        if typed is None or typed.dtype != dtype:
            typed = torch.storage.TypedStorage(wrap_storage=slot.final, dtype=dtype, _internal=True)
            self._typed[key] = typed
        return typed


class _NeedsBytes(Exception):
    """Something in the pickle may look at the bytes of a storage when it is rebuilt."""


class _PlainTensors(GuardedPickle):
    """The pickle of plain tensors and containers; raises _NeedsBytes if it names anything else.

    The restricted unpickler reads lines only where something is named: module and name alternate.
    """

    _module: str | None = None

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        word = line.decode("utf-8").removesuffix("\n")
        if self._module is None:
            self._module = word
            return line
        module, self._module = self._module, None
        in_torch = module in ("torch", "torch.storage")
        if not ((in_torch and word.endswith("Storage")) or f"{module}.{word}" in _PLAIN_NAMES):
            raise _NeedsBytes
        return line


_PLAIN_NAMES = frozenset(
    ["collections.OrderedDict", "_codecs.encode", "torch.Size", "torch.device"]
    + [f"torch._utils._rebuild_{what}" for what in ("tensor_v2", "tensor_v3", "parameter", "meta_tensor_no_storage")]
    + [str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
    + sorted(WITHOUT_STORAGES)
)


class _Unpickler(pickle.Unpickler):
    """What ``torch.load(weights_only=False)`` uses: storage types are looked up by name, modules that moved are
    found where they are now."""

    def find_class(self, module: str, name: str) -> Any:
        if "Storage" in name:
            try:
                return torch.serialization.StorageType(name)
            except KeyError:
                pass
        return super().find_class("torch._tensor" if module == "torch.tensor" else module, name)


def _checks_sparse_tensors() -> bool:
    return bool(torch.sparse.check_sparse_tensor_invariants.is_enabled())


def _text(value: Any) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else str(value)
