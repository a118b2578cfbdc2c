"""The staging buffer is prepared when training begins, and never for a restore alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt

KIB = 1 << 10
CHUNK = 64 * KIB


class Training:
    """Four megabytes of weights, eight more of Adam's state from the first step on."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1024, 1023)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.nbytes = 3 * 4 * 1024 * 1024

    def step(self) -> None:
        self.model(torch.ones(1, 1024)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def training() -> Training:
    return Training()


def ring_bytes(ckpt: lazyckpt.Checkpointer) -> int:
    return ckpt._saver.engine.ring_bytes


def open_run(path: Path, training: Training, **knobs: Any) -> lazyckpt.Checkpointer:
    ckpt = lazyckpt.Checkpointer(path, chunk_bytes=CHUNK, **knobs)
    ckpt.track(model=training.model, optimizer=training.optimizer)
    return ckpt


def test_after_the_first_step_the_ring_has_room_for_a_checkpoint(training: Training, tmp_path: Path) -> None:
    """All of it: the size is known from what the first step made."""
    with open_run(tmp_path, training) as ckpt:
        before = ring_bytes(ckpt)
        training.step()
        prepared = ring_bytes(ckpt)
        handle = ckpt.save(1)
        handle.result(30)
        assert before <= 2 * CHUNK
        assert training.nbytes + 2 * CHUNK <= prepared < training.nbytes + 4 * CHUNK
        assert ring_bytes(ckpt) - prepared <= CHUNK, "what else is in the file"


def test_who_only_restores_takes_no_memory(training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what it reads through."""
    monkeypatch.setattr("lazyckpt.checkpointer._READ_AHEAD_BYTES", 4 * CHUNK)
    with open_run(tmp_path, training) as ckpt:
        training.step()
        ckpt.save(1, blocking=True)
    with open_run(tmp_path, training) as ckpt:
        reads_with = ring_bytes(ckpt)
        assert ckpt.restore() == 1
        with torch.no_grad():
            training.model(torch.ones(1, 1024))
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).step()
        assert ring_bytes(ckpt) == reads_with == 4 * CHUNK
        training.step()
        assert ring_bytes(ckpt) > training.nbytes


def test_it_takes_no_more_than_it_may(training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyckpt.pipeline.staging_buffer.auto_ring_bytes", lambda chunk_bytes: 5 * chunk_bytes)
    with open_run(tmp_path / "auto", training) as ckpt:
        training.step()
        assert ring_bytes(ckpt) == 5 * CHUNK
    with open_run(tmp_path / "fixed", training, host_buffer_bytes=3 * CHUNK) as ckpt:
        training.step()
        assert ring_bytes(ckpt) == 3 * CHUNK


def test_each_optimizer_adds_what_its_first_step_made(training: Training, tmp_path: Path) -> None:
    """Storages that several hold count once."""
    second = Training()
    with open_run(tmp_path, training) as ckpt:
        ckpt.track(second=second.model, again=torch.nn.Sequential(second.model), other=second.optimizer)
        sizes = []
        for trained in (training, second, training, second):
            trained.step()
            sizes.append(ring_bytes(ckpt))
    weights = training.nbytes // 3
    assert sizes[0] < training.nbytes + weights + 4 * CHUNK
    assert 2 * training.nbytes < sizes[1] == sizes[2] == sizes[3] < 2 * training.nbytes + 4 * CHUNK


def test_a_forked_child_may_step(training: Training, tmp_path: Path) -> None:
    with open_run(tmp_path, training) as ckpt:
        pid = os.fork()
        if pid == 0:
            try:
                training.model.weight.grad = torch.ones_like(training.model.weight)
                training.optimizer.step()
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert ring_bytes(ckpt) <= 2 * CHUNK


def test_a_compiled_step_is_left_alone(training: Training, tmp_path: Path) -> None:
    """What a hook does would be traced. The first save takes the memory then."""
    with open_run(tmp_path, training) as ckpt:
        step = torch.compile(training.optimizer.step, backend="eager")
        training.model(torch.ones(1, 1024)).sum().backward()
        step()
        assert ring_bytes(ckpt) <= 2 * CHUNK
        ckpt.save(1, blocking=True)
        assert ring_bytes(ckpt) > training.nbytes


# On devices


def open_run_on(gpu: Any, path: Path, **knobs: Any) -> tuple[Training, lazyckpt.Checkpointer]:
    training = Training()
    gpu.place(training.model.parameters())
    return training, open_run(path, training, **knobs)


def step_on(gpu: Any, training: Training) -> None:
    training.step()
    gpu.place([t for state in training.optimizer.state.values() for t in state.values() if t.ndim])


@pytest.mark.parametrize("knobs", [{}, {"host_buffer_bytes": 16 << 20}])
def test_the_ring_is_pinned_after_the_first_step(gpu: Any, knobs: Any, tmp_path: Path) -> None:
    training, ckpt = open_run_on(gpu, tmp_path, **knobs)
    with ckpt:
        assert gpu.driver.live()["contexts"] == 0
        step_on(gpu, training)
        wanted = knobs.get("host_buffer_bytes", training.nbytes)
        wait_until(lambda: gpu.driver.live()["registered_bytes"] >= wanted)
        attached = gpu.driver.calls()["cuDevicePrimaryCtxRetain"]
        ckpt.save(1, blocking=True)
        assert gpu.driver.calls()["cuDevicePrimaryCtxRetain"] == attached


def test_not_while_a_graph_is_captured(gpu: Any, tmp_path: Path) -> None:
    """To attach a device would be one of the calls that a capture forbids. The next step does it."""
    gpu.streams[0] = gpu.driver.stream(0)
    training, ckpt = open_run_on(gpu, tmp_path)
    with ckpt:
        gpu.driver.begin_capture(gpu.streams[0])
        gpu.captured = True
        training.step()
        gpu.driver.end_capture(gpu.streams[0])
        gpu.captured = False
        assert gpu.driver.live()["contexts"] == 0
        assert ring_bytes(ckpt) <= 2 * CHUNK
        step_on(gpu, training)
        wait_until(lambda: gpu.driver.live()["registered_bytes"] >= training.nbytes)


def test_a_device_that_cannot_be_attached_fails_the_save_and_no_step(gpu: Any, tmp_path: Path) -> None:
    training, ckpt = open_run_on(gpu, tmp_path)
    with ckpt:
        gpu.driver.fail("cuDevicePrimaryCtxRetain", code=2, sticky=True)
        step_on(gpu, training)
        with pytest.raises(lazyckpt.SaveError, match="cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY"):
            ckpt.save(1)
        gpu.driver.fail("cuDevicePrimaryCtxRetain", nth=1 << 40)
        ckpt.save(1, blocking=True)
