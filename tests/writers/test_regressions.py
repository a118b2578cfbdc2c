"""Regressions: ways in which a checkpoint was once not of one instant, beyond what every writer is tried with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from writers.judge import Copies, judge
from writers.registry import KIB, REGISTRY
from writers.trial import HELD, Plan, Round, Trial, witnesses

pytestmark = pytest.mark.filterwarnings("ignore:checkpoint not saved")
WITNESSES = witnesses()
SMALL_RING = {"chunk_bytes": 64 * KIB, "host_buffer_bytes": 128 * KIB}
each_witness = pytest.mark.parametrize("witness", WITNESSES)


def knobs(witness: str) -> dict[str, Any]:
    return {**SMALL_RING, "witness": witness}


def again(instant: str, times: int) -> tuple[Round, ...]:
    return (Round(1, instant),) * times


@each_witness
def test_an_in_place_kernel_that_runs_while_the_copies_are_made(witness: str, trial: Trial) -> None:
    """It takes 50 ms without the GIL, and moves the version when it has ended."""
    for seed in range(4):
        trial.run(Plan("normal_", witness, size="large", rounds=again("at once", 1), seed=seed))


@each_witness
def test_a_pre_hook_that_writes_before_the_closure(witness: str, trial: Trial) -> None:
    assert trial.run(Plan("step pre-hook, with a closure", witness, rounds=again(HELD, 3))) == {"committed": 3}


@each_witness
@pytest.mark.parametrize("name", ["Embedding(max_norm)", "schedule-free"])
def test_a_writer_that_comes_after_every_save(name: str, witness: str, trial: Trial) -> None:
    """No run ends without a checkpoint."""
    if reason := REGISTRY[name].unavailable():
        pytest.skip(reason)
    assert trial.run(Plan(name, witness, rounds=again(HELD, 3))) == {"committed": 3}


@each_witness
def test_saves_on_one_thread_and_steps_on_another(witness: str, trial: Trial) -> None:
    for seed in range(4):
        trial.run(Plan("steps on another thread", witness, size="large", rounds=(Round(0, HELD),) * 4, seed=seed))


@each_witness
def test_views_that_overlap_do_not_fill_a_storage(witness: str, copies: Copies, tmp_path: Path) -> None:
    """Two parameters are the same half of a storage; the other half is a buffer, which changes in forward."""
    whole = torch.ones(200_000)
    first, second = (torch.nn.Parameter(whole[at : at + 100_000]) for at in (0, 1))
    last = whole[100_001:]
    optimizer = torch.optim.SGD([first, second], lr=0.01)

    def train() -> None:
        first.grad, second.grad = torch.ones_like(first), torch.ones_like(second)
        optimizer.step()

    with lazyckpt.Checkpointer(tmp_path, **knobs(witness)) as ckpt:
        ckpt.track(state={"whole": whole}, optimizer=optimizer)
        train()
        ckpt.save(1).result()
        train()
        expected = {"state.whole": whole.clone()}
        copies.hold(at_most_s=0.2)
        handle = ckpt.save(2)
        copies.release(after_s=0.02)
        last.data.fill_(2.0)

        def read(path: Path) -> dict[str, Any]:
            return {"state.whole": torch.load(path / "state.pt")["state"]["whole"]}

        judge(handle, read, expected, lambda: {"state.whole": whole})
