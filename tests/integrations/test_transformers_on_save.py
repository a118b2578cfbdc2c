"""What a callback sees in ``on_save`` is what it sees in a plain Trainer: the same step, model, control and folder."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

for name in ("transformers", "accelerate", "safetensors"):
    pytest.importorskip(name)

os.environ["HF_HUB_OFFLINE"] = "1"

from processes import Ranks  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from small_trainers import PUSHES, arguments, bert, checkpoints, data, lazy, lora, trainer_of  # noqa: E402
from transformers import Trainer, TrainerCallback  # noqa: E402
from transformers.integrations import integration_utils  # noqa: E402
from transformers.integrations.integration_utils import WandbCallback, WandbLogModel  # noqa: E402
from transformers.trainer_callback import CallbackHandler  # noqa: E402
from transformers.trainer_utils import HPSearchBackend  # noqa: E402

import lazyckpt  # noqa: E402
from lazyckpt.integrations.transformers import LazyCheckpointCallback, LazyCheckpointTrainerMixin  # noqa: E402
from lazyckpt.storage import commit, folders  # noqa: E402
from trainers import forget_accelerators, hugging_face_arguments  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("small_tensors_are_lazy"),
    pytest.mark.filterwarnings("ignore:.*needs_checkpoint_files"),
]
Graph = Callable[[Any], Any]


class Diary(TrainerCallback):  # type: ignore[misc]
    """Writes down everything that it is given."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_save(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **objects: Any) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        log = [{k: v for k, v in entry.items() if not k.endswith(("runtime", "second"))} for entry in state.log_history]
        self.seen.append(
            {
                "step": state.global_step,
                "log": log,
                "best": (state.best_model_checkpoint or "").removeprefix(str(args.output_dir)),
                "control": control.state()["args"],
                "weights": sum(p.double().sum().item() for p in model.parameters()),
                "moments": sum(s["exp_avg"].double().sum().item() for s in optimizer.state_dict()["state"].values()),
                "files": sorted(os.listdir(folder)),
                "others": sorted(p.name for p in folder.parent.glob("checkpoint-*")),
                "saved": sum(t.double().sum().item() for t in load_file(folder / "model.safetensors").values()),
                "objects": sorted(objects),
            }
        )
        control.should_log = True  # as a callback may


class Scored(Trainer):  # type: ignore[misc]
    """Its evaluations have the scores 3, 1, 2, …"""

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        metrics = {"eval_score": [3.0, 1.0, 2.0, 0.0][(self.state.global_step // 2 - 1) % 4]}
        self.log(metrics)
        return metrics


def diary(folder: Path, *callbacks: Any, **options: Any) -> list[Any]:
    keeper = Diary()
    datasets = {"train_dataset": data(), "eval_dataset": data()[:2]}
    Scored(bert(), arguments(folder, **options), **datasets, callbacks=[keeper, *callbacks]).train()
    return keeper.seen


BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "metric_for_best_model": "score",
    "greater_is_better": False,
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"save_total_limit": 1},
        {**BEST, "save_total_limit": 2, "load_best_model_at_end": True},
        {**BEST, "save_strategy": "best"},
        {"save_strategy": "epoch", "num_train_epochs": 2, "max_steps": -1},
    ],
    ids=["steps", "limit", "best at end", "best", "epoch"],
)
def test_on_save_sees_what_it_sees_in_a_plain_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    """Regression: it saw the state of its step and the model of a later one."""
    options = {"max_steps": 8, **options}
    expected = diary(tmp_path / "plain", **options)
    assert len(expected) >= 2
    assert diary(tmp_path / "lazy", lazy(max_in_flight=3), **options) == expected


class Adapter(TrainerCallback):  # type: ignore[misc]
    """The callback that many who use PEFT have."""

    def on_save(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> Any:
        model.save_pretrained(f"{args.output_dir}/checkpoint-{state.global_step}/adapter")
        return control


def test_what_on_save_writes_into_the_folder_is_the_model_of_that_step(tmp_path: Path) -> None:
    """Regression: the folder of step 2 held the adapter of step 3."""
    trainer_of(tmp_path, Adapter(), lazy(max_in_flight=3), model=lora, max_steps=6).train()
    for step in (2, 4, 6):
        folder = tmp_path / f"checkpoint-{step}"
        saved, written = (load_file(f / "adapter_model.safetensors") for f in (folder, folder / "adapter"))
        assert saved.keys() == written.keys()
        assert all(torch.equal(saved[key], written[key]) for key in saved)


class Stop(TrainerCallback):  # type: ignore[misc]
    def __init__(self, step: int) -> None:
        self._step = step

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if state.global_step == self._step:
            control.should_training_stop = True
        return control


@pytest.mark.parametrize("needs_files", [True, False])
def test_a_stop_in_on_save_stops_at_that_step(needs_files: bool, tmp_path: Path) -> None:
    """Regression: training went on, and left more checkpoints."""
    stop = Stop(4)
    stop.needs_checkpoint_files = needs_files  # type: ignore[attr-defined]
    trainer = trainer_of(tmp_path, stop, lazy(max_in_flight=3), max_steps=20, save_steps=1)
    trainer.train()
    assert trainer.state.global_step == 4
    assert checkpoints(tmp_path) == [f"checkpoint-{step}" for step in (1, 2, 3, 4)]


def on_an_instance() -> TrainerCallback:
    callback = TrainerCallback()
    callback.on_save = Stop(2).on_save
    return callback


class Handler(CallbackHandler):  # type: ignore[misc]
    """A handler that consumes the folder itself."""

    seen: list[Any]

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self.seen.append(sorted(os.listdir(f"{args.output_dir}/checkpoint-{state.global_step}")))
        control.should_save = False
        return control


class Mixed(LazyCheckpointCallback):
    """Ours, with an ``on_save`` of the user's."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        return Stop(2).on_save(args, state, control)


def test_an_on_save_of_an_instance_is_called_in_time(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, on_an_instance(), lazy())
    trainer.train()
    assert (trainer.state.global_step, checkpoints(tmp_path)) == (2, ["checkpoint-2"])


def test_an_on_save_of_a_subclass_of_ours_is_called_in_time(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Mixed())
    trainer.train()
    assert (trainer.state.global_step, checkpoints(tmp_path)) == (2, ["checkpoint-2"])


def test_a_handler_with_an_on_save_of_its_own_finds_the_folder(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, lazy(), max_steps=4)
    handler = trainer.callback_handler
    handler.__class__ = Handler
    handler.seen = []
    trainer.train()
    assert [{"model.safetensors", "optimizer.pt"} <= set(names) for names in handler.seen] == [True, True]


def test_a_trainer_with_the_mixin_calls_on_save_in_time(tmp_path: Path) -> None:
    class Own(LazyCheckpointTrainerMixin, Trainer):  # type: ignore[misc]
        pass

    trainer = trainer_of(tmp_path, Stop(2), cls=Own)
    trainer.train()
    assert (trainer.state.global_step, checkpoints(tmp_path)) == (2, ["checkpoint-2"])


def test_a_trial_of_a_search_calls_on_save_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.integrations.hp_params", lambda _: {})  # knows trials of optuna only
    trainer = trainer_of(tmp_path, Stop(2), lazy())
    trainer.hp_search_backend, trainer.hp_name, trainer.hp_space = HPSearchBackend.OPTUNA, None, lambda _: {}
    trainer.compute_objective = lambda _: 0.0
    trainer.train(trial=types.SimpleNamespace(number=7, params={}))
    assert checkpoints(tmp_path / "run-7") == ["checkpoint-2"]


# What it costs, and whom


def waits(folder: Path, monkeypatch: pytest.MonkeyPatch, callback: TrainerCallback, held: bool) -> list[bool]:
    """Whether each checkpoint was durable when ``_save_checkpoint`` returned. ``held``: none becomes durable before the
    end of training, so a save that waits is never over."""
    found = []
    ours = lazy(max_in_flight=4)
    save, publish = ours.save, commit.Staging.publish
    free = threading.Event()

    def watched(trainer: Any, *args: Any) -> None:
        save(trainer, *args)
        found.append(ours.newest is not None and ours.newest.done())

    def slow(self: commit.Staging) -> Any:
        assert free.wait(60 if held else 0.05) or not held
        return publish(self)

    end = TrainerCallback()
    end.on_epoch_end = lambda *_, **__: free.set()
    monkeypatch.setattr(ours, "save", watched)
    monkeypatch.setattr(commit.Staging, "publish", slow)
    trainer_of(folder, ours, end, callback, max_steps=3, save_steps=1).train()
    return found


class Quiet(Stop):
    needs_checkpoint_files = False


def logger_of(cls: Any, **attributes: Any) -> TrainerCallback:
    return type("Logger", (TrainerCallback,), {"on_save": cls.on_save, **attributes})()


TRACKIO = pytest.mark.skipif(
    not hasattr(integration_utils, "TrackioCallback"), reason="transformers knows no Trackio yet"
)


@pytest.mark.parametrize(
    ("callback", "costs"),
    [
        (lambda: TrainerCallback(), False),
        (lambda: Stop(99), True),
        (lambda: Quiet(99), False),
        pytest.param(lambda: logger_of(integration_utils.TrackioCallback), False, marks=TRACKIO),
        (lambda: logger_of(WandbCallback, _log_model=WandbLogModel.FALSE), False),
        (lambda: logger_of(WandbCallback, _log_model=WandbLogModel.END), False),
        (lambda: logger_of(WandbCallback, _log_model=WandbLogModel.CHECKPOINT, _initialized=False), True),
    ],
    ids=["none", "unknown", "vouched for", "trackio", "wandb", "wandb at the end", "wandb checkpoints"],
)
def test_only_who_may_need_the_files_waits(
    callback: Callable[[], TrainerCallback], costs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert waits(tmp_path, monkeypatch, callback(), held=not costs) == [costs] * 3


def test_one_warning_names_the_callback_that_costs_the_overlap(tmp_path: Path) -> None:
    class Costly(Stop):
        pass

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_of(tmp_path, Costly(99), lazy(), max_steps=4).train()
    (told,) = [str(w.message) for w in caught if "needs_checkpoint_files" in str(w.message)]
    assert "Costly.on_save" in told


# Durable, and after failures


def test_what_on_save_wrote_is_synced_before_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = folders.sync_path
    monkeypatch.setattr(folders, "sync_path", lambda path: (synced.append(str(path)), sync(path))[1])
    steps = []

    class Look(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            steps.append({name for name in synced if "adapter" in name})

    trainer_of(tmp_path, Adapter(), lazy(), Look(), model=lora, max_steps=3, save_steps=2).train()
    adapter = {str(tmp_path / "checkpoint-2/adapter" / n) for n in os.listdir(tmp_path / "checkpoint-2/adapter")}
    assert adapter | {str(tmp_path / "checkpoint-2/adapter")} <= steps[2]
    assert str(tmp_path / "checkpoint-3/adapter/adapter_model.safetensors") in synced  # and at the end


def test_a_callback_may_remove_the_folder(tmp_path: Path) -> None:
    class Upload(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            shutil.rmtree(f"{args.output_dir}/checkpoint-{state.global_step}")

    trainer_of(tmp_path, Upload(), lazy(), max_steps=4).train()
    assert checkpoints(tmp_path) == []


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_there_is_no_on_save_of_a_checkpoint_that_failed(
    on_error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a folder of its own making, the callback would leave half a checkpoint."""
    publish = commit.Staging.publish

    def failing(self: commit.Staging) -> Any:
        if self.target.name == "checkpoint-4":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return publish(self)

    monkeypatch.setattr(commit.Staging, "publish", failing)
    with pytest.raises(lazyckpt.SaveError, match="step 4") if on_error == "raise" else pytest.warns(match="step 4"):
        trainer_of(tmp_path, Adapter(), lazy(on_error=on_error), model=lora, max_steps=6).train()
    assert checkpoints(tmp_path) == (["checkpoint-2"] if on_error == "raise" else ["checkpoint-2", "checkpoint-6"])


@PUSHES
def test_a_push_that_may_see_the_model_sees_the_one_of_its_step(tmp_path: Path) -> None:
    """Regression: on_push_begin saw the model of a later step."""
    seen = []

    class Pushing(Trainer):  # type: ignore[misc]
        def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
            assert os.path.isdir(checkpoint_folder)
            self.callback_handler.on_push_begin(self.args, self.state, self.control)

    class Card(TrainerCallback):  # type: ignore[misc]
        def on_push_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            saved = load_file(f"{args.output_dir}/checkpoint-{state.global_step}/model.safetensors")
            live = model.state_dict()
            seen.append((state.global_step, all(torch.equal(live[key], saved[key]) for key in saved)))

    trainer = trainer_of(tmp_path, Card(), lazy(max_in_flight=3), cls=Pushing, max_steps=6)
    trainer.args.push_to_hub = True
    trainer.train()
    assert seen == [(2, True), (4, True), (6, True)]


# Several ranks


def on_two_ranks(folder: Path, only_on: int | None) -> Any:
    """``only_on``: the one rank that has the callback."""
    rank, world = str(torch.distributed.get_rank()), str(torch.distributed.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    forget_accelerators()
    seen = []

    class See(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> Any:
            saved = load_file(f"{args.output_dir}/checkpoint-{state.global_step}/model.safetensors")
            live = {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}
            same = all(torch.equal(live[name], saved[name]) for name in saved if name in live)
            seen.append((state.global_step, same))
            control.should_training_stop = state.global_step == 4
            return control

    callbacks = [See()] if only_on is None or int(rank) == only_on else []
    options = hugging_face_arguments(folder, ddp_backend="gloo", max_steps=20, save_steps=2, learning_rate=0.01)
    ours = LazyCheckpointCallback(max_in_flight=3)
    trainer = Trainer(bert(), options, train_dataset=data(), callbacks=[*callbacks, ours])
    if only_on is not None:
        trainer.args.max_steps = 4
    trainer.train()
    return seen, trainer.state.global_step


def test_on_save_of_every_rank_comes_when_the_folder_is_there(ranks: Ranks, tmp_path: Path) -> None:
    expected = ([(2, True), (4, True)], 4)
    assert ranks.run(2, on_two_ranks, tmp_path, None) == [expected, expected]
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_may_have_a_callback_that_the_others_lack(ranks: Ranks, tmp_path: Path, rank: int) -> None:
    found = ranks.run(2, on_two_ranks, tmp_path, rank)
    assert found[rank] == ([(2, True), (4, True)], 4)
    assert found[1 - rank] == ([], 4)
