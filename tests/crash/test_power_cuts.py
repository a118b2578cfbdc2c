"""Cuts the power while a run saves. Acknowledged checkpoints must survive, and every final name must be whole.

The test tells ext4 on a loop device to stop at once (EXT4_IOC_SHUTDOWN), with its journal written out or not, and
mounts it again. This tests ext4; test_crash_images.py covers what other file systems may do. It needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from crash.actor import Server, Task
from crash.history import History, Violation
from crash.runs import cut_runs, wait_for
from trials import Trials

SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
LOG_FLUSHED, LOG_LOST = 1, 2  # EXT4_GOING_FLAGS_LOGFLUSH, EXT4_GOING_FLAGS_NOLOGFLUSH
IMAGE_BYTES = 48 << 20


class Disk:
    """An ext4 that can lose its power."""

    def __init__(self, folder: Path, image: Path) -> None:
        self.image = image
        self.mounted = folder / "disk"
        self.mounted.mkdir()
        image.touch()
        os.truncate(image, IMAGE_BYTES)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True, capture_output=True)
        attached = subprocess.run(["losetup", "--find", "--show", image], capture_output=True, text=True)
        if attached.returncode != 0:
            pytest.skip(f"no loop device: {attached.stderr.strip()}")
        self.device = attached.stdout.strip()
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.on = False
        try:
            self.mount()
        except OSError as error:
            self.close()
            pytest.skip(f"cannot mount: {error}")

    def _check(self, result: int, what: str) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), what)

    def mount(self) -> None:
        where = os.fsencode(self.mounted)
        self._check(self.libc.mount(os.fsencode(self.device), where, b"ext4", 0, None), "mount")
        self.on = True

    def cut(self, flags: int) -> None:
        fd = os.open(self.mounted, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", flags))
        finally:
            os.close(fd)

    def unmount(self) -> None:
        end = time.monotonic() + 10
        while (result := self.libc.umount2(os.fsencode(self.mounted), 0)) != 0 and time.monotonic() < end:
            time.sleep(0.001)  # the kernel still closes the files of the dead
        self._check(result, "umount")
        self.on = False

    def close(self) -> None:
        if self.on:
            self.libc.umount2(os.fsencode(self.mounted), 2)
        subprocess.run(["losetup", "--detach", self.device], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("to mount a file system takes root")
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("no mkfs.ext4")
    memory = Path("/dev/shm")  # the image: a disk that is quick to sync
    image = (memory if memory.is_dir() else tmp_path) / f"lazyckpt-disk-{os.getpid()}"
    disk = Disk(tmp_path, image)
    yield disk
    disk.close()
    image.unlink()


def cut_and_mount(server: Server, disk: Disk, pid: int, flags: int) -> None:
    disk.cut(flags)
    with contextlib.suppress(ProcessLookupError):  # it may have heard of the disk's end already
        os.kill(pid, signal.SIGKILL)
    server.wait()
    disk.unmount()
    disk.mount()


@pytest.mark.timeout(60 * 60)
@pytest.mark.parametrize("flags", [LOG_FLUSHED, LOG_LOST], ids=["log flushed", "log not flushed"])
def test_power_cuts(server: Server, disk: Disk, tmp_path: Path, trials: Trials, flags: int) -> None:
    figure = f"ext4 power cuts, log {'flushed' if flags == LOG_FLUSHED else 'not flushed'}"
    cut = partial(cut_and_mount, server, disk, flags=flags)
    cut_runs(server, disk.mounted, tmp_path / "log", trials, 8, figure, cut)
    disk.unmount()
    subprocess.run(["e2fsck", "-f", "-n", disk.device], check=True, capture_output=True)


MUTANTS = {
    "the parent is not synced": (LOG_LOST, {"drop": "fsync run"}),
    # Under O_DIRECT ext4 loses nothing by that: the bytes are on the device, the rest is in its journal.
    "the file is not synced": (LOG_FLUSHED, {"fault": "sync:1:lost", "knobs": {"direct_io": False}}),
    "the manifest is not synced": (LOG_FLUSHED, {"drop": "fsync manifest.json"}),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_power_cuts_find_mutants(server: Server, disk: Disk, tmp_path: Path, trials: Trials, mutant: str) -> None:
    """Without one of the syncs, a power cut right after the acknowledgement loses something."""
    flags, options = MUTANTS[mutant]
    times = trials.count(1, 20)
    caught = 0
    for _ in range(times):
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        shutil.rmtree(disk.mounted / "run", ignore_errors=True)
        disk.unmount()
        disk.mount()
        pid = server.start(Task(str(disk.mounted), str(log), "one_and_wait", **options))  # type: ignore[arg-type]
        wait_for(log, "durable")
        cut_and_mount(server, disk, pid, flags)
        history = History()
        history.read(log)
        try:
            history.check(disk.mounted)
        except Violation:
            caught += 1
    assert caught >= 0.9 * times, f"{caught} of {times}"
