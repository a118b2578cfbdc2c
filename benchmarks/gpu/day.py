"""The day on a GPU: `right` says whether checkpoints are right there, `fast` measures what they cost.

    python3 -u benchmarks/gpu/day.py right --out $OUT
    python3 -u benchmarks/gpu/day.py fast --out $OUT

`--device cpu` rehearses either. Both need what `sh scripts/offline.sh fetch .carried` fetched; docs/internals/gpu.md
says more. Only the standard library: the engine may not be built yet.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])  # the repository, not the folder of this script

from benchmarks import machine
from benchmarks.gpu.calls import CALLS
from benchmarks.gpu.prepare import prepare
from benchmarks.gpu.stages import Day


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=CALLS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=325, help="for everything (default %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the summary, the log and the tables")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a folder in memory")
    parser.add_argument("--disk", type=Path, default=Path("/tmp"), help="a folder on a disk")
    arguments = parser.parse_args()
    run(Day(**{**vars(arguments), "out": arguments.out.absolute()}))


def run(day: Day) -> None:
    for what, found in machine.describe(day.disk, ("torch", "numpy", "torch_checkpointing")).items():
        day.say(f"   {what}: {found}")
    try:
        prepare(day)
        CALLS[day.call](day)
    except Exception as error:
        day.say(f"ENDED by {error!r}")
    day.conclude()


if __name__ == "__main__":
    main()
