"""Measures in a timeline, or in a run's folder, what ``lazyckpt.advise`` needs to know."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import mean, median
from typing import Any

from lazyckpt.errors import LoadError
from lazyckpt.tools.contents import checkpoint_in
from lazyckpt.tools.trace import TraceFile, read_trace

_CLOSURE_SHARE = 0.5  # an optimizer step that takes this part of an iteration contains forward and backward


def measure(source: Path) -> dict[str, float]:
    """Returns those arguments of ``advise`` that ``source`` shows. A run's folder shows only ``state_bytes``.

    Raises LoadError if it is neither a timeline nor a folder with a checkpoint.
    """
    if not os.path.isdir(source):
        return measure_trace(read_trace(source))
    if (checkpoint := checkpoint_in(source)) is None:
        raise LoadError("no checkpoints in it", path=source)
    return {"state_bytes": checkpoint.nbytes}


def measure_trace(trace: TraceFile) -> dict[str, float]:
    """Returns those arguments of ``advise`` that a timeline shows."""
    durable = [c for c in trace.checkpoints if c["args"]["error"] is None]
    facts = [c["args"]["metrics"] for c in durable]
    numbers: dict[str, float] = {}
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
        # Iterations vary, and some contain a validation. A checkpoint costs at least the time it blocked, and at most
        # the time until it was durable.
        costs = [
            max(min(sum(i["dur"] / 1e6 - iteration_s for i in touched), m["durable_s"]), least_s)
            for touched, m, least_s in zip(by_checkpoint, facts, blocked, strict=True)
            if touched
        ] or blocked
        steps = [s["dur"] / 1e6 for s in trace.spans("optimizer.step")]
        if steps and median(steps) < _CLOSURE_SHARE * iteration_s:
            numbers["optimizer_s"] = median(steps)
    if costs:
        numbers["cost_s"] = mean(costs[1:] or costs)  # the first save pickles everything and makes the ring
    return numbers


def _overlap(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return bool(a["run"] == b["run"] and a["ts"] < b["ts"] + b["dur"] and b["ts"] < a["ts"] + a["dur"])
