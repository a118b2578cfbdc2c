"""Paths that are refused before anything is touched, because they name no file or folder."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from commands import fails
from endings import in_a_child
from lazyckpt.pipeline.budget import available_memory_bytes

STATE = {"x": torch.arange(10.0)}
URLS = ["s3://bucket/run", "gs://bucket/run", "hdfs://host:9000/run", "file:///tmp/run", Path("s3://bucket/run")]


@pytest.mark.parametrize("url", URLS, ids=str)
def test_urls_are_refused(url: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a Checkpointer made a local folder named s3:."""
    monkeypatch.chdir(tmp_path)
    refused = pytest.raises(lazyckpt.ConfigError, match=r"://?.*URLs are not supported; save to a local or mounted")
    with refused:
        lazyckpt.Checkpointer(url)
    with refused:
        lazyckpt.save(STATE, url)
    with lazyckpt.Saver() as saver:
        for of_saver in (lambda: saver.save(STATE, url), lambda: saver.stage(url), lambda: saver.remove(url)):
            with refused:
                of_saver()
    assert os.listdir() == []


@pytest.mark.parametrize("arguments", [("convert", "here.pt"), ("trace",), ("bench",)], ids=" ".join)
def test_commands_refuse_them(arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lazyckpt.save(STATE, "here.pt")
    assert "s3://bucket/run: URLs are not supported" in fails(2, *arguments, "s3://bucket/run")
    assert os.listdir() == ["here.pt"]


def test_a_folder_that_looks_like_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.makedirs("s3:/bucket")
    lazyckpt.save(STATE, "./s3:/bucket/a.pt")
    assert torch.equal(lazyckpt.load("./s3:/bucket/a.pt")["x"], STATE["x"])


def test_nothing_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a Checkpointer took the working folder for its own."""
    monkeypatch.chdir(tmp_path)
    for nothing in ("", None, 3, b"run"):
        for call in (lazyckpt.Checkpointer, lazyckpt.load):
            with pytest.raises(lazyckpt.ConfigError, match="no path"):
                call(nothing)  # type: ignore[operator]
    lazyckpt.Checkpointer(".").close()
    assert os.listdir() == []


@pytest.mark.parametrize("kind", ["device", "pipe", "socket"])
def test_special_files_are_not_replaced(kind: str, tmp_path: Path) -> None:
    """Regression: a device node was replaced by a file."""
    target = tmp_path / "there"
    if kind == "pipe":
        os.mkfifo(target)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(target))
    else:
        try:
            os.mknod(target, 0o600 | 0o020000, os.makedev(1, 3))  # /dev/null's
        except PermissionError:
            pytest.skip("making a device takes root")
    before = os.lstat(target)
    with pytest.raises(lazyckpt.SaveError, match="a pipe or a socket"):
        lazyckpt.save(STATE, target)
    with lazyckpt.Saver() as saver, pytest.raises(lazyckpt.SaveError, match="a pipe or a socket"):
        saver.save(STATE, target)
    assert os.lstat(target) == before


def test_a_limited_address_space_is_heeded(tmp_path: Path) -> None:
    """Regression: "auto" mapped a quarter of the machine's memory, and a state of 1 MB failed."""

    def body() -> None:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (taken + (2 << 30),) * 2)
        assert available_memory_bytes() <= 2 << 30
        with lazyckpt.Checkpointer(tmp_path) as ckpt:
            ckpt.track(x=torch.ones(250_000))
            ckpt.save(1).result()

    in_a_child(body)
