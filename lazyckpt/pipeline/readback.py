"""Compares what the disk gives back with what the engine copied (``verify_after_write``)."""

from __future__ import annotations

import errno
from pathlib import Path

from lazyckpt import _engine
from lazyckpt.errors import LoadError
from lazyckpt.reading.records import records_of, tensor_names

_MAX_NAMES = 5


def compare(job: _engine.Job, folder: Path, names: list[str]) -> None:
    """Reads the durable files of a job in ``folder``, past the page cache.

    Raises OSError (EIO) that names the file, the place in it and the tensors there if a checksum differs; OSError if a
    file cannot be read."""
    for number, name in enumerate(names):
        if different := job.read_back(number):
            offset, nbytes = different[0][0], sum(nbytes for _, nbytes in different)
            tensors = _tensors_at(folder / name, different)
            what = (
                f"the disk gave back other bytes than were written: {nbytes} bytes from offset {offset} of {name}"
                f"{f' ({tensors})' if tensors else ''}. Check the disk and its cable, driver and memory"
            )
            raise OSError(errno.EIO, what, str(folder / name))


def _tensors_at(file: Path, places: list[tuple[int, int]]) -> str:
    """The tensors in these places, as far as the damaged file tells: its header or directory may be in one of them."""
    try:
        records = records_of(file)
    except LoadError:
        return ""
    hit = [r.name for r in records if any(r.offset < at + n and at < r.offset + r.nbytes for at, n in places)]
    meanings = tensor_names(file)
    found = [meanings.get(name, name) for name in hit]
    more = f" and {len(found) - _MAX_NAMES} more" if len(found) > _MAX_NAMES else ""
    return ", ".join(found[:_MAX_NAMES]) + more
