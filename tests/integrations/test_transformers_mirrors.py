"""A Trainer with mirrors: its folders go there, whole, and a run goes on from there on a new machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

for name in ("transformers", "accelerate", "safetensors"):
    pytest.importorskip(name)

import safetensors.torch  # noqa: E402
import torch  # noqa: E402
from hub_server import HubServer  # noqa: E402
from mirrored_places import names_in  # noqa: E402
from object_store import S3, Fault  # noqa: E402
from small_trainers import arguments, bert, checkpoints, data, lazy, trainer_of  # noqa: E402
from transformers import BertForMaskedLM, Trainer, TrainerCallback  # noqa: E402

import lazyckpt  # noqa: E402
from lazyckpt import Mirror  # noqa: E402

pytestmark = pytest.mark.usefixtures("small_tensors_are_lazy")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
def test_folders_go_there_and_a_new_machine_goes_on(place: str, tmp_path: Path) -> None:
    """As an uninterrupted run: the newest checkpoint of all places, bit by bit."""
    trainer_of(tmp_path / "plain").train()
    trainer_of(tmp_path / "a", lazy(mirrors=[place])).train()
    assert names_in(place) == [f"checkpoint-{step}" for step in (2, 4, 6, 8)]
    copy = lazyckpt.pull(place, tmp_path / "b", step=4)
    assert "manifest.json" not in files(copy)
    again = trainer_of(tmp_path / "b", lazy(mirrors=[place]), max_steps=10)
    again.train(resume_from_checkpoint=True)  # takes step 8 of the mirror
    assert {"checkpoint-4", "checkpoint-8", "checkpoint-10"} <= set(checkpoints(tmp_path / "b"))
    assert "checkpoint-6" not in checkpoints(tmp_path / "b") and "checkpoint-10" in names_in(place)
    third = trainer_of(tmp_path / "c", lazy())
    third.train(resume_from_checkpoint=f"{place}/checkpoint-4" if "://" in place else str(copy))
    assert third.state.global_step == 8
    weights = [tmp_path / run / "checkpoint-8" / "model.safetensors" for run in ("c", "plain")]
    found, wanted = map(safetensors.torch.load_file, weights)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)


def test_nothing_newer_there_means_what_is_here(place: str, tmp_path: Path) -> None:
    trainer_of(tmp_path / "a", lazy(mirrors=[Mirror(place, every=4)]), max_steps=6).train()
    assert names_in(place) == ["checkpoint-4"]
    again = trainer_of(tmp_path / "a", lazy(mirrors=[Mirror(place, every=4)]))
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 8 and names_in(place) == ["checkpoint-4", "checkpoint-8"]


def test_a_killed_upload_is_made_up_for_at_the_next_start(place: str, tmp_path: Path) -> None:
    trainer_of(tmp_path / "a", lazy(), max_steps=4).train()  # nothing was uploaded
    trainer_of(tmp_path / "a", lazy(mirrors=[place])).train(resume_from_checkpoint=True)
    assert names_in(place) == [f"checkpoint-{step}" for step in (4, 6, 8)]


class Adds(TrainerCallback):  # type: ignore[misc]
    """Writes into each checkpoint, as callbacks that merge adapters or note results do."""

    def __init__(self, uploads: Callable[[], int]) -> None:
        self._uploads = uploads
        self.begun: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun.append(self._uploads())
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        (folder / "results.json").write_text(json.dumps({"step": state.global_step}))


@pytest.mark.filterwarnings("ignore:training waits until each checkpoint is durable")
def test_what_callbacks_add_goes_there_too(place: str, tmp_path: Path) -> None:
    callback = lazy(mirrors=[place])
    adds = Adds(lambda: len(callback._saver._mirrors._leads))  # type: ignore[union-attr]
    trainer_of(tmp_path / "a", callback, adds, max_steps=4).train()
    assert adds.begun[0] == 0  # no upload has begun when on_save of the first one is called
    for step in (2, 4):
        copy = lazyckpt.pull(place, tmp_path / "b", step=step)
        assert json.loads((copy / "results.json").read_text()) == {"step": step}
        assert files(copy) == files(tmp_path / "a" / f"checkpoint-{step}")


def test_the_best_checkpoint_stays_there(place: str, tmp_path: Path) -> None:
    def judged(self: Any, *_: Any, **__: Any) -> dict[str, float]:
        found = {"eval_loss": float(abs(self.state.global_step - 4))}  # step 4 is the best
        self.log(found)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found

    class Judged(Trainer):  # type: ignore[misc]
        evaluate = judged

    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 2}
    options |= {"metric_for_best_model": "eval_loss", "greater_is_better": False}
    callback = lazy(mirrors=[Mirror(place, keep_last=1)])
    trainer = Judged(
        bert(),
        arguments(tmp_path / "a", **options),
        train_dataset=data(),
        eval_dataset=data(),
        callbacks=[callback],
    )
    trainer.train()
    assert checkpoints(tmp_path / "a")[:2] == ["checkpoint-4", "checkpoint-8"]
    assert names_in(place) == ["checkpoint-4", "checkpoint-8"]


def test_training_does_not_wait_for_a_mirror(s3: S3, tmp_path: Path) -> None:
    """It ends, and names the mirror that lacks a checkpoint, which is durable here."""
    fault: Fault = s3.proxy.inject("status", times=10_000, status=403, code="ExpiredToken")
    with pytest.warns(UserWarning) as warned:
        trainer_of(tmp_path / "a", lazy(mirrors=[s3.url()]), save_total_limit=1).train()
    assert fault.seen.is_set()
    told = " | ".join(str(warning.message) for warning in warned)
    assert "(ExpiredToken); it is tried again, and training goes on" in told
    assert "a run that resumes from the newest checkpoint here uploads it" in told
    assert checkpoints(tmp_path / "a")[0] == "checkpoint-8"
    s3.proxy.heal()
    assert names_in(s3.url()) == []
    trainer_of(tmp_path / "a", lazy(mirrors=[s3.url()]), max_steps=10).train(resume_from_checkpoint=True)
    assert names_in(s3.url()) == ["checkpoint-10", "checkpoint-8"]


@pytest.mark.long
def test_a_damaged_copy_gives_way_to_the_one_before(place: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    trainer_of(tmp_path / "a", lazy(mirrors=[place])).train()
    if "://" in place:
        s3 = request.getfixturevalue("s3")
        s3.put("run/checkpoint-8/optimizer.pt", s3.body("run/checkpoint-8/optimizer.pt")[:-1] + b"?")
    else:
        file = Path(place, "checkpoint-8", "optimizer.pt")
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    shutil.rmtree(tmp_path / "a")
    again = trainer_of(tmp_path / "a", lazy(mirrors=[place]))
    with pytest.warns(UserWarning, match="passed over: .*checksum does not match"):
        again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 8
    assert "checkpoint-6" in checkpoints(tmp_path / "a")


def test_a_mirror_that_cannot_be_read_is_no_empty_one(s3: S3, tmp_path: Path) -> None:
    s3.proxy.inject("status", times=10_000, status=403, code="AccessDenied")
    trainer = trainer_of(tmp_path / "a", lazy(mirrors=[s3.url()]))
    with (
        pytest.warns(UserWarning, match="is passed over"),
        pytest.raises(lazyckpt.ReadError, match="may hold the newest"),
    ):
        trainer.train(resume_from_checkpoint=True)
    s3.proxy.heal()


def test_the_weights_are_published(hub: HubServer, tmp_path: Path) -> None:
    """To the Hub and to a folder: what from_pretrained reads, and nothing of the training."""
    options = {"endpoint": hub.endpoint}
    mirrors = [
        Mirror("hf://team/model", what="model", options=options),
        Mirror(tmp_path / "models", what="model", keep_last=1),
    ]
    trainer = trainer_of(tmp_path / "a", lazy(mirrors=[*mirrors, tmp_path / "lustre"]), max_steps=4)
    trainer.train()
    commits = hub.repositories["team/model"].commits[1:]
    assert [commit.message for commit in commits] == ["Step 2", "Step 4"]
    published = set(commits[-1].files) - {".gitattributes", "lazyckpt.json"}
    assert published == {"config.json", "model.safetensors"}
    assert names_in(str(tmp_path / "models")) == ["checkpoint-4"]
    assert set(files(tmp_path / "models" / "checkpoint-4")) == {*published, "manifest.json"}
    found = BertForMaskedLM.from_pretrained(tmp_path / "models" / "checkpoint-4").state_dict()
    assert all(torch.equal(found[name], value) for name, value in trainer.model.state_dict().items())
    shutil.rmtree(tmp_path / "a")
    again = trainer_of(tmp_path / "a", lazy(mirrors=[*mirrors, tmp_path / "lustre"]), max_steps=6)
    again.train(resume_from_checkpoint=True)  # of the mirror with all files
    assert [commit.message for commit in hub.repositories["team/model"].commits[1:]] == ["Step 2", "Step 4", "Step 6"]


def test_a_named_module_is_for_a_checkpointer(tmp_path: Path) -> None:
    with pytest.raises(lazyckpt.ConfigError, match="is for the Checkpointer that tracks it"):
        lazyckpt.Saver(mirrors=[Mirror(tmp_path / "models", what="model", model="net")])


def test_a_mirror_that_cannot_be_read_does_not_keep_a_run_from_its_own_folder(s3: S3, tmp_path: Path) -> None:
    trainer_of(tmp_path / "a", lazy(mirrors=[s3.url()]), max_steps=4).train()
    s3.proxy.inject("status", times=10_000, status=403, code="AccessDenied")
    again = trainer_of(tmp_path / "a", lazy(mirrors=[s3.url()]), max_steps=6)
    with pytest.warns(UserWarning, match="is passed over"):
        again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6
    s3.proxy.heal()
