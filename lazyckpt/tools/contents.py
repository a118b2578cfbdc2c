"""What a path holds, for commands that look into files: which file is meant, and the tree of what is in it."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazyckpt.errors import CorruptFileError, LoadError, ReadError, UnsupportedFormatError
from lazyckpt.formats import safetensors, sniff
from lazyckpt.formats.reader import FileReader, unique_keys
from lazyckpt.formats.torch_zip_reader import read_directory
from lazyckpt.reading.skeleton import Storage, Tensor, dtype_name, read_skeleton, strides_of
from lazyckpt.reading.tree import Tree
from lazyckpt.storage import manifest
from lazyckpt.storage.catalog import Catalog
from lazyckpt.storage.manifest import STATE, Checkpoint, is_folder_name, read_checkpoint

SUFFIXES = (".bin", ".ckpt", ".pkl", ".pt", ".pth", ".safetensors")  # of the files in a trainer's folder
_ANY_SUFFIX = "|".join(map(re.escape, SUFFIXES))
# The index of a model in several files, as Hugging Face names it: model.safetensors.index.json, in which there may be
# the name of a variant. It says which of them holds what.
_INDEX = re.compile(rf"(.+)({_ANY_SUFFIX})\.index(\.\w+)?\.json")
_MAX_TOLD = 10  # names
_MAX_INDEX_BYTES = 100_000_000


@dataclass
class Contents:
    """``obj`` is what was saved, as ``skeleton`` tells it; ``nbytes`` the length of its file or files; ``metadata``
    is None if the format has none."""

    file: Path
    format: str
    nbytes: int
    obj: Any
    metadata: dict[str, str] | None

    def tree(self, *, join: bool = True) -> Tree:
        """Raises UnsupportedFormatError if it is too large, or too strange, to be shown."""
        with _showing(self.file):
            return Tree(self.file.name, self.obj, join=join)


@contextlib.contextmanager
def _showing(file: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise UnsupportedFormatError(f"cannot be shown: {error}", path=file) from error


def checkpoint_in(folder: Path) -> Checkpoint | None:
    """The checkpoint that ``folder`` is, or the newest in it; None if it holds none of a Checkpointer's.

    Raises LoadError if there are only broken ones, and ReadError if one cannot be read: it may be the newest."""
    if os.path.isfile(folder / manifest.MANIFEST):
        return read_checkpoint(folder)
    catalog = Catalog(folder)
    checkpoints = catalog.scan()
    for error in catalog.broken:
        if isinstance(error, ReadError) or not checkpoints:
            raise error
    return checkpoints[0] if checkpoints else None


def documents_in(path: Path) -> dict[str, Path]:
    """What is in a file, a checkpoint, a run's folder (its newest checkpoint) or a trainer's folder: what to give to
    ``read``, by names under which another path may hold the same. Shards are one document.

    Raises LoadError if there is nothing."""
    if not os.path.isdir(path):
        return {path.name: path}
    if (checkpoint := checkpoint_in(path)) is not None:
        return {STATE: checkpoint.path / STATE}
    if found := files_in(path):
        return found
    raise nothing_in(path)


def files_in(folder: Path) -> dict[str, Path]:
    """The files of a trainer's folder, by name. Shards are their index, by the name of the same in one file."""
    entries = [entry for entry in sorted(folder.iterdir()) if not os.path.isdir(entry) and not _is_alias(entry)]
    found = {entry.name: entry for entry in entries if entry.suffix in SUFFIXES}
    for index in entries:
        if (name := model_of(index)) is not None:
            with contextlib.suppress(LoadError):  # whoever reads it hears of that
                for shard in shards_of(index):
                    found.pop(shard.name, None)
            found[index.name if name in found else name] = index
    return found


def _is_alias(entry: Path) -> bool:
    """Whether it is another name of what is in the same folder, as last.ckpt is. All files in a cache of the Hugging
    Face hub are links, but to elsewhere."""
    if not os.path.islink(entry):
        return False
    return os.path.realpath((entry.parent / os.readlink(entry)).parent) == os.path.realpath(entry.parent)


def model_of(file: Path) -> str | None:
    """The name that the shards of an index would have as one file; None if it is no index."""
    named = _INDEX.fullmatch(file.name)
    return None if named is None else f"{named[1]}{named[3] or ''}{named[2]}"


def nothing_in(folder: Path) -> LoadError:
    """The error that says so."""
    if is_distributed(folder):
        how = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} FILE"
        return UnsupportedFormatError(
            f"a checkpoint of torch.distributed.checkpoint; one file of it: {how}", path=folder
        )
    return LoadError(f"no checkpoint in this folder{inside(folder)}", path=folder)


def inside(folder: Path) -> str:
    """Behind the word that there is nothing in ``folder``: in which folders of it there is something."""
    folders = [sub for sub in folder.iterdir() if os.path.isdir(sub) and sub.name[0] != "."]
    found = sorted(sub.name for sub in folders if _holds_some(sub))
    return f"; there are some in its folders {_few(found)}" if found else ""


def _few(names: list[str]) -> str:
    return ", ".join([*names[:_MAX_TOLD], "…"] if len(names) > _MAX_TOLD else names)


def _holds_some(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(entry.suffix in SUFFIXES or is_folder_name(entry.name) for entry in folder.iterdir())
    return False


def is_distributed(folder: Path) -> bool:
    """Whether torch.distributed.checkpoint wrote it."""
    return any(folder.glob("*.distcp"))


def document_in(path: Path) -> Path:
    """The one document in ``path``. Raises LoadError that names them if there are several."""
    found = documents_in(path)
    if len(found) > 1:
        names = _few(sorted(file.name for file in found.values()))
        raise LoadError(f"holds several files; give one of them: {names}", path=path)
    return next(iter(found.values()))


def read(file: Path) -> Contents:
    """Raises LoadError for what is damaged, or of a format whose contents cannot be told without loading it."""
    return _read_file(file) if model_of(file) is None else _read_shards(file)


def _read_file(file: Path) -> Contents:
    kind = sniff(file)
    if kind == "torch_legacy":
        raise UnsupportedFormatError("written by torch before 1.6; load it with lazyckpt.load, save it anew", path=file)
    nbytes = file.stat().st_size
    if kind == "safetensors":
        header = safetensors.read_header(file)
        return Contents(file, "safetensors", nbytes, _tensors_of(file, header.tensors), header.metadata)
    return Contents(file, "torch.save archive", nbytes, read_skeleton(file, read_directory(file)), None)


def _tensors_of(file: Path, infos: Mapping[str, safetensors.TensorInfo]) -> dict[str, Tensor]:
    with _showing(file):
        return {
            name: Tensor(
                dtype_name(info.dtype), info.shape, 0, strides_of(info.shape), Storage(info.record, info.dtype, file)
            )
            for name, info in infos.items()
        }


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
    """The files that an index names, and what each of them is to hold. They may be missing.

    Raises CorruptFileError if it is damaged, or leads out of its folder."""
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


def read_shard(file: Path, names: set[str]) -> Contents:
    """Raises CorruptFileError unless it holds these ``names`` and no other, and what ``read`` raises."""
    contents = _read_file(file)
    if not isinstance(contents.obj, Mapping):
        raise CorruptFileError("a shard holds named tensors, this file something else", path=file)
    if wrong := names ^ contents.obj.keys():
        raise CorruptFileError(f"the index and this file disagree about {min(map(str, wrong))!r}", path=file)
    return contents
