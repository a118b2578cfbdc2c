"""Finds the file that a path means, and describes its contents without running its code or reading a tensor.

A path names a file, the index of a model in several files (shards), a checkpoint, a run's folder or a trainer's folder.
The index of a sharded checkpoint, a folder of torch.distributed.checkpoint (DCP), is its file ``.metadata``. A folder
into which DeepSpeed saves stands for the tag that it would load.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazyckpt.conversion.inert import InertStorage, InertTensor, dtype_name, read_inert, strides_of
from lazyckpt.errors import CorruptFileError, LoadError, ReadError, UnsupportedFormatError
from lazyckpt.formats import safetensors, sniff
from lazyckpt.formats.reader import FileReader, unique_keys
from lazyckpt.formats.torch_zip_reader import read_directory
from lazyckpt.storage import manifest
from lazyckpt.storage.catalog import Catalog
from lazyckpt.storage.manifest import DCP_METADATA, STATE, Checkpoint, is_folder_name, read_described
from lazyckpt.storage.paths import is_alias
from lazyckpt.stores.store import AnyPath, StorePath
from lazyckpt.tools import deepspeed
from lazyckpt.tools.deepspeed import Tag
from lazyckpt.tools.remote import copies_in
from lazyckpt.tools.remote import scan as scan_url
from lazyckpt.tools.tree import Node, Tree
from lazyckpt.tools.units import count

SUFFIXES = (".bin", ".ckpt", ".pkl", ".pt", ".pth", ".safetensors")  # of the files in a trainer's folder
_ANY_SUFFIX = "|".join(map(re.escape, SUFFIXES))
# Hugging Face's name for the index of shards; the name of a variant may stand before .json.
_INDEX = re.compile(rf"(.+)({_ANY_SUFFIX})\.index(\.\w+)?\.json")
_MAX_NAMES = 10  # in a message
_MAX_INDEX_BYTES = 100_000_000


@dataclass(frozen=True)
class Contents:
    """The contents of one file, or of the shards of one model."""

    file: AnyPath
    format: str
    nbytes: int  # of all files
    obj: Any  # as ``read_inert`` returns it
    metadata: dict[str, str] | None  # None if the format has none

    def tree(self) -> Node:
        """Arranges the contents as a tree. Raises UnsupportedFormatError if it would be too large."""
        try:
            return Tree(self.file.name, self.obj).root
        except ValueError as error:
            raise UnsupportedFormatError(f"cannot be shown: {error}", path=self.file) from error


def checkpoint_in(folder: AnyPath) -> Checkpoint | None:
    """Returns the checkpoint that ``folder`` is, or the newest in it; None if a Checkpointer never saved there.

    Raises LoadError if all are broken, and ReadError if one cannot be read: it may be the newest."""
    if isinstance(folder, StorePath):
        if manifest.is_directory(folder):
            return read_described(folder)
        checkpoints, broken, _ = scan_url(folder)
    elif os.path.isfile(folder / manifest.MANIFEST):
        return read_described(folder)
    else:
        catalog = Catalog(folder)
        checkpoints, broken = catalog.scan() or copies_in(folder), catalog.broken
    for error in broken:
        if isinstance(error, ReadError) or not checkpoints:
            raise error
    return checkpoints[0] if checkpoints else None


def documents_in(path: AnyPath) -> dict[str, AnyPath]:
    """Returns the documents that ``path`` means, by names that a similar folder would use too.

    A document is a file, or the index of shards. A run's folder means its newest checkpoint. The files of DeepSpeed
    have the same names under every tag. Raises LoadError if there is none."""
    if isinstance(path, StorePath):
        checkpoint = checkpoint_in(path)
        if checkpoint is None:
            return {path.name: path}
        if checkpoint.layout == "state":
            return {STATE: checkpoint.state}
        found = {file.name: checkpoint.base / file.name for file in checkpoint.files if file.name.endswith(SUFFIXES)}
        if not found:
            raise LoadError("no file of a known kind in this folder", path=path)
        return found
    if not os.path.isdir(path):
        return {path.name: path}
    if (checkpoint := checkpoint_in(path)) is not None:
        if checkpoint.layout == "state":
            return {STATE: checkpoint.state}
        path = checkpoint.folder
        if checkpoint.layout == "file":
            return {path.name: path}
    found = {**files_in(path)}
    if (tag := deepspeed.tag_in(path)) is not None:
        found |= {name: tag.path / name for name in tag.files}
    if found:
        return found
    raise nothing_in(path)


def tag_in(path: Path) -> Tag | None:
    """Returns the tag that ``path`` means; None if there is none, or if other files lie beside the tags. Raises
    LoadError if DeepSpeed would load a tag that is missing."""
    alone = os.path.isdir(path) and (deepspeed.is_tag(path) or not files_in(path))
    return deepspeed.tag_in(path) if alone else None


def read_tag(tag: Tag) -> Contents:
    """Describes the files of a tag, each under its name. Raises LoadError, which names a damaged file."""
    parts = {name: _read_file(tag.path / name) for name in tag.files}
    tree: dict[str, Any] = {}
    for name, part in parts.items():
        key = name.removesuffix(".pt").replace("/", ".")
        tree[name if key in tree else key] = part.obj
    kind = f"DeepSpeed checkpoint in {count(len(parts), 'file')}"
    return Contents(tag.path, kind, sum(part.nbytes for part in parts.values()), tree, None)


def document_in(path: AnyPath) -> AnyPath:
    """Returns the one document that ``path`` means; in a folder of DCP that is the state, even beside other files.
    Raises LoadError that names them if there are several."""
    found = documents_in(path)
    if DCP_METADATA in found:
        return found[DCP_METADATA]
    if len(found) > 1:
        base = str(path)
        names = _few(sorted(str(file).removeprefix(f"{base}/") for file in found.values()))
        raise LoadError(f"holds several files; give one of them: {names}", path=path)
    return next(iter(found.values()))


def files_in(folder: Path) -> dict[str, Path]:
    """Returns the documents in a trainer's folder by name, those of its folders of DCP, too. An index has the name that
    its model would have as one file, and replaces its shards."""
    entries = [entry for entry in sorted(folder.iterdir()) if not os.path.isdir(entry) and not is_alias(entry)]
    found = {entry.name: entry for entry in entries if entry.suffix in SUFFIXES}
    for index in entries:
        if (name := model_of(index)) is not None:
            with contextlib.suppress(LoadError):  # reading the index will raise it
                for shard in shards_of(index):
                    found.pop(shard.name, None)
            found[index.name if name in found else name] = index
    indices = [folder / DCP_METADATA, *sorted(folder.glob(f"[!.]*/{DCP_METADATA}"))]
    return found | {str(index.relative_to(folder)): index for index in indices if os.path.isfile(index)}


def model_of(file: AnyPath) -> str | None:
    """Returns the name that a sharded model would have as one file; None if ``file`` is no index."""
    named = _INDEX.fullmatch(file.name)
    return None if named is None else f"{named[1]}{named[3] or ''}{named[2]}"


def nothing_in(folder: Path) -> LoadError:
    """Makes the error for a folder without a document."""
    if any(folder.glob("*.distcp")):
        what = (
            f"files of torch.distributed.checkpoint without {DCP_METADATA}: their save did not end, or it was removed"
        )
        return LoadError(what, path=folder)
    return LoadError(f"no checkpoint in this folder{hint_at_subfolders(folder)}", path=folder)


def hint_at_subfolders(folder: Path) -> str:
    """Returns the end of a message that names the subfolders with checkpoints; empty if there are none."""
    found = []
    for sub in sorted(folder.iterdir()):
        with contextlib.suppress(OSError):  # no folder, or one that cannot be read
            if sub.name[0] != "." and any(map(_is_document, sub.iterdir())):
                found.append(sub.name)
    return f"; there are some in its folders {_few(found)}" if found else ""


def _is_document(entry: Path) -> bool:
    return entry.suffix in SUFFIXES or entry.name == DCP_METADATA or is_folder_name(entry.name)


def _few(names: list[str]) -> str:
    return ", ".join([*names[:_MAX_NAMES], "…"] if len(names) > _MAX_NAMES else names)


def read(file: AnyPath) -> Contents:
    """Describes a document. Raises LoadError if it is damaged, or cannot be described without loading it."""
    if file.name == DCP_METADATA:
        return _read_folder(file)
    if model_of(file) is None:
        return _read_file(file)
    if isinstance(file, StorePath):
        raise UnsupportedFormatError("an index of shards; pull the folder first, or give a shard", path=file)
    return _read_shards(file)


def _read_file(file: AnyPath) -> Contents:
    kind = sniff(file)
    if kind == "torch_legacy":
        raise UnsupportedFormatError("written by torch before 1.6; load it with lazyckpt.load, save it anew", path=file)
    with FileReader(file) as reader:
        nbytes = reader.size
    if kind == "torch_zip":
        return Contents(file, "torch.save archive", nbytes, read_inert(file, read_directory(file)), None)
    header = safetensors.read_header(file)
    try:
        tensors = {name: _inert(file, info) for name, info in header.tensors.items()}
    except ValueError as error:
        raise UnsupportedFormatError(f"cannot be shown: {error}", path=file) from error
    return Contents(file, "safetensors", nbytes, tensors, header.metadata)


def _read_folder(index: AnyPath) -> Contents:
    from lazyckpt.conversion.inert_folder import read_inert_folder
    from lazyckpt.reading.sharded.folder import open_folder  # imports torch, which takes seconds

    folder = open_folder(index.parent)
    files = {file for entry in folder.entries.values() for file, _ in entry.items.values()}
    kind = f"torch.distributed.checkpoint in {count(len(files), 'file')}"
    nbytes = 0
    for file in [index, *(folder.path / name for name in files)]:
        with FileReader(file) as reader:
            nbytes += reader.size
    return Contents(index, kind, nbytes, read_inert_folder(folder), None)


def _inert(file: AnyPath, info: safetensors.TensorInfo) -> InertTensor:
    storage = InertStorage(info.record, info.dtype, file)
    return InertTensor(dtype_name(info.dtype), info.shape, 0, strides_of(info.shape), storage)


def _read_shards(index: Path) -> Contents:
    shards = [read_shard(file, names) for file, names in shards_of(index).items()]
    metadata = [shard.metadata for shard in shards if shard.metadata is not None]
    return Contents(
        index,
        f"{' and '.join(sorted({shard.format for shard in shards}))} in {len(shards)} files",
        sum(shard.nbytes for shard in shards),
        {name: tensor for shard in shards for name, tensor in shard.obj.items()},
        {key: text for each in metadata for key, text in each.items()} if metadata else None,
    )


def shards_of(index: Path) -> dict[Path, set[str]]:
    """Returns the files that an index names, with the tensors that each should hold. Files may be missing.

    Raises CorruptFileError if the index is damaged or names a file outside its folder."""
    with FileReader(index) as reader:
        if reader.size > _MAX_INDEX_BYTES:
            raise reader.corrupt("too large for an index")
        text = reader.read(0, reader.size)
    try:
        places: dict[str, str] = json.loads(text, object_pairs_hook=unique_keys)["weight_map"]
        files: dict[str, set[str]] = {file: set() for file in sorted(places.values())}
        for name, file in places.items():
            files[file].add(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"not an index of shards ({type(error).__name__}: {error})", path=index) from error
    if not files:
        raise CorruptFileError("an index that names no file", path=index)
    for file in files:
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\0" in file:
            raise CorruptFileError(f"names a file {file!r} outside its folder", path=index)
    return {index.parent / file: names for file, names in files.items()}


def read_shard(file: AnyPath, names: set[str]) -> Contents:
    """Describes a shard. Raises CorruptFileError unless it holds exactly these ``names``, and the errors of
    ``read``."""
    contents = _read_file(file)
    if not isinstance(contents.obj, Mapping):
        raise CorruptFileError("a shard holds named tensors, this file something else", path=file)
    if wrong := names ^ contents.obj.keys():
        raise CorruptFileError(f"the index and this file disagree about {min(map(str, wrong))!r}", path=file)
    return contents
