"""``lazyckpt trace``: prints one checkpoint of a timeline as a table, and draws it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lazyckpt.cli.output import columns, print_json, say, show, width
from lazyckpt.cli.parameters import AsJson, Found, completed_from, path_argument
from lazyckpt.tools.trace import TracedCheckpoint, checkpoint_of_ranks, read_trace
from lazyckpt.tools.units import count, plain, size

_NARROW = 55  # columns: less room shows how long the phases take, and nothing else
_SHORTEST_WAIT_S = 50e-6  # a shorter wait would be shown as 0.0 ms


def _steps(file: Path) -> Found:
    """Yields every step once, the newest first."""
    checkpoints = {str(c["args"]["step"]): c["args"] for c in reversed(read_trace(file).checkpoints)}
    for step, told in checkpoints.items():
        yield step, f"{Path(told['path']).name}, {size(told['metrics']['bytes'])}"


def trace(
    file: Annotated[Path, path_argument("FILE", "A timeline, which Checkpointer(trace=FILE) records.")],
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="The checkpoint of step N, not the newest.", autocompletion=completed_from("file", _steps)
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="PNG", help="Draw it, too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show where the time of one checkpoint went, and draw it beside the training.

    If several ranks saved it, each beside FILE into a trace of its own, the phases are those of rank 0, and a second
    table has a row for each rank. The whole file opens in https://ui.perfetto.dev.
    """
    by_rank = checkpoint_of_ranks(file, step)
    checkpoint = by_rank[0]
    phases = checkpoint.phases()
    if output is not None:
        from lazyckpt.tools.timeline import draw  # imports matplotlib, which is optional

        draw(checkpoint, output)
    if as_json:
        about = {name: getattr(checkpoint, name) for name in ("step", "path", "error", "iteration_s", "metrics")}
        ranks = [{"rank": rank, "error": c.error, "metrics": c.metrics} for rank, c in by_rank.items()]
        print_json({"trace": file, **about, "phases": list(map(asdict, phases)), "picture": output, "ranks": ranks})
        return
    facts = f"{size(checkpoint.metrics['bytes'])} in {count(checkpoint.metrics['chunks'], 'chunk')}"
    say((f"{plain(checkpoint.path)}: {facts}", "bold"))
    if checkpoint.error is not None:
        say((plain(checkpoint.error), "bold red"))
    narrow = width() < _NARROW
    names = ("phase", "ms") if narrow else ("phase", "ms", "from", "to", "training", "")
    table = columns(*names, right=("ms", "from", "to"), wrap=("phase" if narrow else "",))
    for phase in phases:
        if phase.waits and phase.busy_s < _SHORTEST_WAIT_S:
            continue
        style = "" if phase.waits else "blue"  # as in the paper: training does not notice it
        moments = (f"{seconds * 1e3:.1f}" for seconds in (phase.busy_s, phase.begin_s, phase.end_s))
        cells = [phase.name, *moments, "waits" if phase.waits else "goes on", phase.note]
        table.add_row(*cells[: len(names)], style=style)
    show(table)
    if len(by_rank) > 1:
        print()
        _show_ranks(by_rank)
    if output is not None:
        say(f"drawn: {plain(output)}")


def _show_ranks(by_rank: dict[int, TracedCheckpoint]) -> None:
    """A row for each rank: the bytes it saved, how long its training waited, and when each phase ended."""
    heads = ("rank", "size", "eager", "blocked", "copied", "synced", "durable")
    table = columns(*heads, "", right=heads, wrap=("",))
    for rank, c in by_rank.items():
        m = c.metrics
        seconds = (m["save_blocked_s"] + m["gate_blocked_s"], m["captured_s"], m["synced_s"], m["durable_s"])
        moments = (f"{s * 1e3:.1f} ms" for s in seconds)
        sizes = (size(m["bytes"]), size(m["eager_bytes"]))
        table.add_row(str(rank), *sizes, *moments, plain(c.error or ""), style="" if c.error is None else "red")
    show(table)
