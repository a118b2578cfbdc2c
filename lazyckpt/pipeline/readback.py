"""Compares bytes read back from the disk with the engine's copies (``verify_after_write``)."""

from __future__ import annotations

import errno
from pathlib import Path

from lazyckpt import _engine
from lazyckpt.errors import LoadError
from lazyckpt.formats.records import records_of

_MAX_NAMES = 5


def compare(job: _engine.Job, folder: Path, names: list[str]) -> None:
    """Reads the durable files of a job in ``folder`` past the page cache and compares their checksums.

    Raises OSError: EIO if a checksum differs, naming the file, the offset and the records there; the system's own error
    if a file cannot be read."""
    for number, name in enumerate(names):
        if different := job.read_back(number):
            offset, nbytes = different[0][0], sum(nbytes for _, nbytes in different)
            records = _records_at(folder / name, different)
            what = (
                f"the disk gave back other bytes than were written: {nbytes} bytes from offset {offset} of {name}"
                f"{f' ({records})' if records else ''}. Check the disk and its cable, driver and memory"
            )
            raise OSError(errno.EIO, what, str(folder / name))


def _records_at(file: Path, places: list[tuple[int, int]]) -> str:
    """Names the records in these places, such as ``data/3``. Empty if the damage is in the header or the directory of
    the file."""
    try:
        records = records_of(file)
    except LoadError:
        return ""
    hit = [r.name for r in records if any(r.offset < at + n and at < r.offset + r.nbytes for at, n in places)]
    more = f" and {len(hit) - _MAX_NAMES} more" if len(hit) > _MAX_NAMES else ""
    return ", ".join(hit[:_MAX_NAMES]) + more
