"""Lightning with a LazyCheckpointIO does what it does without one; only later, and in the background.

Most tests train twice, with torch.save and lazily on a slow disk, and compare the remaining files. That disk opens
files a moment late, and the staging buffer holds a sixth of the state: so for a while nothing is durable and most of
the state is not even copied, which is when a naive CheckpointIO goes wrong.
"""

from __future__ import annotations

import copy
import os
import pickle
import runpy
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lazyckpt

pytest.importorskip("lightning", minversion="2.6")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import MixedPrecision

from lazyckpt.integrations import lightning_callback as integration
from lazyckpt.integrations.lightning import LazyCheckpointCallback, LazyCheckpointIO
from lightning_runs import WIDTH, Each, Net, lazy_io, names_in, state_of
from trainers import SLOW_S
from trainers import lightning_trainer as trainer_in

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("small_tensors_are_lazy")]
ROOT = Path(__file__).parents[2]


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class ManualSavedBefore(Manual):
    """ModelCheckpoint puts the weights of before the step into the module for as long as its save takes."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.saved_models = {batch_idx: copy.deepcopy(self.layer.state_dict())}
        super().training_step(batch, batch_idx)


class Scaled(Net):
    """fp16's scaler, on the CPU: gradients that are infinite, and a step that is skipped."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 2 else loss


class Gan(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward((self.layer(batch[0]) - self.critic(batch[0])).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        critic = torch.optim.AdamW(self.critic.parameters(), fused=True)
        return [torch.optim.SGD(self.layer.parameters(), 0.01, momentum=0.9), critic]


@pytest.mark.parametrize("weights_only", [False, True])
def test_the_first_step_prepares_the_staging_buffer(weights_only: bool, tmp_path: Path) -> None:
    """For both moments, too; not where only weights are saved."""
    io = LazyCheckpointIO(chunk_bytes=4096)
    sizes: list[int] = []
    each = Each(lambda _: sizes.append(io._own_saver().engine.ring_bytes))  # type: ignore[union-attr]
    checkpoint = ModelCheckpoint(tmp_path, save_weights_only=weights_only)  # at the end of the epoch
    model = Net()
    trainer_in(tmp_path, io, checkpoint, each).fit(model)
    assert (sizes[0] > 3 * sum(p.nbytes for p in model.parameters())) != weights_only


# contents of a save


CASES: dict[str, tuple[Callable[[], Net], dict[str, Any]]] = {
    "automatic": (Net, {}),
    "accumulate": (Net, {"accumulate_grad_batches": 2}),
    "bf16": (Net, {"precision": "bf16-mixed"}),
    "batch norm": (lambda: Net(normalize=True), {}),
    "manual": (Manual, {}),
    "manual, saved before the step": (ManualSavedBefore, {}),
    "gan": (Gan, {}),
    "ema": (Net, {"ema": True}),
    "scaler": (Scaled, {"scaler": True}),
}


@pytest.mark.long(first=3)
@pytest.mark.parametrize("case", CASES)
def test_files_are_what_torch_save_wrote_and_training_resumes_bit_for_bit(
    case: str, tmp_path: Path, slow_disk: None, graph: Any
) -> None:
    make, kwargs = CASES[case]
    kwargs = dict(kwargs)
    ema, scaler = kwargs.pop("ema", False), kwargs.pop("scaler", False)
    every = 4 if make is Gan else 2  # two optimizers take two steps a batch
    exact = True

    def run(io: LazyCheckpointIO | None, **fit: Any) -> Any:
        callbacks: list[Callback] = [ModelCheckpoint(tmp_path / "run", every_n_train_steps=every, save_top_k=-1)]
        if ema:
            callbacks.append(EMAWeightAveraging(decay=0.5))
        if not exact:
            callbacks.append(LazyCheckpointCallback(exact_resume=False))
        plugins = [io] if io is not None else []
        if scaler:
            scaling = torch.amp.GradScaler("cpu", init_scale=8.0)
            plugins.append(MixedPrecision("16-mixed", "cpu", scaling))  # type: ignore[arg-type]
        trainer = trainer_in(tmp_path, io, *callbacks, val_check_interval=2, **{**kwargs, "plugins": plugins})
        trainer.fit(make(), **fit)
        return graph(state_of(trainer))

    plain = run(None)
    os.rename(tmp_path / "run", tmp_path / "plain")
    lazy = run(lazy_io())
    assert lazy == plain
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert len(files) >= 1 and sorted(path.name for path in (tmp_path / "run").iterdir()) == files
    for name in files:
        ours, theirs = (torch.load(tmp_path / folder / name) for folder in ("run", "plain"))
        # Wall clock is no state: it is in no key that we know of, so everything must be equal.
        assert set(ours.pop("lazyckpt")) == {"ranks"}
        assert graph(ours) == graph(theirs), name
    # In the middle of an epoch Lightning begins the data anew: so resumed is not uninterrupted, but still the same.
    exact = False
    assert run(lazy_io(), ckpt_path=tmp_path / "run" / files[0]) == run(None, ckpt_path=tmp_path / "plain" / files[0])


# overlap


class Watching(Net):
    """Looks at the save under way from inside the forward and the backward of the next batch."""

    io: LazyCheckpointIO
    released: threading.Event
    seen: list[tuple[bool, bool]]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        pending = self.io._open_saver().pending()
        if pending:
            in_forward = pending[-1].wait_captured(0)
            self.released.set()
            self.seen.append((in_forward, pending[-1].wait_captured(30)))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("when", [{"every_n_train_steps": 2}, {"every_n_epochs": 1, "save_on_train_epoch_end": True}])
def test_the_copy_runs_during_the_next_forward(
    when: dict[str, Any], tmp_path: Path, held_disk: threading.Event
) -> None:
    """A gate that waited before the closure of automatic optimization would wait for the disk that is held here; so
    would one that waited at every end and start of an epoch."""
    model = Watching()
    model.io, model.released, model.seen = lazy_io(), held_disk, []
    checkpoint = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{step}", **when)
    settings = {"max_epochs": 2, "max_steps": 3, "limit_train_batches": 2, "limit_val_batches": 0, "logger": Memory()}
    trainer_in(tmp_path, model.io, LearningRateMonitor(), EarlyStopping("x", strict=False), checkpoint, **settings).fit(
        model
    )
    assert model.seen == [(False, True)]
    saved, final = torch.load(tmp_path / "step=2.ckpt"), model.state_dict()
    assert not torch.equal(saved["state_dict"]["layer.0.weight"], final["layer.0.weight"])


@pytest.mark.parametrize(
    "average", [lambda: EMAWeightAveraging(decay=0.5), lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1)]
)
def test_most_bytes_are_copied_lazily(average: Callable[[], Callback], tmp_path: Path) -> None:
    """Averages, too: nothing but their update changes them."""
    logger = Memory()
    callbacks = [average(), ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)]
    trainer_in(tmp_path, LazyCheckpointIO(), *callbacks, logger=logger).fit(Net())
    costs = [entry for entry in logger.logged if "checkpoint/blocked_ms" in entry]
    assert len(costs) == 3
    for entry in costs:
        random_states_mb = 0.04
        assert entry["checkpoint/eager_mb"] - random_states_mb < 0.1 * entry["checkpoint/mb"]


# weights that are swapped with no optimizer step


class SwapAt(Callback):
    """Changes the sign of every weight in one hook."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.swap)

    def swap(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for p in pl_module.parameters():
            p.data.mul_(-1.0)


class SwapsItself(Net):
    """Hooks of the module come after those of callbacks."""

    def on_train_epoch_start(self) -> None:
        for p in self.parameters():
            p.data.mul_(-1.0)


class SaveInValidation(Callback):
    """Swaps weights for validation, saves there, and swaps back; torch cannot see these writes."""

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.kept = [p.detach().clone() for p in pl_module.parameters()]
        for p in pl_module.parameters():
            p.data.mul_(-1.0)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir, "run", f"validation-{trainer.global_step}.ckpt"))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for p, kept in zip(pl_module.parameters(), self.kept, strict=True):
            p.data.copy_(kept)


SWAPS: dict[str, tuple[list[Callable[[], Callback]], dict[str, Any], dict[str, Any]]] = {
    "validation": (
        [lambda: SwapAt("on_validation_start")],
        {"every_n_train_steps": 2},
        {"val_check_interval": 2},
    ),
    "in validation": ([SaveInValidation], {"every_n_epochs": 1}, {}),
    "WeightAveraging": ([lambda: EMAWeightAveraging(decay=0.5)], {"every_n_train_steps": 2}, {"val_check_interval": 2}),
    "epoch start": (
        [lambda: SwapAt("on_train_epoch_start")],
        {"every_n_epochs": 1, "save_on_train_epoch_end": True},
        {"max_epochs": 3},
    ),
    "epoch end": (
        [lambda: SwapAt("on_train_epoch_end")],
        {"every_n_train_steps": 2},
        {"max_epochs": 2, "limit_val_batches": 0},
    ),
    "module": ([], {"every_n_epochs": 1, "save_on_train_epoch_end": True}, {"max_epochs": 3}),
    "train end": (
        [lambda: SwapAt("on_train_end")],
        {"every_n_epochs": 1, "save_on_train_epoch_end": True},
        {"limit_val_batches": 0},
    ),
    "SWA": (
        [lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1)],
        {"every_n_epochs": 1, "save_on_train_epoch_end": True},
        {"max_epochs": 3},
    ),
}


@pytest.mark.long(first=4)
@pytest.mark.parametrize("swap", SWAPS)
def test_a_later_swap_of_weights_does_not_change_a_checkpoint(
    swap: str, tmp_path: Path, slow_disk: None, graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integration, "_SMALL_BYTES", 0)  # it is for copies, not for the disk, that is waited
    make, when, kwargs = SWAPS[swap]

    def run(io: LazyCheckpointIO | None) -> None:
        checkpoint = ModelCheckpoint(tmp_path / "run", save_top_k=-1, filename="{epoch}-{step}", **when)
        trainer_in(tmp_path, io, checkpoint, *[m() for m in make], **kwargs).fit(
            SwapsItself() if swap == "module" else Net(normalize=swap == "SWA")
        )

    run(None)
    os.rename(tmp_path / "run", tmp_path / "plain")
    run(lazy_io())
    assert names_in(tmp_path / "run") == names_in(tmp_path / "plain") != {}
    for name in names_in(tmp_path / "run"):
        # In torch 2.6, SWALR's state holds a function.
        ours, theirs = (torch.load(tmp_path / folder / name, weights_only=False) for folder in ("run", "plain"))
        assert graph(ours["state_dict"]) == graph(theirs["state_dict"]), name
        assert graph(ours["optimizer_states"]) == graph(theirs["optimizer_states"]), name


# loggers


class Memory(Logger):
    """Keeps what it is told, and which of the checkpoints it is told of exist."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, Any]] = []
        self.told: list[bool] = []
        self.finalized: list[int] = []

    name, version = "memory", 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append({**metrics, "at": step})

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.told.append(os.path.exists(checkpoint_callback.best_model_path))

    def finalize(self, status: str) -> None:
        self.finalized.append(len(self.told))


def test_loggers_hear_of_files_that_exist_and_of_what_they_cost(tmp_path: Path, slow_disk: None) -> None:
    logger = Memory()
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    begin = time.perf_counter()
    trainer_in(tmp_path, lazy_io(), checkpoint, logger=logger).fit(Net())
    took_s = time.perf_counter() - begin
    assert logger.told == [True, True] and logger.finalized == [2]
    costs = [entry for entry in logger.logged if "checkpoint/durable_s" in entry]
    assert len(costs) == 2
    for entry, path in zip(costs, sorted(tmp_path.iterdir()), strict=True):
        assert SLOW_S <= entry["checkpoint/durable_s"] <= took_s
        assert 0 < entry["checkpoint/blocked_ms"] < took_s * 1e3
        assert entry["checkpoint/mb"] == path.stat().st_size / 1e6
        assert 0 < entry["at"] <= 6
    assert "after_save_checkpoint" not in vars(logger)  # as it was


# the callback


@pytest.mark.parametrize("lazy", [True, False])
def test_the_callback_goes_first_if_it_is_needed(lazy: bool, tmp_path: Path) -> None:
    added, logger, during = LazyCheckpointCallback(), Memory(), []  # by hand: then no other is added
    look = Each(lambda trainer: during.append(trainer.callbacks[0]))
    checkpoint = ModelCheckpoint(tmp_path)
    trainer = trainer_in(tmp_path, LazyCheckpointIO() if lazy else None, look, added, checkpoint, logger=logger)
    assert sum(isinstance(c, LazyCheckpointCallback) for c in trainer.callbacks) == 1
    trainer.fit(Net())
    assert during == [added if lazy else look] * 6 and logger.told == [True]
    assert names_in(tmp_path).keys() == {"epoch=0-step=6.ckpt"}


def test_without_the_callback_saves_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_disk: None) -> None:
    durable = []

    class Checkpoint(ModelCheckpoint):
        def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
            super()._save_checkpoint(trainer, filepath)
            durable.append(os.path.exists(filepath))

    trainer = trainer_in(tmp_path, lazy_io(), Checkpoint(tmp_path, every_n_train_steps=3))
    trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, LazyCheckpointCallback)]
    with pytest.warns(UserWarning, match="has no LazyCheckpointCallback"):
        trainer.fit(Net())
    assert durable == [True, True]


def test_a_knob_that_makes_no_sense_is_refused_at_once() -> None:
    with pytest.raises(lazyckpt.ConfigError, match="max_in_flight=0"):
        LazyCheckpointIO(max_in_flight=0)
    with pytest.raises(lazyckpt.ConfigError, match="no_such"):
        LazyCheckpointIO(no_such=1)
    with pytest.raises(lazyckpt.ConfigError, match="save_top_k"):
        LazyCheckpointIO(keep_last=3)  # Regression: it was taken, and nothing was ever removed


class Named(LazyCheckpointIO):
    def __init__(self, name: str) -> None:
        super().__init__(max_in_flight=3)
        self.name = name


def test_copies_of_what_attends_to_a_trainer_attend_to_another(
    tmp_path: Path, held_disk: threading.Event, duplicate: Callable[[Any], Any]
) -> None:
    """Regression: neither the callback nor a logger could be pickled in training, and a copied ModelCheckpoint asked
    the plugin of the original whether a file exists."""
    io, logger = Named("mine"), Memory()
    checkpoint = ModelCheckpoint(tmp_path / "first", every_n_train_steps=2, filename="{step}", save_top_k=-1)
    copies: list[Any] = []

    def look(trainer: Trainer) -> None:
        if trainer.global_step == 3:
            assert io._saver is not None and [handle.done() for handle in io._unreported] == [False]
            threads = threading.active_count()
            copies.extend(duplicate([io, trainer.callbacks[0], checkpoint, logger, trainer.model]))
            assert threading.active_count() <= threads  # others may end
            held_disk.set()

    trainer_in(tmp_path, io, checkpoint, Each(look), logger=logger).fit(Net())
    other_io, callback, other_checkpoint, other_logger, model = copies
    assert type(other_io) is Named and other_io.name == "mine" and other_io._saver is None
    assert callback._io is None and type(callback) is LazyCheckpointCallback
    assert b"lazyckpt" not in pickle.dumps([other_checkpoint, other_logger, model])
    heard = len(other_logger.told)
    other_checkpoint.dirpath = str(tmp_path / "second")
    trainer_in(tmp_path, other_io, callback, other_checkpoint, logger=other_logger).fit(model)
    # The copied ModelCheckpoint has saved step 2 already.
    assert sorted(names_in(tmp_path / "second")) == ["step=4.ckpt", "step=6.ckpt"]
    assert len(logger.told) == 3 and len(other_logger.told) == heard + 2
    assert "after_save_checkpoint" not in vars(other_logger)


# the example


def test_the_example_resumes_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def example(folder: str, *options: str) -> Any:
        small = ["--steps", "2", "--layers", "1", "--width", "32"]
        monkeypatch.setattr(sys, "argv", ["lightning_gpt.py", str(tmp_path / folder), *small, *options])
        runpy.run_path(str(ROOT / "examples" / "lightning_gpt.py"), run_name="__main__")
        assert "validation loss" in capsys.readouterr().out
        newest = max((tmp_path / folder).glob("last*.ckpt"), key=lambda path: path.stat().st_mtime)
        return torch.load(newest)

    whole = example("whole", "--epochs", "2")
    example("stopped", "--epochs", "1")
    resumed = example("stopped", "--epochs", "2", "--resume")
    assert resumed["global_step"] == whole["global_step"] == 4
    for name, value in whole["state_dict"].items():
        assert torch.equal(resumed["state_dict"][name], value)
    assert "checkpoint/blocked_ms" in (tmp_path / "whole" / "metrics.csv").read_text()
