"""Lists the records of a file, whatever its format."""

from __future__ import annotations

import os

from lazyckpt.errors import UnsupportedFormatError
from lazyckpt.formats import safetensors, sniff
from lazyckpt.formats.reader import Record
from lazyckpt.formats.torch_zip_reader import read_directory


def records_of(file: str | os.PathLike[str]) -> list[Record]:
    """Returns the records in file order; they do not overlap. Raises LoadError, and UnsupportedFormatError for a file
    that torch wrote before version 1.6."""
    kind = sniff(file)
    if kind == "torch_legacy":
        raise UnsupportedFormatError("written by torch before 1.6. Such a file has no checksums", path=file)
    if kind == "safetensors":
        return [info.record for info in safetensors.read_header(file).tensors.values()]
    return sorted(read_directory(file).records.values(), key=lambda record: record.offset)
