"""Checkpoints in a lower layer of an overlay, as an image of a container brings them. Their folders cannot be renamed:
the kernel says EXDEV (``redirect_dir=off``, the default). They are replaced, removed and pruned all the same."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import commands
import lazyckpt
from endings import crash
from lazyckpt.storage import catalog, commit, manifest, mounts, removal
from mounting import mount

TINY = {"chunk_bytes": 4096, "host_buffer_bytes": 16384, "io_depth": 2, "copy_threads": 1}
MODEL = "model.safetensors"


class Overlay:
    """The image is the contents of ``lower`` when ``mount`` is called; a process sees ``merged``."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.lower, self.merged = folder / "lower", folder / "merged"
        self._folder, self._stack = folder, stack
        self.lower.mkdir(parents=True)

    def mount(self, kib: int = 100_000) -> Path:
        """``kib``: the space for what a process writes, and for files of the image that are copied."""
        disk = self._folder / "disk"
        self._stack.callback(mount(disk, "-t", "tmpfs", "-o", f"size={kib}k", "none"))
        upper, work = disk / "upper", disk / "work"
        upper.mkdir()
        work.mkdir()
        layers = f"lowerdir={self.lower},upperdir={upper},workdir={work},redirect_dir=off"
        self._stack.callback(mount(self.merged, "-t", "overlay", "overlay", "-o", layers))
        return self.merged


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Overlay]:
    with ExitStack() as stack:
        yield Overlay(tmp_path, stack)


def save_steps(run: Path, *steps: int, value: float = 0.0, **knobs: Any) -> None:
    with lazyckpt.Checkpointer(run, **TINY, **knobs) as checkpointer:
        checkpointer.track(x={"t": torch.full((50_000,), value)})
        for step in steps:
            checkpointer.save(step).result(30)


def value_of(step: Path) -> float:
    return float(lazyckpt.load(step)["x"]["t"][0])


def stage(saver: lazyckpt.Saver, folder: Path, value: int) -> lazyckpt.SaveHandle:
    with saver.stage(folder) as staged:
        staged.add(MODEL, {"t": torch.full((50_000,), value)})
        staged.add("optimizer.bin", torch.full((1000,), value))
        (staged.path / "small").write_text(str(value))
        return staged.save()


def value_in(folder: Path) -> int:
    values = {int(lazyckpt.load(folder / MODEL)["t"][0]), int(torch.load(folder / "optimizer.bin")[0])}
    values.add(int((folder / "small").read_text()))
    assert len(values) == 1, f"two checkpoints are mixed: {values}"
    return values.pop()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_step_of_the_image_is_replaced(overlay: Overlay) -> None:
    save_steps(overlay.lower / "run", 1, 2)
    run = overlay.mount() / "run"
    assert mounts.is_overlay(run) and not mounts.is_overlay(overlay.lower)
    with pytest.raises(OSError) as caught:  # or nothing here tests anything
        os.rename(run / "step-00000001", run / "b")
    assert caught.value.errno == errno.EXDEV
    save_steps(run, 1, value=1.0)
    assert names(run) == ["step-00000001", "step-00000002"]
    assert value_of(run / "step-00000001") == 1.0 and value_of(run / "step-00000002") == 0.0
    assert [c.step for c in catalog.Catalog(run).scan()] == [1, 2]
    save_steps(run, 1, value=2.0)
    assert value_of(run / "step-00000001") == 2.0


def test_retention_removes_steps_of_the_image(overlay: Overlay) -> None:
    save_steps(overlay.lower / "run", 1, 2, 3)
    run = overlay.mount() / "run"
    save_steps(run, 4, keep_last=2)
    assert names(run) == ["step-00000003", "step-00000004"]


def test_prune_removes_steps_of_the_image(overlay: Overlay) -> None:
    save_steps(overlay.lower / "run", 1, 2, 3)
    run = overlay.mount(kib=100) / "run"
    result = commands.run("prune", str(run), "--keep-last", "1", "--yes")
    assert result.exit_code == 0, result.output
    assert names(run) == ["step-00000003"]


def test_a_folder_of_the_image_is_filled(overlay: Overlay) -> None:
    with lazyckpt.Saver(**TINY) as saver:
        stage(saver, overlay.lower / "state", 1).result(30)
        (overlay.lower / "state" / "theirs").write_text("theirs")
        merged = overlay.mount()
        for value in (2, 3):
            assert stage(saver, merged / "state", value).result(30) == merged / "state"
            assert value_in(merged / "state") == value
    assert names(merged / "state") == [MODEL, "optimizer.bin", "small", "theirs"] and names(merged) == ["state"]


def test_a_folder_and_a_file_of_the_image_are_removed(overlay: Overlay) -> None:
    with lazyckpt.Saver(**TINY) as saver:
        stage(saver, overlay.lower / "state", 1).result(30)
        saver.save({"t": torch.ones(50_000)}, overlay.lower / "last.ckpt").result(30)
        (overlay.lower / "state" / "deep" / "er").mkdir(parents=True)
        (overlay.lower / "state" / "deep" / "link").symlink_to("er")
        merged = overlay.mount(kib=100)  # less than a file
        saver.remove(merged / "state")
        saver.remove(merged / "last.ckpt")
        saver.wait()
    assert names(merged) == []


# crashes


def test_a_crash_while_a_step_of_the_image_is_replaced(overlay: Overlay) -> None:
    """At every call: the old one, the new one, or none that loads."""
    save_steps(overlay.lower / "new", 1, value=1.0)
    trials = [overlay.lower / f"run-{nth}" for nth in range(30)]
    for run in trials:
        save_steps(run, 1)
    merged = overlay.mount()
    seen: list[float | None] = []
    for nth, run in enumerate(trials, 1):
        step = merged / run.name / "step-00000001"
        staging = commit.Staging(step)
        for name in names(merged / "new" / "step-00000001"):
            shutil.copy(merged / "new" / "step-00000001" / name, staging.path)
        ended = crash(staging.publish, nth)
        found = [c.path for c in catalog.Catalog(step.parent).scan()]
        seen.append(value_of(step) if found else None)
        staging._unlock()
        removal.sweep(step.parent)
        if not ended:
            break
    assert nth > 5 and not ended and seen[-1] == 1.0
    assert [value for i, value in enumerate(seen) if i == 0 or value != seen[i - 1]] == [0.0, None, 1.0]


def test_a_crash_in_a_removal_leaves_nothing_that_loads(overlay: Overlay) -> None:
    """The weights go first: plain Trainers resume without a file that is not theirs."""
    trials = [overlay.lower / f"state-{nth}" for nth in range(30)]
    with lazyckpt.Saver(**TINY) as saver:
        for folder in trials:
            stage(saver, folder, 1).result(30)
            (folder / "a folder").mkdir()
            (folder / "a folder" / "a").touch()
    merged = overlay.mount()
    for nth, lower in enumerate(trials, 1):
        folder = merged / lower.name
        ended = crash(lambda folder=folder: removal.remove(folder), nth)  # type: ignore[misc]
        if not ended:
            assert nth > 5 and not folder.exists()
            return
        left = {str(path.relative_to(folder)) for path in folder.rglob("*")}
        if left != {MODEL, "optimizer.bin", "small", "a folder", "a folder/a"}:
            assert not (folder / MODEL).exists() or not (folder / "optimizer.bin").exists()
            assert {"small", "a folder/a"} <= left or not {MODEL, "optimizer.bin"} & left
    raise AssertionError("there is no end of calls")


def test_a_manifest_is_gone_for_good_before_anything_else_goes(
    overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(overlay.lower / "run", 1)
    run = overlay.mount() / "run"
    calls: list[str] = []
    unlink, fsync = os.unlink, os.fsync
    monkeypatch.setattr(os, "unlink", lambda name, **where: (calls.append(str(name)), unlink(name, **where))[1])
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd))[1])
    assert removal.remove(run / "step-00000001")
    assert calls[:2] == [manifest.MANIFEST, "fsync"] and calls.index("state.pt") > 1
    assert calls[-1] == "fsync"


def test_what_took_the_place_of_a_folder_meanwhile_stays(overlay: Overlay) -> None:
    save_steps(overlay.lower / "run", 1)
    run = overlay.mount() / "run"

    def replace(step: Path) -> bool:
        save_steps(run, 1, value=1.0)
        return True

    assert not removal.remove(run / "step-00000001", replace)
    assert value_of(run / "step-00000001") == 1.0
