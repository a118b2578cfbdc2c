"""Training whose state lives on CUDA devices, through Saver and Checkpointer: tests/fake_cuda plays the devices.

What stands for their tensors: tests/fake_cuda/memory.py.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import threading
import warnings
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from fake_cuda import Capture, Mode
from fake_cuda.memory import Gpu, raw
from lazyckpt import _engine
from lazyckpt import saver as saver_module
from lazyckpt.capture import devices
from lazyckpt.reading import ranges as reading
from lazyckpt.storage import commit

pytestmark = pytest.mark.skipif(not _engine.FAULTS, reason="only the test build looks for another driver")

SMALL = {"chunk_bytes": 64 << 10, "host_buffer_bytes": 256 << 10}


class Net(torch.nn.Module):
    """With a buffer that changes in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(6)))
        self.register_buffer("seen", torch.zeros(5000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class Training:
    """The model and the optimizer's state are on the device, Adam's ``step`` on the host, as torch has it."""

    def __init__(self, gpu: Gpu, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        self.gpu = gpu
        self.model = Net()
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        gpu.place([*self.model.parameters(), *self.model.buffers()])
        self.steps = 0

    def backward(self) -> None:
        self.steps += 1
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 128)).square().sum().backward()
        self.gpu.kernel(self.model.buffers(), 100 + self.steps % 100)

    def owned(self) -> list[torch.Tensor]:
        states = [t for state in self.optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.ndim]
        return [*(p for p in self.model.parameters() if p.requires_grad), *states]

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.after_step()

    def after_step(self) -> None:
        self.gpu.place(self.owned())
        self.gpu.kernel(self.owned(), self.steps % 100)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def saved(path: Path) -> Any:
    def walk(state: Any) -> Any:
        if isinstance(state, torch.Tensor):
            return raw(state)
        if isinstance(state, dict):
            return {key: walk(value) for key, value in state.items()}
        return [walk(value) for value in state] if isinstance(state, list) else state

    return walk(dict(torch.load(path)))


def pending_chunks(handle: lazyckpt.SaveHandle) -> int:
    job = handle._snapshot.job if handle._snapshot is not None else None
    return 0 if job is None else job.pending_chunks((1 << 64) - 1)


@pytest.mark.parametrize("mode", Mode)
def test_a_step_right_after_every_save(gpu: Gpu, mode: Mode, tmp_path: Path) -> None:
    """Each checkpoint is the state at its save(), whatever the next steps do to it, bit for bit."""
    gpu.driver.configure(mode=mode)
    if mode is Mode.RANDOM:
        gpu.streams[0] = gpu.driver.stream(0)
    training = Training(gpu)
    expected = {}
    with lazyckpt.Checkpointer(tmp_path, host_buffer_bytes=1 << 20, chunk_bytes=64 << 10) as ckpt:
        ckpt.track(model=training.model, optimizer=training.optimizer)
        training.step()
        lazy = 0
        for step in range(40):
            handle = ckpt.save(step)
            lazy += pending_chunks(handle) > 0
            expected[step] = gpu.picture(training.state())
            training.step()
        ckpt._saver.wait()
        assert ckpt._saver.engine.unpinned == ""
    assert lazy > 0
    for step, picture in expected.items():
        found = saved(tmp_path / f"step-{step:08d}" / "state.pt")
        assert found["model"] == picture["model"]
        assert found["optimizer"]["state"] == picture["optimizer"]["state"]
    assert gpu.driver.statistics()["pageable_copies"] == 0


def test_neither_save_nor_step_waits_for_a_busy_device(gpu: Gpu, tmp_path: Path) -> None:
    training = Training(gpu)
    training.step()
    with lazyckpt.Saver(host_buffer_bytes=32 << 20, chunk_bytes=2 << 20) as saver:
        saver.save(training.state(), tmp_path / "warm.pt", blocking=True)
        training.step()
        with gpu.driver.hold(copies=True):
            handle = saver.save(training.state(), tmp_path / "a.pt")
            picture = gpu.picture(training.state())
            training.step()  # would hang if the host waited
            assert pending_chunks(handle) > 0
            assert not handle.wait_captured(0.05)
            metrics = handle.metrics
        handle.result(30)
    assert saved(tmp_path / "a.pt") == picture
    assert metrics.eager_bytes > 5000 * 4


class Sharp(torch.optim.SGD):
    """An optimizer of which nobody knows what it does, and on which stream."""


@pytest.mark.parametrize("optimizer", [Sharp, torch.optim.SGD])
def test_only_torchs_own_optimizers_let_the_device_wait(
    gpu: Gpu, optimizer: Callable[..., torch.optim.Optimizer], tmp_path: Path
) -> None:
    training = Training(gpu, optimizer)
    training.step()
    with lazyckpt.Saver(host_buffer_bytes=32 << 20, chunk_bytes=2 << 20) as saver:
        saver.save(training.state(), tmp_path / "warm.pt", blocking=True)
        training.step()
        gpu.driver.lib.fake_hold(1, 0)
        release = threading.Timer(0.3, gpu.driver.lib.fake_hold, (0, 0))
        handle = saver.save(training.state(), tmp_path / "a.pt")
        picture = gpu.picture(training.state())
        training.backward()
        release.start()
        training.optimizer.step()
        assert (pending_chunks(handle) == 0) == (optimizer is Sharp)
        training.after_step()
        handle.result(30)
        release.join()
    assert saved(tmp_path / "a.pt") == picture


def test_host_memory_of_an_optimizer_is_copied_before_its_step(gpu: Gpu, tmp_path: Path, disk: Any) -> None:
    """Some parameters are offloaded: a wait on the device would not keep the host from writing to them. The ring has
    room for the 2 MB on the device, which are copied first, and not for the rest before the disk has taken some."""
    training = Training(gpu)
    other = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(10)))
    training.optimizer.add_param_group({"params": list(other.parameters())})

    def backward() -> None:
        training.backward()
        other(torch.ones(1, 100)).sum().backward()

    def state() -> Any:
        return {**training.state(), "other": other.state_dict()}

    with lazyckpt.Saver(chunk_bytes=64 << 10, host_buffer_bytes=34 * (64 << 10)) as saver:
        backward()
        training.optimizer.step()
        training.after_step()
        for number in range(3):
            disk.hold()
            handle = saver.save(state(), tmp_path / f"{number}.pt")
            picture = gpu.picture(state())
            backward()
            disk.release(after_s=0.1)
            waiting = pending_chunks(handle)
            training.optimizer.step()
            training.after_step()
            handle.result(30)
            assert waiting > 0
            assert saved(tmp_path / f"{number}.pt") == picture


def test_more_than_the_ring(gpu: Gpu, tmp_path: Path) -> None:
    """save() and the step wait on the host until the rest is enqueued."""
    training = Training(gpu)
    training.step()
    with lazyckpt.Saver(chunk_bytes=16 << 10, host_buffer_bytes=32 << 10) as saver:
        for number in range(5):
            saver.save(training.state(), tmp_path / f"{number}.pt")
            picture = gpu.picture(training.state())
            training.step()
            saver.wait()
            assert saved(tmp_path / f"{number}.pt") == picture


def test_two_devices_each_wait_for_their_own(gpu: Gpu, tmp_path: Path) -> None:
    gpu.streams[1] = gpu.driver.stream(1)
    training = Training(gpu)
    other = torch.nn.Linear(200, 200)
    gpu.place(other.parameters(), device=1)
    training.optimizer.add_param_group({"params": list(other.parameters())})
    training.model.add_module("other", other)
    training.step()
    with lazyckpt.Saver(**SMALL) as saver:
        for number in range(10):
            handle = saver.save(training.state(), tmp_path / f"{number}.pt")
            picture = gpu.picture(training.state())
            training.step()
            handle.result(30)
            assert saved(tmp_path / f"{number}.pt") == picture
    assert {ran.device for ran in gpu.driver.log() if ran.kind == "d2h"} == {0, 1}


def test_a_captured_step_makes_its_optimizer_eager_until_somebody_waits_by_hand(gpu: Gpu, tmp_path: Path) -> None:
    gpu.streams[0] = gpu.driver.stream(0)
    training = Training(gpu)
    training.step()
    with lazyckpt.Saver(**SMALL) as saver:
        handle = saver.save(training.state(), tmp_path / "before.pt")
        picture = gpu.picture(training.state())
        gpu.driver.begin_capture(gpu.streams[0])
        gpu.captured = True
        with pytest.raises(lazyckpt.ConfigError, match="capture"):
            saver.save(training.state(), tmp_path / "inside.pt")
        training.step()  # the capture holds its kernels
        assert pending_chunks(handle) == 0, "the graph may be replayed without any hook"
        graph = gpu.driver.end_capture(gpu.streams[0])
        gpu.captured = False
        assert saved(handle.result(30)) == picture

        gpu.driver.replay(graph, gpu.streams[0])
        handle = saver.save(training.state(), tmp_path / "eager.pt")
        gpu.driver.replay(graph, gpu.streams[0])  # no hook, no wait: a lazy copy would be torn
        assert handle.metrics.eager_bytes == 0  # told when it is done
        handle.result(30)
        assert handle.metrics.eager_bytes > 100_000

        lazyckpt.wait_captured()
        gpu.driver.replay(graph, gpu.streams[0])
        handle = saver.save(training.state(), tmp_path / "lazy.pt")
        lazyckpt.wait_captured()
        gpu.driver.replay(graph, gpu.streams[0])
        handle.result(30)
        assert handle.metrics.eager_bytes < 100_000
        again = saver.save(training.state(), tmp_path / "again.pt")
        lazyckpt.wait_captured()
        again.result(30)
    assert saved(tmp_path / "lazy.pt") == saved(tmp_path / "eager.pt") == gpu.picture(training.state())


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="torch's own graphs need a GPU; see tests/gpu")
def test_a_graph_that_knows_its_steps_is_gated_and_they_are_lazy(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu.streams[0] = gpu.driver.stream(0)
    graphs: dict[Any, int] = {}

    def begin(graph: Any, mode: Capture) -> None:
        gpu.driver.begin_capture(gpu.streams[0], mode)
        gpu.captured = True

    def end(graph: Any) -> None:
        graphs[graph] = gpu.driver.end_capture(gpu.streams[0])
        gpu.captured = False

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", begin)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", end)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: gpu.driver.replay(graphs[graph], gpu.streams[0]))
    monkeypatch.setattr(torch.cuda.CUDAGraph, "__new__", lambda kind: object.__new__(kind))
    monkeypatch.setattr(lazyckpt.CUDAGraph, "__init__", lambda graph: None)

    training = Training(gpu)
    training.step()
    graph = lazyckpt.CUDAGraph()
    graph.capture_begin(Capture.THREAD_LOCAL)
    training.step()
    graph.capture_end()
    with lazyckpt.Saver(host_buffer_bytes=32 << 20, chunk_bytes=2 << 20) as saver:
        graph.replay()
        saver.save(training.state(), tmp_path / "warm.pt", blocking=True)
        for number in range(3):
            graph.replay()
            gpu.kernel(training.owned(), 50 + number)
            with gpu.driver.hold(copies=True):
                handle = saver.save(training.state(), tmp_path / f"{number}.pt")
                picture = gpu.picture(training.state())
                graph.replay()  # would hang if the host waited
                assert pending_chunks(handle) > 0
            assert saved(handle.result(30)) == picture
            assert handle.metrics.eager_bytes < 100_000
        again = saver.save(training.state(), tmp_path / "again.pt")
        graph.replay()
        again.result(30)
        other: Any = torch.cuda.CUDAGraph.__new__(torch.cuda.CUDAGraph)
        torch.cuda.CUDAGraph.capture_begin(other, Capture.THREAD_LOCAL)
        training.step()
        torch.cuda.CUDAGraph.capture_end(other)
        graph.replay()
        handle = saver.save(training.state(), tmp_path / "eager.pt", blocking=True)
        assert handle.metrics.eager_bytes > 100_000, "the other graph's replay is not gated"


@pytest.mark.parametrize("audit", [False, True])
def test_who_writes_behind_the_optimizers_back_is_named(gpu: Gpu, audit: bool, tmp_path: Path) -> None:
    """By the version that torch counts, or, if it does not, by the audit's checksums."""
    training = Training(gpu)
    training.step()
    weight = training.model.layers[0].weight
    with lazyckpt.Saver(audit=audit, **SMALL) as saver:
        whole = saver.save(training.state(), tmp_path / "whole.pt")
        training.step()
        whole.result(30)
        with gpu.driver.hold(copies=True) if audit else contextlib.nullcontext():
            handle = saver.save(training.state(), tmp_path / "torn.pt")
            if audit:
                gpu.kernel([weight], 77)
            else:
                weight.detach().add_(1)
        training.step()
        with pytest.raises(lazyckpt.TornSnapshotError, match=r"layers\.0\.weight.*written"):
            handle.result(30)
    if audit:
        assert gpu.driver.violations()
        gpu.driver.forget_violations()


def test_frozen_parameters_become_lazy(gpu: Gpu, tmp_path: Path) -> None:
    training = Training(gpu)
    training.model.layers[0].requires_grad_(False)
    training.optimizer = torch.optim.AdamW(p for p in training.model.parameters() if p.requires_grad)
    training.step()
    eager = []
    with lazyckpt.Saver(**SMALL) as saver:
        saver.watch(training.model)
        for number in range(4):
            handle = saver.save(training.state(), tmp_path / f"{number}.pt")
            picture = gpu.picture(training.state())
            training.step()
            handle.result(30)
            eager.append(handle.metrics.eager_bytes)
            assert saved(tmp_path / f"{number}.pt") == picture
    assert eager[1] - eager[3] >= 128 * 128 * 4


def test_a_call_that_fails_is_named_and_training_goes_on(gpu: Gpu, tmp_path: Path) -> None:
    training = Training(gpu)
    training.step()
    with lazyckpt.Saver(**SMALL) as saver:
        for name, code in [("cuMemcpyDtoHAsync_v2", 719), ("cuEventSynchronize", 1), ("cuStreamWaitEvent", 1)]:
            gpu.driver.fail(name, 2, code)
            with pytest.raises(lazyckpt.SaveError, match=f"{name}: CUDA_ERROR.*cuda:0"):
                saver.save(training.state(), tmp_path / "a.pt").result(30)
            training.step()
            saver.save(training.state(), tmp_path / "b.pt")
            picture = gpu.picture(training.state())
            training.step()
            saver.wait()
            assert saved(tmp_path / "b.pt") == picture
    assert not (tmp_path / "a.pt").exists()


def test_a_save_that_fails_holds_what_is_being_copied(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever hears of the failure may free it."""
    training = Training(gpu)
    training.step()
    with lazyckpt.Saver(host_buffer_bytes=32 << 20, chunk_bytes=2 << 20) as saver:
        saver.save(training.state(), tmp_path / "warm.pt", blocking=True)
        training.step()

        def refuse(*_: Any) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(commit.FileStaging, "__init__", refuse)
        with gpu.driver.hold(copies=True):
            handle = saver.save(training.state(), tmp_path / "a.pt")
            assert not concurrent.futures.wait([handle], 0.2).done
        with pytest.raises(lazyckpt.SaveError, match="Input/output"):
            handle.result(30)


def test_a_device_that_cannot_be_attached_fails_the_save(gpu: Gpu, tmp_path: Path) -> None:
    training = Training(gpu)
    training.step()
    with lazyckpt.Saver(**SMALL) as saver:
        gpu.driver.fail("cuDevicePrimaryCtxRetain", 1, 2)
        with pytest.raises(lazyckpt.SaveError, match="cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY"):
            saver.save(training.state(), tmp_path / "a.pt")
        saver.save(training.state(), tmp_path / "a.pt", blocking=True)
    assert saved(tmp_path / "a.pt") == gpu.picture(training.state())


@pytest.mark.parametrize("allocates", [True, False])
def test_one_warning_where_the_ring_is_not_pinned(
    gpu: Gpu, allocates: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(saver_module, "_warned", set())
    gpu.driver.configure(registration_limit=0, registration_error=801)
    if not allocates:
        gpu.driver.fail("cuMemHostAlloc", code=2, sticky=True)
    training = Training(gpu)
    training.step()
    with warnings.catch_warnings(record=True) as caught, lazyckpt.Saver(**SMALL) as saver:
        warnings.simplefilter("always")
        for number in range(3):
            handle = saver.save(training.state(), tmp_path / f"{number}.pt")
            picture = gpu.picture(training.state())
            training.step()
            handle.result(30)
            assert saved(tmp_path / f"{number}.pt") == picture
    messages = [str(w.message) for w in caught if "pinned" in str(w.message)]
    assert len(messages) == 1 and "CUDA_ERROR_NOT_SUPPORTED" in messages[0]
    assert ("small buffer" in messages[0]) == allocates


def test_lone_files(gpu: Gpu, tmp_path: Path) -> None:
    tensors = {name: torch.zeros(3000 + n) for n, name in enumerate("abc")}
    gpu.place([tensors["a"], tensors["c"]], device=1)
    gpu.kernel(tensors.values(), 9)
    reading._engine_of.cache_clear()
    try:
        lazyckpt.save(tensors, tmp_path / "a.pt")
        lazyckpt.save(tensors, tmp_path / "a.safetensors")
        lazyckpt.load(tmp_path / "a.pt", map_location="cuda:1")
        # To unpin would wait for the device.
        assert gpu.driver.calls().get("cuMemHostUnregister", 0) == 0
        assert gpu.driver.calls()["cuMemHostRegister_v2"] == 1
    finally:
        reading._engine_of.cache_clear()
    assert saved(tmp_path / "a.pt") == gpu.picture(tensors)
    loaded = lazyckpt.load(tmp_path / "a.safetensors")
    assert {name: raw(t) for name, t in loaded.items()} == gpu.picture(tensors)


@pytest.mark.parametrize("pinnable", [True, False])
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_load_reads_straight_to_the_device(gpu: Gpu, name: str, pinnable: bool, tmp_path: Path) -> None:
    """Behind what the current stream holds, since that may have used the memory before; nothing is left to torch."""
    gpu.driver.configure(mode=Mode.COPIES_EARLY, registration_limit=1e18 if pinnable else 0)
    gpu.streams[1] = gpu.driver.stream(1)
    tensors = {f"{n}": torch.rand(n * n * 300) for n in range(40)}
    tensors["part"] = tensors["39"][1000:3000] if name == "a.pt" else torch.rand(3)
    reading._engine_of.cache_clear()
    try:
        lazyckpt.save(tensors, tmp_path / name)
        waited = gpu.driver.device_malloc(1, 8)
        gpu.driver.kernel(gpu.streams[1], [(waited, 8, 1)], device=1, microseconds=20_000)
        loaded = lazyckpt.load(tmp_path / name, map_location="cuda:1")
        assert gpu.driver.log()[0].kind == "kernel", "no copy has come before it"
        assert loaded.keys() == tensors.keys()
        for key, tensor in tensors.items():
            storage = torch.empty(0, dtype=torch.uint8).set_(loaded[key].untyped_storage())
            whole = gpu.content(storage) if storage.numel() else b""
            at = 4 * loaded[key].storage_offset()
            assert whole[at : at + tensor.nbytes] == raw(tensor)
        assert gpu.driver.statistics()["bytes_to_device"] == sum(
            t.nbytes for key, t in tensors.items() if key != "part" or name != "a.pt"
        )
        assert gpu.driver.statistics()["pageable_copies"] == 0
        gpu.driver.fail("cuMemcpyHtoDAsync_v2", 3, 1)
        with pytest.raises(lazyckpt.LoadError, match="cuMemcpyHtoDAsync_v2: CUDA_ERROR_INVALID_VALUE"):
            lazyckpt.load(tmp_path / name, map_location="cuda:1")
        damaged = bytearray((tmp_path / name).read_bytes())
        damaged[len(damaged) // 2] ^= 1
        if name == "a.pt":  # which has checksums
            (tmp_path / name).write_bytes(damaged)
            with pytest.raises(lazyckpt.CorruptFileError):
                lazyckpt.load(tmp_path / name, map_location="cuda:1")
    finally:
        reading._engine_of.cache_clear()


def test_the_gil_elsewhere(gpu: Gpu, tmp_path: Path) -> None:
    """While another thread keeps the GIL, copies go on; while copies wait for room, other threads run."""
    training = Training(gpu)
    training.step()
    stop = threading.Event()
    busy = threading.Thread(target=lambda: [math.factorial(2000) for _ in iter(stop.is_set, True)])
    busy.start()
    try:
        with lazyckpt.Saver(chunk_bytes=16 << 10, host_buffer_bytes=32 << 10) as saver:
            for number in range(3):
                handle = saver.save(training.state(), tmp_path / f"{number}.pt")
                picture = gpu.picture(training.state())
                training.step()
                handle.result(60)
                assert saved(tmp_path / f"{number}.pt") == picture
    finally:
        stop.set()
        busy.join()


@pytest.mark.filterwarnings("ignore:the staging buffer is not pinned")
@pytest.mark.parametrize("pinnable", [True, False])
@pytest.mark.parametrize("cached", [True, False])
def test_restore_reads_straight_to_the_device(gpu: Gpu, cached: bool, pinnable: bool, tmp_path: Path) -> None:
    """Behind what the training streams hold, from the page cache and past it; what comes after the restore finds it.
    Where the ring cannot be pinned, by way of the small buffer."""
    gpu.driver.configure(mode=Mode.COPIES_EARLY, registration_limit=1e18 if pinnable else 0)
    gpu.streams = {0: gpu.driver.stream(0), 1: 0}
    training = Training(gpu)
    head = torch.nn.Linear(900, 900)  # more than one read
    gpu.place(head.parameters(), device=1)
    on_host = torch.nn.Linear(70, 70)
    training.model.add_module("head", head)
    training.model.add_module("on_host", on_host)
    training.optimizer = torch.optim.AdamW(training.model.parameters())
    with lazyckpt.Checkpointer(tmp_path, direct_io=not cached, host_buffer_bytes=8 << 20, chunk_bytes=64 << 10) as ckpt:
        ckpt.track(model=training.model, optimizer=training.optimizer)
        training.step()
        ckpt.save(1, blocking=True)
        picture = gpu.picture(training.state())
        tensors = [*training.owned(), *training.model.buffers()]
        gpu.driver.kernel(gpu.streams[0], gpu.ranges(tensors, 0, 255), device=0, microseconds=20_000)
        gpu.driver.kernel(gpu.streams[1], gpu.ranges(tensors, 1, 255), device=1, microseconds=20_000)
        uploads = gpu.driver.statistics()["bytes_to_device"]
        assert ckpt.restore() == 1
        gpu.driver.synchronize()
        found = {name: gpu.content(t) for name, t in training.model.state_dict().items()}
        assert found == picture["model"]
        for at, state in training.optimizer.state_dict()["state"].items():
            assert {k: gpu.content(t) for k, t in state.items()} == picture["optimizer"]["state"][at]
        there = sum(t.nbytes for t in tensors) - sum(t.nbytes for t in gpu.not_placed(tensors))
        assert gpu.driver.statistics()["bytes_to_device"] - uploads == there
        assert gpu.driver.statistics()["pageable_copies"] == 0
        training.step()


@pytest.mark.parametrize("name", ["cuMemcpyHtoDAsync_v2", "cuEventSynchronize", "cuStreamWaitEvent"])
def test_a_call_that_fails_in_restore_is_named(gpu: Gpu, name: str, tmp_path: Path) -> None:
    training = Training(gpu)
    training.step()
    with lazyckpt.Checkpointer(tmp_path, **SMALL) as ckpt:
        ckpt.track(model=training.model, optimizer=training.optimizer)
        ckpt.save(1, blocking=True)
        picture = gpu.picture(training.state())
        gpu.driver.fail(name, 1, 1)
        with pytest.warns(UserWarning, match=f"{name}: CUDA_ERROR"), pytest.raises(lazyckpt.RestoreError, match=name):
            ckpt.restore()
        assert ckpt.restore() == 1
    gpu.driver.synchronize()
    assert {name: gpu.content(t) for name, t in training.model.state_dict().items()} == picture["model"]


# lazyckpt.capture.devices as it is


def test_where_storages_are() -> None:
    class Engine:
        def attach(self, device: int) -> bool:
            return device == 1

    def locate(*names: str) -> list[int] | None:
        return devices.locate([], list(map(torch.device, names)), Engine())  # type: ignore[arg-type]

    assert locate() is None
    assert locate("cpu", "cpu") is None
    assert locate("cpu", "cuda:1") == [devices.HOST, 1]
    assert locate("cuda:0", "cpu") == [devices.ELSEWHERE, devices.HOST], "no driver: torch copies"
    assert locate("mps") == [devices.ELSEWHERE]
    assert not devices.capturing()


def test_where_a_file_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def attach(self, device: int) -> bool:
            if device == 2:
                raise OSError("no such context")
            return device == 1

    def target(map_location: Any) -> int:
        return devices.target(map_location, Engine())  # type: ignore[arg-type]

    assert target("cuda:1") == devices.HOST, "torch says that it has no CUDA"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert target("cuda") == target("cuda:1") == target(torch.device("cuda", 1)) == 1
    for other in (None, "cpu", {"cpu": "cuda:1"}, lambda storage, location: storage, "cuda:0", "cuda:2", "cuda:3", "x"):
        assert target(other) == devices.HOST


def test_what_is_elsewhere_is_copied_by_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In save(), before it returns: nothing of it is lazy."""
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 100)).sum().backward()
    monkeypatch.setattr(devices, "locate", lambda storages, where, engine: [devices.ELSEWHERE for _ in storages])
    monkeypatch.setattr(devices, "on_host", torch.UntypedStorage.clone)
    monkeypatch.setattr(devices, "current_streams", lambda ordinals: array("Q"))
    with lazyckpt.Saver() as saver:
        optimizer.step()  # so that it would be lazy
        handle = saver.save(model.state_dict(), tmp_path / "a.pt")
        before = {name: t.clone() for name, t in model.state_dict().items()}
        with torch.no_grad():
            model.weight.zero_()
        handle.result(30)
        assert handle.metrics.eager_bytes == (100 * 100 + 100) * 4
    for name, tensor in torch.load(tmp_path / "a.pt").items():
        assert torch.equal(tensor, before[name])
