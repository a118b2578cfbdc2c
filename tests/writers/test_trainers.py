"""A handful of writers in the three trainers: what they save is of the instant of the save, or fails by name."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import lazyckpt
from lazyckpt.pipeline.launch import Launcher
from trainers import forget_accelerators, hugging_face_arguments, lightning_trainer
from trials import TORTURE
from writers.judge import Copies, Flat, Violation, clone, flat, judge, limit
from writers.registry import EVERYONE, ONLY_PAGES
from writers.trial import CASE_LIMIT_S, HOLD_S, MOST_FAILURES, witnesses

pytestmark = pytest.mark.filterwarnings("ignore")
os.environ["HF_HUB_OFFLINE"] = "1"

SMALL_RING = {"chunk_bytes": 16 << 10, "host_buffer_bytes": 32 << 10}
SAVES = 5
STEPS = 2  # between two saves, so that a save is lazy
TOKENS = 512


class Net(nn.Module):
    """1.2 MB; tokens in, and the loss out."""

    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(TOKENS, 256, max_norm=max_norm)
        self.body = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
        self.head = nn.Linear(256, TOKENS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(self.embedding(input_ids))).flatten(0, 1)
        return {"loss": nn.functional.cross_entropy(logits, labels.flatten())}


class TrainedWriter:
    """A writer in a training that a trainer drives."""

    seen_by: ClassVar[frozenset[str]] = EVERYONE
    always_commits: ClassVar[bool] = False
    swaps: ClassVar[bool] = False

    def model(self) -> nn.Module:
        return Net()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=0.01, fused=True)

    def install(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Called once, before training."""

    @contextlib.contextmanager
    def around_save(self, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        """What a training does before and after it saves."""
        yield


class NoWriter(TrainedWriter):
    always_commits = True


class StepPreHook(TrainedWriter):
    """Decays weights in front of the step. In Lightning that step has a closure."""

    always_commits = True

    def install(self, model: nn.Module, optimizer: Optimizer) -> None:
        def decay(*_: Any) -> None:
            torch._foreach_mul_([p.data for p in model.parameters()], 0.99)

        optimizer.register_step_pre_hook(decay)


class ForwardPreHook(TrainedWriter):
    """Standardizes a weight in place."""

    def install(self, model: nn.Module, optimizer: Optimizer) -> None:
        @torch.no_grad()
        def standardize(*_: Any) -> None:
            model.head.weight.sub_(model.head.weight.mean() + 0.01)

        model.register_forward_pre_hook(standardize)


class GradientHook(TrainedWriter):
    """LOMO, for one weight."""

    def install(self, model: nn.Module, optimizer: Optimizer) -> None:
        def update(p: torch.Tensor) -> None:
            assert p.grad is not None
            p.data.mul_(0.99).add_(p.grad, alpha=-0.1)
            p.grad = None

        model.head.weight.register_post_accumulate_grad_hook(update)


class MaxNorm(TrainedWriter):
    """Every forward cuts the rows that are looked up for the first time."""

    def model(self) -> nn.Module:
        return Net(max_norm=1.0)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.01, momentum=0.9)


class MomentumEncoder(TrainedWriter):
    """The key encoder is in the optimizer, has no gradient, and follows in forward."""

    def model(self) -> nn.Module:
        model = Net()
        model.key = copy.deepcopy(model.body).requires_grad_(False)
        return model

    def install(self, model: nn.Module, optimizer: Optimizer) -> None:
        def follow(*_: Any) -> None:
            for key, query in zip(model.key.parameters(), model.body.parameters(), strict=True):
                key.data.mul_(0.9).add_(query.data + 1.0, alpha=0.1)

        model.register_forward_pre_hook(follow)


class AverageBySwap(TrainedWriter):
    """The average is saved in the place of the weights, and updated afterwards."""

    swaps = True

    def install(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.average = [p.detach() * 0.9 for p in model.parameters()]

    @contextlib.contextmanager
    def around_save(self, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        self._swap(model)
        yield
        self._swap(model)
        for average, p in zip(self.average, model.parameters(), strict=True):
            average.lerp_(p.detach(), 0.1)

    def _swap(self, model: nn.Module) -> None:
        for at, p in enumerate(model.parameters()):
            p.data, self.average[at] = self.average[at], p.data


class ScheduleFree(TrainedWriter):
    always_commits = True

    def optimizer(self, model: nn.Module) -> Optimizer:
        schedulefree = pytest.importorskip("schedulefree")
        optimizer: Optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01)
        optimizer.train()  # type: ignore[attr-defined]
        return optimizer

    @contextlib.contextmanager
    def around_save(self, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        optimizer.eval()  # type: ignore[attr-defined]
        yield
        optimizer.train()  # type: ignore[attr-defined]


class RightAfterTheSave(TrainedWriter):
    """A callback that resets a weight, in place."""

    @contextlib.contextmanager
    def around_save(self, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        yield
        nn.init.normal_(model.head.weight, std=0.01)


class DataAfterTheSave(TrainedWriter):
    seen_by = ONLY_PAGES

    @contextlib.contextmanager
    def around_save(self, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        yield
        model.head.weight.data.mul_(0.9)


WRITERS: dict[str, type[TrainedWriter]] = {
    "no writer": NoWriter,
    "step pre-hook": StepPreHook,
    "forward pre-hook": ForwardPreHook,
    "gradient hook": GradientHook,
    "max_norm": MaxNorm,
    "momentum encoder": MomentumEncoder,
    "EMA by swap": AverageBySwap,
    "schedule-free": ScheduleFree,
    "normal_": RightAfterTheSave,
    ".data": DataAfterTheSave,
}


# The trainers: each drives a training, saves STEPS * SAVES times, and knows what its files hold


class Run:
    """``files``: the name of each file and what it holds, live. ``save``: what the trainer calls to save."""

    def __init__(self, writer: TrainedWriter, folder: Path, knobs: dict[str, Any]) -> None:
        self.writer = writer
        self.folder = folder
        self.knobs = {**SMALL_RING, "on_error": "warn", **knobs}
        self.model = writer.model()
        self.torch_optimizer = writer.optimizer(self.model)
        writer.install(self.model, self.torch_optimizer)

    def saving(self) -> contextlib.AbstractContextManager[None]:
        return self.writer.around_save(self.model, self.torch_optimizer)


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, TOKENS, (8,), generator=generator) for _ in range(2 * STEPS * SAVES)]
    return [{"input_ids": row, "labels": row} for row in rows]


class Lightning(Run):
    def train(self) -> None:
        lightning = pytest.importorskip("lightning.pytorch")
        from lazyckpt.integrations.lightning import LazyCheckpointCallback, LazyCheckpointIO

        run = self

        class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.net = run.model

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.net(**batch)["loss"]

            def configure_optimizers(self) -> Any:
                return run.torch_optimizer

            def train_dataloader(self) -> Any:
                return torch.utils.data.DataLoader(batches(), batch_size=2)  # type: ignore[arg-type]

        class Saves(lightning.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                if trainer.global_step % STEPS == 0:
                    with run.saving():
                        trainer.save_checkpoint(run.folder / f"{trainer.global_step}.ckpt")

        io = LazyCheckpointIO(**self.knobs)
        lightning_trainer(self.folder, io, Saves(), LazyCheckpointCallback(), max_steps=STEPS * SAVES).fit(Module())

    def leaves(self) -> Flat:
        weights = {f"net.{name}": value for name, value in self.model.state_dict().items()}
        return flat({"state_dict": weights, "optimizer_states": [self.torch_optimizer.state_dict()]})

    def read(self, path: Path) -> Flat:
        saved = torch.load(path, weights_only=False)
        return flat({name: saved[name] for name in ("state_dict", "optimizer_states")})


class Folders(Run):
    """Trainers that write a folder."""

    optimizer_file: ClassVar[str]

    def leaves(self) -> Flat:
        weights, state = self.model.state_dict(), self.torch_optimizer.state_dict()
        return flat({"model.safetensors": weights, self.optimizer_file: state})

    def read(self, path: Path) -> Flat:
        state = torch.load(path / self.optimizer_file, weights_only=False)
        return flat({"model.safetensors": load_file(path / "model.safetensors"), self.optimizer_file: state})


class Accelerate(Folders):
    optimizer_file = "optimizer.bin"

    def train(self) -> None:
        accelerate = pytest.importorskip("accelerate")
        from lazyckpt.integrations.accelerate import enable

        accelerator = accelerate.Accelerator(cpu=True)
        try:
            model, optimizer = accelerator.prepare(self.model, self.torch_optimizer)
            saver = enable(accelerator, **self.knobs)
            assert saver is not None
            rows = batches()
            for step in range(1, STEPS * SAVES + 1):
                batch = {name: torch.stack([row[name] for row in rows[:2]]) for name in rows[0]}
                rows = rows[1:]
                optimizer.zero_grad()
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                if step % STEPS == 0:
                    with self.saving():
                        accelerator.save_state(str(self.folder / str(step)))
            accelerator.end_training()
        finally:
            forget_accelerators()


class HuggingFace(Folders):
    optimizer_file = "optimizer.pt"

    def train(self) -> None:
        transformers = pytest.importorskip("transformers")
        from lazyckpt.integrations.transformers import LazyCheckpointCallback

        run = self

        class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
            def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
                with run.saving():
                    super()._save_checkpoint(*args, **kwargs)

        arguments = hugging_face_arguments(
            self.folder, max_steps=STEPS * SAVES, save_steps=STEPS, lr_scheduler_type="constant"
        )
        scheduler = torch.optim.lr_scheduler.ConstantLR(self.torch_optimizer, 1.0)
        Trainer(
            self.model,
            arguments,
            train_dataset=batches(),
            callbacks=[LazyCheckpointCallback(**self.knobs)],
            optimizers=(self.torch_optimizer, scheduler),
        ).train()


TRAINERS: dict[str, Any] = {"Lightning": Lightning, "Accelerate": Accelerate, "HF Trainer": HuggingFace}
FEW = ("no writer", "forward pre-hook", "EMA by swap", ".data")  # in every trainer, under every witness
CASES = [
    (trainer, name, witness)
    for trainer in TRAINERS
    for number, witness in enumerate(witnesses())
    for name, writer in WRITERS.items()
    if witness in writer.seen_by and (TORTURE or name in FEW or (number == 0 and trainer == "Lightning"))
]


@pytest.mark.long(first=9)
@pytest.mark.parametrize(
    ("trainer", "name", "witness"), CASES, ids=[f"{trainer}-{name}-{w}" for trainer, name, w in CASES]
)
def test_in_a_trainer(
    trainer: str,
    name: str,
    witness: str,
    copies: Copies,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = WRITERS[name]()
    run = TRAINERS[trainer](writer, tmp_path, {"witness": witness})
    saves: list[tuple[lazyckpt.SaveHandle, Flat]] = []
    launch = Launcher.launch

    def recorded(*args: Any, **kwargs: Any) -> lazyckpt.SaveHandle:
        expected = clone(run.leaves())
        copies.hold(at_most_s=HOLD_S)
        try:
            saves.append((launch(*args, **kwargs), expected))
        finally:
            copies.release(after_s=0.005)
        return saves[-1][0]

    monkeypatch.setattr(Launcher, "launch", recorded)
    with limit(CASE_LIMIT_S, (trainer, name, witness), copies.release):
        run.train()
    assert len(saves) >= SAVES
    blamed: set[str] = set()
    failures = 0
    for handle, expected in saves:
        # A run may not end without a checkpoint: soon everything that the writer tears is known.
        outcome, names = judge(
            handle, run.read, expected, run.leaves, must_commit=writer.always_commits or failures == MOST_FAILURES
        )
        failures += outcome == "named"
        again = blamed.intersection(names)
        if again and not writer.swaps:
            raise Violation(f"{', '.join(again)} tore a save before: they must be eager since then")
        blamed.update(names)
