"""The Trainer, saving lazily: the same files, whole or absent, and who reads them."""

from __future__ import annotations

import io
import json
import os
import runpy
import sys
import threading
from collections.abc import Callable
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
from small_trainers import JUST_IN_TIME, SMALL_RING, At, arguments, bert, checkpoints, data, lazy, lora, trainer_of  # noqa: E402
from transformers import Trainer, TrainerCallback  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

import lazyckpt  # noqa: E402
from lazyckpt.integrations.transformers import LazyCheckpointCallback, LazyCheckpointTrainerMixin  # noqa: E402
from trainers import FolderDisk, contents  # noqa: E402

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
    model: Callable[[], Any], tmp_path: Path, folder_disk: FolderDisk, graph: Graph
) -> None:
    callback = lazy()
    expected: dict[int, Any] = {}
    late: list[bool] = []

    class Referenced(Trainer):  # type: ignore[misc]
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            expected[self.state.global_step] = copied([self.model.state_dict(), self.optimizer.state_dict()])
            folder_disk.free.clear()
            super()._save_checkpoint(model, trial)

        def _finalize_training(self, *args: Any) -> Any:
            folder_disk.free.set()
            return super()._finalize_training(*args)

        def log(self, logs: Any, *args: Any) -> None:
            if "train_loss" in logs:  # the end of training before transformers 5.3
                folder_disk.free.set()
            super().log(logs, *args)

    def release() -> None:  # forward and backward are done, the step is next
        if not folder_disk.free.is_set():
            late.append(not callback.newest.wait_captured(0))
            threading.Timer(0.05, folder_disk.free.set).start()

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


# Unfinished checkpoints do not exist


def test_while_it_is_written_a_checkpoint_has_no_name(tmp_path: Path, folder_disk: FolderDisk) -> None:
    from huggingface_hub.utils import filter_repo_objects

    callback = lazy()
    seen: list[Any] = []

    def look() -> None:
        staged = [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")]
        pushed = filter_repo_objects(staged, ignore_patterns=["_*", "checkpoint-*"])  # as Trainer.push_to_hub has it
        seen.extend([len(staged) > 5, get_last_checkpoint(str(tmp_path)), list(pushed)])
        folder_disk.free.set()

    folder_disk.free.clear()
    trainer_of(tmp_path, callback, At("on_step_begin", 2, look), max_steps=3, save_steps=2).train()
    assert seen == [True, None, []]
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-3"]


def test_a_save_that_fails_raises_at_the_next(tmp_path: Path, folder_disk: FolderDisk) -> None:
    callback = lazy()
    folder_disk.fails_at = {"checkpoint-2"}
    trainer = trainer_of(tmp_path, callback, At("on_step_begin", 3, lambda: wait([callback.newest])))
    with pytest.raises(lazyckpt.NoSpaceError, match="step 2"):
        trainer.train()
    assert trainer.state.global_step == 4
    assert checkpoints(tmp_path) == []


def test_an_exception_in_training_leaves_the_checkpoint_whole(tmp_path: Path, folder_disk: FolderDisk) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    folder_disk.publish_s = 0.2
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path, lazy(), At("on_step_begin", 2, stop)).train()
    assert checkpoints(tmp_path) == ["checkpoint-2"]
    resumed = trainer_of(tmp_path, lazy(), max_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3


# Consumers of the folder


def test_on_save_and_a_push_come_when_the_folder_is_there(tmp_path: Path, folder_disk: FolderDisk) -> None:
    told: list[Any] = []
    pushed: list[Any] = []

    class Consumer(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            names = os.listdir(os.path.join(args.output_dir, f"checkpoint-{state.global_step}"))
            told.append((state.global_step, {"model.safetensors", "optimizer.pt"} <= set(names)))

    class Pushing(Trainer):  # type: ignore[misc]
        def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
            pushed.append((checkpoint_folder, self.state.global_step, os.path.isdir(checkpoint_folder)))

    folder_disk.publish_s = 0.1
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
    given: bool, tmp_path: Path, folder_disk: FolderDisk
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
    assert folder_disk.published == checkpoints(tmp_path) == ["checkpoint-2"]
    assert (tmp_path / "checkpoint-2" / "notes.txt").read_text() == "mine"


def test_nothing_stays_replaced_and_a_trainer_without_the_callback_saves_by_itself(
    tmp_path: Path, folder_disk: FolderDisk
) -> None:
    before = torch.save, safetensors.torch.save_file, transformers.modeling_utils.safe_save_file
    trainer = trainer_of(tmp_path / "lazy", lazy(), max_steps=2)
    trainer.train()
    assert (torch.save, safetensors.torch.save_file, transformers.modeling_utils.safe_save_file) == before
    assert not {"_get_output_dir", "_push_from_checkpoint"} & vars(trainer).keys()
    trainer_of(tmp_path / "plain", max_steps=2).train()
    assert checkpoints(tmp_path / "plain") == folder_disk.published == ["checkpoint-2"]


class Named(LazyCheckpointCallback):
    """With an attribute of its own."""

    name = "unset"


def test_copies_of_a_callback_that_trains_train_another_trainer(tmp_path: Path, folder_disk: FolderDisk) -> None:
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


# The example


@JUST_IN_TIME
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
