"""Training on a GPU: every checkpoint is, bit for bit, what the training stream had made of the state at its save()."""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt import _engine
from lazyckpt.capture.snapshot import Snapshot

Pending = Callable[[lazyckpt.SaveHandle], int]

KIB, MIB = 1 << 10, 1 << 20
STEPS = 12
TRIALS = {"cuda": 1000, "cpu": 60}
WIDTH = {"cuda": 1024, "cpu": 192}


@dataclass(frozen=True)
class Recipe:
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    knobs: tuple[tuple[str, Any], ...] = ()
    autocast: torch.dtype | None = None
    scaled: bool = False
    compiled: bool = False


RECIPES = {
    "foreach": Recipe(knobs=(("foreach", True),)),
    "one by one": Recipe(knobs=(("foreach", False),)),
    "fused": Recipe(knobs=(("fused", True),)),
    "capturable": Recipe(knobs=(("capturable", True),)),
    "SGD with momentum": Recipe(torch.optim.SGD, (("momentum", 0.9),)),
    "bfloat16": Recipe(knobs=(("fused", True),), autocast=torch.bfloat16),
    "float16 and GradScaler": Recipe(autocast=torch.float16, scaled=True),
    "float16 and GradScaler, fused": Recipe(knobs=(("fused", True),), autocast=torch.float16, scaled=True),
    "compiled": Recipe(knobs=(("fused", True),), autocast=torch.bfloat16, compiled=True),
}


class Training:
    """A model with buffers that change in every forward, and everything that its training has to save."""

    def __init__(
        self, device: torch.device, recipe: Recipe = RECIPES["fused"], width: int = 0, layers: int = 4
    ) -> None:
        torch.manual_seed(0)
        self.device, self.recipe = device, recipe
        width = width or WIDTH[device.type]
        blocks = [
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width)) for _ in range(layers)
        ]
        self.model = torch.nn.Sequential(*blocks).to(device)
        backend = "inductor" if device.type == "cuda" else "eager"
        self.forward = torch.compile(self.model, backend=backend) if recipe.compiled else self.model
        self.optimizer = recipe.optimizer(self.model.parameters(), lr=0.01, **dict(recipe.knobs))
        self.scaler = torch.amp.GradScaler(device.type, init_scale=256.0, enabled=recipe.scaled)
        self.batch = torch.randn(16, width, device=device)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, self.recipe.autocast, enabled=self.recipe.autocast is not None):
            loss = self.forward(self.batch).float().square().mean()
        self.scaler.scale(loss).backward()

    def step(self) -> None:
        self.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        return {name: part.state_dict() for name, part in parts.items()}


def blocking_copy(value: Any) -> Any:
    """As it is in the order of the current stream, before anything that comes later."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: blocking_copy(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [blocking_copy(inner) for inner in value]
    return copy.deepcopy(value)


def differences(found: Any, expected: Any, at: str = "") -> list[str]:
    """Where two states differ, in any bit."""
    if isinstance(expected, torch.Tensor):
        same = found.dtype == expected.dtype and found.shape == expected.shape and raw(found).equal(raw(expected))
        return [] if same else [at]
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            return [at]
        return [d for key in expected for d in differences(found[key], expected[key], f"{at}.{key}")]
    if isinstance(expected, list):
        if len(found) != len(expected):
            return [at]
        return [d for n, inner in enumerate(expected) for d in differences(found[n], inner, f"{at}.{n}")]
    return [] if found == expected else [at]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def wrong_in(path: Path, expected: Any) -> list[str]:
    return differences(dict(torch.load(path, map_location="cpu")), expected)


# The optimizer steps as soon as save() returns.

RINGS = {
    "larger than the state": {"chunk_bytes": 256 * KIB, "host_buffer_bytes": 16 * MIB},
    "smaller": {"chunk_bytes": 64 * KIB, "host_buffer_bytes": 256 * KIB},
}


class Disturbance:
    """Keeps the training stream or the way to the host busy, by turns, so that copies begin late or take long."""

    def __init__(self, device: torch.device) -> None:
        self._random = random.Random(0)
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._other = torch.cuda.Stream()
            self._large = torch.zeros(32 * MIB, dtype=torch.uint8, device=device)
            self._pinned = torch.empty(32 * MIB, dtype=torch.uint8, pin_memory=True)

    def begin(self) -> None:
        kind = self._random.randrange(3)
        if self._on_gpu and kind == 0:
            torch.cuda._sleep(self._random.randrange(2_000_000))  # cycles
        elif self._on_gpu and kind == 1:
            with torch.cuda.stream(self._other):
                self._pinned.copy_(self._large, non_blocking=True)


def torn_trials(training: Training, trials: int, folder: Path, **knobs: Any) -> Iterator[bool]:
    """Of each trial of a step right after a save: whether the checkpoint is not what it was to be."""
    disturbance = Disturbance(training.device)
    training.step()
    with lazyckpt.Saver(**knobs) as saver:
        training.optimizer.step()
        for number in range(trials):
            disturbance.begin()
            expected = blocking_copy(training.state())
            handle = saver.save(training.state(), folder / f"{number}.pt")
            training.optimizer.step()  # the gradients are still there
            yield wrong_in(handle.result(60), expected) != []
            handle.path.unlink()


@pytest.mark.parametrize("ring", RINGS)
def test_a_thousand_steps_right_after_a_save(device: torch.device, ring: str, tmp_path: Path) -> None:
    training = Training(device, width=WIDTH["cpu"])
    assert sum(torn_trials(training, TRIALS[device.type] // 2, tmp_path, **RINGS[ring])) == 0


def test_steps_right_after_a_save_where_the_ring_cannot_be_pinned(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Copies pass the small buffer, and so do those of a restore."""
    monkeypatch.setattr(_engine, "Engine", partial(_engine.Engine, pin_ring=False))
    training = Training(gpu)
    with pytest.warns(UserWarning, match="pass a small buffer"):
        assert sum(torn_trials(training, 50, tmp_path, chunk_bytes=256 * KIB, host_buffer_bytes=16 * MIB)) == 0
    with lazyckpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.track(model=training.model, optimizer=training.optimizer)
        ckpt.save(1, blocking=True)
        expected = blocking_copy(training.state())
        training.step()
        ckpt.restore()
        assert differences(training.state(), expected) == []


@pytest.mark.parametrize("versions", [True, False])
def test_without_the_gate_checkpoints_are_torn(
    device: torch.device, versions: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the trials above would show it; and the versions that torch counts, not those of fused steps, tell in time."""
    monkeypatch.setattr(Snapshot, "_wait", lambda self, owners, on_device: None)
    if not versions:
        monkeypatch.setattr(Snapshot, "_changed", lambda self, owners, versions: None)
    training = Training(device, RECIPES["foreach"])
    trials = torn_trials(training, 100, tmp_path, witness="versions", **RINGS["smaller"])
    with pytest.raises(lazyckpt.TornSnapshotError) if versions else nullcontext():
        assert any(trials) != versions


# What is on the device alone.


class Large:
    """State whose copy takes tens of milliseconds, and a kernel that takes longer."""

    def __init__(self, device: torch.device) -> None:
        self.parameters = [torch.nn.Parameter(torch.rand(32 * MIB, device=device)) for _ in range(4)]
        for parameter in self.parameters:
            parameter.grad = torch.rand_like(parameter)
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9)
        self.matrix = torch.rand(8192, 8192, device=device, dtype=torch.bfloat16)

    def state(self) -> dict[str, Any]:
        return {"parameters": self.parameters, "optimizer": self.optimizer.state_dict()}

    def load_modules(self) -> None:
        """Launches every kernel of the tests once. A first launch loads a module, and the driver may hold a lock until
        the device is idle: the engine's calls would wait for it, and a test would blame the engine."""
        torch.mm(self.matrix, self.matrix)
        blocking_copy(self.state())
        small = torch.zeros(1, device=self.matrix.device) + torch.ones(1, device=self.matrix.device)
        small += 1
        assert small.item() == 2

    def compute(self) -> torch.cuda.Event:
        """A second of work or so for the device; it has begun, and the event says when it is over."""
        for _ in range(600):
            torch.mm(self.matrix, self.matrix)
        done = torch.cuda.Event(enable_timing=True)
        done.record()
        return done


@pytest.fixture
def large(gpu: torch.device, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Large, lazyckpt.Saver]]:
    """With a Saver whose ring holds it, is faulted in and pinned."""
    large = Large(gpu)
    with lazyckpt.Saver(host_buffer_bytes=2 << 30, chunk_bytes=getattr(request, "param", 8 * MIB)) as saver:
        large.optimizer.step()
        saver.save(large.state(), tmp_path / "warm.pt", blocking=True)
        large.optimizer.step()
        large.load_modules()
        torch.cuda.synchronize()
        yield large, saver
    for path in tmp_path.iterdir():
        path.unlink()


def test_copies_overlap_with_computing(large: tuple[Large, lazyckpt.Saver], pending: Pending, tmp_path: Path) -> None:
    """All of the copy is over while the kernels enqueued behind save() are still running."""
    job, saver = large
    expected = blocking_copy(job.state())
    torch.cuda.synchronize()
    handle = saver.save(job.state(), tmp_path / "a.pt")
    assert pending(handle) > 0
    end = job.compute()
    assert handle.wait_captured(30)
    assert not end.query(), "the copies have waited for the computing"
    handle.result(60)
    assert wrong_in(handle.path, expected) == []


def test_the_training_stream_does_not_wait_for_lazy_copies(
    large: tuple[Large, lazyckpt.Saver], pending: Pending, tmp_path: Path
) -> None:
    """Nor does .item(): it would be over after all copies otherwise."""
    job, saver = large
    small = torch.ones(1, device=job.matrix.device)
    handle = saver.save(job.state(), tmp_path / "a.pt")
    behind = torch.cuda.Event()
    behind.record()
    behind.synchronize()
    assert pending(handle) > 0
    assert small.item() == 1
    assert pending(handle) > 0
    handle.result(60)


@pytest.mark.parametrize("large", [512 * MIB], indirect=True)  # bytes of a chunk: all are on their way at once
def test_the_device_waits_and_not_the_host(large: tuple[Large, lazyckpt.Saver], tmp_path: Path) -> None:
    """Behind a long kernel: neither save() nor the step waits for that, and the step ends behind the copies."""
    job, saver = large
    expected = blocking_copy(job.state())
    torch.cuda.synchronize()
    end = job.compute()
    handle = saver.save(job.state(), tmp_path / "a.pt")
    assert not end.query(), "save() has waited for the device"
    job.optimizer.step()
    assert not end.query(), "the step has waited for the device"
    assert wrong_in(handle.result(60), expected) == []


def test_item_is_quick_while_copying(large: tuple[Large, lazyckpt.Saver], pending: Pending, tmp_path: Path) -> None:
    job, saver = large
    small = torch.ones(1, device=job.matrix.device)
    times = []
    handle = saver.save(job.state(), tmp_path / "a.pt")
    while pending(handle) > 0:
        start = time.perf_counter()
        small.item()
        times.append(time.perf_counter() - start)
    handle.result(60)
    assert len(times) > 3
    assert statistics.median(times) < 0.02  # it may stand behind a few chunks, not behind all of them


def test_nothing_is_allocated_on_the_device(large: tuple[Large, lazyckpt.Saver], tmp_path: Path) -> None:
    job, saver = large
    for number in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        free, _ = torch.cuda.mem_get_info()
        handle = saver.save(job.state(), tmp_path / f"{number}.pt")
        assert handle.wait_captured(60)
        assert torch.cuda.max_memory_allocated() == allocated
        assert torch.cuda.memory_reserved() == reserved
        assert free - torch.cuda.mem_get_info()[0] < 64 * MIB, "by the driver, past torch's allocator"
        handle.result(60)
        job.optimizer.step()


def graphed(training: Training, graph: torch.cuda.CUDAGraph) -> torch.cuda.CUDAGraph:
    """With a whole step of it, warmed up as torch demands."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            training.step()
    torch.cuda.current_stream().wait_stream(side)
    training.optimizer.zero_grad()
    with torch.cuda.graph(graph):
        training.step()
    return graph


def test_steps_that_are_replayed(gpu: torch.device, tmp_path: Path) -> None:
    """Eager until somebody waits by hand in front of a replay, lazy from then on."""
    training = Training(gpu, RECIPES["capturable"])
    with lazyckpt.Saver() as saver:
        graph = graphed(training, torch.cuda.CUDAGraph())
        graph.replay()
        eager = []
        for number in range(2 * STEPS):
            by_hand = number >= STEPS
            expected = blocking_copy(training.state())
            handle = saver.save(training.state(), tmp_path / f"{number}.pt")
            if by_hand:
                lazyckpt.wait_captured()
            graph.replay()
            assert wrong_in(handle.result(60), expected) == []
            eager.append(handle.metrics.eager_bytes / handle.metrics.bytes)
            handle.path.unlink()
    assert min(eager[:STEPS]) > 0.9
    assert max(eager[STEPS + 1 :]) < 0.1


def test_steps_of_a_graph_that_is_gated(gpu: torch.device, tmp_path: Path) -> None:
    """Lazy, and nobody waits by hand."""
    training = Training(gpu, RECIPES["capturable"])
    with lazyckpt.Saver() as saver:
        graph = graphed(training, lazyckpt.CUDAGraph())
        for number in range(2 * STEPS):
            graph.replay()
            expected = blocking_copy(training.state())
            handle = saver.save(training.state(), tmp_path / f"{number}.pt")
            graph.replay()
            assert wrong_in(handle.result(60), expected) == []
            assert handle.metrics.eager_bytes < 0.1 * handle.metrics.bytes
            handle.path.unlink()


def test_a_graph_is_captured_while_copies_are_under_way(
    large: tuple[Large, lazyckpt.Saver], pending: Pending, tmp_path: Path
) -> None:
    """In the mode in which a call by any other thread would spoil the capture; and they go on meanwhile."""
    job, saver = large
    expected = blocking_copy(job.state())
    small = torch.zeros(1, device=job.matrix.device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    handle = saver.save(job.state(), tmp_path / "a.pt")
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="global")
        assert pending(handle) > 0
        small += 1
        with pytest.raises(lazyckpt.ConfigError, match="capture"):
            saver.save(job.state(), tmp_path / "inside.pt")
        deadline = time.monotonic() + 30
        while pending(handle) > 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        graph.capture_end()
    assert pending(handle) == 0
    graph.replay()
    assert small.item() == 1
    assert wrong_in(handle.result(60), expected) == []


def test_two_devices(gpu: torch.device, tmp_path: Path) -> None:
    """A model in two halves; each device has its own copies, and its own wait."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one device only")
    first, second = Training(torch.device("cuda:0")), Training(torch.device("cuda:1"))
    with lazyckpt.Saver() as saver:
        for training in (first, second):
            training.step()
        current = torch.cuda.current_device()
        for number in range(STEPS):
            state = {"first": first.state(), "second": second.state()}
            expected = blocking_copy(state)
            handle = saver.save(state, tmp_path / f"{number}.pt")
            first.optimizer.step()
            second.optimizer.step()
            assert torch.cuda.current_device() == current
            assert wrong_in(handle.result(60), expected) == []


def test_restore_into_parameters_on_the_device(device: torch.device, tmp_path: Path) -> None:
    """In place, and what comes after finds it: training goes on as it went on from there."""
    training = Training(device)
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=training.model, optimizer=training.optimizer)
        training.step()
        training.step()
        ckpt.save(2)
        expected = blocking_copy(training.state())
        places = [p.data_ptr() for p in training.model.parameters()]
        for _ in range(3):
            training.step()
        assert differences(training.state(), expected) != []
        assert ckpt.restore() == 2
        assert differences(training.state(), expected) == []
        assert [p.data_ptr() for p in training.model.parameters()] == places
        assert {t.device.type for t in training.model.state_dict().values()} == {device.type}
        ckpt.save(3, blocking=True)
        training.step()


def test_restore_of_many_small_tensors(device: torch.device, tmp_path: Path) -> None:
    """They are copied to the device together; some stay on the host."""
    random.seed(0)
    tensors = {str(n): torch.rand(random.randrange(1, 2000)) for n in range(3000)}
    placed = {name: t if int(name) % 10 == 0 else t.to(device) for name, t in tensors.items()}
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(tensors=placed)
        ckpt.save(1, blocking=True)
        for t in placed.values():
            t.zero_()
        assert ckpt.restore() == 1
    assert differences(placed, tensors) == []


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_load_straight_to_the_device(
    gpu: torch.device, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is left to torch, which would copy from host memory; into memory that a kernel still writes to."""
    training = Training(gpu)
    training.step()
    state = training.state() if name == "a.pt" else training.model.state_dict()
    lazyckpt.save(state, tmp_path / name)

    def copied_by_torch(*_: Any) -> None:
        raise AssertionError("torch copies")

    monkeypatch.setattr(torch.serialization, "default_restore_location", copied_by_torch)
    for _ in range(3):
        used = torch.empty(sum(t.nbytes for t in training.model.parameters()), dtype=torch.uint8, device=gpu)
        torch.cuda._sleep(10_000_000)  # cycles
        used.fill_(255)
        del used  # its memory may be given out again, in the order of this stream
        loaded = lazyckpt.load(tmp_path / name, map_location="cuda")
        assert differences(dict(loaded), state) == []
        model = loaded["model"] if name == "a.pt" else loaded
        assert {t.device for t in model.values()} == {torch.device("cuda", torch.cuda.current_device())}


# Last, since to compile takes longest.


@pytest.mark.parametrize("name", RECIPES)
def test_a_checkpoint_at_every_step(device: torch.device, name: str, tmp_path: Path) -> None:
    if name == "capturable" and device.type != "cuda":
        pytest.skip("only a GPU has that")
    training = Training(device, RECIPES[name])
    with lazyckpt.Saver() as saver:
        training.step()
        saves = []
        for number in range(STEPS):
            expected = blocking_copy(training.state())
            saves.append((saver.save(training.state(), tmp_path / f"{number}.pt"), expected))
            training.step()
        saver.wait()
        assert saver.engine.unpinned == ""
    for handle, expected in saves:
        assert wrong_in(handle.path, expected) == []
    assert max(handle.metrics.eager_bytes for handle, _ in saves[1:]) < 0.1 * saves[0][0].metrics.bytes
