"""A loop that catches SaveError on every rank: what fails on one rank once costs that checkpoint, and no other."""

from __future__ import annotations

import contextlib
import os
import re
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failing_engines import engines_fail
from processes import Ranks

import lazyckpt
from lazyckpt import _engine, waits
from ranks.training import KNOBS, Training, tick_of

STEPS = 7


class Failing:
    """State that cannot be had while ``fails``."""

    fails = False

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise OSError(5, "the file server is gone")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def settled(saver: lazyckpt.Saver) -> None:
    """Returns when all saves have ended. Raises no failure: the next call does."""
    while saver.pending():
        time.sleep(0.002)


def train(
    folder: Path, fails: Mapping[int, list[int]], how: str = "", fault: Any = None, on_error: Any = "raise"
) -> dict[int, str]:
    """Saves at each step, and returns what the calls raised. ``fails``: by rank, the steps at which its state fails.
    ``how``: what else is done otherwise. ``fault``: of the engine of a rank, by rank."""
    rank = dist.get_rank()
    training, failing, raised = Training(rank, dist.get_world_size()), Failing(), {}
    more = torch.nn.Linear(2, 2)
    with contextlib.ExitStack() as stack:
        stack.enter_context(engines_fail((fault or {}).get(rank, "")))
        ckpt = stack.enter_context(lazyckpt.Checkpointer(folder, **KNOBS, rank_timeout_s=10.0, on_error=on_error))
        ckpt.track(model=training.model, optimizer=training.optimizer, clock=training.clock, failing=failing)
        ckpt.track(more=more)
        for step in range(1, STEPS + 1):
            training.step()
            now = step in fails.get(rank, [])
            failing.fails = now and how != "metrics"
            try:
                ckpt.save(step, metrics={"loss": "low" if now and how == "metrics" else 1})  # type: ignore[dict-item]
                if how == "a part" and rank == 0:
                    settled(ckpt._saver)
                    ckpt.save_part("more", folder / f"more{step}.pt")
            except (lazyckpt.SaveError, lazyckpt.ConfigError) as error:
                raised[step] = f"{type(error).__name__}: {error}"
            if not (how == "metrics" and step in fails[1]):  # until its next call, rank 1 may correct them
                settled(ckpt._saver)
            dist.barrier()
    return raised


def stage(folder: Path, fails: Mapping[int, list[int]]) -> dict[int, str]:
    """The same, as trainers do it."""
    rank = dist.get_rank()
    training, raised = Training(rank, dist.get_world_size()), {}
    with lazyckpt.Saver(**KNOBS, rank_timeout_s=10.0) as saver:
        for step in range(1, STEPS + 1):
            training.step()
            try:
                with saver.stage(folder / f"step-{step:08d}", step=step, all_ranks=True) as staged:
                    staged.add_shards("model", dict(training.model.state_dict()))
                    if step in fails.get(rank, []):
                        staged.add("failing.pt", (number for number in ()))
                    staged.save()
            except lazyckpt.SaveError as error:
                raised[step] = f"{type(error).__name__}: {error}"
            settled(saver)
            dist.barrier()
    return raised


def saved(folder: Path, *, whole: bool = True) -> list[int]:
    steps = sorted(int(name.removeprefix("step-")) for name in os.listdir(folder) if name.startswith("step-"))
    for step in steps if whole else []:
        assert tick_of(folder / f"step-{step:08d}") == step
    return steps


def without(*steps: int) -> list[int]:
    return [step for step in range(1, STEPS + 1) if step not in steps]


@pytest.mark.long(first=6)
@pytest.mark.parametrize(
    "fails",
    [{1: [3]}, {0: [3]}, {1: [1]}, {0: [1]}, {1: [3], 0: [4]}, {0: [3], 1: [4]}, {0: [3], 1: [3]}, {1: [2, 3, 5]}],
    ids=str,
)
@pytest.mark.parametrize("case", [train, stage])
def test_what_fails_on_one_rank_costs_that_checkpoint_alone(
    ranks: Ranks, tmp_path: Path, fails: dict[int, list[int]], case: Any
) -> None:
    """Regression: a call that raised an earlier failure saved nothing, so the save of the other rank failed, whose next
    call saved nothing: no checkpoint was committed any more."""
    told = ranks.run(2, case, tmp_path, fails)
    lost = {step for steps in fails.values() for step in steps}
    assert saved(tmp_path, whole=case is train) == without(*lost)
    for rank, raised in enumerate(told):
        for step in lost:  # each rank is told of each failure once
            (text,) = [text for text in raised.values() if f"(step {step}:" in text]
            assert step in fails.get(rank, []) or re.search(r"RankError: .*rank \d failed", text), text


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("on_error", ["raise", "warn"])
@pytest.mark.skipif(not _engine.FAULTS, reason="the engine was built without faults")
def test_a_disk_that_is_full_once_costs_one_checkpoint(
    ranks: Ranks, tmp_path: Path, victim: int, on_error: str
) -> None:
    told = ranks.run(2, train, tmp_path, {}, "", {victim: "allocate:3:ENOSPC"}, on_error)
    assert saved(tmp_path) == without(3)
    for rank, raised in enumerate(told):
        kind = "NoSpaceError" if rank == victim else "RankError"
        texts = [rf"{kind}: .*\(step 3: .*No space left.*; the call that raises this saves step 4 all the same"]
        for step, text in zip([4], texts * (on_error == "raise"), strict=False):
            assert re.fullmatch(text, raised.pop(step))
        assert not raised


def test_a_call_with_bad_arguments_costs_one_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    told = ranks.run(2, train, tmp_path, {1: [3]}, "metrics")
    assert saved(tmp_path) == without(3)
    assert list(told[1]) == [3] and "ConfigError" in told[1][3]
    (text,) = told[0].values()
    assert "rank 1 failed: save: metrics" in text


def test_a_part_that_one_rank_saves_may_be_what_tells_of_a_failure(ranks: Ranks, tmp_path: Path) -> None:
    told = ranks.run(2, train, tmp_path, {1: [3]}, "a part")
    assert saved(tmp_path) == without(3)
    assert sorted(tmp_path.glob("more*.pt")) == [tmp_path / f"more{step}.pt" for step in range(1, STEPS + 1)]
    assert re.search(r"rank 1 failed.*; the call that raises this saves .*step 3", told[0].pop(3)) and not told[0]


def ends(folder: Path, victim: int) -> tuple[str, int]:
    """Does not catch the error."""
    rank, training, failing = dist.get_rank(), Training(dist.get_rank(), 2), Failing()
    step = 0
    try:
        with lazyckpt.Checkpointer(folder, **KNOBS, rank_timeout_s=10.0) as ckpt:
            ckpt.track(model=training.model, optimizer=training.optimizer, clock=training.clock, failing=failing)
            for step in range(1, 5):
                if step < 4:  # the other rank has ended, and training would hang
                    training.step()
                failing.fails = step == 3 and rank == victim
                ckpt.save(step)
                settled(ckpt._saver)
    except lazyckpt.SaveError as error:
        return str(error), step
    raise AssertionError("no call raised")


@pytest.mark.long(first=1)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_failure_that_nobody_catches_ends_training_on_all_ranks(ranks: Ranks, tmp_path: Path, victim: int) -> None:
    told = ranks.run(2, ends, tmp_path, victim)
    for text, _ in told:
        assert "(step 3:" in text
    assert [step for _, step in told] == [3 if rank == victim else 4 for rank in range(2)]
    assert saved(tmp_path) == [1, 2]


# a rank that calls save() more or less often than the others


def other_calls(folder: Path, repeats: list[int], leaves_out: list[int], victim: int) -> list[str]:
    """Rank ``victim`` repeats its call at these steps, and makes none at others."""
    rank = dist.get_rank()
    training, handles = Training(rank, dist.get_world_size()), []
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(waits, "STRAYED_PATIENCE_S", 0.3)
        with lazyckpt.Checkpointer(folder, **KNOBS, rank_timeout_s=10.0, on_error="warn") as ckpt:
            ckpt.track(model=training.model, optimizer=training.optimizer, clock=training.clock)
            for step in range(1, STEPS + 3):
                training.step()
                calls = 1 + (rank == victim and step in repeats) - (rank == victim and step in leaves_out)
                handles += [ckpt.save(step) for _ in range(calls)]
                time.sleep(0.05)  # as training takes, so that a save usually settles before the next
    return [str(error) for handle in handles if (error := handle.exception()) is not None]


@pytest.mark.long(first=3)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("repeats", "leaves_out"), [([3], []), ([], [3]), ([2], [4])], ids=str)
def test_a_call_that_one_rank_repeats_or_leaves_out_costs_few_checkpoints(
    ranks: Ranks, tmp_path: Path, repeats: list[int], leaves_out: list[int], victim: int
) -> None:
    """Regression: no checkpoint was committed any more."""
    for told in ranks.run(2, other_calls, tmp_path, repeats, leaves_out, victim):
        assert told or (victim == 1 and repeats == [3])
    assert {1, STEPS + 1, STEPS + 2} <= set(saved(tmp_path)), saved(tmp_path)


def all_repeat(folder: Path) -> list[str]:
    """All ranks repeat their calls, and leave out others. One of them then goes back."""
    rank = dist.get_rank()
    training, handles = Training(rank, dist.get_world_size()), []
    with lazyckpt.Checkpointer(folder, **KNOBS, rank_timeout_s=10.0) as ckpt:
        ckpt.track(model=training.model, optimizer=training.optimizer, clock=training.clock)
        for step in (1, 1, 2, 5, 5, 5):
            while training.tick < step:
                training.step()
            handles.append(ckpt.save(step))
        for handle in handles:
            handle.result()
        assert ckpt.restore(step=2) == 2
        training.step()
        return [handle.result().name for handle in (*handles, ckpt.save(3))]


def test_calls_that_all_ranks_repeat_are_saves_like_others(ranks: Ranks, tmp_path: Path) -> None:
    names = [f"step-{step:08d}" for step in (1, 1, 2, 5, 5, 5, 3)]
    assert ranks.run(2, all_repeat, tmp_path) == [names] * 2
    assert saved(tmp_path) == [1, 2, 3, 5]
