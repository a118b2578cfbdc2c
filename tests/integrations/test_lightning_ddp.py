"""``LazyCheckpointIO(writers=…)`` on two ranks with DistributedDataParallel: both write each file of Lightning's."""

from __future__ import annotations

import errno
import os
import warnings
import zlib
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
from counted_reads import counted_reads
from lightning.pytorch.callbacks import ModelCheckpoint
from processes import Ranks

import lazyckpt
from lazyckpt.integrations import lightning_ranks
from lazyckpt.integrations.lightning import LazyCheckpointCallback, LazyCheckpointIO
from lazyckpt.pipeline import persist
from trainers import lightning_trainer

STEPS = 8  # of an epoch, on each rank


class Net(lightning.LightningModule):
    """With dropout and BatchNorm, whose statistics differ by rank."""

    def __init__(self, width: int = 3000) -> None:
        super().__init__()
        torch.manual_seed(1)
        up, down = torch.nn.Linear(64, width), torch.nn.Linear(width, 64)
        self.layers = torch.nn.Sequential(up, torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.3), down)
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = self.layers(batch + torch.randn_like(batch)).square().mean()
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self) -> Any:
        data = torch.arange(2 * 4 * STEPS, dtype=torch.float32)[:, None].expand(-1, 64) / 64
        return torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def fit(folder: Path, io: Any, *callbacks: Any, ckpt_path: Any = None, model: Any = None, **options: Any) -> Any:
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # else Lightning starts processes of its own
    trainer = lightning_trainer(folder, io, *callbacks, **{"strategy": "ddp", "devices": 2, **options})
    model = model or Net()
    torch.manual_seed(50 + dist.get_rank())
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer, model


def every(folder: Path, steps: int = 2, **options: Any) -> ModelCheckpoint:
    options = {"save_top_k": -1, "filename": "{step}", "auto_insert_metric_name": False, **options}
    return ModelCheckpoint(folder, every_n_train_steps=steps, **options)


class Watch(LazyCheckpointCallback):
    """Looks at the handles before they are reported."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def _report(self, trainer: Any) -> None:
        if self._io is not None:
            self.seen += [handle for handle in self._io._unreported if handle not in self.seen]
        super()._report(trainer)


def plain(tree: Any) -> Any:
    """The same with a checksum in the place of each tensor."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(value) for value in tree]
    if isinstance(tree, torch.Tensor):
        return str(tree.dtype), tuple(tree.shape), zlib.crc32(tree.contiguous().numpy().tobytes())
    return tree


def end_of(trainer: Any, model: Net) -> Any:
    state = trainer.optimizers[0].state_dict(), model.state_dict(), torch.rand(2)
    return model.losses[-3:], plain(state)


def whole_run(folder: Path, writers: Any) -> Any:
    watch = Watch()
    end = end_of(*fit(folder, LazyCheckpointIO(writers=writers), watch, every(folder)))
    return end, [(h.metrics.copied_bytes, h.metrics.eager_bytes, h.metrics.bytes) for h in watch.seen]


def resumed_run(folder: Path, writers: Any) -> Any:
    """Returns the end, and the bytes that this rank has read."""
    with counted_reads(least_bytes=100_000) as reads:
        return end_of(*fit(folder, LazyCheckpointIO(writers=writers), ckpt_path=folder / "4.ckpt")), reads.nbytes


def failed_run(folder: Path) -> Any:
    """Loads after a save that has failed on rank 0, which alone knows of it."""
    io = LazyCheckpointIO()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(io, "wait", lambda: (_ for _ in ()).throw(lazyckpt.SaveError("no luck", path=folder)))
        with pytest.raises(lazyckpt.LazyCkptError) as caught:
            io.load_checkpoint(folder / "4.ckpt")
    return str(caught.value)


@pytest.mark.long
def test_both_ranks_write_the_file_and_a_resumed_run_ends_in_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    all_write = ranks.run(2, whole_run, tmp_path / "all", "all")
    alone = ranks.run(2, whole_run, tmp_path / "one", "rank0")
    assert [end for end, _ in all_write] == [end for end, _ in alone]
    for writers in ("all", None):
        (end, read), (end_1, read_1) = ranks.run(2, resumed_run, tmp_path / "all", writers)
        assert [end, end_1] == [end for end, _ in all_write]
        assert read + read_1 < os.path.getsize(tmp_path / "all" / "4.ckpt") and abs(read - read_1) <= 2 * 4096 < read
    for told in ranks.run(2, failed_run, tmp_path / "all"):
        assert "no luck" in told
    names = sorted(f"{step}.ckpt" for step in range(2, STEPS + 1, 2))
    for folder in (tmp_path / "all", tmp_path / "one"):
        assert sorted(os.listdir(folder)) == names
    for name in names:
        assert lazyckpt.verify(tmp_path / "all" / name).ok
        found, expected = (torch.load(tmp_path / of / name, weights_only=False) for of in ("all", "one"))
        for tree in (found, expected):
            del tree["callbacks"]  # with paths
        assert list(found) == list(expected) and plain(found) == plain(expected)
    (_, first), (_, second) = all_write
    assert len(first) == len(second) == len(names) and alone[1][1] == []
    for (copied, eager, nbytes), (copied_1, eager_1, nbytes_1) in zip(first[1:], second[1:], strict=True):
        assert abs(copied - copied_1) < 200_000 and nbytes + nbytes_1 < 1.1 * 2 * copied  # the statistics are rank 0's
        assert max(eager, eager_1) < 0.15 * copied
    assert second[0][0] < 0.1 * first[0][0]  # at first rank 0 writes all


def last_and_best(folder: Path, save_last: Any) -> Any:
    io = LazyCheckpointIO(writers="all")
    fit(folder, io, every(folder / "all", save_top_k=1, save_last=save_last))
    found = sorted(os.listdir(folder / "all"))
    dist.barrier()
    trainer, model = fit(folder, io, every(folder / "all", save_last=save_last), ckpt_path="last", max_epochs=2)
    trainer.save_checkpoint(folder / "after.ckpt")  # by rank 0, at once
    weights = every(folder / "weights", save_weights_only=True)
    fit(folder, io, weights, every(folder / "both", 4))
    return found, trainer.global_step, len(model.losses)


@pytest.mark.long(first=1)
@pytest.mark.parametrize("save_last", [True, "link"])
def test_retention_last_and_weights_alone(ranks: Ranks, tmp_path: Path, save_last: Any) -> None:
    for told in ranks.run(2, last_and_best, tmp_path, save_last):
        assert told == ([f"{STEPS}.ckpt", "last.ckpt"], 2 * STEPS, STEPS)
    assert os.path.islink(tmp_path / "all/last.ckpt") == (save_last == "link")
    files = [*tmp_path.rglob("*.ckpt")]
    assert len(files) > 8
    for file in files:
        assert lazyckpt.verify(file).ok and torch.load(file)["state_dict"]
    assert "optimizer_states" not in torch.load(tmp_path / "weights/4.ckpt")


def failing(folder: Path, at: int, on_error: str) -> Any:
    """The save of step ``at`` fails on rank 1. Returns the error, and after how many steps it was raised."""
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
            fit(folder, LazyCheckpointIO(writers="all", on_error=on_error), every(folder / "all"), model=model)
        except lazyckpt.SaveError as error:
            return str(error), len(model.losses)
    return "", len(model.losses)


def test_a_save_that_fails_on_one_rank_raises_on_both_and_leaves_nothing(ranks: Ranks, tmp_path: Path) -> None:
    (first, steps), (second, steps_1) = ranks.run(2, failing, tmp_path, 4, "raise")
    assert "rank 1 failed: No space left" in first and "No space left" in second
    assert steps == steps_1 and 4 < steps <= STEPS
    assert "4.ckpt" not in os.listdir(tmp_path / "all")
    assert not [name for name in os.listdir(tmp_path / "all") if name.startswith(".")]
    assert ranks.run(2, failing, tmp_path / "warned", 4, "warn") == [("", STEPS)] * 2
    assert sorted(os.listdir(tmp_path / "warned/all")) == ["2.ckpt", "6.ckpt", "8.ckpt"]


class OtherRank:
    """The strategy and the plugin on rank 1, whose rank 0 decides about the name, and has or has not failed."""

    def __init__(self, name: Path, fails: bool = False) -> None:
        self.name, self.fails = name, fails
        self.calls: list[Any] = []

    def broadcast(self, path: Any) -> Any:
        return str(self.name)

    def reduce_boolean_decision(self, decision: bool, all: bool) -> bool:
        return decision or self.fails

    def check(self) -> None:
        self.calls.append("check")

    def wait(self) -> None:
        self.calls.append("wait")

    def save_together(self, checkpoint: Any, target: Path) -> None:
        self.calls.append(target)


def test_all_ranks_save_under_the_name_that_rank_0_gives(tmp_path: Path) -> None:
    """A metric in the name may differ from rank to rank."""
    rank: Any = OtherRank(tmp_path / "loss=0.1.ckpt")
    lightning_ranks.save_together(rank, rank, pytest.fail, {}, tmp_path / "loss=0.2.ckpt")
    assert rank.calls == ["check", rank.name]


def test_a_failure_that_only_another_rank_has_seen_is_raised_here_before_the_next_save(tmp_path: Path) -> None:
    """Or that rank would wait for the next collective of this one."""
    rank: Any = OtherRank(tmp_path / "it.ckpt", fails=True)
    with pytest.raises(lazyckpt.SaveError, match="another rank says why"):
        lightning_ranks.save_together(rank, rank, pytest.fail, {}, rank.name)
    assert rank.calls == ["check", "wait"]


def refused(folder: Path, what: str) -> str:
    from lightning.pytorch.strategies import DDPStrategy

    class Own(DDPStrategy):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            super().save_checkpoint(*args, **kwargs)

    class Consolidated(torch.optim.AdamW):
        def consolidate_state_dict(self) -> None:
            pass

    class OwnOptimizer(Net):
        def configure_optimizers(self) -> Any:
            return Consolidated(self.parameters())

    strategy = Own() if what == "strategy" else "ddp"
    model = OwnOptimizer() if what == "optimizer" else Net()
    with pytest.raises(lazyckpt.ConfigError) as caught:
        if what == "fabric":
            fabric = lightning.Fabric(
                accelerator="cpu", devices=2, strategy="ddp", plugins=[LazyCheckpointIO(writers="all")]
            )
            os.environ["LOCAL_RANK"] = str(dist.get_rank())
            fabric.launch()
            if fabric.is_global_zero:
                fabric.strategy.save_checkpoint(folder / "it.ckpt", {"model": torch.nn.Linear(2, 2)})
            raise lazyckpt.ConfigError("for Fabric, rank 1 is not called: a Trainer")
        fit(folder, LazyCheckpointIO(writers=2), every(folder), model=model, strategy=strategy)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("strategy", "takes Lightning's DDPStrategy, on whose ranks the whole state is, and not Own"),
        ("optimizer", "Consolidated holds a part of its state on each rank"),
        ("fabric", "a Trainer"),
    ],
)
def test_what_calls_rank_0_alone_or_has_no_replicas_is_refused(
    ranks: Ranks, tmp_path: Path, what: str, text: str
) -> None:
    for told in ranks.run(2, refused, tmp_path, what):
        assert text in told


@pytest.mark.parametrize("writers", ["some", 0, True])
def test_other_writers_are_refused(writers: Any) -> None:
    with pytest.raises(lazyckpt.ConfigError, match="writers="):
        LazyCheckpointIO(writers=writers)
