"""Folders that cannot be renamed: mount points, those above one, the working folder. They are filled, and what a crash
leaves of that is the old checkpoint, the new one, or one that no loader takes for whole and that can be finished."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from endings import Cut, crash
from lazyckpt.errors import SaveError
from lazyckpt.storage import in_place, mounts, removal
from lazyckpt.storage.in_place import InPlaceStaging
from mounting import mount
from trials import TORTURE

TINY = {"chunk_bytes": 4096, "host_buffer_bytes": 16384, "io_depth": 2, "copy_threads": 1}


@pytest.fixture(params=["tmpfs", "bind mount", "mount below", "working folder", "above the working folder", "closed"])
def fixed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that must stay where it is."""
    folder = tmp_path / "a parent" / "fixed"
    below = folder / "below"
    with ExitStack() as stack:
        if request.param == "tmpfs":
            stack.callback(mount(folder, "-t", "tmpfs", "none"))
        elif request.param == "bind mount":
            (tmp_path / "disk").mkdir()
            stack.callback(mount(folder, "--bind", tmp_path / "disk"))
        elif request.param == "mount below":
            stack.callback(mount(below, "-t", "tmpfs", "none"))
        else:
            below.mkdir(parents=True)
        below.mkdir(exist_ok=True)
        if "working" in request.param:
            monkeypatch.chdir(folder if request.param == "working folder" else below)
        if request.param == "closed":
            access = os.access
            monkeypatch.setattr(os, "access", lambda path, mode: path != folder.parent and access(path, mode))
        yield folder
        monkeypatch.chdir("/")


def save(saver: lazyckpt.Saver, folder: Path, value: int) -> lazyckpt.SaveHandle:
    with saver.stage(folder) as staged:
        (staged.path / "sub").mkdir()
        (staged.path / "sub" / "small").write_text(str(value))
        staged.add("state.pt", torch.full((1000,), value))
        return staged.save()


def value_in(folder: Path) -> int:
    state = torch.load(folder / "state.pt")
    assert (folder / "sub" / "small").read_text() == str(int(state[0]))
    return int(state[0])


def test_a_folder_that_cannot_be_renamed_is_filled(fixed: Path) -> None:
    """Regression: an EBUSY for a mount point, the data on the wrong disk until then; and a run without its folder."""
    (fixed / "theirs").write_text("theirs")
    (fixed / "below" / "theirs").write_text("theirs, too")
    beside = sorted(fixed.parent.iterdir())
    folder = fixed.stat().st_ino
    with lazyckpt.Saver(**TINY, max_in_flight=3) as saver:
        for value in range(3):
            handle = save(saver, fixed, value)
            assert sorted(fixed.parent.iterdir()) == beside
            assert handle.result(30) == fixed and value_in(fixed) == value
        handles = [save(saver, fixed, value) for value in range(6)]
        assert [handle.result(30) for handle in handles] == [fixed] * 6 and value_in(fixed) == 5
    assert sorted(path.name for path in fixed.iterdir()) == ["below", "state.pt", "sub", "theirs"]
    assert (fixed / "theirs").read_text() == "theirs" and (fixed / "below" / "theirs").read_text() == "theirs, too"
    assert fixed.stat().st_ino == folder and os.getcwd()


def test_which_folders_are_fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "file").touch()
    assert not any(mounts.is_fixed(tmp_path / name) for name in ("plain", "file", "missing"))
    unmount = mount(tmp_path / "a \\ and a space", "-t", "tmpfs", "none")
    try:
        assert mounts.is_fixed(tmp_path / "a \\ and a space") and mounts.is_fixed(tmp_path)
        assert not mounts.on_one_mount(tmp_path, tmp_path / "a \\ and a space")
        assert mounts.on_one_mount(tmp_path, tmp_path / "plain")
    finally:
        unmount()
    assert not mounts.is_fixed(tmp_path)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    assert mounts.is_fixed(tmp_path)
    (tmp_path / "gone").rmdir()
    assert not mounts.is_fixed(tmp_path / "plain")


def test_a_folder_on_another_mount_is_not_staged_in(tmp_path: Path) -> None:
    """Regression: of two bind mounts of one disk the device is the same, but there is no rename between them."""
    (tmp_path / "disk").mkdir()
    unmount = mount(tmp_path / "project" / "checkpoints", "--bind", tmp_path / "disk")
    try:
        with lazyckpt.Saver(**TINY) as saver:
            staged = saver.stage(tmp_path / "project" / "checkpoints" / "one", inside=tmp_path / "project")
            staged.add("a.pt", 1)
            staged.save(blocking=True)
        assert torch.load(tmp_path / "project" / "checkpoints" / "one" / "a.pt") == 1
    finally:
        unmount()


@pytest.mark.parametrize("spelling", ["link", "link to a link", ".."])
def test_a_link_to_the_folder_stays(tmp_path: Path, spelling: str) -> None:
    """Regression: it was replaced by the checkpoint, which lay on the disk of the link then."""
    (tmp_path / "disk" / "state" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to("disk/state")
    (tmp_path / "link to a link").symlink_to("link")
    with lazyckpt.Saver(**TINY) as saver:
        for value in range(2):
            path = tmp_path / "disk" / "state" / "sub" / ".." if spelling == ".." else tmp_path / spelling
            assert save(saver, path, value).result(30) == tmp_path / "disk" / "state"
            assert value_in(tmp_path / "disk" / "state") == value
    assert (tmp_path / "link").readlink() == Path("disk/state")
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["state"]


def test_a_link_to_nothing_is_an_error(tmp_path: Path) -> None:
    """Its disk may not be mounted."""
    (tmp_path / "link").symlink_to("missing")
    with lazyckpt.Saver(**TINY) as saver, pytest.raises(SaveError, match="No such file"):
        saver.stage(tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


@pytest.mark.parametrize("kind", ["a folder", "a link", "a file"])
def test_what_is_not_ours_does_not_go_for_a_checkpoint(tmp_path: Path, kind: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with lazyckpt.Saver(**TINY) as saver:
        save(saver, tmp_path, 1).result(30)
        if kind == "a folder":
            (tmp_path / "state.pt").unlink()
            (tmp_path / "state.pt").mkdir()
        else:
            (tmp_path / "sub").rename(tmp_path / "elsewhere")
            (tmp_path / "sub").symlink_to("elsewhere") if kind == "a link" else (tmp_path / "sub").touch()
        before = sorted(tmp_path.iterdir())
        with pytest.raises(SaveError, match="the checkpoint has a f"):
            save(saver, tmp_path, 2).result(30)
    assert sorted(tmp_path.iterdir()) == before


# crashes


def staged(folder: Path, value: int) -> InPlaceStaging:
    staging = InPlaceStaging(folder)
    for name in ("others", "small", "z"):
        (staging.path / name).write_text(str(value))
    (staging.path / "marker").write_text(str(value))
    (staging.path / "sub").mkdir()
    (staging.path / "sub" / "deep").write_text(str(value))
    staging.describe(None, ["marker", "others"])
    return staging


def loaded(folder: Path) -> int | None:
    """As a loader that cannot do without the marker."""
    if not (folder / "marker").exists():
        return None
    values = {(folder / name).read_text() for name in ("others", "small", "z", "sub/deep")}
    values |= {(folder / "marker").read_text()}
    assert len(values) == 1, f"two checkpoints are mixed: {values}"
    return int(values.pop())


def old(folder: Path) -> Path:
    folder.mkdir()
    staged(folder, 1).publish()
    (folder / "sub" / "theirs").write_text("theirs")
    return folder


@pytest.mark.parametrize("links", [True, False])
def test_a_crash_leaves_one_checkpoint_or_none_that_loads(
    tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every call, and at every call of what finishes it."""
    if not links:
        monkeypatch.setattr(os, "link", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EPERM, "no links")))
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # the trials of crash/ cut the power
    seen: set[int | None] = set()
    first = 1
    while True:
        second = 1
        while True:
            folder = old(tmp_path / f"{first}-{second}")
            staging = staged(folder, 2)
            if not crash(staging.publish, first):
                assert first > 10 and seen == {None, 1, 2}
                return
            staging._unlock()
            found = loaded(folder)
            again = crash(lambda folder=folder: in_place.finish(folder), second)  # type: ignore[misc]
            seen |= {found, loaded(folder)}
            in_place.finish(folder)
            removal.sweep(folder)
            assert loaded(folder) == 2 or found == loaded(folder) == 1
            assert sorted(path.name for path in folder.iterdir()) == ["marker", "others", "small", "sub", "z"]
            assert (folder / "sub" / "theirs").read_text() == "theirs"
            if not again:
                break
            second += 1 if TORTURE else 3
        first += 1


def test_after_an_error_the_next_save_is_the_one_that_stays(tmp_path: Path) -> None:
    """What failed half way must not be finished over what came after."""
    for nth in range(1, 100):
        folder = old(tmp_path / str(nth))
        failing = staged(folder, 2)
        with pytest.MonkeyPatch.context() as patch:
            cut = Cut(patch, nth, OSError(errno.EIO, os.strerror(errno.EIO)))
            try:
                failing.publish()
            except OSError:
                failing.discard()
        if cut.left > 0:
            assert nth > 10
            return
        assert loaded(folder) in (None, 1, 2)
        staged(folder, 3).publish()
        in_place.finish(folder)
        assert loaded(folder) == 3 and not list(folder.glob(".*"))
    raise AssertionError("there is no end of calls")


def test_to_finish_waits_for_who_is_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = old(tmp_path / "folder")
    staging = staged(folder, 2)
    waiting: list[threading.Thread] = []
    link = os.link

    def slow(*args: Any, **kwargs: Any) -> None:
        if not waiting:
            waiting.append(threading.Thread(target=in_place.finish, args=[folder]))
            waiting[0].start()
            waiting[0].join(0.2)
            assert waiting[0].is_alive()
        link(*args, **kwargs)

    monkeypatch.setattr(os, "link", slow)
    staging.publish()
    waiting[0].join(10)
    assert not waiting[0].is_alive() and loaded(folder) == 2


def test_without_locks_nobody_finishes_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = old(tmp_path / "folder")
    assert crash(staged(folder, 2).publish, 10)
    with pytest.raises(OSError, match="by hand"):
        in_place.finish(folder)
    assert loaded(folder) is None


def test_a_leftover_that_others_named_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".publish-theirs").mkdir()
    (tmp_path / ".publish-theirs" / "a").touch()
    in_place.finish(tmp_path)
    assert (tmp_path / ".publish-theirs" / "a").exists()
