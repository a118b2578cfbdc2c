"""Converts between torch.save archives, safetensors files, one or several of either, and folders of
torch.distributed.checkpoint, whatever their size."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from lazyckpt.conversion import stream
from lazyckpt.conversion.hollow import Hollow
from lazyckpt.conversion.shards import distributed
from lazyckpt.errors import ConfigError, NoSpaceError, save_error
from lazyckpt.pipeline.plan import FilePlan, plan_for
from lazyckpt.providers.rename import Rename, checked, renamed
from lazyckpt.reading.part import NoPart, part
from lazyckpt.storage import commit, folders, paths
from lazyckpt.storage.manifest import DCP_METADATA
from lazyckpt.tools import Progress
from lazyckpt.tools.contents import SUFFIXES, document_in, read
from lazyckpt.tools.to_folder import FILE, FolderPlan


@dataclass(frozen=True)
class Conversion:
    """The result of ``convert``.

    Attributes:
        path: The new file or folder.
        files: Names of the files written, the index of shards included.
        bytes: Their length.
        records: Storages converted.
        without_checksum: Those whose source carried no checksum to compare.
        metadata_left_out: Keys of safetensors metadata that a torch.save archive cannot hold.
        tied: Further names of tensors with several, with the name that holds the tensor.
    """

    path: Path
    files: tuple[str, ...]
    bytes: int
    records: int
    without_checksum: int
    metadata_left_out: tuple[str, ...]
    tied: dict[str, str]


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    key: str | None = None,
    only: Sequence[str] | None = None,
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Converts a file, an index of shards, a checkpoint or a folder into the format that the name of ``dst`` asks for.

    Streams the tensors, so that memory holds the largest one, and compares every checksum. ``dst`` must not exist; it
    appears when it is whole and durable. Runs no code from ``src``: only tensors and plain values are converted.

    Args:
        src: The source; a run's folder means its newest checkpoint.
        dst: A new .safetensors file, a torch.save archive with another suffix of such files, or, with a name without a
            suffix, a folder of torch.distributed.checkpoint.
        key: The part to take, such as "model", or "a.b" for a part of a part.
        only: Takes only the entries whose names match one of these patterns, such as "encoder.*".
        rename: New names for the entries: prefixes and their replacements, {"module.": ""}, or a function of a name.
            None as a new name leaves the entry out.
        dtype: Converts floating-point tensors to this dtype.
        max_shard_bytes: Writes a folder of files of at most this size, and their index. ``dst`` is then a new folder,
            or a file name in it.
        progress: Called with the name of ``dst``, the bytes read and the bytes in all.

    Raises:
        ConfigError: If ``dst`` exists, or its format cannot hold the contents of ``src``.
        LoadError: If ``src`` cannot be read; CorruptFileError if it is damaged.
        SaveError: If ``dst`` cannot be written.
    """
    dst = paths.as_given(dst)
    sharded, name = max_shard_bytes is not None, dst.name
    if sharded:
        dst, name = (dst.parent, dst.name) if dst.suffix in SUFFIXES else (dst, "model.safetensors")
    contents = read(document_in(paths.as_given(src)))
    source = Path(contents.file)
    if os.path.lexists(dst):
        hint = f"; shards need a new folder: use DIR or DIR/{name}" if sharded else ""
        raise ConfigError(f"{dst}: exists already{hint}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"dtype={dtype!r}: expected a floating-point dtype of torch")
    obj = _chosen(contents.obj, key, only, rename, source)
    old_metadata = contents.metadata or {}
    to_safetensors = name.endswith(".safetensors")
    to_folder = not sharded and not dst.suffix
    loader = Hollow(source, dtype, dense=to_safetensors or to_folder)
    if to_safetensors:
        saved, ties = loader.tensors(obj)
    elif to_folder or Path(name).suffix in SUFFIXES:
        # The metadata maps missing names to their tensors.
        known = old_metadata if obj is contents.obj else {}
        ties = {tied: kept for tied, kept in known.items() if kept in obj and tied not in obj}
        whole = obj | {tied: obj[kept] for tied, kept in ties.items()} if ties else obj
        if sharded:
            loader.check_named(whole, "a folder of shards")
        saved = loader.whole(whole)
    else:
        raise ConfigError(
            f"{dst}: give it a name that ends in .safetensors or .pt, one without a suffix for a folder of "
            "torch.distributed.checkpoint, or a size of shards for a folder"
        )
    plans: dict[str, FilePlan]
    texts: Callable[[], dict[str, bytes]]
    if to_folder:
        plan = FolderPlan(saved, source)
        plans, texts = {FILE: plan}, lambda: {DCP_METADATA: plan.metadata()}
    else:
        files, index = distributed(saved, name, max_shard_bytes) if max_shard_bytes is not None else ({name: saved}, {})
        metadata = (contents.metadata or {"format": "pt"}) | ties
        plans, texts = {file: plan_for(file, tensors, metadata) for file, tensors in files.items()}, lambda: index
    folder = sharded or to_folder
    _write(dst, plans, texts, loader, progress or (lambda name, done, total: None), folder=folder)
    written = sorted(dst.iterdir()) if folder else [dst]
    return Conversion(
        path=dst,
        files=tuple(file.name for file in written),
        bytes=sum(file.stat().st_size for file in written),
        records=len(loader.saved),
        without_checksum=sum(saved.record.crc32 is None and saved.shards is None for saved in loader.saved.values()),
        metadata_left_out=() if to_safetensors else tuple(sorted(old_metadata.keys() - {"format", *ties})),
        tied=ties,
    )


def _chosen(obj: Any, key: str | None, only: Sequence[str] | None, rename: Rename | None, file: Path) -> Any:
    """The part of ``obj`` to convert, with new names. Raises ConfigError if there is none."""
    try:
        obj = obj if key is None else part(obj, key)
    except NoPart as error:
        raise ConfigError(f"{file}: {error}") from None
    if only is None and rename is None:
        return obj
    if not isinstance(obj, Mapping) or not all(isinstance(name, str) for name in obj):
        raise ConfigError(f"{file}: only and rename are for a dict with names as keys; give a key")
    names = [name for name in obj if only is None or any(fnmatchcase(name, pattern) for pattern in only)]
    if not names:
        there = ", ".join(list(obj)[:10]) + (", …" if len(obj) > 10 else "")
        raise ConfigError(f"{file}: no name matches {', '.join(only or ())}; there is: {there}")
    return {new: obj[old] for old, new in renamed(names, checked(rename or {})).items()}


def _write(
    dst: Path,
    plans: dict[str, FilePlan],
    texts: Callable[[], dict[str, bytes]],
    loader: Hollow,
    progress: Progress,
    *,
    folder: bool,
) -> None:
    """Writes ``dst``, which appears when all of it is durable. ``texts``: small files beside those of ``plans``, known
    when these are written. Raises SaveError."""
    nbytes = loader.nbytes
    done = 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        progress(str(dst), done, nbytes)

    try:
        if (free := folders.free_bytes(dst.absolute().parent)) < nbytes:
            raise NoSpaceError(f"needs {nbytes} bytes, {free} are free", path=dst)
        staging = commit.Staging(dst) if folder else commit.FileStaging(dst)
        try:
            stream.write({staging.path / name: plan for name, plan in plans.items()}, loader.origins, advance)
            for name, text in texts().items():
                (staging.path / name).write_bytes(text)
            staging.describe(None, plans)
            staging.publish()
        except BaseException:
            staging.discard()
            raise
    except OSError as error:
        raise save_error(error, path=dst) from error
