"""File systems in user space. A server may write only a part; a durable file must be right all the same."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import commands
import fuse_server
import lazyckpt
from lazyckpt import _engine
from lazyckpt.formats.program import LITERAL

NOTHING = array("Q")
STATE = {"t": torch.arange(1_000_000.0)}  # 4 MB: many requests of FUSE in one of ours


@pytest.fixture(params=["full answers", "short answers"])
def fuse(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Shows ``shown`` beside it."""
    (tmp_path / "shown").mkdir()
    stop = fuse_server.serve(tmp_path / "fuse", tmp_path / "shown", *["short"] * request.param.startswith("short"))
    yield tmp_path / "fuse"
    stop()


def check(fuse: Path, name: str) -> None:
    """The bytes arrived: as the server's own file system has them, and as a reader finds them."""
    for folder in (fuse.parent / "shown", fuse):
        assert torch.equal(lazyckpt.load(folder / name)["t"], STATE["t"])


@pytest.mark.parametrize("knobs", [{}, {"io_backend": "posix"}, {"direct_io": False}], ids=str)
def test_what_is_saved_arrives(fuse: Path, knobs: dict[str, Any]) -> None:
    with lazyckpt.Saver(**knobs) as saver:
        for number in range(3):
            saver.save(STATE, fuse / f"{number}.pt")
    lazyckpt.save(STATE, fuse / "3.pt")
    for number in range(4):
        check(fuse, f"{number}.pt")


def test_a_checkpointer_works_there(fuse: Path) -> None:
    with lazyckpt.Checkpointer(fuse / "run", keep_last=2) as checkpointer:
        checkpointer.track(x=dict(STATE))
        for step in (1, 2, 3, 3):
            checkpointer.save(step).result(30)
        assert checkpointer.restore() == 3
    assert sorted(path.name for path in (fuse / "run").iterdir()) == ["step-00000002", "step-00000003"]


def test_one_saver_writes_to_fuse_and_to_a_disk(fuse: Path, tmp_path: Path) -> None:
    """At the same time: requests of both wait in one engine."""
    with lazyckpt.Saver(chunk_bytes=64 << 10, host_buffer_bytes=1 << 20, max_in_flight=4) as saver:
        for number in range(8):
            saver.save(STATE, (fuse if number % 2 else tmp_path) / f"{number}.pt")
    for number in range(8):
        loaded = lazyckpt.load((fuse if number % 2 else tmp_path) / f"{number}.pt")
        assert torch.equal(loaded["t"], STATE["t"])


def pool_threads() -> int:
    names = [Path("/proc/self/task", task, "comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    return names.count("lazyckpt-io")


@pytest.mark.skipif(not _engine.FAULTS, reason="the engine was built without fault injection")
@pytest.mark.parametrize("backend", ["auto", "io_uring"])
@pytest.mark.parametrize("direct", [None, True])
def test_what_the_user_sets_is_what_is_done(fuse: Path, tmp_path: Path, backend: str, direct: bool | None) -> None:
    """By default: O_DIRECT and io_uring on a disk, neither on FUSE."""
    probe = _engine.probe(str(tmp_path))
    if probe["o_direct"] != "yes" or probe["io_uring"] != "yes":
        pytest.skip("no O_DIRECT or no io_uring here")
    for folder in (tmp_path, fuse):
        log = tmp_path / f"log-{folder.name}"
        before = pool_threads()
        engine = _engine.Engine(
            ring_bytes=8192,
            chunk_bytes=4096,
            io_depth=3,
            copy_threads=1,
            backend=backend,
            direct=direct,
            fault=f"trace:{log}",
        )
        job = engine.begin(NOTHING, NOTHING, NOTHING, 1)
        job.append(0, 0, array("q", [LITERAL, 3, 0]), b"abc")
        job.seal()
        job.open(0, folder / "three", 3)
        job.wait_settled()
        job.raise_error()
        (write,) = (line.split() for line in log.read_text().splitlines() if " write " in line and "begin" in line)
        is_direct = write[-1] == "4096"  # a whole block
        assert is_direct == (folder == tmp_path or direct is True)
        assert pool_threads() - before == (3 if folder == fuse and backend == "auto" else 0)
        assert (folder / "three").read_bytes() == b"abc"
        del job, engine


def test_doctor_tells_it(fuse: Path, tmp_path: Path) -> None:
    def conclusions(folder: Path) -> str:
        return " ".join(found["text"] for found in commands.run_json("doctor", folder)["conclusions"])

    assert "on FUSE" in conclusions(fuse) and "O_DIRECT" not in conclusions(fuse)
    assert "FUSE" not in conclusions(tmp_path)
    assert commands.run_json("doctor", fuse)["facts"]["file system"] == f"fuse.lazyckpt-test on {fuse}"
