"""The engine under ThreadSanitizer, AddressSanitizer, LeakSanitizer and UndefinedBehaviorSanitizer: alone, driven by
sanitize/stress.cc, and in Python, under the tests that touch it, with Python's and torch's objects watched."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from sanitize import ADDRESS, THREAD, Sanitized, compiler, for_python, run_python

from trials import Trials

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sanitized]:
    """Compiles the engine once for each sanitizer."""
    if compiler() is None:
        pytest.skip("no C++ compiler")
    return cache(lambda sanitizer: Sanitized(sanitizer, tmp_path_factory.mktemp("sanitized") / "build"))


@pytest.mark.parametrize("sanitizer", [THREAD, ADDRESS])
def test_stress(sanitizer: str, built: Callable[[str], Sanitized], tmp_path: Path, trials: Trials) -> None:
    sanitized = built(sanitizer)
    rounds = trials.count(20, 200)
    command = [sanitized.stress(), tmp_path, str(trials.seed), str(rounds)]
    # No randomisation of addresses: older ThreadSanitizers do not know the memory maps of newer kernels.
    if sanitizer == THREAD and shutil.which("setarch"):
        command = ["setarch", "--addr-no-randomize", *command]
    options = {"detect_leaks": 1, "detect_stack_use_after_return": 1} if sanitizer == ADDRESS else {}
    environment = sanitized.environment(**options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, env=environment)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{sanitized.said()}"
    assert list(tmp_path.iterdir()) == []
    trials.report(f"rounds of the engine's stress, -fsanitize={sanitizer}", rounds, tmp_path)


# Tests that hand memory to the engine or receive Python objects from it; a process for each row.
FILES = [
    ["engine/test_cuda.py", "formats/test_plain_pickle.py"],
    ["engine/test_tensors.py", "engine/test_engine.py", "engine/test_reader.py", "test_saver.py"],
]


def test_python(built: Callable[[str], Sanitized], tmp_path: Path, trials: Trials) -> None:
    """Any report fails the test, including those of processes that tests start."""
    sanitized = built(ADDRESS)
    environment = for_python(sanitized)
    options = ["-q", "-m", "not slow and not alone", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--timeout=600"]
    # It forks while threads allocate. AddressSanitizer, unlike malloc, does not release its locks in the child.
    options += ["-k", "not a_forked_child_calls_nothing"]

    def run(files: list[str]) -> int:
        done = run_python(environment, "-m", "pytest", *options, *(ROOT / "tests" / f for f in files), cwd=tmp_path)
        assert sanitized.said() == ""
        assert done.returncode == 0, done.stdout + done.stderr
        passed = re.search(r"(\d+) passed", done.stdout)
        assert passed is not None, done.stdout
        return int(passed[1])

    with ThreadPoolExecutor(len(FILES)) as pool:
        passed = sum(pool.map(run, FILES))
    trials.report(f"tests in Python, -fsanitize={ADDRESS}", passed, tmp_path)
