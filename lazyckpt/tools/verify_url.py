"""Verifies what lies behind a URL: every byte is downloaded, in pieces, and nothing is kept."""

from __future__ import annotations

import time
from collections.abc import Iterator

from lazyckpt.errors import CorruptFileError, LoadError
from lazyckpt.storage.manifest import Checkpoint, is_directory, is_missing, manifest_of, read_described
from lazyckpt.stores.store import StorePath
from lazyckpt.tools import Progress
from lazyckpt.tools.checksums import Finding, compare, verify_file
from lazyckpt.tools.remote import scan


def verify_url(url: StorePath, progress: Progress) -> Iterator[Finding]:
    """Yields a finding for each checkpoint at the URL of a run, the newest first; or for a checkpoint, or a file."""
    try:
        if is_directory(url) or not is_missing(manifest_of(url, "file")):
            yield _finding(url, read_described(url), progress)
            return
        found, broken, _ = scan(url)
    except LoadError as error:
        yield _failed(url, error)
        return
    yield from (_failed(fault.path, fault) for fault in broken)
    for checkpoint in found:
        yield _finding(url / checkpoint.path.name, checkpoint, progress)
    if not found and not broken:
        yield _finding(url, None, progress)


def _finding(place: StorePath, checkpoint: Checkpoint | None, progress: Progress) -> Finding:
    begin = time.perf_counter()
    try:
        if checkpoint is None:
            return verify_file(place, progress)
        parts = []
        base = place.parent if checkpoint.layout == "file" else place
        for entry in checkpoint.files:
            if (
                checkpoint.is_sharded or checkpoint.layout == "folder"
            ):  # its items are inside of the files, whose checksums the manifest has
                parts.append(compare(base / entry.name, [], [], progress, entry))
            else:
                parts.append(verify_file(base / entry.name, progress, entry))
    except LoadError as error:
        return _failed(place, error)
    damage = tuple(f"{part.path.name}: {line}" for part in parts for line in part.damage)
    return Finding(
        path=place,
        state="damaged" if damage else "ok",
        bytes=sum(part.bytes for part in parts),
        records=sum(part.records for part in parts),
        without_checksum=sum(part.without_checksum for part in parts),
        whole_file_checked=True,
        damage=damage,
        seconds=time.perf_counter() - begin,
    )


def _failed(place: StorePath, error: LoadError) -> Finding:
    return Finding(place, "damaged" if isinstance(error, CorruptFileError) else "unreadable", damage=(str(error),))
