"""Run the benchmarks and write a report: `python -m benchmarks` takes minutes, `--full` most of an hour."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from benchmarks import disk, frameworks, latency, machine, memory, train
from benchmarks.arms import KINDS, QUICK
from benchmarks.report import Table, show, write_markdown

HERE = Path(__file__).parent
PARTS = ("train", "memory", "frameworks", "latency", "disk")
FULL_PAIRS, QUICK_PAIRS = 7, 3
REPORT_WIDTH = 130  # of tables that go into a file
STEPS = 8  # checkpoints in a block
GB = 1_000_000_000


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--full", action="store_true", help=f"all arms, {FULL_PAIRS} pairs")
    parser.add_argument("--arms", help=f"comma-separated; of {', '.join(KINDS)}")
    parser.add_argument("--pairs", type=int, help=f"default {QUICK_PAIRS}, with --full {FULL_PAIRS}")
    parser.add_argument("--only", help=f"comma-separated parts; of {', '.join(PARTS)}")
    parser.add_argument("--steps", type=int, default=STEPS, help="checkpoints in a block (default %(default)s)")
    parser.add_argument("--train-gb", type=float, default=0.5, help="AdamW state of the training job")
    parser.add_argument("--disk-gb", type=float, default=1.0, help="tensors of the disk benchmark")
    parser.add_argument("--dir", type=Path, default=HERE / "build", help="where checkpoints go: the disk to test")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "report.md", help="the Markdown report")
    arguments = parser.parse_args()
    arguments.pairs = arguments.pairs or (FULL_PAIRS if arguments.full else QUICK_PAIRS)
    arguments.arms = _choice(parser, arguments.arms, list(KINDS), list(KINDS) if arguments.full else list(QUICK))
    arguments.only = _choice(parser, arguments.only, list(PARTS), list(PARTS))
    return arguments


def _choice(parser: argparse.ArgumentParser, text: str | None, known: list[str], default: list[str]) -> list[str]:
    chosen = text.split(",") if text else default
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(known)}")
    return chosen


def _run(arguments: argparse.Namespace, directory: Path, progress: Callable[[str], None]) -> Iterator[Table]:
    state_bytes = int(arguments.train_gb * GB)
    peaks: dict[str, float] = {}
    if "memory" in arguments.only:
        peaks, failures = memory.measure(
            arguments.arms,
            runs=3 if arguments.full else 1,
            state_bytes=state_bytes,
            directory=directory,
            progress=lambda text: progress(f"memory: {text}"),
        )
        if "train" not in arguments.only:
            yield memory.table(peaks, failures)
    if "train" in arguments.only:
        yield train.measure(
            [KINDS[name] for name in arguments.arms],
            pairs=arguments.pairs,
            steps=arguments.steps,
            state_bytes=state_bytes,
            directory=directory / "train",
            peak_mib=peaks,
            progress=lambda text: progress(f"train: {text}"),
        )
    if "frameworks" in arguments.only:
        # Half of it in the full run, so that seven pairs of ten arms stay within minutes; a tenth in the quick one.
        yield frameworks.measure(
            pairs=arguments.pairs,
            checkpoints=arguments.steps // 2,
            state_bytes=state_bytes // (2 if arguments.full else 10),
            directory=directory / "frameworks",
            progress=lambda text: progress(f"frameworks: {text}"),
        )
    if "latency" in arguments.only:
        yield from latency.measure(
            saves=max(FULL_PAIRS, arguments.pairs),
            directory=directory / "latency",
            progress=lambda text: progress(f"latency: {text}"),
        )
    if "disk" in arguments.only:
        yield from disk.measure(
            pairs=arguments.pairs,
            state_bytes=int(arguments.disk_gb * GB),
            directory=directory / "disk",
            progress=lambda text: progress(f"disk: {text}"),
        )


@contextmanager
def _stderr_into(path: Path) -> Iterator[None]:
    """Peers and their child processes log to stderr, in the middle of the progress line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = os.dup(2)
    with open(path, "wb") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def main() -> None:
    arguments = _arguments()
    console = Console() if sys.stdout.isatty() else Console(width=REPORT_WIDTH)
    packages = ["torch", *(KINDS[name].package for name in arguments.arms)]
    if "frameworks" in arguments.only:
        packages += ["lazyckpt", *frameworks.TRAINERS]
    about = machine.describe(arguments.dir, packages)
    for key, value in about.items():
        console.print(f"[bold]{key}[/]: {value}", highlight=False)
    arguments.dir.mkdir(parents=True, exist_ok=True)
    tables: list[Table] = []
    command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    log = arguments.output.with_suffix(".stderr.log")
    with (
        tempfile.TemporaryDirectory(dir=arguments.dir) as scratch,
        _stderr_into(log),
        console.status("") as status,
    ):
        for table in _run(arguments, Path(scratch), status.update):
            show(console, table)
            tables.append(table)
            write_markdown(arguments.output, about, command, tables)
    console.print(f"Report: {arguments.output}")


if __name__ == "__main__":
    main()
