"""The durability protocol: published checkpoints are whole, remains go, and live saves stay."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.storage import commit, folders, removal

HEX = f"{0:032x}"  # ends temporary names


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def staged(target: Path, text: str, **options: bool) -> commit.Staging:
    staging = commit.Staging(target, **options)
    (staging.path / "state.pt").write_text(text)
    staging.describe({"format": 1}, ["state.pt"])
    return staging


def test_publish_a_new_name_and_replace_an_old_one(tmp_path: Path) -> None:
    target = tmp_path / "step-00000001"
    assert staged(target, "one").publish() is None
    replaced = staged(target, "two").publish()
    assert replaced is not None and (replaced / "state.pt").read_text() == "one"
    assert (target / "state.pt").read_text() == "two"
    removal.remove(replaced)
    assert names(tmp_path) == ["step-00000001"]


def test_what_others_put_into_a_replaced_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training script writes its own files beside the state, before that state is published and after."""
    target = tmp_path / "checkpoint"
    (target / "adapter" / "deep").mkdir(parents=True)
    (target / "state.pt").write_text("old")
    (target / "adapter" / "deep" / "weights").write_text("theirs")
    (target / "link").symlink_to("adapter")
    exchange = commit.Staging._exchange

    def late(self: commit.Staging) -> Path:
        (target / "late").write_text("theirs, too")  # between the look at the folder and its replacement
        return exchange(self)

    monkeypatch.setattr(commit.Staging, "_exchange", late)
    replaced = staged(target, "new", keep_others=True).publish()
    assert replaced is not None
    removal.remove(replaced)
    assert names(target) == ["adapter", "late", "link", "manifest.json", "state.pt"]
    assert (target / "state.pt").read_text() == "new"
    assert (target / "adapter" / "deep" / "weights").read_text() == "theirs"
    assert (target / "link").readlink() == Path("adapter") and (target / "late").read_text() == "theirs, too"
    staged(target, "whole").publish()
    assert names(target) == ["manifest.json", "state.pt"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("layer_07-model_states.pt", "layer_00-model_states.pt"),
        ("__1_0.distcp", "__0_0.distcp"),
    ],
)
def test_files_of_ranks_that_are_no_more_do_not_stay(old: str, new: str, tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    target.mkdir()
    for name in (old, "notes.txt"):
        (target / name).write_text("old")
    staging = commit.Staging(target, keep_others=True)
    (staging.path / new).write_text("new")
    staging.describe(None, [new])
    replaced = staging.publish()
    assert replaced is not None and names(target) == sorted([new, "notes.txt"])


@pytest.mark.parametrize("before", ["nothing", "file", "link", "folder"])
def test_a_link_takes_the_place_of_anything(before: str, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    name = tmp_path / "last"
    if before == "file":
        name.touch()
    elif before == "link":
        name.symlink_to("gone")
    elif before == "folder":
        staged(name, "x").publish()
    (tmp_path / ".tmp-last-link").symlink_to("gone")  # left by a process that died
    commit.publish_link(name, tmp_path / "a")
    assert os.readlink(name) == "a"
    assert names(tmp_path) == ["a", "last"]


@pytest.mark.parametrize("before", [None, "step1", "a longer name than the new one"])
def test_a_pointer_names_its_target_whole_and_keeps_the_mode(before: str | None, tmp_path: Path) -> None:
    file = tmp_path / "latest"
    if before is not None:
        file.write_text(before)
        file.chmod(0o640)
    commit.publish_pointer(file, tmp_path / "runs" / "step2")
    assert file.read_text() == "runs/step2" and names(tmp_path) == ["latest"]
    assert before is None or stat.S_IMODE(file.stat().st_mode) == 0o640


def test_a_pointer_is_synced_before_it_has_its_name_and_after(
    tmp_path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (log.append("replace"), replace(a, b))[1])
    commit.publish_pointer(tmp_path / "latest", tmp_path / "a")
    assert log == ["sync latest", "replace", f"sync {tmp_path.name[:13]}"]


def test_a_sweep_spares_a_pointer_that_is_being_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, swept = os.replace, []
    monkeypatch.setattr(os, "replace", lambda a, b: (swept.extend(removal.sweep(tmp_path)), replace(a, b))[1])
    commit.publish_pointer(tmp_path / "latest", tmp_path / "step2")
    assert not swept and names(tmp_path) == ["latest"] and (tmp_path / "latest").read_text() == "step2"


def test_a_pointer_that_cannot_be_written_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "latest").write_text("step1")

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError):
        commit.publish_pointer(tmp_path / "latest", tmp_path / "step2")
    assert names(tmp_path) == ["latest"] and (tmp_path / "latest").read_text() == "step1"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists the syncs and renames, in order."""
    log: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(fd: int) -> None:
        log.append("sync " + os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))[:13])
        fsync(fd)

    def note_rename(a: Any, b: Any, **kw: Any) -> None:
        log.append("rename")
        rename(a, b, **kw)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    return log


def test_a_link_is_synced_after_it_has_its_name(
    tmp_path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (log.append("replace"), replace(a, b))[1])
    commit.publish_link(tmp_path / "last", tmp_path / "a")
    assert log == ["replace", f"sync {tmp_path.name[:13]}"]


def test_the_order_of_syncs_and_renames(tmp_path: Path, log: list[str]) -> None:
    """The manifest is synced before the folder, the folder before the rename, the parent after it."""
    staged(tmp_path / "step-00000001", "x").publish()
    assert log == ["sync manifest.json"[:18], "sync .tmp-step-000", "rename", f"sync {tmp_path.name[:13]}"]


def syncs_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are synced from now on."""
    synced: list[str] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    return synced


@pytest.mark.parametrize("exists", [False, True])
def test_the_name_of_the_run_itself_is_synced(tmp_path: Path, exists: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the folder that Checkpointer and Saver make was not synced into the one above, so that a power cut
    might have taken it, and all acknowledged checkpoints with it. One that exists may just have been made."""
    runs = [tmp_path / "a" / "b" / name for name in ("checkpointer", "saver")]
    if exists:
        for run in runs:
            run.mkdir(parents=True)
    synced = syncs_of(monkeypatch)
    lazyckpt.Checkpointer(runs[0]).close()
    with lazyckpt.Saver() as saver:
        saver.save([1], runs[1] / "x.pt").result()
    assert synced.count(str(tmp_path / "a" / "b")) == 2
    assert exists or {str(tmp_path), str(tmp_path / "a")} <= set(synced)


def test_the_folder_above_may_be_closed_to_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home directory that others may pass through, but not list."""

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folders, "sync_path", refuse)
    folders.make_folder(tmp_path / "new")
    assert names(tmp_path) == ["new"]


def test_the_final_name_is_gone_for_good_before_what_had_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: retention renamed a checkpoint and removed its files, with no sync between: a file system that keeps
    these in another order might have left the final name with half of the files after a power cut."""
    target = tmp_path / "step-00000001"
    staged(target, "x").publish()
    synced = syncs_of(monkeypatch)
    rmtree = shutil.rmtree

    def check(path: Any, **kwargs: Any) -> None:
        assert synced == [str(tmp_path)] and os.path.basename(path).startswith(folders.TRASH)
        rmtree(path, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", check)
    removal.remove(target)
    assert names(tmp_path) == []


@pytest.mark.parametrize("links", [True, False])
def test_what_is_carried_over_is_synced(
    links: bool, tmp_path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a folder that was carried over was made after the one above it had been synced."""

    def no_links(*_: Any, **__: Any) -> None:
        raise OSError(1, "Operation not permitted")

    target = tmp_path / "target"
    (target / "adapter").mkdir(parents=True)
    (target / "adapter" / "weights").write_text("theirs")
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    staging = staged(target, "new", keep_others=True)
    log.clear()
    monkeypatch.setattr(staging, "_exchange", lambda: log.append("exchange") or Path(tmp_path / "gone"))
    staging.publish()
    copies = [] if links else ["sync weights"]
    before = [entry[: len("sync .tmp-target-")] for entry in log[: log.index("exchange")]]
    assert before == [*copies, "sync adapter", "sync .tmp-target-"]


def test_remove_whatever_it_is(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    for name in ("folder", "file", "link", "missing"):
        removal.remove(tmp_path / name)
    assert names(tmp_path) == ["kept"]


# leftovers


@contextmanager
def child(body: Callable[[Callable[[str], None]], object]) -> Iterator[tuple[int, str]]:
    """A forked process: its number, and the line that ``body`` notes first. It is killed in the end."""
    reads, writes = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            body(lambda line: os.write(writes, line.encode()) and None)
            time.sleep(60)
        finally:
            os._exit(1)
    try:
        yield pid, os.read(reads, 300).decode()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reads)
        os.close(writes)


def test_sweep_spares_the_living_and_takes_the_dead(tmp_path: Path) -> None:
    def stage(note: Callable[[str], None]) -> None:
        staging = commit.Staging(tmp_path / "step-00000007")
        (staging.path / "state.pt").write_text("half")
        note(staging.path.name)
        time.sleep(60)

    with child(stage) as (_, name):
        own = commit.Staging(tmp_path / "step-00000008")
        (tmp_path / f".trash-step-00000001-{HEX}").mkdir()
        (tmp_path / f".trash-step-00000002-{HEX}").write_text("a file that stood in the way")
        (tmp_path / f".tmp-step-00000003-{HEX}").mkdir()
        for folder in ("step-00000004", ".tmp-theirs", ".trash-theirs", "precious"):
            (tmp_path / folder).mkdir()
        (tmp_path / f".tmp-note-{HEX}").write_text("the user's")
        (tmp_path / f".tmp-link-{HEX}").symlink_to(tmp_path / "precious")
        with lazyckpt.Checkpointer(tmp_path) as ckpt:
            ckpt.save(1).result()
        kept = ["precious", "step-00000001", "step-00000004", ".tmp-theirs", ".trash-theirs", name, own.path.name]
        kept += [f".tmp-link-{HEX}", f".tmp-note-{HEX}"]
        assert names(tmp_path) == sorted(kept)
    assert [p.name for p in removal.sweep(tmp_path)] == [name]
    assert own.path.is_dir()
    own.discard()


def test_a_forked_child_does_not_keep_the_lock_of_its_parent(tmp_path: Path) -> None:
    """A data loader's worker that outlives the run must not make its leftovers immortal."""
    staging = commit.Staging(tmp_path / "step-00000007")
    with child(lambda note: note("forked")):
        staging._unlock()  # as the end of this process does
        assert len(removal.sweep(tmp_path)) == 1 and names(tmp_path) == []


def test_sweep_holds_the_lock_until_the_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a process that makes its folder and the moment it locks it, a sweep may take it for a leftover. It
    must find that out then, not when its checkpoint has disappeared."""
    leftover = tmp_path / f".tmp-step-00000001-{HEX}"
    leftover.mkdir()
    locked = []
    rmtree = shutil.rmtree

    def watched(path: Any, **kwargs: Any) -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked.append(False)
        except OSError:
            locked.append(True)
        finally:
            os.close(fd)
        rmtree(path, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", watched)
    removal.sweep(tmp_path)
    assert locked == [True] and names(tmp_path) == []


def test_discarding_twice_leaves_the_lock_of_another(tmp_path: Path) -> None:
    """Descriptors have numbers that are given again."""
    first = staged(tmp_path / "a", "one")
    first.discard()
    second = staged(tmp_path / "b", "two")
    first.discard()
    assert removal.sweep(tmp_path) == [] and names(tmp_path) == [second.path.name]
    second.discard()


def test_what_was_replaced_is_swept_when_its_name_is_gone_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: where two folders were exchanged and that was not synced, the next run removed the old one before it
    was certain that it no longer had the final name: a power cut could give the name back to an empty folder."""
    target = tmp_path / "step-00000001"
    staged(target, "one").publish()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        second = commit.Staging(target)
        with pytest.raises(OSError, match="Input/output"):
            second.publish()
    second.discard()
    synced = syncs_of(monkeypatch)
    rmtree = shutil.rmtree

    def check(path: Any, **kwargs: Any) -> None:
        assert synced == [str(tmp_path)] and (Path(path) / "state.pt").read_text() == "one"
        rmtree(path, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", check)
    assert len(removal.sweep(tmp_path)) == 1 and names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("after", ["mkdir", "open"])
def test_a_folder_swept_before_it_was_locked_is_made_anew(
    after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, swept = getattr(os, after), []

    def swept_once(path: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(path, *args, **kwargs)
        if not swept:
            swept.append([])
            swept[0] = removal.sweep(tmp_path)
        return result

    monkeypatch.setattr(os, after, swept_once)
    staging = commit.Staging(tmp_path / "step-00000001")
    assert len(swept[0]) == 1 and staging.path.is_dir()
    staging.discard()


@pytest.mark.parametrize("code", ["ENOLCK", "ENOSYS"])
def test_without_locks_only_sweeping_is_lost(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: ENOSYS, which Lustre mounted noflock says, was an error of every save."""

    def refuse(fd: int, operation: int) -> None:
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    monkeypatch.setattr(fcntl, "flock", refuse)
    leftover = tmp_path / f".tmp-step-00000007-{HEX}"
    leftover.mkdir()
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1).result()
    assert names(tmp_path) == [leftover.name, "step-00000001"]


def test_a_lock_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it another process would take the folder for a leftover."""

    def fail(fd: int, operation: int) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(PermissionError):
        commit.Staging(tmp_path / "step-00000001")
    assert names(tmp_path) == []


def test_a_sweep_and_many_saves_at_once(tmp_path: Path) -> None:
    """Starting another Checkpointer in the same folder, again and again, harms no save."""

    def sweep(note: Callable[[str], None]) -> None:
        note("ready")
        while True:
            removal.sweep(tmp_path)

    with child(sweep), lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(x={"t": torch.zeros(5000)})
        for count in range(50):
            ckpt.save(count % 3).result()
    removal.sweep(tmp_path)
    assert names(tmp_path) == [f"step-0000000{i}" for i in range(3)]
