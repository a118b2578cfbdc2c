"""Kills and stops ranks of a training that saves, at any instant, and starts it again (training.py).

What must hold each time: every checkpoint, a folder or a lone file, is whole and no mixture; the next start restores
the same tick on all ranks, no older than the newest that any rank was told is durable; what was staged is gone;
training goes on and saves; and the ranks that live get an error in time that names the rank that does not. A rank of
an older start that wakes up changes nothing.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch.distributed import TCPStore

from crash.actor import role
from lazyckpt import _engine
from lazyckpt.storage import folders, manifest
from lazyckpt.waits import ABSENT_TIMEOUTS
from marks import TRAINS_FSDP2
from ranks.jobs import wait_until
from ranks.training import MAX_TICK, PROBE, TIMEOUT_S, Orders, tick_of, told
from trials import Trials

Start = Callable[[Orders], list[BaseProcess]]
JOBS: dict[str, dict[str, Any]] = {
    "shards": {},
    "replicas": {"writers": "all"},
    "lone files": {"writers": "all", "lone": True},
}
SLACK_S = 15.0  # of a busy machine
UNHURRIED: dict[str, Any] = {"knobs": {"rank_timeout_s": 60.0}}  # where no rank is to be lost


class Run:
    """One folder, and the job that is started in it again and again."""

    def __init__(self, root: Path, start: Start, port: int, job: dict[str, Any]) -> None:
        """``job``: the orders of all attempts."""
        self.folder, self.logs = root / "run", root / "logs"
        self.logs.mkdir(parents=True)
        self.start_ranks, self.port, self.job = start, port, job
        self.acknowledged = 0  # the newest tick that some rank was told is durable
        self.newest = 0  # the newest that was saved
        self.attempts = 0
        self.slowest_s = 0.0  # until a rank that lives had its error

    def copy(self, root: Path) -> Run:
        """Another folder with the same checkpoints, of the same job."""
        other = Run(root, self.start_ranks, self.port, self.job)
        other.acknowledged, other.newest = self.acknowledged, self.newest
        if self.folder.exists():
            shutil.copytree(self.folder, other.folder)
        return other

    def begin(self, world_size: int, **how: Any) -> tuple[Orders, list[BaseProcess]]:
        self.attempts += 1
        attempt = f"{self.folder.parent.name}-{self.attempts}"
        orders = Orders(self.folder, self.logs, world_size, port=self.port, attempt=attempt, **self.job)
        orders = replace(orders, **how)
        if orders.writers is None and not TRAINS_FSDP2:
            pytest.skip("needs torch 2.7, which trains FSDP2 on CPUs")
        self.before = self.unfinished()
        return orders, self.start_ranks(orders)

    def unfinished(self) -> set[str]:
        names = os.listdir(self.folder) if self.folder.exists() else []
        return {name for name in names if folders.is_unfinished(name)}

    def end(self, orders: Orders, processes: list[BaseProcess], dead: int | None = None) -> None:
        """Waits until the ranks end by themselves; after ``dead`` was killed, until the others were told, as an agent
        does that then ends them."""
        ends = {0} if dead is None else {0, -signal.SIGKILL}
        for rank, process in enumerate(processes):
            wait_until(lambda p=process, r=rank: not p.is_alive() or (dead is not None and _was_told(orders, r)))
            if dead is not None:
                process.kill()
            process.join(60)
            assert process.exitcode in ({-signal.SIGKILL} if rank == dead else ends), (rank, process.exitcode)

    def check(self, orders: Orders, victim: int | None = None, struck_at: float = 0.0) -> None:
        """Checks what the ranks have told against each other and against the folder."""
        alive = [rank for rank in range(orders.world_size) if rank != victim]
        answers: dict[int, set[str]] = {}
        restored = {}
        for rank in range(orders.world_size):
            lines = told(orders, rank)
            for line in lines:
                assert line.event != "raised", (rank, line)
                assert not (line.event == "done" and line.tick == PROBE), "a rank commits alone"
                if line.event in ("done", "failed"):
                    answers.setdefault(line.tick, set()).add(line.event)
                if line.event == "restored":
                    restored[rank] = line.tick
        assert all(len(answer) == 1 for answer in answers.values()), answers
        assert len(set(restored.values())) <= 1, restored
        for tick in restored.values():
            assert self.acknowledged <= tick <= self.newest, (self.acknowledged, tick, self.newest)
        if any(told(orders, rank, "saved" if orders.lone else "restored") for rank in range(orders.world_size)):
            assert not self.before & self.unfinished(), "an older attempt's folder was not swept"
        saved = [line.tick for rank in range(orders.world_size) for line in told(orders, rank, "saving")]
        self.newest = max([self.newest, *saved])
        self.acknowledged = max([self.acknowledged, *(tick for tick, answer in answers.items() if answer == {"done"})])
        for rank in alive:
            self.check_errors(orders, rank, victim, struck_at)
        ticks = {path: tick_of(path) for path in orders.checkpoints()}
        assert self.acknowledged <= max(ticks.values(), default=0) <= self.newest, (self.acknowledged, ticks)
        failed = {tick for tick, answer in answers.items() if answer == {"failed"}}
        assert not failed & set(ticks.values()), (failed, ticks)
        for path, tick in ticks.items():
            assert path == orders.path_of(orders.saved_as(tick))

    def check_errors(self, orders: Orders, rank: int, victim: int | None, struck_at: float) -> None:
        """A rank that lives was told soon, by an error that names the victim, or another that was told before."""
        errors = told(orders, rank, "failed", "told", "probed", "refused")
        if victim is None:
            assert not errors, (rank, errors)
            return
        # The last collective of training may take gloo's timeout to fail.
        failed_at = max([struck_at, *(line.at for line in told(orders, rank, "training"))])
        for line in errors:
            served = orders.port is None and "store" in line.text  # rank 0, which serves it, may have ended first
            others = re.search(r"rank \d+ (failed: save\(\) raised RankError|saves step)", line.text)
            # A rank that the others wait for may hang in a collective with the dead one.
            hangs = re.search(r"rank 0 lives, but has not reached|rank \d+ has ended, or has not opened", line.text)
            others = others or (orders.world_size > 2 and hangs)
            assert f"rank {victim} " in line.text or served or others, (rank, victim, line)
            late_s = line.at - (struck_at if line.event in ("failed", "told") else failed_at)
            patience_s = TIMEOUT_S * (1 if "no sign of life" in line.text else ABSENT_TIMEOUTS) + SLACK_S
            assert late_s < patience_s, (rank, victim, late_s, line)
        if errors:
            self.slowest_s = max(self.slowest_s, errors[0].at - struck_at)

    def finish(self, ticks: int = 3) -> None:
        """The job starts once more, saves and ends, and leaves nothing behind."""
        orders, processes = self.begin(2, ticks=ticks, **UNHURRIED)
        self.end(orders, processes)
        self.check(orders)
        assert [len(told(orders, rank, "done")) for rank in range(2)] == [ticks] * 2
        assert self.unfinished() == set()
        found = [path.name for path in orders.checkpoints()]
        assert found == sorted(os.listdir(self.folder))
        assert len(found) <= 2 or orders.lone  # removed by names that were there at the last save


def _was_told(orders: Orders, rank: int) -> bool:
    return bool(told(orders, rank, "probed", "refused"))


def phase(run: Run, orders: Orders, victim: int) -> str:
    """What the victim is about, as its log and the folder show."""
    lines = told(orders, victim)
    if not lines:
        return "starting"
    if not any(line.event == "restored" for line in lines):
        return "opening"
    names = run.unfinished()
    if any(name.startswith((folders.TRASH, folders.REPLACED)) for name in names):
        return "replacing"
    for name in names:
        files = os.listdir(run.folder / name) if (run.folder / name).exists() else []
        if files:
            return "committing" if manifest.MANIFEST in files else "writing"
    return "saving" if lines[-1].event == "saving" else "training"


def attempt(run: Run, chance: random.Random) -> tuple[Orders, list[BaseProcess], int]:
    """Starts the job anew, with another number of ranks, another store and other settings. Returns at a random instant
    of opening or saving, with the rank to be struck."""
    world_size = chance.choice((2, 2, 2, 3))
    knobs = {
        "on_error": chance.choice(("raise", "warn")),
        "max_in_flight": chance.choice((1, 2)),
        "io_backend": chance.choice(("io_uring", "posix")),
    }
    served = chance.choice((run.port, run.port, None))
    orders, processes = run.begin(world_size, knobs=knobs, port=served)
    victim = chance.randrange(world_size)
    if chance.random() < 0.25:
        wait_until(lambda: told(orders, victim, "started"))
        time.sleep(chance.uniform(0, 0.3))
    else:
        wait_until(lambda: all(told(orders, rank, "done") for rank in range(world_size)))
        time.sleep(chance.uniform(0, 0.2))
    return orders, processes, victim


def attempts(
    root: Path, start: Start, port: int, chance: random.Random, count: int, job: str
) -> Iterator[tuple[Run, Orders, list[BaseProcess], int]]:
    """Attempts one after the other, most in the folder that the one before left. The last in each folder ends well."""
    run: Run | None = None
    for trial in range(count):
        if run is None or run.newest > MAX_TICK - 150:
            laps = chance.choice((None, 2, 1) if job == "lone files" else (None, 2))
            run = Run(root / str(trial), start, port, {**JOBS[job], "laps": laps})
        yield run, *attempt(run, chance)
        if trial == count - 1 or run.newest > MAX_TICK - 150:
            run.finish()
            shutil.rmtree(run.folder)


@pytest.mark.long
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.timeout(60 * 60)
def test_a_rank_that_is_killed_at_any_instant_breaks_no_checkpoint(
    job_store: TCPStore, start: Start, tmp_path: Path, trials: Trials, job: str
) -> None:
    """Or all of them at once."""
    phases: Counter[str] = Counter()
    slowest_s = 0.0
    count = trials.count(1, 300)
    for run, orders, processes, victim in attempts(tmp_path, start, job_store.port, trials.random, count, job):
        phases[phase(run, orders, victim)] += 1
        if trials.random.random() < 0.2:
            phases["all at once"] += 1
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            run.check(orders)
        else:
            struck_at = time.monotonic()
            processes[victim].kill()
            run.end(orders, processes, dead=victim)
            run.check(orders, victim, struck_at)
        slowest_s = max(slowest_s, run.slowest_s)
    what = f"random SIGKILLs of a rank that saves {job}"
    trials.report(what, count, tmp_path, **phases, seconds_to_the_error=round(slowest_s, 1))


@pytest.mark.long
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.timeout(60 * 60)
def test_a_rank_that_is_stopped_at_any_instant_breaks_no_checkpoint(
    job_store: TCPStore, start: Start, tmp_path: Path, trials: Trials, job: str
) -> None:
    """It wakes up after a while, which may be too late, and training goes on; or it is killed; or it wakes up when the
    job has started again without it."""
    phases: Counter[str] = Counter()
    count = trials.count(1, 200)
    for run, orders, processes, victim in attempts(tmp_path, start, job_store.port, trials.random, count, job):
        phases[phase(run, orders, victim)] += 1
        struck_at = time.monotonic()
        pid = processes[victim].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        end = trials.random.choice(("wakes", "wakes", "killed", "wakes too late"))
        if end == "wakes too late" and orders.port is None:
            end = "wakes"  # the next start would be another job
        phases[end] += 1
        if end == "wakes too late":
            wake_too_late(run, orders, processes, victim, struck_at)
            continue
        time.sleep(trials.random.choice((0.1, 1.0, 2 * TIMEOUT_S)))
        if end == "killed":
            processes[victim].kill()
            run.end(orders, processes, dead=victim)
        else:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.3)
            (run.logs / f"{orders.attempt}-enough").touch()
            run.end(orders, processes)
        run.check(orders, victim, struck_at)
        phases["aborted"] += any(told(orders, rank, "failed") for rank in range(orders.world_size))
    trials.report(f"random SIGSTOPs of a rank that saves {job}", count, tmp_path, **phases)


def wake_too_late(run: Run, orders: Orders, processes: list[BaseProcess], victim: int, struck_at: float) -> None:
    """Kills the other ranks. The stopped one wakes up while the next start of the job trains and saves."""
    others = [process for rank, process in enumerate(processes) if rank != victim]
    for process in others:
        process.kill()
    for process in others:
        process.join()
    run.check(orders, victim, struck_at)
    again, ranks = run.begin(2, **UNHURRIED)
    wait_until(lambda: all(told(again, rank, "done") for rank in range(2)))
    pid = processes[victim].pid
    assert pid is not None
    os.kill(pid, signal.SIGCONT)
    processes[victim].join(60)
    assert processes[victim].exitcode == 0 and not told(orders, victim, "raised")
    (run.logs / f"{again.attempt}-enough").touch()
    run.end(again, ranks)
    run.check(again)
    restored = told(again, 0, "restored")[0].tick
    committed = [line.tick for rank in range(orders.world_size) for line in told(orders, rank, "done")]
    assert max(committed, default=0) <= restored, (committed, restored)


# at the instants that a random delay misses


class Point(NamedTuple):
    """An operation before which a rank is killed, and the orders for that."""

    name: str
    how: dict[str, Any]


def points(trace: Path) -> list[Point]:
    """The operations of a recorded rank while it was armed."""
    found = []
    armed, calls = False, 0
    counts: Counter[str] = Counter()
    for words in map(str.split, trace.read_text().splitlines()):
        if words[0] in ("armed", "disarmed"):
            armed = words == ["armed"]
        if words[0] != "begin":
            continue
        number, operation, *paths = words[1:]
        by_engine = not number.startswith("py")
        counts[operation] += by_engine
        calls += armed and not by_engine
        if armed:
            target = role(paths[1] if operation == "rename" else paths[0])
            how = {"fault": f"{operation}:{counts[operation]}:kill"} if by_engine else {"kill_at": calls}
            found.append(Point(f"{operation} {target}", how))
    return found


# After ticks 1 and 2, which are steps 1 and 0, a save that replaces step 1 and drops step 0.
SAVING: dict[str, Any] = {"ticks": 1, "laps": 2, "armed_at": 3, "knobs": {"keep_last": 1}}
# The first save of an attempt is rank 0's alone; the second replaces step 0.
REPLICAS: dict[str, Any] = {**SAVING, "ticks": 2, "armed_at": 4, "writers": "all"}
# The first save of an attempt opens the folder, too.
LONE_FILES: dict[str, Any] = {"ticks": 1, "laps": 1, "armed_at": 3, **JOBS["lone files"]}
# Orders, and operations that a recording of them must show: otherwise the test misses them.
SCENARIOS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "rank 0 saves": (
        {"victim": 0, **SAVING},
        [
            *("create .lazyckpt-lock-unfinished", "rename .lazyckpt-lock", "create __0_0.distcp", "sync __0_0.distcp"),
            *("create manifest.json", "fsync manifest.json", "rename .replaced-step-00000001", "rename step-00000001"),
            *("fsync run", "rename .trash-step-00000000", "unlink manifest.json"),
        ],
    ),
    "rank 1 saves": (
        {"victim": 1, **SAVING},
        ["create __1_0.distcp", "write __1_0.distcp", "sync __1_0.distcp", "fsync .tmp-step-00000001"],
    ),
    "rank 0 writes its share": (
        {"victim": 0, **REPLICAS},
        [
            *("create state.pt", "allocate state.pt", "write state.pt", "truncate state.pt", "sync state.pt"),
            *("pwrite state.pt", "fdatasync state.pt"),  # of what the receipts of all ranks tell
            *("create manifest.json", "fsync manifest.json", "rename step-00000000"),
        ],
    ),
    "rank 1 writes its share": (
        {"victim": 1, **REPLICAS},
        [
            *("create state.pt", "write state.pt", "sync state.pt", "create rank-1.pt", "sync rank-1.pt"),
            "fsync .tmp-step-00000000",
        ],
    ),
    "rank 0 opens the folder and saves a lone file": (
        {"victim": 0, **LONE_FILES},
        [
            *("rename .lazyckpt-owner", "rename .lazyckpt-lock", "create step-00000000.pt", "sync step-00000000.pt"),
            *("pwrite step-00000000.pt", "fdatasync step-00000000.pt", "rename step-00000000.pt", "fsync run"),
            *("unlink .lazyckpt-lock", "rmdir .tmp-step-00000000.pt"),
        ],
    ),
    "rank 1 writes its share of a lone file": (
        {"victim": 1, **LONE_FILES, "ticks": 2, "armed_at": 4},
        ["write step-00000000.pt", "sync step-00000000.pt", "fsync .tmp-step-00000000.pt"],
    ),
    "rank 0 opens": (
        {"victim": 0, "ticks": 1, "laps": 2, "knobs": {"keep_last": 1}},
        ["rename .lazyckpt-owner", "rename step-00000001"],
    ),
}


def struck(run: Run, **how: Any) -> bool:
    """One attempt, in which a rank is killed. False if it ended by itself: the engine made fewer operations this
    time."""
    orders, processes = run.begin(2, **how)
    processes[orders.victim].join(60)
    struck_at = time.monotonic()
    if processes[orders.victim].exitcode == 0:
        run.end(orders, processes)
        run.check(orders)
        return False
    run.end(orders, processes, dead=orders.victim)
    run.check(orders, orders.victim, struck_at)
    return True


def between_the_renames(run: Run, how: dict[str, Any]) -> Run | None:
    """Rank 0 is killed between the two renames of a replaced checkpoint. None if rank 1 has given it its name back
    before it was killed, too."""
    _, processes = run.begin(2, **how)
    processes[0].join(60)
    processes[1].kill()
    processes[1].join()
    names = os.listdir(run.folder)
    is_between = "step-00000001" not in names and any(name.startswith(folders.REPLACED) for name in names)
    return run if is_between else None


@pytest.mark.long
@pytest.mark.skipif(not _engine.FAULTS, reason="the engine was built without faults")
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.timeout(60 * 60)
def test_a_rank_that_is_killed_at_any_operation_breaks_no_checkpoint(
    job_store: TCPStore, start: Start, tmp_path: Path, trials: Trials, scenario: str
) -> None:
    def record(run: Run, how: dict[str, Any]) -> list[Point]:
        orders, processes = run.begin(2, record=True, **how)
        run.end(orders, processes)
        run.check(orders)
        return points(run.logs / f"{orders.attempt}-operations")

    how, needed = SCENARIOS[scenario]
    of_all = {name: how[name] for name in ("writers", "lone", "laps") if name in how}
    begun = Run(tmp_path / "begun", start, job_store.port, of_all)
    begun.finish(ticks=2)
    if scenario == "rank 0 opens":  # after a crash between the two renames of a replaced checkpoint
        saving, _ = SCENARIOS["rank 0 saves"]
        renames = [p for p in record(begun.copy(tmp_path / "saved"), saving) if p.name == "rename step-00000001"]
        how_to_crash = {**saving, **renames[-1].how}  # the first one finds the name taken
        crashes = (between_the_renames(begun.copy(tmp_path / f"crashed-{n}"), how_to_crash) for n in range(20))
        begun = next(run for run in crashes if run is not None)
    found = record(begun.copy(tmp_path / "recorded"), how)
    assert {point.name for point in found} >= set(needed), sorted({point.name for point in found})
    count = left = trials.count(1, len(found))
    for number, point in enumerate(trials.random.sample(found, len(found))):
        run = begun.copy(tmp_path / str(number))
        left -= struck(run, **how, **point.how)
        run.finish()
        shutil.rmtree(run.folder)
        if left == 0:
            break
    assert left <= count // 4, f"{left} of {count} operations did not come again"
    trials.report(f"SIGKILL at each operation: {scenario}", count, tmp_path)


def test_a_second_job_takes_the_folder_and_the_first_is_told(start: Start, tmp_path: Path) -> None:
    run = Run(tmp_path, start, port=0, job={})
    first, processes = run.begin(2, port=None)
    wait_until(lambda: all(len(told(first, rank, "done")) > 1 for rank in range(2)))
    second, others = run.begin(2, port=None, ticks=5)
    run.end(second, others)
    (run.logs / f"{first.attempt}-enough").touch()
    run.end(first, processes)
    for rank in range(2):
        assert re.search(r"rank 0 finds that .*/run belongs to the job ", told(first, rank, "failed")[0].text)
        assert len(told(second, rank, "done")) == 5
    assert all(tick_of(checkpoint) for checkpoint in first.checkpoints())
    assert run.unfinished() == set()
