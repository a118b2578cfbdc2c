"""The files that ModelCheckpoint leaves, and those that code looks for while they are not durable yet."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", minversion="2.6")

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lazyckpt.integrations import lightning_callback as integration
from lazyckpt.integrations.lightning import LazyCheckpointCallback, LazyCheckpointIO
from lightning_runs import Each, Net, lazy_io, names_in
from trainers import SLOW_S, FileDisk, Forked
from trainers import lightning_trainer as trainer_in
from trials import Trials

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("small_tensors_are_lazy")]


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


@pytest.mark.long(first=5)
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
    small: bool, tmp_path: Path, file_disk: FileDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integration, "_SMALL_BYTES", integration._SMALL_BYTES if small else 1)
    file_disk.late_s = SLOW_S
    if not small:
        file_disk.free.clear()
    found: list[bool] = []

    def look() -> None:
        found.append((tmp_path / "model.ckpt").exists())
        file_disk.free.set()

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
