"""A machine to train on: a real GPU, or the fake driver of tests/fake_cuda. The shared tests do not know which.

On a fake device, CPU tensors stand for those on the device, and kernels of the test write in place of torch's.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from fake_cuda import Capture, Mode
from fake_cuda.memory import Gpu, raw

KIB, MIB = 1 << 10, 1 << 20
RINGS = {
    "larger than the state": {"chunk_bytes": 256 * KIB, "host_buffer_bytes": 16 * MIB},
    "smaller": {"chunk_bytes": 64 * KIB, "host_buffer_bytes": 256 * KIB},
    "two chunks": {"chunk_bytes": 16 * KIB, "host_buffer_bytes": 32 * KIB},
}


class Fake:
    """Two devices that run operations in the most adverse order that the streams permit."""

    devices = 2

    def __init__(self, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, mode: Mode = Mode.COPIES_LATE) -> None:
        gpu.driver.configure(mode=mode)
        gpu.streams = {device: gpu.driver.stream(device) for device in range(self.devices)}
        self._gpu = gpu
        self._patch = monkeypatch
        self._writes = 0
        self._graphs: dict[Any, int] = {}

    def put(self, module: torch.nn.Module, device: int = 0) -> torch.nn.Module:
        self._gpu.place([*module.parameters(), *module.buffers()], device)
        return module

    def wrote(self, tensors: Iterable[torch.Tensor]) -> None:
        """The training has changed these."""
        tensors = list(tensors)
        self._writes += 1
        self._gpu.place(tensors)
        self._gpu.kernel(tensors, 1 + self._writes % 250)

    def write_silently(self, tensor: torch.Tensor) -> None:
        """Changes a tensor without moving its version, and without waiting for copies."""
        self._gpu.kernel([tensor], 255)

    def keep_busy(self) -> None:
        """Gives the training stream something to do, so that copies begin late."""
        self._gpu.driver.kernel(self._gpu.streams[0], microseconds=5_000)

    def write_aside(self, tensors: Iterable[torch.Tensor]) -> None:
        """Changes tensors silently, in streams that wait for nothing."""
        training = self._gpu.streams
        self._gpu.streams = {device: self._gpu.driver.stream(device) for device in training}
        self._gpu.kernel(tensors, 254)
        self._gpu.driver.synchronize()
        self._gpu.streams = training

    def forgive(self) -> None:
        """Forgets that a write raced a copy."""
        self._gpu.driver.forget_violations()

    def picture(self, state: Any) -> Any:
        """Notes a state as the training stream will have made it. Nothing waits."""
        return self._gpu.picture(state)

    def developed(self, picture: Any) -> Any:
        """A picture with bytes in the place of tensors, as in `saved`."""
        return picture

    def content(self, state: Any) -> Any:
        """The state as it is on the device once all streams are done, with bytes in the place of tensors."""
        self._gpu.driver.synchronize()
        return map_tensors(state, self._gpu.content)

    def new_graph(self, *, gated: bool) -> Any:
        def begin(graph: Any, mode: Capture = Capture.THREAD_LOCAL) -> None:
            self._gpu.driver.begin_capture(self._gpu.streams[0], mode)
            self._gpu.captured = True

        def end(graph: Any) -> None:
            self._graphs[graph] = self._gpu.driver.end_capture(self._gpu.streams[0])
            self._gpu.captured = False

        def replay(graph: Any) -> None:
            self._gpu.driver.replay(self._graphs[graph], self._gpu.streams[0])

        for name, method in (("capture_begin", begin), ("capture_end", end), ("replay", replay)):
            self._patch.setattr(torch.cuda.CUDAGraph, name, method)
        self._patch.setattr(torch.cuda.CUDAGraph, "__new__", lambda kind: object.__new__(kind))
        self._patch.setattr(lazyckpt.CUDAGraph, "__init__", lambda graph: None)
        kind: Any = lazyckpt.CUDAGraph if gated else torch.cuda.CUDAGraph
        return kind.__new__(kind)

    @contextlib.contextmanager
    def capture(self, graph: Any, train: Callable[[], None]) -> Iterator[None]:
        graph.capture_begin()
        train()
        yield
        graph.capture_end()


class Real:
    """A GPU; or the host, as a rehearsal of what needs no GPU (LAZYCKPT_TEST_DEVICE=cpu)."""

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type
        self.devices = torch.cuda.device_count() if device.type == "cuda" else 1

    def put(self, module: torch.nn.Module, device: int = 0) -> torch.nn.Module:
        return module.to(torch.device(self._kind, device))

    def wrote(self, tensors: Iterable[torch.Tensor]) -> None:
        """torch's kernels have written."""

    def write_silently(self, tensor: torch.Tensor) -> None:
        tensor.data.add_(1)

    def keep_busy(self) -> None:
        if self._kind == "cuda":
            torch.cuda._sleep(20_000_000)  # cycles

    def write_aside(self, tensors: Iterable[torch.Tensor]) -> None:
        with torch.cuda.stream(torch.cuda.Stream()) if self._kind == "cuda" else contextlib.nullcontext():
            for tensor in tensors:
                tensor.data.fill_(1)
        if self._kind == "cuda":
            torch.cuda.synchronize()

    def forgive(self) -> None:
        """Does nothing: a real device reports no violations."""

    def picture(self, state: Any) -> Any:
        return blocking_copy(state)

    def developed(self, picture: Any) -> Any:
        return self.content(picture)

    def content(self, state: Any) -> Any:
        return map_tensors(state, lambda tensor: raw(tensor.cpu()))

    def new_graph(self, *, gated: bool) -> Any:
        return lazyckpt.CUDAGraph() if gated else torch.cuda.CUDAGraph()

    @contextlib.contextmanager
    def capture(self, graph: Any, train: Callable[[], None]) -> Iterator[None]:
        side = torch.cuda.Stream()  # torch wants a few steps on another stream first
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                train()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            train()
            yield


Machine = Fake | Real


@dataclass(frozen=True)
class Recipe:
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    knobs: tuple[tuple[str, Any], ...] = ()
    autocast: torch.dtype | None = None
    scaled: bool = False
    compiled: str | None = None  # the mode of torch.compile


RECIPES = {
    "foreach": Recipe(knobs=(("foreach", True),)),
    "one by one": Recipe(knobs=(("foreach", False),)),
    "fused": Recipe(knobs=(("fused", True),)),
    "capturable": Recipe(knobs=(("capturable", True),)),
    "SGD with momentum": Recipe(torch.optim.SGD, (("momentum", 0.9),)),
    "bfloat16": Recipe(knobs=(("fused", True),), autocast=torch.bfloat16),
    "float16 and GradScaler": Recipe(autocast=torch.float16, scaled=True),
    "float16 and GradScaler, fused": Recipe(knobs=(("fused", True),), autocast=torch.float16, scaled=True),
    "compiled": Recipe(knobs=(("fused", True),), autocast=torch.bfloat16, compiled="default"),
    "compiled into CUDA graphs": Recipe(knobs=(("fused", True),), compiled="reduce-overhead"),
}


class Sharp(torch.optim.SGD):
    """An optimizer unknown to lazyckpt: it may write on any stream."""


class Training:
    """A model with buffers that change in every forward, and everything that its training has to save."""

    def __init__(self, machine: Machine, recipe: Recipe = RECIPES["fused"], *, width: int = 192, device: int = 0):
        torch.manual_seed(0)
        self.machine, self._recipe = machine, recipe
        blocks = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width)) for _ in range(4)]
        self.model = machine.put(torch.nn.Sequential(*blocks), device)
        self._device = next(self.model.parameters()).device
        self._forward = self.model
        if recipe.compiled and self._device.type == "cuda":
            self._forward = torch.compile(self.model, mode=recipe.compiled)
        elif recipe.compiled:
            self._forward = torch.compile(self.model, backend="eager")
        self.optimizer = recipe.optimizer(self.model.parameters(), lr=0.01, **dict(recipe.knobs))
        self.scaler = torch.amp.GradScaler(self._device.type, init_scale=256.0, enabled=recipe.scaled)
        self._batch = torch.randn(16, width).to(self._device)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        dtype = self._recipe.autocast
        with torch.autocast(self._device.type, dtype, enabled=dtype is not None):
            loss = self._forward(self._batch).float().square().mean()
        self.scaler.scale(loss).backward()
        self.machine.wrote(self.model.buffers())

    def step(self) -> None:
        self.backward()
        self.step_alone()

    def step_alone(self) -> None:
        """Steps with the gradients that are there."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.machine.wrote(self.owned())

    def owned(self) -> list[torch.Tensor]:
        """What the optimizer changes. Adam keeps its ``step`` on the host, unless it is capturable."""
        states = [t for state in self.optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.ndim]
        return [*(p for group in self.optimizer.param_groups for p in group["params"]), *states]

    def state(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        return {name: copy.copy(part.state_dict()) for name, part in parts.items()}


def save_at_every_step(training: Training, steps: int, folder: Path, **knobs: Any) -> list[lazyckpt.SaveHandle]:
    """Steps right after each save. Asserts that each file holds the state at its save, bit for bit."""
    saves = []
    with lazyckpt.Saver(**knobs) as saver:
        training.step()
        for number in range(steps):
            handle = saver.save(training.state(), folder / f"{number}.pt")
            saves.append((handle, training.machine.picture(training.state())))
            training.step()
        saver.wait()
        assert saver.engine.unpinned == ""
    for handle, picture in saves:
        assert saved(handle.path) == training.machine.developed(picture), handle.path
        handle.path.unlink()
    return [handle for handle, _ in saves]


def saved(path: Path) -> Any:
    """The bytes of every tensor in a file, in the tree that it holds."""
    return map_tensors(dict(torch.load(path, map_location="cpu")), raw)


def blocking_copy(value: Any) -> Any:
    """A copy in the order of the current stream, before anything that comes later."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: blocking_copy(inner) for key, inner in value.items()}
    return [blocking_copy(inner) for inner in value] if isinstance(value, list) else copy.deepcopy(value)


def map_tensors(state: Any, function: Callable[[torch.Tensor], bytes]) -> Any:
    if isinstance(state, torch.Tensor):
        return function(state)
    if isinstance(state, dict):
        return {key: map_tensors(value, function) for key, value in state.items()}
    return [map_tensors(value, function) for value in state] if isinstance(state, list) else state
