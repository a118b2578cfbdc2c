"""Training on a device: each checkpoint is, bit for bit, what the training stream had made of the state at its save.

These tests run on the fake driver and on a real GPU alike.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from gpu.machines import RECIPES, RINGS, Machine, Real, Recipe, Sharp, Training, save_at_every_step, saved
from lazyckpt import _engine

SMALL = RINGS["smaller"]
PLAIN = Recipe()


@pytest.fixture
def training(machine: Machine) -> Training:
    """A training that has stepped once."""
    training = Training(machine)
    training.step()
    return training


def save(saver: lazyckpt.Saver, training: Training, path: Path) -> tuple[lazyckpt.SaveHandle, Any]:
    handle = saver.save(training.state(), path)
    return handle, training.machine.picture(training.state())


@pytest.mark.parametrize("ring", RINGS)
def test_a_step_right_after_every_save(machine: Machine, ring: str, tmp_path: Path) -> None:
    handles = save_at_every_step(Training(machine), 12, tmp_path, **RINGS[ring])
    eager = [handle.metrics.eager_bytes for handle in handles[1:]]
    assert 0 < max(eager) < 0.1 * handles[0].metrics.bytes


@pytest.mark.parametrize("name", RECIPES)
def test_every_way_to_train(machine: Machine, name: str, tmp_path: Path) -> None:
    if name == "capturable" and not torch.cuda.is_available():
        pytest.skip("only a GPU has that")
    save_at_every_step(Training(machine, RECIPES[name]), 4, tmp_path)


def test_a_ring_that_cannot_be_pinned(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Copies pass the small buffer, with one warning, and so do those of a restore."""
    if isinstance(machine, Real) and not torch.cuda.is_available():
        pytest.skip("the host needs no pinned memory")
    monkeypatch.setattr(_engine, "Engine", partial(_engine.Engine, pin_ring=False))
    monkeypatch.setattr("lazyckpt.warn._given", set())
    training = Training(machine)
    training.step()
    with pytest.warns(UserWarning, match="pass a small buffer") as caught, lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=training.model, optimizer=training.optimizer)
        for number in range(3):
            ckpt.save(number)
            picture = machine.picture(training.state())
            training.step()
        assert ckpt.restore() == 2
        assert machine.content(training.state()) == machine.developed(picture)
    assert len([w for w in caught if "small buffer" in str(w.message)]) == 1


WAITS: dict[str, Callable[[Training, lazyckpt.SaveHandle], Any]] = {
    "wait_captured()": lambda training, handle: lazyckpt.wait_captured(),
    "handle.wait_captured()": lambda training, handle: handle.wait_captured(),
    "the step of an unknown optimizer": lambda training, handle: Sharp(training.model.parameters(), lr=0.1).step(),
    "load_state_dict()": lambda training, handle: training.model.load_state_dict(training.model.state_dict()),
}


@pytest.mark.parametrize("wait", WAITS)
def test_after_a_wait_on_the_host_any_stream_may_write(training: Training, wait: str, tmp_path: Path) -> None:
    """Regression: it did not wait for eager bytes (BatchNorm's buffers), and a stream that nothing orders behind them
    tore the file. Without such a wait only the stream that was current at save() comes after them."""
    with lazyckpt.Saver(host_buffer_bytes=32 << 20) as saver:
        saver.watch(training.model)
        for number in range(3):
            training.machine.keep_busy()
            picture = training.machine.picture(training.state())  # in the training stream, before the copies
            handle = saver.save(training.state(), tmp_path / f"{number}.pt")
            WAITS[wait](training, handle)
            training.machine.write_aside([*training.model.buffers(), *training.owned()])
            assert saved(handle.result(60)) == training.machine.developed(picture)
            training.step()


def test_two_devices_each_wait_for_their_own(machine: Machine, tmp_path: Path) -> None:
    if machine.devices < 2:
        pytest.skip("one device only")
    first, second = Training(machine), Training(machine, device=1)
    with lazyckpt.Saver(**SMALL) as saver:
        for training in (first, second):
            training.step()
        for number in range(10):
            state = {"first": first.state(), "second": second.state()}
            handle = saver.save(state, tmp_path / f"{number}.pt")
            picture = machine.picture(state)
            first.step_alone()
            second.step_alone()
            assert saved(handle.result(60)) == machine.developed(picture)


def test_host_memory_of_an_optimizer_is_copied_before_its_step(training: Training, tmp_path: Path, disk: Any) -> None:
    """Some parameters are offloaded: a wait on the device would not keep the host from writing to them."""
    other = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(10)))
    optimizer = torch.optim.AdamW([*training.model.parameters(), *other.parameters()])
    training.optimizer = optimizer

    def backward() -> None:
        training.backward()
        other(torch.ones(1, 300)).sum().backward()

    def step() -> None:
        optimizer.step()
        training.machine.wrote([t for t in training.owned() if t.shape[-1] == 192 or t.numel() == 192])

    with lazyckpt.Saver(**SMALL) as saver:
        backward()
        step()
        for number in range(3):
            disk.hold()
            state = {**training.state(), "other": other.state_dict()}
            handle = saver.save(state, tmp_path / f"{number}.pt")
            picture = training.machine.picture(state)
            backward()
            disk.release(after_s=0.1)
            step()
            assert saved(handle.result(30)) == training.machine.developed(picture)


def test_a_captured_step_makes_its_optimizer_eager_until_somebody_waits_by_hand(
    machine: Machine, graphs: None, tmp_path: Path
) -> None:
    training = Training(machine, RECIPES["capturable"] if torch.cuda.is_available() else PLAIN)
    training.step()
    with lazyckpt.Saver(**SMALL) as saver:
        before, as_before = save(saver, training, tmp_path / "before.pt")
        graph = machine.new_graph(gated=False)
        with machine.capture(graph, training.step), pytest.raises(lazyckpt.ConfigError, match="capture"):
            saver.save(training.state(), tmp_path / "inside.pt")
        assert saved(before.result(60)) == machine.developed(as_before)
        graph.replay()
        eager = []
        for number in range(8):
            handle, picture = save(saver, training, tmp_path / f"{number}.pt")
            if number >= 4:
                lazyckpt.wait_captured()
            graph.replay()
            assert saved(handle.result(60)) == machine.developed(picture)
            eager.append(handle.metrics.eager_bytes / handle.metrics.bytes)
    assert min(eager[:4]) > 0.9 and max(eager[5:]) < 0.1


def test_steps_of_a_graph_that_is_gated_are_lazy(machine: Machine, graphs: None, tmp_path: Path) -> None:
    training = Training(machine, RECIPES["capturable"] if torch.cuda.is_available() else PLAIN)
    training.step()
    with lazyckpt.Saver(host_buffer_bytes=32 << 20) as saver:
        graph = machine.new_graph(gated=True)
        with machine.capture(graph, training.step):
            pass
        for number in range(8):
            graph.replay()
            handle, picture = save(saver, training, tmp_path / f"{number}.pt")
            graph.replay()
            assert saved(handle.result(60)) == machine.developed(picture)
            assert handle.metrics.eager_bytes < 0.1 * handle.metrics.bytes


@pytest.mark.parametrize("how", ["os._exit()", "its own Saver"])
def test_a_forked_child_leaves_the_device_alone(training: Training, how: str, tmp_path: Path) -> None:
    """While copies are under way. It has no CUDA; its references to the parent's Saver and handles go with it."""
    with lazyckpt.Saver(host_buffer_bytes=32 << 20) as saver:
        for number in range(3):
            handle, picture = save(saver, training, tmp_path / f"{number}.pt")
            if (child := os.fork()) == 0:
                status = 1
                try:
                    with contextlib.suppress(lazyckpt.ClosedError):  # if it was pending at the fork
                        handle.result(30)
                    if how == "its own Saver":
                        with lazyckpt.Saver() as other:
                            other.save({"a": torch.ones(5)}, tmp_path / "child.pt", blocking=True)
                    del saver, handle
                    gc.collect()
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            training.step()
            assert saved(handle.result(60)) == training.machine.developed(picture)


@pytest.mark.parametrize("audit", [False, True])
def test_a_write_behind_the_gate_is_named(training: Training, audit: bool, tmp_path: Path) -> None:
    """By the version that torch counts, or, if it does not, by the audit's checksums."""
    weight = training.model.get_parameter("0.0.weight")
    with lazyckpt.Saver(audit=audit, witness="versions", **SMALL) as saver:
        whole = saver.save(training.state(), tmp_path / "whole.pt")
        training.step()
        whole.result(30)
        handle = saver.save(training.state(), tmp_path / "torn.pt")
        if audit:
            training.machine.write_silently(weight)
        else:
            weight.detach().add_(1)
        training.step()
        with pytest.raises(lazyckpt.TornSnapshotError, match=r"0\.0\.weight.*written"):
            handle.result(30)
    training.machine.forgive()


def test_frozen_parameters_become_lazy(training: Training, tmp_path: Path) -> None:
    frozen = training.model[0]
    frozen.requires_grad_(False)
    training.optimizer = torch.optim.AdamW(p for p in training.model.parameters() if p.requires_grad)
    training.step()
    eager = []
    with lazyckpt.Saver(**SMALL) as saver:
        saver.watch(training.model)
        for number in range(4):
            handle, picture = save(saver, training, tmp_path / f"{number}.pt")
            training.step()
            assert saved(handle.result(30)) == training.machine.developed(picture)
            eager.append(handle.metrics.eager_bytes)
    assert eager[1] - eager[3] >= frozen[0].weight.nbytes


def test_copies_go_on_while_another_thread_keeps_the_gil(training: Training, tmp_path: Path) -> None:
    stop = threading.Event()
    busy = threading.Thread(target=lambda: [math.factorial(2000) for _ in iter(stop.is_set, True)])
    busy.start()
    try:
        with lazyckpt.Saver(**RINGS["two chunks"]) as saver:
            handle, picture = save(saver, training, tmp_path / "a.pt")
            training.step()
            assert saved(handle.result(60)) == training.machine.developed(picture)
    finally:
        stop.set()
        busy.join()


def test_restore_reads_into_parameters_in_place(machine: Machine, tmp_path: Path) -> None:
    """What comes after the restore finds it: training goes on from there, and saves again."""
    training = Training(machine)
    with lazyckpt.Checkpointer(tmp_path, **RINGS["larger than the state"]) as ckpt:
        ckpt.track(model=training.model, optimizer=training.optimizer)
        training.step()
        ckpt.save(1)
        picture = machine.picture(training.state())
        places = [p.data_ptr() for p in training.model.parameters()]
        training.step()
        assert machine.content(training.state()) != machine.developed(picture)
        assert ckpt.restore() == 1
        assert machine.content(training.state()) == machine.developed(picture)
        assert [p.data_ptr() for p in training.model.parameters()] == places
        training.step()
        ckpt.save(2, blocking=True)


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_a_lone_file_is_the_same_when_it_is_loaded(training: Training, name: str, tmp_path: Path) -> None:
    tensors = dict(training.model.state_dict())
    lazyckpt.save(tensors, tmp_path / name)
    found = lazyckpt.load(tmp_path / name, map_location="cpu" if name == "a.pt" else None)
    expected = training.machine.content(tensors)
    assert {key: t.contiguous().flatten().view(torch.uint8).numpy().tobytes() for key, t in found.items()} == expected
