"""Loads a file, or the folder of a checkpoint: finds out which kind it is, and reads it in the one way of that kind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from lazyckpt.errors import ConfigError, LoadError
from lazyckpt.formats import format_of
from lazyckpt.formats.reader import FileReader
from lazyckpt.reading.archive import Archive, MapLocation
from lazyckpt.reading.part import Choice
from lazyckpt.reading.ranges import process_engine
from lazyckpt.reading.safetensors import load_safetensors
from lazyckpt.reading.sharded.load import load_sharded
from lazyckpt.storage import paths, unfinished
from lazyckpt.storage.manifest import DCP_METADATA, is_directory, state_in
from lazyckpt.stores.store import StorePath
from lazyckpt.stores.urls import is_url, located


def load_saved(
    path: str | os.PathLike[str], map_location: MapLocation, weights_only: bool | None, choice: Choice
) -> Any:
    """Returns the part that ``choice`` takes of the object saved at ``path``. Raises LoadError, and errors of
    ``choice``."""
    found = read_saved(path, map_location, weights_only, choice)
    return found.tree if isinstance(found, Archive) else found


def read_saved(
    path: str | os.PathLike[str],
    map_location: MapLocation,
    weights_only: bool | None,
    choice: Choice,
    together: bool = False,
) -> Any:
    """Returns the object, or its Archive, which is not filled yet if all ranks may fill it ``together``. Raises as
    ``load_saved``."""
    if isinstance(path, StorePath) or is_url(path):
        path = located(path)
    else:
        paths.local(path)
        path = Path(path)
        unfinished.refuse(path)
    safely = _weights_only(weights_only)
    is_folder, crc32 = is_directory(path), None
    if is_folder:
        path, crc32 = state_in(path)
    with FileReader(path) as file:
        if is_folder and path.name == DCP_METADATA:
            return load_sharded(file, crc32, _device(map_location), safely, choice)
        match format_of(file):
            case "torch_zip":
                choose = None if choice.takes_all else choice
                lands = together and safely
                return Archive(
                    file, map_location, safely, engine=process_engine(), lands=lands, ahead=not lands, choose=choose
                )
            case "safetensors":
                return load_safetensors(file, map_location, choice)
            case "torch_legacy":
                return _load_legacy(file, map_location, safely, choice)


def _weights_only(asked: bool | None) -> bool:
    """Decides as ``torch.load`` does."""

    def is_set(name: str) -> bool:
        return os.environ.get(name, "").lower() in ("1", "y", "yes", "true")

    if is_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD"):
        return True
    return not is_set("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD") if asked is None else asked


def _device(map_location: MapLocation) -> torch.device:
    """The device that all tensors of a sharded checkpoint are loaded to."""
    if map_location is None or isinstance(map_location, str | torch.device):
        return torch.device("cpu" if map_location is None else map_location)
    raise ConfigError(f"load: map_location={map_location!r}: a sharded checkpoint takes a device")


def _load_legacy(file: FileReader, map_location: MapLocation, weights_only: bool, choice: Choice) -> Any:
    """Loads a file that torch wrote before version 1.6; it has no checksums."""
    try:
        loaded = torch.load(file.path, map_location, weights_only=weights_only)
    except Exception as error:
        raise LoadError(f"torch.load: {error}", path=file.path) from error
    return choice(loaded)
