"""Which checkpoints of the Trainer stay, and which is the best: in one process, and in two."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch

for name in ("transformers", "accelerate", "safetensors"):
    pytest.importorskip(name)

os.environ["HF_HUB_OFFLINE"] = "1"

import transformers  # noqa: E402
from small_trainers import NAMES_BEST, At, arguments, bert, checkpoints, data, lazy, trainer_of  # noqa: E402
from transformers import Trainer, TrainerCallback  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

import lazyckpt  # noqa: E402
from lazyckpt.integrations.transformers_staging import STAGING  # noqa: E402
from trainers import FolderDisk, contents, forget_accelerators, ranks  # noqa: E402

pytestmark = pytest.mark.usefixtures("small_tensors_are_lazy")
Graph = Callable[[Any], Any]


def test_an_old_checkpoint_stays_until_the_new_one_is_durable(tmp_path: Path, folder_disk: FolderDisk) -> None:
    seen: list[list[str]] = []
    look = At("on_step_begin", 4, lambda: (seen.append(checkpoints(tmp_path)), folder_disk.free.set()))
    callback = lazy()
    hold = At("on_step_begin", 3, lambda: (wait([callback.newest]), folder_disk.free.clear()))
    trainer_of(tmp_path, callback, hold, look, max_steps=6, save_total_limit=1).train()
    assert [name for name in seen[0] if name != STAGING] == ["checkpoint-2"]
    assert checkpoints(tmp_path) == ["checkpoint-6"]


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_an_old_checkpoint_stays_if_the_new_one_fails(on_error: str, tmp_path: Path, folder_disk: FolderDisk) -> None:
    folder_disk.fails_at = {"checkpoint-4"}
    announced = []

    class Announced(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            announced.append(state.global_step)

    with pytest.raises(lazyckpt.SaveError, match="step 4") if on_error == "raise" else pytest.warns(match="step 4"):
        trainer_of(tmp_path, lazy(on_error=on_error), Announced(), max_steps=4, save_total_limit=1).train()
    assert checkpoints(tmp_path) == ["checkpoint-2"]
    assert announced == [2]


class Scripted(Trainer):  # type: ignore[misc]
    """Evaluates, and then says what the test wants: step 4 is the best."""

    SCORES: dict[int, float] = {2: 3.0, 4: 1.0, 6: 2.0, 8: 4.0}  # noqa: RUF012

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = super().evaluate(*args, **kwargs)
        return {**metrics, "eval_score": self.SCORES[self.state.global_step]}


BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "score",
    "greater_is_better": False,
}


@pytest.mark.parametrize(("strategy", "limit"), [("steps", 1), pytest.param("best", 2, marks=NAMES_BEST)])
def test_the_best_model_is_kept_and_loaded(
    strategy: str,
    limit: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    folder_disk: FolderDisk,
    graph: Graph,
) -> None:
    folder_disk.publish_s = 0.05

    def run(name: str, *callbacks: TrainerCallback) -> Trainer:
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        options = arguments("out", save_strategy=strategy, save_total_limit=limit, **BEST)
        trainer = Scripted(bert(), options, train_dataset=data(), eval_dataset=data()[:4], callbacks=list(callbacks))
        trainer.train()
        return trainer

    eager, ours = run("eager"), run("lazy", lazy())
    assert ours.state.best_model_checkpoint == eager.state.best_model_checkpoint == os.path.join("out", "checkpoint-4")
    assert graph(ours.model.state_dict()) == graph(eager.model.state_dict())
    folders = [tmp_path / name / "out" for name in ("eager", "lazy")]
    assert checkpoints(folders[1]) == checkpoints(folders[0])
    for name in checkpoints(folders[0]):
        states = [contents(folder / name, graph)["trainer_state.json"] for folder in folders]
        assert states[1] == states[0]


@pytest.mark.parametrize("limit", [1, 2])
def test_whenever_the_process_ends_the_last_checkpoint_and_the_best_that_it_names_are_there(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder_disk: FolderDisk
) -> None:
    folder_disk.publish_s = 0.05
    looked: list[str] = []
    in_place: list[str] = []
    rename, rmtree = os.rename, shutil.rmtree

    def looking(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            last = get_last_checkpoint(str(tmp_path))
            if last is not None:
                best = json.loads(Path(last, "trainer_state.json").read_text())["best_model_checkpoint"]
                assert Path(last, "optimizer.pt").exists() and Path(best, "model.safetensors").exists()
                looked.append(last)
            return result

        return call

    def removed(path: Any, *args: Any, **kwargs: Any) -> None:
        if Path(path).name.startswith("checkpoint-"):
            in_place.append(path)
        rmtree(path, *args, **kwargs)

    monkeypatch.setattr(os, "rename", looking(rename))
    monkeypatch.setattr(shutil, "rmtree", removed)
    options = arguments(tmp_path, save_total_limit=limit, **BEST)
    Scripted(bert(), options, train_dataset=data(), eval_dataset=data()[:4], callbacks=[lazy(on_error="raise")]).train()
    assert len(set(looked)) >= 4 and in_place == []


@pytest.mark.parametrize("best", [True, False], ids=["_load_best_model", "_load_from_checkpoint"])
def test_training_can_go_back_to_a_checkpoint_at_once(
    best: bool, tmp_path: Path, folder_disk: FolderDisk, graph: Graph
) -> None:
    """As callbacks do when the loss has jumped."""
    folder_disk.publish_s = 0.2
    states = []

    class GoBack(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5 and best:
                state.best_model_checkpoint = str(tmp_path / "checkpoint-4")
                trainer._load_best_model()
            elif state.global_step == 5:
                trainer._load_from_checkpoint(str(tmp_path / "checkpoint-4"))
            if state.global_step in (4, 5):
                states.append(graph(trainer.model.state_dict()))

    trainer = trainer_of(tmp_path, lazy(), GoBack(), max_steps=5)
    trainer.train()
    assert states[1] == states[0]


def test_the_best_model_is_found_again_after_the_folder_was_moved(tmp_path: Path) -> None:
    def trainer_in(folder: Path, steps: int) -> Trainer:
        evaluated = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score"}
        options = arguments(folder, max_steps=steps, greater_is_better=False, **evaluated)
        return Scripted(bert(), options, train_dataset=data(), eval_dataset=data()[:4], callbacks=[lazy()])

    trainer_in(tmp_path / "old", 4).train()
    (tmp_path / "old").rename(tmp_path / "new")
    resumed = trainer_in(tmp_path / "new", 6)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.best_model_checkpoint == str(tmp_path / "new" / "checkpoint-4")


# Several processes


def train_in_two_processes(folder: str) -> None:
    """Each rank leaves what it ended with."""
    forget_accelerators()
    options = arguments(
        folder,
        ddp_backend="gloo",
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=False,
        save_total_limit=2,
    )
    trainer = Scripted(bert(), options, train_dataset=data(), eval_dataset=data()[:4], callbacks=[lazy()])
    if options.process_index == 1:  # long after rank 0
        save_rng_state = trainer._save_rng_state

        def slowly(output_dir: str) -> None:
            time.sleep(0.3)
            save_rng_state(output_dir)

        trainer._save_rng_state = slowly
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if os.path.isdir(folder) else None)
    result = trainer.model.state_dict(), trainer.state.best_model_checkpoint, trainer.state.global_step
    torch.save(result, f"{folder}-rank{options.process_index}.pt")


def test_two_ranks_save_one_folder(tmp_path: Path, graph: Graph) -> None:
    folder = tmp_path / "out"
    for rank in ranks(lambda: train_in_two_processes(str(folder)), tmp_path):
        assert rank.wait() == 0, rank.output.read_text()
    assert checkpoints(folder) == ["checkpoint-4", "checkpoint-8"]
    names = set(os.listdir(folder / "checkpoint-8"))
    assert {"model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"} <= names
    ended = [torch.load(f"{folder}-rank{rank}.pt") for rank in (0, 1)]
    assert graph(ended[0]) == graph(ended[1])
    assert ended[0][1:] == (str(folder / "checkpoint-4"), 8)
    best = transformers.BertForMaskedLM.from_pretrained(folder / "checkpoint-4")
    assert graph(best.state_dict()) == graph(ended[1][0])
