"""``save`` and ``load``, in the shape of ``torch.save`` and ``torch.load``, for one file."""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lazyckpt import devices
from lazyckpt.errors import ConfigError, LoadError, SaveError, UnsupportedFormatError
from lazyckpt.formats import format_of, safetensors
from lazyckpt.formats.reader import FileReader
from lazyckpt.pipeline.plan import plan_for
from lazyckpt.pipeline.request import Request
from lazyckpt.pipeline.save_now import save_now
from lazyckpt.providers.rename import Rename, checked, rename_state
from lazyckpt.reading.archive import Archive, MapLocation
from lazyckpt.reading.part import NoPart, part
from lazyckpt.reading.ranges import ParallelRead, process_engine
from lazyckpt.reading.sharded.restore import load_shards
from lazyckpt.storage import paths, removal, unfinished
from lazyckpt.storage.manifest import DCP_METADATA, MANIFEST, STATE, is_missing, read_checkpoint


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


def load(
    path: str | os.PathLike[str],
    map_location: MapLocation = None,
    *,
    weights_only: bool | None = None,
    key: str | None = None,
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Load a file of ``torch.save``, ``lazyckpt.save`` or safetensors, in parallel, and verify every checksum.

    If ``map_location`` names a CUDA device, the file is read straight into its memory through a small buffer.

    Args:
        path: A file, or the folder of a checkpoint, be it ours or one of torch.distributed.checkpoint. A safetensors
            file gives a dict of tensors, a sharded checkpoint whole tensors.
        map_location: As in ``torch.load``; for a sharded checkpoint, a device.
        weights_only: As in ``torch.load``, and the same environment variables decide about None. A file may then hold
            the types that ``torch.load`` allows, those given to ``torch.serialization.add_safe_globals``, and a short
            list of our own: NumPy arrays and scalars, paths, dates.
        key: The part to load, such as "model", or "a.b" for a part of a part. Reads only the bytes of this part.
        rename: New names for the entries of the result, a dict: prefixes and what replaces them, {"module.": ""}, or a
            function of a name. None as a new name leaves the entry out.
        dtype: Converts floating-point tensors in the result to this dtype.

    Raises:
        LoadError: CorruptFileError (truncated, damaged, hostile), UnsupportedFormatError; or if there is no ``key``.
        ConfigError: If ``key``, ``rename`` or ``dtype`` makes no sense.
    """
    if key is not None and not isinstance(key, str):
        raise ConfigError(f'load: key={key!r}: expected a text, such as "model"')
    rename = None if rename is None else checked(rename)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"load: dtype={dtype!r}: expected a floating-point dtype of torch")
    choice = _Choice(path, key, rename)
    loaded = _load(path, map_location, _weights_only(weights_only), choice)
    if dtype is None:
        return loaded
    try:
        return _cast(loaded, dtype, {})
    except RecursionError as error:
        raise LoadError("nested too deeply to convert its tensors", path=path) from error


def _load(path: str | os.PathLike[str], map_location: MapLocation, weights_only: bool, choose: _Choice) -> Any:
    paths.local(path)
    path = Path(path)
    unfinished.refuse(path)
    if os.path.isdir(path):  # Path.is_dir() raises what load_error() is for
        if _is_sharded(path):
            return load_shards(path, _device(map_location), choose, key=choose.key, weights_only=weights_only)
        path = path / STATE
    with FileReader(path) as file:
        kind = format_of(file)
        if kind == "torch_zip":
            chosen = None if choose.takes_all else choose
            return Archive(file, map_location, weights_only, engine=process_engine(), choose=chosen).tree
    if kind == "safetensors":
        return _load_safetensors(path, map_location, choose)
    try:
        loaded = torch.load(path, map_location, weights_only=weights_only)
    except Exception as error:
        raise LoadError(f"torch.load: {error}", path=path) from error
    return choose(loaded)


def _is_sharded(folder: Path) -> bool:
    """Whether this is a folder of torch.distributed.checkpoint: a checkpoint of many ranks, or without a manifest.
    Raises LoadError if it is neither that nor a checkpoint."""
    if is_missing(folder / MANIFEST) and not is_missing(folder / DCP_METADATA):
        return True
    return read_checkpoint(folder).is_sharded


def _device(map_location: MapLocation) -> torch.device:
    """The device that all tensors of a sharded checkpoint are loaded to."""
    if map_location is None or isinstance(map_location, str | torch.device):
        return torch.device("cpu" if map_location is None else map_location)
    raise ConfigError(f"load: map_location={map_location!r}: a sharded checkpoint takes a device")


@dataclass(frozen=True)
class _Choice:
    """What ``load`` takes from a file."""

    path: str | os.PathLike[str]
    key: str | None
    rename: Rename | None

    @property
    def takes_all(self) -> bool:
        return self.key is None and self.rename is None

    def __call__(self, loaded: Any) -> Any:
        if self.key is not None:
            try:
                loaded = part(loaded, self.key)
            except NoPart as error:
                raise LoadError(str(error), path=self.path) from None
        if self.rename is None:
            return loaded
        if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded):
            raise ConfigError(f"load: rename is for a dict with names as keys, not {type(loaded).__name__}; give a key")
        return rename_state(loaded, self.rename)


def _cast(obj: Any, dtype: torch.dtype, known: dict[int, tuple[Any, Any]]) -> Any:
    """Converts the floating-point tensors in the dicts, lists and tuples below ``obj``, in place where it can. What was
    one object stays one."""
    if id(obj) in known:
        return known[id(obj)][1]
    result = obj
    known[id(obj)] = obj, result
    if isinstance(obj, torch.Tensor) and obj.is_floating_point():
        result = obj.detach().to(dtype)
    elif isinstance(obj, dict):
        obj.update({key: _cast(value, dtype, known) for key, value in obj.items()})
    elif isinstance(obj, list):
        obj[:] = [_cast(value, dtype, known) for value in obj]
    elif type(obj) is tuple:
        result = tuple(_cast(value, dtype, known) for value in obj)
    known[id(obj)] = obj, result  # keeps obj alive, so that no other object gets its id
    return result


def _weights_only(asked: bool | None) -> bool:
    """What ``torch.load`` would decide."""

    def is_set(name: str) -> bool:
        return os.environ.get(name, "").lower() in ("1", "y", "yes", "true")

    if is_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD"):
        return True
    return not is_set("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD") if asked is None else asked


def _load_safetensors(path: Path, map_location: MapLocation, choose: _Choice) -> Any:
    chosen = choose(safetensors.read_header(path).tensors)
    found = chosen if isinstance(chosen, dict) else {"": chosen}
    if map_location is not None and not isinstance(map_location, str | int | torch.device):
        raise LoadError("a safetensors file takes a device as map_location", path=path)
    for name, info in found.items():
        if not hasattr(torch, info.dtype.name):  # an older one, that lacks some of the small floats
            raise UnsupportedFormatError(f"tensor {name!r}: this torch has no {info.dtype}", path=path)
    engine = process_engine()
    device = devices.target(map_location, engine)
    tensors = {}
    try:
        for name, info in found.items():
            storage = devices.new_storage(info.record.nbytes, device)
            empty = torch.empty(0, dtype=getattr(torch, info.dtype.name), device=storage.device)
            tensors[name] = empty.set_(storage, 0, info.shape)  # type: ignore[call-overload]  # contiguous
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:  # strides overflow, or a hole in the file pretends to be data
        raise LoadError(f"torch cannot hold these tensors: {error}", path=path) from error
    records = [info.record for info in found.values()]
    ParallelRead(path, records, engine).read_into(list(map(devices.address, tensors.values())), [device] * len(tensors))
    if map_location is not None and device == devices.HOST:
        tensors = {name: tensor.to(map_location) for name, tensor in tensors.items()}
    return tensors if isinstance(chosen, dict) else tensors[""]
