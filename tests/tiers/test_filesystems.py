"""Places that fsspec opens, and how an FTP server can fail."""

from __future__ import annotations

import errno
import ftplib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from file_server import PASSWORD, Files, FTPServer
from fsspec.implementations.ftp import FTPFile, FTPFileSystem
from fsspec.registry import known_implementations

import lazyckpt
from endings import in_a_child
from lazyckpt import Checkpointer, ConfigError, Mirror, ReadError
from lazyckpt.stores.filesystems import FileSystemStore
from lazyckpt.stores.store import Store
from lazyckpt.stores.urls import opened


@pytest.fixture
def store(ftp_place: Files) -> Store:
    return opened(ftp_place.url())


def test_a_connection_that_the_server_has_closed_is_opened_again(store: Store, ftp: FTPServer) -> None:
    store.write("state.pt", [b"abc"], 3)
    ftp.hang_up()
    assert bytes(store.read("state.pt", 0, 3)) == b"abc"
    ftp.hang_up()
    assert [entry.name for entry in store.entries()] == ["state.pt"]


def test_rights_that_are_missing_are_told(store: Store, ftp: FTPServer) -> None:
    store.write("state.pt", [b"abc"], 3)
    ftp.allow("elr")
    for act in (lambda: store.write("state.pt", [b"x"], 1), lambda: store.remove(["state.pt"])):
        with pytest.raises(PermissionError, match=r"do not allow it \(550\)"):
            act()
    ftp.allow("er")  # not to list
    with pytest.raises(PermissionError):
        store.entries()


def test_a_folder_that_another_process_makes_meanwhile_is_no_fault(
    store: Store, ftp_place: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("run.json", [b"abc"], 3)
    folder = ftp_place.root / "run" / "step-1"
    real = ftplib.FTP.nlst

    def nlst(self: ftplib.FTP, path: str) -> list[str]:
        try:
            return real(self, path)
        finally:
            folder.mkdir(exist_ok=True)

    monkeypatch.setattr(ftplib.FTP, "nlst", nlst)
    assert store.entries("step-1") == [] and folder.exists()

    def mkdir(self: FTPFileSystem, path: str, create_parents: bool = True) -> None:
        self.ftp.mkd(path)
        self.ftp.mkd(path)  # the answer is that it exists

    monkeypatch.setattr(FTPFileSystem, "mkdir", mkdir)
    store.write("step-2/state.pt", [b"abc"], 3)
    assert (ftp_place.root / "run" / "step-2" / "state.pt").read_bytes() == b"abc"


def test_a_refusal_to_list_is_believed_only_after_several(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write("step-1/state.pt", [b"abc"], 3)
    real, refused = FTPFileSystem.ls, []

    def ls(self: FTPFileSystem, path: str, detail: bool = True) -> list[Any]:
        if path.endswith("step-1") and len(refused) < times:
            refused.append(path)
            raise ftplib.error_perm("550 No such file or directory.")
        return list(real(self, path, detail))

    monkeypatch.setattr(FTPFileSystem, "ls", ls)
    times = 2  # as while the folder is renamed
    assert [entry.name for entry in store.entries()] == ["step-1/state.pt"] and len(refused) == 2
    refused, times = [], 3
    with pytest.raises(PermissionError, match="550"):
        store.entries()


def test_a_folder_that_is_removed_while_it_is_listed_is_gone(
    store: Store, ftp_place: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("run.json", [b"abc"], 3)
    store.write("step-1/state.pt", [b"abc"], 3)
    real = FTPFileSystem.ls

    def ls(self: FTPFileSystem, path: str, detail: bool = True) -> list[Any]:
        if path.endswith("step-1"):
            shutil.rmtree(ftp_place.root / "run" / "step-1", ignore_errors=True)
        return list(real(self, path, detail))

    monkeypatch.setattr(FTPFileSystem, "ls", ls)
    assert [entry.name for entry in store.entries()] == ["run.json"]


def test_a_file_that_was_removed_meanwhile_is_missing(
    store: Store, ftp_place: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("writer.json", [b"abc"], 3)
    store.write("other.json", [b"abc"], 3)
    real = FTPFile._fetch_range

    def fetch(self: FTPFile, start: int, end: int) -> bytes:
        ftp_place.delete("run/other.json")
        return bytes(real(self, start, end))

    monkeypatch.setattr(FTPFile, "_fetch_range", fetch)
    with pytest.raises(FileNotFoundError):
        store.read("other.json", 0, 3)
    monkeypatch.setattr(FTPFile, "_fetch_range", real)
    found = store.entry("writer.json")
    store.write("writer.json", [b"longer"], 6)
    monkeypatch.setattr(FileSystemStore, "entry", lambda self, name: found)
    assert store.whole("writer.json", 6) == b"longer"


def test_a_wrong_password_is_told_without_it(ftp_place: Files) -> None:
    store = opened(ftp_place.url(), {"username": "tests", "password": "hunter2"})
    with pytest.raises(PermissionError, match=r"credentials are missing, wrong.*\(530\)") as caught:
        store.entries()
    assert "hunter2" not in f"{caught.value} {caught.value.__context__}" and PASSWORD not in str(caught.value)
    with pytest.raises(ConfigError, match=r"does not take these options \(ValueError\): tls") as refused:
        opened(ftp_place.url(), {"tls": "hunter2"}).entries()
    assert "hunter2" not in str(refused.value)


def test_a_server_that_is_gone_is_no_empty_place(ftp_place: Files, ftp: FTPServer, tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "a", mirrors=[ftp_place.url()]) as ckpt:
        ckpt.track(weights=torch.ones(10))
        ckpt.save(1).mirrored().result(60)
    ftp.close()
    with (
        Checkpointer(tmp_path / "b", mirrors=[ftp_place.url()]) as ckpt,
        pytest.warns(UserWarning, match="passed over"),
        pytest.raises(ReadError, match="it may hold the newest checkpoint"),
    ):
        ckpt.restore()


def test_a_name_that_is_taken_is_replaced_where_servers_do_not_rename_to_it(
    store: Store, ftp_place: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FTPFileSystem.mv

    def mv(self: FTPFileSystem, path1: str, path2: str) -> None:
        if self.exists(path2):
            raise OSError(errno.EEXIST, "exists")
        real(self, path1, path2)

    store.write("writer.json", [b"1"], 1)
    monkeypatch.setattr(FTPFileSystem, "mv", mv)
    store.write("writer.json", [b"2"], 1)
    assert store.whole("writer.json", 1) == b"2" and ftp_place.names() == ["run/writer.json"]


def test_paramiko_does_not_wait_for_each_answer(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(FTPFile, "set_pipelined", lambda self, on: told.append(on), raising=False)
    store.write("state.pt", [b"abc"], 3)
    assert told == [True]


class AuthenticationException(Exception):
    """As paramiko raises it."""


def test_a_login_that_fails_is_told_as_such(ftp_place: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: FTPFileSystem) -> None:
        raise AuthenticationException("hunter2")

    monkeypatch.setattr(FTPFileSystem, "_connect", refuse)
    monkeypatch.setattr(FTPFileSystem, "__del__", lambda self: None)
    with pytest.raises(PermissionError, match=r"credentials are missing.*\(AuthenticationException\)") as caught:
        opened(ftp_place.url()).entries()
    assert "hunter2" not in str(caught.value)


def test_folders_that_are_empty_go(store: Store, ftp_place: Files) -> None:
    store.write("step-1/state.pt", [b"abc"], 3)
    store.write("step-1/manifest.json", [b"{}"], 2)
    store.remove(["step-1/manifest.json"])
    assert (ftp_place.root / "run/step-1/state.pt").exists()
    store.remove(["step-1/state.pt"])
    assert not (ftp_place.root / "run/step-1").exists()


@pytest.mark.parametrize("url", ["ftp://tests:hunter2@host/a", "sftp://tests@host/a", "ftp://host:hunter2/a"])
def test_a_url_with_credentials_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="the URL holds credentials") as caught:
        Mirror(url)
    assert "hunter2" not in str(caught.value)


def test_a_protocol_that_lacks_its_package_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"class": "of_no_package.FileSystem", "err": "pip install of-no-package"}
    monkeypatch.setitem(known_implementations, "absent", known)
    with pytest.raises(ConfigError, match="fsspec needs a package for this protocol: pip install of-no-package"):
        Checkpointer(tmp_path, mirrors=["absent://host/a"])


def test_a_forked_child_is_told_that_they_do_not_work_there(ftp_place: Files, store: Store) -> None:
    store.write("state.pt", [b"abc"], 3)

    def child() -> None:
        with pytest.raises(ConfigError, match="forked child"):
            store.read("state.pt", 0, 3)

    in_a_child(child)


def test_nothing_of_fsspec_is_asked_for_other_urls(tmp_path: Path) -> None:
    code = (
        "import json, sys, torch, lazyckpt\n"
        "with lazyckpt.Checkpointer(sys.argv[1], mirrors=[sys.argv[2]]) as ckpt:\n"
        "    ckpt.track(weights=torch.zeros(10)); ckpt.save(1).mirrored().result(); ckpt.restore()\n"
        "print(json.dumps([name for name in sys.modules if name.endswith('stores.filesystems') or name == 'fsspec']))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a"), str(tmp_path / "b")]
    assert json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout) == []


def test_it_is_loaded_by_url(ftp_place: Files, tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "a", mirrors=[ftp_place.url()]) as ckpt:
        ckpt.track(weights=torch.arange(100.0))
        ckpt.save(3).mirrored().result(60)
    loaded = lazyckpt.load(f"{ftp_place.url()}/step-00000003", key="weights")
    assert torch.equal(loaded, torch.arange(100.0)) and lazyckpt.verify(ftp_place.url()).ok
