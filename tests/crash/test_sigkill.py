"""Kills a run at random instants of a save. SIGKILL keeps the page cache: this tests atomicity. test_power_cuts.py and
test_crash_images.py test durability."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from crash.actor import Server
from crash.runs import cut_runs
from lazyckpt import _engine
from trials import Trials

# Some saves dawdle where they otherwise pass too quickly to be killed: before the file exists, and before it is synced.
STALLS = "create:2:stall,sync:3:stall,create:5:stall,sync:6:stall" if _engine.FAULTS else ""


@pytest.mark.timeout(60 * 60)
def test_sigkill_while_saving(server: Server, tmp_path: Path, trials: Trials) -> None:
    def kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL, "the run ended by itself"

    (root := tmp_path / "root").mkdir()
    cut_runs(server, root, tmp_path / "log", trials, 20, "random SIGKILLs while saving", kill, fault=STALLS)
