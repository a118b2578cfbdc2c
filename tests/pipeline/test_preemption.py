"""Signals that announce the end: what was saved is committed, within the deadline, and the process ends as it would."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers would import it, in every child
import torch.profiler

import lazyckpt
from lazyckpt import _engine
from lazyckpt.pipeline import preemption
from lazyckpt.pipeline.background import Background
from lazyckpt.storage.catalog import Catalog
from trials import Trials

TINY = {"chunk_bytes": 64 << 10, "host_buffer_bytes": 256 << 10}
SLOW_S = 0.4  # of a disk
STALLS = ",".join(f"{operation}:{n}:stall" for operation in ("write", "sync", "create") for n in range(1, 2000, 3))


class Child:
    """A forked process that runs ``body`` with something to note with; what it noted is read here."""

    def __init__(self, body: Callable[[Callable[[str], None]], None]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # as long as this object
        self.pid = os.fork()
        if self.pid == 0:
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
            try:
                body(lambda line: os.write(self._log.fileno(), f"{line}\n".encode()) and None)
                os._exit(0)
            except SystemExit as end:
                os._exit(end.code)  # type: ignore[arg-type]
            except BaseException:
                traceback.print_exc()
                os._exit(70)

    def lines(self, until: str = "") -> list[str]:
        """What was noted up to now, or at least up to a line that begins with ``until``."""

        def noted() -> list[str]:
            return os.pread(self._log.fileno(), 1 << 20, 0).decode().splitlines()

        wait_for(lambda: not until or any(line.startswith(until) for line in noted()), 60)
        return noted()

    def end(self, timeout_s: float = 60) -> int:
        """Its exit code, negative for the signal that killed it."""
        end = time.monotonic() + timeout_s
        while (waited := os.waitpid(self.pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"it did not end within {timeout_s} s: {self.lines()}")
            time.sleep(0.002)
        return os.waitstatus_to_exitcode(waited[1])

    def terminated(self, timeout_s: float = 60) -> int:
        """Its exit code, after SIGTERM came when it was ready."""
        self.lines(until="ready")
        os.kill(self.pid, signal.SIGTERM)
        return self.end(timeout_s)


def training(folder: Path, note: Callable[[str], None], steps: int = 10**9, **knobs: Any) -> None:
    """Saves at every step; the oracle is what it notes once save() has returned."""
    model = torch.nn.Linear(128, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = lazyckpt.Checkpointer(folder, **{**TINY, **knobs})
    ckpt.track(model=model, optimizer=optimizer)
    for step in range(1, steps + 1):
        model(torch.ones(1, 128)).sum().backward()
        optimizer.step()
        ckpt.save(step)
        note(f"saved {step}")


def idle() -> None:
    """For a minute. One long sleep might not notice a signal that comes just before it."""
    for _ in range(6000):
        time.sleep(0.01)


def hold_the_disk(seconds: float) -> None:
    """Each checkpoint takes so long to commit. In a child."""
    persist = Background._persist

    def slowly(self: Background, flight: Any) -> None:
        time.sleep(seconds)
        persist(self, flight)

    Background._persist = slowly  # type: ignore[method-assign]


def saved(lines: list[str]) -> list[int]:
    return [int(line.split()[1]) for line in lines if line.startswith("saved")]


def committed(folder: Path) -> list[int]:
    for checkpoint in (known := Catalog(folder).scan()):
        lazyckpt.load(checkpoint.path)
    return sorted(c.step for c in known)


def test_what_was_saved_before_the_signal_is_committed(tmp_path: Path, trials: Trials) -> None:
    """At random instants, on a disk that is slow now and then."""
    count = trials.count(5, 200)
    in_flight = 0
    for trial in range(count):
        folder = tmp_path / str(trial)

        def body(note: Any, folder: Path = folder, seed: int = trials.random.randrange(1 << 30)) -> None:
            random.seed(seed)
            if _engine.FAULTS and random.random() < 0.5:
                make = _engine.Engine
                _engine.Engine = lambda **knobs: make(**knobs, fault=STALLS)  # type: ignore[assignment, misc]
            lazyckpt.commit_on(signal.SIGTERM, deadline=60)
            training(folder, note, max_in_flight=3)

        process = Child(body)
        process.lines(until="saved 1")
        time.sleep(trials.random.random() * 0.15)
        before, there = saved(process.lines()), committed(folder)
        os.kill(process.pid, signal.SIGTERM)
        assert process.end() == -signal.SIGTERM
        after = committed(folder)
        missing = sorted(set(before) - set(after))
        assert not missing, f"trial {trial}, seed {trials.seed}: saved, but not committed: {missing}"
        in_flight += len(set(before) - set(there))
    assert in_flight > 0, "nothing was in flight at any of the signals"
    trials.report("SIGTERM at a random instant", count, tmp_path, in_flight_at_the_signal=in_flight)


def test_after_the_deadline_it_gives_up_and_the_checkpoint_before_stands(tmp_path: Path) -> None:
    def body(note: Any) -> None:
        lazyckpt.commit_on(signal.SIGTERM, deadline=0)
        training(tmp_path, note, steps=1)
        while committed(tmp_path) != [1]:
            time.sleep(0.01)
        hold_the_disk(60)
        training(tmp_path, note, steps=2, host_buffer_bytes=8 << 20)
        note("ready")
        idle()

    process = Child(body)
    assert process.terminated(20) == -signal.SIGTERM
    assert committed(tmp_path) == [1]
    lazyckpt.Checkpointer(tmp_path).close()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"], "leftovers are swept"


@pytest.mark.long
@pytest.mark.skipif(not _engine.FAULTS, reason="the engine was built without fault injection")
def test_a_stalled_disk_does_not_hold_up_the_end_beyond_the_deadline(tmp_path: Path) -> None:
    """Regression: a handler that ends the program in good order waited for what had missed the deadline, as the
    interpreter does at its end."""
    ends = {"the signal": -signal.SIGTERM, "sys.exit in a handler": 3, "the end of the script": 0}
    done = subprocess.run([sys.executable, "-c", STALLED, str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    told = [line.split(": ") for line in done.stdout.splitlines()]
    assert {end: int(code) for end, code, _ in told} == ends, done.stderr
    for end, _, took in told:
        assert STALLED_DEADLINE_S <= float(took) < STALLED_DEADLINE_S + 5, "the disk takes twenty seconds"
        assert committed(tmp_path / end) == [1]
        lazyckpt.Checkpointer(tmp_path / end).close()
        assert [p.name for p in (tmp_path / end).iterdir()] == ["step-00000001"], "leftovers are swept"


STALLED_DEADLINE_S = 0.3
STALLED = f"""
import os, signal, sys, time
import torch, lazyckpt
from lazyckpt import _engine

make = _engine.Engine
model = torch.nn.Linear(640, 640)
def save(step, **knobs):
    ckpt = lazyckpt.Checkpointer(sys.argv[1] + "/" + end, chunk_bytes=4096, host_buffer_bytes=8 << 20, **knobs)
    ckpt.track(model=model)
    return ckpt.save(step)
def users(number, frame):
    if end == "sys.exit in a handler":
        sys.exit(3)
    stopped.append(number)
for end in ("the signal", "sys.exit in a handler", "the end of the script"):
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        stopped = []
        if end != "the signal":
            signal.signal(signal.SIGTERM, users)
        lazyckpt.commit_on(signal.SIGTERM, deadline={STALLED_DEADLINE_S})
        save(1).result()
        _engine.Engine = lambda **knobs: make(**knobs, fault=",".join(f"write:{{n}}:stall" for n in range(1, 1000)))
        save(2, io_backend="posix", io_depth=1)
        os.write(writes, b"!")
        while not stopped:
            time.sleep(0.01)
        break
    os.read(reads, 1)
    begin = time.monotonic()
    os.kill(child, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(end, code, time.monotonic() - begin, sep=": ", flush=True)
"""


@pytest.mark.parametrize("ends", [True, False], ids=["killed", "SystemExit"])
def test_the_signal_comes_while_a_checkpoint_is_restored(ends: bool, tmp_path: Path) -> None:
    """Nothing is to be committed, so the end comes at once, and the checkpoint is as it was."""
    with lazyckpt.Checkpointer(tmp_path, **TINY) as ckpt:
        ckpt.track(tensor=torch.ones(1 << 16), slow={"x": 1})
        ckpt.save(1, blocking=True)

    def body(note: Any) -> None:
        class Slow(lazyckpt.StateProvider):
            def state(self) -> Any: ...
            def load_state(self, state: Any) -> None:
                note("restoring")
                idle()

        def users(number: int, frame: object) -> None:
            raise SystemExit(3)

        if not ends:
            signal.signal(signal.SIGTERM, users)
        lazyckpt.commit_on(signal.SIGTERM)
        ckpt = lazyckpt.Checkpointer(tmp_path, **TINY)
        ckpt.track(tensor=torch.zeros(1 << 16), slow=Slow())
        try:
            ckpt.restore()
        finally:
            assert ckpt._saver.engine.ring_used_bytes == 0

    process = Child(body)
    process.lines(until="restoring")
    os.kill(process.pid, signal.SIGTERM)
    assert process.end(timeout_s=20) == (-signal.SIGTERM if ends else 3)
    assert committed(tmp_path) == [1]


def test_the_log_says_what_was_committed_and_what_was_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[int] = []
    signalled, late = threading.Event(), threading.Event()
    persist, wait = Background._persist, preemption.wait_for

    def held(self: Background, flight: Any) -> None:
        assert (signalled if flight.handle.step == 1 else late).wait(30)
        persist(self, flight)

    def waits(handles: list[Any], timeout: float) -> None:
        signalled.set()
        wait(handles, timeout)

    monkeypatch.setattr(Background, "_persist", held)
    monkeypatch.setattr(preemption, "wait_for", waits)
    with (
        handler(signal.SIGUSR1, lambda number, _: came.append(number)),
        lazyckpt.Saver(**TINY) as saver,
        lazyckpt.commit_on(signal.SIGUSR1, deadline=0.5),
    ):
        saver.save(torch.ones(9), tmp_path / "a.pt", step=1)
        saver.save(torch.ones(9), tmp_path / "b.pt", step=2)
        signal.raise_signal(signal.SIGUSR1)
        wait_for(lambda: came)
        late.set()
        saver.wait()
        signal.raise_signal(signal.SIGUSR1)
        wait_for(lambda: len(came) == 2)
    first, second = (m for record in caplog.records if (m := record.getMessage()).startswith("SIGUSR1"))
    assert first == f"SIGUSR1: committed: {tmp_path}/a.pt; not committed within 0.5 s: {tmp_path}/b.pt"
    assert second == "SIGUSR1: nothing was in flight"


def test_a_handler_that_was_there_before_is_called_after_the_commit(tmp_path: Path) -> None:
    def body(note: Any) -> None:
        def users(number: int, frame: object) -> None:
            note(f"handler {number} {committed(tmp_path)}")
            sys.exit(3)

        signal.signal(signal.SIGTERM, users)
        lazyckpt.commit_on(signal.SIGTERM)
        hold_the_disk(SLOW_S)
        training(tmp_path, note, steps=1)
        note("ready")
        idle()

    process = Child(body)
    assert process.terminated() == 3
    assert f"handler {signal.SIGTERM} [1]" in process.lines()


def test_a_signal_that_does_not_end_a_wait_is_sent_again(tmp_path: Path) -> None:
    """Regression: one that came between the interpreter's look for signals and the system call was noticed after the
    call only, in a program that sleeps for instance."""

    def body(note: Any) -> None:
        kill, sent = signal.pthread_kill, []
        signal.pthread_kill = lambda *to: kill(*to) if sent else sent.append(to)  # type: ignore[assignment, func-returns-value]
        lazyckpt.commit_on(signal.SIGTERM)
        training(tmp_path, note, steps=1)
        note("ready")
        idle()

    process = Child(body)
    assert process.terminated(20) == -signal.SIGTERM
    assert committed(tmp_path) == [1]


def test_a_handler_that_is_installed_later_ends_the_process_its_own_way(tmp_path: Path) -> None:
    """As Lightning's, which calls the one before and stops training after the batch. It is called once, and what the
    process does until its end is not cut short."""

    def body(note: Any) -> None:
        lazyckpt.commit_on(signal.SIGTERM)
        ours = signal.getsignal(signal.SIGTERM)
        stop: list[int] = []

        def users(number: int, frame: Any) -> None:
            note("handler")
            stop.append(number)
            ours(number, frame)  # type: ignore[operator]

        signal.signal(signal.SIGTERM, users)
        with lazyckpt.Saver(**TINY) as saver:
            saver.save(torch.ones(9), tmp_path / "a.pt")
            note("ready")
            wait_for(lambda: stop)
            time.sleep(SLOW_S)  # the signal is not sent again
            saver.save(torch.ones(9), tmp_path / "b.pt")
        sys.exit(5)

    process = Child(body)
    assert process.terminated() == 5
    assert process.lines().count("handler") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "b.pt"]


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    def body(note: Any) -> None:
        lazyckpt.commit_on(signal.SIGTERM, deadline=60)
        hold_the_disk(60)
        training(tmp_path, note, steps=1)
        note("ready")
        for _ in range(600):
            time.sleep(0.1)
            note("alive")

    process = Child(body)
    process.lines(until="ready")
    os.kill(process.pid, signal.SIGTERM)
    process.lines(until="alive")
    assert len(process.lines()) > 2, "training goes on meanwhile"
    os.kill(process.pid, signal.SIGTERM)
    assert process.end(timeout_s=20) == -signal.SIGTERM


def test_a_lock_that_the_main_thread_holds_does_not_hold_up_the_commit(tmp_path: Path) -> None:
    """A handler that waited itself would wait for a thread that waits for what the handler's thread holds."""

    def body(note: Any) -> None:
        lazyckpt.commit_on(signal.SIGTERM, deadline=30)
        hold_the_disk(SLOW_S)
        model = torch.nn.Linear(64, 64)
        saver = lazyckpt.Saver(**TINY)
        handle = saver.save(model.state_dict(), tmp_path / "a.pt")
        with handle._snapshot._lock, saver._background._removal:  # type: ignore[union-attr]
            signal.raise_signal(signal.SIGTERM)
        idle()

    begin = time.monotonic()
    assert Child(body).end() == -signal.SIGTERM
    assert time.monotonic() - begin < 20
    assert (tmp_path / "a.pt").is_file()


@pytest.mark.parametrize("waiting", ["result", "wait_captured", "gate", "save", "wait", "close", "sleep"])
def test_waits_of_the_main_thread_notice_the_signal(waiting: str, tmp_path: Path) -> None:
    def body(note: Any) -> None:
        lazyckpt.commit_on(signal.SIGTERM, deadline=0.2)
        hold_the_disk(60)
        model = torch.nn.Linear(512, 512)  # larger than the ring
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        lazyckpt.Saver(**TINY)  # installs the gate
        model(torch.ones(1, 512)).sum().backward()
        optimizer.step()
        saver = lazyckpt.Saver(**TINY, max_in_flight=1)
        handle = saver.save(model.state_dict(), tmp_path / "a.pt")
        note("ready")
        waits: dict[str, Callable[[], object]] = {
            "result": handle.result,
            "wait_captured": handle.wait_captured,
            "gate": optimizer.step,
            "save": lambda: saver.save(model.state_dict(), tmp_path / "b.pt"),
            "wait": saver.wait,
            "close": saver.close,
            "sleep": idle,
        }
        waits[waiting]()
        time.sleep(60)

    process = Child(body)
    process.lines(until="ready")
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGTERM)
    assert process.end(timeout_s=20) == -signal.SIGTERM


def test_a_forked_child_ends_at_once(tmp_path: Path) -> None:
    """A worker of a DataLoader, or of a pool that is terminated, inherits the handler and nothing to commit."""

    def body(note: Any) -> None:
        lazyckpt.commit_on(signal.SIGTERM, deadline=60)
        hold_the_disk(SLOW_S)
        training(tmp_path, note, steps=1)
        reads, writes = os.pipe()
        worker = os.fork()
        if worker == 0:
            os.write(writes, b"!")
            idle()
        os.read(reads, 1)  # Python forgets a signal that comes while it makes the fork its own
        os.kill(worker, signal.SIGTERM)
        begin = time.monotonic()
        code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
        note(f"worker {code} {time.monotonic() - begin < 10}")
        wait_for(lambda: committed(tmp_path) == [1])

    process = Child(body)
    assert process.end() == 0
    assert f"worker {-signal.SIGTERM} True" in process.lines()


def test_close_puts_the_former_handler_back(tmp_path: Path) -> None:
    def users(number: int, frame: object) -> None: ...

    with handler(signal.SIGUSR1, users):
        with lazyckpt.commit_on(signal.SIGUSR1):
            assert signal.getsignal(signal.SIGUSR1) is not users
        assert signal.getsignal(signal.SIGUSR1) is users
        # Closed under a handler that was installed later: that one stays, and ours does nothing any more.
        came: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
        ours = lazyckpt.commit_on(signal.SIGUSR1)
        below = signal.getsignal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, lambda number, frame: below(number, frame))  # type: ignore[operator]
        top = signal.getsignal(signal.SIGUSR1)
        ours.close()
        assert signal.getsignal(signal.SIGUSR1) is top
        signal.raise_signal(signal.SIGUSR1)
        assert came == [signal.SIGUSR1]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGRTMIN + 3])
def test_a_signal_that_is_ignored_is_ignored_after_the_commit(number: int, tmp_path: Path, caplog: Any) -> None:
    """Regression: of a real-time signal, which has no name, nothing was said but a traceback."""
    with handler(number, signal.SIG_IGN), lazyckpt.commit_on(number) as commit:
        for count in (1, 2):
            signal.raise_signal(number)
            wait_for(lambda count=count: len(caplog.records) == count and not commit._committing)  # type: ignore[misc]


def test_what_makes_no_sense() -> None:
    before = signal.getsignal(signal.SIGTERM)
    for wrong in (
        lambda: lazyckpt.commit_on(),
        lambda: lazyckpt.commit_on(signal.SIGKILL),
        lambda: lazyckpt.commit_on(signal.SIGTERM, 1000),
        lambda: lazyckpt.commit_on(signal.SIGTERM, deadline=-1),
        lambda: lazyckpt.commit_on(signal.SIGTERM, deadline=float("nan")),
    ):
        with pytest.raises(lazyckpt.ConfigError, match="commit_on"):
            wrong()
    with ThreadPoolExecutor(1) as other, pytest.raises(lazyckpt.ConfigError, match="main thread"):
        other.submit(lazyckpt.commit_on, signal.SIGTERM).result()
    assert signal.getsignal(signal.SIGTERM) == before


@contextlib.contextmanager
def handler(number: int, action: Any) -> Iterator[None]:
    before = signal.signal(number, action)
    try:
        yield
    finally:
        signal.signal(number, before)


def wait_for(condition: Callable[[], Any], timeout_s: float = 20) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
