"""Ctrl-C while a store stalls: it acts at once, wherever the call waits."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from object_store import S3, Asked, Fault

import lazyckpt
from lazyckpt import Checkpointer
from lazyckpt.tools import remote

STALLS = {
    "listing": lambda asked: "list-type" in asked.path,
    "manifest": lambda asked: asked.method == "GET" and "manifest" in asked.path,
    "label": lambda asked: asked.method == "HEAD" and "state.pt" in asked.path,
    "bytes": lambda asked: asked.method == "GET" and "state.pt" in asked.path,
}
CALLS = {
    "restore": ("listing", "manifest", "label", "bytes"),
    "load": ("manifest", "label", "bytes"),
    "pull": ("listing", "manifest", "label", "bytes"),
    "push": ("uploads",),
}


def uploads(asked: Asked) -> bool:
    return asked.method in ("PUT", "POST") and "state.pt" in asked.path


@contextlib.contextmanager
def interrupted_at(stalled: Fault) -> Iterator[None]:
    """Ctrl-C once a request has stalled. Raises if it does not act until the request has ended, after a minute."""

    def interrupt() -> None:
        assert stalled.seen.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it
    thread = threading.Thread(target=interrupt)
    thread.start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 30


@pytest.mark.long(first=6)
@pytest.mark.parametrize(("call", "at"), [(call, at) for call, where in CALLS.items() for at in where])
def test_ctrl_c_acts_while_a_store_stalls(s3: S3, tmp_path: Path, call: str, at: str) -> None:
    weights = torch.arange(8.0)
    with Checkpointer(tmp_path / "a", mirrors=[] if call == "push" else [s3.url()]) as ckpt:
        ckpt.track(weights=weights)
        ckpt.save(1).mirrored().result(60)
    ckpt = Checkpointer(tmp_path / "b", mirrors=[s3.url()], read_only=True)
    live = torch.zeros(8)
    ckpt.track(weights=live)

    def make() -> Any:
        if call == "restore":
            return ckpt.restore()
        if call == "load":
            return lazyckpt.load(f"{s3.url()}/step-00000001")
        if call == "pull":
            return remote.pull(s3.url(), tmp_path / "c")
        return remote.push(tmp_path / "a", s3.url())

    with interrupted_at(s3.proxy.inject("stall", STALLS.get(at, uploads), times=10_000)):
        make()
    s3.proxy.heal()
    make()
    assert ckpt.restore() == 1 and torch.equal(live, weights)
    ckpt.close()


SCRIPT = """
import signal, sys, torch, lazyckpt
signal.signal(signal.SIGINT, signal.default_int_handler)
with lazyckpt.Checkpointer(sys.argv[1], mirrors=[sys.argv[2]], read_only=True) as ckpt:
    ckpt.track(weights=torch.zeros(8))
    ckpt.restore()
"""


@pytest.mark.long(first=2)
@pytest.mark.parametrize("at", STALLS)
def test_a_process_ends_at_ctrl_c_while_a_store_stalls(s3: S3, tmp_path: Path, at: str) -> None:
    with Checkpointer(tmp_path / "a", mirrors=[s3.url()]) as ckpt:
        ckpt.track(weights=torch.arange(8.0))
        ckpt.save(1).mirrored().result(60)
    stalled = s3.proxy.inject("stall", STALLS[at], times=10_000)
    job = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "b"), s3.url()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert stalled.seen.wait(60)
    job.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, said = job.communicate(timeout=120)
    assert time.monotonic() - began < 30
    assert job.returncode in (-signal.SIGINT, 130) and said.rstrip().endswith("KeyboardInterrupt"), said
    s3.proxy.heal()
