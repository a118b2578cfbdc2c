"""Measure checkpoints out of a GPU, all parts one after the other, and write a report that grows as they go."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks import machine
from benchmarks.gpu.part import roomiest_tmpfs
from benchmarks.report import Table, show, write_markdown

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
GB = 1_000_000_000
GRACE_S = 10  # from the end of a part's time until it is stopped
REPORT_WIDTH = 130
PEERS = ("torch", "lightning", "torchsnapshot", "torch_checkpointing")


@dataclass(frozen=True)
class Step:
    name: str
    module: str  # with its parts
    share: float  # of the time; what one leaves goes to those after it
    state_gb: float  # the default, at most
    in_memory: bool = False  # its checkpoints go to a tmpfs


STEPS = (
    Step("peak", "benchmarks.gpu.copies", 1.0, 8, in_memory=True),
    Step("sweep", "benchmarks.gpu.copies", 1.0, 8, in_memory=True),
    Step("memory", "benchmarks.gpu.training", 3.0, 12, in_memory=True),
    Step("disk", "benchmarks.gpu.training", 1.5, 12),
    Step("large", "benchmarks.gpu.training", 1.0, 36, in_memory=True),
    Step("restore", "benchmarks.gpu.restore", 0.7, 8),
)
SPARE = 0.5


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.5, help="for everything (default %(default)s)")
    parser.add_argument("--gb", type=float, help="the largest state of any part; less where less fits or is in time")
    parser.add_argument("--only", help=f"comma-separated parts; of {', '.join(step.name for step in STEPS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal of the program")
    parser.add_argument("--dir", type=Path, default=ROOT / "benchmarks" / "build", help="a folder on the disk to test")
    parser.add_argument("--tmpfs", type=Path, default=roomiest_tmpfs(), help="a folder in memory (default %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu", help="a folder")
    arguments = parser.parse_args()
    known = [step.name for step in STEPS]
    names = arguments.only.split(",") if arguments.only else known
    if unknown := set(names) - set(known):
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(known)}")
    arguments.steps = [step for step in STEPS if step.name in names]
    return arguments


class Run:
    """The report so far, and the time that is left."""

    def __init__(self, arguments: argparse.Namespace, console: Console) -> None:
        self._arguments = arguments
        self._console = console
        self._deadline = time.monotonic() + 60 * arguments.minutes
        self._output: Path = arguments.output
        self._output.mkdir(parents=True, exist_ok=True)
        self._command = shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
        self.about = {"GPU": _gpu(), **machine.describe(arguments.dir, PEERS)}
        if arguments.device == "cpu":
            self.about["GPU"] = "none: a rehearsal on the host, whose figures say nothing about any GPU"
        self.tables: list[Table] = []

    def all(self) -> None:
        steps: Sequence[Step] = self._arguments.steps
        for at, step in enumerate(steps):
            left = self._deadline - time.monotonic()
            share = step.share / (sum(s.share for s in steps[at:]) + SPARE)
            seconds = left * share - GRACE_S
            if seconds < GRACE_S:
                self._add([_word(step.name, "no time was left for it")])
                continue
            self._console.print(f"{step.name}: at most {seconds:.0f} s", highlight=False)
            try:
                tables = self._part(step, seconds)
            except Exception as error:  # the others are not to go with it
                tables = [_word(step.name, repr(error))]
            self._add(tables)

    def write(self) -> None:
        write_markdown(self._output / "report.md", self.about, self._command, self.tables)

    def _add(self, tables: Sequence[Table]) -> None:
        self.tables += tables
        for table in tables:
            show(self._console, table)
        self.write()

    def _part(self, step: Step, seconds: float) -> list[Table]:
        parent: Path = self._arguments.tmpfs if step.in_memory else self._arguments.dir
        gigabytes = step.state_gb if self._arguments.gb is None else self._arguments.gb
        output = self._output / f"{step.name}.json"
        output.unlink(missing_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="lazyckpt-bench-", dir=parent))
        command = [sys.executable, "-m", step.module, step.name, "--device", self._arguments.device]
        command += ["--seconds", str(seconds), "--state-bytes", str(int(gigabytes * GB))]
        command += ["--directory", str(scratch), "--output", str(output)]
        try:
            problem = run(command, seconds + GRACE_S, self._output / f"{step.name}.log")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        tables = [Table(**fields) for fields in json.loads(output.read_text())] if output.exists() else []
        if problem:
            tables.append(_word(step.name, problem))
        return tables


def run(command: Sequence[str], limit_s: float, log: Path) -> str:
    """Runs it with its output in `log`; it and all its children are killed when the time is over. Returns what went
    wrong, or nothing."""
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},  # if it is killed, its log says more
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"stopped after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status == 0:
        return ""
    lines = log.read_text(errors="replace").splitlines() or [""]
    return f"exit status {status}: {lines[-1].strip()}"


def _word(name: str, problem: str) -> Table:
    return Table(f"Part {name}", ["part", "outcome"], [[name, problem]])


def _gpu() -> str:
    query = "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi does not answer ({error})"
    return "; ".join(found.splitlines()) + " (name, driver, memory, PCIe generation and width now)"


def main() -> None:
    arguments = _arguments()
    arguments.dir.mkdir(parents=True, exist_ok=True)
    console = Console() if sys.stdout.isatty() else Console(width=REPORT_WIDTH)
    measured = Run(arguments, console)
    for key, value in measured.about.items():
        console.print(f"[bold]{key}[/]: {value}", highlight=False)
    measured.write()
    measured.all()
    console.print(f"Report: {arguments.output / 'report.md'}")


if __name__ == "__main__":
    main()
