"""The folders of save_state: their names, how many stay, and those that cannot be renamed."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

accelerate = pytest.importorskip("accelerate", "1.0")

from accelerate.utils import ProjectConfiguration  # noqa: E402

import lazyckpt  # noqa: E402
from accelerate_training import Run, automatic, names  # noqa: E402
from lazyckpt.integrations import accelerate_folder  # noqa: E402
from lazyckpt.integrations.accelerate import enable  # noqa: E402
from lazyckpt.storage import folders, hidden, in_place, removal  # noqa: E402
from trainers import contents  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def test_only_whole_checkpoints_are_ever_seen_among_the_checkpoints(tmp_path: Path) -> None:
    """load_state takes the highest number, whole or not, and fails on a name without one."""
    run = Run(**automatic(tmp_path))
    enable(run.accelerator)
    staged_in: list[Path] = []
    run.accelerator.register_save_state_pre_hook(
        lambda models, weights, output_dir: staged_in.append(Path(output_dir).parent)
    )
    weights = []
    for at in range(3):
        run.step()
        weights.append(run.model.layers[0].weight.detach().clone())
        run.accelerator.save_state()
        assert set(names(tmp_path / "checkpoints")) <= {f"checkpoint_{n}" for n in range(at + 1)}
    run.step()
    run.accelerator.load_state()  # waits until the newest is there
    assert torch.equal(run.model.layers[0].weight, weights[-1])
    assert staged_in == [hidden.place(tmp_path)] * 3
    assert names(tmp_path) == ["checkpoints"]


def test_total_limit_keeps_the_newest(tmp_path: Path) -> None:
    run = Run(**automatic(tmp_path, total_limit=2, iteration=8))
    enable(run.accelerator)
    for _ in range(4):
        run.step()
        run.accelerator.save_state()
    run.accelerator.end_training()
    assert names(tmp_path / "checkpoints") == ["checkpoint_10", "checkpoint_11"]


def test_total_limit_removes_the_old_one_only_when_the_new_one_is_durable(
    tmp_path: Path, full_disk: list[bool]
) -> None:
    """Accelerate removes first: with a limit of one, a failed save would leave nothing at all."""
    run = Run(**automatic(tmp_path, total_limit=1))
    saver = enable(run.accelerator)
    run.step()
    run.accelerator.save_state()
    saver.wait()
    kept = run.model.layers[0].weight.detach().clone()
    full_disk.append(True)
    run.step()
    with pytest.warns(UserWarning, match="checkpoint_0 is kept"):
        run.accelerator.save_state()
        with pytest.raises(lazyckpt.NoSpaceError):
            saver.wait()
    assert names(tmp_path / "checkpoints") == ["checkpoint_0"]
    run.accelerator.load_state()
    assert torch.equal(run.model.layers[0].weight, kept)
    full_disk.clear()
    run.accelerator.save_state()
    run.accelerator.end_training()
    assert names(tmp_path / "checkpoints") == ["checkpoint_2"]


def test_the_folder_of_the_checkpoints_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = ProjectConfiguration(str(tmp_path / "project"), automatic_checkpoint_naming=True)
    synced: list[str] = []
    sync_path = folders.sync_path
    monkeypatch.setattr(folders, "sync_path", lambda path: (synced.append(str(path)), sync_path(path)))
    with closing(enable(accelerate.Accelerator(cpu=True, project_config=project))) as saver:
        target = tmp_path / "project" / "some" / "checkpoints" / "checkpoint_0"
        accelerate_folder.stage(saver._accelerator, target, saver._saver, None).discard()
    assert {str(tmp_path), str(tmp_path / "project"), str(tmp_path / "project" / "some")} <= set(synced)


def test_what_another_node_wrote_is_synced_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main process syncs what its own node has cached."""
    (tmp_path / "sampler").mkdir()
    files = [tmp_path / "random_states_1.pkl", tmp_path / "sampler" / "x.bin"]
    for file in files:
        file.touch()
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    accelerate_folder.sync(tmp_path)
    assert sorted(synced) == sorted(map(str, [*files, tmp_path, tmp_path / "sampler"]))


def test_a_number_that_exists_is_refused_as_accelerate_does(tmp_path: Path) -> None:
    run = Run(**automatic(tmp_path))
    enable(run.accelerator)
    (tmp_path / "checkpoints" / "checkpoint_0").mkdir(parents=True)
    with pytest.raises(ValueError, match="exists already"):
        run.accelerator.save_state()


def test_an_existing_folder_is_replaced_whole_and_keeps_other_files(tmp_path: Path, graph: Any) -> None:
    """Accelerate writes into a folder that exists; scripts put their own files there, before and after."""
    run = Run()
    saver = enable(run.accelerator)
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "arguments.json").write_text("{}")
    for at in range(2):
        run.step()
        run.accelerator.save_state(folder)
        folder.mkdir(exist_ok=True)
        (folder / f"lora-{at}.json").write_text(str(at))
        saver.wait()
    run.plain_save_state(tmp_path / "plain")
    others = {"arguments.json": b"{}", "lora-0.json": b"0", "lora-1.json": b"1"}
    assert contents(folder, graph) == {**contents(tmp_path / "plain", graph), **others}


# folders that must stay where they are


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A mount point, as a container has."""
    if os.geteuid() != 0:
        pytest.skip("mounting takes root")
    folder = tmp_path / "volume"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "none", str(folder)], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_load_state_finishes_what_was_cut_off_in_a_volume(tmp_path: Path, volume: Path, graph: Any) -> None:
    """Without lazyckpt it is refused: no two checkpoints are mixed."""
    run = Run()
    enable(run.accelerator)
    run.accelerator.save_state(volume)
    run.step()
    run.plain_save_state(tmp_path / "plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_place, "_link", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        run.accelerator.save_state(volume)
        with pytest.raises(lazyckpt.SaveError, match="the next save into the folder finishes"):
            run.accelerator.end_training()
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin"):
        accelerate.Accelerator.load_state(run.accelerator, str(volume))
    enable(run.accelerator)
    run.accelerator.load_state(volume)
    assert contents(volume, graph) == contents(tmp_path / "plain", graph)
    assert not list(volume.glob(".*"))


def test_a_resumed_run_does_not_run_into_what_total_limit_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: "checkpoint_1 exists already", since accelerate counts from 0 again, and the removal is late."""
    run = Run(**automatic(tmp_path, total_limit=2))
    enable(run.accelerator)
    for _ in range(3):
        run.step()
        run.accelerator.save_state()
    run.accelerator.end_training()
    hide = removal.hide
    monkeypatch.setattr(removal, "hide", lambda path, **where: (time.sleep(0.3), hide(path, **where))[1])
    resumed = Run(**automatic(tmp_path, total_limit=2))
    enable(resumed.accelerator)
    resumed.accelerator.load_state()
    for _ in range(2):
        resumed.step()
        resumed.accelerator.save_state()
    resumed.accelerator.end_training()
    assert names(tmp_path / "checkpoints") == ["checkpoint_1", "checkpoint_2"]
