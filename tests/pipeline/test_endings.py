"""However a process ends with saves in flight: what was saved is committed if the interpreter ends, and a forked child
touches nothing of its parent's."""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from endings import in_a_child
from lazyckpt.pipeline.background import Background
from lazyckpt.storage import commit

TINY = {"chunk_bytes": 16 << 10, "host_buffer_bytes": 256 << 10}
HELD_S = 0.3

# Torch is imported once; each end is that of a fork, the interpreter's own included.
DRIVER = f"""
import atexit, gc, json, os, sys, threading, time
import torch, lazyckpt
from lazyckpt.pipeline.background import Background
torch.set_num_threads(1)
persist = Background._persist
def slowly(self, flight):
    time.sleep({HELD_S})
    persist(self, flight)
Background._persist = slowly
gc.freeze()  # or each end would collect what torch holds
def save(name):
    saver.save(model.state_dict(), folder + "/" + name)
children = {{}}
for folder, body in json.loads(sys.argv[1]).items():
    child = os.fork()
    if child == 0:
        os.dup2(os.open(folder + ".err", os.O_CREAT | os.O_WRONLY), 2)
        model = torch.nn.Linear(64, 64)
        saver = lazyckpt.Saver(chunk_bytes=16 << 10, host_buffer_bytes=256 << 10)
        exec(body)
        break
    children[folder] = child
else:  # they end side by side
    print(json.dumps({{f: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for f, child in children.items()}}))
"""
ENDS = {
    "the end of the script": ("save('a.pt')", 0, True),
    "sys.exit": ("save('a.pt'); sys.exit(4)", 4, True),
    "an exception": ("save('a.pt'); raise RuntimeError('mine')", 1, True),
    "the Saver is dropped": ("save('a.pt'); del saver", 0, True),
    "in an exit handler": ("atexit.register(save, 'a.pt')", 0, False),
    "in a thread that outlives the main thread": (
        "threading.Thread(target=lambda: (time.sleep(1), save('a.pt'))).start()",
        0,
        False,
    ),
    "os._exit": ("save('a.pt'); os._exit(5)", 5, False),
}


def test_what_was_saved_is_committed_when_the_interpreter_ends(tmp_path: Path) -> None:
    """However it ends; ``os._exit`` and signals are not its end."""
    folders = {}
    for number, end in enumerate(ENDS):
        folders[end] = folder = tmp_path / str(number)
        folder.mkdir()
    bodies = {str(folders[end]): body for end, (body, _, _) in ENDS.items()}
    command = [sys.executable, "-c", DRIVER, json.dumps(bodies)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    for end, (_, code, is_committed) in ENDS.items():
        folder = folders[end]
        said = Path(f"{folder}.err").read_text()
        assert codes[str(folder)] == code, (end, said)
        assert (folder / "a.pt").exists() is is_committed, (end, said)
        if is_committed:
            assert [p.name for p in folder.iterdir()] == ["a.pt"], end
            lazyckpt.load(folder / "a.pt")
        elif code == 0:
            assert "ClosedError" in said, (end, said)
        with lazyckpt.Saver(**TINY) as saver:
            saver.save(1, folder / "b.pt")
        assert not [p.name for p in folder.iterdir() if p.name.startswith(".")], f"{end}: swept"


def test_a_daemon_thread_in_the_engine_does_not_spoil_the_end() -> None:
    """Regression: it asked for the GIL when there was none any more, and the process ended with SIGABRT."""
    script = """
import threading, time
from lazyckpt import _engine
data = bytes(100_000)
def forever():
    while True:
        _engine.crc32(data)
for _ in range(4):
    threading.Thread(target=forever, daemon=True).start()
time.sleep(0.2)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


# forks


def test_an_exiting_child_does_not_touch_what_its_parent_is_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child runs the exit handlers and destructors that it inherited: with the default exit of multiprocessing, after
    it tried everything that a child might call."""
    hold, staged = threading.Event(), threading.Event()
    stage = commit.FileStaging.describe

    def held(self: commit.FileStaging, *args: Any) -> None:
        staged.set()
        assert hold.wait(60)
        stage(self, *args)

    monkeypatch.setattr(commit.FileStaging, "describe", held)
    saver = lazyckpt.Saver(**TINY)
    handle = saver.save(torch.arange(999), tmp_path / "a.pt")
    assert staged.wait(30)
    before = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*"))

    def misuse(outcome: Any) -> None:
        said = []
        hold.set()  # in this process
        for use in (
            lambda: saver.save(1, tmp_path / "b.pt"),
            lambda: saver.stage(tmp_path / "c"),
            lambda: saver.remove("x"),
        ):
            try:
                use()
            except lazyckpt.ClosedError:
                said.append("closed")
        saver.close()
        lazyckpt.wait_captured()
        lazyckpt.Saver(**TINY).save(2, tmp_path / "own.pt").result(timeout=30)
        (tmp_path / "own.pt").unlink()
        outcome.put(said)

    context = multiprocessing.get_context("fork")
    outcome = context.SimpleQueue()
    child = context.Process(target=misuse, args=(outcome,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert outcome.get() == ["closed"] * 3
    with context.Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
    assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*")) == before
    hold.set()
    assert torch.equal(torch.load(handle.result(timeout=30)), torch.arange(999))
    saver.close()


def test_a_child_that_waits_for_a_save_of_its_parent_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: result(), exception() and wait() for a save that was in flight at the fork waited for ever."""
    hold = threading.Event()
    persist = Background._persist

    def held(self: Background, flight: Any) -> None:
        assert hold.wait(60)
        persist(self, flight)

    monkeypatch.setattr(Background, "_persist", held)
    saver = lazyckpt.Saver(**TINY)
    handle = saver.save(torch.arange(999), tmp_path / "a.pt")

    def ask(wait: Callable[[], Any]) -> None:
        signal.alarm(20)
        if wait in (saver.close, handle.wait_captured):  # no thread reads the state of this process
            wait()
        elif wait == handle.exception:
            assert isinstance(wait(), lazyckpt.ClosedError)
        else:
            with pytest.raises(lazyckpt.ClosedError):
                wait()

    for wait in (handle.result, handle.exception, saver.wait, handle.wait_captured, saver.close):
        in_a_child(partial(ask, wait))
    hold.set()
    handle.result(timeout=30)
    saver.close()
