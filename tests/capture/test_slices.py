"""Slices of one flat storage in a safetensors file, as ZeRO's weights are: copied lazily, and never torn."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from held_files import Files

import lazyckpt
from lazyckpt import _engine
from lazyckpt.pipeline.plan import SafetensorsPlan
from lazyckpt.providers.base import Parts
from lazyckpt.providers.ranges import overlaps

TINY = {"chunk_bytes": 64 << 10, "host_buffer_bytes": 128 << 10}
WITNESSES = ["versions", "pages"] if not _engine.page_witness() else ["versions"]
LAYERS, SIZE = 5, 20_000  # elements


class Sliced:
    """A parameter that holds all weights of a model, one behind the other, behind some that no file shows."""

    def __init__(self, saver: lazyckpt.Saver, folder: Path) -> None:
        torch.manual_seed(0)
        self.saver, self.path = saver, folder / "weights.safetensors"
        self.flat = torch.nn.Parameter(torch.rand(10 + LAYERS * SIZE + 10_000))
        self.optimizer = torch.optim.SGD([self.flat], lr=0.1)
        self.weights = {
            f"{layer}.weight": self.flat.data[10 + layer * SIZE :][:SIZE].view(100, -1) for layer in range(LAYERS)
        }
        self.step()

    def step(self) -> None:
        self.flat.grad = torch.ones_like(self.flat)
        self.optimizer.step()

    def save(self, *, blocking: bool = False) -> lazyckpt.SaveHandle:
        return self.saver.save(self.weights, self.path, blocking=blocking)

    def picture(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.weights.items()}


def equal(path: Path, expected: dict[str, torch.Tensor]) -> bool:
    loaded = safetensors.torch.load_file(path)
    return loaded.keys() == expected.keys() and all(torch.equal(loaded[name], expected[name]) for name in loaded)


@pytest.fixture(params=WITNESSES)
def saver(request: pytest.FixtureRequest, files: Files) -> Iterator[lazyckpt.Saver]:
    saver = lazyckpt.Saver(witness=request.param, **TINY)
    yield saver
    files.release()
    with contextlib.suppress(lazyckpt.SaveError):
        saver.close()


def test_slices_are_lazy_and_a_step_right_after_save_does_not_tear_them(
    saver: lazyckpt.Saver, tmp_path: Path, files: Files
) -> None:
    training = Sliced(saver, tmp_path)
    for _ in range(4):
        handle = training.save()
        expected = training.picture()
        training.step()
        assert equal(handle.result(60), expected)
        assert handle.metrics.eager_bytes == 0
        assert handle.metrics.copied_bytes == LAYERS * SIZE * 4


def test_a_step_waits_for_slices(saver: lazyckpt.Saver, tmp_path: Path, files: Files) -> None:
    training = Sliced(saver, tmp_path)
    with saver.stage(tmp_path / "folder") as staged:
        staged.add("weights.safetensors", training.weights)
        files.hold()
        handle = staged.save()
    expected = training.picture()
    files.release(after_s=0.05)
    training.step()
    assert equal(handle.result(60) / "weights.safetensors", expected)


def test_a_slice_that_is_written_to_before_its_copy_fails_the_save_and_is_named(
    saver: lazyckpt.Saver, request: pytest.FixtureRequest, tmp_path: Path, files: Files
) -> None:
    """A version tells that something in the storage was written, the kernel what."""
    training = Sliced(saver, tmp_path)
    with saver.stage(tmp_path / "folder") as staged:
        staged.add("weights.safetensors", training.weights)
        files.hold()
        handle = staged.save()
    with torch.no_grad():
        training.flat[10 + 4 * SIZE :].mul_(2)
    files.release()
    seen_whole = "versions" in request.node.name
    name = r"0\.weight.*4\.weight" if seen_whole else r"^((?!0\.weight).)*4\.weight was"
    with pytest.raises(lazyckpt.TornSnapshotError, match=name):
        handle.result(60)


def test_a_file_of_slices_is_what_safetensors_writes(tmp_path: Path) -> None:
    flat = torch.rand(1000)
    tensors = {
        "first": flat[:10],
        "second": flat[10:40].view(5, 6),
        "integers": flat[50:60].view(torch.int16),
        "none": flat[40:40],
        "one": flat[999],
        "complex": torch.view_as_complex(flat[500:520].view(10, 2)),
    }
    copied = {"turned": flat[100:112].view(3, 4).t(), "columns": flat[200:240].view(4, 10)[:, 2:5]}
    lazyckpt.save(tensors | copied, tmp_path / "ours.safetensors")
    theirs = {name: tensor.contiguous() for name, tensor in (tensors | copied).items()}
    safetensors.torch.save_file(theirs, tmp_path / "theirs.safetensors")
    assert equal(tmp_path / "ours.safetensors", safetensors.torch.load_file(tmp_path / "theirs.safetensors"))
    assert lazyckpt.verify(tmp_path / "ours.safetensors").ok


@pytest.mark.parametrize(
    ("begins", "overlapping"),
    [
        ({"a": (0, 10), "b": (10, 20)}, None),
        ({"a": (0, 10), "b": (9, 20)}, "'a' and 'b'"),
        ({"a": (0, 10), "b": (0, 10)}, "'a' and 'b'"),
        ({"z": (0, 30), "b": (1, 2), "c": (20, 31)}, "'z' and 'b'"),
        ({"a": (0, 10), "b": (5, 5)}, None),
    ],
)
def test_slices_that_overlap_are_refused_by_name(
    begins: dict[str, tuple[int, int]], overlapping: str | None, tmp_path: Path
) -> None:
    flat = torch.rand(100)
    tensors = {name: flat[begin:end] for name, (begin, end) in begins.items()}
    if overlapping is None:
        lazyckpt.save(tensors, tmp_path / "a.safetensors")
        assert equal(tmp_path / "a.safetensors", {name: tensor.clone() for name, tensor in tensors.items()})
    else:
        with pytest.raises(lazyckpt.SerializationError, match=f"{overlapping} share memory"):
            lazyckpt.save(tensors, tmp_path / "a.safetensors")


def test_every_tensor_that_overlaps_an_earlier_one_is_found() -> None:
    flat = torch.rand(100)
    tensors = {"z": flat[:30], "b": flat[1:2], "c": flat[20:31], "d": flat[31:], "e": flat[:30]}
    assert overlaps(tensors) == {"e": "z", "b": "z", "c": "z"}


def test_columns_that_alternate_in_memory_are_refused(tmp_path: Path) -> None:
    rows = torch.rand(4, 6)
    with pytest.raises(lazyckpt.SerializationError, match="share memory"):
        lazyckpt.save({"left": rows[:, :3], "right": rows[:, 3:]}, tmp_path / "a.safetensors")


def test_a_slice_whose_place_moves_is_saved_where_it_is(tmp_path: Path) -> None:
    """One slice alone is kept from save to save."""
    flat = torch.arange(100.0)
    with lazyckpt.Saver() as saver:
        for begin in (10, 10, 20, 20):
            with saver.stage(tmp_path / "folder") as staged:
                staged.add("a.safetensors", {"a": flat[begin : begin + 10]})
                staged.save(blocking=True)
            assert equal(tmp_path / "folder" / "a.safetensors", {"a": flat[begin : begin + 10]})


def test_parts_of_slices_lie_in_the_slices() -> None:
    """As several ranks write them."""
    flat = torch.rand(100)
    views = SafetensorsPlan({"a": flat[10:30], "b": flat[30:70]}).gather()
    parts = views.parts(Parts([0, 0, 1], array("Q", (0, 40, 8)), array("Q", (40, 40, 4))))
    assert [(part.offset, part.nbytes) for part in parts] == [(40, 40), (80, 40), (128, 4)]
