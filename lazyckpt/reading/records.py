"""Lists the records of a file and names the tensors in them."""

from __future__ import annotations

from pathlib import Path

from lazyckpt.errors import LoadError, UnsupportedFormatError
from lazyckpt.formats import safetensors, sniff
from lazyckpt.formats.reader import Record
from lazyckpt.formats.torch_zip_reader import read_directory
from lazyckpt.reading.inert import read_inert
from lazyckpt.reading.tree import Tree


def records_of(file: Path) -> list[Record]:
    """Returns the records in file order; they do not overlap. Raises LoadError, and UnsupportedFormatError for a file
    that torch wrote before version 1.6."""
    kind = sniff(file)
    if kind == "torch_legacy":
        raise UnsupportedFormatError("written by torch before 1.6. Such a file has no checksums", path=file)
    if kind == "safetensors":
        return [info.record for info in safetensors.read_header(file).tensors.values()]
    return sorted(read_directory(file).records.values(), key=lambda record: record.offset)


def tensor_names(file: Path) -> dict[str, str]:
    """Returns the name of a tensor for each record that holds one; nothing if the pickle is damaged."""
    if sniff(file) != "torch_zip":
        return {}
    names: dict[str, str] = {}
    try:
        for node in Tree(file.name, read_inert(file, read_directory(file))).root.walk():
            if node.storage is not None:
                names.setdefault(node.storage.record.name, node.path)
    except (LoadError, ValueError):
        return {}
    return names
