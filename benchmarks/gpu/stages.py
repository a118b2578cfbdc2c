"""One call of the day: stages with a time limit each, and a summary that is on the disk at any moment.

Only the standard library: it runs before the engine is built.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.expected import EXPECTED

ROOT = Path(__file__).parents[2]
CARRIED = ROOT / "build" / "carried"  # made by scripts/offline.sh
START_S = {"cuda": 18, "cpu": 200}  # of a process: CUDA is loaded from a cold disk; a rehearsal's machine may be busy
RESERVE_S = 4  # to write the last line
LEAST_S = 8  # less is no stage
SMALLER, SHORTER = 0.001, 0.3  # a rehearsal's states and parts
WORDS = {"PASSED": "passed", "FAILED": "failed", "ERROR": "failed"}


@dataclass
class Day:
    """What was found so far. ``out`` gets summary.txt, log.txt, and a JSON file for each part."""

    call: str
    device: str  # "cuda"; "cpu" rehearses the program
    seconds: float
    out: Path
    tmpfs: Path
    disk: Path
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.end = time.monotonic() + self.seconds
        self.out.mkdir(parents=True, exist_ok=True)
        self.log = self.out / "log.txt"
        self.is_rehearsal = self.device == "cpu"
        self.say(f"# {self.call}, {'a rehearsal on the CPU: no figure says anything' if self.is_rehearsal else 'cuda'}")

    @property
    def left_s(self) -> float:
        return self.end - time.monotonic() - RESERVE_S

    def say(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)
        unfinished = self.out / "summary.part"
        unfinished.write_text("\n".join(self.lines) + "\n")
        os.replace(unfinished, self.out / "summary.txt")

    def check(self, key: str, value: float | None, about: str = "") -> None:
        """Compares a figure with its expectation. ``value``: None if it could not be measured."""
        expected = EXPECTED[key]
        is_seen = self.is_rehearsal and not expected.is_exact
        verdict = "MISSING" if value is None else "seen" if is_seen else expected.verdict(value)
        shown = "-" if value is None else f"{value:.4g}"
        why = f": {expected.refutes}" if verdict == "REFUTED" and expected.refutes else ""
        what = f"{about}: {expected.what}" if about else expected.what
        self.say(f"{verdict:8} {what}: {shown} (expected {expected.expected}{_refuting(key)}){why}")

    def conclude(self) -> None:
        """Repeats which claims are refuted, which figures are missing, and which stages did not run to their end."""
        wrong = [line for line in self.lines if line.startswith(("REFUTED", "MISSING", "ENDED"))]
        wrong += [line for line in self.lines if line.startswith("-- ") and ": done," not in line]
        good = "REHEARSED: every stage has run" if self.is_rehearsal else "ALL AS EXPECTED"
        self.say(good if not wrong else "\n".join(["LOOK AT:", *wrong]))

    def stage(self, name: str, limit_s: float, command: Sequence[str], **environment: str) -> str:
        """Runs a command for at most so long, with its children. Returns its output, which is also in the log."""
        limit_s = min(limit_s, self.left_s)
        if limit_s < LEAST_S:
            self.say(f"-- {name}: no time was left")
            return ""
        start = time.monotonic()
        with self.log.open("ab", buffering=0) as log:
            begin = log.seek(0, os.SEEK_END)
            log.write(f"\n===== {name}: {' '.join(command)[:300]}\n".encode())
            outcome = run(command, limit_s, log.fileno(), environment)
        took, left = time.monotonic() - start, self.end - time.monotonic()
        self.say(f"-- {name}: {outcome}, {took:.0f} s; {left:.0f} s left")
        with self.log.open("rb") as printed:
            printed.seek(begin)
            return printed.read().decode(errors="replace")

    def tests(self, name: str, limit_s: float, arguments: Sequence[str], but: str = "") -> None:
        """Runs tests of tests/gpu on the device, except those that ``but`` names."""
        options = ["-v", "-rfE", "--tb=short", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=80"]
        scratch = self.tmpfs / f"lazyckpt-day-{os.getpid()}-tests"
        options += [f"--basetemp={scratch}", "-k", f"not fake{but}"]
        environment = {"LAZYCKPT_TEST_DEVICE": self.device}
        text = self.stage(name, limit_s, [sys.executable, "-m", "pytest", *options, *arguments], **environment)
        shutil.rmtree(scratch, ignore_errors=True)
        found = re.findall(r"^(tests/\S+?::.+?) (PASSED|FAILED|ERROR|SKIPPED)", text, re.MULTILINE)
        outcomes = [WORDS.get(word, "skipped") for _, word in found]
        skipped = outcomes.count("skipped")
        self.check("passed", outcomes.count("passed") or None, f"{name} ({skipped} skipped)" if skipped else name)
        self.check("failed", outcomes.count("failed"), name)
        for test, word in found:
            if word in ("FAILED", "ERROR"):
                self.say(f"         {word} {test}")

    def part(
        self, module: str, name: str, seconds: float, gigabytes: float, where: Path, arms: str = "lazyckpt"
    ) -> list[Any]:
        """Runs a part of a module (part.py). Returns its tables so far; they are in NAME.json as they grow."""
        start_s = START_S[self.device]
        seconds = min(seconds * (SHORTER if self.is_rehearsal else 1), self.left_s - start_s)
        if seconds < 1:
            self.say(f"-- {name}: no time was left")
            return []
        size = int(gigabytes * 1e9 * (SMALLER if self.is_rehearsal else 1))
        folder, output = where / f"lazyckpt-day-{os.getpid()}-{name}", self.out / f"{name}.json"
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", f"benchmarks.gpu.{module}", name, "--device", self.device, "--arms", arms]
        command += ["--seconds", str(seconds), "--state-bytes", str(size)]
        command += ["--directory", str(folder), "--output", str(output)]
        try:
            self.stage(name, seconds + start_s, command)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        tables = json.loads(output.read_text()) if output.exists() else []
        for table in tables:
            self.say(f"   {table['title']}: {' | '.join(table['columns'])}")
            for row in table["rows"]:
                self.say(f"      {' | '.join(row)}")
        return tables


def _refuting(key: str) -> str:
    expected = EXPECTED[key]
    if expected.is_exact:
        return ""
    below = f"below {expected.low:g}" if expected.low else ""
    above = f"above {expected.high:g}" if expected.high != float("inf") else ""
    return f", refuted {' or '.join(filter(None, (below, above)))}" if below or above else ""


def run(command: Sequence[str], limit_s: float, output: int, environment: dict[str, str]) -> str:
    """Runs a command in the repository; kills it and all its children when the time is over. Returns the outcome."""
    paths = [str(ROOT), str(CARRIED / "python"), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        start_new_session=True,
        env={
            **os.environ,
            "PYTHONUNBUFFERED": "1",  # if it is killed, the log says more
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "RES_OPTIONS": "timeout:1",  # without a network, torch's store waits for a resolver
            **environment,
        },
    )
    try:
        status = process.wait(limit_s)
        return f"exit status {status}" if status else "done"
    except subprocess.TimeoutExpired:
        return f"STOPPED after {limit_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def number(tables: Sequence[Any], row: str, column: str) -> float | None:
    """The first number of a cell; None if there is none."""
    for table in tables:
        for cells in table["rows"] if column in table["columns"] else ():
            found = re.match(r"-?\d+(\.\d+)?", cells[list(table["columns"]).index(column)])
            if cells[0] == row and found is not None:
                return float(found[0])
    return None
