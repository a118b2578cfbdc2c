"""Runs programs of rows as the engine does, slowly, for the tests of formats."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from pathlib import Path

from lazyckpt.formats.program import CRC32_HEX, CRC32_LE, LITERAL, SEGMENTS, SOURCE, Extent, segments_of


class Sparse:
    """A source of zeros with some pages of data. The zeros take no memory and no disk."""

    def __init__(self, nbytes: int, pages: dict[int, bytes]) -> None:
        self.nbytes, self.pages = nbytes, pages

    def write(self, file: io.BufferedWriter) -> int:
        start = file.tell()
        crc = position = 0
        for offset, page in [*sorted(self.pages.items()), (self.nbytes, b"")]:
            for begin in range(position, offset, 64 * 2**20):
                crc = zlib.crc32(bytes(min(64 * 2**20, offset - begin)), crc)
            file.seek(start + offset)
            file.write(page)
            crc = zlib.crc32(page, crc)
            position = offset + len(page)
        return crc


def run_program(path: Path, extents: Sequence[Extent], sources: Sequence[bytes | Sparse]) -> None:
    crcs: dict[int, int] = {}
    with path.open("wb") as file:
        for extent in extents:
            file.seek(extent.offset)
            for kind, nbytes, arg in zip(extent.rows[::3], extent.rows[1::3], extent.rows[2::3], strict=True):
                start = file.tell()
                if kind == LITERAL:
                    file.write(extent.blob[arg : arg + nbytes])
                elif kind == SOURCE:
                    assert arg not in crcs and nbytes > 0
                    source = sources[arg]
                    if isinstance(source, Sparse):
                        crcs[arg] = source.write(file)
                    else:
                        file.write(source)
                        crcs[arg] = zlib.crc32(source)
                elif kind == SEGMENTS:
                    source = sources[arg]
                    assert not isinstance(source, Sparse)
                    file.write(segments_of(source))
                elif kind == CRC32_LE:
                    file.write(crcs[arg].to_bytes(4, "little"))
                else:
                    assert kind == CRC32_HEX
                    file.write(b"%08x" % crcs[arg])
                assert file.tell() - start == nbytes
