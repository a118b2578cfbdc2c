"""Runs of the Trainer that are killed or terminated: what they leave, and how they are resumed."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

for name in ("transformers", "accelerate", "safetensors"):
    pytest.importorskip(name)

os.environ["HF_HUB_OFFLINE"] = "1"

import transformers  # noqa: E402
from small_trainers import JUST_IN_TIME, At, checkpoints, lazy, trainer_of  # noqa: E402
from transformers import Trainer, TrainerCallback  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

import lazyckpt  # noqa: E402
from lazyckpt.integrations.transformers_staging import STAGING  # noqa: E402
from lazyckpt.storage import commit, hidden  # noqa: E402
from trainers import FolderDisk, Forked  # noqa: E402

pytestmark = pytest.mark.usefixtures("small_tensors_are_lazy")
Graph = Callable[[Any], Any]


# Killed


def final_state(trainer: Trainer, graph: Graph) -> Any:
    inner = trainer.optimizer.optimizer
    return graph([trainer.model.state_dict(), inner.state_dict(), trainer.lr_scheduler.state_dict()])


def train_and_die(folder: str) -> None:
    """Run in a process of its own: killed when checkpoint-6 is written, but not published."""
    publish = commit.Staging.publish

    def deadly(self: commit.Staging) -> Any:
        if self.target.name == "checkpoint-6":
            os.kill(os.getpid(), signal.SIGKILL)
        return publish(self)

    commit.Staging.publish = deadly  # type: ignore[method-assign]
    trainer_of(folder, lazy()).train()


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a killed run. Copy it: several tests go on from it."""
    folder = tmp_path_factory.mktemp("killed")
    died = Forked(lambda: train_and_die(str(folder)), folder.with_name("output"))
    assert died.wait() == -signal.SIGKILL, died.output.read_text()
    return folder


def test_a_killed_run_resumes_bit_for_bit(killed_run: Path, tmp_path: Path, graph: Graph) -> None:
    whole = trainer_of(tmp_path / "whole", lazy())
    whole.train()
    killed = Path(shutil.copytree(killed_run, tmp_path / "killed"))
    (leftover,) = (killed / STAGING / "staged").glob(".tmp-checkpoint-6-*")
    assert (leftover / "model.safetensors").exists() and (leftover / "trainer_state.json").exists()
    assert checkpoints(killed) == [STAGING, "checkpoint-2", "checkpoint-4"]
    assert get_last_checkpoint(str(killed)) == str(killed / "checkpoint-4")

    transformers.set_seed(999)
    resumed = trainer_of(killed, lazy())
    resumed.train(resume_from_checkpoint=True)
    assert final_state(resumed, graph) == final_state(whole, graph)
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (whole, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    assert checkpoints(killed) == ["checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-8"]


def test_a_run_that_never_saves_removes_what_a_killed_one_left(killed_run: Path, tmp_path: Path) -> None:
    """Regression: the staged checkpoint of a killed run stayed until the next run saved, or for good."""
    killed = Path(shutil.copytree(killed_run, tmp_path / "killed"))
    found: list[list[str]] = [checkpoints(killed)]
    look = At("on_step_begin", 0, lambda: found.append(checkpoints(killed)))
    trainer_of(killed, lazy(), look, max_steps=1, save_strategy="no").train()
    assert STAGING in found[0] and found[1] == checkpoints(killed) == ["checkpoint-2", "checkpoint-4"]


def test_the_newest_folder_of_a_killed_run_is_its_last_checkpoint(killed_run: Path, tmp_path: Path) -> None:
    """For those who do not ask get_last_checkpoint. ctime does not survive a copy."""
    dirs = sorted((f.path for f in os.scandir(killed_run) if f.is_dir()), key=os.path.getctime)
    assert dirs[-1] == str(killed_run / "checkpoint-4") and str(killed_run / STAGING) in dirs
    trainer = trainer_of(tmp_path, lazy())
    for name in (killed_run / STAGING, *(killed_run / STAGING / "staged").iterdir()):
        with pytest.raises(lazyckpt.LoadError, match=f"the newest whole one is {killed_run}/checkpoint-4"):
            trainer.train(resume_from_checkpoint=str(name))


def test_what_a_live_run_stages_is_left_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def publish_when_told(self: commit.Staging) -> Any:
        if self.target.name == "checkpoint-2":
            while not (tmp_path / "go on").exists():
                time.sleep(0.01)
        return publish(self)

    def train() -> None:
        commit.Staging.publish = publish_when_told  # type: ignore[method-assign]
        trainer_of(run, lazy()).train()

    publish = commit.Staging.publish
    live = Forked(train, tmp_path / "output")
    end = time.monotonic() + 60
    while not (found := list(run.glob(f"{STAGING}/staged/.tmp-checkpoint-2-*/model.safetensors"))):
        assert time.monotonic() < end, live.output.read_text()
        time.sleep(0.01)
    trainer_of(run, lazy(), max_steps=3, save_steps=3).train()
    assert found[0].exists()
    (tmp_path / "go on").touch()
    assert live.wait() == 0, live.output.read_text()
    assert checkpoints(run) == [f"checkpoint-{step}" for step in (2, 3, 4, 6, 8)]


@pytest.mark.parametrize("when", ["before a save", "before the sync"])
def test_another_run_that_ends_takes_the_empty_staging_folder_away(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the next save of the live run failed, since it made the folder only once; or a checkpoint that was
    renamed out of it, since it could not be synced."""
    callback = lazy()
    rename = os.rename
    taken = []

    def take_away() -> None:
        hidden.remove(hidden.place(tmp_path, STAGING))  # unless this run did
        assert STAGING not in os.listdir(tmp_path)
        taken.append(1)

    class Another(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            callback.wait()
            if when == "before a save" and state.global_step % 2 == 0 and state.global_step > 0:
                take_away()

    def rename_and_take_away(old: Any, new: Any) -> None:
        rename(old, new)
        if when == "before the sync" and Path(old).parent == tmp_path / STAGING / "staged":
            take_away()

    monkeypatch.setattr(os, "rename", rename_and_take_away)
    trainer_of(tmp_path, callback, Another()).train()
    assert len(taken) >= 3
    assert checkpoints(tmp_path) == [f"checkpoint-{step}" for step in (2, 4, 6, 8)]


# SIGTERM


@JUST_IN_TIME
def test_a_just_in_time_checkpoint_is_durable_at_once(tmp_path: Path, folder_disk: FolderDisk, graph: Graph) -> None:
    callback = lazy()
    folder_disk.publish_s = 0.2
    trainer = trainer_of(tmp_path, callback, enable_jit_checkpoint=True, save_steps=100)
    jit = next(c for c in trainer.callback_handler.callbacks if type(c).__name__ == "JITCheckpointCallback")
    jit.jit_manager.kill_wait = 0
    execute = jit.jit_manager.execute_jit_checkpoint
    done: list[Any] = []

    def executed() -> None:
        execute()
        done.append((callback.newest.done(), callback.newest.step, checkpoints(tmp_path)))

    def terminate() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        while not jit.jit_manager.is_checkpoint_requested:
            time.sleep(0.01)

    jit.jit_manager.execute_jit_checkpoint = executed
    trainer.add_callback(At("on_step_end", 2, terminate))
    trainer.train()
    step = trainer.state.global_step
    assert step < 8
    assert done[0][0] is True
    name = f"checkpoint-{done[0][1]}"
    assert name in done[0][2]
    assert folder_disk.existed[0] is False  # the folder with the sentinel was gone while ours was written
    assert "checkpoint-is-incomplete.txt" not in os.listdir(tmp_path / name)
    resumed = trainer_of(tmp_path, lazy())
    resumed.train(resume_from_checkpoint=str(tmp_path / name))
    assert resumed.state.global_step == 8


def train_until_terminated(folder: str) -> None:
    """In another process, with a Trainer as it is by default: without a handler for SIGTERM."""

    def slowly(staging: commit.Staging) -> Path | None:
        time.sleep(0.5)
        return publish(staging)

    def terminate() -> None:
        Path(f"{folder}-then").write_text(" ".join(checkpoints(folder)))
        os.kill(os.getpid(), signal.SIGTERM)

    publish, commit.Staging.publish = commit.Staging.publish, slowly  # type: ignore[method-assign]
    lazyckpt.commit_on(signal.SIGTERM)
    trainer_of(folder, lazy(), At("on_step_end", 3, terminate), max_steps=100_000).train()


def test_at_sigterm_commit_on_commits_what_was_saved(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    died = Forked(lambda: train_until_terminated(str(folder)), tmp_path / "output")
    assert died.wait() == -signal.SIGTERM, died.output.read_text()
    assert "checkpoint-2" not in Path(f"{folder}-then").read_text().split(), "it was in flight"
    resumed = trainer_of(folder, lazy(), max_steps=4)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert resumed.state.global_step == 4
