"""What a path holds, for commands that look into files: which file is meant, and the tree of what is in it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazyckpt import commit
from lazyckpt.catalog import STATE, Catalog, Checkpoint, read_checkpoint
from lazyckpt.cli.skeleton import Storage, Tensor, dtype_name, read_skeleton, strides_of
from lazyckpt.cli.tree import Tree
from lazyckpt.containers import safetensors, sniff
from lazyckpt.containers.base import FileReader, unique_keys
from lazyckpt.containers.torch_zip_reader import read_directory
from lazyckpt.errors import CorruptFileError, LoadError, UnsupportedFormatError

SUFFIXES = (".bin", ".ckpt", ".pkl", ".pt", ".pth", ".safetensors")  # of the files in a trainer's folder
INDEX_SUFFIX = ".safetensors.index.json"  # says which of several safetensors files holds what; as Hugging Face has it
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.safetensors")
_MAX_INDEX_BYTES = 100_000_000


@dataclass
class Contents:
    """``obj`` is what was saved, as ``cli.skeleton`` tells it; ``nbytes`` the length of its file or files; ``metadata``
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

    Raises LoadError if there are only broken ones."""
    if (folder / commit.MANIFEST).is_file():
        return read_checkpoint(folder)
    catalog = Catalog(folder)
    checkpoints = catalog.scan()
    if not checkpoints and catalog.broken:
        raise catalog.broken[0]
    return checkpoints[0] if checkpoints else None


def documents_in(path: Path) -> dict[str, Path]:
    """What is in a file, a checkpoint, a run's folder (its newest checkpoint) or a trainer's folder: what to give to
    ``read``, by names under which another path may hold the same. Shards are one document.

    Raises LoadError if there is nothing."""
    if not path.is_dir():
        return {path.name: path}
    if (checkpoint := checkpoint_in(path)) is not None:
        return {STATE: checkpoint.path / STATE}
    entries = [entry for entry in sorted(path.iterdir()) if not entry.is_dir() and not entry.is_symlink()]
    found = {e.name.removesuffix(".index.json"): e for e in entries if e.name.endswith(INDEX_SUFFIX)}
    for entry in entries:
        shard = _SHARD.fullmatch(entry.name)
        if entry.suffix in SUFFIXES and not (shard is not None and f"{shard[1]}.safetensors" in found):
            found[entry.name] = entry
    if not found:
        raise LoadError("no checkpoint in this folder", path=path)
    return found


def document_in(path: Path) -> Path:
    """The one document in ``path``. Raises LoadError that names them if there are several."""
    found = documents_in(path)
    if len(found) > 1:
        raise LoadError(f"holds several files; give one of them: {', '.join(found)}", path=path)
    return next(iter(found.values()))


def read(file: Path) -> Contents:
    """Raises LoadError for what is damaged, or of a format whose contents cannot be told without loading it."""
    if file.name.endswith(INDEX_SUFFIX):
        return _read_shards(file)
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
    with FileReader(index) as reader:
        if reader.size > _MAX_INDEX_BYTES:
            raise reader.corrupt("too large for an index")
        text = reader.read(0, reader.size)
    try:
        places: dict[str, str] = json.loads(text, object_pairs_hook=unique_keys)["weight_map"]
        files = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"not an index of shards ({type(error).__name__}: {error})", path=index) from error
    nbytes = 0
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for name in files:
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
            raise CorruptFileError(f"names a file {name!r} outside its folder", path=index)
        file = index.parent / name
        header = safetensors.read_header(file)
        nbytes += file.stat().st_size
        metadata |= header.metadata
        if wrong := {n for n in header.tensors if places.get(n) != name} | {
            n for n, where in places.items() if where == name and n not in header.tensors
        }:
            raise CorruptFileError(f"the index and this file disagree about {min(wrong)!r}", path=file)
        tensors |= _tensors_of(file, header.tensors)
    return Contents(index, f"safetensors in {len(files)} files", nbytes, tensors, metadata)
