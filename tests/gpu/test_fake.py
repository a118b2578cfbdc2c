"""What only the fake driver can do: hold copies, run them in the most adverse order, and fail any call."""

from __future__ import annotations

import concurrent.futures
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from fake_cuda import Mode
from fake_cuda.memory import Gpu, raw
from gpu.machines import KIB, RINGS, Fake, Recipe, Sharp, Training, save_at_every_step, saved
from lazyckpt import devices
from lazyckpt.storage import commit
from lazyckpt.tools import doctor

SMALL = RINGS["smaller"]
ROOMY = {"host_buffer_bytes": 32 << 20, "chunk_bytes": 2 << 20}


@pytest.fixture
def training(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Training:
    """A training that has stepped once."""
    training = Training(Fake(gpu, monkeypatch), Recipe())
    training.step()
    return training


def pending_chunks(handle: lazyckpt.SaveHandle) -> int:
    snapshot = handle._snapshot
    return 0 if snapshot is None else snapshot.job.pending_chunks((1 << 64) - 1)


@pytest.mark.parametrize("mode", Mode)
def test_a_step_right_after_every_save(gpu: Gpu, mode: Mode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_at_every_step(Training(Fake(gpu, monkeypatch, mode), Recipe()), 12, tmp_path, **SMALL)
    assert gpu.driver.statistics()["pageable_copies"] == 0


def test_neither_save_nor_step_waits_for_a_busy_device(gpu: Gpu, training: Training, tmp_path: Path) -> None:
    with lazyckpt.Saver(**ROOMY) as saver:
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
    assert metrics.eager_bytes > 0


@pytest.mark.parametrize("optimizer", [Sharp, torch.optim.SGD])
def test_only_torchs_own_optimizers_let_the_device_wait(
    gpu: Gpu, optimizer: Callable[..., torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    training = Training(Fake(gpu, monkeypatch), Recipe(optimizer))
    training.step()
    with lazyckpt.Saver(**ROOMY) as saver:
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
        training.machine.wrote(training.owned())
        handle.result(30)
        release.join()
    assert saved(tmp_path / "a.pt") == picture


def test_memory_of_an_eager_storage_is_let_go_after_its_copy(gpu: Gpu, training: Training, tmp_path: Path) -> None:
    """Regression: only lazy storages waited. The allocator may hand the memory to a stream that nothing orders."""
    storage = next(training.model.buffers()).untyped_storage()
    with lazyckpt.Saver(**ROOMY) as saver:
        saver.save(training.state(), tmp_path / "warm.pt", blocking=True)
        with gpu.driver.hold(copies=True), concurrent.futures.ThreadPoolExecutor(1) as pool:
            handle = saver.save(training.state(), tmp_path / "a.pt")
            resized = pool.submit(storage.resize_, storage.nbytes())
            assert not concurrent.futures.wait([resized], 0.1).done
            gpu.driver.lib.fake_hold(0, 0)
        handle.result(30)
        resized.result()


def test_a_call_that_fails_is_named_and_training_goes_on(gpu: Gpu, training: Training, tmp_path: Path) -> None:
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
    gpu: Gpu, training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that learns of the failure may free the memory."""
    with lazyckpt.Saver(**ROOMY) as saver:
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


def test_a_device_that_cannot_be_attached_fails_the_save(gpu: Gpu, training: Training, tmp_path: Path) -> None:
    with lazyckpt.Saver(**SMALL) as saver:
        gpu.driver.fail("cuDevicePrimaryCtxRetain", 1, 2)
        with pytest.raises(lazyckpt.SaveError, match="cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY"):
            saver.save(training.state(), tmp_path / "a.pt")
        saver.save(training.state(), tmp_path / "a.pt", blocking=True)
    assert saved(tmp_path / "a.pt") == gpu.picture(training.state())


@pytest.mark.parametrize("code", [0, 1, 801])
def test_doctor_tries_whether_the_driver_takes_batches(gpu: Gpu, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.ones(1) for _ in range(32)]
    gpu.place(tensors)
    monkeypatch.setattr(doctor, "small_tensors", lambda: tensors)
    if code:
        gpu.driver.fail("cuMemcpyBatchAsync", code=code, sticky=True)
    assert doctor.refused_batches().endswith(f"({code})" if code else "")
    gpu.driver.fail("cuDevicePrimaryCtxRetain", code=2)
    assert doctor.refused_batches() == "", "nothing was tried"


def test_one_warning_where_nothing_is_pinned(
    gpu: Gpu, training: Training, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lazyckpt.warn._given", set())
    gpu.driver.configure(registration_limit=0, registration_error=801)
    gpu.driver.fail("cuMemHostAlloc", code=2, sticky=True)
    with pytest.warns(UserWarning, match="CUDA_ERROR_NOT_SUPPORTED") as caught, lazyckpt.Saver(**SMALL) as saver:
        for number in range(3):
            handle = saver.save(training.state(), tmp_path / f"{number}.pt")
            picture = gpu.picture(training.state())
            training.step()
            handle.result(30)
            assert saved(tmp_path / f"{number}.pt") == picture
    assert len(caught) == 1 and "small buffer" not in str(caught[0].message)


@pytest.mark.parametrize("pinnable", [True, False])
@pytest.mark.parametrize(("name", "all_ranks"), [("a.pt", False), ("a.pt", True), ("a.safetensors", False)])
def test_load_reads_straight_to_the_device(
    gpu: Gpu, new_process_engine: None, name: str, all_ranks: bool, pinnable: bool, tmp_path: Path
) -> None:
    """Behind what the current stream holds, since that may have used the memory before; nothing is left to torch."""
    gpu.driver.configure(mode=Mode.COPIES_EARLY, registration_limit=1e18 if pinnable else 0)
    gpu.streams[1] = gpu.driver.stream(1)
    tensors = {f"{n}": torch.rand(n * n * 300) for n in range(40)}
    tensors["part"] = tensors["39"][1000:3000] if name == "a.pt" else torch.rand(3)
    lazyckpt.save(tensors, tmp_path / name)
    assert gpu.driver.calls().get("cuMemHostUnregister", 0) == 0, "to unpin would wait for the device"
    waited = gpu.driver.device_malloc(1, 8)
    gpu.driver.kernel(gpu.streams[1], [(waited, 8, 1)], device=1, microseconds=20_000)
    loaded = lazyckpt.load(tmp_path / name, map_location="cuda:1", all_ranks=all_ranks)
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


@pytest.mark.filterwarnings("ignore:the staging buffer is not pinned")
@pytest.mark.parametrize("pinnable", [True, False])
@pytest.mark.parametrize("cached", [True, False])
def test_restore_reads_straight_to_the_device(
    gpu: Gpu, cached: bool, pinnable: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The reads come behind what the training streams hold. Without a pinned ring they pass the small buffer."""
    training = Training(Fake(gpu, monkeypatch, Mode.COPIES_EARLY), Recipe())
    gpu.driver.configure(mode=Mode.COPIES_EARLY, registration_limit=1e18 if pinnable else 0)
    head = training.machine.put(torch.nn.Linear(900, 900), 1)  # more than one read
    on_host = torch.nn.Linear(70, 70)
    gpu.kernel(head.parameters(), 7)
    parts = {"model": training.model, "optimizer": training.optimizer, "head": head, "on_host": on_host}
    with lazyckpt.Checkpointer(tmp_path, direct_io=not cached, host_buffer_bytes=8 << 20, chunk_bytes=64 << 10) as ckpt:
        ckpt.track(**parts)
        training.step()
        ckpt.save(1, blocking=True)
        picture = gpu.picture({name: part.state_dict() for name, part in parts.items()})
        tensors = [*training.owned(), *training.model.buffers(), *head.parameters()]
        for device in (0, 1):
            overwritten = gpu.ranges(tensors, device, 255)
            gpu.driver.kernel(gpu.streams[device], overwritten, device=device, microseconds=20_000)
        uploads = gpu.driver.statistics()["bytes_to_device"]
        assert ckpt.restore() == 1
        assert training.machine.content({name: part.state_dict() for name, part in parts.items()}) == picture
        there = sum(t.nbytes for t in tensors) - sum(t.nbytes for t in gpu.not_placed(tensors))
        assert gpu.driver.statistics()["bytes_to_device"] - uploads == there
        assert gpu.driver.statistics()["pageable_copies"] == 0


@pytest.mark.parametrize("name", ["cuMemcpyHtoDAsync_v2", "cuEventSynchronize", "cuStreamWaitEvent"])
def test_a_call_that_fails_in_restore_is_named(gpu: Gpu, training: Training, name: str, tmp_path: Path) -> None:
    with lazyckpt.Checkpointer(tmp_path, **SMALL) as ckpt:
        ckpt.track(model=training.model, optimizer=training.optimizer)
        ckpt.save(1, blocking=True)
        picture = gpu.picture(training.state())
        gpu.driver.fail(name, 1, 1)
        with pytest.warns(UserWarning, match=f"{name}: CUDA_ERROR"), pytest.raises(lazyckpt.RestoreError, match=name):
            ckpt.restore()
        assert ckpt.restore() == 1
    assert training.machine.content(training.state()) == picture


# lazyckpt.devices as it is


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


def test_a_compact_file_holds_parts_of_flat_memory(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each part has bytes of its own on the device; the optimizer steps right after every save."""
    machine = Fake(gpu, monkeypatch)
    flat = torch.nn.Parameter(torch.zeros(200_000))
    cuts = [(0, 60_000), (60_000, 100_000), (130_000, 190_000)]
    views = {str(at): flat.data[begin:end] for at, (begin, end) in enumerate(cuts)}
    gpu.place([flat])
    optimizer = torch.optim.SGD([flat], lr=0.1)

    def step(number: int) -> None:
        flat.grad = torch.ones_like(flat)
        optimizer.step()
        begin = gpu.data_ptr(flat.untyped_storage())
        kernels = [(begin + 4 * a, 4 * (b - a), 10 * number + at) for at, (a, b) in enumerate(cuts)]
        gpu.driver.kernel(gpu.streams[0], kernels)

    with lazyckpt.Saver(**SMALL) as saver:
        step(1)
        for number in range(1, 6):
            machine.keep_busy()
            with saver.stage(tmp_path / str(number)) as staged:
                staged.add("a.pt", {**views, "tied": views["0"]}, compact=True)
                handle = staged.save()
            step(number + 1)
            path = handle.result(30) / "a.pt"
            found = torch.load(path, weights_only=True)
            for at, (begin, end) in enumerate(cuts):
                assert raw(found[str(at)]) == bytes([10 * number + at]) * 4 * (end - begin)
            assert found["tied"].data_ptr() == found["0"].data_ptr()
            assert path.stat().st_size < 4 * 160_000 + 64 * KIB
            assert handle.metrics.eager_bytes == 0
    assert gpu.driver.statistics()["pageable_copies"] == 0
