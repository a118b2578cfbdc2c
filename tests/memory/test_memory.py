"""Memory runs out at the n-th allocation of a save, for any n, on whatever thread: the caller hears of it, the
checkpoint before stands, training goes on, the next save works, and nobody waits for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lazyckpt
from lazyckpt.pipeline import background, tasks
from memory import build
from trials import Trials

HERE = Path(__file__).parent
NEVER = 1 << 40
COUNTS = (1, 1, 2, 5, 20)  # allocations in a row
Save = Callable[..., dict[str, Any]]


@pytest.fixture
def scarce() -> dict[str, str]:
    """The environment of a process whose allocations may fail."""
    library = build(HERE.parents[1] / "build")
    if library is None:
        pytest.skip("no C++ compiler")
    # Without Python's own allocator, which asks for 1 MiB at a time.
    return {**os.environ, "LD_PRELOAD": str(library), "PYTHONMALLOC": "malloc", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def save(tmp_path: Path, scarce: dict[str, str]) -> Iterator[Save]:
    """Gives a function that saves, and whose allocations from the first argument on fail, as many as the second."""
    server = subprocess.Popen(
        [sys.executable, HERE / "saves.py", tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=scarce,
    )
    assert server.stdin is not None and server.stdout is not None
    stdin, stdout = server.stdin, server.stdout

    def save(first: int, count: int, threads: str = "all", backend: str = "auto") -> dict[str, Any]:
        stdin.write(f"{first} {count} {threads} {backend}\n")
        stdin.flush()
        answer: dict[str, Any] = json.loads(stdout.readline())
        assert answer["outcome"] not in ("broken", "died"), f"at allocation {first}, {count}: {answer['error']}"
        return answer

    yield save
    stdin.close()
    server.wait(10)
    stdout.close()


@pytest.mark.timeout(3 * 60 * 60)
def test_no_memory_for_the_nth_allocation(save: Save, tmp_path: Path, trials: Trials) -> None:
    enough = save(NEVER, 0)
    assert enough["outcome"] == "saved", enough
    every = range(1, enough["allocations"] + 1)
    late = every[-len(every) // 8 :]  # in the background, when save() has returned
    half = trials.count(6, 400)
    outcomes: Counter[str] = Counter()
    for first in trials.random.sample(every, half) + trials.random.sample(late, half):
        answer = save(first, trials.random.choice(COUNTS))
        outcomes[answer["outcome"]] += 1
    in_save = sum(n for name, n in outcomes.items() if "of save" in name)
    in_background = sum(n for name, n in outcomes.items() if "of handle" in name)
    assert in_save and in_background, outcomes
    trials.report(
        "no memory for the n-th allocation of a save",
        outcomes.total(),
        tmp_path,
        allocations_of_one=len(every),
        told_by_save=in_save,
        told_by_the_handle=in_background,
        saved_all_the_same=outcomes["saved"],
    )


@pytest.mark.parametrize("backend", ["io_uring", "posix"])
def test_no_memory_for_the_threads_of_the_engine(backend: str, save: Save) -> None:
    """Regression: std::bad_alloc ended the process."""
    told = 0
    for first in (1, 2):
        for _ in range(12):  # how much memory these threads take depends on who copies
            answer = save(first, 1, "engine", backend)
            if answer["allocations"] < first:
                assert answer["outcome"] == "saved", answer
                continue
            assert answer["outcome"] in ("SaveError of handle", "SaveError of save"), answer
            assert "Cannot allocate memory" in answer["error"], answer
            told += 1
    assert told, "these threads took no memory at all"


@pytest.mark.parametrize("part", ["handle", "job", "staging"])
def test_every_allocation_of_a_part(part: str, scarce: dict[str, str], tmp_path: Path) -> None:
    """Regressions: the lock of a handle was kept, and its checkpoint waited for that for ever; pybind11 freed a job
    twice, wrote to one that it did not get, or ended the process with its words on a path; a staged folder stayed open.
    """
    command = [sys.executable, HERE / "parts.py", part, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=scarce)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5


def test_what_lacks_memory_to_begin_begins_again(tmp_path: Path) -> None:
    """Regression: a ThreadPoolExecutor drops such a task."""
    calls = []

    def task() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise MemoryError

    with lazyckpt.Saver(host_buffer_bytes=1 << 16, chunk_bytes=1 << 12) as saver:
        saver._background._submit(task)
        saver.wait()
        assert len(calls) == 3


def test_a_thread_that_lacks_memory_to_begin_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: whoever had started it waited for ever."""
    begin = threading.Thread._bootstrap  # type: ignore[attr-defined]

    def end_at_birth(self: threading.Thread) -> None:
        if not self.name.endswith("_2"):
            begin(self)

    monkeypatch.setattr(threading.Thread, "_bootstrap", end_at_birth)
    monkeypatch.setattr(tasks, "_BORN_S", 0.1)
    before = threading.active_count()
    with pytest.raises(lazyckpt.ConfigError, match="no memory"):
        lazyckpt.Saver(host_buffer_bytes=1 << 16, chunk_bytes=1 << 12)
    monkeypatch.undo()
    assert threading.active_count() <= before + 1  # it is in threading's list of those that begin
    with lazyckpt.Saver(host_buffer_bytes=1 << 16, chunk_bytes=1 << 12) as saver:
        assert saver.save(1, tmp_path / "a.pt").result(30).is_file()


def test_metrics_that_lack_memory_are_filled_in_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: pybind11 says RuntimeError then, and the handle was never done."""
    fill_in = background._fill_in

    def refuse(*_: Any) -> None:
        monkeypatch.setattr(background, "_fill_in", fill_in)
        raise RuntimeError("Could not allocate list object!")

    monkeypatch.setattr(background, "_fill_in", refuse)
    with lazyckpt.Saver(host_buffer_bytes=1 << 16, chunk_bytes=1 << 12) as saver:
        handle = saver.save(1, tmp_path / "a.pt")
        assert handle.result(30).is_file() and handle.metrics.bytes > 0


def test_what_only_looks_like_a_lack_of_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it was tried again for ever."""
    monkeypatch.setattr(background, "_fill_in", lambda *_: len(7))  # type: ignore[arg-type]
    monkeypatch.setattr(tasks, "_DOUBTS", 3)
    with lazyckpt.Saver(host_buffer_bytes=1 << 16, chunk_bytes=1 << 12) as saver:
        error = saver.save(1, tmp_path / "a.pt").exception(30)
    assert isinstance(error, lazyckpt.SaveError) and "TypeError" in str(error)
