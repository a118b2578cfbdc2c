"""What goes wrong on one rank of a Checkpointer: all ranks are told in time, and no checkpoint suffers."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failing_engines import engines_fail
from processes import Died, Ranks, die

import lazyckpt
from lazyckpt import _engine
from lazyckpt.storage.claim import CLAIM
from lazyckpt.waits import ABSENT_TIMEOUTS
from ranks.training import KNOBS, Answer, Training, tick_of

TIMEOUT_S = 0.6  # where a test waits for it
ABSENT_S = ABSENT_TIMEOUTS * TIMEOUT_S
SLACK_S = 4.0  # of a busy machine


class Case:
    """Three saves of a training, one of which a fault strikes on one rank."""

    def __init__(self, folder: Path, *, fault: str = "", **knobs: Any) -> None:
        self.rank = dist.get_rank()
        self.folder = folder
        self.training = Training(self.rank, dist.get_world_size())
        self.knobs = {**KNOBS, "rank_timeout_s": 3.0, "on_error": "warn", **knobs}
        self.fault = fault
        self.answers: dict[int, Answer] = {}

    @contextlib.contextmanager
    def checkpointer(self, **also: Any) -> Iterator[lazyckpt.Checkpointer]:
        with engines_fail(self.fault), lazyckpt.Checkpointer(self.folder, **self.knobs) as ckpt:
            training = self.training
            ckpt.track(model=training.model, optimizer=training.optimizer, clock=training.clock, **also)
            ckpt.restore()
            yield ckpt

    def save(self, ckpt: lazyckpt.Checkpointer, **how: Any) -> lazyckpt.SaveHandle:
        step, begin = self.training.tick, time.monotonic()

        def settled(handle: Future[Path]) -> None:
            error = handle.exception()
            text = handle.result().name if error is None else f"{type(error).__name__}: {error}"
            self.answers[step] = Answer(text, time.monotonic() - begin)

        handle = ckpt.save(step, **how)
        handle.add_done_callback(settled)
        return handle

    def good_save(self) -> None:
        """With a Checkpointer of its own, whose engine works."""
        fault, self.fault = self.fault, ""
        with self.checkpointer() as ckpt:
            self.training.step()
            self.save(ckpt).result()
        self.fault = fault


def name(step: int) -> str:
    return f"step-{step:08d}"


def left(folder: Path) -> list[str]:
    """What a folder holds. Every checkpoint in it is whole."""
    for checkpoint in folder.glob("step-*"):
        assert name(tick_of(checkpoint)) == checkpoint.name
    return sorted(os.listdir(folder))


# a rank whose part fails


def fails_once(folder: Path, victim: int, fault: str) -> dict[int, Answer]:
    """The second of three saves fails in the engine of one rank."""
    case = Case(folder, fault=fault * (dist.get_rank() == victim))
    case.good_save()
    with case.checkpointer() as ckpt:
        for _ in range(2):
            case.training.step()
            with contextlib.suppress(lazyckpt.SaveError):
                case.save(ckpt).result()
    return case.answers


@pytest.mark.long(first=4)
@pytest.mark.skipif(not _engine.FAULTS, reason="the engine was built without faults")
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("write:2:ENOSPC", "No space left"),
        ("allocate:1:ENOSPC", "No space left"),
        ("sync:1:EIO", "Input/output error"),
    ],
)
def test_a_disk_that_fails_one_rank_fails_that_save_on_all(
    ranks: Ranks, tmp_path: Path, victim: int, fault: str, why: str
) -> None:
    told = ranks.run(2, fails_once, tmp_path, victim, fault)
    for rank, answers in enumerate(told):
        assert (answers[1].text, answers[3].text) == (name(1), name(3))
        kind = "NoSpaceError" if "ENOSPC" in fault else "SaveError"
        named = rf"{kind}: .*{why}" if rank == victim else rf"RankError: .*rank {victim} failed: .*{why}"
        assert re.match(named, answers[2].text), answers[2]
        assert answers[2].late_s < SLACK_S  # without any timeout
    assert left(tmp_path) == [name(1), name(3)]


def slow_writer(folder: Path) -> Answer:
    """Rank 1 writes for a quarter of a minute. Rank 0 fails meanwhile."""
    stalls = [f"write:{number}:stall" for number in range(1, 300)]  # 50 ms each
    fault = ",".join(stalls if dist.get_rank() else [*stalls[:10], "sync:1:EIO"])
    case = Case(folder, fault=fault, chunk_bytes=4096, io_depth=1)
    with case.checkpointer(more=torch.zeros(1 << 18)) as ckpt:
        case.training.step()
        with contextlib.suppress(lazyckpt.SaveError):
            case.save(ckpt).result()
    return case.answers[1]


@pytest.mark.skipif(not _engine.FAULTS, reason="the engine was built without faults")
def test_a_rank_in_a_long_write_learns_that_another_has_aborted(ranks: Ranks, tmp_path: Path) -> None:
    for answer in ranks.run(2, slow_writer, tmp_path):
        assert re.search("rank 0 failed: .*Input/output error|^SaveError: .*Input/output error", answer.text)
        assert answer.late_s < 2.5 + SLACK_S, answer
    assert left(tmp_path) == []


# a rank that does not do what the others do


class Strange:
    """State that takes long to give, or cannot be saved."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        time.sleep(self.seconds)
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def again(step: int) -> str:
    """A rank that has left out step 2 gives up step 3, and is in step at the next one."""
    return name(step) if step == 4 else ""


def differs(folder: Path, how: str) -> dict[int, Answer]:
    """Saves four times. At the second one rank 1 does something else. Training waits for it, in its collectives."""
    case = Case(folder, **{"rank_timeout_s": TIMEOUT_S} if "hangs" in how else {})
    strange = Strange()
    with case.checkpointer(strange=strange) as ckpt:
        for step in (1, 2, 3, 4):
            case.training.step()
            now = case.rank == 1 and step == 2
            if now and how == "hangs in training":
                time.sleep(ABSENT_S + 1.5)
            strange.seconds = (ABSENT_S + 1.5) * (now and how == "hangs in save()")
            strange.state = {"inner": (number for number in ())} if now and how == "unpicklable" else {}
            if how == "another size":
                strange.state = {"inner": torch.ones(4 if case.rank == 1 and step in (2, 3) else 3)}
            if now and how == "another layout":
                ckpt.track(more={})
            if now and how in ("bad metrics, then on", "bad metrics, then good ones"):
                with pytest.raises(lazyckpt.ConfigError, match="metrics"):
                    ckpt.save(step, metrics={"loss": "low"})  # type: ignore[dict-item]
                if how == "bad metrics, then on":
                    continue
            if now and how == "leaves out a save":
                continue
            case.save(ckpt)
        dist.barrier()  # closing tells, too
        with contextlib.suppress(lazyckpt.SaveError):
            ckpt._saver.wait()
    return case.answers


@pytest.mark.long
@pytest.mark.parametrize("how", ["hangs in training", "hangs in save()"])
def test_a_rank_that_hangs_is_named_within_five_timeouts(ranks: Ranks, tmp_path: Path, how: str) -> None:
    told = ranks.run(2, differs, tmp_path, how)
    for rank, answers in enumerate(told):
        for step in (1, 3, 4):
            assert answers[step].text == name(step)
        assert re.search(rf"rank 1 lives, but has not reached save number 2 for {ABSENT_S:g} s", answers[2].text), (
            answers[2]
        )
        assert rank == 1 or ABSENT_S < answers[2].late_s < ABSENT_S + 1.4, answers[2]
    assert left(tmp_path) == [name(1), name(3), name(4)]


@pytest.mark.parametrize(
    ("how", "why", "later"),
    [
        ("another layout", r"rank 1 saves step 2 .*layout .*more.*; rank 0 saves it with layout .*clock", None),
        ("unpicklable", r"rank 1 failed: .*'strange\.inner'.*generator", name),
        ("bad metrics, then on", r"rank 1 failed: save: metrics=.*'low'.*expected numbers", name),
        (
            "leaves out a save",
            r"rank 1 saves step 3; rank 0 saves step 2 .*save together again at the next step",
            again,
        ),
    ],
)
def test_a_rank_that_saves_something_else_is_named_at_once(
    ranks: Ranks, tmp_path: Path, how: str, why: str, later: Callable[[int], str] | None
) -> None:
    answers, others = ranks.run(2, differs, tmp_path, how)
    assert answers[1].text == others[1].text == name(1)
    assert re.search(why, answers[2].text), answers[2]
    assert answers[2].late_s < SLACK_S
    for step in (3, 4):
        for answer in (answers[step], others[step]):
            expected = later(step) if later is not None else ""
            assert answer.text == expected if expected else "RankError" in answer.text
    assert left(tmp_path) == [name(1), *(later(step) for step in (3, 4) if later is not None and later(step))]


def test_a_tensor_of_another_size_on_another_rank_is_refused_each_time(ranks: Ranks, tmp_path: Path) -> None:
    """Regression: after the first time, rank 0's was saved for both."""
    for answers in ranks.run(2, differs, tmp_path, "another size"):
        assert [answers[step].text for step in (1, 4)] == [name(1), name(4)]
        for step in (2, 3):
            why = r"strange\.inner is a float32 tensor of \(3,\) in __0_0.*, but a float32 tensor of \(4,\) in __1_0"
            assert re.search(why, answers[step].text), answers[step]
    assert left(tmp_path) == [name(1), name(4)]


def test_a_call_with_bad_arguments_may_be_repeated_with_good_ones(ranks: Ranks, tmp_path: Path) -> None:
    for answers in ranks.run(2, differs, tmp_path, "bad metrics, then good ones"):
        assert {step: answer.text for step, answer in answers.items()} == {step: name(step) for step in (1, 2, 3, 4)}
    assert left(tmp_path) == [name(step) for step in (1, 2, 3, 4)]


def opens(folder: Path) -> str:
    """Each rank its own folder, as on node-local disks."""
    case = Case(folder / str(dist.get_rank()))
    with pytest.raises(lazyckpt.ConfigError) as caught, case.checkpointer():
        pass
    return str(caught.value)


def test_a_folder_of_each_node_is_refused_before_anything_is_saved(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks.run(2, opens, tmp_path):
        assert re.search(rf"rank 1 \({tmp_path}/1 on .*\) does not see the folder of rank 0 \({tmp_path}/0\)", told)
    assert [os.listdir(tmp_path / rank) for rank in "01"] == [[], []]


# a forked child


CHILD: dict[str, Callable[[lazyckpt.Checkpointer], object]] = {
    "closes": lambda ckpt: ckpt.close(),
    "saves": lambda ckpt: ckpt.save(9),
    "restores": lambda ckpt: ckpt.restore(),
    "ends": lambda ckpt: atexit._run_exitfuncs(),
}


def forks(folder: Path) -> tuple[dict[str, int], dict[int, Answer]]:
    """How each child ended, and what this rank saves after that."""
    case = Case(folder)
    ended = {}
    with case.checkpointer() as ckpt:
        case.training.step()
        case.save(ckpt).result()
        for how, act in CHILD.items():
            if (child := os.fork()) == 0:
                with contextlib.suppress(lazyckpt.ClosedError):
                    signal.alarm(20)
                    act(ckpt)
                os._exit(0)
            ended[how] = os.waitpid(child, 0)[1]
        case.training.step()
        case.save(ckpt).result()
    return ended, case.answers


def test_a_forked_child_neither_hangs_nor_ends_the_job_of_its_parent(ranks: Ranks, tmp_path: Path) -> None:
    """Regression: it waited for ever for threads of its parent; that of rank 0 took the folder from the job."""
    for ended, answers in ranks.run(2, forks, tmp_path):
        assert ended == dict.fromkeys(CHILD, 0)
        assert [answer.text for answer in answers.values()] == [name(1), name(2)]
    assert left(tmp_path) == [name(1), name(2)]


# a lost store

SERVE = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(100)
"""


def loses_the_store(folder: Path, port: int, pid: int) -> dict[int, Answer]:
    """Training has a store of its own; that of lazyckpt is killed after the first save."""
    case = Case(folder, rank_timeout_s=TIMEOUT_S)
    client = dist.TCPStore("127.0.0.1", port, is_master=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_get_default_store", lambda: client)
        with case.checkpointer() as ckpt:
            for step in (1, 2, 3):
                case.training.step()
                dist.barrier()
                if step == 2 and case.rank == 0:
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(lazyckpt.SaveError):
                    case.save(ckpt).result()
    again = Case(folder)  # with training's store
    with again.checkpointer() as ckpt:
        assert again.training.tick == 1 and not again.training.differences(2)
        for _ in range(4):
            again.training.step()
        again.save(ckpt).result()
    return {**case.answers, **again.answers}


def test_without_their_store_all_ranks_fail_the_save_and_train_on(ranks: Ranks, tmp_path: Path) -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        told = ranks.run(2, loses_the_store, tmp_path, int(server.stdout.readline()), server.pid)
    finally:
        server.kill()
        server.communicate()
    for answers in told:
        assert (answers[1].text, answers[5].text) == (name(1), name(5))
        for step in (2, 3):
            assert re.search(r"RankError: .*rank \d lost the store: ", answers[step].text), answers[step]
            assert answers[step].late_s < ABSENT_S + SLACK_S
    assert left(tmp_path) == [name(1), name(5)]


def dies_with_the_store(folder: Path) -> str:
    """Rank 0 serves the store."""
    case = Case(folder, rank_timeout_s=TIMEOUT_S)
    with case.checkpointer() as ckpt:
        case.training.step()
        case.save(ckpt).result()
        case.training.step()
        dist.barrier()
        if case.rank == 0:
            die()
        return str(case.save(ckpt).exception())


def test_a_rank_0_that_dies_with_the_store_is_named(ranks: Ranks, tmp_path: Path) -> None:
    """Regression: the other rank named itself."""
    died, told = ranks.run(2, dies_with_the_store, tmp_path)
    assert isinstance(died, Died)
    assert "rank 0 has ended, or cannot be reached: rank 1 has lost the store, which rank 0 serves" in told
    assert left(tmp_path) == [CLAIM, name(1)]


def test_the_case_trains_as_it_says(ranks: Ranks) -> None:
    for told in ranks.run(3, trains):
        assert told == ([], ["wide.weight"])


def trains() -> Any:
    """What ``differences`` finds in a good state, and in one with a wrong element."""
    training = Training(dist.get_rank(), dist.get_world_size())
    for _ in range(5):
        training.step()
    good = training.differences(3)
    with torch.no_grad():
        training.model.layers["wide"].weight._local_tensor[-1, -1] += 1
    return good, training.differences(3)
