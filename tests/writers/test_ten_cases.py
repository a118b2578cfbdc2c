"""The ten ways in which a checkpoint was once not of one instant, or was lost: each stands for a class."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from writers.judge import Copies, judge
from writers.registry import KIB, ONLY_PAGES, REGISTRY
from writers.trial import HELD, Plan, Round, Trial, witnesses

pytestmark = pytest.mark.filterwarnings("ignore:checkpoint not saved")
WITNESSES = witnesses()
IDS = [w or "no knob" for w in WITNESSES]
SMALL_RING = {"chunk_bytes": 64 * KIB, "host_buffer_bytes": 128 * KIB}
each_witness = pytest.mark.parametrize("witness", WITNESSES, ids=IDS)


def knobs(witness: str | None) -> dict[str, Any]:
    return SMALL_RING if witness is None else {**SMALL_RING, "witness": witness}


def again(instant: str, times: int) -> tuple[Round, ...]:
    return (Round(1, instant),) * times


@each_witness
def test_1_an_in_place_kernel_that_runs_while_the_copies_are_made(witness: str | None, trial: Trial) -> None:
    """It takes 50 ms without the GIL, and moves the version when it has ended."""
    for seed in range(4):
        trial.run(Plan("normal_", witness, size="large", rounds=again("at once", 1), seed=seed))


@each_witness
def test_2_a_pre_hook_that_writes_before_the_closure(witness: str | None, trial: Trial) -> None:
    assert trial.run(Plan("step pre-hook, with a closure", witness, rounds=again(HELD, 3))) == {"committed": 3}


@each_witness
@pytest.mark.parametrize("name", ["momentum encoder, in place", "momentum encoder, by assignment", "gradient hook"])
def test_3_parameters_of_an_optimizer_that_others_update(name: str, witness: str | None, trial: Trial) -> None:
    trial.run(Plan(name, witness, rounds=again(HELD, 3)))


@each_witness
@pytest.mark.parametrize("name", ["Embedding(max_norm)", "schedule-free"])
def test_4_a_writer_that_comes_after_every_save(name: str, witness: str | None, trial: Trial) -> None:
    """No run ends without a checkpoint."""
    if reason := REGISTRY[name].unavailable():
        pytest.skip(reason)
    assert trial.run(Plan(name, witness, rounds=again(HELD, 3))) == {"committed": 3}


@each_witness
def test_5_weights_that_were_swapped_by_pointer(witness: str | None, trial: Trial) -> None:
    trial.run(Plan("EMA by swap", witness, rounds=again(HELD, 3)))


def test_6_retention_after_a_restore_from_elsewhere(tmp_path: Path) -> None:
    """It leaves the newest checkpoints of the folder, whichever line they belong to."""
    weight = torch.arange(10.0)
    with lazyckpt.Checkpointer(tmp_path / "elsewhere") as ckpt:
        ckpt.track(state={"weight": weight})
        elsewhere = ckpt.save(100).result()
    with lazyckpt.Checkpointer(tmp_path / "run", keep_last=3) as ckpt:
        ckpt.track(state={"weight": weight})
        for step in (1, 2, 3):
            ckpt.save(step).result()
    with lazyckpt.Checkpointer(tmp_path / "run", keep_last=3) as ckpt:
        ckpt.track(state={"weight": weight})
        assert ckpt.restore(path=elsewhere) == 100
        ckpt.save(101).result()
    kept = sorted(path.name for path in (tmp_path / "run").glob("step-*"))
    assert kept[-3:] == ["step-00000002", "step-00000003", "step-00000101"]


REENTRY = """
import faulthandler, signal, sys, torch, lazyckpt
faulthandler.dump_traceback_later(20, exit=True)
ckpt = lazyckpt.Checkpointer(sys.argv[1], chunk_bytes=4096, host_buffer_bytes=8192)
state = {str(i): torch.full((20_000,), float(i)) for i in range(50)}
ckpt.track(state=state)
answers = []

def save_again(*_):
    try:
        answers.append(ckpt.save(2))
    except lazyckpt.LazyCkptError as error:
        answers.append(error)

signal.signal(signal.SIGALRM, save_again)
for round in range(30):  # until the signal comes inside of save()
    signal.setitimer(signal.ITIMER_REAL, 0.002 + round * 0.0005)
    path = ckpt.save(1).result()
    signal.setitimer(signal.ITIMER_REAL, 0)
    for answer in answers:
        if isinstance(answer, Exception):
            assert "save" in str(answer), answer
        else:
            answer.result()
saved = torch.load(path / "state.pt")["state"]
assert all(torch.equal(saved[name], value) for name, value in state.items())
ckpt.close()
assert answers, "no signal came"
print("done")
"""


def test_7_a_signal_handler_that_saves_inside_of_save(tmp_path: Path) -> None:
    """The state is 500 times the ring: the outer save holds it, and waits for room."""
    script = tmp_path / "reentry.py"
    script.write_text(REENTRY)
    ran = subprocess.run([sys.executable, script, tmp_path / "run"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and "done" in ran.stdout, ran.stdout + ran.stderr


@each_witness
def test_8_saves_on_one_thread_and_steps_on_another(witness: str | None, trial: Trial) -> None:
    for seed in range(4):
        trial.run(Plan("steps on another thread", witness, size="large", rounds=(Round(0, HELD),) * 4, seed=seed))


@each_witness
def test_9_views_that_overlap_do_not_fill_a_storage(witness: str | None, copies: Copies, tmp_path: Path) -> None:
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


@each_witness
@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_10_a_collective_into_the_weights(name: str, witness: str | None, trial: Trial) -> None:
    """Where only versions are read, the documentation says that nobody sees it."""
    if witness not in ONLY_PAGES and witness is not None:
        pytest.skip("versions do not see it: it is in the documentation's table")
    if reason := REGISTRY[name].unavailable():
        pytest.skip(reason)
    trial.run(Plan(name, witness, rounds=again(HELD, 2)))
