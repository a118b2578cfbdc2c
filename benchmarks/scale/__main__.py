"""Prints the tables of docs/scale.md, and draws its pictures into docs/img.

    python -m benchmarks.scale [--node-gbps 25 …]

Every constant is an argument. With one of them only the tables are printed.
"""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path

from benchmarks.pictures import Picture, draw
from benchmarks.scale import papers, ranks
from benchmarks.scale.constants import DGX2, OURS, POLARIS, Constants

IMAGES = Path(__file__).parent.parent.parent / "docs" / "img"


def tables(changed: dict[str, float] | None = None) -> dict[str, str]:
    """The tables in Markdown, by their title; ``changed`` holds constants of all clusters."""
    ours, dgx2, polaris = (replace(cluster, **(changed or {})) for cluster in (OURS, DGX2, POLARIS))
    return {
        "Constants": _constants(ours),
        "The papers": papers.compared(dgx2),
        "Throughput, GB/s": papers.throughput(polaris),
        "By the number of ranks": ranks.table(ours),
        "How many in flight": ranks.in_flight(ours),
        "Loads, s": ranks.loads(ours),
        "Where the engines differ": ranks.sensitivity(ours),
    }


def pictures() -> dict[str, tuple[str, Picture]]:
    """Title and picture, by the name of the file."""
    return {
        "scale-writers": ("Model: 10 GB written from DGX-2 nodes (FastPersist, figure 8)", papers.by_writers(DGX2)),
        "scale-replicas": (
            "Model: training that saves every iteration, over torch.save (FastPersist, 9 and 12)",
            papers.by_replicas(DGX2),
        ),
        "scale-time": ("Model: 15 iterations of 13B, each saved (DataStates-LLM, figure 11)", papers.by_time(POLARIS)),
        "scale-throughput": (
            "Model: throughput of checkpoints of 13B (DataStates-LLM, figure 12)",
            papers.by_throughput(POLARIS),
        ),
        "scale-lost": ("Model: training time lost to checkpoints and failures", ranks.picture(OURS)),
    }


def _constants(c: Constants) -> str:
    rows = [
        f"| `{one.name}` | {getattr(c, one.name):g} | {one.metadata['kind']} | {one.metadata['source']} |"
        for one in fields(c)
    ]
    return "\n".join(["| constant | value | | source |", "|---|--:|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for one in fields(OURS):
        source = f"{one.metadata['kind']}: {one.metadata['source']}; default %(default)g in our cluster"
        flag = "--" + one.name.replace("_", "-")
        parser.add_argument(flag, type=float, default=getattr(OURS, one.name), help=source)
    given = vars(parser.parse_args())
    changed = {name: value for name, value in given.items() if value != getattr(OURS, name)}
    for title, table in tables(changed).items():
        print(f"{title}\n\n{table}\n")
    if changed:
        return
    for name, (title, picture) in pictures().items():
        if not draw(picture, title, IMAGES / f"{name}.svg"):
            raise SystemExit("the pictures need matplotlib")


if __name__ == "__main__":
    main()
