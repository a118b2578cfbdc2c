"""``save`` and ``load``, in the shape of ``torch.save`` and ``torch.load``, for one file."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

import torch

from lazyckpt.capture import devices
from lazyckpt.errors import LoadError, SaveError, UnsupportedFormatError
from lazyckpt.formats import format_of, safetensors
from lazyckpt.formats.reader import FileReader
from lazyckpt.pipeline.plan import plan_for
from lazyckpt.pipeline.request import Request
from lazyckpt.pipeline.save_now import save_now
from lazyckpt.reading.archive import Archive, MapLocation
from lazyckpt.reading.ranges import ParallelRead, process_engine
from lazyckpt.storage import paths, removal
from lazyckpt.storage.manifest import STATE, read_checkpoint


def save(obj: Any, path: str | os.PathLike[str]) -> None:
    """Save ``obj`` as ``torch.save`` would, durably: when this returns, the file survives a power cut.

    The file appears under its name only when it is whole; an existing file is replaced atomically. A name that ends
    in ``.safetensors`` gives that format; ``obj`` is then a dict of tensors. Takes 32 MiB of memory besides ``obj``.
    The first save into a folder removes temporary folders (``.tmp-…``) that killed processes left there.

    Raises SaveError or one of its kinds (NoSpaceError, SerializationError), and ConfigError for a URL or a tensor that
    is sharded over several ranks.
    """
    if not Path(path).name:
        raise SaveError("is not the name of a file", path=path)
    target = paths.local(path)
    paths.refuse_special_file(target)
    _sweep(target.parent)
    save_now(Request(target, None), {target.name: plan_for(target.name, obj)}, process_engine())


@functools.cache
def _sweep(folder: Path) -> None:
    """Removes what killed saves left, once in this process."""
    with contextlib.suppress(OSError):  # the save works without it
        removal.sweep_staged(folder)


def load(path: str | os.PathLike[str], map_location: MapLocation = None, *, weights_only: bool | None = None) -> Any:
    """Load a file of ``torch.save``, ``lazyckpt.save`` or safetensors, in parallel, and verify every checksum.

    ``path`` is a file or the folder of a checkpoint. ``map_location`` and ``weights_only`` are those of ``torch.load``,
    and the same environment variables decide about ``weights_only=None``. With ``weights_only``, a file may hold the
    types that ``torch.load`` allows, those given to ``torch.serialization.add_safe_globals``, and a short list of our
    own: NumPy arrays and scalars, paths, dates. If ``map_location`` names a CUDA device, the file is read straight into
    its memory through a small buffer. A safetensors file gives a dict of tensors. ``torch.load`` reads files of
    torch < 1.6.

    Raises LoadError or one of its kinds: CorruptFileError (truncated, damaged, hostile), UnsupportedFormatError.
    """
    weights_only = _weights_only(weights_only)
    paths.local(path)
    path = Path(path)
    if os.path.isdir(path):  # Path.is_dir() raises what load_error() is for
        read_checkpoint(path)
        path = path / STATE
    with FileReader(path) as file:
        kind = format_of(file)
        if kind == "torch_zip":
            return Archive(file, map_location, weights_only, engine=process_engine()).tree
    if kind == "safetensors":
        return _load_safetensors(path, map_location)
    try:
        return torch.load(path, map_location, weights_only=weights_only)
    except Exception as error:
        raise LoadError(f"torch.load: {error}", path=path) from error


def _weights_only(asked: bool | None) -> bool:
    """What ``torch.load`` would decide."""

    def is_set(name: str) -> bool:
        return os.environ.get(name, "").lower() in ("1", "y", "yes", "true")

    if is_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD"):
        return True
    return not is_set("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD") if asked is None else asked


def _load_safetensors(path: Path, map_location: MapLocation) -> dict[str, torch.Tensor]:
    header = safetensors.read_header(path)
    if map_location is not None and not isinstance(map_location, str | int | torch.device):
        raise LoadError("a safetensors file takes a device as map_location", path=path)
    for name, info in header.tensors.items():
        if not hasattr(torch, info.dtype.name):  # an older one, that lacks some of the small floats
            raise UnsupportedFormatError(f"tensor {name!r}: this torch has no {info.dtype}", path=path)
    engine = process_engine()
    device = devices.target(map_location, engine)
    tensors = {}
    try:
        for name, info in header.tensors.items():
            storage = devices.new_storage(info.record.nbytes, device)
            empty = torch.empty(0, dtype=getattr(torch, info.dtype.name), device=storage.device)
            tensors[name] = empty.set_(storage, 0, info.shape)  # type: ignore[call-overload]  # contiguous
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:  # strides overflow, or a hole in the file pretends to be data
        raise LoadError(f"torch cannot hold these tensors: {error}", path=path) from error
    records = [info.record for info in header.tensors.values()]
    ParallelRead(path, records, engine).read_into(list(map(devices.address, tensors.values())), [device] * len(tensors))
    if map_location is None or device != devices.HOST:
        return tensors
    return {name: tensor.to(map_location) for name, tensor in tensors.items()}
