"""Loads a sharded checkpoint whole, or a part of it, into one process: the branch of ``load`` for such a folder."""

from __future__ import annotations

from typing import Any

import torch

from lazyckpt.errors import LoadError
from lazyckpt.formats.reader import FileReader
from lazyckpt.reading.part import Choice
from lazyckpt.reading.ranges import process_engine
from lazyckpt.reading.sharded.folder import ShardedFolder, Target
from lazyckpt.reading.sharded.tensors import tensors_in
from lazyckpt.stores.store import AnyPath


def load_sharded(
    metadata: FileReader, crc32: int | None, device: torch.device, weights_only: bool, choice: Choice
) -> Any:
    """Returns the part that ``choice`` takes of the saved state, its tensors whole and on ``device``. Reads only that
    part. The ranks' own state is a dict by rank. ``metadata`` and ``crc32``: see ``ShardedFolder``.

    Raises LoadError, and errors of ``choice``."""
    folder = ShardedFolder(metadata, crc32)

    def read_object(name: str) -> Any:
        return folder.read_object(name, weights_only=weights_only) if choice.needs(name) else None

    tree, names = folder.tree({}, read_object)
    holder = {"": choice(tree)}
    made: dict[Any, torch.Tensor] = {}  # tied tensors stay one tensor
    targets: list[Target] = []
    for inner, at, _ in tensors_in(holder, ""):
        if (known := names.get(id(inner[at]))) is not None:
            name, saved = known
            same = folder.entries[name].sameness
            if same not in made:
                made[same] = _new(saved, device, folder.path)
                targets.append(Target(name, (0,) * saved.dim(), made[same]))
            inner[at] = made[same]
    if device.type != "meta":
        folder.read(targets, process_engine())
    return holder[""]


def _new(like: torch.Tensor, device: torch.device, path: AnyPath) -> torch.Tensor:
    """Raises LoadError if there is no memory on the host for a tensor of this shape and dtype."""
    try:
        return torch.empty(like.shape, dtype=like.dtype, device=device)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise LoadError(f"torch cannot hold these tensors: {error}", path=path) from error
