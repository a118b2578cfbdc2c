"""Reading archives: storages before the pickle or after it, and pickles that lie about their storages."""

from __future__ import annotations

import io
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from attacks.pickles import Raw, archive, call, name, opcodes, storage, tensor
from lazyckpt.devices import HOST
from lazyckpt.errors import CorruptFileError, LoadError, UnsupportedFormatError
from lazyckpt.formats.reader import FileReader
from lazyckpt.formats.safe_globals import sparse_tensors_to_validate
from lazyckpt.reading.archive import Archive, Place
from lazyckpt.reading.ranges import process_engine


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    w = torch.arange(3000.0)
    lazyckpt.save({"a": w, "b": w[:5], "c": torch.ones(3, dtype=torch.bool), "z": torch.empty(0)}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def landing(path: Path) -> Archive:
    return archive_of(path, lands=True)


def archive_of(path: Path, *, lands: bool, weights_only: bool = True) -> Archive:
    with FileReader(path) as file:
        return Archive(file, "cpu", weights_only=weights_only, lands=lands, engine=process_engine())


def test_what_lands_is_unpickled_first_and_filled_after(plain: Path) -> None:
    archive = landing(plain)
    assert not archive.filled
    assert archive.tree["a"].shape == (3000,)
    assert archive.slots["0"].references == 2
    archive.fill({})
    assert torch.equal(archive.tree["a"], torch.arange(3000.0))


def test_bytes_land_where_they_are_told_to(plain: Path) -> None:
    archive = landing(plain)
    place = torch.zeros(3000)
    archive.fill({"0": Place(place.untyped_storage(), 0, HOST)})
    assert torch.equal(place, torch.arange(3000.0))
    assert torch.equal(archive.tree["c"], torch.ones(3, dtype=torch.bool))


def test_what_looks_at_bytes_while_it_is_unpickled_finds_them(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    lazyckpt.save({"n": nested, "t": torch.ones(3)}, tmp_path / "a.pt")
    with torch.serialization.safe_globals([torch._utils._rebuild_nested_tensor]):  # torch 2.15 no longer trusts it
        archive = landing(tmp_path / "a.pt")
    assert archive.filled
    assert all(torch.equal(a, b) for a, b in zip(archive.tree["n"].unbind(), nested.unbind(), strict=True))
    archive.fill({})
    assert torch.equal(archive.tree["t"], torch.ones(3))


class Summed:
    """An object that reads its tensor when it is rebuilt."""

    def __init__(self, t: torch.Tensor) -> None:
        self.t = t

    def __getstate__(self) -> Any:
        return {"t": self.t}

    def __setstate__(self, state: Any) -> None:
        self.t = state["t"]
        self.total = float(self.t.sum())


def test_a_users_class_may_look_at_bytes_too(tmp_path: Path) -> None:
    lazyckpt.save(Summed(torch.ones(5000)), tmp_path / "a.pt")
    assert lazyckpt.load(tmp_path / "a.pt", weights_only=False).total == 5000
    with torch.serialization.safe_globals([Summed]):
        assert landing(tmp_path / "a.pt").tree.total == 5000


def test_everything_that_the_providers_write_lands(tmp_path: Path) -> None:
    """Otherwise restore() would need a second copy of the model."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4).bfloat16()).sum().backward()
    optimizer.step()
    loader = torch.utils.data.DataLoader(torch.arange(10), shuffle=True)
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(
            model=model,
            optimizer=optimizer,
            scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3),
            f8={"t": torch.ones(3).to(torch.float8_e5m2), "u": torch.ones(3, dtype=torch.uint16), "s": torch.Size([1])},
            parameter={"p": torch.nn.Parameter(torch.ones(2))},
        )
        tracked = ckpt.track_loader(loader)
        next(iter(tracked))
        path = ckpt.save(1).result()
    assert not landing(path / "state.pt").filled


def test_sparse_tensors_are_checked_as_torch_checks_them(tmp_path: Path) -> None:
    """A load leaves nothing behind for the next one."""
    bad = torch.sparse_coo_tensor(torch.tensor([[0, 9]]), torch.ones(2), (3,), check_invariants=False)
    torch.save(bad, tmp_path / "a.pt")
    torch.save(torch.eye(3).to_sparse(), tmp_path / "good.pt")
    with torch.sparse.check_sparse_tensor_invariants(True):
        with pytest.raises(LoadError, match=r"size is inconsistent|found index"):
            lazyckpt.load(tmp_path / "a.pt")
        assert torch.equal(lazyckpt.load(tmp_path / "good.pt").to_dense(), torch.eye(3))
        assert sparse_tensors_to_validate() == []
        torch.load(tmp_path / "good.pt")


# pickles that lie


LIES: dict[str, Raw] = {
    "a storage that is not there": tensor(key="7"),
    "a longer storage": tensor(numel=5),
    "a storage of minus four": tensor(numel=-4),
    "a huge storage": tensor(numel=1 << 60),
    "another element size": tensor(kind="torch.DoubleStorage"),
    "a record outside data/": tensor(key="../version", numel=2, kind="torch.ByteStorage"),
    "a key that is a number": tensor(key=7),
    "a size that is text": tensor(numel="4"),
    "another kind of id": Raw(opcodes(("module", name("torch.FloatStorage"), "0", "cpu", 4)) + b"Q"),
    "a shorter id": Raw(opcodes(("storage", "0")) + b"Q"),
    "a type that is none": tensor(kind="torch.Size"),
    "a view past the end": tensor(size=(5,)),
    "a stride past the end": tensor(stride=(2,)),
    "an offset past the end": tensor(offset=1),
    "a huge view": tensor(size=(1 << 40,)),
    "an overflowing view": tensor(size=(1 << 40, 1 << 40), stride=(1 << 40, 1)),
    "a negative stride": tensor(stride=(-1,)),
    "a negative size": tensor(size=(-4,)),
    "a negative offset": tensor(offset=-1),
}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("lands", [False, True])
@pytest.mark.parametrize("lie", LIES)
def test_a_pickle_that_lies_about_its_storages(lie: str, lands: bool, weights_only: bool, tmp_path: Path) -> None:
    path = archive(tmp_path, {"x": LIES[lie]})
    with pytest.raises(LoadError, match=r"x\.pt"):
        archive_of(path, lands=lands, weights_only=weights_only)


def test_the_forger_can_also_tell_the_truth(tmp_path: Path) -> None:
    path = archive(tmp_path, {"x": tensor()})
    assert torch.equal(lazyckpt.load(path)["x"], torch.ones(4)) and torch.equal(torch.load(path)["x"], torch.ones(4))


def test_a_device_that_nobody_knows(tmp_path: Path) -> None:
    hooks = call("collections.OrderedDict")
    view = call("torch._utils._rebuild_tensor_v2", storage(device="nowhere"), 0, (4,), (1,), False, hooks)
    path = archive(tmp_path, {"x": view})
    with pytest.raises(LoadError, match="nowhere"):
        lazyckpt.load(path)
    assert torch.equal(lazyckpt.load(path, "cpu")["x"], torch.ones(4))


def test_storages_of_two_types_in_one_archive(tmp_path: Path) -> None:
    """torch.save writes no such archive. Each tensor gets the dtype that it asks for, never another one."""
    path = archive(tmp_path, [tensor(), tensor(kind="torch.IntStorage")])
    a, b = lazyckpt.load(path)
    assert a.dtype == torch.float32 and b.dtype == torch.int32 and torch.equal(a.view(torch.int32), b)


def test_another_byte_order_is_left_to_torch(tmp_path: Path) -> None:
    path = archive(tmp_path, {"x": tensor()}, {"byteorder": b"big", "data/0": b"\0\0\x80?" * 4})
    with pytest.raises(UnsupportedFormatError, match=r"byte order; use torch\.load"):
        lazyckpt.load(path)


def test_an_archive_without_a_pickle(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("archive/data/0", b"1234")
    with pytest.raises(LoadError):
        lazyckpt.load(tmp_path / "a.pt")


def test_a_pickle_that_is_cut_off_or_junk(tmp_path: Path) -> None:
    out = io.BytesIO()
    torch.save({"x": torch.ones(4)}, out)
    with zipfile.ZipFile(out) as archive:
        name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        whole = archive.read(name)
    for data in (whole[:-1], whole[: len(whole) // 2], b"", b"junk", whole[:10] + b"\xff" * 20, b"\x80\x02(" * 1000):
        with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
            archive.writestr("archive/data.pkl", data)
            archive.writestr("archive/data/0", b"\0\0\x80?" * 4)
        for lands in (False, True):
            with pytest.raises(LoadError):
                archive_of(tmp_path / "a.pt", lands=lands)
        with pytest.raises(LoadError):
            lazyckpt.load(tmp_path / "a.pt", weights_only=False)


def test_a_damaged_pickle_is_found_by_its_checksum(plain: Path) -> None:
    data = plain.read_bytes()
    at = data.index(b"_rebuild_tensor_v2")
    plain.write_bytes(data[:at] + b"X" + data[at + 1 :])
    with pytest.raises(CorruptFileError, match=r"data\.pkl: checksum"):
        lazyckpt.load(plain)


def test_who_holds_the_error_of_a_load_may_save(tmp_path: Path) -> None:
    """An abandoned read returns its part of the ring, even while its exception is alive."""
    damaged = tmp_path / "a.pt"
    lazyckpt.save(torch.zeros(10 << 20), damaged)
    data = damaged.read_bytes()
    at = data.index(b"_rebuild_tensor_v2")
    damaged.write_bytes(data[:at] + b"X" + data[at + 1 :])
    with pytest.raises(CorruptFileError) as held:
        lazyckpt.load(damaged)
    saving = threading.Thread(target=lazyckpt.save, args=(torch.zeros(10 << 20), tmp_path / "b.pt"), daemon=True)
    saving.start()
    saving.join(30)
    assert not saving.is_alive() and held.value is not None
