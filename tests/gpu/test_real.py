"""What only a real GPU shows: that copies overlap, that the host does not wait, and that nothing is allocated."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from fake_cuda.memory import raw
from gpu.machines import RECIPES, RINGS, Real, Training, blocking_copy, map_tensors, saved
from lazyckpt.capture.snapshot import Snapshot

Pending = Callable[[lazyckpt.SaveHandle], int]

MIB = 1 << 20
TRIALS = {"cuda": 1000, "cpu": 60}


def content(tensor: torch.Tensor) -> bytes:
    return raw(tensor.cpu())


def wrong_in(path: Path, expected: Any) -> bool:
    return bool(saved(path) != map_tensors(expected, content))


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
    """Steps right after each save; yields whether the checkpoint is torn."""
    disturbance = Disturbance(next(training.model.parameters()).device)
    training.step()
    with lazyckpt.Saver(**knobs) as saver:
        training.optimizer.step()
        for number in range(trials):
            disturbance.begin()
            expected = blocking_copy(training.state())
            handle = saver.save(training.state(), folder / f"{number}.pt")
            training.optimizer.step()  # the gradients are still there
            yield wrong_in(handle.result(60), expected)
            handle.path.unlink()


@pytest.mark.parametrize("ring", ["larger than the state", "smaller"])
def test_a_thousand_steps_right_after_a_save(device: torch.device, ring: str, tmp_path: Path) -> None:
    training = Training(Real(device))
    assert sum(torn_trials(training, TRIALS[device.type] // 2, tmp_path, **RINGS[ring])) == 0


@pytest.mark.parametrize("versions", [True, False])
def test_without_the_gate_checkpoints_are_torn(
    device: torch.device, versions: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trials above would show it. The versions that torch counts tell in time; fused steps count none."""
    monkeypatch.setattr(Snapshot, "_wait", lambda self, owners, on_device: None)
    if not versions:
        monkeypatch.setattr(Snapshot, "_changed", lambda self, owners, versions: None)
    training = Training(Real(device), RECIPES["foreach"], width=1024 if device.type == "cuda" else 192)
    trials = torn_trials(training, 100, tmp_path, witness="versions", **RINGS["smaller"])
    with pytest.raises(lazyckpt.TornSnapshotError) if versions else nullcontext():
        assert any(trials) != versions


# Copies and computing


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
def large(
    real_gpu: torch.device, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Large, lazyckpt.Saver]]:
    """With a Saver whose ring holds it, is faulted in and pinned."""
    large = Large(real_gpu)
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
    assert not wrong_in(handle.path, expected)


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
    assert not wrong_in(handle.result(60), expected)


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


def test_smaller_copies_and_views_take_no_memory_of_the_device(real_gpu: torch.device, tmp_path: Path) -> None:
    """Regression: dtype= converted there, and views were made dense there."""
    model = torch.nn.Linear(4096, 4096, device=real_gpu)
    weight = model.weight.detach()
    views = {"columns": weight[:, 64:128], "rows": weight[7:9], "turned": weight.t()}
    expected = {name: view.cpu().contiguous() for name, view in views.items()}
    with lazyckpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.track(model=model)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        for dtype in (torch.float16, torch.bfloat16):
            half = ckpt.save_part("model", tmp_path / "half.pt", dtype=dtype).result(60)
            assert torch.equal(torch.load(half)["weight"], model.weight.detach().cpu().to(dtype))
        for name, view in views.items():
            lazyckpt.save({name: view}, tmp_path / "view.safetensors")
            assert torch.equal(lazyckpt.load(tmp_path / "view.safetensors")[name], expected[name])
        assert torch.cuda.max_memory_allocated() == allocated


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
    assert not wrong_in(handle.result(60), expected)


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
    assert map_tensors(placed, content) == map_tensors(tensors, content)


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_load_straight_to_the_device(
    real_gpu: torch.device, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is left to torch, which would copy from host memory; into memory that a kernel still writes to."""
    training = Training(Real(real_gpu))
    training.step()
    state = training.state() if name == "a.pt" else training.model.state_dict()
    lazyckpt.save(state, tmp_path / name)

    def copied_by_torch(*_: Any) -> None:
        raise AssertionError("torch copies")

    monkeypatch.setattr(torch.serialization, "default_restore_location", copied_by_torch)
    for _ in range(3):
        used = torch.empty(sum(t.nbytes for t in training.model.parameters()), dtype=torch.uint8, device=real_gpu)
        torch.cuda._sleep(10_000_000)  # cycles
        used.fill_(255)
        del used  # its memory may be given out again, in the order of this stream
        loaded = lazyckpt.load(tmp_path / name, map_location="cuda")
        assert map_tensors(dict(loaded), content) == map_tensors(state, content)
        model = loaded["model"] if name == "a.pt" else loaded
        assert {t.device for t in model.values()} == {torch.device("cuda", torch.cuda.current_device())}
