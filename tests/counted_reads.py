"""Counts the bytes that this rank reads of files that all ranks read together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from lazyckpt.reading import archive, relay, together
from lazyckpt.reading.ranges import ParallelRead


class Reads:
    def __init__(self) -> None:
        self.nbytes = 0


@contextlib.contextmanager
def counted_reads(*, alone: bool = True, least_bytes: int | None = None) -> Iterator[Reads]:
    """``alone``: also what the rank reads for itself. ``least_bytes``: for each rank that reads."""
    reads = Reads()

    class Counted(ParallelRead):
        def __init__(self, path: Any, records: Any, engine: Any) -> None:
            reads.nbytes += sum(record.nbytes for record in records)
            super().__init__(path, records, engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(together, "ParallelRead", Counted)
        if alone:
            patch.setattr(archive, "ParallelRead", Counted)
        if least_bytes is not None:
            patch.setattr(relay, "LEAST_BYTES", least_bytes)
        yield reads
