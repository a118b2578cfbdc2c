"""What the callback changes in a Trainer is gone when a run is over, and other Trainers do not hear of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import lazyckpt

pytest.importorskip("lightning", minversion="2.6")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.tuner import Tuner

from lazyckpt.integrations.lightning import LazyCheckpointCallback, LazyCheckpointIO
from trainers import lightning_trainer as trainer_in

pytestmark = pytest.mark.filterwarnings("ignore")


class Net(LightningModule):
    """Four batches an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.lr = 0.01

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch).square().mean())

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(8, 4), batch_size=2)  # type: ignore[arg-type]

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Silent(Logger):
    """Hears of checkpoints by a method of the class; ``Instance`` by an attribute of the object."""

    name, version = "silent", 0

    def log_metrics(self, *_: Any, **__: Any) -> None:
        pass

    log_hyperparams = log_metrics

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        pass


class Raise(Callback):
    """Raises in one hook."""

    def __init__(self, hook: str, error: type[BaseException]) -> None:
        setattr(self, hook, self.fail)
        self.error = error

    def fail(self, *_: Any, **__: Any) -> None:
        raise self.error(f"raised by {type(self).__name__}")


def visible(trainer: Trainer, *others: Any) -> dict[str, Any]:
    """What a user sees of a Trainer and of what it was given: its callbacks, and the functions that are attributes of
    classes and objects."""
    objects = [trainer, trainer.strategy, *trainer.callbacks, *trainer.loggers, *others]
    objects += [trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer._checkpoint_connector]
    seen: dict[str, Any] = {"list": id(trainer.callbacks), "callbacks": list(map(id, trainer.callbacks))}
    for obj in (*objects, Trainer, Strategy, ModelCheckpoint, Logger, LightningModule, *map(type, objects)):
        for name, value in vars(obj).items():
            if callable(value) and name not in OF_LIGHTNING:
                seen[f"{obj!r} {id(obj)} {name}"] = id(value)
    return seen


# What Lightning itself leaves in callbacks and strategies.
OF_LIGHTNING = ("log", "log_dict", "_lightning_module", "_model", "_forward_redirection")


RUNS: dict[str, Callable[[Trainer, Net], Any]] = {
    "fit": lambda trainer, net: trainer.fit(net),
    "validate": lambda trainer, net: trainer.validate(net, verbose=False),
    "test": lambda trainer, net: trainer.test(net, verbose=False),
    "predict": lambda trainer, net: trainer.predict(net, return_predictions=False),
    "lr_find": lambda trainer, net: Tuner(trainer).lr_find(net, num_training=3),
    "scale_batch_size": lambda trainer, net: Tuner(trainer).scale_batch_size(
        net, steps_per_trial=1, max_trials=1, init_val=2
    ),
}


class Scaled(Net):
    """The tuner asks for it."""

    batch_size = 2


@pytest.mark.parametrize("run", RUNS)
def test_what_a_user_sees_is_as_it_was_when_a_run_is_over(run: str, tmp_path: Path) -> None:
    """Regression: ``trainer.callbacks`` stayed reordered."""
    logger = Silent()
    logger.after_save_checkpoint = (heard := []).append  # type: ignore[method-assign]
    checkpoint = ModelCheckpoint(tmp_path, save_last="link")
    trainer = trainer_in(tmp_path, LazyCheckpointIO(), Callback(), checkpoint, logger=[logger, Silent()])
    net = Scaled()
    before = visible(trainer, net)
    RUNS[run](trainer, net)
    after = visible(trainer, net)
    if run in ("lr_find", "scale_batch_size"):
        del after["list"], before["list"]  # the tuner makes a new one
    assert after == before
    assert len(heard) == (run == "fit")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(
    "hook", ["setup", "on_fit_start", "on_train_start", "on_train_batch_end", "on_validation_end", "teardown"]
)
def test_what_a_user_sees_is_as_it_was_after_an_error(hook: str, error: type[BaseException], tmp_path: Path) -> None:
    """An error in ``teardown`` comes before Lightning has called the teardown of all."""
    trainer = trainer_in(tmp_path, LazyCheckpointIO(), Raise(hook, error), ModelCheckpoint(tmp_path), logger=Silent())
    net = Net()
    before = visible(trainer, net)
    with pytest.raises((error, SystemExit)):
        trainer.fit(net)
    after = visible(trainer, net)
    assert after == before


def test_a_callback_that_a_hook_adds_stays(tmp_path: Path) -> None:
    class Adding(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            trainer.callbacks.append(added)

    added, adding = Callback(), Adding()
    trainer = trainer_in(tmp_path, LazyCheckpointIO(), adding)
    trainer.fit(Net())
    assert trainer.callbacks[0] is adding and trainer.callbacks[-1] is added
    assert len(trainer.callbacks) == 3


def test_a_hint_raises_nothing_whatever_the_callbacks_lack(tmp_path: Path) -> None:
    """Regression: a ModelCheckpoint without ``save_weights_only`` ended training with an AttributeError."""

    class Bare(ModelCheckpoint):
        def __init__(self) -> None:
            pass  # as a double in a test

        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_") or name in ("setup", "teardown"):
                return lambda *_, **__: None
            if name in ("state_dict", "load_state_dict"):
                return lambda *_: {}
            return super().__getattribute__(name)

        state_key = "bare"

    class Raising(Checkpoint):
        @property
        def save_weights_only(self) -> bool:
            raise RuntimeError("not known yet")

    for callback in (Bare(), Raising()):
        trainer = trainer_in(tmp_path, LazyCheckpointIO(), callback, enable_checkpointing=True)
        trainer.fit(Net())
        assert trainer.global_step == 4


def test_announcing_raises_nothing() -> None:
    from lazyckpt.integrations import announce

    with lazyckpt.Saver() as saver:
        announce(saver, lambda: [None, object()])
        announce(saver, lambda: 1 / 0)  # type: ignore[return-value, arg-type]


# which Trainers have one


def test_a_trainer_with_the_plugin_has_the_callback_and_others_hear_nothing_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: every Trainer of a process that had imported the plugin got the callback, and Lightning said so."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):  # their own handlers keep it from caplog
        logging.getLogger(name).addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.DEBUG):
            io = LazyCheckpointIO()
            plain = trainer_in(tmp_path, None, ModelCheckpoint(tmp_path / "plain"))
            plain.fit(Net())
            lazy = trainer_in(tmp_path, io)
    finally:
        for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).removeHandler(caplog.handler)
    assert any("GPU available" in record.getMessage() for record in caplog.records)  # it does hear Lightning
    assert [r.getMessage() for r in caplog.records if "lazyckpt" in r.getMessage().lower()] == []
    assert not any(isinstance(callback, LazyCheckpointCallback) for callback in plain.callbacks)
    assert sum(isinstance(callback, LazyCheckpointCallback) for callback in lazy.callbacks) == 1


def test_a_callback_of_the_users_is_the_only_one(tmp_path: Path) -> None:
    own = LazyCheckpointCallback()
    trainer = trainer_in(tmp_path, LazyCheckpointIO(), own, ModelCheckpoint(tmp_path))
    assert [c for c in trainer.callbacks if isinstance(c, LazyCheckpointCallback)] == [own]
