"""The disk and the system fail at every point of a save: never a false success, and nothing is lost or left behind."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import errno
import functools
import gc
import itertools
import os
import platform
import resource
import shutil
import subprocess
import tempfile
import threading
import time
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_engines import engines_fail

import lazyckpt
from endings import in_a_child
from lazyckpt import _engine, config, functional, warn
from lazyckpt.checkpointer import Checkpointer
from lazyckpt.errors import ConfigError, NoSpaceError, SaveError
from lazyckpt.formats.program import SOURCE
from lazyckpt.pipeline import launch, persist
from lazyckpt.pipeline.handle import SaveHandle, in_flight
from lazyckpt.storage import catalog, commit, folders, manifest, removal
from mounting import mount
from trials import Trials

pytestmark = [
    pytest.mark.skipif(not _engine.FAULTS, reason="the engine was built without fault injection"),
    pytest.mark.usefixtures("small_tensors_are_lazy"),
]

KIB = 1 << 10
BACKENDS = ("io_uring", "posix")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Run:
    """A tiny training run, whose engine can be told to fail."""

    def __init__(self, folder: Path, fault: str = "", **knobs: Any) -> None:
        gc.collect()  # runs of tests before this one hold descriptors
        self.folder = folder
        self.model = torch.nn.Linear(128, 128)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        knobs = {"chunk_bytes": 64 * KIB, "host_buffer_bytes": 128 * KIB, **knobs}
        with engines_fail(fault):
            self.checkpointer = Checkpointer(folder, **knobs)
        self.checkpointer.track(model=self.model, optimizer=self.optimizer)
        self.states: dict[int, torch.Tensor] = {}

    def step(self, number: int) -> SaveHandle:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 128)).sum().backward()
        self.optimizer.step()
        self.states[number] = self.model.weight.detach().clone()
        return self.checkpointer.save(number)

    def check(self, *steps: int) -> None:
        """Exactly these checkpoints are committed, each whole; the last of them is the newest."""
        scan = catalog.Catalog(self.folder)
        found = scan.scan()
        assert not scan.broken
        assert sorted(c.step for c in found) == sorted(set(steps))
        for checkpoint in found:
            for state in (lazyckpt.load(checkpoint.path), torch.load(checkpoint.path / "state.pt")):
                assert torch.equal(state["model"]["weight"], self.states[checkpoint.step])
        assert not steps or found[0].step == steps[-1]

    def check_nothing_left(self, fds: int) -> None:
        assert self.checkpointer._saver.engine.ring_used_bytes == 0
        end = time.monotonic() + 30  # a replaced checkpoint is removed behind the handle's result
        while descriptors() > fds or [p for p in self.folder.iterdir() if not p.name.startswith("step-")]:
            assert time.monotonic() < end, (
                f"{descriptors() - fds} descriptors or files left: {[*self.folder.iterdir()]}"
            )
            time.sleep(0.001)


def check_error(error: SaveError, step: int, path: Path, cause: int) -> None:
    assert error.step == step and error.path == path
    assert isinstance(error, NoSpaceError) == (cause in (errno.ENOSPC, errno.EDQUOT))
    assert isinstance(error.__cause__, OSError) and error.__cause__.errno == cause
    assert f"step {step}" in str(error) and str(path) in str(error) and os.strerror(cause) in str(error)


CHUNKS = 5  # of a checkpoint of Run; asserted below


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("direct", [True, False])
def test_passing_troubles_are_overcome(backend: str, direct: bool, tmp_path: Path) -> None:
    faults = ",".join(
        f"write:{n}:{effect}"
        for n in range(1, 60)
        for effect in [("short", "EINTR", "EAGAIN", "stall", "short", "short", "nothing")[n % 7]]
        if effect != "nothing"
    )
    run = Run(tmp_path, faults, io_backend=backend, direct_io=direct)
    for step in (1, 2, 3):
        run.step(step).result(30)
    run.check(1, 2, 3)
    run.checkpointer.close()


def test_a_write_that_never_moves_anything_is_given_up(tmp_path: Path) -> None:
    run = Run(tmp_path, fault=",".join(f"write:{n}:EAGAIN" for n in range(1, 3000)), io_backend="posix")
    error = run.step(1).exception(30)
    check_error(error, 1, tmp_path / "step-00000001", errno.EAGAIN)


PASSING = ("short", "EINTR", "EAGAIN")  # of a write
Fault = tuple[str, str, str, str]


def every_fault() -> tuple[list[Fault], list[Fault]]:
    """The second save's operations: each with EIO, and with every other cause; with both backends, and both ways to
    hear of it. No effect: it is to be overcome."""
    writes = range(CHUNKS + 1, 2 * CHUNKS + 1)
    places = [f"write:{n}" for n in writes] + [f"{op}:2" for op in ("create", "allocate", "truncate", "sync")]
    certain, others = [], []
    for backend in BACKENDS:
        certain += [(f"{place}:EIO", "EIO", backend, "raise") for place in places]
        certain.append(("sync:2:EINTR", "EINTR", backend, "warn"))  # a sync is never tried again
        certain.append((f"write:{CHUNKS + 2}:stall,write:{CHUNKS + 1}:EIO", "EIO", backend, "raise"))
        for n in writes:
            others.append((f"write:{n}:short,write:{n + 1}:ENOSPC", "ENOSPC", backend, "raise"))  # how a disk fills up
            others += [(f"write:{n}:{trouble}", "", backend, "raise") for trouble in PASSING]
        for place in places:
            for effect in ("ENOSPC", "EDQUOT", "EACCES", "EINVAL", "ENOMEM"):
                others += [(f"{place}:{effect}", effect, backend, on_error) for on_error in ("raise", "warn")]
    return certain, others


def test_every_operation_of_a_save_fails(tmp_path: Path, trials: Trials) -> None:
    """Never a false success; the checkpoint before stays, training goes on, and nothing is held on to."""
    certain, others = every_fault()
    tried = certain + trials.random.sample(others, trials.count(8, len(others)))
    overcome = 0
    for number, (fault, effect, backend, on_error) in enumerate(tried):
        folder = tmp_path / str(number)
        run = Run(folder, fault, io_backend=backend, on_error=on_error)
        first = run.step(1)
        first.result(30)
        assert first.metrics.chunks == CHUNKS
        fds = descriptors()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            handle = run.step(2)
            concurrent.futures.wait([handle])  # does not count as having heard of it
            run.checkpointer._saver.drain()
            if effect and on_error == "raise":
                with pytest.raises(SaveError) as caught:
                    run.step(3)
                assert caught.value is handle.exception()
            run.step(3).result(30)
        assert sum("step 2" in str(w.message) for w in heard) == (on_error == "warn")
        error = handle.exception()
        if effect:
            assert isinstance(error, SaveError), fault
            check_error(error, 2, folder / "step-00000002", getattr(errno, effect))
            run.check(1, 3)
        else:
            assert error is None, fault
            run.check(1, 2, 3)
            overcome += 1
        run.check_nothing_left(fds)
        run.checkpointer.close()
        shutil.rmtree(folder)
    every = len(certain) + len(others)
    trials.report("any fault at the n-th operation, every n", len(tried), tmp_path, of=every, overcome=overcome)


def test_several_in_flight_fail_alone(tmp_path: Path) -> None:
    """Three at once share the ring; the second fails, the others are whole and in order."""
    fault = f"write:1:stall,write:{CHUNKS + 2}:EIO,write:{CHUNKS + 3}:stall"
    run = Run(tmp_path, fault, max_in_flight=3, on_error="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handles = [run.step(step) for step in (1, 2, 3)]
        failed = [h.step for h in handles if h.exception(30) is not None]
    assert len(failed) == 1
    run.check(*(h.step for h in handles if h.step not in failed))
    run.checkpointer.close()


# the file system's names: commit.py


class FailingOs:
    """The module ``os`` whose n-th call of any of these functions fails."""

    FUNCTIONS = ("mkdir", "open", "rename", "fsync", "replace")

    def __init__(self, nth: int) -> None:
        self.nth = nth
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(os, name)
        return self.counted(name, function) if name in self.FUNCTIONS else function

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            if len(self.calls) == self.nth:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return function(*args, **kwargs)

        return call

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        """For what the protocol calls."""
        for module in (commit, folders, removal):
            patch.setattr(module, "os", self)
        patch.setattr(_engine, "rename_exchange", self.counted("exchange", _engine.rename_exchange))


@pytest.mark.parametrize("way", ["new", "replace", "replace without exchange"])
def test_every_call_of_the_commit_fails(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trials: Trials
) -> None:
    """For each n: the handle fails, what was committed stays whole, and the next save works."""
    for nth in range(1, 20):
        folder = tmp_path / str(nth)
        run = Run(folder)
        run.step(1).result(30)
        run.step(2).result(30)
        fds = descriptors()
        old = run.states[2]
        failing = FailingOs(nth)
        step = 3 if way == "new" else 2
        with monkeypatch.context() as patch:
            failing.stand_in(patch)
            if way == "replace without exchange":
                patch.setattr(_engine, "rename_exchange", _no_exchange)
            handle = run.step(step)
            error = handle.exception(30)
            run.checkpointer._saver._background.drain()
        if len(failing.calls) < nth:
            assert error is None
            staged, manifest, folder = ["mkdir", "open"], ["open", "fsync"], ["open", "fsync"]
            renames = {"new": ["rename"], "replace": ["exchange"], "replace without exchange": ["rename", "rename"]}[
                way
            ]
            trash = [] if way == "new" else ["rename", *folder]
            assert failing.calls == staged + manifest + folder + renames + folder + trash
            trials.report(f"EIO at the n-th call of a commit, every n: {way}", nth - 1, tmp_path)
            return
        _check_after_failed_commit(run, failing.calls, step, error, old)
        assert descriptors() <= fds
        run.step(4).result(30)
        run.checkpointer.close()
        again = Checkpointer(folder)  # which sweeps
        assert not [p for p in folder.iterdir() if not p.name.startswith("step-")]
        again.close()
    raise AssertionError("there is no end of calls")


def _no_exchange(a: str, b: str) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def _check_after_failed_commit(
    run: Run, calls: list[str], step: int, error: BaseException | None, old: torch.Tensor
) -> None:
    scan = catalog.Catalog(run.folder)
    found = {c.step: c for c in scan.scan()}
    assert not scan.broken
    assert 1 in found
    if error is None:
        # The checkpoint was durable before: what failed was taking away what it replaced.
        assert step in found
        return
    check_error(error, step, run.folder / manifest.folder_name(step), errno.EIO)
    for checkpoint in found.values():
        weight = torch.load(checkpoint.path / "state.pt")["model"]["weight"]
        candidates = [run.states[checkpoint.step], *([old] if checkpoint.step == step == 2 else [])]
        assert any(torch.equal(weight, state) for state in candidates)
    published = "may or may not" in str(error)
    if published:
        assert step in found
    else:
        assert not [p for p in run.folder.iterdir() if p.name.startswith(".tmp-")]
        assert step == 3 or torch.equal(torch.load(found[2].path / "state.pt")["model"]["weight"], old)


def save_file(saver: lazyckpt.Saver, folder: Path, tree: dict[str, torch.Tensor]) -> SaveHandle:
    return saver.save(tree, folder / "a.pt")


def save_folder(saver: lazyckpt.Saver, folder: Path, tree: dict[str, torch.Tensor]) -> SaveHandle:
    staged = saver.stage(folder / "b")
    staged.add("state.pt", tree)
    staged.add("below/x.safetensors", tree)
    return staged.save()


SHAPES = {"a.pt": (save_file, ("a.pt",)), "b": (save_folder, ("b/state.pt", "b/below/x.safetensors"))}


@pytest.mark.parametrize("name", SHAPES)
def test_any_fault_in_files_and_folders(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trials: Trials
) -> None:
    """Of a Saver, as in ``test_every_operation_of_a_save_fails``: operations of the engine, and calls of the commit."""
    save, files = SHAPES[name]

    def values(folder: Path) -> set[float]:
        return {x for file in files for x in lazyckpt.load(folder / file)["x"].unique().tolist()}

    def saved_twice(folder: Path, fault: str, backend: str, nth: int = 0) -> tuple[Any, list[str]]:
        """The error of the second save, and the calls that its commit did."""
        with engines_fail(fault):
            knobs = {"chunk_bytes": 64 * KIB, "host_buffer_bytes": 128 * KIB}
            saver = lazyckpt.Saver(io_backend=backend, on_error="warn", **knobs)
        folder.mkdir()
        failing = FailingOs(nth)
        with saver, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(saver, folder, {"x": torch.full((40_000,), 1.0)}).result(30)
            saver.drain()
            with monkeypatch.context() as patch:
                failing.stand_in(patch)
                try:
                    error = save(saver, folder, {"x": torch.full((40_000,), 2.0)}).exception(30)
                except SaveError as told:  # the folder could not be staged
                    error = told
                saver.drain()
            assert saver.engine.ring_used_bytes == 0
            found = values(folder)
            if error is None:
                assert found == {2.0}
            else:
                assert isinstance(error, SaveError) and error.path == folder / name
                assert found == {1.0} or (nth > 0 and found == {2.0})  # it was renamed, and the sync failed
            save(saver, folder, {"x": torch.full((40_000,), 3.0)}).result(30)
        assert values(folder) == {3.0}
        again = lazyckpt.Saver()
        again.save(0, folder / "c.pt").result(30)  # which sweeps
        again.close()
        assert sorted(p.name for p in folder.iterdir()) == sorted([name, "c.pt"])
        return error, failing.calls

    log = tmp_path / "log"
    assert saved_twice(tmp_path / "recorded", f"trace:{log}", "posix")[0] is None
    operations = Counter(words[2] for words in map(str.split, log.read_text().splitlines()) if words[0] == "begin")
    operations = {operation: n // 3 for operation, n in operations.items()}
    assert operations["write"] >= 3 * len(files) and operations["sync"] == len(files)
    faults: list[tuple[str, str, str, int]] = []
    for backend in BACKENDS:
        for operation, each in operations.items():
            for n in range(each + 1, 2 * each + 1):
                faults += [(f"{operation}:{n}:{effect}", effect, backend, 0) for effect in ("EIO", "ENOSPC")]
                if operation == "write":
                    faults += [(f"write:{n}:{trouble}", "", backend, 0) for trouble in PASSING]
    calls = len(saved_twice(tmp_path / "counted", "", "posix")[1])
    faults += [("", "EIO", backend, n) for n in range(1, calls + 1) for backend in BACKENDS]
    tried = trials.random.sample(faults, trials.count(8, len(faults)))
    after_it_was_durable = 0
    for number, (fault, effect, backend, nth) in enumerate(tried):
        error, _ = saved_twice(tmp_path / str(number), fault, backend, nth)
        if error is None:
            assert not effect or nth > 0, fault  # what was replaced could not be taken away
            after_it_was_durable += nth > 0
        else:
            assert isinstance(error.__cause__, OSError) and error.__cause__.errno == getattr(errno, effect), fault
    what = "a file" if name == "a.pt" else "a folder"
    trials.report(
        f"any fault at the n-th operation of {what}, every n",
        len(tried),
        tmp_path,
        of=len(faults),
        too_late_to_matter=after_it_was_durable,
    )


def test_a_replaced_checkpoint_outlives_a_failed_publication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: after the exchange of names and a failed fsync of the folder, the older one was removed, although
    a power cut might have given it its name back."""
    run = Run(tmp_path)
    run.step(1).result(30)
    real = folders.sync_path

    def fail_for_parent(path: Any) -> None:
        if Path(path) == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path)

    monkeypatch.setattr(folders, "sync_path", fail_for_parent)
    with pytest.raises(SaveError, match="may or may not"):
        run.step(1).result(30)
    kept = [p for p in tmp_path.iterdir() if p.name.startswith(".tmp-")]
    assert len(kept) == 1 and (kept[0] / "manifest.json").exists() and (kept[0] / "state.pt").exists()
    monkeypatch.undo()
    run.checkpointer.close()


def test_a_lone_file_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.pt"
    lazyckpt.save({"x": torch.zeros(1000)}, target)
    for nth in range(1, 10):
        failing = FailingOs(nth)
        with monkeypatch.context() as patch:
            failing.stand_in(patch)
            if nth <= 3:
                with pytest.raises(SaveError) as caught:
                    lazyckpt.save({"x": torch.ones(1000)}, target)
                assert caught.value.path == target
                assert torch.equal(lazyckpt.load(target)["x"], torch.zeros(1000))
            elif nth <= 5:
                with pytest.raises(SaveError):
                    lazyckpt.save({"x": torch.ones(1000)}, target)
                assert torch.equal(lazyckpt.load(target)["x"], torch.ones(1000))  # published, durability unknown
            else:
                lazyckpt.save({"x": torch.ones(1000)}, target)
                break
        assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]
    assert failing.calls == ["mkdir", "open", "replace", "open", "fsync"]


def test_a_lone_file_that_cannot_be_written_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = _engine.Engine(ring_bytes=8192, chunk_bytes=4096, io_depth=1, copy_threads=1, fault="write:1:EIO")
    monkeypatch.setattr(functional, "process_engine", lambda: failing)
    with pytest.raises(SaveError, match=r"a\.pt.*Input/output error"):
        lazyckpt.save({"x": torch.ones(1000)}, tmp_path / "a.pt")
    assert list(tmp_path.iterdir()) == []


# a full disk


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    if request.param == "tmpfs":
        unmount = mount(folder, "-t", "tmpfs", "-o", "size=4m", "tmpfs")
    else:
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("no mkfs.ext4")
        image = tmp_path / "image"
        image.touch()
        os.truncate(image, 4 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", image], check=True, capture_output=True)
        unmount = mount(folder, "-o", "loop", image)
    yield folder
    unmount()


def test_a_full_disk_is_restored_from(small_disk: Path) -> None:
    """Regression: a Checkpointer could not be opened there, even if one only wanted to read."""
    run = Run(small_disk / "run")
    run.step(1).result(30)
    run.checkpointer.close()
    with contextlib.suppress(OSError):
        for number in range(10_000):  # mkdir takes a block, too, on ext4
            (small_disk / f"{number}").write_bytes(bytes(4096))
    model = torch.nn.Linear(128, 128)
    reader = Checkpointer(small_disk / "run")
    reader.track(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    assert reader.restore() == 1
    assert torch.equal(model.weight, run.states[1])
    with pytest.raises(NoSpaceError, match="step 2"):
        reader.save(2).result(30)
    reader.close()


@pytest.mark.parametrize("found_by", ["save", "fallocate"])
def test_disk_full(small_disk: Path, found_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(small_disk / "run")
    fds = descriptors()
    steps = []
    if found_by == "fallocate":  # somebody else took the space in the meantime
        monkeypatch.setattr(launch, "check_space", lambda *_: None)
    with pytest.raises(NoSpaceError, match="free some space") as caught:
        for step in range(1, 100):
            run.step(step).result(30)
            steps.append(step)
    assert len(steps) >= 5
    if found_by == "fallocate":  # before anything is written
        assert "fallocate" in caught.value.__cause__.strerror  # type: ignore[union-attr]
    failed = steps[-1] + 1
    assert caught.value.step == failed and caught.value.path.name == f"step-{failed:08d}"
    run.check(*steps)
    run.check_nothing_left(fds)
    shutil.rmtree(run.folder / "step-00000001")
    run.step(failed + 1).result(30)
    run.check(*steps[1:], failed + 1)
    run.checkpointer.close()


def _save_until_the_disk_fails(folder: Path) -> list[int]:
    """The steps that were acknowledged. None is, once one was not."""
    x = torch.zeros(64 << 10)
    acknowledged = []
    with warnings.catch_warnings(), Checkpointer(folder, direct_io=False, on_error="warn") as checkpointer:
        warnings.simplefilter("ignore")
        checkpointer.track(x={"x": x})
        failed = 0
        for step in range(1, 100):
            x.fill_(step)
            error = checkpointer.save(step).exception(60)
            if error is None:
                assert not failed, "a disk that has failed is trusted again"
                acknowledged.append(step)
                continue
            assert isinstance(error, SaveError) and error.step == step
            failed += 1
            if failed == 3:
                break
    return acknowledged


def test_a_disk_that_loses_what_it_accepts(tmp_path: Path) -> None:
    """A device larger than what stands behind it: writes go well, and what does not fit is lost afterwards. The first
    that tells is the sync, and only once. What was acknowledged before is there when the device is whole again."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("it takes root and mkfs.ext4")
    unmount_backing = mount(tmp_path / "backing", "-t", "tmpfs", "-o", "size=6m", "tmpfs")
    image, disk = tmp_path / "backing" / "image", tmp_path / "disk"
    try:
        image.touch()
        os.truncate(image, 64 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True, capture_output=True)
        unmount = mount(disk, "-o", "loop", image)
        try:
            acknowledged = _save_until_the_disk_fails(disk / "run")
            assert len(acknowledged) >= 3
        finally:
            subprocess.run(["umount", str(disk)], check=True)
        subprocess.run(["mount", "-o", "remount,size=64m", str(tmp_path / "backing")], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(disk)], check=True)
        try:
            scan = catalog.Catalog(disk / "run")
            assert [c.step for c in reversed(scan.scan())][: len(acknowledged)] == acknowledged
            for step in acknowledged:
                assert torch.all(lazyckpt.load(disk / "run" / manifest.folder_name(step))["x"]["x"] == step)
        finally:
            unmount()
    finally:
        unmount_backing()


# a system that refuses


SETUP, ENTER, REGISTER = 425, 426, 427  # of io_uring


def forbid(syscall_number: int, error: int) -> None:
    """From now on, in all threads of this process, the system call fails (seccomp)."""

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))

    def instruction(code: int, jt: int, jf: int, k: int) -> bytes:
        return code.to_bytes(2, "little") + bytes([jt, jf]) + k.to_bytes(4, "little")

    program = instruction(0x20, 0, 0, 0) + instruction(0x15, 0, 1, syscall_number)
    program += instruction(0x06, 0, 0, 0x00050000 | error) + instruction(0x06, 0, 0, 0x7FFF0000)
    libc = ctypes.CDLL(None, use_errno=True)
    number = {"x86_64": 317, "aarch64": 277}[platform.machine()]
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.syscall(number, 1, 1, ctypes.byref(Filter(4, program))) == 0, ctypes.get_errno()


def save_and_load(folder: Path, **knobs: Any) -> str:
    """Returns the backend that was used."""
    run = Run(folder, **knobs)
    for step in (1, 2):
        run.step(step).result(60)
    run.model.weight.data.zero_()
    assert run.checkpointer.restore() == 2 and torch.equal(run.model.weight, run.states[2])
    run.check(1, 2)
    used = run.checkpointer._saver.engine.backend
    run.checkpointer.close()
    return used


def test_io_uring_forbidden(tmp_path: Path) -> None:
    """As container runtimes do: it falls back, says so once, and forced it is a clear error."""

    def body() -> None:
        forbid(SETUP, errno.EPERM)
        warn._given.clear()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            assert save_and_load(tmp_path / "a") == save_and_load(tmp_path / "b") == "posix"
        told = [str(w.message) for w in heard if "io_uring" in str(w.message)]
        assert len(told) == 1 and "Operation not permitted" in told[0], told
        with pytest.raises(ConfigError, match=r"io_uring.*Operation not permitted"):
            Checkpointer(tmp_path / "d", io_backend="io_uring")

    in_a_child(body)


def save_bytes(engine: _engine.Engine, file: Path, data: bytes) -> None:
    pointer = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    job = engine.begin(array("Q", [pointer]), array("Q", [len(data)]), array("Q", [1]), 1)
    job.append(0, 0, array("q", [SOURCE, len(data), 0]), b"")
    job.seal()
    job.open(0, str(file), len(data))
    assert job.wait_settled(30)
    job.raise_error()
    assert file.read_bytes() == data


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOMEM])
def test_io_uring_forbidden_after_the_start(error: int, tmp_path: Path) -> None:
    """Regression: what could not be submitted stayed in the queue, with a pointer to memory given back."""

    def body() -> None:
        data = bytes(range(256)) * 4096
        engine = _engine.Engine(ring_bytes=1 << 20, chunk_bytes=1 << 16, io_depth=4, copy_threads=1, backend="io_uring")
        save_bytes(engine, tmp_path / "a", data)
        forbid(ENTER, error)
        for n in range(8):
            with pytest.raises(OSError) as caught:
                save_bytes(engine, tmp_path / f"b{n}", data)
            assert caught.value.errno == error and caught.value.filename.endswith(f"/b{n}")
        assert engine.ring_used_bytes == 0
        del engine
        gc.collect()

    in_a_child(body)


def test_buffers_cannot_be_registered(tmp_path: Path) -> None:
    def body() -> None:
        forbid(REGISTER, errno.ENOMEM)
        assert save_and_load(tmp_path / "a", io_backend="io_uring") == "io_uring"

    in_a_child(body)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that an unprivileged user may write to."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


def become_nobody() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


def test_unprivileged(public: Path) -> None:
    """With the usual 8 MiB of memlock, with none, and in a folder that is not ours."""
    (public / "locked").mkdir(mode=0o555)
    save_and_load(public / "warm up")  # imports first: the other user may not be able to read the folder of this Python

    def body() -> None:
        become_nobody()
        save_and_load(public / "a", io_backend="posix")
        save_and_load(public / "b")
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        save_and_load(public / "c")
        for path in (public / "locked", public / "locked" / "new"):
            with pytest.raises(SaveError, match=f"{path}.*Permission denied"):
                Checkpointer(path)

    in_a_child(body)


def test_no_more_threads(public: Path) -> None:
    """Regression: a pool of I/O threads that could not be started ended the process."""

    def threads() -> int:
        mine = [p for p in Path("/proc").iterdir() if p.name.isdigit() and p.stat().st_uid == os.getuid()]
        return sum(len(os.listdir(p / "task")) for p in mine)

    def save(name: str, io_depth: int) -> None:
        engine = _engine.Engine(
            ring_bytes=1 << 18, chunk_bytes=1 << 16, copy_threads=1, backend="posix", io_depth=io_depth
        )
        save_bytes(engine, public / name, b"x" * 100_000)

    def body() -> set[str]:
        become_nobody()
        save("a", io_depth=4)
        outcomes = set()
        for left in range(12):
            resource.setrlimit(resource.RLIMIT_NPROC, (threads() + left, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
            try:
                save(f"b{left}", io_depth=8)
                outcomes.add("saved")
            except OSError as error:
                assert error.errno == errno.EAGAIN and "thread" in str(error), error
                outcomes.add("refused")
        return outcomes

    assert in_a_child(body) in ("{'saved', 'refused'}", "{'refused', 'saved'}")


def test_no_thread_for_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: those that had started waited for the others for ever, and so did the end of the process."""
    start, before = threading.Thread.start, threading.active_count()
    for refused in (1, 2, 3):
        numbers = itertools.count(1)

        def refuse(self: threading.Thread, refused: int = refused, numbers: Iterator[int] = numbers) -> None:
            if next(numbers) == refused:
                raise RuntimeError("can't start new thread")
            start(self)

        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ConfigError, match="max_in_flight=2"):
            Checkpointer(tmp_path, max_in_flight=2)
        assert threading.active_count() == before


def test_out_of_memory(tmp_path: Path) -> None:
    """With so many MiB of address space left: it is saved and can be read, or there is a typed error. (With less than
    about one Python itself waits for ever for a thread that could not begin.)"""

    def room(nbytes: int) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, resource.RLIM_INFINITY))

    def save(folder: Path, mib: int) -> str:
        state = {"x": torch.arange(100_000)}
        room(mib << 20)
        try:
            with Checkpointer(folder, host_buffer_bytes=1 << 20, chunk_bytes=1 << 16) as checkpointer:
                checkpointer.track(x=state)
                checkpointer.save(1).result(60)
            outcome = "saved"
        except (lazyckpt.LazyCkptError, MemoryError) as error:
            outcome = type(error).__name__
        room(1 << 40)
        committed = [path for path in folder.iterdir() if path.name.startswith("step-")]
        assert (outcome == "saved") <= bool(committed)
        for path in committed:
            assert torch.equal(torch.load(path / "state.pt")["x"]["x"], state["x"])
        return outcome

    outcomes = set()
    for mib in (1, 3, 6, 12, 32, 256, 1024):
        (folder := tmp_path / str(mib)).mkdir()
        outcomes.add(in_a_child(functools.partial(save, folder, mib)))
    assert {"saved", "ConfigError"} <= outcomes <= {"saved", "ConfigError", "SaveError", "MemoryError"}, outcomes


@pytest.mark.parametrize("step", ["create_files", "prepare", "agree", "commit", "abort", "as_save_error", "measure"])
def test_no_memory_in_the_background(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handle settles, nothing half done is committed, and the run goes on."""
    run = Run(tmp_path)
    own = getattr(persist, step)

    def refuse(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(persist, step, own)
        raise MemoryError

    monkeypatch.setattr(persist, step, refuse)
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if step in ("abort", "as_save_error"):
            patch.setattr(persist, "agree", refuse_io)
        handle = run.step(1)
        error = handle.exception(30)
        run.checkpointer._saver.drain()
    assert not in_flight()
    if step == "measure":
        assert error is None
        run.check(1)
    else:
        assert isinstance(error, SaveError)
        assert step != "abort" or isinstance(error.__cause__, OSError), "the first error is told"
        run.check()
    run.step(2).result(30)
    run.check(*([1] if error is None else []), 2)
    run.checkpointer.close()


def refuse_io(*_: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_ring_larger_than_the_address_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the threads of the background were left behind."""
    threads = threading.active_count()
    for known in (False, True):  # by the knobs, then by the engine alone
        with pytest.raises(ConfigError, match="host_buffer_bytes"):
            Checkpointer(tmp_path, host_buffer_bytes=1 << 60)
        assert threading.active_count() == threads, known
        monkeypatch.setattr(config, "_memory_bytes", lambda: 1 << 62)
