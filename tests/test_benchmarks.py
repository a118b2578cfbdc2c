"""The benchmarks run from the command to the report. What they measure in a test is not looked at."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
import torch
from processes import run_module, spawn

from benchmarks import __main__ as command
from benchmarks import frameworks, growth, latency, mirrors, papers, planning, verdict, witness, workload
from benchmarks.arms.dcp import keep_open
from benchmarks.floor import CHUNK_BYTES, Floor, FloorUnavailable
from benchmarks.gpu import calls, prepare, stages
from benchmarks.gpu.day import run
from benchmarks.gpu.stages import Day
from benchmarks.parts import PARTS
from benchmarks.ranks import deepspeed_saves, replica_saves
from benchmarks.report import load_section
from benchmarks.settings import Settings

ROOT = Path(__file__).parent.parent
KNOWN = "floor,lazyckpt,torch.save"
NO_COMPUTE = {"compute_over_write": 0.0, "min_compute_s": 0.0}


def in_this_process(name: str, directory: Path, device: torch.device) -> planning.Result:
    """As a process of its own does it, and tells on its last line."""
    result = planning.Job(planning.ROWS[name], directory / name, device).measure(planning.SAVES)
    return planning.told(json.dumps(asdict(result)))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every part take about a second."""
    try:
        Floor(2 * CHUNK_BYTES, copy_threads=0).close()
    except FloorUnavailable as error:
        pytest.skip(str(error))
    case = latency.Case("small", ((10, 10_000),))
    nested = planning.Row(planning.Nested(1), witness="versions")
    for module, name, value in (
        (workload, "LAYERS", 1),
        (workload, "VOCABULARY", 64),
        (latency, "CASES", (case,)),
        (latency, "GIGABYTE", case),
        (latency, "LEAST_SAVES", 2),
        (papers, "ACCUMULATION", (1, 2)),
        (papers, "MODEL_SHARES", (1.0,)),
        (papers, "INTERVALS", (1, 2)),
        (papers, "COPY_THREADS", (1,)),
        (papers, "BUFFERED_BYTES", (4 << 20,)),
        (growth, "TENSORS", (10, 100, 1)),
        (growth, "CHUNK_MIB", (1, 4)),
        (growth, "RING_SHARES", (0.25, 1.0)),
        (growth, "IN_FLIGHT", (1, 2)),
        (planning, "SAVES", 2),
        (planning, "ROWS", {"small": replace(planning.ROWS["402 of 8 KB"], state=case, ways=True), "nested": nested}),
        (planning, "in_child", in_this_process),
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


# Some start processes of their own, which takes half a minute. Trainers, many ranks and kills have tests of their own.
ALL = [
    name for name in PARTS if name not in ("frameworks", "ranks", "replicas", "replicated-save", "planning", "goodput")
]
QUICK = [name for name in ALL if PARTS[name].quick and name != "memory"] + ["phases"]


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("small", "spawned_is_forked")
def test_every_rank_saves_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("small", "spawned_is_forked")
def test_replicas_are_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ("--pairs", 1, "--train-gb", 0.04)
    folders = ("--dir", tmp_path / "disk", "--output", tmp_path / "report")
    assert benchmarks(monkeypatch, "--only", "replicas", *sizes, *folders) == 0
    section = load_section(tmp_path / "report", "replicas")
    assert section is not None
    for table in section.tables:
        assert len(table.rows) == 6 and not any("missing" in row for row in table.rows)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("small", "spawned_is_forked")
def test_saves_of_replicas_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_saves, "RANKS", (2,))
    monkeypatch.setattr(replica_saves, "LEAST_PAIRS", 1)
    sizes = ("--pairs", 1, "--train-gb", 0.03)
    folders = ("--dir", tmp_path / "disk", "--output", tmp_path / "report")
    assert benchmarks(monkeypatch, "--only", "replicated-save", *sizes, *folders) == 0
    section = load_section(tmp_path / "report", "replicated-save")
    assert section is not None
    (table,) = section.tables
    alone, each, together = table.rows
    copied = [row[table.columns.index("copied, MB")] for row in table.rows]
    assert copied == ["30.0", "30.0 + 30.0", "15.0 + 15.0"]
    assert alone[-1] == each[-1] == "-" and together[-1].startswith(("1 ± 0.2: ", "needs 2 cores"))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("small", "spawned_is_forked")
@pytest.mark.skipif(not os.path.isdir(deepspeed_saves.IN_A_CLONE), reason="make setup has not installed DeepSpeed")
def test_saves_of_deepspeed_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_saves, "KINDS", ((2, "fp32"),))
    monkeypatch.setattr(deepspeed_saves, "WRITERS", {"python": "python"})
    sizes = ("--pairs", 1, "--train-gb", 0.1, "--disk-gb", 0.02)  # one of 20 MB
    folders = ("--dir", tmp_path / "disk", "--output", tmp_path / "report")
    assert benchmarks(monkeypatch, "--only", "deepspeed", *sizes, *folders) == 0
    section = load_section(tmp_path / "report", "deepspeed")
    assert section is not None
    for table in section.tables:
        assert not any("missing" in row for row in table.rows), table.notes
        rows = {row[0].removeprefix("ZeRO 2, fp32: "): dict(zip(table.columns, row, strict=True)) for row in table.rows}
        lazy = {"lazyckpt", "lazyckpt, tag_validation Ignore"}
        assert rows.keys() == {"torch engine", "python", *lazy}
        assert {name for name, row in rows.items() if row["eager, MB"] == "0.00"} == lazy
        assert {name for name, row in rows.items() if row["goal"].startswith("own ≥ 20: ")} == lazy


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("small")
def test_mirrors_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setattr(mirrors, "LISTED", 1200)
    monkeypatch.setattr(mirrors, "BYTES_PER_S", 10e6)  # 1 s, for ten pairs of windows
    monkeypatch.setattr(mirrors, "WINDOW_S", 0.02)
    folders = ("--dir", tmp_path / "disk", "--output", tmp_path / "report")
    assert benchmarks(monkeypatch, "--only", "mirrors", "--pairs", 1, "--train-gb", 0.02, *folders) == 0
    section = load_section(tmp_path / "report", "mirrors")
    assert section is not None
    assert not any("missing" in row for table in section.tables for row in table.rows), section.tables
    training, *restores, listings = section.tables
    assert [row[0] for row in training.rows] == [mirrors.NONE, mirrors.FOLDER, mirrors.STORE]
    assert all(float(row[2]) > 0 for row in training.rows[1:])
    assert [len(table.rows) for table in restores] == [3, 3]
    first, indexed = (int(row[-1]) for row in listings.rows)
    assert first >= 1200 and indexed <= 5


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("small", "spawned_is_forked")
def test_planning_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of states in one process, and on two ranks."""
    sizes = ("--pairs", 1, "--steps", 4, "--train-gb", 0.001, "--arms", "lazyckpt")
    folders = ("--dir", tmp_path / "disk", "--output", tmp_path / "report")
    assert benchmarks(monkeypatch, "--only", "planning", *sizes, *folders) == 0
    section = load_section(tmp_path / "report", "planning")
    assert section is not None
    cost, phases, ways, calls = section.tables
    assert [row[0] for row in cost.rows] == [row[0] for row in phases.rows] == ["small", "nested"]
    assert [row[0] for row in ways.rows] == ["small"] and len(ways.rows[0]) == 5
    assert [row[0] for row in calls.rows] == ["lazyckpt"]
    rows = [row for table in section.tables for row in table.rows]
    assert not [row for row in rows if "missing" in row or "nan" in " ".join(row)]
    watched = {row[0]: float(row[phases.columns.index("watch")]) for row in phases.rows}
    assert watched["nested"] == 0.0, "versions watch no page"
    assert re.fullmatch(r"plan / state_dict\(\) ≤ 4: (met|missed)", cost.rows[0][-1])
    assert calls.rows[0][-1].startswith("call alone ≤ 5: ")


# The day on a GPU (docs/internals/gpu.md), rehearsed on the host


def new_day(call: str, folder: Path) -> Day:
    return Day(call, "cpu", 2000.0, folder / "out", folder, folder)  # others may keep the machine busy


PARTS_OF = {"right": {"bits", "waits", "peak"}, "fast": {"pairs", "peers", "disk", "large", "restore"}}
SHORT = {"right": PARTS_OF["right"], "fast": {"pairs", "restore"}}


def rehearse(call: str, parts: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage runs, is in the summary, and leaves its tables. What it measures in a test is not looked at."""
    monkeypatch.setattr(stages, "SHORTER", 0.05)
    monkeypatch.setattr(calls, "CORE", ("tests/gpu/test_real.py::test_restore_of_many_small_tensors",))
    tests, part = Day.tests, Day.part
    monkeypatch.setattr(Day, "tests", lambda self, name, *arguments: name == "core" and tests(self, name, *arguments))
    monkeypatch.setattr(
        Day, "part", lambda self, module, name, *told: part(self, module, name, *told) if name in parts else []
    )
    run(new_day(call, tmp_path))
    out = tmp_path / "out"
    summary = (out / "summary.txt").read_text()
    assert "ENDED" not in summary and "REFUTED" not in summary and "-- " not in summary.partition("LOOK AT")[2], summary
    assert {path.stem for path in out.glob("*.json")} == parts, summary
    assert all(f"-- {name}: done" in summary for name in parts), summary
    assert not list(tmp_path.glob("lazyckpt-day*-*[0-9]-*"))
    if call == "right":
        assert "tests passed: 1" in summary and "bits are right: 1 (expected 1)" in summary


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("call", PARTS_OF)
def test_a_call_of_the_day_is_rehearsed(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rehearse(call, PARTS_OF[call], tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("call", SHORT)
def test_a_call_of_the_day_is_rehearsed_in_short(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts are forks that have imported torch, and some are left out."""
    start = stages.run

    def fork(command: list[str], limit_s: float, output: int, environment: dict[str, str]) -> str:
        _, _, module, *arguments = command
        if not module.startswith("benchmarks."):
            return start(command, limit_s, output, environment)
        spawn(tmp_path / "out" / "log.txt", run_module, (module, arguments), 1)
        return "done"

    monkeypatch.setattr(stages, "run", fork)
    monkeypatch.setattr(calls, "FACTS", "true")
    rehearse(call, SHORT[call], tmp_path, monkeypatch)


@pytest.mark.long
def test_a_day_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    """Of what was finished: the summary says it, and the tables are whole."""
    folder = tmp_path / "out"
    command = [sys.executable, "benchmarks/gpu/day.py", "right", "--device", "cpu", "--out", str(folder)]
    command += ["--tmpfs", str(tmp_path), "--disk", str(tmp_path), "--seconds", "2000"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        end = time.monotonic() + 280
        while "-- bits: done" not in (folder / "summary.txt").read_text() if folder.exists() else True:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    summary = (folder / "summary.txt").read_text()
    assert "-- facts: done" in summary and "-- bits: done" in summary
    (table,) = json.loads((folder / "bits.json").read_text())
    assert ["bits", "1.0000"] in table["rows"]


def test_what_is_refuted_is_said_again_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "LEAST_S", 0)
    told = new_day("fast", tmp_path)
    told.is_rehearsal = False
    told.check("peak", 44)
    told.check("peak", 55.1)
    told.check("torn", 7)
    told.check("dcp", None)
    told.stage("slow", 2, [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"])
    told.conclude()
    summary = (tmp_path / "out" / "summary.txt").read_text()
    again = summary.split("LOOK AT:")[1]
    assert "REFUTED  pinned copies by torch, GB/s: 44" in again and "the virtual machine" in again
    assert "wait_captured(): 7" in again and "MISSING" in again and "55.1" not in again
    assert "slow: STOPPED after 2 s" in again and "begun" in (tmp_path / "out" / "log.txt").read_text()


def test_an_engine_of_the_same_sources_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one call packs, the next one unpacks, on a machine that has nothing of it; other sources are built."""
    for machine in ("first", "second"):
        root = tmp_path / machine
        (root / "lazyckpt").mkdir(parents=True)
        (root / "build").mkdir()
        (root / "csrc").mkdir()
        (root / "csrc" / "a.cc").write_text("int a;")
        for name, path in {"ROOT": "", "CARRIED": "build/carried", "STAMP": "build/engine.sha"}.items():
            monkeypatch.setattr(prepare, name, root / path)
        if machine == "first":
            (root / "lazyckpt" / "_engine.so").write_text("built")
            prepare.STAMP.write_text(prepare.digest_of_sources())
            prepare.pack(tmp_path / "engine.tgz")
    assert not prepare.has_engine()
    shutil.unpack_archive(tmp_path / "engine.tgz", prepare.ROOT, "gztar")
    assert prepare.has_engine() and (prepare.ROOT / "lazyckpt" / "_engine.so").read_text() == "built"
    (prepare.ROOT / "csrc" / "a.cc").write_text("int b;")
    assert not prepare.has_engine()


def test_a_stager_that_closes_itself_is_kept_open() -> None:
    """As in torch 2.11; another version's is left alone."""

    class Cache:
        closed = 0

        def close(self) -> None:
            self.closed += 1

    class Broken:
        def __init__(self) -> None:
            self._state_dict_stager = Cache()

        def _stage(self) -> None:
            self._state_dict_stager.close()

    class Whole(Broken):
        def _stage(self) -> None:
            pass

    for stager, closed in ((Broken(), 0), (Whole(), 1)):
        keep_open(stager)
        stager._stage()
        stager._state_dict_stager.close()
        assert stager._state_dict_stager.closed == closed
