"""Kills a save between every two steps of the protocol. Acknowledged checkpoints survive, and final names are whole.

The test records a first run of each scenario. Each of its operations on the file system is a failpoint: the test kills
another process right before that operation. SIGKILL keeps the page cache, so this tests atomicity; test_power_cuts.py
and test_crash_images.py test durability.
"""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from crash.actor import Server, Task, role
from crash.history import History, Violation, staged_in
from lazyckpt.storage import folders, manifest, removal
from trials import Trials

SCENARIOS = ("first", "second", "again", "retention", "lone", "lone_over", "saver_file", "staged", "filled")
PHASES = {"stage", "write", "sync", "describe", "publish", "clean"}
KINDS = ({"io_backend": "io_uring"}, {"io_backend": "posix"}, {"direct_io": False})


@dataclass
class Failpoint:
    name: str
    phase: str
    kill_at: int = 0
    fault: str = ""


def phase_of(operation: str, name: str) -> str:
    """The step of the protocol to which an operation belongs."""
    if folders.TRASH in name or operation in ("unlink", "rmdir"):
        return "clean"
    if operation in ("mkdir", "create", "allocate") and name != manifest.MANIFEST:
        return "stage"
    if operation in ("write", "truncate", "sync"):
        return "write" if operation == "write" else "sync"
    if name == manifest.MANIFEST or name.startswith(folders.TEMPORARY):
        return "describe"
    return "publish"


def failpoints(server: Server, folder: Path, scenario: str) -> list[Failpoint]:
    """The failpoints of a scenario: one for each operation after the process is armed."""
    task = Task(str(folder / "root"), str(folder / "log"), scenario, record=True)
    (folder / "root").mkdir(parents=True)
    assert server.run(task) == 0
    found = []
    armed = False
    calls = 0
    counts: Counter[str] = Counter()
    for words in map(str.split, (folder / "log").read_text().splitlines()):
        armed = armed or words == ["armed"]
        if words[0] != "begin":
            continue
        number, operation, *paths = words[1:]
        by_engine = not number.startswith("py")
        counts[operation] += by_engine
        calls += armed and not by_engine
        if armed:
            target = role(paths[1] if operation in ("rename", "exchange", "link") else paths[0])
            point = Failpoint(f"{operation} {target}", phase_of(operation, target))
            if by_engine:
                point.fault = f"{operation}:{counts[operation]}:kill"
            else:
                point.kill_at = calls
            found.append(point)
    return found


def kill(server: Server, folder: Path, scenario: str, point: Failpoint, mutant: str = "", **options: object) -> bool:
    """Kills a save at a failpoint and checks the remains. Returns whether something was staged. Raises Violation."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "root").mkdir(parents=True)
    task = Task(str(folder / "root"), str(folder / "log"), scenario, mutant=mutant, **options)  # type: ignore[arg-type]
    task.kill_at, task.fault = point.kill_at, point.fault
    code = server.run(task)
    assert code == -signal.SIGKILL, f"{point.name}: ended with {code}"
    history = History()
    history.read(folder / "log")
    caught = bool(staged_in(folder / "root"))
    found = history.check(folder / "root")
    for swept in (folder / "root", folder / "root" / "run"):
        if swept.is_dir():
            removal.sweep(swept)
    if history.check(folder / "root") != found:
        raise Violation("sweeping took something away")
    return caught


@pytest.mark.long
@pytest.mark.timeout(60 * 60)
def test_sigkill_at_each_failpoint(server: Server, tmp_path: Path, trials: Trials) -> None:
    chance = trials.random
    kills: Counter[str] = Counter()
    others = 0
    found = [(s, p) for s in SCENARIOS for p in failpoints(server, tmp_path / s, s)]
    assert {point.phase for _, point in found} == PHASES
    plan = [(scenario, point, KINDS[n % len(KINDS)]) for n in range(20) for scenario, point in found]
    for scenario, point, kind in chance.sample(plan, trials.count(20, len(plan))):
        knobs = {} if scenario.startswith("lone") else kind
        if kill(server, tmp_path / "trial", scenario, point, knobs=knobs, seed=chance.getrandbits(32)):
            kills[point.phase] += 1
        else:
            others += 1  # before there was anything, or after all was done
    trials.report(
        "SIGKILL at each failpoint", kills.total(), tmp_path, failpoints=len(found), **kills, nothing_staged=others
    )


@pytest.mark.parametrize(
    ("mutant", "scenario", "after"),
    [
        ("in_place", "second", "write"),
        ("rename_first", "second", "create manifest.json"),
        ("acknowledge_early", "second", "rename step-00000002"),
        ("retain_early", "retention", "rename step-00000003"),
    ],
)
def test_kills_find_mutants(
    server: Server, tmp_path: Path, trials: Trials, mutant: str, scenario: str, after: str
) -> None:
    """A protocol with a step in the wrong place fails at the failpoints of that step."""
    points = [p for p in failpoints(server, tmp_path / "recorded", scenario) if p.name.startswith(after)]
    if mutant == "rename_first":  # of the operations counted, the rename comes before the manifest now
        points = [Failpoint("fsync", "describe", kill_at) for kill_at in (3, 4)]
    if mutant == "retain_early":
        points = [Failpoint("after", "publish", point.kill_at + 1) for point in points]
    assert points
    found = 0
    times = trials.count(1, 5)
    for point in points:
        for _ in range(times):
            try:
                kill(server, tmp_path / "trial", scenario, point, mutant)
            except Violation:
                found += 1
    assert found >= 0.9 * times * len(points), f"{found} of {times * len(points)}"
