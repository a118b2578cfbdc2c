"""The face: what save() promises, what it says when it cannot keep it, and what a run looks like from outside."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import json
import os
import pkgutil
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lazyckpt
from endings import in_a_child
from lazyckpt.gate.gate import gate
from lazyckpt.metrics import PLAN_PHASES
from lazyckpt.pipeline import background, persist
from lazyckpt.pipeline.handle import _register
from lazyckpt.pipeline.launch import Launcher
from lazyckpt.storage import catalog, commit, manifest, removal, retention
from lazyckpt.storage.manifest import FileEntry

HELD_S = 0.05


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "did not come true in 20 s"
        time.sleep(0.005)


def refuse(*_: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A context in which no checkpoint can be described."""

    @contextlib.contextmanager
    def breaking() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(commit.Staging, "describe", refuse)
            yield

    return breaking


# a checkpoint


def test_a_checkpoint_is_a_folder_that_torch_reads(make_run: Any, graph: Any) -> None:
    run = make_run()
    before = run.state()
    path = run.ckpt.save(12).result()
    assert path == run.ckpt.directory / "step-00000012"
    assert names(path) == ["manifest.json", "state.pt"]
    for mmap in (False, True):
        state = torch.load(path / "state.pt", mmap=mmap)
        assert list(state) == ["model", "optimizer", "rng"]
        assert graph(state["model"]) == graph(before["model"])
        assert graph(state["optimizer"]) == graph(before["optimizer"])
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 12 and manifest["sequence"] == 1 and manifest["parent"] is None
    assert manifest["files"][0]["bytes"] == (path / "state.pt").stat().st_size


def test_save_returns_before_the_checkpoint_is_durable(make_run: Any, disk: Any) -> None:
    run = make_run()
    disk.hold()
    handle = run.ckpt.save(1)
    assert not handle.done()
    # Another one than Python's until 3.11.
    with pytest.raises(concurrent.futures.TimeoutError, match=r"step-00000001 is not durable after 0\.01 s"):
        handle.result(timeout=0.01)
    assert not any(n.startswith("step-") for n in names(run.ckpt.directory))
    seen: list[Any] = []
    handle.add_done_callback(lambda h: seen.append(h.result()))
    disk.release()
    assert handle.result(timeout=30).is_dir() and handle.wait_captured()
    wait_until(lambda: seen == [handle.path])
    assert run.ckpt.save(2, blocking=True).done()


def test_a_checkpoint_cannot_be_cancelled(make_run: Any, disk: Any) -> None:
    """A cancelled future would never be done, and close() waits for it."""
    run = make_run()
    disk.hold()
    handle = run.ckpt.save(1)
    if handle.cancel():
        _register.clear()  # or close() would wait for ever
        pytest.fail("cancelled")
    disk.release()
    assert handle.result(timeout=30).is_dir()


def test_metrics_say_where_the_time_went(make_run: Any, disk: Any) -> None:
    run = make_run()
    disk.hold()
    handle = run.ckpt.save(3)
    disk.release(after_s=HELD_S)
    run.step()
    handle.result()
    m = handle.metrics
    assert m.step == 3 and m.bytes == (handle.path / "state.pt").stat().st_size
    assert 0 < m.eager_bytes < m.bytes and m.chunks == len(m.timeline) > m.bytes / (64 << 10) - 1
    assert m.storages >= 4 * len(run.optimizer.state)
    assert m.gate_blocked_s > HELD_S / 2 and m.blocked_s == m.save_blocked_s + m.gate_blocked_s
    assert 0 < m.plan_s <= m.save_blocked_s
    phases = {name: getattr(m, name) for name in PLAN_PHASES}
    assert sum(phases.values()) == pytest.approx(m.plan_s, abs=1e-6)
    assert all(seconds > 0 for name, seconds in phases.items() if name != "watch_s"), phases
    assert m.captured_s <= m.written_s <= m.synced_s <= m.durable_s
    assert sum(e.nbytes for e in m.timeline) == m.bytes
    assert m.ring_wait_s > 0, "the ring is a fraction of the state"


@pytest.mark.parametrize(
    ("slow", "phase"),
    [
        ("launch.gather", "gather_s"),
        ("launch.Decisions.decide", "decide_s"),
        ("launch.lay_out", "layout_s"),
        ("launch.capture", "layout_s"),
        ("launch.Background.launch", "hand_over_s"),
    ],
)
def test_a_phase_holds_the_time_of_its_work(
    make_run: Any, monkeypatch: pytest.MonkeyPatch, slow: str, phase: str
) -> None:
    """On a clock that stands still except in the work that is slow."""
    run, now = make_run(witness="versions"), [0.0]
    whole = f"lazyckpt.pipeline.{slow}"
    work = pkgutil.resolve_name(whole.replace(".launch.", ".launch:", 1))

    def takes_a_second(*told: Any, **named: Any) -> Any:
        now[0] += 1.0
        return work(*told, **named)

    monkeypatch.setattr(whole, takes_a_second)
    monkeypatch.setattr("lazyckpt.pipeline.launch.time", SimpleNamespace(perf_counter=lambda: now[0]))
    m = run.ckpt.save(1).metrics
    assert m.plan_s == 1.0 and m.watch_s == 0.0 < m.eager_copy_s
    phases = {name: getattr(m, name) + (m.eager_copy_s if name == "layout_s" else 0) for name in PLAN_PHASES}
    del phases["eager_copy_s"]  # by the engine's clock, which goes on
    assert phases == pytest.approx({name: float(name == phase) for name in phases})


def test_a_step_that_is_none_is_refused(make_run: Any) -> None:
    run = make_run()
    for step in (-1, 1.0, True, "1", 2**63 * 1.0, 2**63):
        for call in (run.ckpt.save, lambda step: run.ckpt.restore(step=step)):
            with pytest.raises(lazyckpt.ConfigError, match="step="):
                call(step)
    with pytest.raises(lazyckpt.ConfigError, match="step="):
        run.ckpt.save(None)
    with pytest.raises(lazyckpt.ConfigError, match="one of step, path and best"):
        run.ckpt.restore(step=1, path=run.ckpt.directory)


def test_large_steps_sort_and_restore(make_run: Any) -> None:
    """Regression: from 2**63 on a step was committed, and its manifest refused as damaged."""
    run = make_run()
    for step in (0, 99_999_999, 100_000_000, 10**12, 2**63 - 1):
        run.ckpt.save(step).result()
        assert run.ckpt.restore() == step
    assert run.ckpt.restore(step=0) == 0


# order and limits


def test_several_in_flight_commit_in_order(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first takes longest to become durable, and is published first all the same."""
    run = make_run(max_in_flight=4)
    published: list[str] = []
    prepare, publish = persist.prepare, commit.Staging.publish

    def slow_prepare(flight: persist.Flight, *args: Any, **kwargs: Any) -> list[FileEntry]:
        time.sleep({30: 0.3, 10: 0.2, 20: 0.1, 40: 0}[flight.handle.step])
        return prepare(flight, *args, **kwargs)

    def noted_publish(self: commit.Staging) -> Path | None:
        published.append(self.target.name)
        return publish(self)

    monkeypatch.setattr(persist, "prepare", slow_prepare)
    monkeypatch.setattr(commit.Staging, "publish", noted_publish)
    handles = []
    for step in (30, 10, 20, 40):
        handles.append(run.ckpt.save(step))
        run.step()
    handles[-1].result(timeout=30)
    assert published == [f"step-000000{step}" for step in (30, 10, 20, 40)]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_max_in_flight_waits_and_says_how_long(limit: int, make_run: Any, disk: Any) -> None:
    run = make_run(max_in_flight=limit, host_buffer_bytes=32 << 20)
    disk.hold()
    for step in range(limit):
        assert run.ckpt.save(step).metrics.in_flight_wait_s < HELD_S / 2
    disk.release(after_s=HELD_S)
    handle = run.ckpt.save(9)
    assert handle.metrics.in_flight_wait_s > HELD_S / 2
    assert handle.metrics.save_blocked_s >= handle.metrics.in_flight_wait_s
    handle.result()


def test_before_step_makes_the_step_wait_for_the_disk(
    make_run: Any, disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(durability="before_step", host_buffer_bytes=32 << 20)
    publish = commit.Staging.publish

    def slow(self: commit.Staging) -> Path | None:
        time.sleep(HELD_S)
        return publish(self)

    monkeypatch.setattr(commit.Staging, "publish", slow)
    for step in range(3):
        handle = run.ckpt.save(step)
        run.backward()
        assert handle.wait_captured() and not handle.done()
        run.optimizer.step()
        assert handle.path.is_dir(), "the step returned, so the checkpoint is durable"
        assert handle.result(timeout=1)
        assert handle.metrics.gate_blocked_s > HELD_S / 2
    handle = run.ckpt.save(3)
    run.optimizer.step(run.backward)
    assert handle.path.is_dir(), "a closure does not change that"


def test_before_step_goes_on_when_the_checkpoint_fails(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(durability="before_step")
    monkeypatch.setattr(commit.Staging, "publish", refuse)
    handle = run.ckpt.save(1)
    run.step()
    assert handle.done()
    with pytest.raises(lazyckpt.SaveError, match="Input/output"):
        run.ckpt.save(2)


# saving again, keeping, removing


def test_saving_a_step_again_replaces_it_atomically(make_run: Any, graph: Any) -> None:
    """A reader that opens the state again and again always finds a whole one, the old or the new."""
    run = make_run(host_buffer_bytes=32 << 20)
    run.ckpt.save(5).result()
    stop, errors, reads = threading.Event(), [], []

    def read() -> None:
        while not stop.is_set():
            try:
                folder = os.open(run.ckpt.directory / "step-00000005", os.O_RDONLY)
                manifest = json.loads(Path(f"/proc/self/fd/{folder}/manifest.json").read_text())
                size = os.stat(f"/proc/self/fd/{folder}/state.pt").st_size
                os.close(folder)
                assert manifest["files"][0]["bytes"] == size
                reads.append(manifest["sequence"])
            except FileNotFoundError as error:
                # The folder it held open was replaced and removed; the name itself is never missing.
                if "manifest" not in str(error) and "state" not in str(error):
                    errors.append(error)
            except BaseException as error:
                errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(20):
        run.step()
        run.ckpt.save(5).result()
    stop.set()
    thread.join()
    assert not errors and max(reads) > 5
    run.ckpt.close()
    assert names(run.ckpt.directory) == ["step-00000005"]
    assert graph(torch.load(run.ckpt.directory / "step-00000005/state.pt")["model"]) == graph(run.state()["model"])


def test_saving_a_step_again_while_it_is_in_flight(make_run: Any) -> None:
    run = make_run(max_in_flight=3)
    handles = [run.ckpt.save(5) for _ in range(4)]
    run.step()
    last = run.ckpt.save(5)
    assert {h.result() for h in [*handles, last]} == {run.ckpt.directory / "step-00000005"}
    run.ckpt.close()
    assert names(run.ckpt.directory) == ["step-00000005"]
    manifest = json.loads((last.path / "manifest.json").read_text())
    assert manifest["sequence"] == 5


def test_keep_last_and_keep_every(make_run: Any) -> None:
    run = make_run(keep_last=2, keep_every=10)
    for step in range(1, 27):
        run.ckpt.save(step)
        run.step()
    run.ckpt.close()
    assert names(run.ckpt.directory) == [f"step-000000{s}" for s in (10, 20, 25, 26)]


def test_a_run_that_goes_on_from_elsewhere_keeps_as_many_as_it_should(make_run: Any, tmp_path: Path) -> None:
    """Regression: the next save removed every other checkpoint of the folder."""
    other = make_run(directory=tmp_path / "other")
    path = other.ckpt.save(70).result()
    run = make_run(directory=tmp_path / "run", keep_last=3)
    for step in (1, 2, 3, 4):
        run.ckpt.save(step).result()
    assert run.ckpt.restore(path=path) == 70

    def save(step: int) -> list[int]:
        run.ckpt.save(step).result()
        run.ckpt._saver.drain()
        return [c.step for c in catalog.Catalog(run.ckpt.directory).scan()]

    assert [save(step) for step in (71, 72, 73, 74)] == [[71, 4, 3], [72, 71, 4], [73, 72, 71], [74, 73, 72]]


def test_a_checkpoint_that_restore_found_damaged_does_not_count(make_run: Any, tmp_path: Path) -> None:
    path = make_run(directory=tmp_path / "other").ckpt.save(70).result()
    run = make_run(directory=tmp_path / "run")
    for step in (1, 2, 3, 4):
        if step == 3:
            run.ckpt.restore(path=path)
        run.ckpt.save(step).result()
    run.ckpt.close()
    file = run.ckpt.directory / "step-00000004" / "state.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    again = make_run(directory=run.ckpt.directory, keep_last=3)
    with pytest.warns(UserWarning, match="passed over"):
        assert again.ckpt.restore() == 3
    again.ckpt.save(5).result()
    again.ckpt._saver.drain()
    kept = [c.step for c in catalog.Catalog(run.ckpt.directory).scan()]
    assert kept == [5, 4, 3, 2], "2 makes up for 4, which stays, so that it can be repaired"


def test_a_folder_that_is_gone_when_old_ones_are_to_be_removed_is_a_warning(make_run: Any) -> None:
    run = make_run(keep_last=1)
    moved = run.ckpt.directory.with_name("moved")
    with pytest.warns(UserWarning, match="could not be removed.*cannot be read: No such file"):
        run.ckpt.save(1).add_done_callback(lambda _: run.ckpt.directory.rename(moved))
        run.ckpt._saver.drain()


def test_two_that_save_into_one_folder(make_run: Any) -> None:
    """Regression: sequences were counted from what was found at the start, so that the one with the lower count removed
    what it had just acknowledged."""
    a = make_run(keep_last=2)
    folder = a.ckpt.directory
    b = make_run(directory=folder, keep_last=2)

    def save(run: Any, step: int) -> list[str]:
        """The steps that are there then, the newest first."""
        run.ckpt.save(step).result()
        run.ckpt._saver.drain()
        return [c.step for c in catalog.Catalog(folder).scan()]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [save(a, step) for step in (1, 2, 3)][-1] == [3, 2] and not caught
        assert save(b, 10) == [10, 3, 2], "each removes its own only"
        assert save(a, 4) == [4, 10, 3]
        assert save(a, 10) == [10, 4], "a step that both save is the last one's"
        assert save(b, 11) == [11, 10, 4]
        assert save(b, 12) == [12, 11, 10, 4]
    assert len(caught) == 2 and all(f"also saves into {folder};" in str(w.message) for w in caught), "once each"
    assert save(make_run(directory=folder, keep_last=2), 20) == [20, 12]


def test_ranks_that_do_not_know_each_other_are_warned_once(
    make_run: Any, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = make_run()
    for step in (1, 2):
        run.ckpt.save(step).result()
    told = [str(warning.message) for warning in recwarn]
    assert len(told) == 1 and "WORLD_SIZE is 2, but torch.distributed is not initialized" in told[0]


def test_a_step_that_is_saved_again_while_it_is_removed_stays(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: what had just been acknowledged was removed in place of the old one of that name."""
    run = make_run(keep_last=1)
    run.ckpt.save(1).result()
    listed, fates_of = threading.Event(), retention.retention

    def slowly(known: Any, *rules: Any) -> Any:
        fates = fates_of(known, *rules)
        if any(checkpoint.step == 1 and not fate.stays for checkpoint, fate in fates.items()):
            listed.set()
            time.sleep(0.3)
        return fates

    monkeypatch.setattr(retention, "retention", slowly)
    run.ckpt.save(2)
    assert listed.wait(30)
    run.ckpt.save(1).result()
    run.ckpt._saver.drain()
    assert [c.step for c in catalog.Catalog(run.ckpt.directory).scan()] == [1]


def test_a_save_reads_no_manifest_twice(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without retention there may be thousands, and their reading would hold up the training."""
    run = make_run()
    for step in range(1, 6):
        run.ckpt.save(step).result()
    read, reads = manifest.read_checkpoint, []
    monkeypatch.setattr(catalog, "read_checkpoint", lambda path: reads.append(path.name) or read(path))
    run.ckpt.save(6).result()
    assert reads == ["step-00000005"]
    assert read(run.ckpt.directory / "step-00000006").sequence == 6


def test_what_was_committed_after_opening_and_before_restoring(make_run: Any) -> None:
    """By the run before this one, as it ended: from then on, only this run saves there."""
    before = make_run()
    run = make_run(directory=before.ckpt.directory, keep_last=1)
    before.ckpt.save(1).result()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run.ckpt.restore() == 1
        run.ckpt.save(2).result()
        run.ckpt._saver.drain()
    assert names(run.ckpt.directory) == ["step-00000002"]


def test_nothing_is_removed_when_a_save_fails(make_run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that is resumed with a shorter memory keeps all there is until it has saved."""
    run = make_run(directory=tmp_path / "run")
    for step in (1, 2):
        run.ckpt.save(step, blocking=True)
    run.ckpt.close()
    again = make_run(directory=tmp_path / "run", keep_last=1)
    with monkeypatch.context() as broken:
        broken.setattr(commit.Staging, "publish", lambda self: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(lazyckpt.NoSpaceError, match="keep_last"):
            again.ckpt.save(3).result(timeout=30)
        again.ckpt._saver.drain()
    assert names(again.ckpt.directory) == ["step-00000001", "step-00000002"]
    again.ckpt.save(3, blocking=True)
    wait_until(lambda: names(again.ckpt.directory) == ["step-00000003"])


def test_what_cannot_be_removed_is_a_warning(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new checkpoint stays, and its save does not count as failed."""
    run = make_run(keep_last=1)
    run.ckpt.save(1).result()

    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(removal, "hide", refuse)
    with pytest.warns(UserWarning, match="not permitted"):
        run.ckpt.save(2).result()
        run.ckpt.close()


def test_rollback_the_newest_is_the_last_saved_not_the_highest(make_run: Any) -> None:
    """Save to step 200, restore 100, train to 120: the next run continues from 120, and retention follows its line."""
    run = make_run()
    for step in range(20, 201, 20):
        run.ckpt.save(step).result()
    again = make_run(directory=run.ckpt.directory)
    assert again.ckpt.restore(step=100) == 100
    again.ckpt.save(120).result()
    last = make_run(directory=run.ckpt.directory, keep_last=2)
    assert last.ckpt.restore() == 120
    assert "step-00000200" in names(run.ckpt.directory), "without keep_last nothing is removed"
    last.ckpt.save(140).result()
    last.ckpt.close()
    assert names(run.ckpt.directory) == ["step-00000120", "step-00000140"], "the abandoned branch is gone"


# when something goes wrong


def test_each_error_in_the_background_is_raised_once_unless_it_was_seen(
    make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(max_in_flight=3)
    all_begun = threading.Event()  # or the error of the first save may be raised by the second

    def refuse_then(*_: Any) -> None:
        assert all_begun.wait(30)
        refuse()

    with monkeypatch.context() as patch:
        patch.setattr(commit.Staging, "describe", refuse_then)
        handles = [run.ckpt.save(step) for step in (6, 7, 8)]
        all_begun.set()
        with pytest.raises(lazyckpt.SaveError, match="step 6"):
            handles[0].result()
        wait_until(lambda: all(h.done() for h in handles))
    for step in (7, 8):
        with pytest.raises(lazyckpt.SaveError, match=rf"step {step}.*step-0000000{step}.*Input/output error"):
            run.ckpt.save(9)
    assert run.ckpt.save(9).result().name == "step-00000009"
    run.ckpt.close()
    assert names(run.ckpt.directory) == ["step-00000009"]


def test_close_and_with_raise_the_error_unless_another_is_under_way(make_run: Any, broken: Any) -> None:
    first, second = make_run(), make_run()
    with broken():
        with pytest.raises(lazyckpt.SaveError, match="Input/output error"), first.ckpt:
            first.ckpt.save(1)
        with pytest.warns(UserWarning, match="Input/output error"), pytest.raises(KeyError, match="mine"), second.ckpt:
            second.ckpt.save(1)
            raise KeyError("mine")


def test_warn_resolves_the_handle_even_if_warnings_are_errors(make_run: Any, broken: Any) -> None:
    run = make_run(on_error="warn")
    with broken(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(run.ckpt.save(1).exception(timeout=10), lazyckpt.SaveError)
    run.ckpt.save(2).result()


def test_a_failed_save_is_done_once_its_warning_was_given(
    make_run: Any, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: code that waited for the save looked for the warning too early."""
    order: list[str] = []
    finish = background.finish
    monkeypatch.setattr(background, "finish", lambda *args: (order.append("done"), finish(*args)))
    monkeypatch.setattr(warnings, "warn", lambda *_, **__: order.append("warned"))
    with broken():
        make_run(on_error="warn").ckpt.save(1).exception(timeout=30)
    assert order == ["warned", "done"]


def test_an_error_that_nobody_thought_of_is_told(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    monkeypatch.setattr(manifest, "describe", lambda **told: told["nonsense"])
    with pytest.raises(lazyckpt.SaveError, match="KeyError: 'nonsense'"):
        run.ckpt.save(1).result(timeout=30)
    assert names(run.ckpt.directory) == []


def test_an_interrupted_save_is_not_published_and_nothing_hangs(make_run: Any, disk: Any) -> None:
    """Ctrl-C while eager bytes are copied: training may go on with them half read."""
    import signal

    run = make_run(witness="versions")  # with pages, the write to the table would fail it, too
    table = {"t": torch.zeros(1 << 18)}
    run.ckpt.track(table=table)
    disk.hold()

    class Interrupt(Exception): ...

    def interrupt(_: int, frame: Any) -> None:
        if frame.f_code is Launcher._launch.__code__:  # elsewhere a finalizer may swallow it
            raise Interrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.02)
    try:
        with pytest.raises(Interrupt):
            run.ckpt.save(1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    table["t"].fill_(1)
    disk.release()
    run.ckpt.close()  # who interrupted it knows
    assert names(run.ckpt.directory) == []


def test_a_folder_that_cannot_be_made_or_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    for folder in (file, file / "below"):
        with pytest.raises(lazyckpt.SaveError, match="file"):
            lazyckpt.Checkpointer(folder)
    with pytest.raises(lazyckpt.SaveError, match="/proc"):
        lazyckpt.Checkpointer("/proc/lazyckpt")
    with pytest.raises(lazyckpt.SaveError):
        lazyckpt.Checkpointer("/sys")  # exists; not even root may make a folder there
    with pytest.raises(lazyckpt.SaveError):
        lazyckpt.Checkpointer(tmp_path / ("x" * 300))
    assert file.read_text() == "in the way"


@pytest.mark.parametrize(
    ("code", "on_error"), [(errno.EROFS, "raise"), (errno.EACCES, "warn"), (errno.ENOSPC, "raise"), (errno.EIO, "warn")]
)
def test_a_folder_that_cannot_be_written_to_is_restored_from(
    code: int, on_error: str, make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: an evaluation could not open what it had no need to write to."""

    def refuse(path: Any, *args: Any) -> None:
        raise OSError(code, os.strerror(code), str(path))

    (empty := tmp_path / "empty").mkdir()
    run = make_run()
    run.ckpt.save(5).result()
    folder = run.ckpt.directory
    before = names(folder)
    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.warns(UserWarning, match=rf"{folder}: {os.strerror(code)}; restore\(\) works"):
        reader = make_run(directory=folder, on_error=on_error)
    assert reader.ckpt.restore() == 5
    with contextlib.nullcontext() if on_error == "raise" else pytest.warns(UserWarning, match="step 6"):
        handle = reader.ckpt.save(6)
        with pytest.raises(lazyckpt.SaveError, match=rf"step 6.*{os.strerror(code)}"):
            handle.result(timeout=30)
    with pytest.raises(lazyckpt.SaveError, match=os.strerror(code)):  # nothing to restore: a writer should hear it now
        make_run(directory=empty)
    assert names(folder) == before


def test_a_file_or_link_in_the_place_of_a_checkpoint_is_replaced_not_followed(make_run: Any, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / "state.pt").write_text("precious")
    run = make_run()
    (run.ckpt.directory / "step-00000001").symlink_to(target)
    (run.ckpt.directory / "step-00000002").write_text("in the way")
    for step in (1, 2):
        path = run.ckpt.save(step).result()
        assert path.is_dir() and not path.is_symlink()
    run.ckpt.close()
    assert (target / "state.pt").read_text() == "precious"
    assert names(run.ckpt.directory) == ["step-00000001", "step-00000002"]


def test_lack_of_space_is_found_before_training_is_blocked(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    run.ckpt.save(1).result()
    real = os.statvfs(run.ckpt.directory)

    class Full:
        f_bavail, f_frsize, f_blocks = 10, real.f_frsize, real.f_blocks

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: Full)
        with pytest.raises(lazyckpt.NoSpaceError, match=r"step 2.*needs \d+ bytes.*keep_last"):
            run.ckpt.save(2)
    assert gate._pending == ()
    assert run.ckpt.save(3).result().name == "step-00000003"
    assert names(run.ckpt.directory) == ["step-00000001", "step-00000003"]


def test_a_file_system_that_does_not_say_how_large_it_is(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: libfuse answers with zeros where a file system has no statfs; every save was a NoSpaceError."""

    class Untold:
        f_bavail, f_frsize, f_blocks = 0, 0, 0

    monkeypatch.setattr(os, "statvfs", lambda path: Untold)
    assert make_run().ckpt.save(1).result().is_dir()


def test_a_change_of_the_working_folder_moves_no_checkpoint(
    make_run: Any, disk: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the background took a relative path from wherever the process was by then, and so did restore()."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run = make_run(directory="run")
    disk.hold()
    handle = run.ckpt.save(1)
    monkeypatch.chdir(tmp_path / "elsewhere")
    disk.release()
    assert handle.result() == tmp_path / "run" / "step-00000001" and names(handle.path) == ["manifest.json", "state.pt"]
    assert run.ckpt.restore() == 1 and names(tmp_path / "elsewhere") == []


def test_names_and_objects_that_cannot_be_tracked(make_run: Any) -> None:
    run = make_run()
    with pytest.raises(lazyckpt.ConfigError, match="'model' is taken"):
        run.ckpt.track(model=torch.nn.Linear(2, 2))
    with pytest.raises(lazyckpt.ConfigError, match=r"'rng' is taken.*reserved"):
        run.ckpt.track(rng={})
    with pytest.raises(lazyckpt.ConfigError, match=r"track\(x=…\).*generator.*StateProvider"):
        run.ckpt.track(x=(i for i in range(3)))
    with pytest.raises(lazyckpt.ConfigError, match=r"track\(x=…\): a int"):
        run.ckpt.track(x=3)
    run.ckpt.save(1).result()
    assert list(torch.load(run.ckpt.directory / "step-00000001/state.pt")) == ["model", "optimizer", "rng"]


def test_use_after_close(make_run: Any) -> None:
    run = make_run()
    handle = run.ckpt.save(1)
    run.ckpt.close()
    run.ckpt.close()
    assert handle.done() and handle.wait_captured()
    for use in (
        lambda: run.ckpt.save(2),
        lambda: run.ckpt.restore(),
        lambda: run.ckpt.track(x={}),
        lambda: run.ckpt.track_loader([1]),
    ):
        with pytest.raises(lazyckpt.ClosedError, match="closed"):
            use()
    run.step()


def test_use_in_a_forked_child(make_run: Any) -> None:
    run = make_run()
    run.ckpt.save(1)

    def body() -> None:
        for use in (lambda: run.ckpt.save(2), lambda: run.ckpt.restore(), lambda: run.ckpt.track(x={})):
            with pytest.raises(lazyckpt.ClosedError, match="parent"):
                use()
        run.ckpt.close()  # harmless
        with lazyckpt.Checkpointer(run.ckpt.directory / "child") as own:
            own.track(model=run.model)
            own.save(3).result(timeout=10)

    in_a_child(body)
    run.step()
    assert run.ckpt.save(2).result().is_dir()
    assert (run.ckpt.directory / "child/step-00000003").is_dir()


@pytest.mark.alone
def test_forks_during_a_save_are_quick_and_harm_nothing(make_run: Any, graph: Any) -> None:
    """Every start of a DataLoader forks."""
    run = make_run(host_buffer_bytes=64 << 20)
    run.ckpt.save(0).result()
    usual, times = [fork_s() for _ in range(8)], []
    for step in range(5):
        before = run.state()
        handle = run.ckpt.save(step)
        times += [fork_s() for _ in range(4)]
        run.step()
        assert graph(torch.load(handle.result() / "state.pt")["model"]) == graph(before["model"])
    assert statistics.median(times) < max(0.05, 5 * statistics.median(usual)), (times, usual)


def fork_s() -> float:
    begin = time.perf_counter()
    child = os.fork()
    if child == 0:
        os._exit(0)
    took = time.perf_counter() - begin
    os.waitpid(child, 0)
    return took


def test_two_checkpointers_of_one_model(make_run: Any, tmp_path: Path, graph: Any) -> None:
    run = make_run()
    with lazyckpt.Checkpointer(tmp_path / "best", chunk_bytes=64 << 10, host_buffer_bytes=128 << 10) as best:
        best.track(model=run.model, optimizer=run.optimizer)
        for step in range(10):
            before = run.state()
            handles = [run.ckpt.save(step), best.save(step)]
            run.step()
            for handle in handles:
                assert graph(torch.load(handle.result() / "state.pt")["model"]) == graph(before["model"])


def test_restoring_by_one_checkpointer_waits_for_the_copies_of_another(
    make_run: Any, tmp_path: Path, graph: Any, disk: Any
) -> None:
    """Restore writes straight into live parameters, past every hook and every version."""
    run = make_run()
    run.ckpt.save(1).result()
    with lazyckpt.Checkpointer(tmp_path / "best", chunk_bytes=64 << 10, host_buffer_bytes=128 << 10) as best:
        best.track(model=run.model, optimizer=run.optimizer)
        run.step()
        before = run.state()
        disk.hold()
        handle = best.save(2)
        disk.release(after_s=HELD_S)
        assert run.ckpt.restore() == 1
        assert graph(torch.load(handle.result() / "state.pt")["model"]) == graph(before["model"])
