"""Four ranks on two machines: namespaces with a network, processes, a host name and a boot of their own each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import lazyckpt
from ranks.jobs import wait_until

PORT = 29_500
RANKS = 4


class Machine:
    def __init__(self, number: int, name: str, folder: Path) -> None:
        self.name, self.number = name, number
        self.boot = folder / f"boot-{number}"
        self.boot.write_text(f"{uuid.uuid4()}\n")

    def start(self, *command: object) -> subprocess.Popen[bytes]:
        boot = "/proc/sys/kernel/random/boot_id"
        shell = f'mount --bind {self.boot} {boot} && hostname machine-{self.number} && exec "$@"'
        apart = ["ip", "netns", "exec", self.name, "unshare", "--fork", "--pid", "--uts", "--mount-proc"]
        words = [*apart, "--kill-child", "sh", "-c", shell, "sh", *map(str, command)]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": self.name, "OMP_NUM_THREADS": "1"}
        environment["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # torch tells of each try to reach the store again
        return subprocess.Popen(words, env=environment)

    def cut(self) -> None:
        ip("-n", self.name, "link", "set", self.name, "down")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    """Two machines, joined by a cable. The interface of each has its name."""
    found = [Machine(number, f"lazy{os.getpid()}{'ab'[number]}"[-15:], tmp_path) for number in (0, 1)]
    try:
        try:
            for machine in found:
                ip("netns", "add", machine.name)
            ip("link", "add", found[0].name, "type", "veth", "peer", "name", found[1].name)
            for machine in found:
                ip("link", "set", machine.name, "netns", machine.name)
                ip("-n", machine.name, "addr", "add", f"10.77.0.{1 + machine.number}/24", "dev", machine.name)
                for interface in ("lo", machine.name):
                    ip("-n", machine.name, "link", "set", interface, "up")
            assert found[0].start("true").wait() == 0
        except (OSError, subprocess.CalledProcessError, AssertionError):
            pytest.skip("this process may not make namespaces")
        yield found
    finally:
        for machine in found:
            subprocess.run(["ip", "netns", "del", machine.name], capture_output=True)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ranks_of_two_machines_save_restore_and_lose_each_other(machines: list[Machine], tmp_path: Path) -> None:
    script = Path(__file__).with_name("machine.py")
    address = f"10.77.0.1:{PORT}"
    processes = [
        machines[rank // 2].start(sys.executable, script, rank, RANKS, address, tmp_path) for rank in range(RANKS)
    ]
    try:

        def all_ready() -> bool:
            assert all(process.poll() in (None, 0) for process in processes)
            return all((tmp_path / f"ready-{rank}").exists() for rank in range(RANKS))

        wait_until(all_ready, 240)
        machines[1].cut()
        (tmp_path / "cut").touch()
        assert [process.wait(240) for process in processes] == [0] * RANKS
    finally:
        for process in processes:
            process.kill()
            process.wait()
    told = [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in range(RANKS)]
    assert [each["host"] for each in told] == ["machine-0", "machine-0", "machine-1", "machine-1"]
    assert all(each["restored"] == 4 and each["ways"] == ["Broadcasts"] for each in told)
    copied = [each["copied"] for each in told]
    assert abs(copied[0] - copied[2]) < 100_000 and max(copied[1], copied[3]) < 0.1 * copied[0], "one writer of each"
    for rank, each in enumerate(told):
        lost = "has given no sign of life" if rank < 2 else "lost the store"
        assert "step 5" in each["error"] and lost in each["error"] and ("rank 2 " in each["error"] or rank >= 2), each
    found = sorted(path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith("."))
    assert found == [f"step-{step:08}" for step in range(1, 5)]
    assert lazyckpt.verify(tmp_path / "run" / "step-00000004").ok
