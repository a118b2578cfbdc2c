"""A folder that several ranks fill: its lock, its renames, and who may sweep it (storage/shared.py, claim.py)."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fuse_server
from lazyckpt import waits
from lazyckpt.storage import claim, commit, folders, locks, removal
from lazyckpt.storage.claim import LOCK, FolderClaim
from lazyckpt.storage.shared import AttachedStaging, SharedFile, SharedFileStaging, SharedFolder, SharedStaging
from lazyckpt.tools.listing import leftovers

HEX = f"{1:032x}"
ME = FolderClaim.here("a" * 32, 3)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "step-00000007"


def seen(staging: SharedStaging, timeout_s: float = 5.0) -> SharedFolder:
    return SharedFolder(staging.target, staging.path, ME, timeout_s)


def staged_file(target: Path, text: str = "new") -> tuple[SharedFileStaging, SharedFile]:
    staging = SharedFileStaging(target, ME)
    (staging.path / target.name).write_text(text)
    return staging, SharedFile(target, staging.path, ME, 5.0)


def checkpoint(folder: Path, text: str = "old") -> Path:
    folder.mkdir()
    (folder / "file").write_text(text)
    return folder


@pytest.fixture
def dead(target: Path) -> Iterator[Callable[[FolderClaim], Path]]:
    """A function that stages a folder in a process which is killed at once."""

    def stage(mine: FolderClaim) -> Path:
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(writes, os.fsencode(SharedStaging(target, mine).path))
            signal.pause()
        path = Path(os.fsdecode(os.read(reads, 1000)))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reads)
        os.close(writes)
        return path

    yield stage


def test_the_lock_file_says_whose_the_folder_is_and_goes_along(target: Path) -> None:
    staging = SharedStaging(target, ME)
    told = json.loads((staging.path / LOCK).read_text())
    assert told == {"run": "a" * 32, "generation": 3, "host": os.uname().nodename, "staged": staging.path.name}
    assert os.listdir(staging.path) == [LOCK]
    folder = seen(staging)
    assert not folder.is_published()
    assert folder.to_final() == "done"
    assert staging.publish() is None
    assert folder.is_published() and os.listdir(target) == [LOCK]


@pytest.mark.parametrize("lone", [False, True])
def test_exactly_one_of_the_two_renames_happens(target: Path, lone: bool) -> None:
    for _ in range(200):
        staging = SharedStaging(target, ME)
        folder = other = seen(staging)
        if lone:
            staging.discard()
            staging, folder = staged_file(target)
            other = SharedFile(target, staging.path, ME, 5.0)
        start = threading.Barrier(3)
        found: dict[str, object] = {}

        def take(name: str, rename: Callable[[], object], start=start, found=found) -> None:  # type: ignore[no-untyped-def]
            start.wait()
            found[name] = rename()

        renames = {"publish": folder.to_final, "abort": folder.to_trash, "also": other.to_trash}
        threads = [threading.Thread(target=take, args=item) for item in renames.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (found["publish"] == "done") + bool(found["abort"]) + bool(found["also"]) == 1, found
        assert folder.is_published() == (found["publish"] == "done") == target.exists()
        staging.publish() if target.exists() else staging.discard()
        assert not lone or [path for path in target.parent.iterdir() if path != target] == []
        for path in target.parent.iterdir():
            removal.remove(path)


def test_a_lone_file_replaces_another_one_and_keeps_its_mode(target: Path) -> None:
    target.write_text("old")
    target.chmod(0o640)
    staging, file = staged_file(target)
    staging.describe(None, [])
    assert not file.is_published()
    assert file.to_final() == "done" and file.is_published()
    assert staging.publish() is None
    assert target.read_text() == "new" and target.stat().st_mode & 0o777 == 0o640
    assert os.listdir(target.parent) == [target.name] and leftovers(target.parent) == []
    assert not file.to_trash() and file.to_final() == "gone" and file.is_published()


def test_a_lone_file_that_is_given_up_leaves_the_old_one(target: Path, dead: Callable[[FolderClaim], Path]) -> None:
    target.write_text("old")
    staging, file = staged_file(target)
    assert file.to_trash() and not file.to_trash()
    assert file.to_final() == "gone" and not file.is_published()
    file.put_back()
    file.remove_trash()
    staging.discard()
    abandoned = dead(ME)
    (abandoned / target.name).write_text("half")
    assert removal.sweep(target.parent) == [abandoned]
    assert os.listdir(target.parent) == [target.name] and target.read_text() == "old"


def test_a_newer_file_with_the_inode_number_of_the_staged_one_is_not_taken_for_it(target: Path) -> None:
    """ext4 gives a file the number of the one that was removed last."""
    staging, file = staged_file(target)
    staging._unlock()  # rank 0 has died
    newer = FolderClaim.here(ME.run, ME.generation + 1)
    assert removal.sweep(target.parent, newer) == [staging.path] or not staging.path.exists()
    again, other = staged_file(target, "newer")
    assert other.to_final() == "done"
    again.publish()
    assert not file.to_trash() and not file.is_published()


def test_a_replaced_checkpoint_is_moved_aside_and_handed_over(target: Path) -> None:
    checkpoint(target)
    staging = SharedStaging(target, ME)
    folder = seen(staging)
    assert folder.to_final() == "occupied"
    folder.set_aside()
    assert not target.exists()
    assert folder.to_final() == "done"
    replaced = staging.publish()
    assert replaced is not None and replaced.name.startswith(folders.REPLACED)
    assert (replaced / "file").read_text() == "old"


def test_files_of_others_are_in_the_new_folder_before_it_replaces_the_old_one(target: Path) -> None:
    """Or a crash right after the decision would lose them."""
    checkpoint(target)
    staging = SharedStaging(target, ME, keep_others=True)
    staging.describe(None, [])
    assert (staging.path / "file").read_text() == "old"
    (target / "late").write_text("came in between")
    folder = seen(staging)
    folder.set_aside()
    assert folder.to_final() == "done"
    staging.publish()
    assert (target / "late").exists() and (target / "file").exists()


def test_a_folder_staged_elsewhere_is_aborted_and_published_as_one_beside_the_target(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = target.parent / "inside"
    inside.mkdir()
    checkpoint(target)
    first = SharedStaging(target, ME, inside)
    assert first.path.parent == inside
    folder = seen(first)
    folder.set_aside()
    assert sorted(os.listdir(inside)) == [first.path.name]  # the replaced folder stays beside its name
    assert folder.to_trash()
    folder.put_back()
    folder.remove_trash()
    first.discard()
    assert (target / "file").exists() and os.listdir(inside) == []
    second = SharedStaging(target.with_name("step-00000008"), ME, inside)
    synced: list[Path] = []
    monkeypatch.setattr(folders, "sync_path", lambda path: synced.append(Path(path)))
    assert seen(second).to_final() == "done"
    seen(second).sync()
    assert synced == [target.parent, inside]
    second.publish()


def test_an_abort_gives_a_replaced_checkpoint_its_name_back(target: Path) -> None:
    checkpoint(target)
    staging = SharedStaging(target, ME)
    folder = seen(staging)
    folder.set_aside()
    assert folder.to_trash()
    folder.put_back()
    folder.put_back()
    folder.remove_trash()
    staging.discard()
    assert (target / "file").read_text() == "old" and os.listdir(target.parent) == [target.name]


def test_a_crash_while_a_step_is_replaced_loses_neither_checkpoint(target: Path) -> None:
    """The next process that opens the folder, also one without ranks, puts the old one back or removes it."""
    checkpoint(target)
    aside = target.with_name(f"{folders.REPLACED}{target.name}-{HEX}")
    os.rename(target, aside)
    removal.sweep(target.parent)
    assert os.listdir(target.parent) == [target.name] and (target / "file").read_text() == "old"
    checkpoint(aside, "older")
    removal.sweep(target.parent)
    assert os.listdir(target.parent) == [target.name] and (target / "file").read_text() == "old"


def test_nothing_else_that_looks_moved_aside_is_touched(tmp_path: Path) -> None:
    cut = f".replaced-{'x' * 100}-{HEX}"  # whatever the rest of its name was
    for name in (".replaced-theirs", cut, ".replaced-step-00000001"):
        (tmp_path / name).mkdir()
    removal.sweep(tmp_path)
    assert len(os.listdir(tmp_path)) == 3
    assert [(found.name, found.state) for found in leftovers(tmp_path)] == [(cut, "unknown")]


def test_the_name_is_synced_before_a_commit_is_told(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(folders, "sync_path", lambda path: synced.append(Path(path)))
    seen(SharedStaging(target, ME)).sync()
    assert synced == [target.parent]


def test_another_rank_syncs_the_names_of_its_files_and_removes_nothing(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = SharedStaging(target, ME)
    attached = AttachedStaging(target, staging.path)
    synced: list[Path] = []
    monkeypatch.setattr(folders, "sync_path", lambda path: synced.append(Path(path)))
    attached.sync(["__1_0.distcp", "sub/file"])
    assert set(synced) == {staging.path, staging.path / "sub"}
    attached.discard()
    assert attached.publish() is None
    assert staging.path.exists()


def test_a_rank_waits_for_the_decision_no_longer_than_it_must(target: Path) -> None:
    staging = SharedStaging(target, ME)
    threading.Timer(0.1, seen(staging).to_final).start()
    seen(staging, timeout_s=60).await_decision()
    assert target.exists()
    late = SharedStaging(target.with_name("step-00000008"), ME)
    seen(late, timeout_s=0.1).await_decision()
    assert late.path.exists()


# Two nodes, which remember what they saw


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """One folder as two nodes have it mounted, each of which remembers for a second which names were missing."""
    (tmp_path / "served").mkdir()
    mounts = tmp_path / "here", tmp_path / "there"
    stops = [fuse_server.serve(mount, tmp_path / "served", "remembers") for mount in mounts]
    yield mounts
    for stop in stops:
        stop()


def test_a_node_that_remembers_that_the_name_was_missing_finds_the_checkpoint(nodes: tuple[Path, Path]) -> None:
    """Regression: its rank took the checkpoint of the others for aborted."""
    here, there = nodes
    staging = SharedStaging(here / "step-00000007", ME)
    other = SharedFolder(there / "step-00000007", there / staging.path.name, ME, 5)
    assert not (there / "step-00000007").exists()
    assert seen(staging).to_final() == "done"
    assert not (there / "step-00000007").exists(), "this kernel remembers nothing, so the test shows nothing"
    assert not other.to_trash()
    assert other.is_published()
    staging.publish()


def test_a_node_waits_for_a_checkpoint_that_nothing_shows(
    nodes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not once it sees the trash of the rank that aborted."""
    here, there = nodes
    staging = SharedStaging(here / "step-00000007", ME)
    other = SharedFolder(there / "step-00000007", there / staging.path.name, ME, 5)
    assert seen(staging).to_trash()
    begin = time.monotonic()
    assert not other.to_trash() and not other.is_published()
    assert time.monotonic() - begin < waits.STALE_NAME_S / 2
    seen(staging).remove_trash()
    monkeypatch.setattr(waits, "STALE_NAME_S", 1.5)
    begin = time.monotonic()
    assert not other.is_published()
    assert time.monotonic() - begin >= 1.5
    staging.discard()


# Who may remove it


def test_a_sweep_spares_the_folder_of_a_live_job(target: Path) -> None:
    staging = SharedStaging(target, ME)
    locks.drop(staging._lock)  # the lock of the folder itself, which holds on one node only
    assert removal.sweep(target.parent) == []
    assert removal.sweep(target.parent, FolderClaim.here("b" * 32, 9)) == []
    assert removal.sweep(target.parent, ME) == []
    assert [found.state for found in leftovers(target.parent)] == ["in use"]
    staging.discard()
    assert os.listdir(target.parent) == []


def test_a_sweep_removes_the_folder_of_a_dead_job(target: Path, dead: Callable[[FolderClaim], Path]) -> None:
    path = dead(ME)
    assert [found.state for found in leftovers(target.parent)] == ["abandoned"]
    assert len(removal.sweep(target.parent)) == 1
    assert not path.exists() and os.listdir(target.parent) == []


def test_a_start_of_the_job_removes_what_the_one_before_stages_even_if_that_lives(target: Path) -> None:
    staging = SharedStaging(target, ME)
    assert removal.sweep(target.parent, FolderClaim.here(ME.run, ME.generation)) == []
    assert len(removal.sweep(target.parent, FolderClaim.here(ME.run, ME.generation + 1))) == 1
    assert not staging.path.exists()
    folder = seen(staging)
    assert (folder.to_final(), folder.is_published(), folder.to_trash()) == ("gone", False, False)


def test_on_a_shared_file_system_a_free_lock_proves_death_only_on_the_same_host(
    target: Path, dead: Callable[[FolderClaim], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock of another node may be invisible here (``nolock``, ``localflock``)."""
    monkeypatch.setattr(claim, "is_local", lambda _: False)
    elsewhere = dead(FolderClaim("b" * 32, 1, "another host"))
    here = dead(ME)
    removal.sweep(target.parent)
    assert elsewhere.exists() and not here.exists()
    monkeypatch.setattr(claim, "is_local", lambda _: True)
    removal.sweep(target.parent)
    assert not elsewhere.exists()


def test_a_lock_file_that_a_power_cut_has_emptied_proves_nothing_on_a_shared_file_system(
    target: Path, dead: Callable[[FolderClaim], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dead(ME)
    (path / LOCK).write_text("")
    monkeypatch.setattr(claim, "is_local", lambda _: False)
    assert removal.sweep(target.parent) == [] and path.exists()


def test_a_folder_that_is_swept_before_it_has_its_lock_is_made_again(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process on another node, which does not see the lock of the folder itself."""
    swept: list[Path] = []
    lock = SharedStaging._lock_it

    def lock_it(self: SharedStaging) -> None:
        if not swept:
            swept.append(self.path)
            self.path.rmdir()
        lock(self)

    monkeypatch.setattr(SharedStaging, "_lock_it", lock_it)
    staging = SharedStaging(target, ME)
    assert staging.path != swept[0] and os.listdir(target.parent) == [staging.path.name]
    staging.discard()


def test_a_forked_child_does_not_keep_the_lock(target: Path) -> None:
    staging = SharedStaging(target, ME)
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writes, b"forked")
        signal.pause()
    os.read(reads, 10)
    staging._unlock()  # as the end of this process does
    assert len(removal.sweep(target.parent)) == 1
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reads)
    os.close(writes)


def test_what_one_process_stages_has_no_lock_file(target: Path) -> None:
    staging = commit.Staging(target)
    assert os.listdir(staging.path) == []
    staging.discard()
