"""Every part of the benchmarks runs, small; and what it says it switches off, reads or counts, it does."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import lazyckpt
from benchmarks import __main__ as command
from benchmarks import ablation, growth, latency, papers, restore, tuning, verdict, witness, workload
from benchmarks.ablation import NewRing, NotLazy, NotStreamed
from benchmarks.arms import KINDS
from benchmarks.arms.base import Arm
from benchmarks.arms.floor import FloorArm
from benchmarks.arms.lazy import LazyCkpt
from benchmarks.floor import CHUNK_BYTES, Floor, FloorUnavailable
from benchmarks.paired import Countdown, interleaved, worse
from benchmarks.parts import PARTS, Part
from benchmarks.pictures import Picture
from benchmarks.report import Section, Table, load_section, write_report
from benchmarks.settings import Settings
from benchmarks.train import contest, run_block
from benchmarks.workload import Training

SPREAD = re.compile(r"(-?[\d.]+) \((-?[\d.]+)\.\.(-?[\d.]+)\)")
KNOWN = ("floor", "lazyckpt", "torch.save")
STATE_BYTES = 1_000_000
STEPS = 2


@pytest.fixture(scope="module", autouse=True)
def floor() -> None:
    try:
        Floor(2 * CHUNK_BYTES, copy_threads=0).close()
    except FloorUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
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
    ):
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    directory = tmp_path / "scratch"
    directory.mkdir()
    return Settings(
        directory=directory,
        kinds=[KINDS[name] for name in KNOWN],
        pairs=1,
        steps=STEPS,
        state_bytes=STATE_BYTES,
        disk_bytes=2_400_000,
        largest_bytes=40_000_000,
        full=False,
        device=torch.device("cpu"),
        compute={"compute_over_write": 0.0, "min_compute_s": 0.0},
        output=tmp_path,
    )


@pytest.fixture
def training() -> Training:
    return Training(STATE_BYTES)


def spreads(table: Table) -> list[tuple[float, float, float]]:
    """Middle, least, most of every figure that has them."""
    found = [SPREAD.match(cell) for row in table.rows for cell in row]
    return [tuple(map(float, match.groups())) for match in found if match]  # type: ignore[misc]


SLOW = {"memory": pytest.mark.slow, "witness": pytest.mark.slow}  # processes of their own


@pytest.mark.parametrize("part", [pytest.param(p, marks=SLOW.get(p, ())) for p in PARTS if p != "frameworks"])
def test_a_part_measures(part: str, settings: Settings) -> None:
    """frameworks: see test_benchmarks.py."""
    told: list[str] = []
    tables = list(PARTS[part].measure(settings, told.append))
    assert tables and told
    for table in tables:
        assert table.rows
        missing = {row[0] for row in table.rows if "missing" in row}
        assert missing <= {"fio"}, table.notes  # it writes whole chunks only
        assert all(least <= middle <= most for middle, least, most in spreads(table))
        if part == "phases":
            assert (settings.output / "phases-timeline.png").stat().st_size > 10_000
        if "minus" in " ".join(table.columns) or "forks" in table.title or part in ("memory", "witness"):
            continue
        assert all(least >= 0 for _, least, _ in spreads(table))
        for points in table.picture.lines.values() if table.picture else ():
            assert all(math.isfinite(value) and value > 0 for _, values in points for value in values)


# Training with and without checkpoints


def test_ratios_are_those_of_the_blocks_and_blocked_time_is_within(
    training: Training, tmp_path: Path, settings: Settings
) -> None:
    with contest(settings.kinds, training, STEPS, tmp_path / "arms", **settings.compute) as one:
        one.run(2, lambda text: None)
    for series in one.series.values():
        assert not series.failure
        assert series.ratio == [
            pytest.approx(s / none) for s, none in zip(series.step_s, series.none_step_s, strict=True)
        ]
        assert all(0 < blocked < step for blocked, step in zip(series.blocked_s, series.step_s, strict=True))
        assert [rate * s * 1e9 for rate, s in zip(series.durable, series.durable_s, strict=True)] == [
            pytest.approx(one.state_bytes)
        ] * 2


@pytest.mark.parametrize(("every", "saves"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_a_checkpoint_in_every_nth_step(training: Training, tmp_path: Path, every: int, saves: int) -> None:
    saved: list[int] = []

    class Counting(Arm):
        def save(self, step: int) -> None:
            saved.append(step)

    block = run_block(training, Counting(training, tmp_path), 4, 1, every)
    assert saved == list(range(1, 5, every)) and len(block.blocked_s) == len(saved) == saves


# What is switched off


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Callable[[type[LazyCkpt]], LazyCkpt]]:
    """The arm, after a block; the state is large enough for a write to begin before all is copied."""
    training = Training(50_000_000)
    arms: list[LazyCkpt] = []

    def of(kind: type[LazyCkpt]) -> LazyCkpt:
        arms.append(kind(training, tmp_path, ring=1.0, chunk_bytes=64 << 10))
        run_block(training, arms[-1], 3, 1)
        return arms[-1]

    yield of
    for arm in arms:
        arm.close()


def test_without_lazy_copies_all_is_eager(saved: Callable[[type[LazyCkpt]], LazyCkpt]) -> None:
    state_bytes = 3 * sum(p.nbytes for p in saved(NotLazy).training.model.parameters())
    assert all(m.eager_bytes >= state_bytes for m in saved(NotLazy).metrics)
    assert all(m.eager_bytes < state_bytes / 2 for m in saved(LazyCkpt).metrics)


def test_without_streaming_nothing_is_written_before_all_is_copied(
    saved: Callable[[type[LazyCkpt]], LazyCkpt],
) -> None:
    for metrics in saved(NotStreamed).metrics:
        last_copy_s = max(event.copy_end_s for event in metrics.timeline)
        assert all(event.write_begin_s >= last_copy_s for event in metrics.timeline)


def test_without_a_kept_ring_every_checkpoint_has_its_own(
    saved: Callable[[type[LazyCkpt]], LazyCkpt], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    engine = ablation._engine.Engine
    monkeypatch.setattr(ablation._engine, "Engine", lambda **knobs: made.append(engine(**knobs)) or made[-1])
    arm = saved(NewRing)
    assert len(made) == 1 + len(arm.metrics) and arm._checkpointer._saver.engine is made[-1]
    assert (
        torch.load(arm.directory / "step-00000003" / "state.pt")["model"].keys()
        == arm.training.model.state_dict().keys()
    )


def test_a_second_pass_for_the_checksum_writes_the_same(training: Training, tmp_path: Path) -> None:
    files = []
    for fused in (True, False):
        directory = tmp_path / str(fused)
        directory.mkdir()
        arm = FloorArm(training, directory, ring=1.0, fused=fused)
        arm.save(1)
        arm.drain()
        files.append(arm.path(1).read_bytes())
        arm.close()
    assert files[0] == files[1] and len(files[0]) > STATE_BYTES / 2


def test_a_floor_does_not_take_addresses_on_a_gpu_for_its_own(training: Training, tmp_path: Path) -> None:
    training.device = torch.device("cuda")
    with pytest.raises(FloorUnavailable, match="host memory"):
        FloorArm(training, tmp_path, ring=1.0)


# The page witness, and the verdicts where there is none


def lacks_pages() -> str:
    return lazyckpt._engine.page_witness()


@pytest.mark.skipif(bool(lacks_pages()), reason=lacks_pages() or "there is a page witness")
def test_both_witnesses_take_turns_with_no_checkpoint(training: Training, tmp_path: Path) -> None:
    found = witness.compare(training, 3, tmp_path, lambda text: None)
    assert not found.failures
    assert {arm: {len(column) for column in vars(times).values()} for arm, times in found.times.items()} == {
        witness.NONE: {3},
        witness.VERSIONS: {3},
        witness.PAGES: {3},
    }
    assert found.eager_bytes[witness.PAGES] >= found.eager_bytes[witness.VERSIONS]
    assert found.state_bytes == 3 * sum(p.nbytes for p in training.model.parameters())
    for arm in (witness.VERSIONS, witness.PAGES):
        times = found.times[arm]
        assert all(0 < save < durable for save, durable in zip(times.save, times.durable, strict=True))
        assert all(0 <= gate < step for gate, step in zip(times.gate, times.step, strict=True))
    assert not any(found.times[witness.NONE].durable)


@pytest.mark.skipif(bool(lacks_pages()), reason=lacks_pages() or "there is a page witness")
def test_many_tensors_are_trained(tmp_path: Path) -> None:
    job = witness.ManyTensors(latency.Case("small", ((10, 10_000),)))
    before = [parameter.detach().clone() for parameter in job.model.parameters()]
    assert not witness.compare(job, 1, tmp_path, lambda text: None).failures
    assert not any(torch.equal(old, new) for old, new in zip(before, job.model.parameters(), strict=True))


def test_a_machine_without_page_witness_has_the_other_rows(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lazyckpt._engine.page_witness", lambda **_: "userfaultfd: not permitted")
    found = witness.compare(training, 1, tmp_path, lambda text: None)
    assert "not permitted" in found.failures[witness.PAGES]
    rows = {row[0]: row[1:] for row in witness._table("small pages", found).rows}
    assert set(rows[witness.PAGES]) == {"missing"} and "missing" not in rows[witness.VERSIONS]


@pytest.fixture
def verdict_arms(training: Training, tmp_path: Path) -> Iterator[dict[str, verdict.Arm]]:
    with ExitStack() as stack:
        arms = {}
        for name in ("versions", verdict.UNSOUND):
            checkpointer = stack.enter_context(lazyckpt.Checkpointer(tmp_path / str(len(arms)), witness="versions"))
            checkpointer.track(model=training.model, optimizer=training.optimizer)
            arms[name] = verdict.Arm(name, checkpointer, training)
        training.compute()
        training.optimizer.step()
        yield arms


@pytest.mark.parametrize("situation", [verdict.asleep, verdict.prompt, verdict.one_call])
def test_a_verdict_waits_for_the_call_that_the_main_thread_is_in(
    verdict_arms: dict[str, verdict.Arm], situation: Callable[[verdict.Arm, float], lazyckpt.SaveHandle]
) -> None:
    waited = {}
    for name, arm in verdict_arms.items():
        arm.training.optimizer.step()
        handle = situation(arm, 0.4)
        handle.result(timeout=60)
        waited[name] = handle.metrics.verdict_s
    assert waited[verdict.UNSOUND] < 0.05 < waited["versions"]


def test_unpublished_checkpoints_are_counted(verdict_arms: dict[str, verdict.Arm]) -> None:
    arm = verdict_arms["versions"]
    handles = []
    with verdict._Sampler(handles) as sampler:
        handles.append(arm.save())
        time.sleep(0.5)
        handles[0].result(timeout=60)
        time.sleep(0.1)
    assert max(sampler.unpublished) == max(sampler.waiting) == 1 and sampler.unpublished[-1] == 0


# What is read


def test_a_restore_that_does_not_give_the_bytes_back_is_missing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = torch.load

    def load_wrong(*arguments: object, **options: object) -> object:
        state = load(*arguments, **options)
        if not options.get("mmap") and isinstance(state, dict):
            state["model"]["0"][0] += 1
        return state

    monkeypatch.setattr(torch, "load", load_wrong)
    for table in restore.measure(settings, lambda text: None):
        rows = {row[0]: row[1:] for row in table.rows}
        assert [name for name, cells in rows.items() if "missing" in cells] == ["torch.load, copy"]


# The default against the best


@pytest.mark.parametrize(("share", "verdict"), [(0.95, "within 10% of it"), (0.85, "not within 10% of it")])
def test_the_verdict_on_the_default(share: float, verdict: str) -> None:
    text = tuning._verdict({"default": [1.0, 1.0], "worse": [1.2, 1.3], "better": [share, share]})
    assert f"{share:.0%} of the speed of the best (better): {verdict}." in text


# Rounds


def test_rounds_drop_what_warms_up_and_who_fails() -> None:
    calls: list[str] = []

    def value(name: str) -> float:
        calls.append(name)
        if name == "fails" and calls.count("fails") == 2:
            raise OSError("of no use")
        return float(calls.count(name))

    told: list[str] = []
    arms = {name: (lambda name=name: value(name)) for name in ("stays", "fails")}
    values, failures = interleaved(arms, 3, told.append, prepare=lambda: calls.append("prepared"))
    assert values["stays"] == [2.0, 3.0, 4.0] and failures == {"fails": "OSError: of no use"}
    assert calls.count("prepared") == 4 + 2
    assert told[0].startswith("1/8: ") and re.fullmatch(r"8/8, \d+ s left: (stays|fails)", told[-1])


def test_what_is_left_is_estimated_from_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 100.0, 110.0, 120.0])
    monkeypatch.setattr("benchmarks.paired.time.perf_counter", lambda: next(clock))
    told: list[str] = []
    tell = Countdown(told.append, 3)
    for name in "abc":
        tell(name)
    assert told == ["1/3: a", "2/3, 20 s left: b", "3/3, 10 s left: c"]


def test_pairs_in_which_it_was_worse() -> None:
    assert worse([2.0, 1.0, 3.0, 9.0], [1.0, 2.0, 1.0]) == "2/3"


# The report


def a_table() -> Table:
    picture = Picture("size", "GB/s", log_x=True)
    picture.add("ours", 1.0, [1.0, 2.0])
    picture.add("ours", 2.0, [3.0])
    picture.add("theirs", 2.0, [])
    table = Table("How | fast", ["arm", "GB/s"], picture=picture)
    table.add("ours", "1.5 (1.0..2.0)")
    return table


def test_parts_measured_apart_are_one_report(tmp_path: Path) -> None:
    for part, when, load in (("one", "2026-01-01", "0.1"), ("two", "2026-01-02", "0.2")):
        Section(part, {"CPU": "fast", "load": load}, f"measure {part}", [a_table()], 3.0, when).store(tmp_path)
    sections = [load_section(tmp_path, part) for part in ("two", "one")]
    assert load_section(tmp_path, "three") is None
    assert sections[0] == Section("two", {"CPU": "fast", "load": "0.2"}, "measure two", [a_table()], 3.0, "2026-01-02")
    text = write_report(tmp_path, [s for s in sections if s]).read_text()
    assert text.index("- load: 0.2") < text.index("# two") < text.index("# one") < text.index("load: 0.1")
    assert text.count("- CPU: fast") == 1 and text.count("| ours | 1.5 (1.0..2.0) |") == 2


def test_pictures_of_numbers_and_of_words(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = Table("Words", ["arm", "x"], picture=Picture("without", "time over none"))
    assert words.picture is not None
    words.picture.add("", "everything on", [1.0, 1.1])
    words.add("everything on", "1.05")
    section = Section("one", {}, "", [a_table(), words], 1.0)
    text = write_report(tmp_path, [section]).read_text()
    for number, word in ((1, "GB/s"), (2, "everything on")):
        assert f"](one-{number}.svg)" in text and word in (tmp_path / f"one-{number}.svg").read_text()


def test_a_part_that_fails_does_not_stop_the_others_and_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runs: list[str] = []

    def fails(settings: Settings, progress: Callable[[str], None]) -> Iterator[Table]:
        raise OSError("no disk")

    def measures(settings: Settings, progress: Callable[[str], None]) -> Iterator[Table]:
        runs.append("two")
        progress("at work")
        yield a_table()

    monkeypatch.setattr(command, "PARTS", {"one": Part("fails", fails, quick=True), "two": Part("runs", measures)})
    arguments = ["benchmarks", "--full", "--dir", str(tmp_path / "disk"), "--output", str(tmp_path / "report")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == "not measured: one"
    assert load_section(tmp_path / "report", "one") is None and runs == ["two"]
    assert "one failed: OSError: no disk" in capfd.readouterr().err
    assert "no disk" in (tmp_path / "report" / "stderr.log").read_text()

    monkeypatch.setattr(sys, "argv", [*arguments, "--resume"])
    with pytest.raises(SystemExit):
        command.main()
    assert runs == ["two"], "what the report has is not measured again"
    monkeypatch.setattr(sys, "argv", [*arguments, "--only", "two"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 0 and runs == ["two", "two"]
    assert "two: runs; took 0 s with" in capfd.readouterr().err
