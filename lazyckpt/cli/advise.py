"""``lazyckpt advise``: how often to save, with what ring, and what disk that takes."""

from __future__ import annotations

import math
import os
import re
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import typer
from rich.text import Text

from lazyckpt.cli.flags import path_argument
from lazyckpt.cli.output import columns, count, duration, plain, print_json, show, size, stdout
from lazyckpt.cli.trace import TraceFile, read_trace
from lazyckpt.errors import ConfigError, LoadError
from lazyckpt.observe.advice import Advice
from lazyckpt.observe.advice import advise as compute
from lazyckpt.tools.contents import checkpoint_in

_SIZES: dict[str, float] = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
_TIMES = {"ms": 1e-3, "": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_CLOSURE_SHARE = 0.5  # of an iteration: an optimizer's step as long as that has forward and backward in it


def advise(
    source: Annotated[
        Path | None,
        path_argument("[FILE|DIR]", "A trace to measure in, or a run's folder for the size of its state."),
    ] = None,
    state: Annotated[str | None, typer.Option(metavar="SIZE", help="Of one checkpoint, as in 3.5GB.")] = None,
    iteration: Annotated[str | None, typer.Option(metavar="TIME", help="Of one iteration, as in 800ms.")] = None,
    bandwidth: Annotated[str | None, typer.Option(metavar="SIZE", help="That the disk writes per second.")] = None,
    optimizer: Annotated[str | None, typer.Option(metavar="TIME", help="Of the optimizer's step therein.")] = None,
    cost: Annotated[
        str | None, typer.Option(metavar="TIME", help="That a checkpoint costs: blocked, and iterations slowed down.")
    ] = None,
    max_overhead: Annotated[
        float, typer.Option(metavar="PERCENT", help="Of the training time that checkpoints may cost.")
    ] = 2.0,
    mtbf: Annotated[
        str | None, typer.Option(metavar="TIME", help="Mean time between failures of the whole job, as in 12h.")
    ] = None,
    gpus: Annotated[int, typer.Option(metavar="N", help="GPUs of the job.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell how often to save, what that costs, and what disk and ring it takes.

    What a trace tells need not be given; what is given goes before it.
    """
    if not 0 < max_overhead < 100:
        raise ConfigError(f"--max-overhead {max_overhead:g}: expected a percentage, above 0 and below 100")
    numbers = _measured(source) if source is not None else {}
    given = {
        "state_bytes": _parse(state, "--state", _SIZES),
        "iteration_s": _parse(iteration, "--iteration", _TIMES),
        "write_bytes_per_s": _parse(bandwidth, "--bandwidth", _SIZES),
        "optimizer_s": _parse(optimizer, "--optimizer", _TIMES),
        "cost_s": _parse(cost, "--cost", _TIMES),
        "failure_s": _parse(mtbf, "--mtbf", _TIMES),
    }
    numbers.update({name: value for name, value in given.items() if value is not None})
    options = {"state_bytes": "--state", "iteration_s": "--iteration", "write_bytes_per_s": "--bandwidth"}
    missing = [option for name, option in options.items() if name not in numbers]
    if missing:
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
    console = stdout()
    table = columns("", "", "", wrap=("",))
    for name, value, why in _inputs(numbers, source):
        table.add_row(name, value, why, style="dim")
    show(console, table)
    console.print()
    table = columns("", "", "", wrap=("",))
    for name, value, why in _explain(advice, max_overhead, gpus):
        table.add_row(name, Text(value, style="bold"), why)
    show(console, table)


def _inputs(numbers: dict[str, Any], source: Path | None) -> list[tuple[str, str, str]]:
    origin = "" if source is None else f"{plain(source)}, unless given"
    rows = [
        ("state", size(numbers["state_bytes"]), origin),
        ("iteration", duration(numbers["iteration_s"]), "without a checkpoint"),
        ("disk", f"{size(int(numbers['write_bytes_per_s']))}/s", ""),
        ("cost", duration(numbers.get("cost_s", 0.0)), "" if "cost_s" in numbers else "not known, taken for nothing"),
    ]
    return rows


def _explain(advice: Advice, max_overhead: float, gpus: int) -> list[tuple[str, str, str]]:
    a = advice
    fast = "this disk does" if a.hidden else "this disk does not"
    reasons = {"the disk": a.disk_every, "the overhead": a.overhead_every, "failures": a.failure_every or 0}
    deciding = max(reasons, key=reasons.__getitem__)
    rows = [
        ("save every", _count(a.every), f"the largest of those below: decided by {deciding}"),
        ("  for the disk", _count(a.disk_every), f"a checkpoint is written in {duration(a.write_s)}, before the next"),
        ("  for the overhead", _count(a.overhead_every), f"more often costs over {max_overhead:g} % (CheckFreq)"),
    ]
    if a.failure_every is not None:
        why = "checkpoints and repeated work cost least together (Young, Daly)"
        rows.append(("  for failures", _count(a.failure_every), why))
    rows += [
        ("overhead", f"{a.overhead:.2%}", f"of the training time, at {duration(a.cost_s)} a checkpoint"),
        (
            "a failure repeats",
            duration(a.redo_s),
            f"of GPU time, {count(gpus, 'GPU')} together, on average (FastPersist, eq. 2)",
        ),
    ]
    if a.loss is not None:
        rows.append(("lost in all", f"{a.loss:.2%}", "of the training time: checkpoints, and work that is repeated"))
    rows += [
        (
            "to save always",
            f"{size(int(a.hide_bytes_per_s))}/s",
            f"writes a checkpoint under one forward and backward (FastPersist, eq. 1); {fast}",
        ),
        ("ring", size(a.ring_bytes), f"host_buffer_bytes={a.ring_bytes}: no copy is late for the next optimizer step"),
    ]
    return rows


def _measured(source: Path) -> dict[str, Any]:
    """What a trace tells, or a folder."""
    if os.path.isdir(source):
        checkpoint = checkpoint_in(source)
        if checkpoint is None:
            raise LoadError("no checkpoints in it", path=source)
        return {"state_bytes": checkpoint.nbytes}
    return measure(read_trace(source))


def measure(trace: TraceFile) -> dict[str, Any]:
    """What ``lazyckpt.advise`` needs, as far as a trace tells it."""
    durable = [c for c in trace.checkpoints if c["args"]["error"] is None]
    facts = [c["args"]["metrics"] for c in durable]
    numbers: dict[str, Any] = {}
    if facts:
        numbers["state_bytes"] = facts[-1]["bytes"]
        numbers["write_bytes_per_s"] = median(m["bytes"] / m["write_s"] for m in facts)
    iterations = trace.spans("iteration")
    by_checkpoint = [[i for i in iterations if _overlap(i, c)] for c in durable]
    disturbed = {id(i) for touched in by_checkpoint for i in touched}
    usual = [i["dur"] / 1e6 for i in iterations if id(i) not in disturbed]
    costs = blocked = [m["save_blocked_s"] + m["gate_blocked_s"] for m in facts]
    if usual:
        iteration_s = numbers["iteration_s"] = median(usual)
        # Iterations vary, and some have a validation in them: a checkpoint costs no less than it blocked, and no more
        # than it was on its way.
        costs = [
            max(min(sum(i["dur"] / 1e6 - iteration_s for i in touched), m["durable_s"]), least_s)
            for touched, m, least_s in zip(by_checkpoint, facts, blocked, strict=True)
            if touched
        ] or blocked
        steps = [s["dur"] / 1e6 for s in trace.spans("optimizer.step")]
        if steps and median(steps) < _CLOSURE_SHARE * iteration_s:
            numbers["optimizer_s"] = median(steps)
    if costs:
        numbers["cost_s"] = mean(costs[1:] or costs)  # the first pickles and copies everything, and makes the ring
    return numbers


def _overlap(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return bool(a["run"] == b["run"] and a["ts"] < b["ts"] + b["dur"] and b["ts"] < a["ts"] + a["dur"])


def _parse(text: str | None, option: str, units: dict[str, float]) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)(?:/s)?\s*", text.lower())
    try:
        number, unit = match.groups() if match else ("", "")
        value = float(number) * units[unit.removesuffix("b") if units is _SIZES else unit]
        if math.isinf(value):
            raise ValueError
        return value
    except (KeyError, ValueError):
        example = "3.5GB or 512MiB" if units is _SIZES else "800ms, 1.5s, 20min, 12h or 30d"
        raise ConfigError(f"{option} {text!r}: expected something like {example}") from None


def _count(iterations: int) -> str:
    return "iteration" if iterations == 1 else f"{iterations:,} iterations"
