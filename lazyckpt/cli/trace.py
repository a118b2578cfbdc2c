"""``lazyckpt trace``: one checkpoint of a trace, as a table and a picture (DataStates-LLM, table III, figure 15)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from lazyckpt.cli.completion import Found, completed_from
from lazyckpt.cli.flags import path_argument
from lazyckpt.cli.output import columns, count, plain, print_json, show, size, stdout
from lazyckpt.errors import CorruptFileError, LoadError, UnsupportedFormatError, load_error
from lazyckpt.observe.trace_file import (
    BEGIN,
    COMMITS,
    COPIES,
    END,
    OPENING,
    RING,
    SAVES,
    SEPARATOR,
    TRAINING,
    WRITES,
)

_SHORTEST_WAIT_S = 50e-6  # of the training: what is shown as 0.0 ms is none
_KINDS = (TRAINING, SAVES, RING, COPIES, WRITES, COMMITS)


def _steps(file: Path) -> Found:
    """The newest first; one that was saved twice is told once."""
    checkpoints = {str(c["args"]["step"]): c["args"] for c in reversed(read_trace(file).checkpoints)}
    for step, told in checkpoints.items():
        yield step, f"{Path(told['path']).name}, {size(told['metrics']['bytes'])}"


def trace(
    file: Annotated[Path, path_argument("FILE", "What Checkpointer(trace=FILE) has recorded.")],
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Not the newest, but that of step N.", autocompletion=completed_from("file", _steps)
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="PNG", help="Draw it, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell where the time of one checkpoint went, and draw it beside the training.

    The whole file opens in https://ui.perfetto.dev.
    """
    checkpoint = read_trace(file).checkpoint(step)
    phases = _phases(checkpoint)
    if output is not None:
        from lazyckpt.cli.timeline import draw  # imports matplotlib, which not everybody has

        draw(checkpoint, output)
    if as_json:
        about = {name: getattr(checkpoint, name) for name in ("step", "path", "error", "iteration_s", "metrics")}
        picture = None if output is None else str(output)
        print_json({"trace": str(file), **about, "phases": [asdict(phase) for phase in phases], "picture": picture})
        return
    console = stdout()
    facts = f"{size(checkpoint.metrics['bytes'])} in {count(checkpoint.metrics['chunks'], 'chunk')}"
    console.print(Text(f"{plain(checkpoint.path)}: {facts}", style="bold"), soft_wrap=True)
    if checkpoint.error is not None:
        console.print(Text(plain(checkpoint.error), style="bold red"), soft_wrap=True)
    table = columns("phase", "ms", "from", "to", "training", "", right=("ms", "from", "to"), wrap=("",))
    for phase in phases:
        if phase.waits and phase.busy_s < _SHORTEST_WAIT_S:
            continue
        style = "" if phase.waits else "blue"  # as in the paper: what training does not notice
        moments = (f"{moment * 1e3:.1f}" for moment in (phase.begin_s, phase.end_s))
        waits = "waits" if phase.waits else "goes on"
        table.add_row(phase.name, f"{phase.busy_s * 1e3:.1f}", *moments, waits, phase.note, style=style)
    show(console, table, spared=("",), narrow=72)
    if output is not None:
        console.print(Text(f"drawn: {plain(output)}"), soft_wrap=True)


@dataclass(frozen=True)
class Span:
    """Something that took a while; seconds since save() was called."""

    kind: int  # the first track of its kind
    lane: int  # which of these tracks
    name: str
    begin_s: float
    end_s: float
    args: dict[str, Any]

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class TracedCheckpoint:
    """One checkpoint, and what else happened in its time."""

    step: int | None
    path: str
    error: str | None
    metrics: dict[str, Any]
    iteration_s: float | None  # the median of those in the trace
    own: list[Span]
    others: list[Span]
    ring: list[tuple[float, int]]  # seconds, bytes from then on
    memory: list[tuple[float, int]]

    @property
    def end_s(self) -> float:
        return max(span.end_s for span in self.own)

    def spans(self, kind: int, *names: str) -> list[Span]:
        return [span for span in self.own if span.kind == kind and (not names or span.name in names)]


@dataclass(frozen=True)
class Phase:
    """A row of the breakdown. ``busy_s``: while at least one thread was at it."""

    name: str
    busy_s: float
    begin_s: float
    end_s: float
    waits: bool
    note: str


class TraceFile:
    """The events of a trace. ``run`` of each is the Checkpointer that wrote it: process ids come back."""

    def __init__(self, path: Path, events: list[dict[str, Any]]) -> None:
        self._path = path
        self.events = events

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        """Their events, oldest first."""
        found = [e for e in self.events if e["ph"] == "X" and _kind(e["tid"]) == SAVES]
        return sorted(found, key=lambda e: float(e["ts"]))

    def spans(self, name: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["ph"] == "X" and e["name"] == name]

    def checkpoint(self, step: int | None = None) -> TracedCheckpoint:
        """The newest, or that of ``step``; LoadError if there is none."""
        known = self.checkpoints
        wanted = [c for c in known if step is None or c["args"]["step"] == step]
        if not wanted:
            steps = ", ".join(str(c["args"]["step"]) for c in known[-10:])
            there = f"there are {steps}" if len(known) <= 10 else f"the newest of {len(known):,} are {steps}"
            raise LoadError(
                f"no checkpoint of step {step}; {there}" if known else "no checkpoint ended in it", path=self._path
            )
        chosen = wanted[-1]
        own: list[Span] = []
        others: list[Span] = []
        counters: dict[str, list[tuple[float, int]]] = {"ring": [], "memory": []}
        for e in self.events:
            if e["run"] != chosen["run"] or "ts" not in e:
                continue
            at = (e["ts"] - chosen["ts"]) / 1e6
            if e["ph"] == "C":
                counters[e["name"]].append((at, next(iter(e["args"].values()))))
                continue
            kind = _kind(e["tid"])
            args = e.get("args", {})
            span = Span(kind, e["tid"] - kind, e["name"], at, at + e["dur"] / 1e6, args)
            (own if args.get("checkpoint") == chosen["args"]["checkpoint"] else others).append(span)
        iterations = sorted(e["dur"] / 1e6 for e in self.spans("iteration"))
        about = chosen["args"]
        return TracedCheckpoint(
            about["step"],
            about["path"],
            about["error"],
            about["metrics"],
            iterations[len(iterations) // 2] if iterations else None,
            own,
            others,
            sorted(counters["ring"]),
            sorted(counters["memory"]),
        )


def read_trace(path: Path) -> TraceFile:
    """Also of a run that was killed. Raises LoadError."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise load_error("cannot be read", error, path=path) from error
    if not text.startswith(BEGIN):
        raise UnsupportedFormatError("not a trace of lazyckpt; make one with Checkpointer(trace=FILE)", path=path)
    lines = text.rstrip(END).split(SEPARATOR)
    events: list[dict[str, Any]] = []
    run = 0
    for number, line in enumerate(lines[1:], 3):
        try:
            event = json.loads(line)
            run += event["name"] == OPENING
            events.append(event | {"run": run})
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines) + 1:
                break  # what the process was writing when it was killed
            raise CorruptFileError(f"line {number} is not an event", path=path) from error
    return TraceFile(path, events)


def _kind(track: int) -> int:
    return max((kind for kind in _KINDS if kind <= track), default=0)


def busy_s(spans: Iterable[Span]) -> float:
    """The time in which there was at least one of them."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin_s):
        total += max(span.end_s - max(span.begin_s, until), 0.0)
        until = max(until, span.end_s)
    return total


def _phases(checkpoint: TracedCheckpoint) -> list[Phase]:
    c = checkpoint
    eager = c.metrics["eager_bytes"]
    rows: list[tuple[str, list[Span], bool, str]] = [
        ("wait for a place", c.spans(TRAINING, "wait for a place"), True, "max_in_flight checkpoints were not durable"),
        ("serialise, lay out", c.spans(TRAINING, "plan"), True, "once the structure is known, only what changed"),
        (
            "eager copy",
            c.spans(TRAINING, "eager copy"),
            True,
            f"{size(eager)}, what not only optimizers may change",
        ),
        ("copy to the ring", c.spans(COPIES), False, _speed(c.spans(COPIES))),
        ("wait at the gate", c.spans(TRAINING, "gate"), True, "the optimizer's next step came before the copy's end"),
        ("create the files", c.spans(COMMITS, "create"), False, "a temporary folder, and room on the disk"),
        ("wait for the ring", c.spans(RING), False, "no room: the disk was slower than the copies"),
        ("write to the files", c.spans(WRITES), False, _speed(c.spans(WRITES))),
        ("fsync", c.spans(COMMITS, "fsync"), False, ""),
        ("commit", c.spans(COMMITS, "commit"), False, "manifest, the checkpoint before, rename, fsync"),
    ]
    return [
        Phase(name, busy_s(spans), min(s.begin_s for s in spans), max(s.end_s for s in spans), waits, note)
        for name, spans, waits, note in rows
        if spans and busy_s(spans) >= 1e-6
    ]


def _speed(spans: list[Span]) -> str:
    seconds = busy_s(spans)
    return f"{size(int(sum(s.args['bytes'] for s in spans) / seconds))}/s" if seconds else ""
