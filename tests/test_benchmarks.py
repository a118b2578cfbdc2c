"""The benchmarks run from the command to the report. What they measure in a test is not looked at."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import ablation, frameworks, growth, latency, papers, tuning, verdict, witness, workload
from benchmarks.floor import CHUNK_BYTES, Floor, FloorUnavailable
from benchmarks.gpu import restore, training
from benchmarks.gpu.part import Part as GpuPart
from benchmarks.parts import PARTS
from benchmarks.report import load_section
from benchmarks.settings import Settings

ROOT = Path(__file__).parent.parent
KNOWN = "floor,lazyckpt,torch.save"
NO_COMPUTE = {"compute_over_write": 0.0, "min_compute_s": 0.0}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every part take about a second."""
    try:
        Floor(2 * CHUNK_BYTES, copy_threads=0).close()
    except FloorUnavailable as error:
        pytest.skip(str(error))
    case = latency.Case("small", ((10, 10_000),))
    for module, name, value in (
        (workload, "LAYERS", 1),
        (workload, "VOCABULARY", 64),
        (latency, "CASES", (case,)),
        (latency, "GIGABYTE", case),
        (latency, "LEAST_SAVES", 2),
        (ablation, "SMALL", case),
        (ablation, "ACCUMULATION", (1, 2)),
        (papers, "MODEL_SHARES", (1.0,)),
        (papers, "INTERVALS", (1, 2)),
        (papers, "COPY_THREADS", (1,)),
        (papers, "BUFFERED_BYTES", (4 << 20,)),
        (growth, "TENSORS", (10, 100, 1)),
        (growth, "CHUNK_MIB", (1, 4)),
        (growth, "RING_SHARES", (0.25, 1.0)),
        (growth, "IN_FLIGHT", (1, 2)),
        (tuning, "CHUNK_MIB", (2, 8)),
        (tuning, "IO_DEPTH", (8,)),
        (tuning, "COPY_THREADS", (1,)),
        (verdict, "SECONDS", 0.05),
        (witness, "ROUNDS_PER_PAIR", 1),
        (witness, "TENSORS", {}),
        (command, "Settings", lambda **told: Settings(**{**told, "compute": NO_COMPUTE})),
    ):
        monkeypatch.setattr(module, name, value)


def benchmarks(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str | int | None:
    """Runs ``python -m benchmarks`` and returns what it exits with."""
    monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        command.main()
    return ended.value.code


# Some start processes of their own, which takes half a minute. Trainers and many ranks have tests of their own.
ALL = [name for name in PARTS if name not in ("frameworks", "ranks")]
QUICK = [name for name in ALL if PARTS[name].quick and name != "memory"] + ["phases"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parts", [QUICK, pytest.param(ALL, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_every_part_is_in_the_report(
    small: None, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    sizes = ("--pairs", 1, "--steps", 2, "--train-gb", 0.001, "--disk-gb", 0.0024, "--largest-gb", 0.04)
    folders = ("--dir", tmp_path / "disk", "--output", tmp_path / "report")
    assert benchmarks(monkeypatch, "--full", "--only", ",".join(parts), "--arms", KNOWN, *sizes, *folders) == 0
    report = (tmp_path / "report" / "report.md").read_text()
    assert [name for name in parts if f"\n# {name}\n" not in report] == []
    assert [line for line in report.splitlines() if " is missing: " in line and "fio" not in line] == []
    for picture in [*re.findall(r"\]\(([\w-]+\.svg)\)", report), "phases-timeline.png"]:
        assert (tmp_path / "report" / picture).stat().st_size > 5_000
    assert "](train-1.svg)" in report


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", [["accelerate"], pytest.param([*frameworks.TRAINERS], marks=pytest.mark.slow)])
def test_trainers_are_measured(names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with lazyckpt and without checkpoints."""
    ours = {name: replace(frameworks.TRAINERS[name], arms=frameworks.TRAINERS[name].arms[-1:]) for name in names}
    monkeypatch.setattr(frameworks, "TRAINERS", ours)
    table = frameworks.measure(
        pairs=1, checkpoints=1, state_bytes=10_000_000, directory=tmp_path, progress=print, compute_s=0
    )
    assert len(table.rows) == 2 * len(names) and not any("missing" in row for row in table.rows)


# Many ranks


@pytest.mark.filterwarnings("ignore")
def test_every_rank_saves_and_loads(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ("--pairs", 1, "--steps", 4, "--train-gb", 0.001, "--arms", "floor,lazyckpt,dcp")
    folders = ("--dir", tmp_path / "disk", "--output", tmp_path / "report")
    assert benchmarks(monkeypatch, "--only", "ranks", *sizes, *folders) == 0
    section = load_section(tmp_path / "report", "ranks")
    assert section is not None
    cost, agreement, load_on_two, load_on_one = section.tables
    arms = ["floor", "lazyckpt", "dcp"]
    assert [row[0] for row in cost.rows] == [row[0] for row in agreement.rows] == arms
    collectives = {row[0]: row[agreement.columns.index("collectives")] for row in agreement.rows}
    assert collectives["floor"] == collectives["lazyckpt"] == "0.0 (0.0..0.0)"
    assert float(collectives["dcp"].split()[0]) > 0
    loads = [[row[0] for row in table.rows if "missing" not in row] for table in (load_on_two, load_on_one)]
    assert loads[0] == loads[1] and {"lazyckpt restore", "dcp, dcp.load"} <= set(loads[0])


# On a GPU, rehearsed on the host


@pytest.fixture
def part(tmp_path: Path) -> GpuPart:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    return GpuPart("memory", torch.device("cpu"), 60.0, 4_000_000, directory, tmp_path / "memory.json")


@pytest.mark.parametrize("measure", [training.measure_pairs, training.measure_large, restore.measure_restore])
def test_a_part_for_the_gpu_runs(
    measure: Callable[[GpuPart], None], part: GpuPart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "ARMS", ("lazyckpt", "torch.save"))
    monkeypatch.setattr(training, "ROUNDS", 1)
    measure(part)
    assert '"rows": [[' in part.output.read_text().replace("\n", "").replace("  ", "")


def test_the_report_of_the_gpu_benchmark(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--minutes", "2", "--gb", "0.004", "--only", "peak"]
    arguments += ["--output", str(tmp_path), "--dir", str(tmp_path), "--tmpfs", str(tmp_path)]
    benchmark = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    subprocess.run(benchmark, cwd=ROOT, env=os.environ, check=True, capture_output=True, timeout=120)
    report = (tmp_path / "report.md").read_text()
    assert "none: a rehearsal on the host" in report and "| lazyckpt |" in report
