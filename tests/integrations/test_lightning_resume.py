"""A run of Lightning that was killed in the middle of an epoch goes on with the same batches and random numbers.

The model has dropout, the order of the data is drawn from torch's global generator, and the dataset draws noise where
it is read. A resumed run begins with another seed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lazyckpt

pytest.importorskip("lightning", minversion="2.6")

from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader

from lazyckpt.integrations.lightning import LazyCheckpointCallback, LazyCheckpointIO
from trainers import Forked
from trainers import lightning_trainer as trainer_in

pytestmark = pytest.mark.filterwarnings("ignore")
BATCHES = 6  # of an epoch


class Noisy(Dataset[torch.Tensor]):
    """Draws from all three global generators."""

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, at: int) -> torch.Tensor:
        return at / 24 + torch.randn(8) + random.random() + float(np.random.rand())


class Stream(IterableDataset[torch.Tensor]):
    """Has no length, so Lightning fetches a batch ahead. The order is fixed, and the noise has a generator."""

    def __iter__(self) -> Any:
        noise = torch.Generator().manual_seed(4)
        return (at / 24 + torch.randn(8, generator=noise) for at in range(4 * BATCHES))


class Net(LightningModule):
    """Notes the first number of every batch."""

    def __init__(self, loader: Callable[[], Any], **_: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.make_loader = loader
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        self.seen += [float(part[0, 0]) for part in parts]
        return torch.stack([self.layer(part).square().mean() for part in parts]).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)

    def train_dataloader(self) -> Any:
        return self.make_loader()

    def val_dataloader(self) -> Any:
        return DataLoader(Noisy(), batch_size=8)


class Stepping(Net):
    """Asks for the number of steps, so that Lightning makes the loaders before it restores anything."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, steps), "interval": "step"}
        ]


def shuffled(**options: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(Noisy(), batch_size=4, shuffle=True, **options)


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def fit(
    folder: Path,
    seed: int,
    loader: Callable[[], Any] = shuffled,
    *callbacks: Callback,
    model: type[Net] = Net,
    lazy: bool = True,
    resumed: Any = None,
    **options: Any,
) -> tuple[Net, Trainer]:
    """Two epochs, with a checkpoint after every step."""
    seed_all(1)
    net = model(loader)
    seed_all(seed)
    newest = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}", save_last="link")
    settings: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 0, **options}
    trainer = trainer_in(folder, LazyCheckpointIO() if lazy else None, *callbacks, newest, **settings)
    data = {"datamodule": options["datamodule"]} if "datamodule" in options else {}
    trainer.fit(net, ckpt_path=resumed, **data)
    return net, trainer


def same_weights(one: Net, other: Net) -> bool:
    """To the bit, and none is NaN."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


# a real kill


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_killed_in_the_second_epoch_ends_in_the_same_bits(workers: int, tmp_path: Path) -> None:
    def loader() -> Any:
        return shuffled(num_workers=workers)

    class Kill(Callback):
        """When the file of step 8 is there, wherever training is by then."""

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            end = time.monotonic() + 60
            while trainer.global_step > 8 and time.monotonic() < end:
                if (tmp_path / "killed" / "step=8.ckpt").exists():
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.002)

    child = Forked(lambda: fit(tmp_path / "killed", 7, loader, Kill()), tmp_path / "output")
    assert child.wait() == -signal.SIGKILL, child.output.read_text()
    whole, _ = fit(tmp_path / "whole", 7, loader)
    resumed, trainer = fit(tmp_path / "killed", 8, loader, resumed="last")
    assert trainer.global_step == 2 * BATCHES
    assert 0 < len(resumed.seen) < BATCHES and resumed.seen == whole.seen[-len(resumed.seen) :]
    assert same_weights(resumed, whole)


# all places of a checkpoint, and all kinds of data

LOADERS: dict[str, Callable[[], Any]] = {
    "plain": shuffled,
    "own generator": lambda: shuffled(generator=torch.Generator().manual_seed(5)),
    "persistent workers": lambda: DataLoader(
        torch.linspace(0, 1, 32 * BATCHES).view(-1, 8),  # type: ignore[arg-type]
        **{"batch_size": 4, "shuffle": True, "num_workers": 1, "persistent_workers": True},
    ),
    "no length": lambda: DataLoader(Stream(), batch_size=4),
    "two": lambda: {"a": shuffled(), "b": DataLoader(Noisy(), batch_size=6, shuffle=True)},
    "two, the shorter one ends": lambda: CombinedLoader(
        {"a": shuffled(), "b": DataLoader(Noisy(), batch_size=6, shuffle=True)}, "min_size"
    ),
    "stateful": lambda: _stateful(),
    "one of them stateful": lambda: {"a": shuffled(), "b": _stateful()},
}


def _stateful() -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(Noisy(), batch_size=4, shuffle=True)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_checkpoint_of_any_step_goes_on_in_the_same_bits(kind: str, tmp_path: Path) -> None:
    whole, trainer = fit(tmp_path, 7, LOADERS[kind])
    plain, _ = fit(tmp_path / "plain", 7, LOADERS[kind], lazy=False)
    assert plain.seen == whole.seen and same_weights(plain, whole)
    steps = trainer.global_step
    a_step = len(whole.seen) // steps
    # torchdata's loader hands out nothing more after the last batch of an epoch.
    for step in (2, steps // 2 + 1) if "stateful" in kind else (2, steps // 2, steps // 2 + 1):
        resumed, trainer = fit(tmp_path / f"from {step}", 8, LOADERS[kind], resumed=tmp_path / f"step={step}.ckpt")
        assert trainer.global_step == steps
        assert resumed.seen == whole.seen[a_step * step :], step
        assert same_weights(resumed, whole), step


OPTIONS: dict[str, dict[str, Any]] = {
    "limited": {"limit_train_batches": 5},
    "overfit": {"overfit_batches": 4},
    "reloaded": {"reload_dataloaders_every_n_epochs": 1},
    "accumulated": {"accumulate_grad_batches": 2},
    "steps": {"max_epochs": -1, "max_steps": 11},
    "stepping": {"model": Stepping},
    "validated in the epoch": {"limit_val_batches": 2, "val_check_interval": 4},
    "validated at the checkpoint": {"limit_val_batches": 2, "val_check_interval": 2},
    "validated by steps": {"limit_val_batches": 2, "val_check_interval": 4, "check_val_every_n_epoch": None},
    "sanity check": {"limit_val_batches": 1, "num_sanity_val_steps": 2, "val_check_interval": 3},
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_every_way_to_run_an_epoch_goes_on_in_the_same_bits(kind: str, tmp_path: Path) -> None:
    options = OPTIONS[kind]
    whole, _ = fit(tmp_path, 7, **options)
    plain, _ = fit(tmp_path / "plain", 7, lazy=False, **options)
    assert plain.seen == whole.seen and same_weights(plain, whole)
    step = {"accumulated": 5, "overfit": 6}.get(kind, 8)
    resumed, trainer = fit(tmp_path / "again", 8, resumed=tmp_path / f"step={step}.ckpt", **options)
    assert trainer.global_step == whole.trainer.global_step
    assert resumed.seen == whole.seen[-len(resumed.seen) :] and len(resumed.seen) < len(whole.seen) / 2
    assert same_weights(resumed, whole)


def test_a_datamodule_goes_on_in_the_same_bits(tmp_path: Path) -> None:
    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return shuffled()

    def run(folder: Path, seed: int, **fit: Any) -> tuple[Net, Trainer]:
        seed_all(1)
        net = Net(shuffled)
        seed_all(seed)
        checkpoint = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1, filename="{step}")
        trainer = trainer_in(folder, LazyCheckpointIO(), checkpoint, max_epochs=2, limit_val_batches=0)
        trainer.fit(net, datamodule=Data(), **fit)
        return net, trainer

    whole, _ = run(tmp_path, 7)
    resumed, _ = run(tmp_path / "again", 8, ckpt_path=tmp_path / "step=8.ckpt")
    assert resumed.seen == whole.seen[8:] and same_weights(resumed, whole)


def test_validation_at_the_checkpoint_is_as_in_the_run_that_was_not_interrupted(tmp_path: Path) -> None:
    """Regression: Lightning leaves it out of the resumed run."""

    class Notes(Callback):
        def __init__(self) -> None:
            self.validated: list[tuple[int, int]] = []

        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.validated.append((trainer.global_step, trainer.fit_loop.epoch_loop._batches_that_stepped))

    options = {"limit_val_batches": 2, "val_check_interval": 2}
    whole, again = Notes(), Notes()
    fit(tmp_path, 7, shuffled, whole, **options)
    fit(tmp_path / "again", 8, shuffled, again, resumed=tmp_path / "step=8.ckpt", **options)
    assert [step for step, _ in whole.validated] == [2, 4, 6, 8, 10, 12] and again.validated == whole.validated[3:]


@pytest.mark.parametrize("batches", [4, 5])
def test_a_run_that_is_resumed_again_and_again_goes_on_behind_whole_steps(batches: int, tmp_path: Path) -> None:
    """Regression: Lightning saved the checkpoint again, behind the first batch of the next step."""

    class Stop(Exception):
        pass

    class Stops(Callback):
        def __init__(self) -> None:
            self.batches = 0

        def on_train_batch_start(self, *_: Any) -> None:
            self.batches += 1
            if self.batches > batches:
                raise Stop

    options = {"accumulate_grad_batches": 3, "limit_train_batches": 12}
    many = lambda: DataLoader(torch.utils.data.ConcatDataset([Noisy(), Noisy()]), batch_size=4, shuffle=True)  # noqa: E731
    whole, _ = fit(tmp_path / "whole", 7, many, **options)
    for seed in range(4):
        with contextlib.suppress(Stop):
            resumed, trainer = fit(tmp_path, seed + 7, many, *[Stops()] * (seed < 3), resumed="last", **options)
    assert trainer.global_step == 8 and same_weights(resumed, whole)


def test_a_validation_that_is_passed_over_draws_no_number(tmp_path: Path) -> None:
    """Regression: Lightning makes an iterator for it where a run goes on behind the last batch of an epoch."""
    options = {"limit_val_batches": 2, "val_check_interval": 4}
    whole, _ = fit(tmp_path, 7, **options)
    resumed, _ = fit(tmp_path / "again", 8, resumed=tmp_path / "step=6.ckpt", **options)
    assert resumed.seen == whole.seen[6:] and same_weights(resumed, whole)


@pytest.mark.parametrize("step", [5, 8])
def test_persistent_workers_for_validation_draw_no_number_again(step: int, tmp_path: Path) -> None:
    class Persistent(Net):
        def val_dataloader(self) -> Any:
            return DataLoader(torch.ones(4, 8), batch_size=4, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]

    options = {"model": Persistent, "limit_val_batches": 1, "val_check_interval": 4}
    whole, _ = fit(tmp_path, 7, **options)
    resumed, _ = fit(tmp_path / "again", 8, resumed=tmp_path / f"step={step}.ckpt", **options)
    assert resumed.seen == whole.seen[step:] and same_weights(resumed, whole)


def test_a_checkpoint_that_is_saved_after_fit_holds_where_fit_has_stopped(tmp_path: Path) -> None:
    _, trainer = fit(tmp_path, 7, max_epochs=-1, max_steps=8)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    (own,) = torch.load(tmp_path / "after.ckpt", weights_only=True)["lazyckpt"]["ranks"]
    assert own["loaders"][0]["yielded"] == 2


def test_gradients_are_accumulated_as_the_scheduler_of_lightning_wants_it(tmp_path: Path) -> None:
    """Regression: Lightning asks it at the start of an epoch only."""
    whole, _ = fit(tmp_path, 7, shuffled, GradientAccumulationScheduler({0: 1, 1: 2}))
    scheduler = GradientAccumulationScheduler({0: 1, 1: 2})
    resumed, trainer = fit(tmp_path / "again", 8, shuffled, scheduler, resumed=tmp_path / "step=7.ckpt")
    assert trainer.global_step == whole.trainer.global_step == 9
    assert resumed.seen == whole.seen[8:] and same_weights(resumed, whole)


class Draws(Callback):
    """Draws a number in every hook around an epoch."""

    def on_train_start(self, *_: Any) -> None:
        torch.rand(1)

    on_train_epoch_start = on_train_epoch_end = on_train_batch_start = on_fit_start = on_train_start


@pytest.mark.parametrize("step", [3, 6, 8])
def test_numbers_that_hooks_draw_are_as_without_lazyckpt_and_go_on(step: int, tmp_path: Path) -> None:
    whole, _ = fit(tmp_path, 7, shuffled, Draws())
    plain, _ = fit(tmp_path / "plain", 7, shuffled, Draws(), lazy=False)
    assert plain.seen == whole.seen and same_weights(plain, whole)
    if step == 6:  # Lightning does not call the hooks at the end of an epoch whose last batch it has seen before
        return
    resumed, _ = fit(tmp_path / "again", 8, shuffled, Draws(), resumed=tmp_path / f"step={step}.ckpt")
    assert resumed.seen == whole.seen[step:] and same_weights(resumed, whole)


def test_a_hook_sees_the_loader_of_the_user(tmp_path: Path) -> None:
    seen = []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            seen.append(trainer.train_dataloader)
            assert trainer.fit_loop._combined_loader is not None
            seen.extend(trainer.fit_loop._combined_loader.flattened)

    loader = shuffled()
    fit(tmp_path, 7, lambda: loader, Look())
    assert len(seen) == 4 * BATCHES and all(found is loader for found in seen)


# what does not go on exactly


def test_without_lazyckpt_the_data_begin_anew_and_other_numbers_are_drawn(tmp_path: Path) -> None:
    """What docs/lightning.md says of Lightning alone, and of ``exact_resume=False``."""
    whole, _ = fit(tmp_path, 7)
    for lazy, callbacks in ((False, []), (True, [LazyCheckpointCallback(exact_resume=False)])):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            resumed, trainer = fit(
                tmp_path / "again", 8, shuffled, *callbacks, lazy=lazy, resumed=tmp_path / "step=8.ckpt"
            )
        assert trainer.global_step == 2 * BATCHES and len(resumed.seen) == 4
        assert not set(resumed.seen) & set(whole.seen) and not same_weights(resumed, whole)
        assert any("dataloader is not resumable" in str(warning.message) for warning in said)


def test_a_resumed_run_is_not_told_that_its_loader_is_not_resumable(tmp_path: Path) -> None:
    fit(tmp_path, 7)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(tmp_path / "again", 8, resumed=tmp_path / "step=8.ckpt")
    assert not [str(w.message) for w in said if "resumable" in str(w.message) or "lazyckpt" in str(w.message)]


def test_a_loader_that_was_built_otherwise_begins_its_epoch_anew_with_a_warning(tmp_path: Path) -> None:
    fit(tmp_path, 7)
    with pytest.warns(UserWarning, match="begin anew: .*batch size: 4 then, 3 now"):
        _, trainer = fit(
            tmp_path / "again",
            8,
            lambda: DataLoader(Noisy(), batch_size=3, shuffle=True),
            resumed=tmp_path / "step=8.ckpt",
        )
    assert trainer.global_step == 8 + 6


def test_a_checkpoint_of_other_ranks_warns(tmp_path: Path) -> None:
    _, trainer = fit(tmp_path, 7)
    checkpoint = torch.load(tmp_path / "step=8.ckpt")
    own = checkpoint["lazyckpt"]["ranks"]
    for number, (states, said) in enumerate((([*own, *own], "2 ranks"), ([*own, None], "1 of its ranks"))):
        checkpoint["lazyckpt"]["ranks"] = states
        torch.save(checkpoint, tmp_path / f"other{number}.ckpt")
        with pytest.warns(UserWarning, match=f"states of {said}, and there are 1 ranks now"):
            _, trainer = fit(tmp_path / "again", 8, resumed=tmp_path / f"other{number}.ckpt")
        assert trainer.global_step == 2 * BATCHES


# plain Lightning reads the files


def test_plain_lightning_reads_the_file_without_a_warning(tmp_path: Path) -> None:
    class Saved(Net):
        def __init__(self) -> None:
            super().__init__(shuffled)

    fit(tmp_path, 7, model=lambda loader: Saved())  # type: ignore[arg-type, return-value]
    path = tmp_path / "step=8.ckpt"
    theirs = tmp_path / "theirs"
    fit(theirs, 7, lazy=False)
    with warnings.catch_warnings(record=True) as plain:
        warnings.simplefilter("always")
        _, trainer = fit(tmp_path / "plain", 8, lazy=False, resumed=theirs / "step=8.ckpt")
    assert trainer.global_step == 2 * BATCHES
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _, trainer = fit(tmp_path / "plain too", 8, lazy=False, resumed=path)
        Saved.load_from_checkpoint(path)
        checkpoint = ModelCheckpoint(tmp_path / "none", every_n_train_steps=1)  # Lightning misses it otherwise
        trainer_in(tmp_path, None, checkpoint).validate(Saved(), ckpt_path=path, verbose=False)
        torch.load(path, weights_only=True)
        Fabric(accelerator="cpu", devices=1).load(path)
    assert trainer.global_step == 2 * BATCHES
    lightnings = {str(w.message)[:60] for w in plain}
    assert {
        str(w.message) for w in said if str(w.message)[:60] not in lightnings and "workers" not in str(w.message)
    } == set()


def test_only_training_and_no_tuner_goes_on_from_the_random_states(tmp_path: Path) -> None:
    """The tuner restores what it saved in the middle of a run, to go on as if nothing had been."""
    fit(tmp_path, 7)
    trainer, net = trainer_in(tmp_path, LazyCheckpointIO()), Net(shuffled)
    torch.manual_seed(5)
    trainer.validate(net, ckpt_path=tmp_path / "step=8.ckpt", verbose=False)
    numbers = torch.get_rng_state()
    torch.manual_seed(5)
    trainer_in(tmp_path, None).validate(net, verbose=False)
    assert torch.equal(torch.get_rng_state(), numbers)
    found = [
        fit(tmp_path / str(lazy), 7, shuffled, LearningRateFinder(num_training_steps=3), model=Tuned, lazy=lazy)[0]
        for lazy in (False, True)
    ]
    assert found[0].seen == found[1].seen and same_weights(*found)


class Tuned(Net):
    lr = 1e-3


def test_fabric_saves_and_restores_random_states_and_a_tracked_loader(tmp_path: Path) -> None:
    def run(seed: int, resumed: bool) -> tuple[list[float], torch.nn.Module]:
        seed_all(1)
        io = LazyCheckpointIO()
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[io])
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.01, momentum=0.9))
        seed_all(seed)
        loader = lazyckpt.track_loader(shuffled())
        random_states = lazyckpt.RandomStates()
        state = {"model": model, "optimizer": optimizer, "loader": loader, "random": random_states, "step": 0}
        if resumed:
            fabric.load(tmp_path / "8.ckpt", state)
        seen = []
        for _ in range(loader.epoch, 2):
            for batch in loader:
                seen.append(float(batch[0, 0]))
                optimizer.zero_grad()
                fabric.backward(model(batch).square().mean())
                optimizer.step()
                state["step"] += 1  # type: ignore[operator]
                if not resumed and state["step"] == 8:
                    fabric.save(tmp_path / "8.ckpt", state)
        io.wait()
        return seen, net

    seen, whole = run(7, resumed=False)
    again, resumed = run(8, resumed=True)
    assert again == seen[8:]
    assert all(torch.equal(*pair) for pair in zip(whole.parameters(), resumed.parameters(), strict=True))
