"""In the trainers that people use: Lightning, Accelerate and the Hugging Face Trainer, each with what it offers itself
and with lazyckpt, over the same training without checkpoints.

A block is one real run of a trainer (`fit`, `train`, a loop around `Accelerator`) over the same GPT, with a checkpoint
every `EVERY` steps. Its clock starts after the first checkpoint, when that is on the disk, and stops when the trainer
has returned and everything it wrote is synced. No checkpoint is deleted inside it. The arms of a trainer take turns in
shuffled order, the trainers, too; the first round warms up and is dropped.

Blocked is measured by one stopwatch, from outside and in the same two places for every arm: inside the trainer's call
that saves, and from the moment when the gradients are there until the optimizer touches the first parameter.
"""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.arms.base import fsync_tree
from benchmarks.paired import rounds, spread
from benchmarks.report import Table
from benchmarks.workload import CONTEXT, VOCABULARY, Training

EVERY = 2  # steps from checkpoint to checkpoint
COMPUTE_S = 0.15  # forward and backward of a step, at least
NONE = "none"


class Stopwatch:
    """Adds up the seconds in which the training thread waits for checkpoints."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.blocked_s = 0.0
        self.saves = 0
        self._ready: float | None = None
        self._optimizer: Any = optimizer
        init_group = self._optimizer._init_group  # what step() calls first, once it has run its hooks and its closure

        def stamped(*args: Any, **kwargs: Any) -> Any:
            if self._ready is not None:
                self.blocked_s += time.perf_counter() - self._ready
                self._ready = None
            return init_group(*args, **kwargs)

        self._optimizer._init_group = stamped

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around the trainer's call that saves."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.blocked_s += time.perf_counter() - begin
            self.saves += 1

    def ready(self) -> None:
        """The gradients are there: the optimizer could begin."""
        self._ready = time.perf_counter()

    def restart(self) -> None:
        self.blocked_s, self.saves = 0.0, 0

    def remove(self) -> None:
        del self._optimizer._init_group


@dataclass
class Block:
    """One run of a trainer, and what a trainer needs for it."""

    training: Training
    arm: str
    folder: Path
    steps: int  # with those before the clock starts
    seconds: float = float("nan")
    blocked_s: float = float("nan")  # per checkpoint, or what would be one
    reported_s: list[float] = field(default_factory=list)  # what lazyckpt says of each, the first one too
    watch: Stopwatch = field(init=False)
    _started: float = float("nan")

    def rows(self) -> torch.Tensor:
        """As many sequences as the run reads."""
        return torch.randint(VOCABULARY, (self.steps * self.training.sequences, CONTEXT + 1))

    def step_begins(self, step: int, drain: Callable[[], object]) -> None:
        """Step 0 is the first. `drain` returns when nothing of the first checkpoint is on its way in this process."""
        if step == EVERY:
            drain()
            os.sync()
            self.watch.restart()
            self._started = time.perf_counter()

    def run(self, train: Callable[[Block], None]) -> None:
        self.folder.mkdir(parents=True)
        self.watch = Stopwatch(self.training.optimizer)
        try:
            train(self)
            fsync_tree(self.folder)
            self.seconds = time.perf_counter() - self._started
            self.blocked_s = self.watch.blocked_s / (self.steps // EVERY - 1)
        finally:
            self.watch.remove()
            shutil.rmtree(self.folder)
            gc.collect()  # trainers are full of cycles
            os.sync()


def _nothing() -> None:
    pass


def train_lightning(block: Block) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    training, io, drain = block.training, None, _nothing
    if block.arm == "AsyncCheckpointIO":
        io = AsyncCheckpointIO(TorchCheckpointIO())
        drain = io.teardown  # the next save starts a new thread
    elif block.arm == "LazyCheckpointIO":
        from lazyckpt.integrations.lightning import LazyCheckpointIO

        io = LazyCheckpointIO()
        drain = io.wait

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = training.model

        def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
            return training.model.loss(tokens)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return training.optimizer

        def on_train_batch_start(self, batch: torch.Tensor, index: int) -> None:
            block.step_begins(index, drain)

        def on_before_optimizer_step(self, optimizer: object) -> None:
            block.watch.ready()

    class Logger(DummyLogger):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            if "checkpoint/blocked_ms" in metrics:
                block.reported_s.append(metrics["checkpoint/blocked_ms"] / 1e3)

    class TimedTrainer(Trainer):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            with block.watch.saving():
                super().save_checkpoint(*args, **kwargs)

    checkpoint = ModelCheckpoint(block.folder, every_n_train_steps=EVERY, save_top_k=-1)
    trainer = TimedTrainer(
        accelerator="cpu",
        devices=1,
        max_steps=block.steps,
        plugins=[io] if io else None,
        callbacks=[] if block.arm == NONE else [checkpoint],
        enable_checkpointing=block.arm != NONE,
        logger=Logger(),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=block.folder,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(block.rows(), training.sequences))


def train_accelerate(block: Block) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    saver: Any = None
    if block.arm == "enable":
        from lazyckpt.integrations.accelerate import enable

        saver = enable(accelerator)
    loader = torch.utils.data.DataLoader(block.rows(), block.training.sequences)
    model, optimizer, loader = accelerator.prepare(block.training.model, block.training.optimizer, loader)
    handles = []
    for step, tokens in enumerate(loader):
        block.step_begins(step, saver.wait if saver else _nothing)
        accelerator.backward(model.loss(tokens))
        block.watch.ready()
        optimizer.step()
        optimizer.zero_grad()
        if block.arm != NONE and (step + 1) % EVERY == 0:
            with block.watch.saving():
                accelerator.save_state(str(block.folder / f"step-{step + 1}"))
            handles += [saver.last_save] if saver else []
    accelerator.end_training()
    block.reported_s = [handle.metrics.blocked_s for handle in handles]


def train_transformers(block: Block) -> None:
    from transformers import (
        PreTrainedConfig,
        PreTrainedModel,
        PrinterCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    training, drain = block.training, _nothing
    callbacks: list[TrainerCallback] = []
    if block.arm == "LazyCheckpointCallback":
        from lazyckpt.integrations.transformers import LazyCheckpointCallback

        callbacks = [LazyCheckpointCallback()]
        drain = callbacks[0].wait

    class Model(PreTrainedModel):
        config_class = PreTrainedConfig

        def __init__(self) -> None:
            super().__init__(PreTrainedConfig())
            self.gpt = training.model
            self.post_init()

        def _init_weights(self, module: torch.nn.Module) -> None:
            pass  # it is trained already

        def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": training.model.loss(tokens)}

    class Timing(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            block.step_begins(state.global_step, drain)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % EVERY:
                control.should_save = False  # the Trainer saves after the last step, too

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            block.watch.ready()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "checkpoint/blocked_ms" in logs:
                block.reported_s.append(logs["checkpoint/blocked_ms"] / 1e3)

    class TimedTrainer(Trainer):
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            with block.watch.saving():
                super()._save_checkpoint(*args, **kwargs)

    constant = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: 1.0)
    arguments = TrainingArguments(
        output_dir=str(block.folder),
        max_steps=block.steps,
        per_device_train_batch_size=training.sequences,
        save_strategy="no" if block.arm == NONE else "steps",
        save_steps=EVERY,
        logging_steps=EVERY,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = TimedTrainer(
        Model(),
        arguments,
        train_dataset=[{"tokens": row} for row in block.rows()],
        optimizers=(training.optimizer, constant),
        callbacks=[*callbacks, Timing()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


@dataclass(frozen=True)
class TrainerKind:
    train: Callable[[Block], None]
    arms: tuple[str, ...]  # besides NONE: the trainer's own, and ours


TRAINERS = {
    "lightning": TrainerKind(train_lightning, ("TorchCheckpointIO", "AsyncCheckpointIO", "LazyCheckpointIO")),
    "accelerate": TrainerKind(train_accelerate, ("default", "enable")),
    "transformers": TrainerKind(train_transformers, ("default", "LazyCheckpointCallback")),
}


@dataclass
class Series:
    """One arm's rounds so far, or why it has none."""

    ratio: list[float] = field(default_factory=list)  # of block times, over the block without in the same round
    blocked_ms: list[float] = field(default_factory=list)  # mean of the block
    reported_ms: list[float] = field(default_factory=list)
    failure: str = ""


def measure(
    *,
    pairs: int,
    checkpoints: int,
    state_bytes: int,
    directory: Path,
    progress: Callable[[str], None],
    compute_s: float = COMPUTE_S,
) -> Table:
    """`checkpoints` in each block while its clock runs."""
    training = Training(state_bytes)
    compute_s = training.calibrate(compute_s)
    steps = (checkpoints + 1) * EVERY + 1  # one more: what the last checkpoint makes it wait for counts, too
    arms = {trainer: (NONE, *kind.arms) for trainer, kind in TRAINERS.items()}
    series = {(trainer, arm): Series() for trainer in TRAINERS for arm in arms[trainer]}
    orders = {trainer: rounds(arms[trainer], pairs + 1) for trainer in TRAINERS}
    for number, trainers in enumerate(rounds(list(TRAINERS), pairs + 1)):
        for trainer in trainers:
            blocks: dict[str, Block] = {}
            for arm in next(orders[trainer]):
                one = series[trainer, arm]
                if one.failure:
                    continue
                progress(f"round {number + 1}/{pairs + 1}: {trainer}: {arm}")
                block = Block(training, arm, directory / "run", steps)
                try:
                    block.run(TRAINERS[trainer].train)
                except Exception as error:
                    one.failure = f"{type(error).__name__}: {error}".splitlines()[0]
                else:
                    blocks[arm] = block
            if number:
                _record(series, trainer, blocks)
    return _table(series, pairs, checkpoints, compute_s, training)


def _record(series: dict[tuple[str, str], Series], trainer: str, blocks: dict[str, Block]) -> None:
    for arm, block in blocks.items():
        one = series[trainer, arm]
        if NONE in blocks:
            one.ratio.append(block.seconds / blocks[NONE].seconds)
        one.blocked_ms.append(1e3 * block.blocked_s)
        if block.reported_s:
            measured = block.reported_s[1:]
            one.reported_ms.append(1e3 * sum(measured) / len(measured))


def _table(
    series: dict[tuple[str, str], Series], pairs: int, checkpoints: int, compute_s: float, training: Training
) -> Table:
    state_bytes = sum(t.nbytes for t in training.tensors().values())
    table = Table(
        f"In the three trainers, a checkpoint every {EVERY} steps ({state_bytes / 1e9:.2f} GB of AdamW state)",
        ["trainer: arm", "time over none", "blocked, ms", "by its own metrics, ms"],
    )
    for (trainer, arm), one in series.items():
        if one.failure:
            table.missing(f"{trainer}: {arm}", one.failure)
        else:
            ratio = "1" if arm == NONE else spread(one.ratio)
            reported = spread(one.reported_ms, 1) if one.reported_ms else "-"
            table.add(f"{trainer}: {arm}", ratio, spread(one.blocked_ms, 1), reported)
    table.notes += [
        f"{pairs} pairs; a block is {checkpoints * EVERY + 1} steps (forward + backward {compute_s:.2f} s, "
        f"{training.sequences} sequences) with {checkpoints} checkpoints, then drain and sync.",
        "Blocked: the trainer's call that saves, and what the optimizer waits before it begins; mean per checkpoint. "
        "By its own metrics: lazyckpt's; those of Accelerate leave out what Accelerate itself writes in that call.",
        "Accelerate and the Trainer of transformers have no asynchronous option of their own for a model that is not "
        "sharded.",
    ]
    return table
