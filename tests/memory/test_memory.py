"""Memory runs out at the n-th allocation of a save, for any n, on whatever thread: the caller hears of it, the
checkpoint before stands, training goes on, the next save works, and nobody waits for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memory import build
from trials import Trials

SAVES = Path(__file__).with_name("saves.py")
NEVER = 1 << 40
LOST = "lost by concurrent.futures"  # as saves.py says it
Save = Callable[[int, int], dict[str, Any]]


@pytest.fixture
def save(tmp_path: Path) -> Iterator[Save]:
    """Gives a function that saves, and whose allocations from the first argument on fail, as many as the second."""
    library = build(SAVES.parents[2] / "build")
    if library is None:
        pytest.skip("no C++ compiler")
    # Without Python's own allocator, which asks for 1 MiB at a time.
    scarce = {"LD_PRELOAD": str(library), "PYTHONMALLOC": "malloc", "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, SAVES, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **scarce},
    )
    assert server.stdin is not None and server.stdout is not None
    stdin, stdout = server.stdin, server.stdout

    def save(first: int, count: int) -> dict[str, Any]:
        stdin.write(f"{first} {count}\n")
        stdin.flush()
        answer: dict[str, Any] = json.loads(stdout.readline())
        return answer

    yield save
    stdin.close()
    server.wait(10)
    stdout.close()


@pytest.mark.slow  # what ends the process for lack of memory (see docs/durability.md) would fail one run in some
@pytest.mark.timeout(3 * 60 * 60)
def test_no_memory_for_the_nth_allocation(save: Save, tmp_path: Path, trials: Trials) -> None:
    enough = save(NEVER, 0)
    assert enough["outcome"] == "saved", enough
    every = range(1, enough["allocations"] + 1)
    late = every[-len(every) // 8 :]  # in the background, when save() has returned
    half = trials.count(6, 200)
    outcomes: Counter[str] = Counter()
    for first in trials.random.sample(every, half) + trials.random.sample(late, half):
        answer = save(first, 1)
        outcomes[answer["outcome"]] += 1
        assert answer["outcome"] not in ("broken", "died"), f"at allocation {first}: {answer['error']}"
    in_save = sum(n for name, n in outcomes.items() if "of save" in name)
    in_background = sum(n for name, n in outcomes.items() if "of handle" in name)
    assert in_save and in_background, outcomes
    assert outcomes[LOST] <= 1 + outcomes.total() // 50, outcomes  # not solved: see docs/durability.md
    trials.report(
        "no memory for the n-th allocation of a save",
        outcomes.total(),
        tmp_path,
        allocations_of_one=len(every),
        told_by_save=in_save,
        told_by_the_handle=in_background,
        saved_all_the_same=outcomes["saved"],
        lost_by_Python=outcomes[LOST],
    )
