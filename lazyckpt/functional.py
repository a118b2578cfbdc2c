"""``save`` and ``load``, in the shape of ``torch.save`` and ``torch.load``, for one file."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

import torch

from lazyckpt.config import Config
from lazyckpt.errors import ConfigError, LoadError, SaveError
from lazyckpt.pipeline.plan import plan_for
from lazyckpt.pipeline.request import Request
from lazyckpt.pipeline.save_now import save_now
from lazyckpt.providers.rename import Rename
from lazyckpt.reading.archive import MapLocation
from lazyckpt.reading.cast import cast
from lazyckpt.reading.load import load_saved
from lazyckpt.reading.part import Choice, NoPart
from lazyckpt.reading.ranges import process_engine
from lazyckpt.storage import paths, removal


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
    """Removes the remains of killed saves, once in this process."""
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
    all_ranks: bool = False,
) -> Any:
    """Load a file of ``torch.save``, ``lazyckpt.save`` or safetensors, in parallel, and verify every checksum.

    If ``map_location`` names a CUDA device, the file is read straight into its memory through a small buffer.

    Args:
        path: A file, or the folder of a checkpoint, ours or one of torch.distributed.checkpoint. A safetensors
            file gives a dict of tensors, a sharded checkpoint whole tensors.
        map_location: As in ``torch.load``; for a sharded checkpoint, a device.
        weights_only: As in ``torch.load``, and the same environment variables decide about None. A file may then hold
            the types that ``torch.load`` allows, those given to ``torch.serialization.add_safe_globals``, and a short
            list of our own: NumPy arrays and scalars, paths, dates.
        key: The part to load, such as "model", or "a.b" for a part of a part. Reads only the bytes of this part.
        rename: New names for the entries of the result, a dict: prefixes and their replacements, {"module.": ""}, or a
            function of a name. None as a new name leaves the entry out.
        dtype: Converts floating-point tensors in the result to this dtype.
        all_ranks: All ranks of torch.distributed make this call together. Each byte of a ``torch.save`` file is then
            read and verified by one of them, which passes it to the others. Raises on all ranks if one fails.

    Raises:
        LoadError: CorruptFileError (truncated, damaged, hostile), UnsupportedFormatError; or if there is no ``key``.
        RankError: With ``all_ranks``, if a rank is lost.
        ConfigError: If ``key``, ``rename`` or ``dtype`` is invalid.
    """
    choice = Choice.of(key, rename)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"load: dtype={dtype!r}: expected a floating-point dtype of torch")
    try:
        if all_ranks:
            from lazyckpt.ranks.meeting import all_ranks_at  # needs torch.distributed
            from lazyckpt.reading.on_all_ranks import load_together

            with all_ranks_at(path, Config().rank_timeout_s) as team:
                loaded = load_together(path, map_location, weights_only, team, choice)
        else:
            loaded = load_saved(path, map_location, weights_only, choice)
    except NoPart as error:
        raise LoadError(str(error), path=path) from None
    return loaded if dtype is None else cast(loaded, dtype, path)
