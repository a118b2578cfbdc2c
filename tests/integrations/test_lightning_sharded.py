"""LazyModelParallelStrategy on two ranks: lazy, whole or not at all, and Lightning reads it without lazyckpt."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from processes import Ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lazyckpt
from lazyckpt.integrations.lightning import LazyCheckpointCallback
from lazyckpt.integrations.lightning_sharded import LazyModelParallelStrategy
from lazyckpt.pipeline import persist
from trainers import lightning_trainer

STEPS = 12  # of an epoch


class Net(lightning.LightningModule):
    def __init__(self, width: int = 65) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 3))
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if not isinstance(self.layers[0].weight, DTensor):
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.layers[0], mesh=mesh)
            fully_shard(self.layers, mesh=mesh)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        step = self.trainer.global_step  # Lightning restores neither random states nor the position in the epoch
        torch.manual_seed(100 * dist.get_rank() + step)
        loss = self.layers(torch.randn(2, 32)).square().sum()
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(range(STEPS))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def fit(
    folder: Path, strategy: Any, *callbacks: Any, ckpt_path: Any = None, model: Net | None = None, **options: Any
) -> tuple[Any, Net]:
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # else Lightning starts processes of its own
    options = {"strategy": strategy, "devices": 2, "use_distributed_sampler": False, **options}
    trainer = lightning_trainer(folder, None, *callbacks, **options)
    model = model or Net()
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer, model


def lazy(**knobs: Any) -> LazyModelParallelStrategy:
    return LazyModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, **knobs)


def plain() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


def every(folder: Path, steps: int = 2, **options: Any) -> ModelCheckpoint:
    options = {"save_top_k": -1, "filename": "{step}", "auto_insert_metric_name": False, **options}
    return ModelCheckpoint(folder, every_n_train_steps=steps, **options)


def state_of(trainer: Any, model: Net) -> Any:
    optimizer = trainer.optimizers[0].state
    named = dict(model.named_parameters())
    moments = {name: optimizer[parameter]["exp_avg"].full_tensor() for name, parameter in named.items()}
    return {name: parameter.detach().full_tensor() for name, parameter in named.items()}, moments


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def whole_run(folder: Path) -> Any:
    trainer, model = fit(folder / "whole", plain(), enable_checkpointing=False)
    return model.losses, state_of(trainer, model)


def saved_and_resumed(folder: Path, first: str, second: str) -> Any:
    strategies = {"lazy": lazy, "plain": plain}
    fit(folder, strategies[first](), every(folder / "all"))
    trainer, model = fit(folder, strategies[second](), every(folder / "again"), ckpt_path=folder / "all/4.ckpt")
    return model.losses, state_of(trainer, model), trainer.global_step


FILES = [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]


@pytest.mark.parametrize(("first", "second"), [("lazy", "lazy"), ("lazy", "plain"), ("plain", "lazy")])
def test_a_resumed_run_equals_the_uninterrupted_one_whoever_saved_it(
    ranks: Ranks, tmp_path: Path, first: str, second: str
) -> None:
    expected = ranks.run(2, whole_run, tmp_path)
    for (losses, state), (rest, found, step) in zip(
        expected, ranks.run(2, saved_and_resumed, tmp_path, first, second), strict=True
    ):
        assert len(losses) == step == 12
        assert rest == losses[4:]
        same(found, state)
    if first == "lazy":
        assert set(os.listdir(tmp_path / "all/4.ckpt")) == {*FILES, ".lazyckpt-lock"}
        assert sorted(os.listdir(tmp_path / "all")) == sorted(f"{n}.ckpt" for n in range(2, 13, 2))


def read_whole(folder: Path) -> Any:
    trainer, model = fit(folder, lazy(), every(folder / "all", 12))
    return state_of(trainer, model)


def test_torch_alone_puts_it_together(ranks: Ranks, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    (weights, _), _ = ranks.run(2, read_whole, tmp_path)
    dcp_to_torch_save(tmp_path / "all/12.ckpt", tmp_path / "whole.pt")
    same(torch.load(tmp_path / "whole.pt")["state_dict"], weights)
    assert torch.load(tmp_path / "all/12.ckpt/meta.pt")["global_step"] == 12


class Watch(LazyCheckpointCallback):
    """Looks at the handles before they are reported."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Any] = {}

    def _report(self, trainer: Any) -> None:
        if self._io is not None:
            self.seen.update({handle.step or len(self.seen): handle for handle in self._io._unreported})
        super()._report(trainer)


def costs(folder: Path) -> Any:
    watch = Watch()
    fit(folder, lazy(), watch, every(folder / "all"), model=Net(1 << 14))
    metrics = [handle.metrics for handle in watch.seen.values()]
    return [(m.eager_bytes / m.bytes, m.save_blocked_s) for m in metrics]


def test_from_the_second_save_on_nearly_everything_is_copied_later(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks.run(2, costs, tmp_path):
        assert len(told) == 6
        assert max(eager for eager, _ in told[1:]) < 0.03
        assert sorted(blocked for _, blocked in told[1:])[1] < 0.1


# ModelCheckpoint


def retention(folder: Path, save_last: Any) -> Any:
    trainer, model = fit(folder, lazy(), every(folder / "all", save_top_k=1, save_last=save_last))
    found = sorted(os.listdir(folder / "all"))
    dist.barrier()
    trainer, model = fit(folder, lazy(), every(folder / "all", save_last=save_last), ckpt_path="last", max_epochs=2)
    return found, trainer.global_step, len(model.losses)


@pytest.mark.parametrize("save_last", [True, "link"])
def test_retention_and_last(ranks: Ranks, tmp_path: Path, save_last: Any) -> None:
    for found, step, losses in ranks.run(2, retention, tmp_path, save_last):
        assert found == ["12.ckpt", "last.ckpt"]
        assert (step, losses) == (24, 12)
    assert os.path.islink(tmp_path / "all/last.ckpt") == (save_last == "link")
    assert (tmp_path / "all/last.ckpt/meta.pt").is_file()


def without_last(folder: Path) -> Any:
    fit(folder, lazy(), every(folder / "all", 4, save_last=True))
    dist.barrier()
    if dist.get_rank() == 0:
        os.rename(folder / "all/last.ckpt", folder / "gone")
    dist.barrier()
    _trainer, model = fit(folder, lazy(), every(folder / "all", save_last=True), ckpt_path="last", max_epochs=2)
    return len(model.losses)


def test_a_missing_last_falls_back_to_the_newest(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, without_last, tmp_path) == [12, 12]


# what goes wrong


def failing(folder: Path, at: int, on_error: str) -> Any:
    """The save of step ``at`` fails on rank 1. Returns what was raised, and after how many steps."""
    real = persist.prepare

    def prepare(flight: Any, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1 and flight.handle.path.name == f"{at}.ckpt":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(flight, *args, **kwargs)

    model = Net()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(persist, "prepare", prepare)
        try:
            fit(folder, lazy(on_error=on_error), every(folder / "all"), model=model)
        except lazyckpt.SaveError as error:
            return type(error).__name__, str(error), len(model.losses)
    return "", "", len(model.losses)


@pytest.mark.parametrize("at", [4, 12])
def test_a_failed_save_raises_on_every_rank_at_the_next_call_or_at_the_end(
    ranks: Ranks, tmp_path: Path, at: int
) -> None:
    (first, first_text, steps), (second, second_text, steps_1) = ranks.run(2, failing, tmp_path, at, "raise")
    assert (first, second) == ("RankError", "NoSpaceError")
    assert "rank 1 failed: No space left" in first_text and "No space left" in second_text
    assert steps == steps_1
    assert at < steps <= 12 if at < 12 else steps == 12
    assert f"{at}.ckpt" not in os.listdir(tmp_path / "all")
    assert not [name for name in os.listdir(tmp_path / "all") if name.startswith(".")]


def test_training_goes_on_with_a_warning_if_so_wished(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks.run(2, failing, tmp_path, 4, "warn"):
        assert told == ("", "", 12)
    assert sorted(os.listdir(tmp_path / "all")) == sorted(f"{n}.ckpt" for n in (2, 6, 8, 10, 12))


def damaged(folder: Path) -> Any:
    fit(folder, lazy(), every(folder / "all", 12), model=Net(1 << 14))
    dist.barrier()
    if dist.get_rank() == 0:
        with open(folder / "all/12.ckpt/__1_0.distcp", "r+b") as file:
            file.seek(os.path.getsize(file.name) // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
    dist.barrier()
    with pytest.raises(BaseException, match=r"__1_0\.distcp"):
        fit(folder, lazy(), ckpt_path=folder / "all/12.ckpt", max_epochs=2, model=Net(1 << 14))


def test_damage_is_noticed_when_it_is_loaded(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, damaged, tmp_path)


def outside(folder: Path) -> Any:
    trainer, _model = fit(folder, lazy(), enable_checkpointing=False)
    trainer.save_checkpoint(folder / "after.ckpt")
    return sorted(os.listdir(folder / "after.ckpt"))


def test_a_save_after_fit_blocks(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(2, outside, tmp_path):
        assert found == sorted([*FILES, ".lazyckpt-lock"])


def whole_file(folder: Path) -> Any:
    fit(folder, lazy(save_distributed_checkpoint=False), every(folder / "all", 12))
    _trainer, model = fit(
        folder, lazy(save_distributed_checkpoint=False), ckpt_path=folder / "all/12.ckpt", max_epochs=2
    )
    return len(model.losses)


def test_one_file_with_the_whole_state_still_works(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, whole_file, tmp_path) == [12, 12]
    assert (tmp_path / "all/12.ckpt").is_file()
