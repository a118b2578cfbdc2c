"""A mirror whose file system is not mounted is no empty mirror."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lazyckpt import Checkpointer, Mirror, MirrorError, ReadError
from lazyckpt.storage import mounts
from lazyckpt.tiers.in_use import IN_USE, remember
from lazyckpt.tools import remote
from mounting import mount


@pytest.fixture
def lustre(tmp_path: Path) -> Iterator[Path]:
    """A file system for mirrors, mounted."""
    undo = mount(tmp_path / "lustre", "-t", "tmpfs", "-o", "size=16m", "tmpfs")
    yield tmp_path / "lustre"
    if (tmp_path / "lustre").is_mount():
        undo()


@pytest.fixture
def unmount(lustre: Path) -> Callable[[], object]:
    """Takes the file system away, with all files; the folder that it was mounted on stays."""
    return lambda: subprocess.run(["umount", "--lazy", str(lustre)], check=True)


def save(folder: Path, mirror: Path, step: int) -> None:
    with Checkpointer(folder, mirrors=[mirror], keep_last=1) as ckpt:
        ckpt.track(weights=torch.full((100,), float(step)))
        ckpt.save(step).mirrored().result(60)


@pytest.mark.long(first=1)
@pytest.mark.parametrize("below", ["", "runs"])
def test_a_mount_point_without_its_file_system_is_no_empty_mirror(
    tmp_path: Path, lustre: Path, unmount: Callable[[], object], below: str
) -> None:
    (lustre / below).mkdir(exist_ok=True)
    mirror = lustre / below / "a"
    save(tmp_path / "a", mirror, 1)
    unmount()
    told = "is mounted now; mount it" if not below else "runs does not exist: mount its file system, or make the folder"
    with (
        pytest.warns(UserWarning, match=rf"could not be uploaded: .*{told}.*; it is tried again"),
        pytest.warns(UserWarning, match="not all checkpoints"),
        Checkpointer(tmp_path / "a", mirrors=[mirror], keep_last=1) as ckpt,
    ):
        ckpt.track(weights=torch.zeros(100))
        ckpt.save(2).result()
    assert list(lustre.iterdir()) == []  # nothing fills the disk below
    for left in (tmp_path / "a").glob("step-*"):  # also step 1, if its upload held it when step 2 was committed
        shutil.rmtree(left)
    with (
        Checkpointer(tmp_path / "a", mirrors=[mirror], read_only=True) as ckpt,
        pytest.warns(UserWarning, match="passed over"),
        pytest.raises(ReadError, match=f"{told}.*it may hold the newest checkpoint"),
    ):
        ckpt.track(weights=torch.zeros(100))
        ckpt.restore()


def test_a_mount_that_disappears_between_two_uploads_is_noticed(
    tmp_path: Path, lustre: Path, unmount: Callable[[], object]
) -> None:
    with (
        pytest.warns(UserWarning, match="is mounted now; mount it"),
        pytest.warns(UserWarning, match="not all checkpoints"),
        Checkpointer(tmp_path / "a", mirrors=[lustre / "a"]) as ckpt,
    ):
        ckpt.track(weights=torch.zeros(100))
        ckpt.save(1).mirrored().result(60)
        unmount()
        ckpt.save(2).result()
    assert list(lustre.iterdir()) == []


def test_a_run_that_restored_from_a_mirror_remembers_it(
    tmp_path: Path, lustre: Path, unmount: Callable[[], object]
) -> None:
    save(tmp_path / "a", lustre / "a", 1)
    with Checkpointer(tmp_path / "b", mirrors=[Mirror(lustre / "a", every=100)]) as ckpt:
        ckpt.track(weights=torch.zeros(100))
        assert ckpt.restore() == 1
        unmount()
        with pytest.warns(UserWarning, match="passed over"), pytest.raises(ReadError, match="mount it"):
            ckpt.restore()


def test_a_mirror_without_the_folder_above_it_is_not_made(tmp_path: Path) -> None:
    there = tmp_path / "lustre" / "runs" / "a"
    save(tmp_path / "a", tmp_path / "m", 1)
    with pytest.raises(OSError, match="runs does not exist: mount its file system, or make the folder"):
        remote.push(tmp_path / "a", there)
    with (
        Checkpointer(tmp_path / "b", mirrors=[there], read_only=True) as ckpt,
        pytest.warns(UserWarning, match="passed over"),
        pytest.raises(ReadError, match=r"make the folder.*it may hold the newest checkpoint"),
    ):
        ckpt.track(weights=torch.zeros(100))
        ckpt.restore()
    assert not (tmp_path / "lustre").exists()
    there.parent.mkdir(parents=True)
    save(tmp_path / "b", there, 1)


@pytest.mark.parametrize("how", ["emptied", "removed"])
def test_a_mirror_that_was_emptied_by_hand_is_used_again(tmp_path: Path, how: str) -> None:
    mirror = tmp_path / "m"
    save(tmp_path / "a", mirror, 1)
    shutil.rmtree(mirror)
    if how == "emptied":
        mirror.mkdir()
    save(tmp_path / "a", mirror, 2)
    assert json.loads((tmp_path / "a" / IN_USE).read_text()) == {str(mirror): str(mounts.file_system(mirror)[1])}


def test_threads_that_remember_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    begin = threading.Barrier(8)

    def remembers(number: int) -> None:
        begin.wait(60)
        remember(tmp_path / str(number), tmp_path)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(remembers, range(8)))
    assert json.loads((tmp_path / IN_USE).read_text()).keys() == {str(tmp_path / str(number)) for number in range(8)}


def test_a_mirror_that_another_run_uses_is_not_remembered(tmp_path: Path) -> None:
    save(tmp_path / "a", tmp_path / "m", 1)
    with pytest.warns(UserWarning, match="another run"), pytest.raises(MirrorError, match="another run"):
        save(tmp_path / "b", tmp_path / "m", 1)
    assert not (tmp_path / "b" / IN_USE).exists()
