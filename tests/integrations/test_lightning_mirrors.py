"""A Lightning Trainer with mirrors: its files go there under their names, and a run goes on from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", minversion="2.6")

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from mirrored_places import names_in
from object_store import S3

import lazyckpt
from lazyckpt import Mirror
from lightning_runs import Net, lazy_io, state_of
from trainers import lightning_trainer as trainer_in

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("small_tensors_are_lazy")]


def every_step(folder: Path | None, **options: Any) -> ModelCheckpoint:
    settings: dict[str, Any] = {"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}"}
    return ModelCheckpoint(folder, **{**settings, **options})


def fit(folder: Path, io: Any, checkpoint: ModelCheckpoint, steps: int, **options: Any) -> Trainer:
    trainer: Trainer = trainer_in(folder, io, checkpoint, max_steps=steps, max_epochs=10)
    trainer.fit(Net(), **options)
    return trainer


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.long(first=1)
def test_files_go_there_and_a_new_machine_goes_on(place: str, tmp_path: Path) -> None:
    plain = fit(tmp_path / "plain", None, every_step(tmp_path / "plain"), 8)
    fit(tmp_path / "a", lazy_io(mirrors=[place]), every_step(tmp_path / "a"), 4)
    assert names_in(place) == [f"step={step}.ckpt" for step in (1, 2, 3, 4)]
    copy = lazyckpt.pull(place, tmp_path / "b", step=3)
    assert copy.name == "step=3.ckpt" and torch.load(copy)["global_step"] == 3
    again = fit(tmp_path / "c", lazy_io(mirrors=[place]), every_step(tmp_path / "c"), 8, ckpt_path=copy)
    assert same(state_of(again), state_of(plain))
    assert names_in(place) == [f"step={step}.ckpt" for step in range(1, 9)]  # the same run, from another folder


def test_a_url_is_a_checkpoint_to_resume_from(s3: S3, tmp_path: Path) -> None:
    plain = fit(tmp_path / "plain", None, every_step(tmp_path / "plain"), 6)
    fit(tmp_path / "a", lazy_io(mirrors=[s3.url()]), every_step(tmp_path / "a"), 4)
    again = fit(
        tmp_path / "b",
        lazy_io(mirrors=[s3.url()]),
        every_step(tmp_path / "b"),
        6,
        ckpt_path=f"{s3.url()}/step=4.ckpt",
        weights_only=False,
    )
    assert again.global_step == 6 and same(state_of(again), state_of(plain))
    assert not (tmp_path / "b" / "step=4.ckpt").exists()  # read without a copy on the disk
    s3.put("run/step=4.ckpt", s3.body("run/step=4.ckpt")[:-2000])
    with pytest.raises(lazyckpt.LoadError, match=r"step=4\.ckpt"):
        fit(tmp_path / "c", lazy_io(mirrors=[s3.url()]), every_step(None), 6, ckpt_path=f"{s3.url()}/step=4.ckpt")


@pytest.mark.long(first=1)
def test_last_is_the_newest_of_the_mirrors_where_the_folder_has_none(place: str, tmp_path: Path) -> None:
    plain = fit(tmp_path / "plain", None, every_step(tmp_path / "plain"), 8)
    fit(tmp_path / "a", lazy_io(mirrors=[place]), every_step(tmp_path / "a", save_last=True), 4)
    assert names_in(place) == ["last.ckpt", *(f"step={step}.ckpt" for step in (1, 2, 3, 4))]
    checkpoint = every_step(tmp_path / "b", save_last=True)
    again = fit(tmp_path / "b", lazy_io(mirrors=[place]), checkpoint, 8, ckpt_path="last")
    assert again.global_step == 8 and same(state_of(again), state_of(plain))


def test_a_local_checkpoint_that_a_mirror_lacks_goes_there(place: str, tmp_path: Path) -> None:
    fit(tmp_path / "a", lazy_io(), every_step(tmp_path / "a"), 3)  # nothing is uploaded
    io = lazy_io(mirrors=[place])
    fit(tmp_path / "a", io, every_step(tmp_path / "a"), 5, ckpt_path=tmp_path / "a" / "step=3.ckpt")
    assert names_in(place) == [f"step={step}.ckpt" for step in (3, 4, 5)]


def test_the_best_checkpoint_stays_there(place: str, tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "a", monitor="score", filename="{step}", save_top_k=-1)
    io = lazy_io(mirrors=[Mirror(place, keep_last=1)])
    trainer = trainer_in(tmp_path, io, checkpoint, max_epochs=4, val_check_interval=3)
    trainer.fit(Net())
    saved = sorted(names_in(place), key=lambda name: int(name[5:-5]))
    best = Path(checkpoint.best_model_path).name
    assert best in saved and best != saved[-1] and len(saved) <= 3  # the newest, and the best that was before it


def test_saves_outside_fit_go_there_too(place: str, tmp_path: Path) -> None:
    trainer = fit(tmp_path / "a", lazy_io(mirrors=[place]), every_step(tmp_path / "a", every_n_train_steps=4), 4)
    trainer.save_checkpoint(tmp_path / "a" / "final.ckpt")
    assert names_in(place) == ["final.ckpt", "step=4.ckpt"]


def test_training_does_not_wait_for_a_mirror(s3: S3, tmp_path: Path) -> None:
    s3.proxy.inject("status", times=10_000, status=403, code="ExpiredToken")
    with pytest.warns(UserWarning, match="ExpiredToken"):
        trainer = fit(tmp_path / "a", lazy_io(mirrors=[s3.url()]), every_step(tmp_path / "a", save_top_k=1), 6)
    assert trainer.global_step == 6 and (tmp_path / "a" / "step=6.ckpt").exists()
    s3.proxy.heal()


def test_weights_are_not_published(tmp_path: Path) -> None:
    with pytest.raises(lazyckpt.ConfigError, match="holds no safetensors"):
        lazy_io(mirrors=[Mirror(tmp_path / "models", what="model")])


def test_a_run_does_not_begin_anew_where_all_copies_are_damaged(tmp_path: Path) -> None:
    place = tmp_path / "lustre"
    fit(tmp_path / "a", lazy_io(mirrors=[place]), every_step(tmp_path / "a", save_last=True), 2)
    for copy in place.glob("*.ckpt"):
        copy.write_bytes(copy.read_bytes()[:-1])
    with pytest.raises(lazyckpt.LoadError, match=r"\.ckpt"):
        checkpoint = every_step(tmp_path / "b", save_last=True)
        fit(tmp_path / "b", lazy_io(mirrors=[place]), checkpoint, 4, ckpt_path="last")
    assert not any((tmp_path / "b").glob("*.ckpt"))


@pytest.mark.long(first=1)
@pytest.mark.parametrize("save_last", [None, "link"])
def test_last_comes_from_the_mirrors_whatever_save_last_is(save_last: Any, tmp_path: Path) -> None:
    """On each new machine, and when the run starts again there."""
    place = tmp_path / "lustre"
    fit(tmp_path / "a", lazy_io(mirrors=[place]), every_step(tmp_path / "a"), 3)
    for steps in (5, 6):
        checkpoint = every_step(tmp_path / "b", save_last=save_last)
        fit(tmp_path / "b", lazy_io(mirrors=[place]), checkpoint, steps, ckpt_path="last")
    names = sorted(path.name for path in (tmp_path / "b").glob("step*"))
    assert names == [f"step={step}.ckpt" for step in (3, 4, 5, 6)]


def test_the_folder_of_another_callback_comes_before_the_mirrors(tmp_path: Path) -> None:
    """The mirror may lack the newest."""
    mirror = Mirror(tmp_path / "lustre", every=2)
    fit(tmp_path, lazy_io(mirrors=[mirror]), every_step(tmp_path / "a", save_last=True), 3)
    io, rare = lazy_io(mirrors=[mirror]), every_step(tmp_path / "rare", every_n_train_steps=100)
    trainer = trainer_in(tmp_path, io, rare, every_step(tmp_path / "a", save_last=True), max_steps=4, max_epochs=10)
    trainer.fit(Net(), ckpt_path="last")
    assert not any((tmp_path / "rare").glob("*.ckpt"))


def test_a_link_to_resume_from_stands_for_its_file(tmp_path: Path) -> None:
    place = tmp_path / "lustre"
    checkpoint = every_step(tmp_path / "a", save_last="link")
    fit(tmp_path / "a", lazy_io(), checkpoint, 3)
    assert (tmp_path / "a" / "last.ckpt").is_symlink()
    io = lazy_io(mirrors=[place])
    fit(tmp_path / "a", io, every_step(tmp_path / "a"), 5, ckpt_path=tmp_path / "a" / "last.ckpt")
    assert names_in(str(place)) == [f"step={step}.ckpt" for step in (3, 4, 5)]
