"""Schedule-free optimizers in the three trainers, which save with the weights of training or of evaluation.

Every test trains twice, without lazyckpt and with it, and compares losses, final states and files. With it, copies
begin late and through a ring that holds a fraction of the state: training, and the switches between the two kinds of
weights, get to the tensors first if nothing holds them.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"

schedulefree = pytest.importorskip("schedulefree")

import lazyckpt  # noqa: E402
from lazyckpt.pipeline import background  # noqa: E402
from lazyckpt.pipeline.launch import Launcher  # noqa: E402
from trainers import (  # noqa: E402
    ScheduleFreeHooks,
    contents,
    forget_accelerators,
    hugging_face_arguments,
    lightning_trainer,
)

Graph = Callable[[Any], Any]
Knobs = dict[str, Any] | None  # of lazyckpt; None: the trainer without it
SMALL_RING = {"chunk_bytes": 16 << 10, "host_buffer_bytes": 64 << 10}
LATE_S = 0.03
TOKENS = 512
STEPS = 8
EVERY = 2  # steps between saves; they are evaluated as well every second time


class Net(nn.Module):
    """600 KB; tokens in, and the loss out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(TOKENS, 128)
        self.norm = nn.BatchNorm1d(128)  # its buffers change in forward
        self.head = nn.Linear(128, TOKENS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.norm(self.embedding(input_ids).flatten(0, 1)))
        return {"loss": nn.functional.cross_entropy(logits, labels.flatten())}


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, TOKENS, (8,), generator=generator) for _ in range(2 * STEPS)]
    return [{"input_ids": row, "labels": row} for row in tokens]


def loader() -> Any:
    return torch.utils.data.DataLoader(rows(), batch_size=2)  # type: ignore[arg-type]


class Outcome(NamedTuple):
    losses: list[Any]  # of training and of evaluation
    state: Any  # of the model and its optimizer in the end


Train = Callable[[Path, Knobs, Path | None], Outcome]


# The trainers


def hugging_face(folder: Path, knobs: Knobs, resumed: Path | None) -> Outcome:
    transformers = pytest.importorskip("transformers")
    from lazyckpt.integrations.transformers import LazyCheckpointCallback

    arguments = hugging_face_arguments(
        folder,
        optim="schedule_free_adamw",
        learning_rate=0.01,
        lr_scheduler_type="constant",
        warmup_steps=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        eval_strategy="steps",
        eval_steps=2 * EVERY,
        save_strategy="steps",
        save_steps=EVERY,
        logging_steps=1,
    )
    trainer = transformers.Trainer(
        Net(),
        arguments,
        train_dataset=rows(),
        eval_dataset=rows()[:4],
        callbacks=[] if knobs is None else [LazyCheckpointCallback(**knobs)],
    )
    trainer.train(resume_from_checkpoint=resumed and str(resumed))
    losses = [entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history[:-1]]
    return Outcome(losses, [trainer.model.state_dict(), trainer.optimizer.optimizer.state_dict()])


def lightning(hooks: str) -> Train:
    """``hooks``: in which of its hooks the module switches its optimizer."""

    def train(folder: Path, knobs: Knobs, resumed: Path | None) -> Outcome:
        pl = pytest.importorskip("lightning.pytorch")
        from lazyckpt.integrations.lightning import LazyCheckpointIO

        losses: list[Any] = []

        class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.net = Net()

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = self.net(**batch)["loss"]
                losses.append(loss.item())
                return loss

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                losses.append(self.net(**batch)["loss"].item())

            def configure_optimizers(self) -> Any:
                return schedulefree.AdamWScheduleFree(self.parameters(), lr=0.01, warmup_steps=2)

            def train_dataloader(self) -> Any:
                return loader()

            val_dataloader = train_dataloader

        class ByModel(ScheduleFreeHooks, Module):
            pass

        class ByCallback(pl.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                trainer.optimizers[0].train()

            def on_validation_epoch_start(self, trainer: Any, *_: Any) -> None:
                trainer.optimizers[0].eval()

        module = ByModel() if hooks == "by model" else Module()
        checkpoints = pl.callbacks.ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=EVERY)
        trainer = lightning_trainer(
            folder,
            None if knobs is None else LazyCheckpointIO(**knobs),
            *[checkpoints, *([ByCallback()] if hooks == "by callback" else [])],
            max_steps=STEPS,
            max_epochs=-1,
            limit_train_batches=STEPS // 2,
            limit_val_batches=2,
            val_check_interval=2 * EVERY,
        )
        trainer.fit(module, ckpt_path=resumed)
        return Outcome(losses, [module.state_dict(), trainer.optimizers[0].state_dict()])

    return train


def accelerate(folder: Path, knobs: Knobs, resumed: Path | None) -> Outcome:
    accelerate = pytest.importorskip("accelerate")
    from lazyckpt.integrations.accelerate import enable

    losses: list[Any] = []
    accelerator = accelerate.Accelerator(cpu=True)
    try:
        model = Net()
        optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01, warmup_steps=2)
        model, optimizer = accelerator.prepare(model, optimizer)
        if knobs is not None:
            enable(accelerator, **knobs)
        begin = 0
        if resumed is not None:
            accelerator.load_state(str(resumed))
            begin = int(resumed.name)
        batches = list(loader())
        for step in range(begin + 1, STEPS + 1):
            model.train()
            optimizer.train()
            loss = model(**batches[step - 1])["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step % (2 * EVERY) == 0:
                model.eval()
                optimizer.eval()
                with torch.no_grad():
                    losses.append(model(**batches[0])["loss"].item())
            if step % EVERY == 0:
                accelerator.save_state(str(folder / str(step)))
        accelerator.end_training()
        return Outcome(losses, [model.state_dict(), optimizer.state_dict()])
    finally:
        forget_accelerators()


TRAINERS: dict[str, Train] = {
    "HF Trainer": hugging_face,
    "Lightning by model": lightning("by model"),
    "Lightning by callback": lightning("by callback"),
    "Accelerate": accelerate,
}


# Comparisons


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[lazyckpt.SaveHandle]]:
    """Of all saves, which are late."""
    handles: list[lazyckpt.SaveHandle] = []
    launch, persist = Launcher.launch, background.Background._persist

    def recorded(*args: Any, **kwargs: Any) -> lazyckpt.SaveHandle:
        handles.append(launch(*args, **kwargs))
        return handles[-1]

    def late(self: Any, flight: Any) -> None:
        time.sleep(LATE_S)
        persist(self, flight)

    monkeypatch.setattr(Launcher, "launch", recorded)
    monkeypatch.setattr(background.Background, "_persist", late)
    yield handles


@contextlib.contextmanager
def no_word_of_lazyckpt() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    words = [str(warning.message) for warning in caught]
    assert not [text for text in words if "lazyckpt" in text or "copied inside save()" in text]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("trainer", "witness"), [*((trainer, "auto") for trainer in TRAINERS), ("Lightning by callback", "versions")]
)
def test_training_and_files_are_what_they_are_without_lazyckpt(
    trainer: str, witness: str, tmp_path: Path, handles: list[lazyckpt.SaveHandle], graph: Graph
) -> None:
    train, knobs = TRAINERS[trainer], {**SMALL_RING, "witness": witness}
    plain = train(tmp_path / "run", None, None)
    assert not handles
    os.rename(tmp_path / "run", tmp_path / "plain")
    with no_word_of_lazyckpt():
        lazy = train(tmp_path / "run", knobs, None)
    assert lazy.losses == plain.losses and len(plain.losses) > STEPS
    assert graph(lazy.state) == graph(plain.state)
    assert len(handles) == STEPS // EVERY
    for handle in handles:
        handle.result(timeout=30)
        assert handle.metrics.eager_bytes < handle.metrics.bytes / 10, "most of it is lazy"
    theirs, ours = contents(tmp_path / "plain", graph), contents(tmp_path / "run", graph)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert ours[name] == theirs[name], name

    for checkpoint in sorted(path.name for path in (tmp_path / "plain").iterdir())[:2]:  # of both kinds of weights
        with no_word_of_lazyckpt():
            resumed = train(tmp_path / "resumed", knobs, tmp_path / "run" / checkpoint)
        # Lightning alone begins the data of an epoch anew, and leaves out the validation at its end.
        if checkpoint != "epoch=0-step=2.ckpt":
            expected = train(tmp_path / "resumed plain", None, tmp_path / "plain" / checkpoint)
            assert resumed.losses == expected.losses
            assert graph(resumed.state) == graph(expected.state)
        if checkpoint != "epoch=0-step=4.ckpt":
            assert graph(resumed.state) == graph(plain.state)
