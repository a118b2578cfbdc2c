"""``save`` and ``load``, in the shape of ``torch.save`` and ``torch.load``, for one file."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from array import array
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lazyckpt import _engine, commit
from lazyckpt.archive import Archive, MapLocation, Reading
from lazyckpt.catalog import STATE, read_checkpoint
from lazyckpt.config import MIB
from lazyckpt.containers import safetensors, sniff, torch_zip
from lazyckpt.containers.base import Extent
from lazyckpt.errors import LoadError, SaveError, SerializationError, save_error
from lazyckpt.providers.base import StorageTable
from lazyckpt.providers.objects import dump, pickle_of

ARCHIVE_NAME = "archive"  # the folder inside the zip, as torch.save names it for a buffer
_CHUNK_BYTES = 2 * MIB  # small ones, so that 32 MiB hold enough of them to keep eight writes in flight
_RING_BYTES = 16 * _CHUNK_BYTES


def save(obj: Any, path: str | os.PathLike[str]) -> None:
    """Save ``obj`` as ``torch.save`` would, durably: when this returns, the file survives a power cut.

    The file appears under its name only when it is whole; one that exists is replaced atomically. A name that ends
    in ``.safetensors`` gives that format; ``obj`` is then a dict of tensors. Peak memory is 32 MiB above ``obj``.

    Raises SaveError, or one of its kinds: NoSpaceError, SerializationError.
    """
    target = Path(path)
    if not target.name:
        raise SaveError("is not the name of a file", path=path)
    if target.suffix == ".safetensors":
        storages, extents = _plan_safetensors(obj, target)
    else:
        storages, extents = _plan_torch_zip(obj, target)
    storages = [s if s.device.type == "cpu" else s.cpu() for s in storages]
    temporary = commit.temporary_name(target)
    try:
        job = process_engine().begin(
            array("Q", [s.data_ptr() for s in storages]),
            array("Q", [s.nbytes() for s in storages]),
            array("Q", bytes(8 * len(storages))),
            1,
        )
        try:
            job.open(0, os.fspath(temporary), max((e.offset + e.nbytes for e in extents), default=0))
            for extent in extents:
                job.append(0, extent.offset, extent.rows, extent.blob)
            job.seal()
            job.wait_eager()
            job.wait_settled()
            job.raise_error()
        except BaseException:
            job.fail(errno.ECANCELED, "abandoned")
            job.wait_settled()
            raise
        commit.publish_file(temporary, target)
    except OSError as error:
        raise save_error(error, path=target) from error
    finally:
        with contextlib.suppress(OSError):  # what went wrong before is what matters
            temporary.unlink()


def process_engine() -> _engine.Engine:
    """One small engine for each process; a forked child makes its own."""
    return _engine_of(os.getpid())


@cache
def _engine_of(pid: int) -> _engine.Engine:
    engine = _engine.Engine(ring_bytes=_RING_BYTES, chunk_bytes=_CHUNK_BYTES, io_depth=8, copy_threads=1)
    engine.reserve(_RING_BYTES)
    return engine


def _plan_torch_zip(obj: Any, path: Path) -> tuple[list[torch.UntypedStorage], list[Extent]]:
    table = StorageTable(map(str, itertools.count()))
    try:
        opcodes, _ = dump(obj, table, iter(()))
    except Exception as error:
        raise SerializationError(f"cannot be pickled: {error}", path=path) from error
    layout = torch_zip.Layout(ARCHIVE_NAME, tuple(v.key for v in table.views), tuple(v.nbytes for v in table.views))
    tail = layout.finish(torch_zip.small_records(pickle_of(opcodes)))
    return [v.storage for v in table.views], [*layout.head, tail]


def _plan_safetensors(obj: Any, path: Path) -> tuple[list[torch.UntypedStorage], list[Extent]]:
    if not isinstance(obj, dict) or not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in obj.items()):
        raise SerializationError("a .safetensors file takes a dict of names to tensors", path=path)
    seen: dict[int, str] = {}
    tensors = {}
    # Sorted as the format's own library does, so that every tensor is aligned to its dtype.
    for name, tensor in sorted(obj.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        if tensor.layout is not torch.strided:
            raise SerializationError(f"{name!r} is not a dense tensor", path=path)
        pointer = tensor.untyped_storage().data_ptr()
        if pointer and pointer in seen:
            raise SerializationError(
                f"{seen[pointer]!r} and {name!r} share memory, which safetensors cannot express; clone one of them, "
                "or use a name that does not end in .safetensors",
                path=path,
            )
        seen[pointer] = name
        # A view of a larger storage is written as what it shows.
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
        whole = dense.untyped_storage().nbytes() == dense.numel() * dense.element_size()
        tensors[name] = dense if whole else dense.clone()
    try:
        layout = safetensors.Layout(
            tuple(tensors),
            tuple(t.dtype for t in tensors.values()),
            tuple(tuple(t.shape) for t in tensors.values()),
        )
    except ValueError as error:
        raise SerializationError(str(error), path=path) from error
    return [t.untyped_storage() for t in tensors.values()], [layout.data, layout.header]


def load(path: str | os.PathLike[str], map_location: MapLocation = None, *, weights_only: bool = True) -> Any:
    """Load what ``torch.save``, ``lazyckpt.save`` or safetensors wrote, in parallel, every checksum verified.

    ``path`` is a file, or the folder of a checkpoint. ``map_location`` and ``weights_only`` are ``torch.load``'s;
    its restricted unpickler and ``torch.serialization.add_safe_globals`` decide what may be unpickled.
    A safetensors file gives a dict of tensors. Files of torch < 1.6 are handed to ``torch.load``.

    Raises LoadError, or one of its kinds: CorruptFileError (truncated, a bit flipped, hostile),
    UnsupportedFormatError.
    """
    path = Path(path)
    if path.is_dir():
        read_checkpoint(path)
        path = path / STATE
    kind = sniff(path)
    if kind == "safetensors":
        return _load_safetensors(path, map_location)
    if kind == "torch_legacy":
        try:
            return torch.load(path, map_location, weights_only=weights_only)
        except Exception as error:
            raise LoadError(f"torch.load: {error}", path=path) from error
    return Archive(path, map_location, weights_only, engine=process_engine()).tree


def _load_safetensors(path: Path, map_location: MapLocation) -> dict[str, torch.Tensor]:
    header = safetensors.read_header(path)
    if map_location is not None and not isinstance(map_location, str | int | torch.device):
        raise LoadError("a safetensors file takes a device as map_location", path=path)
    tensors = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in header.tensors.items()}
    records = [info.record for info in header.tensors.values()]
    Reading(path, records, process_engine()).read_into([t.data_ptr() for t in tensors.values()])
    if map_location is None:
        return tensors
    return {name: tensor.to(map_location) for name, tensor in tensors.items()}
