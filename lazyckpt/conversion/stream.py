"""Writes files whose storages are read from other files, with a few megabytes of them in memory at a time.

A plan lays a file out from names and sizes alone, so its storages are allocated but never touched. The engine copies
from two buffers instead. The program of a file is cut into batches. Each batch is read into one buffer and appended,
while the engine still writes the batch before it from the other.

The engine copies a chunk only when it is full, or when the next file begins. So the end of a batch may still wait for
its copy when the next batch is read. Two buffers make that safe, if every batch but the last of a file fills a chunk.
The end of an archive has no storages and takes no buffer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from lazyckpt import _engine
from lazyckpt.conversion.elements import read_sharded
from lazyckpt.conversion.inert import InertStorage
from lazyckpt.errors import SaveError, save_error
from lazyckpt.formats.program import LITERAL, SOURCE, Extent
from lazyckpt.formats.reader import Record
from lazyckpt.pipeline.plan import FilePlan
from lazyckpt.providers.base import TensorViews
from lazyckpt.reading.ranges import CHUNK_BYTES, ParallelRead, process_engine
from lazyckpt.stores.store import AnyPath

_BATCH_BYTES = 16 << 20  # a limit that only a single storage exceeds


@dataclass(frozen=True)
class Origin:
    """Where the bytes of a storage are. With ``view`` (dtype, offset, shape, strides) they are the elements of the
    ``saved`` storage that it shows, made dense and converted to ``dtype``."""

    saved: InertStorage
    view: tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]] | None = None
    dtype: torch.dtype | None = None


@dataclass
class _Batch:
    """A part of a file's program, with its sources, which lie one after the other in a buffer."""

    file: int
    first_source: int  # number of the file's first source
    extent: Extent
    sources: list[int]
    buffer: int = 0


def write(plans: dict[Path, FilePlan], origins: dict[int, Origin], advance: Callable[[int], None]) -> None:
    """Writes and syncs new files. ``origins`` has every storage by its ``_cdata``; ``advance`` gets the bytes read.

    Raises SaveError, CorruptFileError if a checksum does not match, LoadError if an origin cannot be read, and the
    errors of the plans. Unfinished files stay; the caller removes them.
    """
    files = [(path, plan, plan.gather()) for path, plan in plans.items()]
    views = TensorViews()
    batches: list[_Batch] = []
    sizes = []
    for number, (_, plan, own) in enumerate(files):
        extents, nbytes = plan.lay_out(own)
        sizes.append(nbytes)
        for extent in extents:
            batches += _cut(number, len(views), extent)
        for view in own:
            views.append(view)
    engine = process_engine()
    with _Buffers(max((sum(views.sizes[i] for i in batch.sources) for batch in batches), default=0)) as buffers:
        pointers = array("Q", bytes(8 * len(views)))
        for turn, batch in enumerate(batch for batch in batches if batch.sources):
            batch.buffer = turn % 2
            at = buffers.pointers[batch.buffer]
            for source in batch.sources:
                pointers[source], at = at, at + views.sizes[source]
        job = engine.begin(pointers, array("Q", views.sizes), array("Q", bytes(8 * len(views))), files=len(files))
        path = next(iter(plans))
        try:
            for number, (path, _, _) in enumerate(files):
                job.open(number, path, sizes[number])
            crcs: dict[int, int] = {}
            for batch in batches:
                path = files[batch.file][0]
                wanted = [(source, origins[views.identities[source]]) for source in batch.sources]
                crcs |= _read(wanted, pointers)
                job.append(batch.file, batch.extent.offset, batch.extent.rows, batch.extent.blob, batch.first_source)
                job.wait_eager()
                job.raise_error()
                nbytes = sum(views.sizes[source] for source in batch.sources)
                buffers.drop(batch.buffer, nbytes - CHUNK_BYTES)
                advance(nbytes)
            job.seal()
            job.wait_settled()
            job.raise_error()
            written = job.source_crcs()
        except OSError as error:
            raise save_error(error, path=path) from error
        finally:
            job.fail(errno.ECANCELED, "abandoned")  # no effect on a finished job
            job.wait_settled()
    if wrong := [views.keys[source] for source, crc in crcs.items() if written[source] != crc]:
        raise SaveError(f"the written bytes differ from those read: {', '.join(wrong[:5])}", path=path)


class _Buffers:
    """Two buffers, used by turns. Their memory goes back to the system as soon as possible."""

    def __init__(self, nbytes: int) -> None:
        self._maps = [mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(2)]
        self._tensors = [torch.frombuffer(each, dtype=torch.uint8) for each in self._maps]
        self.pointers = [tensor.data_ptr() for tensor in self._tensors]

    def __enter__(self) -> _Buffers:
        return self

    def __exit__(self, *_: object) -> None:
        self._tensors.clear()
        for each in self._maps:
            with contextlib.suppress(BufferError):
                each.close()

    def drop(self, which: int, nbytes: int) -> None:
        """Gives back the first ``nbytes`` of a buffer."""
        nbytes -= nbytes % mmap.PAGESIZE
        if nbytes > 0:
            self._maps[which].madvise(mmap.MADV_DONTNEED, 0, nbytes)


def _cut(file: int, first_source: int, extent: Extent) -> Iterator[_Batch]:
    """Cuts an extent into consecutive batches, each before a source."""
    rows = extent.rows.tolist()
    begin = first_literal = 0
    held = 0
    sources: list[int] = []
    offset = extent.offset

    def batch(end: int, last_literal: int) -> _Batch:
        own = array("q", rows[begin:end])
        for at in range(0, len(own), 3):
            if own[at] == LITERAL:
                own[at + 2] -= first_literal
        part = Extent(offset, own, extent.blob[first_literal:last_literal])
        return _Batch(file, first_source, part, [first_source + source for source in sources])

    literal = 0  # end of the last literal in the blob
    for at in range(0, len(rows), 3):
        kind, nbytes, arg = rows[at : at + 3]
        if kind == SOURCE:
            if held >= CHUNK_BYTES and held + nbytes > _BATCH_BYTES:
                part = batch(at, literal)
                yield part
                offset += part.extent.nbytes
                begin, first_literal, held, sources = at, literal, 0, []
            held += nbytes
            sources.append(arg)
        elif kind == LITERAL:
            literal = arg + nbytes
    yield batch(len(rows), len(extent.blob))


def _read(wanted: list[tuple[int, Origin]], pointers: array[int]) -> dict[int, int]:
    """Reads sources to their places; returns the CRC-32 of those that are whole records."""
    crcs: dict[int, int] = {}
    by_file: dict[AnyPath, list[tuple[int, Record]]] = defaultdict(list)
    for source, origin in wanted:
        if origin.view is not None:
            _read_view(origin, pointers[source])
        elif origin.saved.shards is not None:
            crcs[source] = _copy(read_sharded(origin.saved), pointers[source])
        else:
            by_file[origin.saved.file].append((source, origin.saved.record))
    for file, found in by_file.items():
        reading = ParallelRead(file, [record for _, record in found], process_engine())
        sums = reading.read_into([pointers[source] for source, _ in found])
        crcs |= {source: crc for (source, _), crc in zip(found, sums, strict=True)}
    return crcs


def _read_view(origin: Origin, pointer: int) -> None:
    assert origin.view is not None
    dtype, offset, shape, stride = origin.view
    record = origin.saved.record
    if origin.saved.shards is not None:
        storage = read_sharded(origin.saved).untyped_storage()
    else:
        storage = torch.UntypedStorage(record.nbytes)
        ParallelRead(origin.saved.file, [record], process_engine()).read_into([storage.data_ptr()])
    _copy(torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride).to(origin.dtype).contiguous(), pointer)


def _copy(dense: torch.Tensor, pointer: int) -> int:
    """Copies the bytes of a tensor; returns their CRC-32."""
    ctypes.memmove(pointer, dense.data_ptr(), dense.nbytes)
    return _engine.crc32_at(pointer, dense.nbytes)
