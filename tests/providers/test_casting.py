"""Copies of a model in another dtype: the tensors that torch's conversion gives at the moment of save()."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lazyckpt
from lazyckpt.errors import ConfigError
from lazyckpt.pipeline.plan import SafetensorsPlan
from lazyckpt.providers.casting import converted
from lazyckpt.providers.ranges import in_front, span_copied


def train(count: int = 1, model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    if model is None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 512), nn.BatchNorm1d(512), nn.Linear(512, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(count):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 128)).square().sum().backward()
    optimizer.step()


def halved(state: dict[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {k: v.to(dtype) if v.is_floating_point() else v.clone() for k, v in state.items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_tracked_model_is_saved_in_the_dtype_and_restored(tmp_path: Path, dtype: torch.dtype) -> None:
    model, optimizer = train()
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model, save_dtype=dtype)
        for number in range(1, 5):
            expected = halved(model.state_dict(), dtype)
            handle = ckpt.save(number)
            step(model, optimizer)
            assert equal(torch.load(handle.result() / "state.pt")["model"], expected)
        other = copy.deepcopy(model)
        step(other, torch.optim.SGD(other.parameters(), lr=1.0))
        ckpt.track(replace=True, model=other, save_dtype=dtype)
        assert ckpt.restore() == 4
        live = {k: v.to(other.state_dict()[k].dtype) for k, v in expected.items()}
        assert equal(dict(other.state_dict()), live)


def test_bfloat16_is_half_as_large_and_eager(tmp_path: Path) -> None:
    model, _ = train(2)
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model, save_dtype=torch.bfloat16)
        handle = ckpt.save(1, blocking=True)
    assert handle.metrics.bytes < 0.6 * sum(p.nbytes for p in model.parameters())
    assert handle.metrics.eager_bytes > 0.9 * handle.metrics.bytes


def test_the_same_tensors_whole_and_converted(tmp_path: Path) -> None:
    """A checkpoint and a published copy of one step, of two savers."""
    model, optimizer = train(2)
    with lazyckpt.Checkpointer(tmp_path / "run") as ckpt, lazyckpt.Checkpointer(tmp_path / "publish") as publish:
        ckpt.track(model=model, optimizer=optimizer)
        publish.track(model=model, save_dtype=torch.bfloat16)
        for number in range(3):
            expected = copy.deepcopy(model.state_dict())
            handles = [ckpt.save(number), publish.save(number)]
            step(model, optimizer)
            whole, half = (torch.load(handle.result() / "state.pt")["model"] for handle in handles)
            assert equal(whole, expected) and equal(half, halved(expected))


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_one_part_as_a_file(tmp_path: Path, name: str, dtype: torch.dtype | None) -> None:
    model, optimizer = train(2)
    with lazyckpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        for number in range(3):
            expected = halved(model.state_dict(), dtype) if dtype else copy.deepcopy(model.state_dict())
            ckpt.save(number)
            handle = ckpt.save_part("model", tmp_path / name, dtype=dtype)
            step(model, optimizer)
            file = handle.result()
            assert equal(load_file(file) if name.endswith("s") else torch.load(file), dict(expected))
        if dtype is None:
            assert handle.metrics.eager_bytes < 0.1 * handle.metrics.bytes, "as lazy as the checkpoint of that step"
        with pytest.raises(ConfigError, match="'optimizer' is no tracked module; there is: model"):
            ckpt.save_part("optimizer", tmp_path / name)


def test_one_save_at_a_time(tmp_path: Path) -> None:
    class Calling(nn.Linear):
        """Calls something while its state is asked for."""

        call: Any = None

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            call, self.call = self.call, None
            if call is not None:
                with pytest.raises(ConfigError, match=r"was called inside save"):
                    call()
            return super().state_dict(*args, **kwargs)

    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        model = Calling(4, 4)
        ckpt.track(model=model)
        model.call = lambda: ckpt.save_part("model", tmp_path / "x.pt")
        ckpt.save(1).result()
        model.call = lambda: ckpt.save(2)
        ckpt.save_part("model", tmp_path / "y.pt").result()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "y.pt"]


def test_tensors_of_every_shape(tmp_path: Path) -> None:
    base = torch.randn(64, 64)
    state = {
        "whole": torch.randn(100, 100),
        "tied": base,
        "tied again": base,
        "slice": base[3:5],
        "transposed": torch.randn(32, 64).t(),
        "channels last": torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
        "empty": torch.empty(0),
        "scalar": torch.tensor(1.5),
        "double": torch.randn(30, dtype=torch.float64),
        "bfloat16": torch.randn(30).bfloat16(),
        "integers": torch.arange(10),
        "special": torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-45] * 1000),
        "a string": "text",
    }
    with lazyckpt.Saver() as saver:
        saver.save(state, tmp_path / "x.pt", dtype=torch.bfloat16, blocking=True)
        tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and k not in ("tied again", "slice")}
        saver.save(tensors, tmp_path / "x.safetensors", dtype=torch.bfloat16, blocking=True)
    for loaded in (torch.load(tmp_path / "x.pt"), load_file(tmp_path / "x.safetensors")):
        for name, value in loaded.items():
            if isinstance(value, torch.Tensor):
                expected = state[name].bfloat16() if state[name].is_floating_point() else state[name]
                assert torch.equal(value.nan_to_num(), expected.nan_to_num()) and value.dtype is expected.dtype, name
    assert loaded.keys() == tensors.keys()


def test_a_write_after_the_call_changes_nothing(tmp_path: Path, disk: Any) -> None:
    """Also of a tensor that the ring has no room for yet."""
    model, optimizer = train(2)
    with lazyckpt.Checkpointer(tmp_path, on_error="warn", chunk_bytes=16 << 10, host_buffer_bytes=32 << 10) as ckpt:
        ckpt.track(model=model, save_dtype=torch.bfloat16)
        ckpt.save(1).result()
        step(model, optimizer)
        expected = halved(model.state_dict())
        disk.hold()
        threading.Timer(0.2, disk.release).start()  # save() waits for room
        handle = ckpt.save(2)
        with torch.no_grad():
            model[2].weight += 1.0  # type: ignore[index, union-attr]
        assert equal(lazyckpt.load(handle.result(), key="model"), expected)


def test_a_part_is_of_the_moment_at_which_the_save_has_room(tmp_path: Path, disk: Any) -> None:
    """Regression: the tensors were converted first, and a step of another thread made the rest newer than these."""
    model, _ = train(2)
    with lazyckpt.Saver(max_in_flight=1) as saver:
        disk.hold()
        saver.save(dict(model.state_dict()), tmp_path / "before.pt")
        state = model.state_dict()

        def go_on() -> None:
            with torch.no_grad():
                state["1.running_mean"].fill_(7.0)
                state["1.num_batches_tracked"].fill_(7)
            disk.release()

        threading.Timer(0.2, go_on).start()
        saved = torch.load(saver.save(state, tmp_path / "half.pt", dtype=torch.float16).result())
    assert saved["1.num_batches_tracked"] == 7 and saved["1.running_mean"].eq(7).all()


@pytest.mark.parametrize("audit", [False, True])
def test_it_goes_together_with_the_other_settings(tmp_path: Path, audit: bool) -> None:
    model, optimizer = train(2)
    with lazyckpt.Checkpointer(tmp_path, audit=audit, verify_after_write=True, witness="versions") as ckpt:
        ckpt.track(model=model, save_dtype=torch.bfloat16)
        for number in range(3):
            expected = halved(model.state_dict())
            handle = ckpt.save(number)
            step(model, optimizer)
            assert equal(lazyckpt.load(handle.result(), key="model"), expected)


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    model, optimizer = train()
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(ConfigError, match="save_dtype is for modules, not for a AdamW"):
            ckpt.track(optimizer=optimizer, save_dtype=torch.bfloat16)
        with pytest.raises(ConfigError, match=r"dtype=torch\.int8: expected a floating-point dtype"):
            ckpt.track(model=model, save_dtype=torch.int8)
        with pytest.raises(ConfigError, match="dtype is for a state dict, not for a Tensor"):
            ckpt._saver.save(torch.ones(3), tmp_path / "x.pt", dtype=torch.bfloat16)


@pytest.mark.parametrize("cast_first", [False, True])
def test_one_checkpoint_holds_a_module_whole_and_converted(tmp_path: Path, cast_first: bool) -> None:
    model, optimizer = train(2)
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        if cast_first:
            ckpt.track(public=model, save_dtype=torch.bfloat16)
        ckpt.track(model=model, optimizer=optimizer)
        if not cast_first:
            ckpt.track(public=model, save_dtype=torch.bfloat16)
        for number in range(3):
            expected = copy.deepcopy(model.state_dict())
            handle = ckpt.save(number)
            step(model, optimizer)
            saved = torch.load(handle.result() / "state.pt")
            assert equal(saved["model"], expected) and equal(saved["public"], halved(expected))


def test_frozen_layers_stay_lazy_beside_a_converted_copy(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(128, 512).requires_grad_(False), nn.Linear(512, 128))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    other = nn.Linear(128, 512).requires_grad_(False)  # has the key of the model's first layer in the other file
    with lazyckpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.track(other=other, model=model, optimizer=optimizer)
        for number in range(9):
            step(model, optimizer)
            dtype = torch.bfloat16 if number < 6 else None
            part = ckpt.save_part("model", tmp_path / "model.pt", dtype=dtype) if number > 2 else None
            handle = ckpt.save(number)  # before the part is copied
            handle.result()
            if part is not None:
                part.result()
        step(model, optimizer)
        handle = ckpt.save(9, blocking=True)
    assert handle.metrics.eager_bytes < other.weight.nbytes


def test_the_versions_of_modules_are_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model, save_dtype=torch.bfloat16)
        saved = torch.load(ckpt.save(1).result() / "state.pt")["model"]
        part = torch.load(ckpt.save_part("model", tmp_path / "model.pt", dtype=torch.float16).result())
    assert saved._metadata == part._metadata == getattr(model.state_dict(), "_metadata")  # noqa: B009


def test_another_save_dtype_of_a_tracked_module_is_told(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model)
        ckpt.track(model=model)
        with pytest.raises(ConfigError, match="'model' is tracked with another save_dtype; replace=True"):
            ckpt.track(model=model, save_dtype=torch.bfloat16)
        ckpt.track(replace=True, model=model, save_dtype=torch.bfloat16)
        ckpt.track(model=model, save_dtype=torch.bfloat16)
        assert torch.load(ckpt.save(1).result() / "state.pt")["model"]["weight"].dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tied_weights_are_written_once(tmp_path: Path, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model, save_dtype=dtype)
        saved = torch.load(ckpt.save(1).result() / "state.pt")["model"]
    assert equal(saved, halved(model.state_dict(), dtype))
    assert saved["0.weight"].data_ptr() == saved["1.weight"].data_ptr()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes the host's tensors look like a GPU's: copies to the host are noted, and nothing else may copy them."""
    calls: list[str] = []
    to, clone = torch.Tensor.to, torch.Tensor.clone
    copies: list[torch.UntypedStorage] = []  # kept, so that no other storage gets their identity

    def is_copy(tensor: torch.Tensor) -> bool:
        return any(tensor.untyped_storage()._cdata == storage._cdata for storage in copies)

    def moved(tensor: torch.Tensor, *args: Any, **knobs: Any) -> torch.Tensor:
        if args != ("cpu",):
            assert is_copy(tensor), "converted where it is"
            return to(tensor, *args, **knobs)
        assert tensor.is_contiguous(), "torch straightens it where it is"
        copy = to(tensor, *args, **knobs)
        copies.append(copy.untyped_storage())
        calls.append("to the host")
        return copy

    def cloned(tensor: torch.Tensor, **knobs: Any) -> torch.Tensor:
        assert is_copy(tensor), "cloned where it is"
        return clone(tensor, **knobs)

    monkeypatch.setattr(torch.Tensor, "to", moved)
    monkeypatch.setattr(torch.Tensor, "clone", cloned)
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(is_copy))
    return calls


def test_what_is_converted_at_once_is_copied_to_the_host_before(elsewhere: list[str]) -> None:
    """Regression: weights on a GPU were converted there, with half a model of memory that training may not have."""
    tensor = torch.arange(30.0)
    halves = converted({"a": tensor, "b": tensor[::2], "c": tensor}, torch.float16)
    assert len(elsewhere) == 2
    numbers = {name: value.tolist() for name, value in halves.items()}
    assert numbers == {"a": tensor.tolist(), "b": tensor[::2].tolist(), "c": tensor.tolist()}
    assert all(value.dtype is torch.float16 for value in halves.values())


def test_views_are_made_dense_in_host_memory(elsewhere: list[str], tmp_path: Path) -> None:
    """For shards and for safetensors. Regression: on a GPU, they were copied there."""
    rows = torch.arange(24.0).view(4, 6)
    views = {"part": rows[1:3], "columns": rows[:, 2:4], "turned": rows.t(), "none": rows[:, :0]}
    fronts = {name: in_front(view) for name, view in views.items()}
    assert len(elsewhere) == 2, "a transposed view fills its storage"
    assert {name: front.tolist() for name, front in fronts.items() if front is not None} == {
        name: view.tolist() for name, view in views.items()
    }
    for name, view in views.items():
        (found,) = SafetensorsPlan({name: view}).gather()
        shown = torch.empty(0).set_(found.storage, found.offset // 4, (view.numel(),))
        assert shown.tolist() == view.flatten().tolist() and found.nbytes == view.nbytes
        own = found.storage._cdata != rows.untyped_storage()._cdata
        assert own == (not view.is_contiguous()), "a part that is dense is read where it is"


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_span_that_is_copied_shows_the_same(dtype: torch.dtype) -> None:
    base = torch.randn(5, 6, 7, dtype=dtype)
    views = [
        base,
        base[1:3],
        base[:, 2:5, ::3],
        base.permute(2, 0, 1),
        base[0, 0, 3],
        base[:, :0],
        base.expand(2, 5, 6, 7),
    ]
    if dtype.is_complex:
        views += [view.conj() for view in views] + [base.conj().imag, base.conj().imag[::2, 1]]
    for view in views:
        copy = span_copied(view)
        assert torch.equal(copy, view) and copy.untyped_storage()._cdata != view.untyped_storage()._cdata
        assert copy.untyped_storage().nbytes() <= base.untyped_storage().nbytes()
