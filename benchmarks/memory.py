"""Peak memory of each arm above no checkpointing, each in a fresh process.

Peak: the largest proportional set size of the process and its children, sampled, or the kernel's high-water
mark of the process where that is larger. Shared memory and pinned rings count; the page cache does not.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from benchmarks.paired import Countdown, Progress, median, spread
from benchmarks.report import Table
from benchmarks.settings import Settings

_SAMPLE_S = 0.02
_STEPS = 4


class PeakSampler(threading.Thread):
    """Samples this process and its children until `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._stopped = threading.Event()

    def run(self) -> None:
        this = psutil.Process()
        while not self._stopped.wait(_SAMPLE_S):
            family = [this, *this.children(recursive=True)]
            self.peak_bytes = max(self.peak_bytes, sum(_pss_bytes(process.pid) for process in family))

    def stop(self) -> int:
        self._stopped.set()
        self.join()
        return max(self.peak_bytes, _field_bytes("/proc/self/status", "VmHWM"))


def _pss_bytes(pid: int) -> int:
    try:
        return _field_bytes(f"/proc/{pid}/smaps_rollup", "Pss")
    except OSError:  # it has just ended
        return 0


def _field_bytes(path: str, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def measure(settings: Settings, progress: Progress) -> Iterator[Table]:
    names = [kind.name for kind in settings.kinds]
    peaks: dict[str, list[float]] = {name: [] for name in ("none", *names)}
    failures: dict[str, str] = {}
    runs = 3 if settings.full else 1
    tell = Countdown(progress, runs * len(peaks))
    for _ in range(runs):
        for name in peaks:
            tell(name)
            command = [sys.executable, "-m", "benchmarks.memory", name, "--device", settings.device.type]
            command += ["--state-bytes", str(settings.state_bytes), "--directory", str(settings.directory)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                peaks[name].append(json.loads(done.stdout.splitlines()[-1]) / 2**20)
            else:
                failures[name] = (done.stderr.splitlines() or [f"exit status {done.returncode}"])[-1]
    none = median(peaks.pop("none"))
    table = Table("Peak memory of a training with a checkpoint at every step, above none, MiB", ["arm", "peak"])
    for name, values in peaks.items():
        if name in failures:
            table.missing(name, failures[name])
        else:
            table.add(name, spread([value - none for value in values], 0))
    table.notes.append(f"{runs} processes for each arm, {settings.state_bytes / 1e9:.2f} GB of AdamW state.")
    yield table


def _main() -> None:
    from benchmarks.arms import KINDS, NONE
    from benchmarks.train import run_block
    from benchmarks.workload import Training

    parser = argparse.ArgumentParser(description="One arm's peak bytes, on the last line of the output.")
    parser.add_argument("arm")
    parser.add_argument("--state-bytes", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--device", type=torch.device, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        sampler = PeakSampler()
        sampler.start()
        training = Training(arguments.state_bytes, device=arguments.device)
        arm = {**KINDS, "none": NONE}[arguments.arm].make(training, Path(directory))
        run_block(training, arm, _STEPS, 1)
        peak = sampler.stop()
        arm.close()
    print(json.dumps(peak))


if __name__ == "__main__":
    _main()
