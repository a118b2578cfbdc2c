"""What Lightning loads: what was just saved, the newest whole checkpoint, and files that it reads as ever."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import threading
import time
import unittest.mock
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lazyckpt

pytest.importorskip("lightning", minversion="2.6")

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner

from lazyckpt.integrations.lightning import LazyCheckpointIO
from lightning_runs import Each, Net, flip, lazy_io, names_in
from trainers import lightning_trainer as trainer_in

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("small_tensors_are_lazy")]


def test_every_ckpt_path_finds_what_was_just_saved(tmp_path: Path, slow_disk: None) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    trainer = trainer_in(tmp_path, lazy_io(), checkpoint)
    trainer.fit(Net())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Net(), ckpt_path="last")  # the same Trainer, the same CheckpointIO: its threads had ended
    assert trainer.global_step == 12
    for path in ("last", "best", checkpoint.last_model_path):
        assert trainer.test(Net(), ckpt_path=path, verbose=False)
        assert trainer.validate(Net(), ckpt_path=path, verbose=False)


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps that has lost its ``last``."""
    folder = tmp_path_factory.mktemp("three steps")
    checkpoint = ModelCheckpoint(folder, save_last="link", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    # Longer than what file systems take for an instant.
    trainer_in(folder, LazyCheckpointIO(), checkpoint, Each(lambda _: time.sleep(0.02)), max_steps=3).fit(Net())
    (folder / "last.ckpt").unlink()
    return folder


@pytest.fixture
def lost(three_steps: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(three_steps, tmp_path / "lost"))


def resumed_at(folder: Path, **kwargs: Any) -> int:
    """The step at which training begins."""
    begun: list[int] = []

    class Begins(Net):
        def on_train_start(self) -> None:
            begun.append(self.global_step)

    checkpoint = ModelCheckpoint(folder, **{"save_last": "link", **kwargs})
    trainer_in(folder, LazyCheckpointIO(), checkpoint, max_steps=4).fit(Begins(), ckpt_path="last")
    return begun[0]


@pytest.mark.parametrize("last", ["missing", "dangling"])
def test_without_last_training_goes_on_from_the_newest_checkpoint(last: str, lost: Path) -> None:
    """Regression: it began at step 0."""
    if last == "dangling":
        (lost / "last.ckpt").symlink_to("step=0.ckpt")
    with pytest.warns(UserWarning, match=r"'last'.*step=3\.ckpt"):
        assert resumed_at(lost) == 3
    assert (lost / "last.ckpt").exists()


def test_without_save_last_training_begins_anew(lost: Path) -> None:
    assert resumed_at(lost, save_last=None) == 0


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def strip(path: Path) -> None:
    """``save_weights_only=True``"""
    checkpoint = torch.load(path)
    del checkpoint["optimizer_states"]
    torch.save(checkpoint, path)


@pytest.mark.parametrize("spoil", [truncate, flip, strip])
def test_a_damaged_checkpoint_does_not_stand_in_for_last(spoil: Callable[[Path], None], lost: Path) -> None:
    spoil(lost / "step=3.ckpt")
    with pytest.warns(UserWarning, match=r"step=2\.ckpt"):
        assert resumed_at(lost) == 2


def test_a_save_before_or_after_fit_is_durable_when_it_returns(tmp_path: Path, slow_disk: None) -> None:
    trainer = trainer_in(tmp_path, lazy_io())
    trainer.strategy.connect(Net())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the callback is there; Lightning has not set it up yet
        trainer.save_checkpoint(tmp_path / "folder" / "before.ckpt")
    assert torch.load(tmp_path / "folder" / "before.ckpt")["global_step"] == 0
    trainer.fit(Net())
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert torch.load(tmp_path / "after.ckpt")["global_step"] == 6


def test_threads_live_as_long_as_fit(tmp_path: Path) -> None:
    """Trainers that are only made, that are copied, or that save after they ended, leave no thread behind."""
    before, copies, during = threading.active_count(), [], []

    def look(trainer: Trainer) -> None:
        copies.append(copy.deepcopy(trainer.callbacks))
        during.append(threading.active_count())

    io = LazyCheckpointIO()
    trainer = trainer_in(tmp_path, io, Each(look), ModelCheckpoint(tmp_path, every_n_train_steps=1))
    assert threading.active_count() == before
    trainer.fit(Net())
    assert during[0] == during[-1] > before and len(copies) == 6
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    io.remove_checkpoint(tmp_path / "after.ckpt")
    assert "after.ckpt" not in names_in(tmp_path)
    assert threading.active_count() == before


def test_a_file_is_read_as_torch_reads_it_but_for_damage(tmp_path: Path) -> None:
    io, path = LazyCheckpointIO(), tmp_path / "a.ckpt"
    io.save_checkpoint({"loss": nn.MSELoss(), "tensor": torch.ones(5000)}, path)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        io.load_checkpoint(path)
    assert isinstance(io.load_checkpoint(path, weights_only=False)["loss"], nn.MSELoss)
    flip(path)
    torch.load(path, weights_only=False)  # notices nothing
    with pytest.raises(lazyckpt.CorruptFileError):
        io.load_checkpoint(path, weights_only=False)


def test_missing_and_remote_files_are_handled_as_ever(tmp_path: Path) -> None:
    io = LazyCheckpointIO()
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(tmp_path / "none.ckpt")
    with pytest.raises(TypeError):
        io.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={})
    with unittest.mock.patch.object(TorchCheckpointIO, "save_checkpoint") as theirs:
        io.save_checkpoint({}, "a.ckpt", storage_options={})
    theirs.assert_called_once_with({}, "a.ckpt", storage_options={})
    io.save_checkpoint({"a": 1}, "memory://folder/a.ckpt")
    checkpoint, trainer = ModelCheckpoint("memory://folder"), trainer_in(tmp_path, io)
    assert checkpoint.file_exists("memory://folder/a.ckpt", trainer)
    assert io.load_checkpoint("memory://folder/a.ckpt") == {"a": 1}
    io.remove_checkpoint("memory://folder/a.ckpt")
    assert not checkpoint.file_exists("memory://folder/a.ckpt", trainer)


def test_the_tuner_restores_what_it_saved_and_leaves_nothing(tmp_path: Path, slow_disk: None) -> None:
    found = []
    for io in (None, lazy_io()):
        model = Net()
        before = copy.deepcopy(model.state_dict())
        trainer = trainer_in(tmp_path, io)
        finder = Tuner(trainer).lr_find(model, num_training=8)
        assert finder is not None
        size = Tuner(trainer).scale_batch_size(model, steps_per_trial=1, max_trials=2, init_val=4)
        found.append((finder.results, size))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert names_in(tmp_path) == {}
    assert found[0] == found[1]
