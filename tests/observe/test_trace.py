"""The timeline of a run: its events, its file, which is readable at any time, and its picture."""

from __future__ import annotations

import errno
import fcntl
import gc
import itertools
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import lazyckpt
from commands import fails, run, run_json
from lazyckpt.capture.snapshot import Snapshot
from lazyckpt.observe import trace, trace_file
from lazyckpt.tools.trace import read_trace

pytestmark = pytest.mark.usefixtures("small_tensors_are_lazy")

KIB = 1 << 10
SMALL = {"chunk_bytes": 16 * KIB, "host_buffer_bytes": 64 * KIB}


class Training:
    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 96), torch.nn.Linear(96, 32))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> None:
        self.model(torch.randn(4, 64)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, folder: Path, file: Path, steps: int = 6, **knobs: Any) -> list[lazyckpt.SaveHandle]:
        """Saves after every second step."""
        handles = []
        with lazyckpt.Checkpointer(folder, trace=file, **knobs) as ckpt:
            ckpt.track(model=self.model, optimizer=self.optimizer)
            for step in range(1, steps + 1):
                self.step()
                if step % 2 == 0:
                    handles.append(ckpt.save(step))
        return handles


@pytest.fixture
def training() -> Training:
    torch.manual_seed(0)
    return Training()


@pytest.fixture
def file(tmp_path: Path, training: Training) -> Path:
    """The trace of three checkpoints."""
    training.run(tmp_path / "run", tmp_path / "trace.json", **SMALL)
    return tmp_path / "trace.json"


def events_of(file: Path, name: str = "", phase: str = "X") -> list[dict[str, Any]]:
    events = json.loads(file.read_text())
    return [e for e in events if e["ph"] == phase and name in ("", e["name"])]


def on_tracks(file: Path, kind: int) -> list[dict[str, Any]]:
    return [e for e in events_of(file) if kind <= e["tid"] < kind + 100]


def test_every_chunk_of_every_checkpoint_is_on_the_timeline(tmp_path: Path, training: Training) -> None:
    handles = training.run(tmp_path / "run", tmp_path / "trace.json", **SMALL)
    file = tmp_path / "trace.json"
    for handle in handles:
        m = handle.metrics
        of_step = lambda kind: [e for e in on_tracks(file, kind) if e["args"]["step"] == handle.step]  # noqa: E731, B023
        (whole,) = of_step(trace.SAVES)
        assert whole["args"]["metrics"]["bytes"] == m.bytes and whole["args"]["error"] is None
        assert whole["dur"] == pytest.approx(m.durable_s * 1e6, abs=1)
        for kind, what in ((trace.COPIES, "copy"), (trace.WRITES, "write")):
            spans = of_step(kind)
            assert sorted(e["args"]["offset"] for e in spans) == sorted(c.offset for c in m.timeline)
            assert sum(e["args"]["bytes"] for e in spans) == m.bytes
            by_offset = {e["args"]["offset"]: e for e in spans}
            for chunk in m.timeline:
                seconds = getattr(chunk, f"{what}_end_s") - getattr(chunk, f"{what}_begin_s")
                assert by_offset[chunk.offset]["dur"] == pytest.approx(seconds * 1e6, abs=0.2)
                assert whole["ts"] <= by_offset[chunk.offset]["ts"] <= whole["ts"] + whole["dur"]
        assert [e["name"] for e in of_step(trace.COMMITS)] == ["create", "fsync", "commit"]
    waits = [e["dur"] for e in on_tracks(file, trace.RING)]
    assert sum(waits) == pytest.approx(sum(h.metrics.ring_wait_s for h in handles) * 1e6, abs=1)
    assert waits, "the ring holds a fifth of a checkpoint"


def test_spans_on_one_track_nest(file: Path) -> None:
    tracks: dict[int, list[tuple[float, float]]] = {}
    for e in events_of(file):
        tracks.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    assert {trace.TRAINING, trace.SAVES, trace.COPIES, trace.WRITES, trace.COMMITS} <= tracks.keys()
    for track, spans in tracks.items():
        open_until: list[float] = []
        for begin, end in sorted(spans, key=lambda s: (s[0], -s[1])):
            while open_until and open_until[-1] <= begin + 0.6:  # microseconds since 1970 are rounded
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.6, track
            open_until.append(end)


def test_iterations_and_optimizer_steps(file: Path, tmp_path: Path, training: Training) -> None:
    iterations, steps = events_of(file, "iteration"), events_of(file, "optimizer.step")
    assert len(steps) == 6 and len(iterations) == 5
    for before, iteration, after in zip(steps, iterations, steps[1:], strict=False):
        assert iteration["ts"] == pytest.approx(before["ts"] + before["dur"], abs=1)
        assert iteration["ts"] + iteration["dur"] == pytest.approx(after["ts"] + after["dur"], abs=1)
    other = torch.optim.SGD(training.model.parameters(), lr=0.0)  # counts no iterations, as it is the second one
    with lazyckpt.Saver(trace=tmp_path / "other.json"):
        for _ in range(3):
            training.step()
            other.step()
    assert len(events_of(tmp_path / "other.json", "optimizer.step")) == 3


def test_blocked_times_are_on_the_track_of_the_training(tmp_path: Path, training: Training) -> None:
    handles = training.run(tmp_path / "run", tmp_path / "trace.json", max_in_flight=1, **SMALL)
    file = tmp_path / "trace.json"
    saves = events_of(file, "save()")
    assert {e["tid"] for e in saves} == {trace.TRAINING}
    assert [e["dur"] for e in saves] == pytest.approx([h.metrics.save_blocked_s * 1e6 for h in handles], abs=1)
    for name, field in (("plan", "plan_s"), ("eager copy", "eager_wait_s"), ("wait for a place", "in_flight_wait_s")):
        seconds = [getattr(h.metrics, field) for h in handles]
        assert [e["dur"] for e in events_of(file, name)] == pytest.approx([s * 1e6 for s in seconds], abs=1)
    plans = events_of(file, "plan")
    phases = [events_of(file, f"plan: {name}") for name in ("gather", "decide", "layout", "watch", "eager copy")]
    for plan, *parts, last in zip(plans, *phases, events_of(file, "plan: hand over"), strict=True):
        assert plan["ts"] == parts[0]["ts"] and plan["dur"] == pytest.approx(
            sum(e["dur"] for e in (*parts, last)), abs=6
        )
        assert last["ts"] + last["dur"] == pytest.approx(plan["ts"] + plan["dur"], abs=2)


def test_a_wait_at_the_gate(tmp_path: Path, training: Training, disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Snapshot.wait

    def release_and_wait(snapshot: Snapshot, owner: object) -> None:
        disk.release(after_s=0.3)  # counted from the arrival at the gate, however late that is
        wait(snapshot, owner)

    with lazyckpt.Checkpointer(tmp_path / "run", trace=tmp_path / "trace.json", **SMALL) as ckpt:
        ckpt.track(model=training.model, optimizer=training.optimizer)
        training.step()
        disk.hold()
        handle = ckpt.save(1)
        monkeypatch.setattr(Snapshot, "wait", release_and_wait)
        begin = time.perf_counter()
        training.step()
        took_s = time.perf_counter() - begin
    (gate,) = events_of(tmp_path / "trace.json", "gate")
    assert gate["tid"] == trace.TRAINING and gate["args"]["step"] == 1
    # The thread may lose its core between the two measurements: the span only encloses the metric.
    assert 50e3 < handle.metrics.gate_blocked_s * 1e6 <= gate["dur"] + 1
    assert gate["dur"] <= took_s * 1e6 + 1


def test_the_ring_never_overflows_and_memory_is_that_of_the_process(file: Path) -> None:
    counts = [e["args"]["bytes"] for e in sorted(events_of(file, "ring", "C"), key=lambda e: e["ts"])]
    assert max(counts) > 16 * KIB and counts[-1] == 0
    assert all(0 <= nbytes <= SMALL["host_buffer_bytes"] for nbytes in counts)
    assert [e["ts"] for e in events_of(file, "ring", "C")] == sorted(e["ts"] for e in events_of(file, "ring", "C"))

    resident = [e["args"]["resident bytes"] for e in events_of(file, "memory", "C")]
    now = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert len(resident) >= 6 and now / 2 < max(resident) < 2 * now


def test_chunks_of_the_five_largest_tensors_have_their_names(file: Path, training: Training) -> None:
    names = {"model.1.weight": 0, "model.0.weight": 0}
    state = {f"optimizer.state.{i}.{m}": 0 for i in (0, 2) for m in ("exp_avg", "exp_avg_sq")}
    found: dict[str, int] = {}
    for e in on_tracks(file, trace.COPIES):
        if "tensor" in e["args"]:
            found[e["name"]] = found.get(e["name"], 0) + e["args"]["bytes"]
    assert len(found) == trace.LARGEST and set(found) <= {*names, *state}
    assert {"model.1.weight", "optimizer.state.2.exp_avg", "optimizer.state.2.exp_avg_sq"} <= found.keys()
    # a chunk has the name of the tensor with most bytes in it
    whole = 3 * 4 * training.model[1].weight.numel()
    assert found["model.1.weight"] == pytest.approx(whole, abs=3 * 2 * 16 * KIB)


def test_names_in_several_files(tmp_path: Path, training: Training) -> None:
    training.step()
    with lazyckpt.Saver(trace=tmp_path / "trace.json") as saver, saver.stage(tmp_path / "folder") as folder:
        folder.add("a.pt", {"weights": torch.ones(5000)})
        folder.add("b.safetensors", {"more": torch.ones(3000)})
        folder.save()
    named = {(e["args"]["file"], e["args"].get("tensor")) for e in on_tracks(tmp_path / "trace.json", trace.WRITES)}
    assert named - {("b.safetensors", None)} == {("a.pt", "a.pt.weights"), ("b.safetensors", "b.safetensors.more")}


def test_a_checkpoint_that_fails_is_there_with_its_error(tmp_path: Path, training: Training, disk: Any) -> None:
    folder = tmp_path / "run"
    with lazyckpt.Checkpointer(folder, trace=tmp_path / "trace.json", on_error="warn", **SMALL) as ckpt:
        ckpt.track(model=training.model, optimizer=training.optimizer)
        training.step()
        disk.hold()
        with pytest.warns(UserWarning, match="checkpoint not saved"):
            handle = ckpt.save(1)
            with torch.no_grad():
                training.model[1].weight.zero_()  # the largest, and so the last to be copied
            disk.release()
            ckpt._saver.drain()
    (whole,) = on_tracks(tmp_path / "trace.json", trace.SAVES)
    assert whole["args"]["error"] == str(handle.exception())
    assert [e["name"] for e in on_tracks(tmp_path / "trace.json", trace.COMMITS)] == ["create"]
    assert read_trace(tmp_path / "trace.json").checkpoint().error == whole["args"]["error"]


# the file


def test_what_a_killed_run_leaves_can_be_read_and_added_to(
    file: Path, tmp_path: Path, training: Training, trials: Any
) -> None:
    whole = file.read_bytes()
    first = whole.index(b",\n")
    torn = tmp_path / "torn.json"
    cuts = [first, len(whole) - 1, len(whole) - 2, len(whole) - 3]
    cuts += [trials.random.randrange(first, len(whole)) for _ in range(trials.count(20, 300))]
    checkpoints = len(read_trace(file).checkpoints)
    for cut in cuts:
        torn.write_bytes(whole[:cut])
        left = len(read_trace(torn).checkpoints)
        assert left <= checkpoints
        lazyckpt.Saver(trace=torn).close()
        json.loads(torn.read_bytes())
        assert len(read_trace(torn).checkpoints) == left
        assert read_trace(torn).events[: left and 10] == read_trace(file).events[: left and 10]


def test_two_runs_in_one_file_with_the_same_process_id(
    tmp_path: Path, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container the training is always process 1, so the numbers of its checkpoints repeat."""
    for run_name in "ab":
        monkeypatch.setattr(trace, "_numbers", itertools.count(1))
        training.run(tmp_path / run_name, tmp_path / "trace.json", steps=2, **SMALL)
    paths = [c["args"]["path"] for c in read_trace(tmp_path / "trace.json").checkpoints]
    assert paths == [str(tmp_path / run_name / "step-00000002") for run_name in "ab"]
    newest = read_trace(tmp_path / "trace.json").checkpoint()
    assert newest.path == paths[1]
    assert sum(s.args["bytes"] for s in newest.spans(trace.WRITES)) == newest.metrics["bytes"]
    assert min(s.begin_s for s in newest.own) == 0 and min(at for at, _ in newest.ring) > 0


def test_the_file_is_readable_while_the_run_goes_on(tmp_path: Path, training: Training) -> None:
    with lazyckpt.Checkpointer(tmp_path / "run", trace=tmp_path / "trace.json") as ckpt:
        ckpt.track(model=training.model, optimizer=training.optimizer)
        training.step()
        ckpt.save(1).result(30)
        ckpt._saver.drain()
        assert read_trace(tmp_path / "trace.json").checkpoint().step == 1


def test_it_ends_at_its_limit(tmp_path: Path, training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "MAX_BYTES", 100_000)
    with pytest.warns(UserWarning, match="no more is recorded") as warned:
        handles = training.run(tmp_path / "run", tmp_path / "trace.json", steps=20, **SMALL)
    assert len(warned) == 1 and all(handle.result() for handle in handles)
    assert (tmp_path / "trace.json").stat().st_size <= 100_000 + 10
    assert events_of(tmp_path / "trace.json", "save()")


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path: Path, training: Training) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    with lazyckpt.Checkpointer(tmp_path / "run", trace=tmp_path / "trace.json") as ckpt:
        recorder = ckpt._saver._trace
        assert recorder is not None
        recorder._file._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
        ckpt.track(model=training.model)
        with pytest.warns(UserWarning, match="No space left"):
            assert ckpt.save(1).result(30)
            ckpt._saver.drain()
        assert ckpt.save(2).result(30)


def test_a_lack_of_descriptors_ends_neither_training_nor_a_save(
    tmp_path: Path, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: asking for the memory of the process raised OSError in optimizer.step() and save()."""

    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with lazyckpt.Checkpointer(tmp_path / "run", trace=tmp_path / "trace.json") as ckpt:
        ckpt.track(model=training.model, optimizer=training.optimizer)
        monkeypatch.setattr(trace, "open", refuse, raising=False)
        training.step()
        assert ckpt.save(1).result().is_dir()
    assert len(on_tracks(tmp_path / "trace.json", trace.SAVES)) == 1


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with (
        lazyckpt.Saver(trace=tmp_path / "trace.json"),
        pytest.raises(lazyckpt.ConfigError, match="another Checkpointer"),
    ):
        lazyckpt.Saver(trace=tmp_path / "trace.json")
    lazyckpt.Saver(trace=tmp_path / "trace.json").close()


def test_where_there_are_no_locks_a_trace_goes_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: file systems such as Lustre mounted noflock caused an OSError."""
    code = errno.ENOSYS

    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lazyckpt.Checkpointer(tmp_path / "run", trace=tmp_path / "t.json") as ckpt:
        ckpt.save(1).result()
    assert read_trace(tmp_path / "t.json").checkpoint(None).step == 1
    code = errno.EIO
    with pytest.raises(lazyckpt.ConfigError, match=r"t\.json.*Input/output error"):
        trace_file.TraceWriter(tmp_path / "t.json")


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text('{"dear": "diary"}')
    with pytest.raises(lazyckpt.ConfigError, match="no trace"):
        lazyckpt.Saver(trace=tmp_path / "notes.json")
    assert (tmp_path / "notes.json").read_text() == '{"dear": "diary"}'
    with pytest.raises(lazyckpt.ConfigError, match="Is a directory"):
        lazyckpt.Saver(trace=tmp_path)
    with pytest.raises(lazyckpt.ConfigError, match="name of a file"):
        lazyckpt.Saver(trace=3)


def test_a_forked_child_writes_nothing(tmp_path: Path, training: Training) -> None:
    with lazyckpt.Saver(trace=tmp_path / "trace.json") as saver:
        recorder = saver._trace
        assert recorder is not None
        with recorder._lock, recorder._file._lock:  # as if another thread were writing
            child = os.fork()
            if child == 0:
                try:
                    recorder._before_step(training.optimizer, (), {})
                    recorder._after_step(training.optimizer, (), {})
                    recorder.close()
                    os._exit(0)
                finally:
                    os._exit(1)
        end = time.monotonic() + 20
        while (status := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
            time.sleep(0.01)
        if status[0] == 0:
            os.kill(child, 9)
            os.waitpid(child, 0)
        assert status == (child, 0)
    assert events_of(tmp_path / "trace.json", "optimizer.step") == []


def test_without_it_there_is_no_hook_and_with_it_none_is_left(tmp_path: Path) -> None:
    lazyckpt.Saver().close()  # the gate's own are there for good
    hooks = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    with lazyckpt.Saver():
        assert (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)) == hooks
    with lazyckpt.Saver(trace=tmp_path / "trace.json"):
        assert len(_global_optimizer_pre_hooks) == hooks[0] + 1
    assert (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)) == hooks


# the command


def set_duration(file: Path, name: str, microseconds: float) -> None:
    """Rewrites a trace so that every span of this name took so long."""
    begin, *lines = file.read_bytes().removesuffix(trace_file.END).split(trace_file.SEPARATOR)
    events = [json.loads(line) for line in lines]
    for event in events:
        if event["name"] == name:
            event["dur"] = microseconds
    file.write_bytes(trace_file.SEPARATOR.join([begin, *(json.dumps(e).encode() for e in events)]) + trace_file.END)


def test_the_breakdown(file: Path) -> None:
    set_duration(file, "wait for a place", 49)
    result = run("trace", file)
    assert result.exit_code == 0, result.output
    assert "step-00000006" in result.stdout
    for phase in ("serialise, lay out", "copy to the ring", "write to the files", "fsync", "commit"):
        assert phase in result.stdout
    assert re.search(r"serialise, lay out .* gather \d+\.\d", result.stdout)
    waits = {line.split("  ")[0]: "waits" in line for line in result.stdout.splitlines()}
    assert waits["serialise, lay out"] and not waits["write to the files"]
    assert "wait for a place" not in waits, "it would be shown as 0.0 ms"
    set_duration(file, "wait for a place", 51)
    (line,) = [line for line in run("trace", file).stdout.splitlines() if line.startswith("wait for a place  ")]
    assert "waits" in line


def test_as_json_and_by_step(file: Path) -> None:
    newest, fourth = run_json("trace", file), run_json("trace", file, "--step", "4")
    assert (newest["step"], fourth["step"]) == (6, 4)
    phases = {phase["name"]: phase for phase in newest["phases"]}
    m = newest["metrics"]
    assert phases["commit"]["end_s"] == pytest.approx(m["durable_s"], abs=1e-6)
    assert phases["serialise, lay out"]["busy_s"] == pytest.approx(m["plan_s"], abs=1e-6)
    assert phases["write to the files"]["busy_s"] <= m["write_s"] + 1e-6


def test_errors_are_one_line(tmp_path: Path, file: Path) -> None:
    lines = file.read_bytes().split(b",\n")
    (tmp_path / "damaged.json").write_bytes(b",\n".join([*lines[:5], b"{,", *lines[5:]]))
    (tmp_path / "strange.json").write_bytes(b",\n".join([*lines[:5], b"7", *lines[5:]]))
    (tmp_path / "empty.json").write_bytes(lines[0])
    (tmp_path / "other.json").write_text("[]")
    assert "no checkpoint of step 5; there are 2, 4, 6" in fails(2, "trace", file, "--step", "5")
    assert "No such file" in fails(2, "trace", tmp_path / "missing.json")
    for name in ("damaged.json", "strange.json"):
        assert "line 7 is not an event" in fails(2, "trace", tmp_path / name)
    assert "no checkpoint ended in it" in fails(2, "trace", tmp_path / "empty.json")
    assert "not a trace" in fails(2, "trace", tmp_path / "other.json")


def test_a_picture(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written under the name given, or not at all."""
    pytest.importorskip("matplotlib")
    before = sorted(tmp_path.iterdir())
    for name, problem in (("doc", "Format '' is not supported"), ("missing/picture.svg", "No such file or directory")):
        assert fails(2, "trace", file, "-o", tmp_path / name).startswith(f"error: {tmp_path / name}: {problem}")
    assert sorted(tmp_path.iterdir()) == before
    assert run("trace", file, "-o", tmp_path / "picture.png").exit_code == 0
    assert (tmp_path / "picture.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    told = run_json("trace", file, "-o", tmp_path / "picture.svg")
    assert told["picture"] == str(tmp_path / "picture.svg")
    drawing = (tmp_path / "picture.svg").read_text()
    assert "model.1.weight" in drawing and "save()" in drawing
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'lazyckpt[trace]'" in fails(2, "trace", file, "-o", tmp_path / "picture.png")


def test_a_picture_of_strange_names(tmp_path: Path) -> None:
    """matplotlib treats text between dollars as a formula, hides names that begin with an underscore, and warns of
    characters that its font lacks."""
    pytest.importorskip("matplotlib")
    long = "_orig_mod.transformer.encoder.layers.11.self_attention.query_key_value.weight"
    with lazyckpt.Saver(trace=tmp_path / "trace.json", **SMALL) as saver:
        strange = {long: torch.ones(9000), "$\\frac$": torch.ones(8000), "层.weight": torch.ones(7000)}
        saver.save(strange, tmp_path / "a $x_ and $y.pt", step=1)
    result = run("trace", tmp_path / "trace.json", "-o", tmp_path / "picture.svg")
    assert result.exit_code == 0, result.output
    drawing = (tmp_path / "picture.svg").read_text()
    assert "a $x_ and $y.pt" in drawing and "frac$" in drawing and r"\u5c42.weight" in drawing
    assert "<!-- _orig_mod.tran…" in drawing and long not in drawing


def test_a_folder_that_outlives_its_saver_is_recorded(tmp_path: Path) -> None:
    def recorded() -> int:
        try:
            return len(on_tracks(tmp_path / "trace.json", trace.SAVES))
        except json.JSONDecodeError:  # it is being written
            return 0

    folder = lazyckpt.Saver(trace=tmp_path / "trace.json").stage(tmp_path / "folder")
    gc.collect()
    folder.add("a.pt", {"x": torch.zeros(1000)})
    folder.save(blocking=True)
    del folder  # which closes the trace, once the background thread has let go of it, too
    end = time.monotonic() + 10
    while not recorded() and time.monotonic() < end:
        gc.collect()
    assert recorded() == 1
