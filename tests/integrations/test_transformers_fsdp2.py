"""The Trainer under FSDP2, on two ranks: one snapshot of all shards, which a plain Trainer resumes from.

Accelerate shards on accelerators only. ``trainer_on_cpu`` tells it that the processes have some."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from processes import Ranks
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback

import lazyckpt
from lazyckpt.integrations.transformers import LazyCheckpointCallback
from lazyckpt.pipeline import persist
from trainers import forget_accelerators, hugging_face_arguments


class Net(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 3))

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        return {"loss": self.layers(x).square().sum()}


def trainer_on_cpu(folder: Path, *callbacks: Any, width: int = 65, **options: Any) -> Trainer:
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    forget_accelerators()
    options = {"max_steps": 6, "save_steps": 2, "logging_steps": 1, "learning_rate": 0.01, **options}
    arguments = hugging_face_arguments(folder, ddp_backend="gloo", save_strategy="steps", **options)
    assert arguments.device.type == "cpu"
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    data = [{"x": torch.randn(32, generator=torch.Generator().manual_seed(n))} for n in range(64)]
    return Trainer(Net(width), arguments, train_dataset=data, callbacks=list(callbacks))


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


FOLDERS = ("optimizer_0", "pytorch_model_fsdp_0")
FILES = [".metadata", "__0_0.distcp", "__1_0.distcp"]


def train(folder: Path, lazy: bool, resume: str | None) -> Any:
    trainer = trainer_on_cpu(folder, *([LazyCheckpointCallback()] if lazy else []), save_total_limit=2)
    trainer.train(resume_from_checkpoint=resume and str(folder / resume))
    assert isinstance(next(trainer.model.parameters()), DTensor)
    dist.barrier()
    return losses(trainer), sorted(os.listdir(folder))


@pytest.mark.long
@pytest.mark.parametrize(("first", "second"), [(True, False), (True, True), (False, True)])
def test_a_resumed_run_equals_the_uninterrupted_one_whoever_saved_it(
    ranks: Ranks, tmp_path: Path, first: bool, second: bool
) -> None:
    whole = ranks.run(2, train, tmp_path, first, None)
    for _, found in whole:
        assert found == ["checkpoint-4", "checkpoint-6"]
    for folder in FOLDERS:
        assert sorted(os.listdir(tmp_path / "checkpoint-4" / folder)) == FILES
    assert {"rng_state_0.pth", "rng_state_1.pth", "scheduler.pt"} <= set(os.listdir(tmp_path / "checkpoint-4"))
    for (found, _), (expected, _) in zip(ranks.run(2, train, tmp_path, second, "checkpoint-4"), whole, strict=True):
        assert found == expected


class Watch(LazyCheckpointCallback):
    """Keeps the handles."""

    def __init__(self, **knobs: Any) -> None:
        super().__init__(**knobs)
        self.handles: list[Any] = []

    def save(self, *args: Any) -> None:
        super().save(*args)
        self.handles.append(self.newest)


def costs(folder: Path) -> Any:
    watch = Watch()
    trainer_on_cpu(folder, watch, width=1 << 14, save_steps=1).train()
    return [(h.metrics.eager_bytes / h.metrics.bytes, h.metrics.save_blocked_s) for h in watch.handles]


def test_from_the_second_save_on_nearly_everything_is_copied_later(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks.run(2, costs, tmp_path):
        assert max(eager for eager, _ in told[1:]) < 0.03
        assert sorted(blocked for _, blocked in told[1:])[1] < 0.1


def failing(folder: Path) -> Any:
    """The save of step 2 fails on rank 1, in the background."""
    real = persist.prepare

    def prepare(flight: Any, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1 and flight.handle.path.name == "checkpoint-2":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(flight, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(lazyckpt.SaveError) as caught:
        patch.setattr(persist, "prepare", prepare)
        trainer_on_cpu(folder, LazyCheckpointCallback()).train()
    return type(caught.value).__name__, str(caught.value)


def test_a_failed_save_raises_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    (first, told), (second, _) = ranks.run(2, failing, tmp_path)
    assert (first, second) == ("RankError", "NoSpaceError")
    assert "rank 1 failed: No space left" in told
    assert "checkpoint-2" not in os.listdir(tmp_path)


class Stop(TrainerCallback):  # type: ignore[misc]
    """Looks at the folder of each checkpoint, and stops at the second."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        self.seen.append([sorted(os.listdir(folder / name)) for name in FOLDERS])
        control.should_training_stop = state.global_step == 4


def with_on_save(folder: Path) -> Any:
    stop = Stop()
    trainer = trainer_on_cpu(folder, stop, LazyCheckpointCallback(max_in_flight=3), max_steps=20)
    with warnings.catch_warnings(record=True):
        trainer.train()
    return stop.seen, trainer.state.global_step


def test_on_save_of_every_rank_comes_when_the_folder_is_there(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, with_on_save, tmp_path) == [([[FILES, FILES]] * 2, 4)] * 2


def whole_state(folder: Path) -> Any:
    os.environ["FSDP_STATE_DICT_TYPE"] = "FULL_STATE_DICT"
    try:
        trainer_on_cpu(folder, LazyCheckpointCallback(), save_steps=6).train()
    finally:
        del os.environ["FSDP_STATE_DICT_TYPE"]
    return sorted(os.listdir(folder / "checkpoint-6"))


def test_a_full_state_dict_is_written_by_accelerate_into_the_staged_folder(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(2, whole_state, tmp_path):
        assert {"pytorch_model_fsdp.bin", "optimizer.bin", ".lazyckpt-lock"} <= set(found)
