"""Counts the safety trials of a test, seeds them, and reports them.

``make test`` runs a few of each; ``make torture`` (LAZYCKPT_TORTURE=1) runs all. LAZYCKPT_SEED repeats a run. Each test
adds a line to ``build/trials.jsonl``; ``python tests/trials.py`` prints them as the table of docs/internals/testing.md.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, seed, settings

TORTURE = bool(os.environ.get("LAZYCKPT_TORTURE"))
LOG = Path(__file__).parent.parent / "build" / "trials.jsonl"


class Trials:
    """The trials of one test; the fixture ``trials``."""

    def __init__(self, test: str) -> None:
        self.test = test
        self.seed = int(os.environ.get("LAZYCKPT_SEED") or random.SystemRandom().randrange(1 << 32))
        self.random = random.Random(self.seed)
        self._begin = time.monotonic()

    def count(self, few: int, all_of_them: int) -> int:
        return all_of_them if TORTURE else few

    def examples(self, few: int, all_of_them: int) -> Callable[[Any], Any]:
        """Decorates a hypothesis test inside a test: sets its number of examples and its seed."""
        found = settings(max_examples=self.count(few, all_of_them), deadline=None, database=None)
        quiet = settings(found, suppress_health_check=[HealthCheck.too_slow])
        return lambda test: seed(self.seed)(quiet(test))

    def report(self, figure: str, trials: int, folder: Path, **counts: object) -> None:
        """Logs the trials, after they found no violation.

        ``figure`` names the row of the table, ``folder`` is where the trials wrote, and ``counts`` holds more columns,
        such as kills per phase."""
        assert trials > 0, "nothing was tried"
        line = {
            "figure": figure,
            "trials": trials,
            "counts": counts,
            "seed": self.seed,
            "seconds": round(time.monotonic() - self._begin, 1),
            "file_system": file_system(folder),
            "kernel": platform.release(),
            "commit": commit(),
            "torture": TORTURE,
            "test": self.test,
        }
        LOG.parent.mkdir(exist_ok=True)
        with LOG.open("a") as log:
            log.write(json.dumps(line) + "\n")


@functools.cache
def commit() -> str | None:
    """What was tried, "-dirty" if more than that; None outside of a repository."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=10"]
    try:
        return subprocess.run(command, cwd=LOG.parent.parent, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def file_system(path: Path) -> str:
    """The type of the one that holds a path."""
    path = path.resolve()
    best = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        if path.is_relative_to(mount) and len(mount) >= len(best[0]):
            best = mount, kind
    return best[1]


def table(lines: list[dict[str, Any]]) -> str:
    """The newest line of each test, as Markdown."""
    rows = ["| figure | trials | found | seed | seconds | file system |", "|---|--:|---|--:|--:|---|"]
    for line in {line["test"]: line for line in lines}.values():
        counts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in line["counts"].items())
        rows.append(
            f"| {line['figure']} | {line['trials']:,} | no violation{'; ' if counts else ''}{counts} "
            f"| {line['seed']} | {line['seconds']:,.0f} | {line['file_system']} |"
        )
    kernels = ", ".join(sorted({line["kernel"] for line in lines}))
    commits = ", ".join(sorted({line.get("commit") or "unknown" for line in lines}))
    return "\n".join([*rows, "", f"Kernel {kernels}. Commit {commits}."])


if __name__ == "__main__":
    log = Path(sys.argv[1]) if len(sys.argv) > 1 else LOG
    print(table([json.loads(line) for line in log.read_text().splitlines()]))
