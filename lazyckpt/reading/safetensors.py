"""Loads the tensors of a safetensors file, in parallel."""

from __future__ import annotations

from typing import Any

import torch

from lazyckpt import devices
from lazyckpt.errors import LoadError, UnsupportedFormatError
from lazyckpt.formats.reader import FileReader
from lazyckpt.formats.safetensors import header_of
from lazyckpt.reading.archive import MapLocation
from lazyckpt.reading.part import Choice
from lazyckpt.reading.ranges import ParallelRead, process_engine


def load_safetensors(file: FileReader, map_location: MapLocation, choice: Choice) -> Any:
    """Returns the dict of tensors, or the one that ``choice`` takes. Reads only that. Raises LoadError."""
    path = file.path
    chosen = choice(header_of(file).tensors)
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
