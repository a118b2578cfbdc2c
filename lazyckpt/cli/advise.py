"""``lazyckpt advise``: prints how often to save, with which ring, and the disk speed that this takes."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from lazyckpt.cli.output import columns, print_json, show
from lazyckpt.cli.parameters import AsJson, path_argument, quantity
from lazyckpt.errors import ConfigError
from lazyckpt.tools.advice import Advice
from lazyckpt.tools.advice import advise as compute
from lazyckpt.tools.trace import measure
from lazyckpt.tools.units import count, duration, plain, size

_NEEDED = {"state_bytes": "--state", "iteration_s": "--iteration", "write_bytes_per_s": "--bandwidth"}


def advise(
    source: Annotated[
        Path | None, path_argument("[FILE|DIR]", "A trace to measure in, or a run's folder for the size of its state.")
    ] = None,
    state: Annotated[Any, quantity("SIZE", "Size of one checkpoint, as in 3.5GB.")] = None,
    iteration: Annotated[Any, quantity("TIME", "Duration of one iteration, as in 800ms.")] = None,
    bandwidth: Annotated[Any, quantity("SIZE", "What the disk writes per second.")] = None,
    optimizer: Annotated[Any, quantity("TIME", "Duration of the optimizer's step in an iteration.")] = None,
    cost: Annotated[Any, quantity("TIME", "Training time lost to one checkpoint, slower steps included.")] = None,
    max_overhead: Annotated[
        float, typer.Option(metavar="PERCENT", help="Training time that checkpoints may cost.")
    ] = 2.0,
    mtbf: Annotated[Any, quantity("TIME", "Mean time between failures of the whole job, as in 12h.")] = None,
    gpus: Annotated[int, typer.Option(metavar="N", help="Number of GPUs of the job.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Compute how often to save, what that costs, and what disk and ring it takes.

    Options take precedence over what a trace shows.
    """
    if not 0 < max_overhead < 100:
        raise ConfigError(f"--max-overhead {max_overhead:g}: expected a percentage, above 0 and below 100")
    numbers: dict[str, Any] = {} if source is None else dict(measure(source))
    given = {"state_bytes": state, "iteration_s": iteration, "write_bytes_per_s": bandwidth}
    given |= {"optimizer_s": optimizer, "cost_s": cost, "failure_s": mtbf}
    numbers.update({name: value for name, value in given.items() if value is not None})
    if missing := [option for name, option in _NEEDED.items() if name not in numbers]:
        wanted = f"give {', '.join(missing)}"
        if source is None or os.path.isdir(source):
            raise ConfigError(f"{wanted}, or a trace of a run (Checkpointer(trace=FILE))")
        lacks = "iteration without a checkpoint" if missing == ["--iteration"] else "durable checkpoint"
        raise ConfigError(f"{source}: there is no {lacks} in it; {wanted}")
    numbers["state_bytes"] = int(numbers["state_bytes"])
    advice = compute(**numbers, max_overhead=max_overhead / 100, gpus=gpus)
    if as_json:
        print_json({**numbers, **asdict(advice), "hidden": advice.hidden})
        return
    inputs = columns("", "", "", wrap=("",))
    for row in (
        ("state", size(advice.state_bytes), "" if source is None else f"{plain(source)}, unless given"),
        ("iteration", duration(advice.iteration_s), "without a checkpoint"),
        ("disk", f"{size(advice.write_bytes_per_s)}/s", ""),
        ("cost", duration(advice.cost_s), "" if "cost_s" in numbers else "unknown, assumed to be nothing"),
    ):
        inputs.add_row(*row, style="dim")
    show(inputs)
    print()
    table = columns("", "", "", wrap=("",))
    for name, value, why in _explain(advice, max_overhead, gpus):
        table.add_row(name, Text(value, style="bold"), why)
    show(table)


def _explain(a: Advice, max_overhead: float, gpus: int) -> list[tuple[str, str, str]]:
    reasons = {"the disk": a.disk_every, "the overhead": a.overhead_every, "failures": a.failure_every or 0}
    deciding = max(reasons, key=reasons.__getitem__)
    rows = [
        ("save every", _iterations(a.every), f"the largest of those below: decided by {deciding}"),
        ("  for the disk", _iterations(a.disk_every), f"writing a checkpoint takes {duration(a.write_s)}"),
        ("  for the overhead", _iterations(a.overhead_every), f"more often costs over {max_overhead:g} % (CheckFreq)"),
    ]
    if a.failure_every is not None:
        why = "checkpoints and repeated work cost least together (Young, Daly)"
        rows.append(("  for failures", _iterations(a.failure_every), why))
    redo = f"of GPU time, {count(gpus, 'GPU')} together, on average (FastPersist, eq. 2)"
    rows += [
        ("overhead", f"{a.overhead:.2%}", f"of the training time, at {duration(a.cost_s)} a checkpoint"),
        ("a failure repeats", duration(a.redo_s), redo),
    ]
    if a.loss is not None:
        rows.append(("lost in all", f"{a.loss:.2%}", "of the training time: checkpoints and repeated work"))
    fast = "this disk does" if a.hidden else "this disk does not"
    always = f"writes a checkpoint under one forward and backward (FastPersist, eq. 1); {fast}"
    ring = f"host_buffer_bytes={a.ring_bytes}: every copy ends before the next optimizer step"
    return [*rows, ("to save always", f"{size(a.hide_bytes_per_s)}/s", always), ("ring", size(a.ring_bytes), ring)]


def _iterations(number: int) -> str:
    return "iteration" if number == 1 else f"{number:,} iterations"
