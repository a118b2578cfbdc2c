"""``verify_after_write``: what the disk gives back is compared with what was copied, before anything is committed."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_engines import engines_fail

import fuse_server
import lazyckpt
from lazyckpt import _engine
from lazyckpt.errors import SaveError

pytestmark = pytest.mark.skipif(not _engine.FAULTS, reason="the engine was built without fault injection")

KIB = 1 << 10
TINY = {"chunk_bytes": 64 * KIB, "host_buffer_bytes": 256 * KIB}
NAMES = {"first": 16 * KIB, "second": 50 * KIB, "third": 16 * KIB}  # elements of 4 bytes
Make = Callable[..., Any]


@pytest.fixture(params=["io_uring", "posix", "buffered"])
def failing(request: pytest.FixtureRequest) -> Make:
    """Makes a Saver or a Checkpointer with faults."""

    def make(kind: Callable[..., Any], *arguments: Any, fault: str, **knobs: Any) -> Any:
        backend = {"direct_io": False} if request.param == "buffered" else {"io_backend": request.param}
        with engines_fail(fault):
            return kind(*arguments, **TINY, **backend, **knobs)

    return make


def state(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((size,), value) for name, size in NAMES.items()}


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_a_write_that_was_lost_fails_the_save(failing: Make, name: str, tmp_path: Path) -> None:
    """And is not noticed without: it was reported as done."""
    with failing(lazyckpt.Saver, fault="write:2:lost") as saver:
        saver.save(state(1.0), tmp_path / name).result(30)
    with pytest.raises(lazyckpt.CorruptFileError):
        lazyckpt.load(tmp_path / name)
    with failing(lazyckpt.Saver, fault="write:2:lost", verify_after_write=True) as saver:
        before = (tmp_path / name).read_bytes()
        handle = saver.save(state(2.0), tmp_path / name)
        with pytest.raises(SaveError, match=rf"other bytes than were written: .* bytes from offset \d+ of {name}"):
            handle.result(30)
        assert (tmp_path / name).read_bytes() == before, "what was there is replaced"
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert handle.metrics.readback_s == 0
        second = saver.save(state(3.0), tmp_path / name)
        second.result(30)
        assert second.metrics.readback_s > 0
    assert float(lazyckpt.load(tmp_path / name)["first"][0]) == 3.0


@pytest.mark.parametrize(("name", "record"), [("a.pt", "data/0"), ("a.safetensors", "second")])
def test_the_record_is_named(failing: Make, name: str, record: str, tmp_path: Path) -> None:
    with failing(lazyckpt.Saver, fault="write:3:lost", verify_after_write=True) as saver:
        tensors = {"second": torch.ones(500 * KIB), "last": torch.ones(4)}  # the first of the chunks are all its
        handle = saver.save(tensors, tmp_path / name)
        with pytest.raises(SaveError, match=rf"\({record}\)\. Check the disk"):
            handle.result(30)


def test_a_checkpoint_that_was_lost_is_not_committed(failing: Make, tmp_path: Path) -> None:
    """The one before stays, and stays the newest."""
    lost = ",".join(f"write:{n}:lost" for n in range(8, 15))
    with failing(lazyckpt.Checkpointer, tmp_path, fault=lost, keep_last=1, verify_after_write=True) as checkpointer:
        checkpointer.track(x={"t": torch.full((82 * KIB,), 1.0)})
        checkpointer.save(1).result(30)
        handle = checkpointer.save(2)
        with pytest.raises(SaveError, match=r"step 2: .*state\.pt"):
            handle.result(30)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        assert checkpointer.restore() == 1


def test_what_is_whole_is_committed(tmp_path: Path) -> None:
    """Many chunks, empty files and tensors; no descriptor and no memory of the staging buffer stays taken."""
    gc.collect()  # Savers of tests before this one hold descriptors
    with lazyckpt.Saver(**TINY, verify_after_write=True) as saver:
        for number in range(3):
            with saver.stage(tmp_path / f"folder-{number}") as staged:
                staged.add("a.pt", state(1.0))
                staged.add("b.safetensors", {"none": torch.empty(0)})
                staged.add("c.pt", None)
                staged.save().result(30)
            if number == 0:
                descriptors = len(os.listdir("/proc/self/fd"))
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert saver.engine.ring_used_bytes == 0


def test_a_file_that_cannot_be_read_back_fails_the_save(failing: Make, tmp_path: Path) -> None:
    with failing(lazyckpt.Saver, fault="read:1:EIO", verify_after_write=True) as saver:
        if saver.config.direct_io is False:
            pytest.skip("reads through the page cache pass no fault")
        handle = saver.save(state(1.0), tmp_path / "a.pt")
        with pytest.raises(SaveError, match="Input/output error"):
            handle.result(30)
    assert not list(tmp_path.iterdir())


def test_the_page_cache_is_not_asked(tmp_path: Path) -> None:
    """It holds what was written. What arrived is something else."""
    (tmp_path / "shown").mkdir()
    stop = fuse_server.serve(tmp_path / "fuse", tmp_path / "shown", "rot")
    try:
        with lazyckpt.Saver(**TINY) as saver:
            saver.save(state(1.0), tmp_path / "fuse" / "a.pt").result(30)
        assert float(lazyckpt.load(tmp_path / "fuse" / "a.pt")["first"][0]) == 1.0
        with pytest.raises(lazyckpt.CorruptFileError):
            lazyckpt.load(tmp_path / "shown" / "a.pt")
        with lazyckpt.Saver(**TINY, verify_after_write=True) as saver:
            handle = saver.save(state(1.0), tmp_path / "fuse" / "b.pt")
            with pytest.raises(SaveError, match="other bytes than were written"):
                handle.result(30)
        assert not (tmp_path / "shown" / "b.pt").exists()
    finally:
        stop()
