"""Who may read files while they are written, links that lead elsewhere, and errors without permission."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from commands import run
from lazyckpt import waits
from lazyckpt.storage import commit, folders, manifest, mounts

TINY_RING = {"chunk_bytes": 64 << 10, "host_buffer_bytes": 128 << 10}
STATE = {"x": torch.arange(1000.0)}


@pytest.fixture(params=[0o000, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def save_file(folder: Path) -> None:
    lazyckpt.save(STATE, folder / "a.pt")


def save_safetensors(folder: Path) -> None:
    lazyckpt.save(STATE, folder / "a.safetensors")


def save_checkpoint(folder: Path) -> None:
    with lazyckpt.Checkpointer(folder / "run", **TINY_RING) as ckpt:
        ckpt.track(x=STATE)
        ckpt.save(1)
        ckpt.save(2).result()
        ckpt.save(1)  # replaces one


def save_staged(folder: Path) -> None:
    saver = lazyckpt.Saver(**TINY_RING)
    staged = saver.stage(folder / "checkpoint-1")
    staged.add("deep/model.safetensors", dict(STATE), {"format": "pt"})
    (staged.path / "trainer_state.json").write_text("{}")
    staged.save().result()
    saver.close()


def save_by_accelerate(folder: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from lazyckpt.integrations.accelerate import enable

    accelerator = accelerate.Accelerator(cpu=True)
    enable(accelerator, **TINY_RING)
    accelerator.prepare(torch.nn.Linear(3, 3))
    accelerator.save_state(str(folder / "state"))
    accelerator.end_training()


def save_by_lightning(folder: Path) -> None:
    pytest.importorskip("lightning")
    from lazyckpt.integrations.lightning import LazyCheckpointIO

    io = LazyCheckpointIO()
    io.save_checkpoint({"state_dict": dict(STATE)}, folder / "a.ckpt")
    io.teardown()


WRITERS = [save_file, save_safetensors, save_checkpoint, save_staged, save_by_accelerate, save_by_lightning]


def modes(folder: Path) -> dict[str, int]:
    """Skips what another background thread renames or removes meanwhile."""
    found = {}
    for parent, folders_in, files in os.walk(folder):
        for path in (os.path.join(parent, name) for name in folders_in + files):
            with contextlib.suppress(FileNotFoundError):
                mode = os.lstat(path).st_mode
                if not stat.S_ISLNK(mode):
                    found[path] = stat.S_IMODE(mode)
    return found


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_nothing_is_more_readable_while_it_is_written_than_afterwards(
    write: Callable[[Path], None], umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at when each file has its bytes and none its name."""
    seen: list[dict[str, int]] = []

    def looking(function: Callable[..., Any]) -> Callable[..., Any]:
        def look(*arguments: Any) -> Any:
            seen.append(modes(tmp_path))
            return function(*arguments)

        return look

    monkeypatch.setattr(commit.Staging, "publish", looking(commit.Staging.publish))
    monkeypatch.setattr(commit, "publish_file", looking(commit.publish_file))
    write(tmp_path)
    seen.append(modes(tmp_path))
    assert len(seen) > 1 and any(folders.TEMPORARY in name for found in seen for name in found)
    for found in seen:
        for name, mode in found.items():
            allowed = (0o777 if os.path.isdir(name) else 0o666) & ~umask
            if os.path.lexists(name):  # published: exactly what the umask says
                assert mode == allowed, name
            else:
                assert mode & ~(0o777 & ~umask) == 0, name


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_what_is_replaced_keeps_its_mode_and_is_never_more_readable(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a checkpoint of mode 0600 was readable for everybody from its second save on."""
    write(tmp_path)
    for path in [p for p in tmp_path.rglob("*") if not p.is_symlink()]:
        path.chmod(0o750 if path.is_dir() else 0o600 if path.suffix != ".json" else 0o640)
    before = {name: mode for name, mode in modes(tmp_path).items() if not os.path.basename(name).startswith(".")}
    entered: list[int] = []

    def looking(*arguments: Any) -> Any:
        entered.extend(mode for name, mode in modes(tmp_path).items() if folders.is_unfinished(os.path.basename(name)))
        return describe(*arguments)

    describe = commit.Staging.describe
    monkeypatch.setattr(commit.Staging, "describe", looking)
    write(tmp_path)
    after = modes(tmp_path)
    assert before and {name: after[name] for name in before if name in after} == before
    assert all(mode & 0o007 == 0 for mode in entered)


def test_a_folder_that_is_filled_keeps_the_modes_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "is_fixed", lambda folder: True)
    save_staged(tmp_path)
    file = tmp_path / "checkpoint-1" / "trainer_state.json"
    file.chmod(0o600)
    save_staged(tmp_path)
    assert modes(tmp_path)[str(file)] == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_what_root_replaces_keeps_its_owner(tmp_path: Path) -> None:
    """Otherwise the owner of a private file could not read it any more."""
    for _ in range(2):
        save_file(tmp_path)
        save_staged(tmp_path)
        for name in ("a.pt", "checkpoint-1", "checkpoint-1/deep/model.safetensors"):
            if os.stat(tmp_path / name).st_uid == 0:
                os.chown(tmp_path / name, 12345, 23456)
                os.chmod(tmp_path / name, 0o750)
                continue
            there = os.stat(tmp_path / name)
            assert (there.st_uid, there.st_gid, stat.S_IMODE(there.st_mode)) == (12345, 23456, 0o750), name


def test_a_file_system_without_modes_or_owners_takes_the_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "refused")

    save_file(tmp_path)
    (tmp_path / "a.pt").chmod(0o640)
    monkeypatch.setattr(os, "fchmod", refuse)
    monkeypatch.setattr(os, "fchown", refuse)
    save_file(tmp_path)
    assert torch.equal(lazyckpt.load(tmp_path / "a.pt")["x"], STATE["x"])


def test_what_nobody_may_read_is_replaced(tmp_path: Path) -> None:
    """The owner can read the new one: it is verified, loaded and removed."""
    save_file(tmp_path)
    save_staged(tmp_path)
    (tmp_path / "a.pt").chmod(0)
    (tmp_path / "checkpoint-1").chmod(0o500)
    save_file(tmp_path)
    save_staged(tmp_path)
    assert modes(tmp_path)[str(tmp_path / "a.pt")] == 0o400
    assert modes(tmp_path)[str(tmp_path / "checkpoint-1")] == 0o700


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "state.pt").write_text("theirs")
    return folder


def untouched(outside: Path) -> bool:
    return [p.name for p in outside.iterdir()] == ["state.pt"] and (outside / "state.pt").read_text() == "theirs"


def test_a_file_that_is_a_link_is_replaced_not_followed(tmp_path: Path, outside: Path) -> None:
    target = tmp_path / "a.pt"
    target.symlink_to(outside / "state.pt")
    lazyckpt.save(STATE, target)
    assert not target.is_symlink() and untouched(outside)


@pytest.mark.parametrize("inside", ["state.pt", ""])
def test_a_guessed_temporary_name_is_not_followed(
    inside: str, tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 random bits, all guessed: then the file is not made, and what the link leads to is not touched."""
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=0))
    (tmp_path / f".tmp-a.pt-{0:032x}").symlink_to(outside / inside)
    with pytest.raises(lazyckpt.SaveError, match="File exists"):
        lazyckpt.save(STATE, tmp_path / "a.pt")
    assert untouched(outside) and not (tmp_path / "a.pt").exists()


@pytest.mark.parametrize("planted", ["link", "folder"])
def test_a_guessed_temporary_folder_is_not_used(
    planted: str, tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lazyckpt.Checkpointer(tmp_path / "run", **TINY_RING) as ckpt:
        ckpt.track(x=STATE)
        monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=0))
        guessed = tmp_path / "run" / f".tmp-step-00000001-{0:032x}"
        guessed.symlink_to(outside) if planted == "link" else guessed.mkdir()
        with pytest.raises(lazyckpt.SaveError, match="File exists"):
            ckpt.save(1).result()
    assert untouched(outside)


@pytest.mark.parametrize("name", ["state.pt", manifest.MANIFEST])
def test_a_file_planted_in_the_temporary_folder_is_not_followed(
    name: str, tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one who sees the folder appear, and is faster than the engine."""
    make = commit.Staging.__init__

    def planted(self: commit.Staging, *arguments: Any) -> None:
        make(self, *arguments)
        (self.path / name).symlink_to(outside / "state.pt")

    with lazyckpt.Checkpointer(tmp_path / "run", **TINY_RING) as ckpt:
        ckpt.track(x=STATE)
        monkeypatch.setattr(commit.Staging, "__init__", planted)
        with pytest.raises(lazyckpt.SaveError, match="File exists"):
            ckpt.save(1).result()
    assert untouched(outside)


def test_a_run_behind_a_link_is_a_run(tmp_path: Path) -> None:
    """Only names in the folder are not followed; the way to it may lead over links."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with lazyckpt.Checkpointer(tmp_path / "run", **TINY_RING) as ckpt:
        ckpt.track(x={"x": torch.zeros(3)})
        ckpt.save(1)
        assert ckpt.restore() == 1
    lazyckpt.save(STATE, tmp_path / "run" / "a.pt")
    assert sorted(p.name for p in (tmp_path / "disk").iterdir()) == ["a.pt", "step-00000001"]


# a process without permission

NOBODY = 65534
NEWEST = "run/step-00000002"


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run, a file, and a folder of accelerate's. A root process becomes another user, to whom closed folders are
    closed; so this is not in tmp_path, which only root may enter."""
    monkeypatch.setattr(waits, "READ_RETRIES_S", (0.001,))
    if importlib.util.find_spec("accelerate") is not None:
        from accelerate.commands.config import config_args

        monkeypatch.setattr(config_args, "cache_dir", "/")  # settings at home are root's
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    users = os.getresuid()
    try:
        with lazyckpt.Checkpointer(folder / "run", **TINY_RING) as ckpt:
            ckpt.track(x=STATE)
            ckpt.save(1)
            ckpt.save(2)
        (folder / "files").mkdir()
        lazyckpt.save(STATE, folder / "files" / "a.pt")
        save_by_accelerate(folder)
        for read in READERS:  # imports what another user may not
            read(folder)
        if users[1] == 0:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, 0)
        yield folder
    finally:
        os.setresuid(*users)
        shutil.rmtree(folder)


def restore(folder: Path, **which: Any) -> None:
    with lazyckpt.Checkpointer(folder / "run", **TINY_RING) as ckpt:
        ckpt.track(x={"x": torch.zeros(1000)})
        assert ckpt.restore(**which) == 2


def load_by_lightning(folder: Path) -> None:
    pytest.importorskip("lightning")
    from lazyckpt.integrations.lightning import LazyCheckpointIO

    LazyCheckpointIO().load_checkpoint(folder / "files/a.pt")


def load_by_accelerate(folder: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from lazyckpt.integrations.accelerate import enable

    accelerator = accelerate.Accelerator(cpu=True)
    enabled = enable(accelerator, **TINY_RING)
    accelerator.prepare(torch.nn.Linear(3, 3))
    try:
        accelerator.load_state(str(folder / "state"))
    finally:
        enabled.close()


def command(*words: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        result = run(words[0], folder / words[1], *words[2:])
        if result.exit_code == 2:
            raise lazyckpt.ReadError(result.stderr, path=folder, errno=errno.EACCES)
        assert result.exit_code in (0, 1), result.output

    return read


# What each reads of the folder.
READERS: dict[Callable[[Path], object], tuple[str, ...]] = {
    lambda folder: lazyckpt.load(folder / NEWEST): (f"{NEWEST}/manifest.json", f"{NEWEST}/state.pt"),
    lambda folder: lazyckpt.load(folder / NEWEST / "state.pt"): (f"{NEWEST}/state.pt",),
    lambda folder: lazyckpt.load(folder / "files/a.pt"): ("files/a.pt",),
    restore: (f"{NEWEST}/manifest.json", f"{NEWEST}/state.pt"),
    lambda folder: restore(folder, step=2): (f"{NEWEST}/manifest.json", f"{NEWEST}/state.pt"),
    lambda folder: restore(folder, path=folder / NEWEST): (f"{NEWEST}/manifest.json", f"{NEWEST}/state.pt"),
    load_by_lightning: ("files/a.pt",),
    load_by_accelerate: ("state/model.safetensors",),
    command("ls", "run"): ("run/",),
    command("inspect", "run"): (f"{NEWEST}/manifest.json",),
    command("inspect", "files"): ("files/a.pt",),
    command("verify", "run"): (f"{NEWEST}/manifest.json", f"{NEWEST}/state.pt"),
    command("verify", NEWEST): (f"{NEWEST}/manifest.json", f"{NEWEST}/state.pt"),
    command("verify", "files"): ("files/a.pt",),
    command("advise", "run", "--iteration", "1s", "--bandwidth", "1GB"): (f"{NEWEST}/manifest.json",),
    command("prune", "run"): ("run/",),
    command("pin", "run", "2"): (f"{NEWEST}/manifest.json",),
}


def test_a_wait_needs_no_permission(theirs: Path) -> None:
    """Regression: it looked whether the folders of earlier saves were still there."""
    with lazyckpt.Saver(**TINY_RING) as saver:
        saver.save(STATE, theirs / "files" / "b.pt").result()
        theirs.chmod(0)
        saver.wait()
        theirs.chmod(0o700)


@pytest.mark.parametrize("mode", [0o000, 0o444], ids=oct)
@pytest.mark.parametrize("closed", [".", "run", "files", "state", NEWEST, f"{NEWEST}/manifest.json", "files/a.pt"])
def test_a_reader_without_permission_is_told_so(closed: str, mode: int, theirs: Path) -> None:
    """Regression: it was a bare PermissionError, or "checkpoint not saved"; and of a run whose newest checkpoint could
    not be read, commands took the one before."""
    if mode == 0o444 and not (theirs / closed).is_dir():
        pytest.skip("such a file can be read")
    (theirs / closed).chmod(mode)
    for read, files in READERS.items():
        lists_only = mode == 0o444 and closed == "run" and files == ("run/",)
        if any(f"./{file}".startswith((closed, f"./{closed}")) for file in files) and not lists_only:
            with pytest.raises(lazyckpt.ReadError, match=r"Permission denied \(13\)") as caught:
                read(theirs)
            assert caught.value.errno == errno.EACCES
            for lie in ("not saved", "there is no", "cut off", "Usage"):
                assert lie not in str(caught.value)
        else:
            read(theirs)


def test_an_empty_folder_that_cannot_be_written_to_says_so(theirs: Path) -> None:
    """Regression: "checkpoint not saved", of one who had come to restore."""
    (theirs / "empty").mkdir()
    (theirs / "empty").chmod(0o555)
    with pytest.raises(lazyckpt.SaveError, match=r"^cannot open .*empty: Permission denied"):
        lazyckpt.Checkpointer(theirs / "empty", **TINY_RING)


def test_a_folder_that_cannot_be_listed_is_not_replaced(theirs: Path) -> None:
    """Regression: the files of others in it stay, except that these could not be seen, and were gone."""
    (theirs / "files").chmod(0o300)
    with lazyckpt.Saver(**TINY_RING) as saver, pytest.raises(lazyckpt.SaveError, match="Permission denied"):
        saver.stage(theirs / "files").save().result()
    (theirs / "files").chmod(0o700)
    assert (theirs / "files/a.pt").exists()


@pytest.mark.parametrize("save", [save_file, save_checkpoint, save_staged])
@pytest.mark.parametrize("there", ["link", "file"])
def test_what_is_there_in_place_of_the_folder_is_told(there: str, save: Callable[[Path], None], tmp_path: Path) -> None:
    """Regression: "File exists", of a link to nothing."""
    folder = tmp_path / "folder"
    if there == "link":
        folder.symlink_to("nowhere")
    else:
        folder.write_text("in the way")
    wanted = "a symbolic link to nowhere" if there == "link" else "not a folder: a file|Not a directory"
    if there == "link" and save is save_file:  # it makes no folder, as torch.save does not
        wanted = "No such file or directory"
    with pytest.raises(lazyckpt.SaveError, match=wanted):
        save(folder)


def test_an_unreadable_settings_file_is_not_a_missing_one(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a bare PermissionError."""
    from lazyckpt import settings

    (theirs / "files").chmod(0o000)
    with pytest.raises(lazyckpt.ConfigError, match=r"lazyckpt.yaml: cannot be read: Permission denied \(13\)"):
        settings.gather(theirs / "files/lazyckpt.yaml", {})
    monkeypatch.setenv("LAZYCKPT_CONFIG_FILE", str(theirs / "files/other.yaml"))
    with pytest.raises(lazyckpt.ConfigError, match=r"other.yaml: cannot be read: Permission denied \(13\)"):
        settings.gather(theirs / "none.yaml", {})
