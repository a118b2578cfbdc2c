"""What Lightning's plugin tells: a checkpoint is reported when ``last`` points to it, and a logger sees the moment of
the save."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import lazyckpt
from lazyckpt.storage import commit

pytest.importorskip("lightning", minversion="2.6")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger

from lazyckpt.integrations.lightning import LazyCheckpointIO
from trainers import lightning_trainer as trainer_in

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("small_tensors_are_lazy")]


class Net(LightningModule):
    """Four batches an epoch; the score gets better with each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("score", float(-self.global_step))
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(8, 64), batch_size=2)  # type: ignore[arg-type]


@pytest.fixture
def held_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that gives no file its name before the event is set."""
    free, publish = threading.Event(), commit.publish_file

    def held(temporary: Path, target: Path) -> None:
        assert free.wait(30)
        publish(temporary, target)

    monkeypatch.setattr(commit, "publish_file", held)
    return free


# on_done


def step_of_last(folder: Path) -> int | None:
    last = folder / "last.ckpt"
    return int(torch.load(last)["global_step"]) if last.exists() else None


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("save_last", ["link", True])
@pytest.mark.parametrize("monitor", [None, "score"])
def test_a_checkpoint_is_reported_when_last_is_that_of_its_step(
    monitor: str | None, save_last: Any, max_in_flight: int, tmp_path: Path
) -> None:
    """Regression: on_done reported a step while ``last`` was still the one before, so that a run that was resumed after
    a power cut began one acknowledged step back."""
    reported: list[tuple[int | None, int | None]] = []

    def on_done(metrics: lazyckpt.CheckpointMetrics, error: Any) -> None:
        assert error is None
        reported.append((metrics.step, step_of_last(tmp_path)))

    io = LazyCheckpointIO(on_done=on_done, max_in_flight=max_in_flight)
    checkpoint = ModelCheckpoint(
        tmp_path,
        every_n_train_steps=1,
        save_last=save_last,
        filename="{step}",
        save_top_k=2 if monitor else 1,
        monitor=monitor,
    )
    trainer_in(tmp_path, io, checkpoint).fit(Net())
    assert [step for step, _ in reported] == sorted([1, 2, 3, 4] * (1 if save_last == "link" else 2))
    assert all(last is not None and step is not None and last >= step for step, last in reported), reported


def test_without_last_each_checkpoint_is_reported_when_it_is_durable(tmp_path: Path) -> None:
    reported = []
    io = LazyCheckpointIO(on_done=lambda metrics, error: reported.append((metrics.step, error)))
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="{step}", save_top_k=-1)
    trainer_in(tmp_path, io, checkpoint).fit(Net())
    assert reported == [(2, None), (4, None)]


@pytest.mark.parametrize("save_last", ["link", True, None])
def test_a_failure_is_reported_once(save_last: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = commit.publish_file

    def fail_for_step_2(temporary: Path, target: Path) -> None:
        if target.name == "step=2.ckpt":
            raise OSError(5, "Input/output error")
        publish(temporary, target)

    monkeypatch.setattr(commit, "publish_file", fail_for_step_2)
    reported = []
    io = LazyCheckpointIO(
        on_error="warn", on_done=lambda metrics, error: reported.append((metrics.step, error is None))
    )
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=save_last, filename="{step}", save_top_k=-1)
    trainer_in(tmp_path, io, checkpoint).fit(Net())
    assert [step for step, good in reported if not good] == [2]
    assert {step for step, good in reported if good} >= {1, 3, 4}
    assert (2, True) not in reported or save_last is True  # the copy was saved


def test_an_on_done_that_raises_warns_and_training_goes_on(tmp_path: Path) -> None:
    io = LazyCheckpointIO(on_done=lambda metrics, error: 1 / 0)
    trainer = trainer_in(tmp_path, io, ModelCheckpoint(tmp_path, every_n_train_steps=2, save_last="link"))
    with pytest.warns(UserWarning, match="on_done raised ZeroDivisionError"):
        trainer.fit(Net())
    assert trainer.global_step == 4


# loggers


class Scanning(Logger):
    """Looks at the ModelCheckpoint, and at the files, as loggers do that upload checkpoints; keeps it for the end."""

    name, version = "scanning", 0

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def log_metrics(self, *_: Any, **__: Any) -> None:
        pass

    log_hyperparams = log_metrics

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.checkpoint = checkpoint_callback
        assert isinstance(checkpoint_callback, ModelCheckpoint)
        self.seen.append(self.look())

    def look(self) -> Any:
        """The state, and the step in each file that it names."""
        best = {Path(name).name: float(score) for name, score in self.checkpoint.best_k_models.items()}
        state = self.checkpoint.state_dict()
        files = {Path(name).name: os.path.exists(name) for name in self.checkpoint.best_k_models}
        path = state["best_model_path"]
        name = Path(self.checkpoint.format_checkpoint_name({"step": 5})).name
        return best, Path(path).name, torch.load(path)["global_step"], files, name, Path(state["last_model_path"]).name

    def finalize(self, status: str) -> None:
        if status == "success":
            self.seen.append(self.look())


@pytest.mark.parametrize("save_top_k", [1, 2])
def test_a_logger_that_is_told_late_sees_the_moment_of_the_save(
    save_top_k: int, tmp_path: Path, held_disk: threading.Event
) -> None:
    """Regression: it saw the ModelCheckpoint of a later step, and files of its own step were gone by then."""

    def run(lazy: bool) -> list[Any]:
        logger = Scanning()
        checkpoint = ModelCheckpoint(
            tmp_path / str(lazy), every_n_train_steps=1, filename="{step}", monitor="score", save_top_k=save_top_k
        )

        class Free(Net):
            """Lets the disk go on in the last step, when all saves but one have begun."""

            def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
                if batch_idx == 3:
                    assert not (lazy and logger.seen)
                    held_disk.set()

        held_disk.clear() if lazy else held_disk.set()
        io = LazyCheckpointIO(max_in_flight=8, host_buffer_bytes=8 << 20, chunk_bytes=1 << 20) if lazy else None
        trainer_in(tmp_path, io, checkpoint, logger=logger, log_every_n_steps=1).fit(Free())
        return logger.seen

    plain = run(lazy=False)
    assert len(plain) == 5 and run(lazy=True) == plain


# code that reads the file at once


class Uploads(ModelCheckpoint):
    """As LitModelCheckpoint."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.uploaded: list[int] = []

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self.uploaded.append(torch.load(filepath)["global_step"])


class Archives(ModelCheckpoint):
    """Keeps a copy of what goes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.uploaded: list[int] = []

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        self.uploaded.append(torch.load(filepath)["global_step"])
        super()._remove_checkpoint(trainer, filepath)


class Follows(ModelCheckpoint):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.uploaded: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(trainer, *args, **kwargs)
        self.uploaded.append(torch.load(self.best_model_path)["global_step"])


@pytest.mark.parametrize("kind", [Uploads, Archives, Follows])
def test_a_subclass_that_reads_the_file_at_once_finds_it(kind: Any, tmp_path: Path) -> None:
    """Regression: it got a FileNotFoundError."""
    found = []
    for io in (None, LazyCheckpointIO()):
        checkpoint = kind(tmp_path / str(io is None), every_n_train_steps=1, filename="{step}", save_last="link")
        trainer_in(tmp_path, io, checkpoint).fit(Net())
        found.append(checkpoint.uploaded)
    assert found[0] == found[1] and len(found[0]) >= 3
