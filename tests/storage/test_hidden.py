"""No idiom of a training script takes a staged or a removed folder for a checkpoint."""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.storage import commit, folders, hidden


def folders_in(root: Path) -> list[os.DirEntry[str]]:
    return [entry for entry in os.scandir(root) if entry.is_dir()]


def newest(root: Path, when: Callable[[str], float]) -> str | None:
    return max((entry.name for entry in folders_in(root)), key=lambda name: when(str(root / name)), default=None)


def by_number(root: Path) -> str | None:
    """diffusers."""
    names = [name for name in os.listdir(root) if name.startswith("step")]
    return sorted(names, key=lambda name: int(name.split("_")[1]))[-1] if names else None


def by_search(root: Path) -> str | None:
    """torchtitan, whose expression has no anchors."""
    found = {int(match[1]): name for name in os.listdir(root) if (match := re.search(r"step[_-](\d+)", name))}
    return found[max(found)] if found else None


def by_glob(root: Path, pattern: str) -> str | None:
    names = [path for path in glob.glob(f"{root}/{pattern}", recursive=True) if os.path.isdir(path)]
    names = [name for name in names if Path(name) != root]
    return Path(max(names, key=os.path.getctime)).name if names else None


IDIOMS: dict[str, Callable[[Path], str | None]] = {
    "newest by ctime": lambda root: newest(root, os.path.getctime),  # the examples of accelerate
    "newest by mtime": lambda root: newest(root, os.path.getmtime),
    "glob *": lambda root: by_glob(root, "*"),
    "glob **": lambda root: by_glob(root, "**"),
    "step*": lambda root: by_glob(root, "step*"),
    "by number": by_number,
    "unanchored": by_search,
}


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """What every idiom finds in ``runs`` before and after each rename and sync, as a script would after a kill."""
    root = tmp_path / "runs"
    root.mkdir()
    (root / "step_1").mkdir()
    found: list[tuple[str, str | None]] = []

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def look_and_call(*args: Any, **options: Any) -> Any:
            found.extend((name, idiom(root)) for name, idiom in IDIOMS.items())
            try:
                return call(*args, **options)
            finally:
                found.extend((name, idiom(root)) for name, idiom in IDIOMS.items())

        return look_and_call

    for module, name in ((os, "rename"), (os, "fsync"), (commit._engine, "rename_exchange"), (shutil, "rmtree")):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    return found


def test_no_idiom_ever_finds_an_unfinished_checkpoint(tmp_path: Path, watch: list[tuple[str, str | None]]) -> None:
    """Regression: the newest folder by ctime was .tmp-step_20-…, or .trash-step_10-…, and stayed the newest."""
    root = tmp_path / "runs"
    for first in (2, 5):  # two runs
        with lazyckpt.Saver() as saver:
            for step in range(first, first + 3):
                with saver.stage(root / f"step_{step}", inside=hidden.place(root)) as staged:
                    staged.add("state.pt", {"step": torch.tensor(step)})
                    staged.save(blocking=True)
                saver.remove(root / f"step_{step - 1}")
                saver.wait()
            with saver.stage(root / f"step_{first + 2}", inside=hidden.place(root)) as staged:  # once more
                staged.add("state.pt", {"step": torch.tensor(-1)})
                staged.save(blocking=True)
    assert len(watch) > 500
    assert {(name, found) for name, found in watch if found is None or not re.fullmatch(r"step_\d", found)} == set()
    assert os.listdir(root) == ["step_7"]


def test_a_place_stays_while_others_stage_there(tmp_path: Path) -> None:
    place = hidden.place(tmp_path)
    with lazyckpt.Saver() as saver, lazyckpt.Saver() as other, other.stage(tmp_path / "a", inside=place) as staged:
        with saver.stage(tmp_path / "b", inside=place) as mine:
            mine.add("state.pt", {})
            mine.save(blocking=True)
        saver.close()
        assert staged.path.parent == place and staged.path.is_dir()
        staged.add("state.pt", {})
        staged.save(blocking=True)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_place_that_another_process_removes_is_made_again_and_old(tmp_path: Path) -> None:
    place = hidden.place(tmp_path)
    with lazyckpt.Saver() as saver:
        for step in (1, 2, 3):
            hidden.remove(place)
            with saver.stage(tmp_path / f"step_{step}", inside=place) as staged:
                staged.add("state.pt", {})
                assert IDIOMS["newest by ctime"](tmp_path) != hidden.PLACE or step == 1
                staged.save(blocking=True)
            assert IDIOMS["newest by ctime"](tmp_path) == f"step_{step}"


@pytest.mark.parametrize("where", [".", ".lazyckpt", ".lazyckpt/staged", "_lazyckpt"])
def test_leftovers_of_dead_processes_go_whatever_version_left_them(tmp_path: Path, where: str) -> None:
    """Older versions staged beside the checkpoints, or in a folder one level above."""
    name = where.partition("/")[0] if where != "." else ".lazyckpt"
    left = [folders.fresh_name(prefix, tmp_path / where / "step_2") for prefix in (folders.TEMPORARY, folders.TRASH)]
    for path in left:
        path.mkdir(parents=True)
        (path / "state.pt").touch()
    with lazyckpt.Saver() as saver, saver.stage(tmp_path / "step_3", inside=hidden.place(tmp_path, name)) as staged:
        assert not any(path.exists() for path in left)
        staged.add("state.pt", {})
        staged.save()
    assert os.listdir(tmp_path) == ["step_3"]


def test_a_place_on_another_mount_is_not_used(tmp_path: Path, shm: Path) -> None:
    with lazyckpt.Saver() as saver, saver.stage(tmp_path / "step_3", inside=hidden.place(shm)) as staged:
        assert staged.path.parent == tmp_path
        saver.remove(tmp_path / "step_2")


# What a load says of a temporary name


@pytest.mark.parametrize(
    ("left", "whole", "told"),
    [
        (".tmp-step_20-*", ["step_9", "step_10", "epoch_30"], "never finished.* is {}/step_10"),
        (".trash-step_5-*", ["step_10"], "being removed.* is {}/step_10"),
        (".tmp-step_20-*/model", ["step_10"], "is {}/step_10"),
        (".lazyckpt/staged/.tmp-step_20-*", ["step_10"], "is {}/step_10"),
        (".lazyckpt/staged/.trash-step_20-*", ["step_10"], "being removed.* is {}/step_10"),
        (".lazyckpt/staged", ["step_10", "src"], "is {}/step_10"),
        (".lazyckpt", ["epoch_3", "logs"], "is {}/epoch_3"),
        ("_lazyckpt/.tmp-checkpoint-4-*", ["checkpoint-2"], "is {}/checkpoint-2"),
        (".lazyckpt/staged/.tmp-checkpoint_4-*", ["checkpoints/checkpoint_3"], "is {}/checkpoints/checkpoint_3"),
        (".tmp-last.ckpt-*/last.ckpt", ["last.ckpt"], "is {}/last.ckpt"),
        (".tmp-step_20-*", [], "no whole one"),
        (".lazyckpt", [], "no whole one"),
    ],
)
def test_a_load_of_a_temporary_name_says_which_checkpoint_is_whole(
    left: str, whole: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / left.replace("*", "0123456789abcdef" * 2)
    path.mkdir(parents=True)
    if left.startswith(".lazyckpt"):
        hidden.make(hidden.place(tmp_path))
    for name in whole:
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for spelled in (path, path.relative_to(tmp_path)):
        with pytest.raises(lazyckpt.LoadError, match=told.format(re.escape(str(tmp_path)))):
            lazyckpt.load(spelled)
        with (
            lazyckpt.Checkpointer(tmp_path / "run") as checkpointer,
            pytest.raises(lazyckpt.LoadError, match=told.format(re.escape(str(tmp_path)))),
        ):
            checkpointer.track(model=torch.nn.Linear(2, 2))
            checkpointer.restore(path=spelled)


def test_who_stages_a_folder_may_read_in_it(tmp_path: Path) -> None:
    staging = commit.Staging(tmp_path / "step_20")
    lazyckpt.save({"a": 1}, staging.path / "state.pt")
    assert lazyckpt.load(staging.path / "state.pt") == {"a": 1}
    staging._unlock()  # as if the process had ended
    with pytest.raises(lazyckpt.LoadError, match="never finished"):
        lazyckpt.load(staging.path / "state.pt")


@pytest.mark.parametrize("name", [".tmp-mine", "lazyckpt", ".trash", "step-.tmp-1", "staged"])
def test_other_names_are_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    lazyckpt.save({"a": 1}, tmp_path / name / "state.pt")
    assert lazyckpt.load(tmp_path / name / "state.pt") == {"a": 1}
