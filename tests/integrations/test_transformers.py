"""The Trainer, saving lazily: the same files, whole or absent, and what the Trainer makes of them."""

from __future__ import annotations

import errno
import io
import json
import os
import runpy
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch

for name in ("transformers", "accelerate", "safetensors"):
    pytest.importorskip(name)

os.environ["HF_HUB_OFFLINE"] = "1"

import safetensors  # noqa: E402
import safetensors.torch  # noqa: E402
import transformers  # noqa: E402
from duplicates import DUPLICATES  # noqa: E402
from small_trainers import SMALL_RING, At, arguments, bert, checkpoints, data, lazy, lora, trainer_of  # noqa: E402
from transformers import Trainer, TrainerCallback  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

import lazyckpt  # noqa: E402
from lazyckpt.integrations.transformers import LazyCheckpointCallback, LazyCheckpointTrainerMixin  # noqa: E402
from lazyckpt.integrations.transformers_staging import STAGING  # noqa: E402
from lazyckpt.pipeline import background  # noqa: E402
from lazyckpt.storage import commit, hidden  # noqa: E402
from trainers import Forked, contents, forget_accelerators, ranks  # noqa: E402

pytestmark = pytest.mark.usefixtures("small_tensors_are_lazy")
Graph = Callable[[Any], Any]


# Small models, a small data set, short runs


def mixtral() -> Any:
    """Its experts are one tensor in memory and many in the file."""
    transformers.set_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.MixtralConfig(vocab_size=512, num_local_experts=4, num_key_value_heads=2, **sizes)
    return transformers.MixtralForCausalLM(config)


class Plain(torch.nn.Module):
    """Not a PreTrainedModel."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(512, 64)
        self.norm = torch.nn.BatchNorm1d(64)  # its buffers change in forward
        self.head = torch.nn.Linear(64, 512)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.norm(self.embedding(input_ids).flatten(0, 1)))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels.flatten())}


def plain() -> Any:
    transformers.set_seed(1)
    return Plain()


class Sharded(transformers.BertForMaskedLM):  # type: ignore[misc]
    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        super().save_pretrained(*args, max_shard_size="100KB", **kwargs)


def sharded() -> Any:
    return Sharded(bert().config)


def frozen() -> Any:
    model = bert()
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[0].requires_grad_(False)
    return model


# Comparisons


def final_state(trainer: Trainer, graph: Graph) -> Any:
    inner = trainer.optimizer.optimizer
    return graph([trainer.model.state_dict(), inner.state_dict(), trainer.lr_scheduler.state_dict()])


# A disk that is slow, held back or full


class Disk:
    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.publish_s = 0.0
        self.fails_at: set[str] = set()
        self.published: list[str] = []
        self.existed: list[bool] = []


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Holds saves back before their files are made: what does not fit into the ring stays uncopied."""
    disk = Disk()
    persist, publish = background.Background._persist, commit.Staging.publish

    def held_persist(self: Any, flight: Any) -> None:
        assert disk.free.wait(60), "a test forgot to release the disk"
        persist(self, flight)

    def slow_publish(self: commit.Staging) -> Any:
        time.sleep(disk.publish_s)
        if self.target.name in disk.fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        disk.existed.append(self.target.exists())
        result = publish(self)
        disk.published.append(self.target.name)
        return result

    monkeypatch.setattr(background.Background, "_persist", held_persist)
    monkeypatch.setattr(commit.Staging, "publish", slow_publish)
    yield disk
    disk.free.set()


# The files


@pytest.mark.parametrize(
    ("model", "options"),
    [*((model, {}) for model in (bert, plain, sharded, mixtral, lora, frozen)), (bert, {"save_only_model": True})],
)
def test_a_lazy_run_leaves_what_the_trainer_leaves(
    model: Callable[[], Any], options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graph: Graph
) -> None:
    (tmp_path / "lazy").mkdir()
    (tmp_path / "eager").mkdir()
    monkeypatch.chdir(tmp_path / "eager")
    trainer_of("out", model=model, max_steps=4, **options).train()
    monkeypatch.chdir(tmp_path / "lazy")
    trainer_of("out", lazy(), model=model, max_steps=4, **options).train()
    eager, ours = tmp_path / "eager" / "out", tmp_path / "lazy" / "out"
    assert checkpoints(ours) == checkpoints(eager) == ["checkpoint-2", "checkpoint-4"]
    for name in checkpoints(eager):
        expected, found = contents(eager / name, graph), contents(ours / name, graph)
        assert found.keys() == expected.keys()
        for file in expected:
            assert found[file] == expected[file], file


@pytest.mark.parametrize("options", [{}, {"save_only_model": True}, {"save_strategy": "no"}])
def test_the_first_step_prepares_the_staging_buffer(options: dict[str, Any], tmp_path: Path) -> None:
    """For both moments, too; not where nothing is saved, or only the model."""
    callback = lazy(host_buffer_bytes="auto")
    sizes: list[int] = []
    look = At("on_step_end", 1, lambda: sizes.append(callback._saver.engine.ring_bytes))
    trainer = trainer_of(tmp_path, callback, look, max_steps=2, **options)
    parameters = sum(p.nbytes for p in trainer.model.parameters())
    trainer.train()
    assert (sizes[0] > 3 * parameters) == (not options)


def copied(obj: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("model", [bert, frozen])
def test_a_lazy_checkpoint_is_what_torch_would_have_saved_at_that_step(
    model: Callable[[], Any], tmp_path: Path, disk: Disk, graph: Graph
) -> None:
    callback = lazy()
    expected: dict[int, Any] = {}
    late: list[bool] = []

    class Referenced(Trainer):  # type: ignore[misc]
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            expected[self.state.global_step] = copied([self.model.state_dict(), self.optimizer.state_dict()])
            disk.free.clear()
            super()._save_checkpoint(model, trial)

        def _finalize_training(self, *args: Any) -> Any:
            disk.free.set()
            return super()._finalize_training(*args)

    def release() -> None:  # forward and backward are done, the step is next
        if not disk.free.is_set():
            late.append(not callback.newest.wait_captured(0))
            threading.Timer(0.05, disk.free.set).start()

    steps = [At("on_pre_optimizer_step", step, release) for step in range(8)]
    trainer_of(tmp_path, callback, *steps, model=model, cls=Referenced, max_steps=7).train()
    assert late == [True] * 3  # each was copied under the computation that followed it
    for step, (weights, optimizer) in expected.items():
        folder = tmp_path / f"checkpoint-{step}"
        loaded = model().from_pretrained(folder).state_dict()
        assert graph(loaded) == graph(weights)
        assert graph(torch.load(folder / "optimizer.pt", weights_only=True)) == graph(optimizer)
    assert sorted(expected) == [2, 4, 6, 7]
    if model is bert:
        assert callback.newest.metrics.eager_bytes < callback.newest.metrics.bytes / 20


# Resumption


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


# Unfinished checkpoints do not exist


def test_while_it_is_written_a_checkpoint_has_no_name(tmp_path: Path, disk: Disk) -> None:
    from huggingface_hub.utils import filter_repo_objects

    callback = lazy()
    seen: list[Any] = []

    def look() -> None:
        staged = [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")]
        pushed = filter_repo_objects(staged, ignore_patterns=["_*", "checkpoint-*"])  # as Trainer.push_to_hub has it
        seen.extend([len(staged) > 5, get_last_checkpoint(str(tmp_path)), list(pushed)])
        disk.free.set()

    disk.free.clear()
    trainer_of(tmp_path, callback, At("on_step_begin", 2, look), max_steps=3, save_steps=2).train()
    assert seen == [True, None, []]
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-3"]


def test_a_save_that_fails_raises_at_the_next(tmp_path: Path, disk: Disk) -> None:
    callback = lazy()
    disk.fails_at = {"checkpoint-2"}
    trainer = trainer_of(tmp_path, callback, At("on_step_begin", 3, lambda: wait([callback.newest])))
    with pytest.raises(lazyckpt.NoSpaceError, match="step 2"):
        trainer.train()
    assert trainer.state.global_step == 4
    assert checkpoints(tmp_path) == []


def test_an_exception_in_training_leaves_the_checkpoint_whole(tmp_path: Path, disk: Disk) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    disk.publish_s = 0.2
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path, lazy(), At("on_step_begin", 2, stop)).train()
    assert checkpoints(tmp_path) == ["checkpoint-2"]
    resumed = trainer_of(tmp_path, lazy(), max_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3


# Retention and the best model


def test_an_old_checkpoint_stays_until_the_new_one_is_durable(tmp_path: Path, disk: Disk) -> None:
    seen: list[list[str]] = []
    look = At("on_step_begin", 4, lambda: (seen.append(checkpoints(tmp_path)), disk.free.set()))
    callback = lazy()
    hold = At("on_step_begin", 3, lambda: (wait([callback.newest]), disk.free.clear()))
    trainer_of(tmp_path, callback, hold, look, max_steps=6, save_total_limit=1).train()
    assert [name for name in seen[0] if name != STAGING] == ["checkpoint-2"]
    assert checkpoints(tmp_path) == ["checkpoint-6"]


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_an_old_checkpoint_stays_if_the_new_one_fails(on_error: str, tmp_path: Path, disk: Disk) -> None:
    disk.fails_at = {"checkpoint-4"}
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


@pytest.mark.parametrize(("strategy", "limit"), [("steps", 1), ("best", 2)])
def test_the_best_model_is_kept_and_loaded(
    strategy: str, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk, graph: Graph
) -> None:
    disk.publish_s = 0.05

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
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk
) -> None:
    disk.publish_s = 0.05
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
def test_training_can_go_back_to_a_checkpoint_at_once(best: bool, tmp_path: Path, disk: Disk, graph: Graph) -> None:
    """As callbacks do when the loss has jumped."""
    disk.publish_s = 0.2
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


# Consumers of the folder


def test_on_save_and_a_push_come_when_the_folder_is_there(tmp_path: Path, disk: Disk) -> None:
    told: list[Any] = []
    pushed: list[Any] = []

    class Consumer(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            names = os.listdir(os.path.join(args.output_dir, f"checkpoint-{state.global_step}"))
            told.append((state.global_step, {"model.safetensors", "optimizer.pt"} <= set(names)))

    class Pushing(Trainer):  # type: ignore[misc]
        def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
            pushed.append((checkpoint_folder, self.state.global_step, os.path.isdir(checkpoint_folder)))

    disk.publish_s = 0.1
    trainer = trainer_of(tmp_path, Consumer(), lazy(max_in_flight=3), cls=Pushing, save_total_limit=1)
    trainer.args.push_to_hub = True
    trainer.train()
    assert told == [(2, True), (4, True), (6, True), (8, True)]
    assert pushed == [(str(tmp_path / f"checkpoint-{step}"), step, True) for step in (2, 4, 6, 8)]


class Logger(TrainerCallback):  # type: ignore[misc]
    """Like the loggers of report_to."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        self.logged.append(dict(logs))


def test_loggers_are_told_what_checkpoints_cost(tmp_path: Path) -> None:
    logger = Logger()
    trainer = trainer_of(tmp_path, lazy(), logger, eval_strategy="no")
    result = trainer.train()
    entries = [e for e in logger.logged if "checkpoint/step" in e]
    assert [e["checkpoint/step"] for e in entries][-1] == 8
    assert len(entries) >= 2
    for entry in entries:
        assert 0 < entry["checkpoint/blocked_ms"] < 1e3 * result.metrics["train_runtime"]
        assert 0 < entry["checkpoint/durable_s"] < result.metrics["train_runtime"]
    # But the saved state has no times, since runs are compared by it.
    assert [e["step"] for e in trainer.state.log_history if "loss" in e] == list(range(1, 9))
    told = [
        *trainer.state.log_history,
        result.metrics,
        json.loads((tmp_path / "checkpoint-8/trainer_state.json").read_text()),
    ]
    assert "checkpoint/" not in str(told)


def test_an_evaluation_between_saves_gets_no_foreign_metrics(tmp_path: Path) -> None:
    options = arguments(tmp_path, max_steps=6, save_steps=2, eval_strategy="steps", eval_steps=1, logging_steps=10)
    logger = Logger()
    trainer = Trainer(bert(), options, train_dataset=data(), eval_dataset=data()[:2], callbacks=[lazy(), logger])
    trainer.train()
    evaluations = [e for e in logger.logged if "eval_loss" in e]
    assert len(evaluations) == 6
    assert not any(key.startswith("checkpoint/") for e in evaluations for key in e)


# SIGTERM


def test_a_just_in_time_checkpoint_is_durable_at_once(tmp_path: Path, disk: Disk, graph: Graph) -> None:
    callback = lazy()
    disk.publish_s = 0.2
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
    assert disk.existed[0] is False  # the folder with the sentinel was gone while ours was written
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


# Ways in


class Swapping(Trainer):  # type: ignore[misc]
    """Saves its average in the place of the model, as Trainers for diffusion and speech do."""

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        stored = [p.detach().clone() for p in self.model.parameters()]
        for p in self.model.parameters():
            p.data.fill_(0.5)
        super().save_model(*args, **kwargs)
        for p, before in zip(self.model.parameters(), stored, strict=True):
            p.data.copy_(before)


def test_weights_that_are_swapped_for_save_model_are_saved(tmp_path: Path) -> None:
    """Regression: the checkpoint held the weights that were put back afterwards."""
    trainer_of(tmp_path, lazy(), cls=Swapping).train()
    for folder in tmp_path.iterdir():
        saved = safetensors.torch.load_file(folder / "model.safetensors")
        assert all((saved[name] == 0.5).all() for name, _ in bert().named_parameters() if name in saved), folder
    assert len(checkpoints(tmp_path)) == 4


@pytest.mark.parametrize("given", [True, False])
def test_the_files_of_a_trainers_own_save_checkpoint_are_staged_with_the_mixin(
    given: bool, tmp_path: Path, disk: Disk
) -> None:
    class Noted(Trainer):  # type: ignore[misc]
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            (folder / "notes.txt").write_text("mine")

    class LazyNoted(LazyCheckpointTrainerMixin, Noted):
        pass

    callbacks = [lazy()] if given else []
    trainer = trainer_of(tmp_path, *callbacks, cls=LazyNoted, max_steps=2)
    ours = [c for c in trainer.callback_handler.callbacks if isinstance(c, LazyCheckpointCallback)]
    assert len(ours) == 1 and callbacks in ([], ours)
    trainer.train()
    assert disk.published == checkpoints(tmp_path) == ["checkpoint-2"]
    assert (tmp_path / "checkpoint-2" / "notes.txt").read_text() == "mine"


def test_nothing_stays_replaced_and_a_trainer_without_the_callback_saves_by_itself(tmp_path: Path, disk: Disk) -> None:
    before = torch.save, safetensors.torch.save_file, transformers.modeling_utils.safe_save_file
    trainer = trainer_of(tmp_path / "lazy", lazy(), max_steps=2)
    trainer.train()
    assert (torch.save, safetensors.torch.save_file, transformers.modeling_utils.safe_save_file) == before
    assert not {"_get_output_dir", "_push_from_checkpoint"} & vars(trainer).keys()
    trainer_of(tmp_path / "plain", max_steps=2).train()
    assert checkpoints(tmp_path / "plain") == disk.published == ["checkpoint-2"]


class Named(LazyCheckpointCallback):
    """With an attribute of its own."""

    name = "unset"


def test_copies_of_a_callback_that_trains_train_another_trainer(tmp_path: Path, disk: Disk) -> None:
    """Regression: TypeError: cannot pickle '_queue.SimpleQueue' object."""
    callback = Named(**SMALL_RING, max_in_flight=3)
    callback.name = "mine"
    copies: list[Named] = []

    def look() -> None:
        assert callback._saves and callback.newest is not None
        threads = threading.active_count()
        copies.extend(duplicate(callback) for duplicate in DUPLICATES.values())
        assert threading.active_count() <= threads  # others may end

    trainer_of(tmp_path / "first", callback, At("on_step_end", 3, look), max_steps=4).train()
    for other in copies:
        assert type(other) is Named and other.name == "mine" and other.newest is None and other._saves == []
        other.wait()
    trainer = trainer_of(tmp_path / "second", other, max_steps=2)
    trainer.add_callback(At("on_step_end", 1, lambda: opened.append(other._saver.config.max_in_flight)))
    opened: list[int] = []
    trainer.train()
    trainer.args.max_steps = 4
    trainer.train(resume_from_checkpoint=True)
    assert opened == [3] and other.newest is not callback.newest
    for run in ("first", "second"):
        assert checkpoints(tmp_path / run) == ["checkpoint-2", "checkpoint-4"]


def test_knobs_are_checked_at_once() -> None:
    with pytest.raises(lazyckpt.ConfigError, match=r"LazyCheckpointCallback.*no_such_knob"):
        LazyCheckpointCallback(no_such_knob=1)
    with pytest.raises(lazyckpt.ConfigError, match="max_in_flight"):
        LazyCheckpointCallback(max_in_flight=0)
    with pytest.raises(lazyckpt.ConfigError, match="save_total_limit"):
        LazyCheckpointCallback(keep_last=3)


# Several processes, and the example


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


def test_the_example_is_resumed_from_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", "the", "return", "of"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    bert().save_pretrained(tmp_path / "model")
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "model")
    script = Path(__file__).parents[2] / "examples" / "hf_trainer_minilm.py"

    def run(steps: int) -> str:
        small = ["--save-every", "2", "--texts", "60", "--batch", "2", "--tokens", "16", "--steps", str(steps)]
        command = [str(script), str(tmp_path / "run"), "--model", str(tmp_path / "model"), *small]
        monkeypatch.setattr(sys, "argv", command)
        runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out

    assert "resuming from the original" in run(4)
    again = run(6)
    assert f"resuming from {tmp_path / 'run' / 'checkpoint-4'}" in again
    assert "checkpoint-6: training waited" in again and "evaluation loss of the best model" in again
    assert "checkpoint-6" in checkpoints(tmp_path / "run")
