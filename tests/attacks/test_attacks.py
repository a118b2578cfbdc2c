"""Gives each attack to everything that reads: no one gets in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from attacks import ATTACKS
from trials import Trials

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process per core imports torch, and forks for each selected attack."""
    wanted = {item.name for item in request.session.items}
    paths = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    names = [name for name in ATTACKS if f"test_no_one_gets_in[{name}]" in wanted]
    processes = max(1, min(os.cpu_count() or 1, len(names)))
    # Not in the threads: the first call makes pytest's parent folder, and two threads would both make it.
    folders = [tmp_path_factory.mktemp("attacks") for _ in range(processes)]

    def run(first: int) -> list[dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-m", "attacks.runner", folders[first], *names[first::processes]],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-5000:]}"
        return [json.loads(line) for line in done.stdout.splitlines()]

    with ThreadPoolExecutor(processes) as pool:
        return {line["name"]: line for lines in pool.map(run, range(processes)) for line in lines}


@pytest.mark.parametrize("name", ATTACKS)
def test_no_one_gets_in(name: str, outcomes: dict[str, Any]) -> None:
    """No code runs, nothing outside is read or changed, the file's size bounds memory, errors are typed, and no output
    holds a character that a terminal obeys."""
    assert outcomes[name]["violations"] == []


def test_no_one_got_in(outcomes: dict[str, Any], trials: Trials, tmp_path: Path) -> None:
    """Runs last and counts the attacks."""
    assert not any(outcome["violations"] for outcome in outcomes.values())
    trials.report("attempts to get in", len(outcomes), tmp_path, of=len(ATTACKS))
