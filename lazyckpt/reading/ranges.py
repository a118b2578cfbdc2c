"""Reads parts of a file in parallel and verifies every checksum. Needs torch only if bytes go to a device."""

from __future__ import annotations

import contextlib
import errno
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Protocol

from lazyckpt import _engine
from lazyckpt.config import MIB
from lazyckpt.errors import CorruptFileError, LoadError, load_error
from lazyckpt.formats.reader import Record
from lazyckpt.stores.calls import CancelScope
from lazyckpt.stores.store import StorePath

CHUNK_BYTES = 2 * MIB  # small, so that 32 MiB hold enough chunks to keep eight writes in flight
_RING_BYTES = 16 * CHUNK_BYTES
_REQUESTS = 16  # to a store, in flight


def process_engine() -> _engine.Engine:
    """The small engine of this process. A forked child makes its own."""
    return _engine_of(os.getpid())


@cache
def _engine_of(pid: int) -> _engine.Engine:
    engine = _engine.Engine(ring_bytes=_RING_BYTES, chunk_bytes=CHUNK_BYTES, io_depth=8, copy_threads=1)
    engine.reserve(_RING_BYTES)
    return engine


class Checked(Protocol):
    """Bytes of a file with a name and the CRC-32 that they should have; None if the file has none."""

    @property
    def name(self) -> str: ...
    @property
    def crc32(self) -> int | None: ...


def compare(path: str | os.PathLike[str], written: Sequence[Checked], found: Iterable[int | None]) -> None:
    """Raises CorruptFileError, which names the records whose CRC-32 differs."""
    bad = [w.name for w, crc in zip(written, found, strict=True) if w.crc32 is not None and w.crc32 != crc]
    if bad:
        names = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        raise CorruptFileError(f"checksum does not match: {names}", path=path)


class ParallelRead:
    """A read of records that has begun on the disk but has landed nowhere yet. Raises LoadError."""

    def __init__(self, path: str | os.PathLike[str], records: list[Record], engine: _engine.Engine) -> None:
        self._path = path
        self._records = records
        offsets, sizes = array("Q", [r.offset for r in records]), array("Q", [r.nbytes for r in records])
        with self._load_error():
            if isinstance(path, StorePath):
                size, fetch = path.store.entry(path.key).nbytes, partial(path.store.stream, path.key)
                self._reader = _engine.RangeReader(
                    engine, path, offsets, sizes, io_depth=_REQUESTS, fetch=fetch, size=size
                )
            else:
                self._reader = _engine.RangeReader(engine, path, offsets, sizes)

    def close(self) -> None:
        """Abandons pending reads."""
        del self._reader

    def read_into(self, pointers: list[int], ordinals: list[int] | None = None) -> list[int]:
        """Reads each record to its pointer (0: nowhere) and returns the CRC-32 of each. To be called once.

        ``ordinals`` names the CUDA device that each pointer is on, or HOST. Raises CorruptFileError that names the
        records whose checksum does not match.
        """
        cuda: set[int] = set()
        streams = None
        if ordinals is not None:
            from lazyckpt import devices

            cuda = set(ordinals) - {devices.HOST}
            streams = devices.current_streams(cuda) if cuda else None
        scope = CancelScope.current()
        with self._load_error(), scope.ending(self._reader.cancel) if scope else contextlib.nullcontext():
            crcs = self._reader.read_into(array("Q", pointers), array("q", ordinals or ()) if cuda else None, streams)
        compare(self._path, self._records, crcs)
        return crcs

    @contextlib.contextmanager
    def _load_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno == errno.ENODATA:
                raise CorruptFileError("truncated while being read", path=self._path) from error
            if str(error.filename).startswith("cuda:"):  # the device failed, not the file
                raise LoadError(f"cannot be read: {error.strerror}", path=self._path) from error
            raise load_error("cannot be read", error, path=self._path) from error
