"""What hooks may do inside ``safetensors_into`` to the tensors and the files that they gave to ``save_file``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch as st
import torch

import lazyckpt
from lazyckpt.integrations.redirect import safetensors_into

N = 20_000  # elements


@pytest.fixture
def saver() -> Iterator[lazyckpt.Saver]:
    with lazyckpt.Saver() as saver:
        yield saver


def save(saver: lazyckpt.Saver, path: Path, hook: Callable[[Path], None]) -> Path:
    """Runs ``hook`` on a staged folder, as the integrations do."""
    with saver.stage(path) as staged:
        with safetensors_into(staged, staged.path):
            hook(staged.path)
        staged.save().result()
    return path


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# memory


@pytest.mark.parametrize("resize", [lambda s: s.resize_(0), lambda s: s._share_fd_cpu_()], ids=["freed", "shared"])
def test_memory_that_a_hook_gives_back_is_kept_before(
    resize: Callable[[torch.UntypedStorage], None], saver: lazyckpt.Saver, tmp_path: Path
) -> None:
    """Regression: the save read memory that was gone, which ended the process."""
    tensor = torch.ones(N)

    def hook(folder: Path) -> None:
        st.save_file({"a": tensor}, folder / "w.safetensors")
        resize(tensor.untyped_storage())

    folder = save(saver, tmp_path / "state", hook)
    assert torch.equal(st.load_file(folder / "w.safetensors")["a"], torch.ones(N))


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.view(100, -1).T], ids=["contiguous", "transposed"])
def test_a_tensor_without_memory_is_refused(view: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    """Regression: it ended the process."""
    tensor = view(torch.ones(N))
    tensor.untyped_storage().resize_(4)
    with pytest.raises(lazyckpt.SerializationError, match="'a' needs 80000 bytes, but its storage has 4"):
        lazyckpt.save({"a": tensor}, tmp_path / "w.safetensors")


def test_an_expanded_tensor_needs_only_what_it_shows(tmp_path: Path) -> None:
    lazyckpt.save({"a": torch.ones(1).expand(9), "b": torch.ones(0, 3)}, tmp_path / "w.safetensors")
    loaded = st.load_file(tmp_path / "w.safetensors")
    assert loaded["a"].tolist() == [1] * 9 and loaded["b"].shape == (0, 3)
