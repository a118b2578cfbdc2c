"""Real ranks, killed and stopped at random instants."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from lazyckpt.storage import folders
from lazyckpt.storage.claim import CLAIM, LOCK
from ranks.actor import STEPS, Orders
from ranks.jobs import wait_until
from trials import Trials

Start = Callable[[Orders], list[BaseProcess]]


def answers(orders: Orders) -> list[dict[int, str]]:
    """What each rank says of each save, "committed" or the error."""
    found = []
    for rank in range(orders.world_size):
        lines = [line.split(" ", 2) for line in orders.lines(rank) if line[0].isdigit()]
        found.append({int(ordinal): " ".join(rest) for ordinal, *rest in lines})
    return found


def check(orders: Orders, *, whole_world: bool = True) -> None:
    """Every save has one answer, and every checkpoint is whole: of one save, with the files of all ranks."""
    found = answers(orders)
    verdicts: dict[int, set[str]] = {}
    for answer in found:
        for ordinal, text in answer.items():
            verdicts.setdefault(ordinal, set()).add(text.split()[0])
    assert all(len(verdict) == 1 for verdict in verdicts.values()), found
    committed = [ordinal for ordinal, verdict in verdicts.items() if verdict == {"committed"}]
    aborted = [ordinal for ordinal, verdict in verdicts.items() if verdict == {"aborted"}]
    newest = {}
    for folder in orders.folder.glob("step-*"):
        names = (folder / "names").read_text().split()
        assert sorted(os.listdir(folder)) == sorted([*names, "names", LOCK]), os.listdir(folder)
        texts = {(folder / name).read_text() for name in names}
        assert len(texts) == 1, f"{folder} is a mixture"
        step, ordinal, _, world_size = map(int, texts.pop().split()[:4])
        assert len(names) == world_size and folder.name == f"step-{step:08d}"
        newest[step] = ordinal
        assert ordinal not in aborted
    for step in {ordinal % STEPS for ordinal in committed}:
        last = max(ordinal for ordinal in committed if ordinal % STEPS == step)
        assert newest[step] >= last, f"save {last} is committed, and not there: {newest}"


def test_ranks_commit_every_save_and_leave_nothing_behind(job_store: TCPStore, start: Start, tmp_path: Path) -> None:
    orders = Orders(tmp_path / "run", tmp_path / "logs", 3, saves=20, port=job_store.port, timeout_s=20)
    for process in start(orders):
        process.join()
    assert answers(orders) == [dict.fromkeys(range(1, 21), "committed")] * 3
    check(orders)
    assert sorted(os.listdir(orders.folder)) == ["step-00000000", "step-00000001", "step-00000002"]
    if hasattr(job_store, "list_keys"):
        joined = [f"attempt-0/lazyckpt/joined/{rank}" for rank in range(3)]
        assert sorted(job_store.list_keys()) == [*joined, "lazyckpt/generation", "lazyckpt/run"]


@pytest.mark.timeout(60 * 60)
def test_a_rank_that_is_killed_anywhere_breaks_no_checkpoint(
    job_store: TCPStore, start: Start, tmp_path: Path, trials: Trials
) -> None:
    """The next start of the job, perhaps with fewer ranks, removes what was staged and saves on."""
    kills: dict[str, int] = {}
    count = trials.count(1, 500)
    for trial in range(count):
        orders = _orders(tmp_path, trial, trials.random, job_store.port)
        processes = start(orders)
        victim = _at_a_random_instant(orders, trials.random)
        processes[victim].kill()
        for process in processes:
            process.join(30)
            assert process.exitcode is not None, f"a rank hangs: {[orders.lines(r) for r in range(orders.world_size)]}"
        check(orders)
        for rank, found in enumerate(answers(orders)):
            for text in found.values():
                named = f"rank {victim} " in text or (victim == 0 and orders.port is None and "the store" in text)
                assert rank == victim or text == "committed" or named, text
        role = "rank 0" if victim == 0 else "another rank"
        kills[role] = kills.get(role, 0) + 1
        again = Orders(
            orders.folder, orders.logs, max(2, orders.world_size - 1), 2, port=job_store.port, attempt=f"again-{trial}"
        )
        for process in start(again):
            process.join(30)
        assert answers(again) == [{1: "committed", 2: "committed"}] * again.world_size, again.lines(0)
        assert [name for name in os.listdir(orders.folder) if not name.startswith("step-")] == []
    trials.report("random SIGKILLs of one of several ranks", count, tmp_path, **kills)


@pytest.mark.timeout(60 * 60)
def test_a_rank_that_is_stopped_anywhere_and_wakes_up_answers_as_the_others(
    job_store: TCPStore, start: Start, tmp_path: Path, trials: Trials
) -> None:
    count = trials.count(1, 500)
    late = 0
    for trial in range(count):
        orders = _orders(tmp_path, trial, trials.random, job_store.port)
        processes = start(orders)
        victim = _at_a_random_instant(orders, trials.random)
        pid = processes[victim].pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):  # it was quicker
            os.kill(pid, signal.SIGSTOP)
            time.sleep(trials.random.choice([0.2, 1.0, 2.2, 4.0]))
            os.kill(pid, signal.SIGCONT)
        for process in processes:
            process.join(30)
            assert process.exitcode == 0, [orders.lines(rank) for rank in range(orders.world_size)]
        check(orders)
        late += any("aborted" in text for text in answers(orders)[0].values())
        unfinished = [name for name in os.listdir(orders.folder) if folders.is_unfinished(name)]
        assert not [name for name in unfinished if name.startswith(folders.REPLACED)], unfinished
    trials.report("random SIGSTOPs of one of several ranks", count, tmp_path, aborted=late)


def test_ranks_whose_rank_0_exits_with_the_store_find_the_outcome_in_the_folder(start: Start, tmp_path: Path) -> None:
    orders = Orders(tmp_path / "run", tmp_path / "logs", 3, saves=5, linger=False)
    for process in start(orders):
        process.join(30)
    assert answers(orders) == [dict.fromkeys(range(1, 6), "committed")] * 3
    check(orders)


def test_a_generation_that_starts_again_takes_the_folder_from_a_stopped_one(
    job_store: TCPStore, start: Start, tmp_path: Path
) -> None:
    """torchrun starts the workers again while rank 0 of the older generation is stopped and cannot be killed."""
    orders = Orders(tmp_path / "run", tmp_path / "logs", 2, saves=10_000, port=job_store.port, timeout_s=20)
    processes = start(orders)
    wait_until(lambda: len(orders.lines(0)) > 5)

    def is_locked() -> bool:  # before that, the folder is of rank 0 alone, and stays as long as that process exists
        return any(orders.folder.glob(f"{folders.TEMPORARY}*/{LOCK}"))

    while True:
        wait_until(is_locked)
        for process in processes:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGSTOP)
        if is_locked():
            break
        for process in processes:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGCONT)
    again = Orders(orders.folder, orders.logs, 2, 1, port=job_store.port, attempt="attempt-1", linger=False)
    for process in start(again):
        process.join(30)
    assert answers(again) == [{1: "committed"}] * 2, again.lines(0)
    assert not list(orders.folder.glob(f"{folders.TEMPORARY}*"))
    before = {folder: (folder / "rank-0").read_text() for folder in orders.folder.glob("step-*")}
    for process in processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGCONT)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert {folder: (folder / "rank-0").read_text() for folder in orders.folder.glob("step-*")} == before
    assert all("aborted" in list(found.values())[-1] for found in answers(orders))
    assert (orders.folder / CLAIM).exists()


def _orders(tmp_path: Path, trial: int, random: random.Random, port: int) -> Orders:
    """Two to four ranks; the store is in this process, or in rank 0."""
    logs = tmp_path / f"logs-{trial}"
    served = random.choice([port, None])
    return Orders(
        tmp_path / f"run-{trial}", logs, random.randint(2, 4), saves=100, port=served, attempt=f"attempt-{trial}"
    )


def _at_a_random_instant(orders: Orders, random: random.Random) -> int:
    """Waits until the ranks are in the middle of their saves. Returns one of them."""
    wait_until(lambda: all(orders.lines(rank) for rank in range(orders.world_size)))
    time.sleep(random.uniform(0, 0.3))
    return random.randrange(orders.world_size)
