"""Training under every allocator of torch, and to the end of a process in which copies are under way.

Each training is a process of its own. All run at once, since each takes seconds to start.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from gpu.machines import saved

HERE = Path(__file__).parent
LIMIT_S = 100
NATIVE, ASYNC = "native", "cudaMallocAsync"
WAYS: dict[str, tuple[str, dict[str, str], list[str]]] = {
    "expandable segments": (NATIVE, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, []),
    "cudaMallocAsync": (ASYNC, {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, []),
    "small copies one by one": (NATIVE, {"LAZYCKPT_CUDA_BATCHES": "0"}, []),
    **{f"the end by {end}": (NATIVE, {}, [end]) for end in ("return", "sys.exit()", "an exception", "os._exit()")},
}


class Processes:
    def __init__(self, device: torch.device, folder: Path) -> None:
        self.folders = {way: folder / str(number) for number, way in enumerate(WAYS)}
        self._processes = {}
        paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        for way, (allocator, environment, end) in WAYS.items():
            self.folders[way].mkdir()
            command = [sys.executable, str(HERE / "process.py"), device.type, str(self.folders[way]), allocator, *end]
            with (self.folders[way] / "log").open("wb") as log:
                self._processes[way] = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **environment},
                    start_new_session=True,
                )
        self._end = time.monotonic() + LIMIT_S

    def wait(self, way: str) -> tuple[int, str]:
        """Returns the exit status of a process and what it printed."""
        status = self._processes[way].wait(max(1.0, self._end - time.monotonic()))
        return status, (self.folders[way] / "log").read_text(errors="replace")

    def kill(self) -> None:
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    device = torch.device(os.environ.get("LAZYCKPT_TEST_DEVICE", "cuda"))
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    processes = Processes(device, tmp_path_factory.mktemp("processes"))
    yield processes
    processes.kill()


@pytest.mark.parametrize("way", WAYS)
def test_a_training_in_a_process_of_its_own(processes: Processes, way: str) -> None:
    status, text = processes.wait(way)
    assert "right" in text.splitlines(), text
    assert status == (1 if "exception" in way else 0), text
    assert "terminate called" not in text and "CUDA error" not in text
    folder = processes.folders[way]
    if "_exit" in way:
        assert not (folder / "end.pt").exists() or saved(folder / "end.pt") == saved(folder / "expected.pt")
    elif WAYS[way][2]:
        assert saved(folder / "end.pt") == saved(folder / "expected.pt"), "the end of the process waits for it"
