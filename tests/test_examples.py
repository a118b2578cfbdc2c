"""The examples run as their docstrings say, and what they claim is so."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from processes import spawn

import lazyckpt

EXAMPLES = Path(__file__).parents[1] / "examples"
DEEPSPEED = os.path.join(sys.prefix, "deepspeed")  # tests/requirements-deepspeed.txt
STEPS, EVERY = 7, 2


def test_custom_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["custom_provider.py", str(folder)])
    runpy.run_path(str(EXAMPLES / "custom_provider.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "bytes copied before save() returned" in shown and "the next 64 samples are the same" in shown
    (checkpoint,) = folder.iterdir()
    replay = torch.load(checkpoint / "state.pt")["replay"]
    # 1000 places, 1199 pairs: the first 199 places were written twice. -1 is what was written after save().
    assert replay["added"] == 1199
    assert replay["worth"].tolist() == [*range(1001, 1200), *range(200, 1001)]
    assert bool((replay["seen"] != -1).any(dim=1).all())


@pytest.fixture
def tiny_gpt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """examples/train_gpt.py as a module, its model and its run made small."""
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLES / "train_gpt.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    small = {"STEPS": STEPS, "EVERY": EVERY, "LAYERS": 1, "WIDTH": 32, "HEADS": 2, "BATCH": 2, "CONTEXT": 16}
    for name, value in small.items():
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, value)
    return module


class _Stopped(Exception):
    pass


def test_training_stopped_between_two_checkpoints_resumes_bit_for_bit(tiny_gpt: ModuleType, tmp_path: Path) -> None:
    def losses(folder: str, stop_after: int = STEPS) -> dict[int, float]:
        found = {}

        def log(**entry: Any) -> None:
            if "step" in entry:
                found[entry["step"]] = entry["loss"]
                if entry["step"] == stop_after < STEPS:
                    raise _Stopped

        with contextlib.suppress(_Stopped):
            tiny_gpt.train(tmp_path / folder, log)
        return found

    with torch.random.fork_rng():
        whole = losses("whole")
        stopped = losses("stopped", stop_after=5)
        resumed = losses("stopped")
    assert sorted(whole) == list(range(1, STEPS + 1))
    assert sorted(stopped) == [1, 2, 3, 4, 5]
    assert sorted(resumed) == [5, 6, 7]  # from the checkpoint of step 4
    assert {**stopped, **resumed} == whole and stopped[5] == resumed[5]
    last = lazyckpt.load(tmp_path / "stopped" / "step-00000006")
    assert set(last) == {"model", "optimizer", "scheduler", "loader", "rng"}


Shown = Callable[..., str]


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    """A function that runs an example, and returns what it and its ranks print. Forks need not import torch anew."""

    def run(script: str, *arguments: object, torchrun: bool = False) -> str:
        output = tmp_path / "output"
        output.write_text("")
        if torchrun:
            spawn(output, on_rank, (free_port(), str(EXAMPLES / script), *map(str, arguments)), nprocs=2)
            return output.read_text()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [script, *map(str, arguments)])
            patch.setattr(torch.multiprocessing, "spawn", functools.partial(spawn, output))
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return output.read_text() + capsys.readouterr().out

    return run


def free_port() -> int:
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port


def on_rank(rank: int, port: int, script: str, *arguments: str) -> None:
    """Runs a script as torchrun does, with DeepSpeed on the path."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = [script, *arguments]
    sys.path.append(DEEPSPEED)
    runpy.run_path(script, run_name="__main__")


@pytest.mark.long
def test_train_fsdp(tmp_path: Path, run_here: Shown) -> None:
    folder = tmp_path / "run"
    shown = run_here("train_fsdp.py", folder)
    assert "1 rank(s) go on from step 12" in shown
    assert "step-00000015: .metadata, __0_0.distcp, manifest.json" in shown
    assert sorted(path.name for path in (folder / "step-00000012").iterdir()) == [
        ".lazyckpt-lock", ".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"
    ]  # fmt: skip


def run_on_ranks(run_here: Shown, script: str, folder: Path, steps: int) -> str:
    if script.startswith("torchtitan"):
        pytest.importorskip("torchtitan", reason="it needs Python 3.11")
    if script.startswith("deepspeed") and not os.path.isdir(DEEPSPEED):
        pytest.skip("make setup has not installed DeepSpeed")
    if script.startswith("deepspeed"):
        shown = run_here(script, folder, steps, torchrun=True)
    elif script.startswith("lightning"):  # it starts its ranks itself
        command = [sys.executable, str(EXAMPLES / script), str(folder), str(steps)]
        shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200).stdout
    else:
        shown = run_here(script, folder, steps)
    assert list(folder.rglob(FILES.get(script, ".metadata")))
    return shown


FILES = {
    "deepspeed_zero.py": "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "lightning_ddp.py": "*.ckpt",
    "accelerate_ddp.py": "model.safetensors",
    "hf_trainer_ddp.py": "model.safetensors",
}
ON_RANKS = {
    "lightning_fsdp.py": "step 6: loss",
    "lightning_ddp.py": "step 6: loss",
    "accelerate_fsdp.py": "goes on from step 6",
    "accelerate_ddp.py": "goes on from step 6",
    "hf_trainer_ddp.py": "goes on from step 6",
    "torchtitan_gpt.py": "goes on from step 6",
    "deepspeed_zero.py": "goes on from step 6",
}


IMPORTS_LONG = ("hf_trainer_ddp.py",)  # each rank imports transformers anew


@pytest.mark.long
@pytest.mark.parametrize(
    "script", [pytest.param(s, marks=pytest.mark.slow) if s in IMPORTS_LONG else s for s in ON_RANKS]
)
def test_training_on_two_ranks_in_a_trainer(script: str, tmp_path: Path, run_here: Shown) -> None:
    assert "step 3: loss" in run_on_ranks(run_here, script, tmp_path / "run", 6)


@pytest.mark.slow
@pytest.mark.parametrize(("script", "resumed"), ON_RANKS.items())
def test_training_on_two_ranks_in_a_trainer_goes_on_where_it_ended(
    script: str, resumed: str, tmp_path: Path, run_here: Shown
) -> None:
    run_on_ranks(run_here, script, tmp_path / "run", 6)
    again = run_on_ranks(run_here, script, tmp_path / "run", 9)
    assert resumed in again and "step 0: loss" not in again and "step 3: loss" not in again
