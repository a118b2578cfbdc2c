"""What hooks may do inside ``safetensors_into`` to the tensors and the files that they gave to ``save_file``."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as st
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import lazyckpt
from lazyckpt.integrations.redirect import safetensors_into
from marks import MODES

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


# writes


class Special(nn.Parameter):
    """Like the parameters of quantized or sharded layers: ``state_dict()`` gives plain tensors."""


class Wrapper(torch.Tensor):
    """Holds a tensor instead of memory, as DTensor does."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        wrapper: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        wrapper.inner = inner
        return wrapper

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func(*(arg.inner if isinstance(arg, Wrapper) else arg for arg in args), **(kwargs or {}))
        return args[0]


class Closed(Wrapper):
    """Hides its inner tensor."""

    __tensor_flatten__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "kind",
    [Special, Wrapper, Closed, lambda t: t.as_subclass(type("Sub", (torch.Tensor,), {}))],
    ids=["parameter", "wrapper", "closed", "tensor"],
)
def test_a_write_through_a_subclass_keeps_what_the_file_was_given(
    kind: Callable[[torch.Tensor], torch.Tensor], saver: lazyckpt.Saver, tmp_path: Path
) -> None:
    """Regression: only writes to plain tensors and parameters were seen, and the file held later values."""
    plain = torch.zeros(N)
    other = kind(plain)

    def hook(folder: Path) -> None:
        st.save_file({"a": plain}, folder / "w.safetensors")
        with torch.no_grad():
            other.copy_(torch.ones(N))

    folder = save(saver, tmp_path / "state", hook)
    assert plain.sum() == N and st.load_file(folder / "w.safetensors")["a"].sum() == 0


def test_a_step_of_another_thread_keeps_what_the_file_was_given(saver: lazyckpt.Saver, tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.zeros(N))
    parameter.grad = torch.ones(N)
    thread = threading.Thread(target=torch.optim.SGD([parameter], lr=1.0).step)

    def hook(folder: Path) -> None:
        st.save_file({"a": parameter.detach()}, folder / "w.safetensors")
        thread.start()
        thread.join()

    folder = save(saver, tmp_path / "state", hook)
    assert st.load_file(folder / "w.safetensors")["a"].sum() == 0


@pytest.mark.parametrize("again", [False, True])
def test_a_write_that_only_its_version_tells_fails_the_save(again: bool, saver: lazyckpt.Saver, tmp_path: Path) -> None:
    """Regression: another thread wrote later values into the file. A file that is saved again is not affected."""
    tensor = torch.zeros(N)
    thread = threading.Thread(target=tensor.fill_, args=(1,))

    def hook(folder: Path) -> None:
        st.save_file({"a": tensor}, folder / "w.safetensors")
        thread.start()
        thread.join()
        if again:
            st.save_file({"a": tensor}, folder / "w.safetensors")

    if again:
        assert st.load_file(save(saver, tmp_path / "state", hook) / "w.safetensors")["a"].sum() == N
        return
    with pytest.raises(lazyckpt.TornSnapshotError, match=r"'a' in w\.safetensors was written to"):
        save(saver, tmp_path / "state", hook)
    assert not (tmp_path / "state").exists()


def _fill_view(flat: torch.Tensor, views: list[torch.Tensor]) -> None:
    views[1].fill_(1)


def _fill_sibling(flat: torch.Tensor, views: list[torch.Tensor]) -> None:
    """Whose version counter is another one."""
    sibling = torch.empty(0)
    sibling.data = flat.data[N // 2 :]
    sibling.fill_(1)


def _fill_all(flat: torch.Tensor, views: list[torch.Tensor]) -> None:
    flat.fill_(1)


def _step(flat: torch.Tensor, views: list[torch.Tensor]) -> None:
    parameter = nn.Parameter(flat)
    parameter.grad = torch.full_like(flat, -1)
    torch.optim.SGD([parameter], lr=1.0).step()


def _on_a_thread(flat: torch.Tensor, views: list[torch.Tensor]) -> None:
    thread = threading.Thread(target=_step, args=(flat, views))
    thread.start()
    thread.join()


def _free(flat: torch.Tensor, views: list[torch.Tensor]) -> None:
    flat.untyped_storage().resize_(0)


@pytest.mark.parametrize("write", [_fill_view, _fill_sibling, _fill_all, _step, _on_a_thread, _free])
def test_a_write_to_one_storage_keeps_all_its_views(write: Any, saver: lazyckpt.Saver, tmp_path: Path) -> None:
    """As ZeRO has them: each weight is a part of one flat buffer."""
    flat = torch.zeros(N)
    views = [flat[: N // 2], flat[N // 2 :]]

    def hook(folder: Path) -> None:
        st.save_file({"a": views[0], "b": views[1]}, folder / "w.safetensors")
        write(flat, views)

    folder = save(saver, tmp_path / "state", hook)
    saved = st.load_file(folder / "w.safetensors")
    assert [(len(saved[name]), saved[name].sum()) for name in "ab"] == [(N // 2, 0)] * 2


def test_a_write_of_another_thread_to_a_view_fails_the_save(saver: lazyckpt.Saver, tmp_path: Path) -> None:
    flat = torch.zeros(N)
    views = {"a": flat[: N // 2], "b": flat[N // 2 :]}
    thread = threading.Thread(target=views["b"].fill_, args=(1,))

    def hook(folder: Path) -> None:
        st.save_file(views, folder / "w.safetensors")
        thread.start()
        thread.join()

    with pytest.raises(lazyckpt.TornSnapshotError, match=r"in w\.safetensors was written to"):
        save(saver, tmp_path / "state", hook)


@pytest.mark.parametrize("lent", [False, True])
def test_views_that_an_optimizer_owns_are_copied_lazily(lent: bool, saver: lazyckpt.Saver, tmp_path: Path) -> None:
    flat = nn.Parameter(torch.zeros(10 * N))
    optimizer = torch.optim.SGD([flat], lr=1.0)
    for number in range(3):
        flat.grad = torch.ones_like(flat)
        optimizer.step()
        with saver.stage(tmp_path / str(number)) as staged:
            with safetensors_into(staged, staged.path) as redirected:
                views = {str(at): flat.data[at * N : (at + 1) * N] for at in range(10)}
                if lent and redirected is not None:
                    views = {name: redirected.lend(view) for name, view in views.items()}
                st.save_file(views, staged.path / "w.safetensors")
            handle = staged.save()
        saved = st.load_file(handle.result() / "w.safetensors")
        assert handle.metrics.eager_bytes == 0 and all(saved[name].eq(-1 - number).all() for name in views)


@pytest.mark.parametrize("write", [_fill_sibling, _fill_all, _step, _on_a_thread, lambda flat, lent: lent[0].fill_(1)])
def test_a_lent_view_is_like_a_clone(write: Any, saver: lazyckpt.Saver, tmp_path: Path) -> None:
    flat = torch.arange(float(N))

    with saver.stage(tmp_path / "state") as staged:
        with safetensors_into(staged, staged.path) as redirected:
            assert redirected is not None
            lent = [redirected.lend(view) for view in (flat[: N // 2].view(100, -1), flat[N // 2 :])]
            for tensor, clone in zip(lent, (flat[: N // 2].view(100, -1).clone(), flat[N // 2 :].clone()), strict=True):
                assert torch.equal(tensor, clone) and tensor.storage_offset() == 0
                assert tensor.untyped_storage().nbytes() == clone.untyped_storage().nbytes()
            tensors = {"rows": lent[0][3:5], "words": lent[1][:10].view(torch.int16), "last": lent[1][10:]}
            expected = {name: tensor.clone() for name, tensor in tensors.items()}
            st.save_file(tensors, staged.path / "w.safetensors")
            write(flat, lent)
        folder = staged.save().result()
    saved = st.load_file(folder / "w.safetensors")
    assert saved.keys() == expected.keys() and all(torch.equal(saved[name], expected[name]) for name in saved)


@pytest.mark.parametrize("swap", ["data", "foreach", "pointer"])
def test_weights_that_a_hook_swaps_for_its_file_are_saved(swap: str, saver: lazyckpt.Saver, tmp_path: Path) -> None:
    """As for diffusers' pipelines, which are saved with the average in the place of the model."""
    model = nn.Linear(150, 150)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def write(values: list[torch.Tensor]) -> None:
        if swap == "foreach":
            torch._foreach_copy_([p.data for p in model.parameters()], values)
        for p, value in zip(model.parameters(), values, strict=True):
            if swap == "data":
                p.data.copy_(value)
            elif swap == "pointer":
                p.data = value

    def hook(folder: Path) -> None:
        write([torch.full_like(p, 0.5) for p in model.parameters()])
        st.save_file(dict(model.named_parameters()), folder / "swapped.safetensors")
        write([value.clone() for value in before.values()])
        st.save_file(model.state_dict(), folder / "live.safetensors")

    folder = save(saver, tmp_path / "state", hook)
    swapped, live = st.load_file(folder / "swapped.safetensors"), st.load_file(folder / "live.safetensors")
    assert all((value == 0.5).all() for value in swapped.values()) and swapped.keys() == live.keys()
    assert all(torch.equal(live[name], before[name]) for name in before)


def test_a_hook_gets_the_errors_of_safetensors(saver: lazyckpt.Saver, tmp_path: Path) -> None:
    """Inside the hook, which may know what to do."""
    weight = torch.ones(N)
    wrong: list[Any] = [{"a": weight, "b": weight}, {"a": weight.view(100, -1).T}, {"a": weight.to_sparse()}]

    def hook(folder: Path) -> None:
        for tensors, name in [*((tensors, "a") for tensors in wrong), ({"a": weight}, "missing/a")]:
            with pytest.raises(Exception) as caught:
                st.save_file(tensors, folder / f"{name}.safetensors")
            assert "lazyckpt" not in type(caught.value).__module__
        st.save_file({"a": weight[:100], "b": weight[100:]}, folder / "parts.safetensors")
        st.save_file({"a": weight}, tmp_path / "elsewhere.safetensors")
        assert (tmp_path / "elsewhere.safetensors").exists(), "at once"

    folder = save(saver, tmp_path / "state", hook)
    assert files(folder) == ["parts.safetensors"]
    parts = st.load_file(folder / "parts.safetensors")
    assert {name: len(tensor) for name, tensor in parts.items()} == {"a": 100, "b": N - 100}


# modules and modes


def test_a_module_imported_in_a_hook_keeps_nothing_alive(
    saver: lazyckpt.Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it had our ``save_file`` for good, and that all tensors that it was ever given."""
    (tmp_path / "imported_in_a_hook.py").write_text("from safetensors.torch import save_file\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    given = {"a": torch.ones(N)}
    alive = StorageWeakRef(given["a"].untyped_storage())

    def hook(folder: Path) -> None:
        import imported_in_a_hook as helper  # type: ignore[import-not-found]

        helper.save_file(given, folder / "w.safetensors")

    save(saver, tmp_path / "state", hook)
    helper = sys.modules["imported_in_a_hook"]
    given.clear()
    saver.close()  # its threads let go of the tensors, too
    gc.collect()
    assert alive.expired()
    (tmp_path / "state" / "more").mkdir()
    helper.save_file({"a": torch.ones(N)}, tmp_path / "state" / "more" / "w.safetensors")
    assert files(tmp_path / "state" / "more") == ["w.safetensors"], "written at once"


def _cond() -> Any:
    return torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (torch.ones(3),))


def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 1, 16, 16)
    return flex_attention(q, q, q)


def _whole_graph() -> Any:
    torch._dynamo.reset()
    return torch.compile(nn.Linear(8, 8), backend="aot_eager", fullgraph=True)(torch.randn(2, 8)).sum().backward()


@pytest.mark.parametrize(
    "run", [pytest.param(_cond, marks=MODES), pytest.param(_flex_attention, marks=MODES), _whole_graph]
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_what_runs_without_us_runs_in_a_hook(run: Callable[[], Any], saver: lazyckpt.Saver, tmp_path: Path) -> None:
    """Regression: operators of higher order had no rule for our mode, and nothing was compiled whole under it."""
    save(saver, tmp_path / "state", lambda folder: run())


@pytest.mark.slow  # inductor compiles for a quarter of a minute
def test_what_compiled_code_writes_does_not_get_into_the_file(saver: lazyckpt.Saver, tmp_path: Path) -> None:
    """Its kernels write without an operation of torch, and no version tells of ``.data``."""
    parameter = nn.Parameter(torch.zeros(N))

    @torch.compile(backend="inductor", fullgraph=True)
    def write(x: torch.Tensor) -> None:
        x.add_(1)

    write(parameter.data)

    def hook(folder: Path) -> None:
        st.save_file({"a": parameter.detach()}, folder / "w.safetensors")
        write(parameter.data)

    folder = save(saver, tmp_path / "state", hook)
    assert parameter.sum() == 2 * N and st.load_file(folder / "w.safetensors")["a"].sum() == N


# names, and files that are moved


def _name_and_move(folder: Path, write: Callable[[Path], None]) -> None:
    """Gives files names that do not tell the format, and does what a hook may do to files afterwards."""
    for name in ("a.sft", "b.bin", "c"):
        write(folder / name)
        assert (folder / name).stat().st_size > 4 * N, "at once"
    write(folder / "renamed.safetensors.tmp")
    os.replace(folder / "renamed.safetensors.tmp", folder / "renamed.safetensors")
    write(folder / "other.safetensors")
    os.replace(folder / "other.safetensors", folder / "other.bin")
    (folder / "moved").mkdir()
    (folder / "moved" / "config.json").write_text("{}")
    write(folder / "moved" / "w.safetensors")
    os.rename(folder / "moved", folder / "unet")
    (folder / "best").mkdir()
    write(folder / "w.safetensors")
    shutil.copy(folder / "w.safetensors", folder / "best" / "w.safetensors")
    (folder / "latest.safetensors").symlink_to("w.safetensors")
    write(folder / "removed.safetensors")
    (folder / "removed.safetensors").unlink()
    (folder / "done").touch()  # the file system may give it the number of the other
    (folder / "gone").mkdir()
    write(folder / "gone" / "w.safetensors")
    shutil.rmtree(folder / "gone")
    write(folder / "twice.safetensors")
    os.rename(folder / "twice.safetensors", folder / "old.safetensors")
    write(folder / "twice.safetensors")


def test_files_are_where_a_hook_leaves_them_in_the_format_that_they_were_given(
    saver: lazyckpt.Saver, tmp_path: Path
) -> None:
    """Regression: they appeared under the names that ``save_file`` was told, or not at all, or as torch.save writes."""
    tensor = torch.ones(N)

    def write(path: Path) -> None:
        st.save_file({"a": tensor}, path)

    (tmp_path / "plain").mkdir()
    _name_and_move(tmp_path / "plain", write)
    folder = save(saver, tmp_path / "state", lambda folder: _name_and_move(folder, write))
    assert files(folder) == files(tmp_path / "plain")
    for name in files(folder):
        assert (folder / name).is_symlink() == (tmp_path / "plain" / name).is_symlink()
        if Path(name).name not in ("config.json", "done"):
            assert torch.equal(st.load_file(folder / name)["a"], tensor), name
