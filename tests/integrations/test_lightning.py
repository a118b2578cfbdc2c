"""Lightning with a LazyCheckpointIO does what it does without one; only later, and in the background.

Most tests train twice, with torch.save and lazily on a slow disk, and compare the remaining files. That disk opens
files a moment late, and the staging buffer holds a sixth of the state: so for a while nothing is durable and most of
the state is not even copied, which is when a naive CheckpointIO goes wrong.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import pickle
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
import unittest.mock
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lazyckpt
from lazyckpt.pipeline import request
from lazyckpt.storage import commit

pytest.importorskip("lightning", minversion="2.6")

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lazyckpt.integrations import lightning_callback as integration
from lazyckpt.integrations.lightning import LazyCheckpointCallback, LazyCheckpointIO
from trainers import Forked
from trainers import lightning_trainer as trainer_in
from trials import Trials

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("small_tensors_are_lazy")]
ROOT = Path(__file__).parents[2]
# Holds a third of the state. A smaller chunk would hold no whole page, and nothing in it would be copied lazily.
SMALL_RING = {"host_buffer_bytes": 4 * 8192, "chunk_bytes": 8192, "copy_threads": 1}
SLOW_S = 0.04
WIDTH = 64


class Disk:
    """Opens files late, or not until ``free`` is set; fails for files whose name holds a word of ``broken``."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.late_s = 0.0
        self.broken: list[str] = []


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    FileStaging, publish_file = request.FileStaging, commit.publish_file

    def staging(target: Path) -> commit.FileStaging:
        time.sleep(disk.late_s)
        assert disk.free.wait(30)
        return FileStaging(target)

    def publish(temporary: Path, target: Path) -> None:
        if any(word in target.name for word in disk.broken):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        publish_file(temporary, target)

    monkeypatch.setattr(request, "FileStaging", staging)  # by the name that a save uses
    monkeypatch.setattr(commit, "publish_file", publish)
    yield disk
    disk.free.set()


@pytest.fixture
def slow_disk(disk: Disk) -> None:
    disk.late_s = SLOW_S


@pytest.fixture
def held_disk(disk: Disk) -> threading.Event:
    """A disk that opens no file until the event is set."""
    disk.free.clear()
    return disk.free


@pytest.fixture
def broken_disk(disk: Disk) -> list[str]:
    return disk.broken


class Net(LightningModule):
    """Six batches an epoch; the validation loss differs from one time to the next, up and down."""

    def __init__(self, normalize: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        norm = nn.BatchNorm1d(WIDTH) if normalize else nn.Identity()
        self.layer = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), norm, nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        )
        self.validated = 0
        self.lr = 0.01
        self.batch_size = 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def on_validation_epoch_end(self) -> None:
        self.validated += 1
        self.log("score", torch.tensor([0.5, 0.3, 0.5, 0.2, 0.3, 0.4, 0.1, 0.5][self.validated % 8]))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.layer.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    def train_dataloader(self) -> Any:
        data = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(2))
        return DataLoader(TensorDataset(data), self.batch_size)

    val_dataloader = test_dataloader = train_dataloader


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


def lazy_io(**knobs: Any) -> LazyCheckpointIO:
    return LazyCheckpointIO(**SMALL_RING, **knobs)


def state_of(trainer: Trainer) -> Any:
    return trainer.lightning_module.state_dict(), [o.state_dict() for o in trainer.optimizers]


def names_in(folder: Path) -> dict[str, str]:
    """The files of a folder; for a link, what it points at."""
    return {p.name: str(os.readlink(p)) if p.is_symlink() else "" for p in folder.iterdir()}


class Each(Callback):
    """Calls something after every batch."""

    def __init__(self, call: Callable[[Trainer], None]) -> None:
        self.call = call

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.call(trainer)


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


# ModelCheckpoint's files


KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "all": {"save_top_k": -1},
    "top 1": {"monitor": "score", "filename": "{epoch}-{score:.1f}"},
    "top 2": {"monitor": "score", "save_top_k": 2, "filename": "{step}"},
    "top 2, versions": {"monitor": "score", "save_top_k": 2, "filename": "{score:.1f}"},
    "all, versions": {"monitor": "score", "save_top_k": -1, "filename": "same"},
    "last": {"monitor": "score", "save_last": True, "filename": "{step}"},
    "last only": {"save_top_k": 0, "save_last": True},
    "link": {"monitor": "score", "save_last": "link", "filename": "{step}"},
    "steps": {"every_n_train_steps": 2, "save_last": "link"},
    "steps, all": {"every_n_train_steps": 1, "save_top_k": -1, "filename": "x"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_files_are_left(kind: str, tmp_path: Path, slow_disk: None) -> None:
    def run(name: str, io: LazyCheckpointIO | None) -> tuple[Any, ...]:
        # Two of them in one folder must not take each other's names.
        callbacks = [ModelCheckpoint(tmp_path / name, **{**KINDS[kind], **more}) for more in ({}, {"mode": "max"})]
        trainer_in(tmp_path, io, *callbacks, max_epochs=2, val_check_interval=3).fit(Net())
        facts = [
            (Path(c.best_model_path).name, Path(c.last_model_path).name, [Path(p).name for p in c.best_k_models])
            for c in callbacks
        ]
        return facts, names_in(tmp_path / name)

    plain, lazy = run("plain", None), run("lazy", lazy_io())
    assert lazy == plain
    assert lazy[1]
    for path in (tmp_path / "lazy").iterdir():
        torch.load(path)


def test_a_link_to_the_last_never_dangles(tmp_path: Path, slow_disk: None) -> None:
    looked = []

    def look(trainer: Trainer) -> None:
        if (link := tmp_path / "last.ckpt").is_symlink():
            looked.append(link.exists())
        time.sleep(SLOW_S / 2)

    checkpoint = ModelCheckpoint(tmp_path, save_last="link", every_n_train_steps=1)
    # A buffer that holds all: a step that waited for the copy would wait for the disk.
    trainer_in(tmp_path, LazyCheckpointIO(), Each(look), checkpoint, max_epochs=2).fit(Net())
    assert len(looked) >= 4 and all(looked)
    assert os.readlink(tmp_path / "last.ckpt") == Path(checkpoint.best_model_path).name


def test_the_old_checkpoint_stays_until_the_new_one_is_durable(tmp_path: Path, held_disk: threading.Event) -> None:
    left: list[list[str]] = []
    io = LazyCheckpointIO()

    def look(trainer: Trainer) -> None:
        if trainer.global_step == 2:  # of the first step, saved after the callbacks of step 1
            held_disk.set()
            io.wait()
            held_disk.clear()
        elif trainer.global_step == 3:
            left.append(sorted(p.name for p in tmp_path.glob("*.ckpt")))
            held_disk.set()

    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1)
    trainer_in(tmp_path, io, Each(look), checkpoint, max_steps=3).fit(Net())
    assert left == [["step=1.ckpt"]]
    assert names_in(tmp_path) == {"step=3.ckpt": ""}


def test_a_path_is_saved_to_again_after_its_removal(tmp_path: Path, slow_disk: None) -> None:
    io = lazy_io()
    path = tmp_path / "a.ckpt"
    for value in (1, 2):
        io.save_checkpoint({"value": value}, path)
        io.remove_checkpoint(path)
        assert not io.exists(path)
    io.save_checkpoint({"value": 3}, path)
    assert io.exists(path) and not path.exists()  # for ModelCheckpoint it is there already
    assert io.load_checkpoint(path) == {"value": 3}


def test_an_older_link_does_not_replace_a_newer_one(tmp_path: Path, held_disk: threading.Event) -> None:
    io = LazyCheckpointIO()
    (tmp_path / "b.ckpt").touch()
    io.save_checkpoint({}, tmp_path / "a.ckpt")
    io.link(tmp_path / "a.ckpt", tmp_path / "last.ckpt")
    assert io.exists(tmp_path / "last.ckpt") and not (tmp_path / "last.ckpt").is_symlink()
    io.link(tmp_path / "b.ckpt", tmp_path / "last.ckpt")
    held_disk.set()
    io.wait()
    assert names_in(tmp_path) == {"a.ckpt": "", "b.ckpt": "", "last.ckpt": "b.ckpt"}


class Removals:
    """Notes each removal of a checkpoint that a power cut right after it would make a resumed run miss."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.names: list[str] = []
        self.missed: list[str] = []
        self.last: dict[str, str] = {}  # that a power cut leaves: what each link points at, "" for a file
        for name in ("rename", "remove", "unlink"):
            monkeypatch.setattr(os, name, self.removing(getattr(os, name)))
        monkeypatch.setattr(os, "fsync", self.syncing(os.fsync))
        # The training thread and the removals run on while a link is being made.
        symlink = os.symlink
        monkeypatch.setattr(os, "symlink", lambda *args: (time.sleep(SLOW_S), symlink(*args)))

    def syncing(self, fsync: Callable[[int], None]) -> Callable[[int], None]:
        def call(fd: int) -> None:
            fsync(fd)
            if os.path.samestat(os.fstat(fd), self.folder.stat()):
                self.last = {n: to for n, to in names_in(self.folder).items() if n.startswith("last")}

        return call

    def removing(self, remove: Callable[..., None]) -> Callable[..., None]:
        def call(path: Any, *args: Any, **kwargs: Any) -> None:
            name = Path(path).name
            if name.endswith(".ckpt") and not name.startswith((".", "last")) and Path(path).parent == self.folder:
                self.names.append(name)
                if not self.last or name in self.needed():
                    self.missed.append(name)
            remove(path, *args, **kwargs)

        return call

    def needed(self) -> set[str]:
        """What the newest ``last`` points at, and what the ModelCheckpoint in it holds for its best files."""
        last = max((self.folder / name for name in self.last), key=os.path.getmtime)
        needed = {self.last[last.name]}
        for state in torch.load(last, weights_only=False)["callbacks"].values():
            needed |= {Path(path).name for path in (state.get("best_model_path", ""), *state.get("best_k_models", ()))}
        return needed


LASTS: dict[str, dict[str, Any]] = {
    "link": {},
    "copy, top 2": {"save_last": True, "monitor": "score", "save_top_k": 2},
}


@pytest.mark.parametrize("attended", [True, False], ids=["lazy", "blocking"])
@pytest.mark.parametrize("kind", LASTS)
def test_no_checkpoint_goes_before_last_can_do_without_it(
    kind: str, attended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the old file went before the link to it had moved, and the link was not synced."""
    removals = Removals(tmp_path, monkeypatch)

    def run(steps: int, **fit: Any) -> ModelCheckpoint:
        knobs = {"save_last": "link", "filename": "{step}", "every_n_train_steps": 1, **LASTS[kind]}
        checkpoint = ModelCheckpoint(tmp_path, **knobs)
        trainer = trainer_in(
            tmp_path, LazyCheckpointIO(), checkpoint, max_epochs=9, max_steps=steps, val_check_interval=1
        )
        if not attended:
            trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, LazyCheckpointCallback)]
        trainer.fit(Net(), **fit)
        return checkpoint

    run(4)
    run(8, ckpt_path="last")
    assert len(removals.names) >= 2 and removals.missed == []


@pytest.mark.parametrize("attended", [True, False], ids=["lazy", "blocking"])
@pytest.mark.parametrize("save_last", ["link", True])
def test_a_save_that_fails_at_once_costs_neither_the_old_checkpoint_nor_the_link(
    save_last: Any, attended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: with on_error="warn" and a full disk, the last checkpoint was removed and the link dangled."""

    class Unsavable(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if self.trainer.global_step > 1:
                checkpoint["unsavable"] = threading.Lock()

    checkpoint = ModelCheckpoint(tmp_path, save_last=save_last, filename="{step}", every_n_train_steps=1)
    trainer = trainer_in(tmp_path, LazyCheckpointIO(on_error="warn"), checkpoint, max_steps=3)
    if not attended:
        trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, LazyCheckpointCallback)]
    trainer.fit(Unsavable())
    assert names_in(tmp_path) == {"step=1.ckpt": "", "last.ckpt": "step=1.ckpt" if save_last == "link" else ""}
    assert torch.load(tmp_path / "last.ckpt")["global_step"] == 1


def train_until_killed(run: Path, log: int, save_last: Any) -> None:
    """Goes on from ``last``, and notes in ``log`` the step at which it begins."""

    class Noting(Net):
        def on_train_start(self) -> None:
            os.write(log, f"{self.global_step}\n".encode())

    checkpoint = ModelCheckpoint(run, filename="{step}", every_n_train_steps=1, save_last=save_last)
    trainer_in(run, LazyCheckpointIO(), checkpoint, max_epochs=-1, limit_val_batches=0).fit(Noting(), ckpt_path="last")


@pytest.mark.parametrize("save_last", ["link", pytest.param(True, marks=pytest.mark.slow)])
def test_after_kill_9_last_is_there_and_training_goes_on_from_it(
    save_last: Any, tmp_path: Path, trials: Trials
) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    run.mkdir()
    log_file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    wanted = trials.count(3, 200)
    newest = 0
    for trial in range(wanted):
        child = Forked(lambda: train_until_killed(run, log_file, save_last), tmp_path / "output")
        end = time.monotonic() + 60
        while len(log.read_text().split()) <= trial or not list(run.glob("step=*.ckpt")):
            assert time.monotonic() < end, f"it does not train: {child.output.read_text()}"
            time.sleep(0.005)
        time.sleep(trials.random.uniform(0, 0.3))
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        assert int(log.read_text().split()[trial]) == newest
        lasts = [path for path in run.glob("last*.ckpt") if path.exists()]
        assert lasts or not list(run.glob("last*.ckpt")), f"last dangles: {names_in(run)}"
        newest = max(torch.load(path)["global_step"] for path in lasts or run.glob("step=*.ckpt"))
    os.close(log_file)
    trials.report(f"SIGKILL of Lightning, last is a {'link' if save_last == 'link' else 'copy'}", wanted, tmp_path)


# code that looks for files


class Looking(Net):
    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self.look = look

    def on_train_epoch_start(self) -> None:
        if self.current_epoch > 0:
            self.look()


@pytest.mark.parametrize("small", [True, False])
def test_a_hook_at_the_start_of_an_epoch_waits_for_the_disk_only_if_that_is_brief(
    small: bool, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integration, "_SMALL_BYTES", integration._SMALL_BYTES if small else 1)
    disk.late_s = SLOW_S
    if not small:
        disk.free.clear()
    found: list[bool] = []

    def look() -> None:
        found.append((tmp_path / "model.ckpt").exists())
        disk.free.set()

    checkpoint = ModelCheckpoint(tmp_path, filename="model", save_on_train_epoch_end=True)
    # A buffer that holds all: nothing but the disk could be waited for.
    trainer_in(tmp_path, LazyCheckpointIO(), checkpoint, max_epochs=2, limit_val_batches=0).fit(Looking(look))
    assert found == [small]


def test_the_best_model_is_there_at_the_end_of_training(tmp_path: Path, slow_disk: None) -> None:
    found: list[bool] = []

    class Uploads(Net):
        def on_train_end(self) -> None:
            found.extend(map(os.path.exists, [checkpoint.best_model_path, checkpoint.last_model_path]))

        def on_fit_end(self) -> None:
            found.append(os.path.exists(late.last_model_path))

    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last="link")
    late = ModelCheckpoint(tmp_path / "late", every_n_epochs=9, save_last=True)  # saves in on_train_end
    trainer_in(tmp_path, LazyCheckpointIO(), checkpoint, late, limit_val_batches=0).fit(Uploads())
    assert found == [True] * 3


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
        ours, theirs = (torch.load(tmp_path / folder / name) for folder in ("run", "plain"))
        assert graph(ours["state_dict"]) == graph(theirs["state_dict"]), name
        assert graph(ours["optimizer_states"]) == graph(theirs["optimizer_states"]), name


# loading


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


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1  # in the middle of a tensor
    path.write_bytes(data)


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


# the ends: exceptions, signals, failures


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


def test_a_pending_file_exists_however_that_is_asked(tmp_path: Path, disk: Disk) -> None:
    """A ModelCheckpoint of the user's may name the arguments."""
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="{step}", save_top_k=-1)
    file = str(tmp_path / "step=2.ckpt")
    found: list[bool] = []

    def look(trainer: Trainer) -> None:
        disk.free.clear()
        if trainer.global_step == 3:
            assert not os.path.exists(file)
            found.extend(
                [checkpoint.file_exists(file, trainer), checkpoint.file_exists(trainer=trainer, filepath=file)]
            )
            disk.free.set()

    trainer_in(tmp_path, LazyCheckpointIO(), checkpoint, Each(look), max_steps=3).fit(Net())
    assert found == [True, True]


@pytest.mark.parametrize("committing", [False, True], ids=["alone", "under commit_on"])
def test_sigterm_ends_fit_after_the_batch_with_everything_committed(
    committing: bool, tmp_path: Path, disk: Disk
) -> None:
    """The Trainer's handler has the say; that of commit_on, which was there before it, is called and kills nothing."""

    def look(trainer: Trainer) -> None:
        if trainer.global_step == 2:
            disk.free.clear()  # for step 2, which is saved after this
        elif trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            in_flight.append(io._open_saver().pending()[-1].path.name)
            timer.start()

    timer = threading.Timer(3 * SLOW_S, disk.free.set)
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


def test_another_process_makes_its_own_threads(tmp_path: Path) -> None:
    io = pickle.loads(pickle.dumps(LazyCheckpointIO(max_in_flight=3)))
    assert io._open_saver().config.max_in_flight == 3

    def save() -> None:
        io.save_checkpoint({"a": torch.ones(3)}, tmp_path / "a.ckpt")
        io.teardown()

    assert Forked(save, tmp_path / "output").wait() == 0
    assert torch.equal(torch.load(tmp_path / "a.ckpt")["a"], torch.ones(3))


# Fabric and several processes


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(folder)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


SLOW_DISK = f"""
import sys, time, torch
from pathlib import Path
from lazyckpt.storage import commit  # noqa: E402
folder, staging = Path(sys.argv[1]), commit.FileStaging
def late(target):
    time.sleep({SLOW_S})
    return staging(target)
commit.FileStaging = late
from lazyckpt.integrations.lightning import LazyCheckpointIO
"""


def test_what_fabric_saved_last_is_there_when_the_program_ends(tmp_path: Path) -> None:
    text = """
import threading
free, publish = threading.Event(), commit.publish_file
def held(*paths):
    assert free.wait(30)
    publish(*paths)
commit.publish_file = held
from lightning.fabric import Fabric
io = LazyCheckpointIO()
fabric = Fabric(accelerator="cpu", devices=1, plugins=[io])
model, optimizer = fabric.setup(net := torch.nn.Linear(128, 128), torch.optim.Adam(net.parameters()))
fabric.backward(model(torch.ones(1, 128)).sum())
optimizer.step()
fabric.save(folder / "a.ckpt", {"model": model, "optimizer": optimizer})
(handle,) = io._open_saver().pending()
assert handle.wait_captured(9) and not handle.path.exists()
torch.save(net.state_dict(), folder / "expected.pt")
handle.add_done_callback(lambda _: print("eager", handle.metrics.eager_bytes, "of", handle.metrics.bytes))
timer = threading.Timer(0.5, free.set)
timer.daemon = True  # the end of the program does not wait for it
timer.start()
"""
    done = run_script(tmp_path, SLOW_DISK + text)
    ours, expected = torch.load(tmp_path / "a.ckpt")["model"], torch.load(tmp_path / "expected.pt")
    assert torch.equal(ours["weight"], expected["weight"])
    # Its first save, and lazy: it has seen the optimizer step.
    _, eager, _, total = done.stdout.splitlines()[-1].split()
    assert int(eager) < 0.1 * int(total)


DISTRIBUTED = """
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
class Net(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(64, 64)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(16, 64, generator=torch.Generator().manual_seed(1)), 2)
def run(strategy, plugins, name, epochs=1, **kwargs):
    # One name for all: every rank must know which saves are pending on rank 0, or the names differ.
    checkpoint = ModelCheckpoint(folder / name, monitor="step", mode="max", every_n_train_steps=1, save_top_k=-1,
                                 filename="x", save_last="link")
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", devices=2, strategy=strategy, plugins=plugins, logger=False,
                      enable_progress_bar=False, enable_model_summary=False, callbacks=[checkpoint])
    trainer.fit(Net(), **kwargs)
    return trainer, checkpoint
"""


@pytest.mark.slow
def test_ddp(tmp_path: Path) -> None:
    text = """
_, plain = run("ddp", [], "plain")
io = LazyCheckpointIO(host_buffer_bytes=16384, chunk_bytes=4096)
trainer, lazy = run("ddp", [io], "lazy")
assert Path(lazy.best_model_path).name == Path(plain.best_model_path).name == "x-v3.ckpt", lazy.best_model_path
assert (folder / "lazy" / "x-v3.ckpt").exists()  # on every rank, as soon as fit returns
assert not list((folder / "lazy").glob(".tmp-*")) and (trainer.is_global_zero or not io._unreported)
trainer, _ = run("ddp", [io], "lazy", epochs=2, ckpt_path="last")
assert trainer.global_step == 8
"""
    run_script(tmp_path, SLOW_DISK + DISTRIBUTED + text)
    files = {"x.ckpt", "x-v1.ckpt", "x-v2.ckpt", "x-v3.ckpt", "last.ckpt"}
    assert names_in(tmp_path / "plain") == {**dict.fromkeys(files, ""), "last.ckpt": "x-v3.ckpt"}
    assert files < names_in(tmp_path / "lazy").keys()
    assert max(torch.load(path)["global_step"] for path in (tmp_path / "lazy").iterdir()) == 8
    for name in files - {"last.ckpt"}:
        ours, theirs = (torch.load(tmp_path / folder / name)["state_dict"] for folder in ("lazy", "plain"))
        assert torch.equal(ours["layer.weight"], theirs["layer.weight"])


@pytest.mark.slow
def test_ddp_spawn(tmp_path: Path) -> None:
    text = """
if __name__ == "__main__":
    _, plain = run("ddp_spawn", [], "plain")
    trainer, lazy = run("ddp_spawn", [LazyCheckpointIO(host_buffer_bytes=16384, chunk_bytes=4096)], "lazy")
    assert Path(lazy.best_model_path).name == Path(plain.best_model_path).name
    last = torch.load(folder / "lazy" / "last.ckpt")["state_dict"]
    # Saved by the worker after its teardown, loaded here.
    assert torch.equal(last["layer.weight"], trainer.lightning_module.layer.weight)
"""
    run_script(tmp_path, SLOW_DISK + DISTRIBUTED + text)
    assert names_in(tmp_path / "lazy") == names_in(tmp_path / "plain")


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
