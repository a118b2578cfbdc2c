"""Bits first, and what no figure of the other parts shows: saves of many small tensors, launches beside pinning, forks.

A row is a key of expected.py and its value.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

import lazyckpt
from benchmarks.gpu.copies import synchronize
from benchmarks.gpu.part import Part, main
from benchmarks.paired import median
from benchmarks.report import Table

SAVES = 5
WIDTH = 1024
SMALL = 1500  # elements of a small tensor
BLOCKS, MANY = {"cuda": 12, "cpu": 1}, {"cuda": 2000, "cpu": 50}
LAUNCH_EVERY_S = 0.0002
BUSY_CYCLES = 600_000_000  # 0.3 s of a GPU
LARGE_RING_BYTES = {"cuda": 4 << 30, "cpu": 32 << 20}
BUFFER_BYTES = 64 << 20
TORN = 7  # what the side stream writes
DONE_S = 60.0


class Findings:
    """A table that is handed over as it grows."""

    def __init__(self, part: Part, title: str) -> None:
        self._part, self._table = part, Table(title, ["what", "value"])

    def note(self, key: str, value: float) -> None:
        self._table.add(key, f"{value:.4f}")
        self._part.publish([self._table])


class Job:
    """A model with buffers and many small parameters, under fused AdamW: two storages of state for each parameter."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        blocks = (
            torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH))
            for _ in range(BLOCKS[device.type])
        )
        self.model = torch.nn.Sequential(*blocks).to(device)
        self.small = torch.nn.ParameterList(torch.rand(SMALL, device=device) for _ in range(MANY[device.type]))
        for parameter in self.small:
            parameter.grad = torch.rand_like(parameter)
        self.optimizer = torch.optim.AdamW([*self.model.parameters(), *self.small], fused=True)
        self._batch = torch.rand(32, WIDTH, device=device)

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "small": self.small, "optimizer": self.optimizer}

    def state(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts().items()}

    def backward(self) -> None:
        self.model.zero_grad()
        self.model(self._batch).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()


def measure_bits(part: Part) -> None:
    """Each file is the state at its save, although backward and step come right behind it."""
    device, found = part.device, Findings(part, "Bits, and the time of saves of many small tensors")
    job, right, blocked_ms, stepped_ms = Job(device), True, [], []
    with lazyckpt.Saver() as saver:
        saver.expect(job.model, job.small, job.optimizer)
        job.step()
        for _ in range(SAVES):
            job.step()
            want = _copied(job.state())
            synchronize(device)
            handle, ms = _timed(lambda: saver.save(job.state(), part.directory / "a.pt"))
            blocked_ms.append(ms)
            job.backward()
            stepped_ms.append(_timed(job.optimizer.step)[1])
            right = _same(want, torch.load(handle.result(DONE_S), map_location="cpu")) and right
        found.note("bits", right)
        found.note("pinned", saver.engine.unpinned == "")
        found.note("batched", saver.engine.unbatched == "")
        found.note("first save", blocked_ms[0])
        found.note("save", median(blocked_ms[2:]))
        found.note("step", median(stepped_ms[2:]))
        found.note("eager", handle.metrics.eager_bytes / handle.metrics.bytes)
    with lazyckpt.Checkpointer(part.directory / "run") as checkpointer:
        checkpointer.track(**job.parts())
        checkpointer.save(1, blocking=True)
        want = _copied(job.state())
        job.step()
        synchronize(device)
        found.note("restore many", _timed(checkpointer.restore)[1])
        found.note("restored", _same(want, _copied(job.state())))


def measure_waits(part: Part) -> None:
    device, found = part.device, Findings(part, "What waits for what")
    found.note("torn", _torn_bytes(part))
    tiny = torch.zeros(1, device=device)

    def slowest_launch(seconds: float) -> float:
        end, slowest = time.perf_counter() + seconds, 0.0
        while time.perf_counter() < end:
            slowest = max(slowest, _timed(lambda: tiny.add_(1))[1])
            time.sleep(LAUNCH_EVERY_S)
        return slowest

    job = Job(device)
    job.step()
    found.note("launch", slowest_launch(0.3))
    saver = lazyckpt.Saver(host_buffer_bytes=LARGE_RING_BYTES[device.type])
    saver.expect(job.optimizer)
    job.step()  # the ring is faulted in and pinned from here on
    found.note("launch pinning", slowest_launch(1.5 if device.type == "cuda" else 0.1))
    found.note("fork", _timed(_fork)[1])
    _keep_busy(device)
    found.note("close", _timed(saver.close)[1])


def _torn_bytes(part: Part) -> int:
    """The largest byte of a file whose bytes are all 0, unless the write after wait_captured() came too early."""
    on_gpu = part.device.type == "cuda"
    buffer = torch.zeros(BUFFER_BYTES, dtype=torch.uint8, device=part.device)
    with lazyckpt.Saver() as saver:
        saver.save({"b": buffer}, part.directory / "warm.pt", blocking=True)
        synchronize(part.device)
        _keep_busy(part.device)
        handle = saver.save({"b": buffer}, part.directory / "side.pt")
        lazyckpt.wait_captured()
        if on_gpu:
            with torch.cuda.stream(torch.cuda.Stream()):
                buffer.fill_(TORN)
        else:
            buffer.fill_(TORN)
        return int(torch.load(handle.result(DONE_S), map_location="cpu")["b"].max())


def _keep_busy(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(BUSY_CYCLES)


def _fork() -> None:
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and how many milliseconds it took the host."""
    start = time.perf_counter()
    return work(), 1e3 * (time.perf_counter() - start)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return {key: _copied(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a.cpu(), b.cpu())
    return not isinstance(a, dict) or (a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a))


if __name__ == "__main__":
    main({"bits": measure_bits, "waits": measure_waits})
