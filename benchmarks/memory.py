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
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from benchmarks.paired import median
from benchmarks.report import Table

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


def measure(
    names: Sequence[str], *, runs: int, state_bytes: int, directory: Path, progress: Callable[[str], None]
) -> tuple[dict[str, float], dict[str, str]]:
    """MiB above none, median of `runs`, by the name of the arm; and why the arms that are not there failed."""
    peaks: dict[str, list[float]] = {}
    failures: dict[str, str] = {}
    for run in range(runs):
        for name in ["none", *names]:
            progress(f"run {run + 1}/{runs}: {name}")
            command = [sys.executable, "-m", "benchmarks.memory", name]
            command += ["--state-bytes", str(state_bytes), "--directory", str(directory)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                peaks.setdefault(name, []).append(json.loads(done.stdout.splitlines()[-1]) / 2**20)
            else:
                failures[name] = (done.stderr.splitlines() or [f"exit status {done.returncode}"])[-1]
    none = median(peaks.pop("none", []))
    return {name: median(values) - none for name, values in peaks.items()}, failures


def table(peaks: dict[str, float], failures: dict[str, str]) -> Table:
    found = Table("Peak memory above no checkpointing, MiB", ["arm", "peak"])
    for name, mib in peaks.items():
        found.add(name, f"{mib:.0f}")
    for name, reason in failures.items():
        found.missing(name, reason)
    return found


def _main() -> None:
    from benchmarks.arms import KINDS, NONE
    from benchmarks.train import run_block
    from benchmarks.workload import Training

    parser = argparse.ArgumentParser(description="One arm's peak bytes, on the last line of the output.")
    parser.add_argument("arm")
    parser.add_argument("--state-bytes", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        sampler = PeakSampler()
        sampler.start()
        training = Training(arguments.state_bytes)
        arm = {**KINDS, "none": NONE}[arguments.arm].make(training, Path(directory))
        run_block(training, arm, _STEPS, 1)
        peak = sampler.stop()
        arm.close()
    print(json.dumps(peak))


if __name__ == "__main__":
    _main()
