"""``save`` and ``load``, in the shape of ``torch.save`` and ``torch.load``, for one file."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

from lazyckpt.capture import devices
from lazyckpt.errors import LoadError, SaveError, UnsupportedFormatError
from lazyckpt.formats import safetensors, sniff
from lazyckpt.pipeline.plan import plan_for
from lazyckpt.pipeline.request import FileRequest
from lazyckpt.pipeline.save_now import save_now
from lazyckpt.reading.archive import Archive, MapLocation
from lazyckpt.reading.ranges import Reading, process_engine
from lazyckpt.storage import commit, paths
from lazyckpt.storage.catalog import STATE, read_checkpoint

_swept: set[Path] = set()  # folders from which this process has removed what killed saves left


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
    save_now(FileRequest(target, None), {target.name: plan_for(target.name, obj)}, process_engine())


def _sweep(folder: Path) -> None:
    if folder not in _swept:
        with contextlib.suppress(OSError):  # the save works without it
            commit.sweep_staged(folder)
        _swept.add(folder)


def load(path: str | os.PathLike[str], map_location: MapLocation = None, *, weights_only: bool | None = None) -> Any:
    """Load what ``torch.save``, ``lazyckpt.save`` or safetensors wrote, in parallel, every checksum verified.

    ``path`` is a file, or the folder of a checkpoint. ``map_location`` and ``weights_only`` are ``torch.load``'s;
    its restricted unpickler, ``torch.serialization.add_safe_globals`` and a short list of our own (NumPy, paths, dates:
    see ``safe_globals``) decide what may be unpickled, and so do the environment variables with which it is told what
    None means. A ``map_location`` that names a CUDA device has the file read straight into it, past host memory but for
    a small buffer.
    A safetensors file gives a dict of tensors. Files of torch < 1.6 are handed to ``torch.load``.

    Raises LoadError, or one of its kinds: CorruptFileError (truncated, a bit flipped, hostile),
    UnsupportedFormatError.
    """
    weights_only = _weights_only(weights_only)
    paths.local(path)
    path = Path(path)
    if os.path.isdir(path):  # Path.is_dir() raises what load_error() is for
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


def _weights_only(asked: bool | None) -> bool:
    """What ``torch.load`` makes of it."""

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
    except RuntimeError as error:  # strides that overflow, or a hole in a file: it costs its writer nothing
        raise LoadError(f"torch cannot hold these tensors: {error}", path=path) from error
    records = [info.record for info in header.tensors.values()]
    Reading(path, records, engine).read_into(list(map(devices.address, tensors.values())), [device] * len(tensors))
    if map_location is None or device != devices.HOST:
        return tensors
    return {name: tensor.to(map_location) for name, tensor in tensors.items()}
