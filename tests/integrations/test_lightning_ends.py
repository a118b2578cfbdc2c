"""Lightning's runs that end early: by an exception, by a signal, or because a save failed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt

pytest.importorskip("lightning", minversion="2.6")

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lazyckpt.integrations.lightning import LazyCheckpointIO
from lightning_runs import Each, Net, lazy_io, names_in
from trainers import SLOW_S, FileDisk
from trainers import lightning_trainer as trainer_in

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("small_tensors_are_lazy")]


class Stop(Exception):
    pass


def stop_at(step: int) -> Callback:
    def stop(trainer: Trainer) -> None:
        if trainer.global_step == step:
            raise Stop

    return Each(stop)


def test_a_save_on_an_exception_is_durable_at_once(tmp_path: Path, slow_disk: None) -> None:
    durable = []

    class Checkpoint(ModelCheckpoint):
        def on_exception(self, trainer: Trainer, *args: Any) -> None:
            super().on_exception(trainer, *args)
            durable.append(names_in(tmp_path))

    checkpoint = Checkpoint(tmp_path, save_on_exception=True, every_n_train_steps=2, save_last=True, filename="{step}")
    trainer = trainer_in(tmp_path, lazy_io(), stop_at(3), checkpoint, OnExceptionCheckpoint(tmp_path))
    with pytest.raises(Stop):
        trainer.fit(Net())
    (names,) = durable
    assert {"step=2.ckpt", "step=3.ckpt", "last.ckpt"} <= names.keys()
    assert torch.load(tmp_path / "on_exception.ckpt")["global_step"] == 3
    trainer_in(tmp_path, LazyCheckpointIO()).fit(Net(), ckpt_path=tmp_path / "last.ckpt")


class SignalWhenPickled:
    """Sends the signal from the middle of a save."""

    sent = False

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGUSR1)
            for _ in range(100):
                pass  # where Python runs the handler
        return OrderedDict, ()


def test_slurm_requeues_with_a_durable_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_disk: None
) -> None:
    programs, run = tmp_path / "bin", tmp_path / "run"
    programs.mkdir()
    run.mkdir()
    scontrol = programs / "scontrol"
    scontrol.write_text(
        f"#!/bin/sh\nls -a {run} > {tmp_path}/requeued\ncp {run}/hpc_ckpt_1.ckpt {tmp_path}/copy.ckpt\n"
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    ids = {"JOB_ID": 1, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "NTASKS": 1, "NTASKS_PER_NODE": 1, "JOB_NAME": "job"}
    for name, value in ids.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))

    class Signalled(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
            return super().training_step(batch, batch_idx)

    def trainer(max_epochs: int) -> Trainer:
        slurm = SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)
        checkpoint = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=1, save_top_k=-1, filename="{step}")
        return trainer_in(run, None, checkpoint, plugins=[lazy_io(), slurm], max_epochs=max_epochs)

    trainer(1).fit(Signalled())
    assert "hpc_ckpt_1.ckpt" in (tmp_path / "requeued").read_text().split()
    assert torch.load(tmp_path / "copy.ckpt")["global_step"] == 3
    assert sorted(names_in(tmp_path / "ckpt")) == [f"step={n}.ckpt" for n in range(1, 7)]
    assert names_in(run) == {"hpc_ckpt_1.ckpt": ""}
    again = trainer(1)
    again.fit(Net())
    assert again.ckpt_path == str(run / "hpc_ckpt_1.ckpt")


@pytest.mark.parametrize("name", ["hpc_ckpt_1.ckpt", "before_fit.ckpt"])
def test_a_blocking_save_survives_a_power_cut_with_its_folders(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "new" / "run" / name
    synced: list[tuple[str, bool]] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{fd}"), target.exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    lazy_io().save_checkpoint({"pytorch-lightning_version": "2"}, target)
    assert {(str(tmp_path), False), (str(tmp_path / "new"), False)} <= set(synced)
    assert synced[-1] == (str(target.parent), True)


def test_a_signal_handler_may_save_in_the_middle_of_a_save(tmp_path: Path, slow_disk: None) -> None:
    io = lazy_io()

    def handler(*_: Any) -> None:
        io.save_checkpoint({"a": 2, "tensor": torch.ones(5000)}, tmp_path / "inner.ckpt")
        assert torch.load(tmp_path / "inner.ckpt")["a"] == 2  # it is durable

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        io.save_checkpoint(
            {"a": 1, "signal": SignalWhenPickled(), "tensor": torch.zeros(5000)}, tmp_path / "outer.ckpt"
        )
    finally:
        signal.signal(signal.SIGUSR1, before)
    outer = io.load_checkpoint(tmp_path / "outer.ckpt")
    assert outer["a"] == 1 and torch.equal(outer["tensor"], torch.zeros(5000))


def test_a_failed_save_raises_at_the_next_one(tmp_path: Path, broken_disk: list[str]) -> None:
    broken_disk.append("step=2")
    steps = []

    def look(trainer: Trainer) -> None:
        steps.append(trainer.global_step)
        if trainer.global_step == 4:
            io._open_saver().drain()

    io = LazyCheckpointIO()
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="{step}", save_last="link")
    with pytest.raises(lazyckpt.SaveError, match=r"step=2\.ckpt.*Input/output error"):
        trainer_in(tmp_path, io, Each(look), checkpoint).fit(Net())
    assert steps == [1, 2, 3, 4]
    assert names_in(tmp_path) == {"step=4.ckpt": ""}  # the call that raised has saved its own step


def test_a_failed_last_save_raises_at_the_end_of_fit_and_the_old_one_stays(
    tmp_path: Path, broken_disk: list[str]
) -> None:
    broken_disk.append("step=6")
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=3, filename="{step}", save_last="link")
    trainer = trainer_in(tmp_path, LazyCheckpointIO(), checkpoint)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(lazyckpt.SaveError, match=r"step=6\.ckpt"):
        trainer.fit(Net())
    assert names_in(tmp_path) == {"step=3.ckpt": "", "last.ckpt": "step=3.ckpt"}
    assert signal.getsignal(signal.SIGTERM) is handler  # the Trainer was torn down all the same


def test_a_pending_file_exists_however_that_is_asked(tmp_path: Path, file_disk: FileDisk) -> None:
    """A ModelCheckpoint of the user's may name the arguments."""
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="{step}", save_top_k=-1)
    file = str(tmp_path / "step=2.ckpt")
    found: list[bool] = []

    def look(trainer: Trainer) -> None:
        file_disk.free.clear()
        if trainer.global_step == 3:
            assert not os.path.exists(file)
            found.extend(
                [checkpoint.file_exists(file, trainer), checkpoint.file_exists(trainer=trainer, filepath=file)]
            )
            file_disk.free.set()

    trainer_in(tmp_path, LazyCheckpointIO(), checkpoint, Each(look), max_steps=3).fit(Net())
    assert found == [True, True]


@pytest.mark.parametrize("committing", [False, True], ids=["alone", "under commit_on"])
def test_sigterm_ends_fit_after_the_batch_with_everything_committed(
    committing: bool, tmp_path: Path, file_disk: FileDisk
) -> None:
    """The Trainer's handler has the say; that of commit_on, which was there before it, is called and kills nothing."""

    def look(trainer: Trainer) -> None:
        if trainer.global_step == 2:
            file_disk.free.clear()  # for step 2, which is saved after this
        elif trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            in_flight.append(io._open_saver().pending()[-1].path.name)
            timer.start()

    timer = threading.Timer(3 * SLOW_S, file_disk.free.set)
    in_flight: list[str] = []
    io = LazyCheckpointIO()
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1, filename="{step}", save_top_k=-1)
    with contextlib.ExitStack() as stack:
        if committing:
            stack.enter_context(lazyckpt.commit_on(signal.SIGTERM))
        handler = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SIGTERMException):
            trainer_in(tmp_path, io, checkpoint, Each(look)).fit(Net())
        assert signal.getsignal(signal.SIGTERM) == handler
    assert in_flight == ["step=2.ckpt"]
    assert names_in(tmp_path) == {f"step={n}.ckpt": "" for n in (1, 2, 3)}
    for file in tmp_path.iterdir():
        lazyckpt.load(file, weights_only=False)
    timer.join()


def test_the_exception_that_ended_training_matters_more(tmp_path: Path, broken_disk: list[str]) -> None:
    broken_disk.append("step=2")
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="{step}", save_on_exception=True)
    trainer = trainer_in(tmp_path, LazyCheckpointIO(), stop_at(3), checkpoint)
    with pytest.warns(UserWarning, match=r"step=2\.ckpt"), pytest.raises(Stop):
        trainer.fit(Net())
    assert names_in(tmp_path) == {"step=3.ckpt": ""}


def test_failures_may_be_warnings(tmp_path: Path, broken_disk: list[str]) -> None:
    broken_disk.append("step=2")
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="{step}", save_top_k=-1)
    with pytest.warns(UserWarning, match=r"step=2\.ckpt"):
        trainer_in(tmp_path, LazyCheckpointIO(on_error="warn"), checkpoint).fit(Net())
    assert sorted(names_in(tmp_path)) == ["step=4.ckpt", "step=6.ckpt"]
