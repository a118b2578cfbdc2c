"""save and load of one file: save is durable and atomic, load reads what torch.load reads."""

from __future__ import annotations

import io
import os
import pickle
import signal
import threading
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import lazyckpt
from endings import in_a_child
from lazyckpt.errors import CorruptFileError, LoadError, UnsupportedFormatError
from lazyckpt.storage import commit
from memory import growth_bytes


@pytest.fixture
def state() -> dict[str, Any]:
    torch.manual_seed(0)
    w = torch.randn(40, 50)
    return {
        "w": w,
        "tied": w,
        "view": w[3:5],
        "t": w.t(),
        "big": torch.randint(0, 255, (300_000,), dtype=torch.uint8),
        "half": torch.randn(7).bfloat16(),
        "zero": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "nested": [{"x": (1, "two", None, 2.5)}],
    }


# save


def test_a_file_is_replaced_atomically_and_nothing_else_is_left(tmp_path: Path, state: Any) -> None:
    path = tmp_path / "a.pt"
    path.write_text("old")
    lazyckpt.save(state, path)
    assert os.listdir(tmp_path) == ["a.pt"]
    assert torch.equal(torch.load(path)["w"], state["w"])
    lazyckpt.save({"x": 1}, str(path))
    assert torch.load(path) == {"x": 1}


def test_what_a_killed_save_left_goes_with_the_next_and_what_is_being_saved_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = commit.publish_file
    said, heard = os.pipe(), os.pipe()

    def hold(*names: Path) -> None:
        os.write(said[1], b".")
        os.read(heard[0], 1)
        publish(*names)

    def die(*names: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def save_in_child(name: str, publish: Callable[..., None]) -> int:
        if (child := os.fork()) == 0:
            try:
                monkeypatch.setattr(commit, "publish_file", publish)
                lazyckpt.save(torch.ones(100_000), tmp_path / name)
                os._exit(0)
            finally:
                os._exit(1)
        return child

    def exit_code(child: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    living = save_in_child("living.pt", hold)
    os.close(said[1])
    assert os.read(said[0], 1)
    assert exit_code(save_in_child("dead.pt", die)) == -signal.SIGKILL
    left = {p.name.partition(".pt-")[0]: p for p in tmp_path.iterdir()}
    assert left.keys() == {".tmp-living", ".tmp-dead"}
    assert (left[".tmp-dead"] / "dead.pt").stat().st_size > 400_000
    lazyckpt.save([1], tmp_path / "b.pt")
    assert sorted(os.listdir(tmp_path)) == [left[".tmp-living"].name, "b.pt"]
    os.write(heard[1], b".")
    assert exit_code(living) == 0
    assert sorted(os.listdir(tmp_path)) == ["b.pt", "living.pt"]
    assert torch.equal(lazyckpt.load(tmp_path / "living.pt"), torch.ones(100_000))
    for fd in (said[0], *heard):
        os.close(fd)


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lazyckpt.save([1], "a.pt")
    assert lazyckpt.load("a.pt") == [1] and os.listdir() == ["a.pt"]


@pytest.mark.parametrize("name", [os.fsdecode(b"\xff.pt"), "ü" * 126 + ".pt", "x" * 252 + ".pt"])
def test_any_name_that_the_file_system_takes(name: str, tmp_path: Path) -> None:
    """Regression: a name that is not UTF-8 was a TypeError of the engine, a long one too long for a temporary file."""
    torch.save([1], tmp_path / name)
    assert lazyckpt.load(tmp_path / name) == [1]
    lazyckpt.save([torch.ones(2)], tmp_path / name)
    assert lazyckpt.load(tmp_path / name)[0].tolist() == [1, 1]
    with lazyckpt.Saver() as saver:
        saver.save([torch.ones(3)], tmp_path / name)
        saver.wait()
        assert lazyckpt.load(tmp_path / name)[0].tolist() == [1, 1, 1]
        with saver.stage(tmp_path / "folder" / name) as staged:
            staged.add("a.pt", 1)
            staged.save()
        saver.remove(tmp_path / name)
    assert os.listdir(tmp_path) == ["folder"] and os.listdir(tmp_path / "folder") == [name]


def test_an_error_tells_a_name_that_is_not_text(tmp_path: Path) -> None:
    with pytest.raises(lazyckpt.SaveError) as caught:
        lazyckpt.save([1], tmp_path / os.fsdecode(b"\xff") / "a.pt")
    assert isinstance(caught.value.__cause__, FileNotFoundError) and "\udcff" in caught.value.__cause__.filename


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: Any) -> None:
    path = tmp_path / "a.pt"
    lazyckpt.save([1], path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(lazyckpt.SaveError, match=r"a\.pt.*Input/output error"):
            lazyckpt.save(state, path)
    with pytest.raises(lazyckpt.SerializationError):
        lazyckpt.save(lambda: 0, path)
    assert lazyckpt.load(path) == [1] and os.listdir(tmp_path) == ["a.pt"]


@pytest.mark.parametrize("path", ["", ".", "/", "missing/a.pt", "folder", "file/a.pt", "x" * 300 + ".pt", "/proc/a.pt"])
def test_a_path_that_cannot_be_written_is_a_typed_error(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(lazyckpt.SaveError):
        lazyckpt.save([1], path)
    assert sorted(os.listdir()) == ["file", "folder"]


def test_many_threads_save_at_once(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(10):
                tensor = torch.full((50_000,), float(number * 100 + i))
                lazyckpt.save(tensor, tmp_path / f"{number}.pt")
                assert torch.equal(lazyckpt.load(tmp_path / f"{number}.pt"), tensor)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and len(os.listdir(tmp_path)) == 4


def test_a_forked_child_saves_and_loads(tmp_path: Path, state: Any) -> None:
    lazyckpt.save(state, tmp_path / "parent.pt")
    child = os.fork()
    if child == 0:
        try:
            assert torch.equal(lazyckpt.load(tmp_path / "parent.pt")["w"], state["w"])
            lazyckpt.save(state, tmp_path / "child.pt")
            os._exit(0)
        except BaseException:
            os._exit(3)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(lazyckpt.load(tmp_path / "child.pt")["big"], state["big"])


# load


def test_load_is_torch_load(tmp_path: Path, state: Any, graph: Any) -> None:
    for write in (torch.save, lazyckpt.save):
        write(state, tmp_path / "a.pt")
        expected = graph(torch.load(tmp_path / "a.pt"))
        for weights_only in (True, False):
            assert graph(lazyckpt.load(tmp_path / "a.pt", weights_only=weights_only)) == expected


def test_loaded_tensors_are_the_callers_own(tmp_path: Path, state: Any) -> None:
    lazyckpt.save(state, tmp_path / "a.pt")
    one, two = lazyckpt.load(tmp_path / "a.pt"), lazyckpt.load(tmp_path / "a.pt")
    one["w"].fill_(0)
    lazyckpt.save(two, tmp_path / "a.pt")
    assert torch.equal(two["w"], state["w"]) and one["view"].sum() == 0 == one["tied"].sum()
    assert one["big"].data_ptr() != two["big"].data_ptr()
    one["big"].resize_(400_000)


def test_files_of_the_old_format(tmp_path: Path, state: Any, graph: Any) -> None:
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert graph(lazyckpt.load(tmp_path / "old.pt")) == graph(torch.load(tmp_path / "old.pt"))
    torch.save(Custom(3), tmp_path / "custom.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(LoadError, match=r"weights_only|Weights only"):
        lazyckpt.load(tmp_path / "custom.pt")


class Custom:
    def __init__(self, x: int) -> None:
        self.x = x


def test_a_checkpoint_folder(tmp_path: Path, state: Any) -> None:
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(x=state)
        path = ckpt.save(1).result()
    assert torch.equal(lazyckpt.load(path)["x"]["w"], state["w"])
    with pytest.raises(LoadError, match=r"manifest\.json"):
        lazyckpt.load(tmp_path)


MAP_LOCATIONS: dict[str, Any] = {
    "none": None,
    "cpu": "cpu",
    "device": torch.device("cpu"),
    "callable": lambda storage, location: storage,
    "callable that declines": lambda storage, location: None,
    "callable that looks": lambda storage, location: storage if storage.nbytes() >= 0 and location == "cpu" else 1 / 0,
    "callable that changes": lambda storage, location: storage.clone().fill_(1),
    "dict": {"cuda:0": "cpu", "cpu": "cpu"},
}


@pytest.mark.parametrize("name", MAP_LOCATIONS)
def test_map_location(name: str, tmp_path: Path, state: Any, graph: Any) -> None:
    torch.save(state, tmp_path / "a.pt")
    location = MAP_LOCATIONS[name]
    assert graph(lazyckpt.load(tmp_path / "a.pt", location)) == graph(torch.load(tmp_path / "a.pt", location))


def test_map_location_meta_keeps_what_is_tied(tmp_path: Path, state: Any) -> None:
    """``torch.load`` gives each tensor a storage of its own there."""
    torch.save(state, tmp_path / "a.pt")
    ours, theirs = (load(tmp_path / "a.pt", map_location="meta") for load in (lazyckpt.load, torch.load))
    for name in ("w", "tied", "view", "t", "big", "half", "zero", "scalar"):
        a, b = ours[name], theirs[name]
        assert (a.device, a.dtype, a.shape, a.stride()) == (b.device, b.dtype, b.shape, b.stride())
    assert ours["t"].untyped_storage()._cdata == ours["w"].untyped_storage()._cdata


def test_a_device_that_is_not_there(tmp_path: Path, state: Any) -> None:
    torch.save(state, tmp_path / "a.pt")
    if not torch.cuda.is_available():
        with pytest.raises(LoadError, match=r"cuda|CUDA"):
            lazyckpt.load(tmp_path / "a.pt", "cuda")


def test_files_without_checksums(tmp_path: Path, state: Any, graph: Any) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert graph(lazyckpt.load(tmp_path / "a.pt")) == graph(torch.load(tmp_path / "a.pt"))


def test_torch_save_with_other_options(tmp_path: Path, state: Any, graph: Any) -> None:
    torch.save(state, tmp_path / "p5.pt", pickle_protocol=5)
    assert graph(lazyckpt.load(tmp_path / "p5.pt", weights_only=False)) == graph(
        torch.load(tmp_path / "p5.pt", weights_only=False)
    )
    buffer = io.BytesIO()
    torch.save(state, buffer)
    (tmp_path / "from buffer").write_bytes(buffer.getvalue())
    assert torch.equal(lazyckpt.load(tmp_path / "from buffer")["w"], state["w"])


def test_weights_only_refuses_by_name_and_says_what_to_do(tmp_path: Path) -> None:
    lazyckpt.save({"x": Custom(3)}, tmp_path / "a.pt")
    with pytest.raises(LoadError, match=r"a\.pt.*Custom.*add_safe_globals.*only if you trust"):
        lazyckpt.load(tmp_path / "a.pt")
    assert lazyckpt.load(tmp_path / "a.pt", weights_only=False)["x"].x == 3
    with torch.serialization.safe_globals([Custom]):
        assert lazyckpt.load(tmp_path / "a.pt")["x"].x == 3


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("variable", [None, "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"])
def test_weights_only_means_what_it_means_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, asked: bool | None
) -> None:
    lazyckpt.save({"x": Custom(3)}, tmp_path / "a.pt")
    if variable is not None:
        monkeypatch.setenv(variable, "1")

    def allowed(load: Callable[..., Any]) -> bool:
        try:
            return bool(load(tmp_path / "a.pt", weights_only=asked)["x"].x == 3)
        except (LoadError, pickle.UnpicklingError):
            return False

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the variable
        assert allowed(lazyckpt.load) == allowed(torch.load)


def test_torchscript_and_other_files(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello, this is no checkpoint")
    (tmp_path / "zip.pt").write_bytes(b"")
    with zipfile.ZipFile(tmp_path / "zip.pt", "w") as archive:
        archive.writestr("a/b", b"c")
    for name in ("empty", "text", "zip.pt", "missing"):
        with pytest.raises(LoadError, match=name):
            lazyckpt.load(tmp_path / name)
    with zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N." * 100)
    with pytest.raises(UnsupportedFormatError, match="compressed"):
        lazyckpt.load(tmp_path / "packed.pt")


def test_a_folder_or_a_pipe_in_the_place_of_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(LoadError):
            lazyckpt.load(path)


# a flipped bit


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_flipped_bit_anywhere_is_found_or_proven_harmless(suffix: str, tmp_path: Path, graph: Any) -> None:
    path = tmp_path / f"a.{suffix}"
    state = {f"t{i}": torch.randint(0, 255, (n,), dtype=torch.uint8) for i, n in enumerate((1, 100, 5000, 70_000))}
    lazyckpt.save(state, path)
    good, expected = path.read_bytes(), graph(lazyckpt.load(path))
    rng = np.random.default_rng(0)
    everywhere = rng.integers(0, len(good) * 8, 120)
    ends = np.concatenate([rng.integers(0, 4096 * 8, 80), len(good) * 8 - 1 - rng.integers(0, 2000 * 8, 120)])
    found = 0
    for bit in np.concatenate([everywhere, ends]).tolist():
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        try:
            loaded = lazyckpt.load(path)
        except LoadError:
            found += 1
            continue
        assert graph(loaded) == expected, f"bit {bit % 8} of byte {bit // 8}"
    assert found > 200


def test_truncation_anywhere_is_found(tmp_path: Path) -> None:
    for suffix in ("pt", "safetensors"):
        path = tmp_path / f"a.{suffix}"
        lazyckpt.save({"a": torch.ones(3000), "b": torch.ones(5, dtype=torch.int8)}, path)
        good = path.read_bytes()
        cuts = {0, 1, 4, 8, 30, 4095, 4096, *range(0, len(good), 997), *range(len(good) - 600, len(good), 7)}
        for cut in cuts:
            path.write_bytes(good[:cut])
            with pytest.raises(LoadError):
                lazyckpt.load(path)
            path.write_bytes(good + good[: cut + 1])
            with pytest.raises(LoadError):
                lazyckpt.load(path)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    lazyckpt.save({"a": torch.zeros(100), "b": torch.ones(200_000)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[500_000] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(CorruptFileError, match=r"a\.pt: checksum does not match: data/1$"):
        lazyckpt.load(tmp_path / "a.pt")
    torch.load(tmp_path / "a.pt")  # torch does not notice


# safetensors


def test_safetensors_both_ways(tmp_path: Path, graph: Any) -> None:
    tensors = {
        "w": torch.randn(30, 40),
        "t": torch.randn(6, 7).t(),
        "part": torch.randn(100)[10:20],
        "last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "bf": torch.randn(3).bfloat16(),
        "f8": torch.randn(5).to(torch.float8_e4m3fn),
        "flag": torch.tensor([True, False]),
        "u16": torch.tensor([1, 65535], dtype=torch.uint16),
        "zero": torch.empty(0, 4),
        "scalar": torch.tensor(2, dtype=torch.int64),
        "grad": torch.nn.Parameter(torch.randn(3)),
    }
    lazyckpt.save(tensors, tmp_path / "a.safetensors")
    theirs = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert set(theirs) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(theirs[name], tensor.detach()) and theirs[name].dtype == tensor.dtype
    ours = lazyckpt.load(tmp_path / "a.safetensors")
    assert all(torch.equal(ours[n], t.detach()) for n, t in tensors.items())
    safetensors.torch.save_file(theirs, tmp_path / "b.safetensors")
    again = lazyckpt.load(tmp_path / "b.safetensors", "cpu")
    assert all(torch.equal(again[n], t.detach()) for n, t in tensors.items())
    assert lazyckpt.load(tmp_path / "b.safetensors", "meta")["w"].device.type == "meta"
    with pytest.raises(LoadError, match="device as map_location"):
        lazyckpt.load(tmp_path / "b.safetensors", lambda s, _: s)


def test_safetensors_writes_values_not_the_bytes_behind_a_lazy_view(tmp_path: Path) -> None:
    z = torch.randn(20, dtype=torch.complex64)
    for name, tensor in {"conj": z.conj(), "neg": z.conj().imag, "plain": z}.items():
        lazyckpt.save({"x": tensor}, tmp_path / "a.safetensors")
        found = lazyckpt.load(tmp_path / "a.safetensors")["x"]
        assert torch.equal(found, tensor.resolve_conj().resolve_neg()), name


@pytest.mark.parametrize(
    ("obj", "why"),
    [
        ([torch.ones(1)], "dict of names to tensors"),
        ({1: torch.ones(1)}, "dict of names to tensors"),
        ({"a": 1}, "dict of names to tensors"),
        ({"a": torch.eye(3).to_sparse()}, "'a' is not a dense tensor"),
        ({"a": torch.ones(3, device="meta")}, "'a' is not a dense tensor with data"),
        ({"a": torch.ones(2, dtype=torch.complex32)}, "complex32|ComplexHalf"),
        ((lambda w: {"a": w, "b": w})(torch.ones(4)), "'a' and 'b' share memory"),
        ({"__metadata__": torch.ones(1)}, "__metadata__"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_safetensors_cannot_hold(obj: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(lazyckpt.LazyCkptError, match=why):
        lazyckpt.save(obj, tmp_path / "a.safetensors")
    assert os.listdir(tmp_path) == []


# memory


def test_saving_and_loading_take_no_second_copy(tmp_path: Path) -> None:
    """In MiB. The ring has 64 at most."""
    path = tmp_path / "a.pt"

    def growths() -> str:
        saved = [torch.ones(200 << 20, dtype=torch.uint8)]
        works = (lambda: lazyckpt.save(saved, path), lambda: lazyckpt.load(path))
        return " ".join(str(growth_bytes(work) >> 20) for work in works)

    saving, loading = map(int, in_a_child(growths).split())
    assert saving < 80 and loading < 200 + 40


def test_the_disk_itself_says_whether_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write to blocks that ``statvfs`` does not count as free."""
    real = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_frsize, f_blocks = 0, real.f_frsize, real.f_blocks

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: Full)
        lazyckpt.save({"x": torch.ones(10)}, tmp_path / "a.pt")
    assert torch.equal(lazyckpt.load(tmp_path / "a.pt")["x"], torch.ones(10))
