"""``LazyCheckpointCallback(writers=…)`` on two ranks with DistributedDataParallel: both write weights and optimizer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counted_reads import counted_reads
from processes import Ranks
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Trainer

import lazyckpt
from lazyckpt.integrations.transformers import LazyCheckpointCallback
from trainers import forget_accelerators, hugging_face_arguments

STEPS = 6
FILES = {"model.safetensors", "optimizer.pt"}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        up, down = torch.nn.Linear(64, 3000), torch.nn.Linear(3000, 64)
        self.layers = torch.nn.Sequential(up, torch.nn.BatchNorm1d(3000), torch.nn.Dropout(0.2), down)

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        return {"loss": self.layers(x).square().mean()}


def tiny_gpt() -> PreTrainedModel:
    """With tied weights and dropout."""
    config = GPT2Config(vocab_size=512, n_positions=16, n_embd=128, n_layer=1, n_head=2)
    return GPT2LMHeadModel(config)


class Own(Trainer):
    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)


def trainer_on_cpu(folder: Path, *callbacks: Any, what: str, **options: Any) -> Trainer:
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    forget_accelerators()
    options = {"max_steps": STEPS, "save_steps": 2, "logging_steps": 1, "learning_rate": 0.01, **options}
    arguments = hugging_face_arguments(folder, ddp_backend="gloo", save_strategy="steps", **options)
    torch.manual_seed(1)
    data: list[dict[str, torch.Tensor]]
    if what == "gpt":
        model: Any = tiny_gpt()
        text = torch.randint(512, (64, 16), generator=torch.Generator().manual_seed(2))
        data = [{"input_ids": row, "labels": row} for row in text]
    else:
        model = Net()
        data = [{"x": torch.randn(64, generator=torch.Generator().manual_seed(n))} for n in range(64)]
    kind = Own if what == "own" else Trainer
    return kind(model, arguments, train_dataset=data, callbacks=list(callbacks))


class Watch(LazyCheckpointCallback):
    def __init__(self, **knobs: Any) -> None:
        super().__init__(**knobs)
        self.seen: list[Any] = []

    def save(self, *args: Any) -> None:
        super().save(*args)
        if self.newest is not None:
            self.seen.append(self.newest)


def train(folder: Path, writers: Any, what: str, resume: str | None = None, **options: Any) -> Any:
    callback = Watch(writers=writers)
    trainer = trainer_on_cpu(folder, callback, what=what, **options)
    with counted_reads(least_bytes=10_000) as reads:
        trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = [tensor.sum().item() for tensor in trainer.model.state_dict().values()]
    copied = [(handle.metrics.copied_bytes, handle.metrics.eager_bytes) for handle in callback.seen]
    dist.barrier()
    return (losses, weights, torch.rand(2).tolist()), copied, sorted(os.listdir(folder)), reads.nbytes


@pytest.mark.long
@pytest.mark.parametrize("what", ["net", "gpt"])
def test_both_ranks_write_the_files_and_a_resumed_run_ends_in_the_same_bits(
    ranks: Ranks, tmp_path: Path, what: str
) -> None:
    together = ranks.run(2, train, tmp_path / "all", "all", what)
    alone = ranks.run(2, train, tmp_path / "one", "rank0", what)
    assert [end for end, *_ in together] == [end for end, *_ in alone]
    resumed = ranks.run(2, train, tmp_path / "again", "all", what, str(tmp_path / "all/checkpoint-4"))
    assert [end for end, *_ in resumed] == [end for end, *_ in together]
    nbytes, read = os.path.getsize(tmp_path / "all/checkpoint-4/optimizer.pt"), [nbytes for *_, nbytes in resumed]
    assert 0.9 * nbytes < sum(read) < nbytes and min(read) > 0.4 * nbytes
    for _, _, found, _ in together:
        assert found == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    for name in together[0][2]:
        folders = [tmp_path / of / name for of in ("all", "one")]
        found, expected = (set(os.listdir(folder)) for folder in folders)
        assert found - expected == {".lazyckpt-lock"} and expected > {*FILES, "rng_state_0.pth", "rng_state_1.pth"}
        for file in expected - {"training_args.bin"}:
            assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes(), file
        assert all(lazyckpt.verify(folders[0] / file).ok for file in FILES)
    (_, first, *_), (_, second, *_) = together
    assert alone[1][1] == []
    whole = first[0][0]  # at first rank 0 writes all
    assert second[0][0] == 0
    for (copied, eager), (copied_1, eager_1) in zip(first[1:], second[1:], strict=True):
        assert abs(copied - copied_1) < 0.1 * whole and copied + copied_1 < 1.05 * whole
        assert max(eager, eager_1) < 0.1 * whole


def mirrored(folder: Path, mirror: Path, writers: str, resume: bool) -> Any:
    trainer = trainer_on_cpu(folder, LazyCheckpointCallback(writers=writers, mirrors=[mirror]), what="net")
    trainer.train(resume_from_checkpoint=resume or None)
    dist.barrier()
    weights = [tensor.sum().item() for tensor in trainer.model.state_dict().values()]
    found = sorted(path.name for path in folder.glob("[!.]*"))
    return trainer.state.global_step, weights, torch.rand(2).tolist(), found


@pytest.mark.long(first=1)
@pytest.mark.parametrize("writers", ["all", "rank0"])
def test_both_ranks_go_on_from_a_mirror_on_new_machines(ranks: Ranks, tmp_path: Path, writers: str) -> None:
    mirror = tmp_path / "mirror"
    whole = ranks.run(2, mirrored, tmp_path / "a", mirror, writers, False)
    assert {"checkpoint-2", "checkpoint-4", "checkpoint-6"} <= set(os.listdir(mirror))
    shutil.rmtree(mirror / "checkpoint-6")
    resumed = ranks.run(2, mirrored, tmp_path / "b", mirror, writers, True)
    assert [end[:3] for end in resumed] == [end[:3] for end in whole]
    assert [end[3] for end in resumed] == [["checkpoint-4", "checkpoint-6"]] * 2
    assert lazyckpt.verify(mirror / "checkpoint-6").ok


def limited(folder: Path) -> Any:
    return train(folder, 2, "own", save_total_limit=2)


def test_files_that_a_trainer_writes_its_own_way_are_rank_0s(ranks: Ranks, tmp_path: Path) -> None:
    (_, first, *_), (_, second, found, _) = ranks.run(2, limited, tmp_path)
    assert found == ["checkpoint-4", "checkpoint-6"]
    for name in found:
        assert all(lazyckpt.verify(tmp_path / name / file).ok for file in FILES)
    weights = 4 * (2 * 64 * 3000 + 64 + 3000 * 5)
    assert abs(first[-1][0] - second[-1][0] - weights) < 0.2 * weights  # two thirds are shared


def test_other_writers_are_refused() -> None:
    with pytest.raises(lazyckpt.ConfigError, match="writers=0"):
        LazyCheckpointCallback(writers=0)
