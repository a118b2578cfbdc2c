"""Accelerate with mirrors: the folders of save_state go there, and load_state goes on from a copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", "1.0")

from mirrored_places import names_in
from object_store import S3

import lazyckpt
from accelerate_training import TINY_RING, Run
from lazyckpt import Mirror
from lazyckpt.integrations.accelerate import enable

pytestmark = pytest.mark.usefixtures("fresh_accelerate", "small_tensors_are_lazy")
Begin = Callable[..., tuple[Run, Any]]


def begin(project: Path, *mirrors: Any, **options: Any) -> tuple[Run, Any]:
    run = Run(project_dir=str(project), automatic_checkpoint_naming=True, **options)
    saver = enable(run.accelerator, mirrors=list(mirrors), **TINY_RING)
    return run, saver


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long(first=1)
def test_folders_go_there_and_a_new_machine_goes_on(place: str, tmp_path: Path) -> None:
    run, saver = begin(tmp_path / "a", place, total_limit=1)
    for _ in range(4):
        run.step()
        run.accelerator.save_state()
    run.accelerator.end_training()
    saver.close()
    assert {"checkpoint_0", "checkpoint_3"} <= set(names_in(place))
    run.step()
    after = {name: value.clone() for name, value in run.accelerator.unwrap_model(run.model).state_dict().items()}
    copy = lazyckpt.pull(place, tmp_path / "b" / "checkpoints")
    assert copy.name == "checkpoint_3" and files(copy) == files(tmp_path / "a" / "checkpoints" / "checkpoint_3")

    again, saver = begin(tmp_path / "b", place)
    again.accelerator.load_state()  # finds the highest number: nothing else lies beside it
    again.step()
    found = again.accelerator.unwrap_model(again.model).state_dict()
    assert all(torch.equal(found[name], value) for name, value in after.items())
    again.accelerator.project_configuration.iteration = 4
    again.accelerator.save_state()
    saver.close()
    assert "checkpoint_4" in names_in(place)  # the same run


def test_what_a_mirror_lacks_goes_there_when_training_goes_on(place: str, tmp_path: Path) -> None:
    run, saver = begin(tmp_path / "a")
    run.step()
    run.accelerator.save_state()
    saver.close()
    again, saver = begin(tmp_path / "a", place)
    again.accelerator.load_state(tmp_path / "a" / "checkpoints" / "checkpoint_0")
    again.step()
    saver.close()
    assert names_in(place) == ["checkpoint_0"]


def test_the_number_of_a_folder_stands_for_the_step(place: str, tmp_path: Path) -> None:
    run, saver = begin(tmp_path / "a", Mirror(place, every=2, keep_last=2))
    for _ in range(7):
        run.step()
        run.accelerator.save_state()
        if saver.last_save is not None:
            saver.last_save.mirrored().result(60)
    saver.close()
    assert names_in(place) == ["checkpoint_4", "checkpoint_6"]


def test_settings_of_the_environment_and_of_the_file(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lustre = tmp_path / "the lustre"
    monkeypatch.setenv("LAZYCKPT_MIRRORS", f"{s3.url()} every=2 keep_last=1, '{lustre}'")
    run = Run(project_dir=str(tmp_path / "a"), automatic_checkpoint_naming=True)
    saver = enable(run.accelerator)
    assert saver is not None
    for _ in range(3):
        run.step()
        run.accelerator.save_state()
        assert saver.last_save is not None
        saver.last_save.mirrored().result(60)
    saver.close()
    assert names_in(s3.url()) == ["checkpoint_2"]
    assert names_in(str(lustre)) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]

    monkeypatch.delenv("LAZYCKPT_MIRRORS")
    file = tmp_path / "lazyckpt.yaml"
    file.write_text(f"mirrors:\n  - url: {tmp_path / 'other'}\n    every: 2\n  - {tmp_path / 'third'}\n")
    monkeypatch.setenv("LAZYCKPT_CONFIG_FILE", str(file))
    run = Run(project_dir=str(tmp_path / "b"), automatic_checkpoint_naming=True)
    saver = enable(run.accelerator)
    assert saver is not None
    for _ in range(2):
        run.step()
        run.accelerator.save_state()
        assert saver.last_save is not None
        saver.last_save.mirrored().result(60)
    saver.close()
    assert (names_in(str(tmp_path / "other")), names_in(str(tmp_path / "third"))) == (
        ["checkpoint_0"],
        ["checkpoint_0", "checkpoint_1"],
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("s3://b/a every", "expected name=value"),
        ("s3://b/a evry=3", "did you mean 'every'"),
        ("s3://b/a every=three", "expected a whole number"),
        ("s3://key:secret@b/a", "credentials"),
        ("'s3://b/a", "No closing quotation"),
        ("/a, /a", "twice"),
    ],
)
def test_a_wrong_setting_names_its_variable(text: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYCKPT_MIRRORS", text)
    run = Run()
    with pytest.raises(lazyckpt.ConfigError, match=told) as caught:
        enable(run.accelerator)
    assert "LAZYCKPT_MIRRORS" in str(caught.value) and "secret" not in str(caught.value)
