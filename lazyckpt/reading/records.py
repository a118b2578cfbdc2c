"""The records of a file, and the tensors in them."""

from __future__ import annotations

from pathlib import Path

from lazyckpt.errors import LoadError, UnsupportedFormatError
from lazyckpt.formats import safetensors, sniff
from lazyckpt.formats.reader import Record
from lazyckpt.formats.torch_zip_reader import read_directory
from lazyckpt.reading.skeleton import read_skeleton
from lazyckpt.reading.tree import Tree


def records_of(file: Path) -> list[Record]:
    """In file order; they do not overlap."""
    kind = sniff(file)
    if kind == "torch_legacy":
        raise UnsupportedFormatError("written by torch before 1.6: such a file has no checksums", path=file)
    if kind == "safetensors":
        return [info.record for info in safetensors.read_header(file).tensors.values()]
    return sorted(read_directory(file).records.values(), key=lambda record: record.offset)


def tensor_names(file: Path) -> dict[str, str]:
    """Record to the name of a tensor in it, as far as the pickle tells."""
    if sniff(file) != "torch_zip":
        return {}
    names: dict[str, str] = {}
    try:
        for node in Tree(file.name, read_skeleton(file, read_directory(file))).root.walk():
            if node.storage is not None:
                names.setdefault(node.storage.record.name, node.path)
    except (LoadError, ValueError):
        pass  # damage in the pickle: the records have no names then
    return names
