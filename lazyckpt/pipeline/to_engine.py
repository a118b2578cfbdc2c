"""Hands the storages of a checkpoint and the programs of its files to the engine."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from lazyckpt import _engine
from lazyckpt.capture.sources import Sources
from lazyckpt.formats.program import Extent

Program = tuple[list[Extent], int]  # of one file, and its size in bytes


def begin_job(engine: _engine.Engine, sources: Sources, files: int) -> _engine.Job:
    return engine.begin(
        sources.pointers,
        sources.sizes,
        sources.owners,
        files,
        False,
        sources.devices,
        sources.streams,
    )


def capture(
    engine: _engine.Engine, sources: Sources, programs: list[Program], ranges: Iterable[Sequence[tuple[int, int]]] = ()
) -> _engine.Job:
    """Gives the engine the program of every file; it copies eager bytes, as far as it has room, before it returns.
    ``ranges``: see ``FilePlan.ranges``."""
    return engine.capture(
        sources.pointers,
        sources.sizes,
        sources.owners,
        len(programs),
        list(_numbered(sources, programs)),
        sources.devices,
        sources.streams,
        [(number, begin, end) for number, of_file in enumerate(ranges) for begin, end in of_file],
    )


def append(job: _engine.Job, sources: Sources, programs: list[Program]) -> None:
    """Gives the engine the program of every file."""
    for extent in _numbered(sources, programs):
        job.append(*extent)
    job.seal()


def _numbered(sources: Sources, programs: list[Program]) -> Iterator[tuple[int, int, array[int], bytes, int]]:
    """Each extent, as the engine takes it: file, offset, rows, blob, and its first source."""
    first_source = 0
    for number, (extents, _) in enumerate(programs):
        for extent in extents:
            yield number, extent.offset, extent.rows, extent.blob, first_source
        first_source += len(sources.files[number])
