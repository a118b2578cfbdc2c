"""Views of one flat storage, as ZeRO has them, in compact files: copied lazily, and never torn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from held_files import Files

import lazyckpt
from lazyckpt import _engine, devices
from lazyckpt.pipeline import one_moment

TINY = {"chunk_bytes": 64 << 10, "host_buffer_bytes": 128 << 10}
WITNESSES = ["versions", "pages"] if not _engine.page_witness() else ["versions"]
OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [torch.optim.SGD, torch.optim.Adam]


class Flat:
    """A parameter that holds all weights of a model, one behind the other, and some that no view of a file shows."""

    def __init__(self, saver: lazyckpt.Saver, folder: Path, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.saver, self.folder = saver, folder
        self.flat = torch.nn.Parameter(torch.rand(200_000))
        self.optimizer = optimizer([self.flat], lr=0.1)
        at, self.first, self.second = 10, {}, {}
        for layer in range(6):
            file = self.first if layer % 2 else self.second
            file[f"{layer}.weight"] = self.flat.data[at : at + 19_600].view(140, 140)
            file[f"{layer}.bias"] = self.flat.data[at + 19_600 : at + 19_900]
            at += 19_900
        self.first["tied"] = self.first["1.weight"]
        self.first["transposed"] = self.flat.data[at : at + 12_000].view(60, 200).t()
        self.outside = at + 20_000  # the first element that is no neighbour of a view
        self.saves = 0
        self.step()

    def step(self) -> None:
        self.flat.grad = torch.ones_like(self.flat)
        self.optimizer.step()

    def save(self, **knobs: Any) -> lazyckpt.SaveHandle:
        self.saves += 1
        with self.saver.stage(self.folder / str(self.saves)) as staged:
            staged.add("first.pt", self.first, compact=True)
            staged.add("second.pt", self.second, compact=True)
            return staged.save(**knobs)

    def picture(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in (self.first | self.second).items()}

    def saved(self, handle: lazyckpt.SaveHandle) -> dict[str, torch.Tensor]:
        path = handle.result(60)
        return lazyckpt.load(path / "first.pt") | torch.load(path / "second.pt", weights_only=True)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(params=WITNESSES)
def saver(request: pytest.FixtureRequest, files: Files) -> Iterator[lazyckpt.Saver]:
    saver = lazyckpt.Saver(witness=request.param, **TINY)
    yield saver
    files.release()
    with contextlib.suppress(lazyckpt.SaveError):
        saver.close()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_views_are_lazy_and_a_step_right_after_save_does_not_tear_them(
    optimizer: Any, saver: lazyckpt.Saver, tmp_path: Path, files: Files, pending: Any
) -> None:
    training = Flat(saver, tmp_path, optimizer)
    for number in range(4):
        files.hold()
        handle = training.save()
        expected = training.picture()
        assert pending(handle) > 0
        files.release(after_s=0.05)
        training.step()
        assert pending(handle) == 0
        assert equal(training.saved(handle), expected)
        if number:
            assert handle.metrics.eager_bytes <= 64 << 10
        assert handle.metrics.copied_bytes == (6 * 19_900 + 12_000) * 4
        assert handle.metrics.bytes < handle.metrics.copied_bytes + (64 << 10)


def test_files_that_no_one_copies_lazily_are_the_same(tmp_path: Path, saver: lazyckpt.Saver) -> None:
    training = Flat(saver, tmp_path, torch.optim.SGD)
    lazy = training.save(blocking=True).path
    training.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    eager = training.save(blocking=True)
    for name in ("first.pt", "second.pt"):
        assert (lazy / name).read_bytes() == (eager.path / name).read_bytes()


def test_a_write_to_a_view_before_its_copy_fails_the_save_and_names_it(
    saver: lazyckpt.Saver, request: pytest.FixtureRequest, tmp_path: Path, files: Files
) -> None:
    training = Flat(saver, tmp_path, torch.optim.SGD)
    training.save(blocking=True)
    training.step()
    files.hold()
    handle = training.save()
    with torch.no_grad():
        training.flat[10 + 3 * 19_900 :].mul_(2)
    files.release()
    # A version tells that something in the storage was written, the kernel what.
    seen_whole = "versions" in request.node.name
    name = r"first\.pt\.1.*and 2 more" if seen_whole else r"(first|second)\.pt\.[345t]"
    with pytest.raises(lazyckpt.TornSnapshotError, match=name) as caught:
        handle.result(60)
    assert ("first.pt.1.weight" in str(caught.value)) == seen_whole


@pytest.mark.skipif(bool(_engine.page_witness()), reason="only the kernel tells which bytes were written")
def test_a_write_beside_the_views_tears_nothing(tmp_path: Path, files: Files) -> None:
    """Neither to pages that no view shows, nor to the bytes between a view and the end of its page."""
    with lazyckpt.Saver(witness="pages", **TINY) as saver:
        training = Flat(saver, tmp_path, torch.optim.SGD)
        training.save(blocking=True)
        training.step()
        files.hold()
        handle = training.save()
        expected = training.picture()
        with torch.no_grad():
            training.flat[training.outside :].zero_()
            training.flat[:10].zero_()
        files.release()
        assert equal(training.saved(handle), expected)


def test_flat_memory_that_moves_or_is_cut_anew_is_saved_as_it_is(
    saver: lazyckpt.Saver, tmp_path: Path, files: Files
) -> None:
    training = Flat(saver, tmp_path, torch.optim.SGD)

    def moves() -> None:
        before = training.flat.data
        training.flat.data = before.clone()
        for file in (training.first, training.second):
            for name, tensor in file.items():
                at = tensor.storage_offset()
                file[name] = training.flat.data.as_strided(tensor.shape, tensor.stride(), at)

    def is_cut_anew() -> None:
        """The same sizes at other places of the same memory."""
        for file in (training.first, training.second):
            for name, tensor in file.items():
                at = tensor.storage_offset() + 30_000
                file[name] = training.flat.data.as_strided(tensor.shape, tensor.stride(), at)

    for change in (moves, is_cut_anew, moves):
        training.save(blocking=True)
        training.step()
        change()
        assert equal(training.saved(training.save()), training.picture()), change.__name__
        for _ in range(2):
            training.step()
            files.hold()
            handle = training.save()
            expected = training.picture()
            files.release(after_s=0.05)
            training.step()
            assert equal(training.saved(handle), expected), change.__name__
            assert handle.metrics.eager_bytes <= 64 << 10


def test_a_handler_that_cuts_the_memory_anew_inside_save_is_noticed(
    saver: lazyckpt.Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pickle says the same of a view of other bytes."""
    training = Flat(saver, tmp_path, torch.optim.SGD)
    check = one_moment.check

    def interrupted(instant: Any, *args: Any) -> None:
        weight = training.first["1.weight"]
        weight.set_(weight.untyped_storage(), weight.storage_offset() - 1, weight.shape, weight.stride())
        monkeypatch.setattr(type(instant), "was_interrupted", lambda _: True)
        check(instant, *args)

    monkeypatch.setattr(one_moment, "check", interrupted)
    with pytest.raises(lazyckpt.TornSnapshotError):
        training.save(blocking=True)


def test_audit_reads_the_views(tmp_path: Path) -> None:
    with lazyckpt.Saver(witness="versions", audit=True, **TINY) as saver:
        training = Flat(saver, tmp_path, torch.optim.SGD)
        for _ in range(3):
            handle = training.save()
            expected = training.picture()
            training.step()
            assert equal(training.saved(handle), expected)


def test_only_one_rank_writes_a_compact_file(tmp_path: Path) -> None:
    with lazyckpt.Saver() as saver, saver.stage(tmp_path / "c") as staged:
        staged.add("a.pt", torch.zeros(9)[:3], compact=True)
        with pytest.raises(lazyckpt.ConfigError, match="compact"):
            staged.write_together(["a.pt"])


def test_a_storage_that_torch_copies_is_copied_once_for_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a device that the engine does not know."""
    copied: list[int] = []

    def on_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        copied.append(storage.nbytes())
        return storage.clone()

    monkeypatch.setattr(devices, "on_host", on_host)
    flat, other = torch.zeros(100).untyped_storage(), torch.zeros(10).untyped_storage()
    storages, located = [flat, other, flat], [devices.ELSEWHERE, devices.HOST, devices.ELSEWHERE]
    pointers, _, _, held, _ = devices.sources(storages, [], located)
    assert copied == [400] and held[0] is held[2] and held[1] is other
    assert list(pointers) == [storage.data_ptr() for storage in held]
