"""Reads a timeline, breaks down where the time of one checkpoint went (DataStates-LLM, table III), and measures the
arguments of ``lazyckpt.advise``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, median_high
from typing import Any

from lazyckpt.errors import CorruptFileError, LoadError, UnsupportedFormatError, load_error
from lazyckpt.metrics import PLAN_PHASES
from lazyckpt.observe import trace_file
from lazyckpt.observe.trace_file import COMMITS, COPIES, RING, SAVES, TRAINING, WRITES
from lazyckpt.tools.contents import checkpoint_in
from lazyckpt.tools.units import size

_KINDS = (TRAINING, SAVES, RING, COPIES, WRITES, COMMITS)
_SHORTEST_S = 1e-6  # of a phase
_PHASE_SHARE = 0.05  # a phase of the plan that takes less is not told
_CLOSURE_SHARE = 0.5  # an optimizer step that takes this part of an iteration contains forward and backward


@dataclass(frozen=True)
class Span:
    """An event with a duration. Times are seconds since save() was called; ``lane`` is the track within its kind."""

    kind: int
    lane: int
    name: str
    begin_s: float
    end_s: float
    args: dict[str, Any]

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Phase:
    """A part of a checkpoint, in seconds since save() was called.

    ``busy_s`` is the time in which at least one thread worked on it; ``waits``: whether training waited meanwhile.
    """

    name: str
    busy_s: float
    begin_s: float
    end_s: float
    waits: bool
    note: str


@dataclass(frozen=True)
class TracedCheckpoint:
    """One checkpoint of a timeline, and the other events of its run."""

    step: int | None
    path: str
    error: str | None  # why it failed
    metrics: dict[str, Any]  # the fields of its CheckpointMetrics
    iteration_s: float | None  # the median iteration of the timeline
    own: list[Span]
    others: list[Span]  # of the run
    ring: list[tuple[float, int]]  # when (seconds) how many bytes were in the staging ring
    memory: list[tuple[float, int]]  # when (seconds) how many bytes of memory the process held

    @property
    def end_s(self) -> float:
        return max(span.end_s for span in self.own)

    def spans(self, kind: int, name: str = "") -> list[Span]:
        return [span for span in self.own if span.kind == kind and name in ("", span.name)]

    def phases(self) -> list[Phase]:
        """Breaks the checkpoint down into phases that took any time."""
        eager = f"{size(self.metrics['eager_bytes'])} that not only optimizers may change"
        copies, writes = _speed(self.spans(COPIES)), _speed(self.spans(WRITES))
        table: list[tuple[str, int, str, str]] = [  # phase, kind and name of its spans, note
            ("wait for a place", TRAINING, "wait for a place", "max_in_flight saves were not durable"),
            ("serialise, lay out", TRAINING, "plan", self._plan_phases()),
            ("eager copy", TRAINING, "eager copy", eager),
            ("copy to the ring", COPIES, "", copies),
            ("wait at the gate", TRAINING, "gate", "the next optimizer step came before the last copy"),
            ("create the files", COMMITS, "create", "a temporary folder, and room on the disk"),
            ("wait for the ring", RING, "", "the ring was full: the disk was slower than the copies"),
            ("write to the files", WRITES, "", writes),
            ("fsync", COMMITS, "fsync", ""),
            ("commit", COMMITS, "commit", "manifest, the checkpoint before, rename, fsync"),
        ]
        found = []
        for phase, kind, name, note in table:
            spans = self.spans(kind, name)
            if (busy_s := _busy_s(spans)) >= _SHORTEST_S:
                begin_s, end_s = min(s.begin_s for s in spans), max(s.end_s for s in spans)
                found.append(Phase(phase, busy_s, begin_s, end_s, kind == TRAINING, note))
        return found

    def _plan_phases(self) -> str:
        """The phases of the plan that took longest, in milliseconds; of older traces, nothing."""
        times = {name: self.metrics.get(name, 0.0) for name in PLAN_PHASES}
        longest = [name for name in PLAN_PHASES if times[name] >= max(_SHORTEST_S, _PHASE_SHARE * sum(times.values()))]
        return ", ".join(f"{name.removesuffix('_s').replace('_', ' ')} {times[name] * 1e3:.1f}" for name in longest)


class TraceFile:
    """The events of a timeline. ``run`` of each numbers the Checkpointer that wrote it, since process ids recur."""

    def __init__(self, path: Path, events: list[dict[str, Any]]) -> None:
        self._path = path
        self.events = events

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        """The events of checkpoints, oldest first."""
        found = [e for e in self.events if e["ph"] == "X" and _kind(e["tid"]) == SAVES]
        return sorted(found, key=lambda e: float(e["ts"]))

    def spans(self, name: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["ph"] == "X" and e["name"] == name]

    def checkpoint(self, step: int | None = None) -> TracedCheckpoint:
        """Returns the newest checkpoint, or the newest of ``step``. Raises LoadError if there is none."""
        return self.traced(self.event(step))

    def event(self, step: int | None = None) -> dict[str, Any]:
        """The event of the newest checkpoint, or of the newest of ``step``. Raises LoadError if there is none."""
        known = self.checkpoints
        wanted = [c for c in known if step is None or c["args"]["step"] == step]
        if not wanted:
            steps = ", ".join(str(c["args"]["step"]) for c in known[-10:])
            there = f"there are {steps}" if len(known) <= 10 else f"the newest of {len(known):,} are {steps}"
            raise LoadError(
                f"no checkpoint of step {step}; {there}" if known else "no checkpoint ended in it", path=self._path
            )
        return wanted[-1]

    def traced(self, chosen: dict[str, Any]) -> TracedCheckpoint:
        """The checkpoint of an event of ``checkpoints``."""
        about = chosen["args"]
        own: list[Span] = []
        others: list[Span] = []
        counters: dict[str, list[tuple[float, int]]] = {"ring": [], "memory": []}
        for e in self.events:
            if e["run"] != chosen["run"] or "ts" not in e:
                continue
            at = (e["ts"] - chosen["ts"]) / 1e6
            args = e.get("args", {})
            if e["ph"] == "C":
                counters[e["name"]].append((at, next(iter(args.values()))))
                continue
            kind = _kind(e["tid"])
            span = Span(kind, e["tid"] - kind, e["name"], at, at + e["dur"] / 1e6, args)
            (own if args.get("checkpoint") == about["checkpoint"] else others).append(span)
        iterations = [e["dur"] / 1e6 for e in self.spans("iteration")]
        return TracedCheckpoint(
            step=about["step"],
            path=about["path"],
            error=about["error"],
            metrics=about["metrics"],
            iteration_s=median_high(iterations) if iterations else None,
            own=own,
            others=others,
            ring=sorted(counters["ring"]),
            memory=sorted(counters["memory"]),
        )


def read_trace(path: Path) -> TraceFile:
    """Reads a timeline, even of a run that was killed. Raises LoadError."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise load_error("cannot be read", error, path=path) from error
    if not text.startswith(trace_file.BEGIN):
        raise UnsupportedFormatError("not a trace of lazyckpt; make one with Checkpointer(trace=FILE)", path=path)
    lines = text.rstrip(trace_file.END).split(trace_file.SEPARATOR)
    events: list[dict[str, Any]] = []
    run = 0
    for number, line in enumerate(lines[1:], 3):
        try:
            event = json.loads(line)
            run += event["name"] == trace_file.OPENING
            events.append(event | {"run": run})
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines) + 1:
                break  # the process was killed while it wrote the last line
            raise CorruptFileError(f"line {number} is not an event", path=path) from error
    return TraceFile(path, events)


def checkpoint_of_ranks(path: Path, step: int | None = None) -> dict[int, TracedCheckpoint]:
    """Returns the newest checkpoint of rank 0's timeline, or the newest of ``step``, as every rank traced it, by rank.

    ``path`` is the file that all ranks were given. A rank whose file does not have the checkpoint is missing. Raises
    LoadError."""
    ours = read_trace(path)
    found = {0: ours.checkpoint(step)}
    chosen = ours.event(step)
    for rank, file in trace_file.files_of_ranks(path).items():
        theirs = read_trace(file)
        same = [c for c in theirs.checkpoints if c["args"]["path"] == chosen["args"]["path"]]
        if same:  # the run may have been resumed, and the step saved again
            found[rank] = theirs.traced(min(same, key=lambda c: abs(float(c["ts"]) - float(chosen["ts"]))))
    return found


def _kind(track: int) -> int:
    return max((kind for kind in _KINDS if kind <= track), default=0)


def _busy_s(spans: Iterable[Span]) -> float:
    """Measures the time in which there was at least one of the spans."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin_s):
        total += max(span.end_s - max(span.begin_s, until), 0.0)
        until = max(until, span.end_s)
    return total


def _speed(spans: list[Span]) -> str:
    seconds = _busy_s(spans)
    return f"{size(sum(s.args['bytes'] for s in spans) / seconds)}/s" if seconds else ""


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
