"""The GPU benchmark, rehearsed on the host with states of megabytes: what it measures here is not looked at."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cuda_training import Gpu

from benchmarks import timeline
from benchmarks.arms import KINDS, Arm, ArmKind
from benchmarks.gpu import copies, restore, training
from benchmarks.gpu.__main__ import run
from benchmarks.gpu.part import Part
from benchmarks.report import Table
from fake_cuda import FakeCuda
from lazyckpt import _engine
from lazyckpt.capture import devices
from lazyckpt.config import Config
from lazyckpt.observe.trace import COPIES, LARGEST, WRITES
from lazyckpt.tools.trace import read_trace

ROOT = Path(__file__).parent.parent
ROUNDED_S = 1e-6  # moments in a trace are microseconds since 1970


@pytest.fixture
def part(tmp_path: Path) -> Part:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    return Part("memory", torch.device("cpu"), 60.0, 4_000_000, directory, tmp_path / "memory.json")


def published(part: Part) -> dict[str, Table]:
    tables = [Table(**fields) for fields in json.loads(part.output.read_text())]
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    return {table.title.partition(" ")[0]: table for table in tables}


def test_the_copy_alone(part: Part) -> None:
    copies.measure_peak(part)
    rates = {row[0]: row[1] for row in published(part)["Copies"].rows}
    assert set(rates) >= {"torch, pinned", "lazyckpt", "lazyckpt, and checksummed"}
    assert all(float(rate.split()[0]) > 0 for rate in rates.values())


@pytest.mark.skipif(not _engine.FAULTS, reason="only the test build looks for another driver")
def test_the_copy_alone_out_of_a_device(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for it is a stream of the device; of one that only tests have."""
    gpu = Gpu(cuda)
    monkeypatch.setenv("LAZYCKPT_CUDA_LIBRARY", str(cuda.path))
    for name in ("data_ptr", "current_streams"):
        monkeypatch.setattr(devices, name, getattr(gpu, name))

    def locate(
        storages: list[torch.UntypedStorage], where: list[torch.device], engine: _engine.Engine
    ) -> list[int] | None:
        gpu.place(torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages)
        return gpu.locate(storages, where, engine)

    monkeypatch.setattr(devices, "locate", locate)
    copier = copies.Copier(torch.device("cpu"), 4_000_000, 256 << 10, 2)
    for number in range(1, 4):
        landed_s, captured_s = copier.copy()
        assert landed_s > 0 and captured_s > 0
        assert cuda.statistics()["bytes_to_host"] == number * copier.nbytes
        assert copier.engine.ring_used_bytes == 0
    assert copier.engine.unpinned == ""
    assert cuda.statistics()["pageable_copies"] == 0
    del copier
    assert not any(cuda.live().values())


def test_the_sweep_takes_the_chunks_that_fit(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "THREADS", (1,))
    monkeypatch.setattr(part, "state_bytes", 80_000_000)
    copies.measure_sweep(part)
    tables = published(part)
    assert [row[0] for row in tables["torch's"].rows] == ["1 MiB", "2 MiB"]
    cases = [row[0] for row in tables["The"].rows]
    n = Config().copy_threads
    expected = [f"1 MiB, {n}, 4", *(f"2 MiB, {n}, {depth}" for depth in (4, 1, 2, 3, 8))]
    assert cases == expected, "and none of 8 MiB"


def test_the_loop_over_chunks_copies_all() -> None:
    source = torch.arange(10, dtype=torch.uint8)
    ring = [torch.zeros(4, dtype=torch.uint8) for _ in range(2)]
    copies._through(ring, source)
    assert [chunk.tolist() for chunk in ring] == [[8, 9, 2, 3], [4, 5, 6, 7]]


def test_training_with_and_without(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: Any) -> Any:
        raise ImportError("no such peer")

    monkeypatch.setitem(KINDS, "absent", ArmKind("absent", unavailable))
    monkeypatch.setattr(training, "ARMS", ("lazyckpt", "torch.save", "absent"))
    monkeypatch.setattr(training, "ROUNDS", 2)
    monkeypatch.setattr(timeline, "CHUNK_BYTES", 64 << 10)  # as small beside the tensors as at full size
    training.measure_pairs(part)
    tables = published(part)
    rows = {row[0]: row for row in tables["Training"].rows}
    assert rows["absent"][1] == "missing" and "absent is missing: ImportError: no such peer" in tables["Training"].notes
    for name in ("lazyckpt", "torch.save"):
        assert float(rows[name][1].split()[0]) > 0 and rows[name][4] == "2"
    assert len(tables["Breakdown"].rows) == 4
    checkpoint = read_trace(part.output.with_name("memory-timeline.json")).checkpoint(timeline.STEPS - 1)
    copied, written = ({span.args["offset"]: span for span in checkpoint.spans(kind)} for kind in (COPIES, WRITES))
    assert copied.keys() == written.keys() and len(copied) == checkpoint.metrics["chunks"]
    assert len({span.args.get("tensor") for span in copied.values()} - {None}) == LARGEST
    assert all(copied[at].end_s <= written[at].begin_s + ROUNDED_S for at in copied)
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    assert part.output.with_name("memory-timeline.png").exists() == has_matplotlib


def test_one_large_checkpoint(part: Part) -> None:
    training.measure_large(part)
    assert len(published(part)["One"].rows) == 1


def test_back_from_a_cold_cache(part: Part) -> None:
    restore.measure_restore(part)
    rows = {row[0]: row[1] for row in published(part)["Onto"].rows}
    assert list(rows) == [restore.RAW, "lazyckpt restore, in place", "lazyckpt.load", "torch.load"]
    assert all(float(gbps.split()[0]) > 0 for gbps in rows.values())


def test_the_disk_alone_is_all_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(2 * restore.READ_BYTES + 4711))
    restore.forget(file)
    assert restore.read_past_cache(file) == file.stat().st_size


def test_a_peer_that_hangs_is_out(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(Arm):
        def save(self, step: int) -> None:
            signal.setitimer(signal.ITIMER_REAL, 0.1)  # what is left of its time
            threading.Event().wait()

    monkeypatch.setitem(KINDS, "hangs", ArmKind("hangs", Hangs))
    monkeypatch.setattr(training, "ARMS", ("lazyckpt", "hangs"))
    monkeypatch.setattr(training, "ROUNDS", 1)
    training.measure_pairs(part)
    table = published(part)["Training"]
    assert any("hangs is missing: TimeoutError: took more than" in note for note in table.notes)
    assert float(table.rows[0][1].split()[0]) > 0


def test_a_part_without_time_ends_at_once(part: Part) -> None:
    part.seconds = 0.0
    part.__post_init__()
    copies.measure_sweep(part)
    assert not part.output.exists()


def test_a_part_that_hangs_is_stopped_with_its_children(tmp_path: Path) -> None:
    script = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    start = time.monotonic()
    assert run([sys.executable, "-c", script], 1.5, tmp_path / "log") == "stopped after 2 s"
    assert time.monotonic() - start < 30
    child = int((tmp_path / "log").read_text())
    deadline = time.monotonic() + 10
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_part_that_fails_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise RuntimeError('no device')"]
    assert run(command, 30, tmp_path / "log") == "exit status 1: RuntimeError: no device"
    assert run([sys.executable, "-c", ""], 30, tmp_path / "log") == ""


def test_the_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--minutes", "2", "--gb", "0.004"]
    command += ["--only", "peak", "--output", str(tmp_path), "--dir", str(tmp_path), "--tmpfs", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=os.environ, check=True, capture_output=True, timeout=120)
    report = (tmp_path / "report.md").read_text()
    assert "none: a rehearsal on the host" in report
    assert "| lazyckpt |" in report
    assert not list(tmp_path.glob("lazyckpt-bench-*"))
