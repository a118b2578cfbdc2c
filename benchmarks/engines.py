"""Draws docs/img/engines.svg from the table of engines in docs/benchmarks.md: ``python -m benchmarks.engines``."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.pictures import Picture, draw

DOCS = Path(__file__).parent.parent / "docs"
HEADING = "## Engines"
_MEDIAN_AND_RANGE = re.compile(r"([\d.]+) \(([\d.]+)\.\.([\d.]+)\)")


def figures() -> dict[str, tuple[list[float], list[float]]]:
    """Of every engine in the table: time over none, and blocked milliseconds; smallest, median and largest of each."""
    table = (DOCS / "benchmarks.md").read_text().partition(HEADING)[2].partition("\n## ")[0]
    found = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        ranges = [match for cell in cells[1:3] if (match := _MEDIAN_AND_RANGE.fullmatch(cell))]
        if len(ranges) == 2:
            time, blocked = ([float(m[2]), float(m[1]), float(m[3])] for m in ranges)
            found[re.sub("[*`]", "", cells[0])] = time, blocked
    return found


def main() -> None:
    times = Picture("", "time over training without checkpoints")
    blocked = Picture("", "blocked per checkpoint, ms", log_y=True)
    for engine, (over_none, milliseconds) in figures().items():
        times.add("", engine, over_none)
        blocked.add("", engine, milliseconds)
    title = "A checkpoint of 0.54 GB at every step, 2 cores: medians and ranges of 7 pairs"
    if not draw(times, title, DOCS / "img" / "engines.svg", blocked):
        raise SystemExit("this needs matplotlib")


if __name__ == "__main__":
    main()
