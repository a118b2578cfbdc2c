"""Archives on the way back: storages before pickles or after, and pickles that lie about their storages."""

from __future__ import annotations

import io
import pickle
import threading
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.capture.devices import HOST
from lazyckpt.errors import CorruptFileError, LoadError, UnsupportedFormatError
from lazyckpt.formats.base import FileReader
from lazyckpt.formats.safe_globals import sparse_tensors_to_validate
from lazyckpt.functional import process_engine
from lazyckpt.reading.archive import Archive


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
    slot = archive.slot_of(archive.tree["a"])
    assert slot is archive.slot_of(archive.tree["b"]) is not None and slot.references == 2
    assert archive.slot_of(torch.ones(1)) is None and archive.slot_of(torch.eye(2).to_sparse()) is None
    archive.fill({})
    assert torch.equal(archive.tree["a"], torch.arange(3000.0))


def test_bytes_land_where_they_are_told_to(plain: Path) -> None:
    archive = landing(plain)
    place = torch.zeros(3000)
    archive.fill({"0": (place.data_ptr(), HOST)})
    assert torch.equal(place, torch.arange(3000.0))
    assert torch.equal(archive.tree["c"], torch.ones(3, dtype=torch.bool))


def test_what_looks_at_bytes_while_it_is_unpickled_finds_them(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    lazyckpt.save({"n": nested, "t": torch.ones(3)}, tmp_path / "a.pt")
    archive = landing(tmp_path / "a.pt")
    assert archive.filled
    assert all(torch.equal(a, b) for a, b in zip(archive.tree["n"].unbind(), nested.unbind(), strict=True))
    archive.fill({})
    assert torch.equal(archive.tree["t"], torch.ones(3))


class Summed:
    """Rebuilt from what its tensor says."""

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
    """Or a restore would need a second copy of the model."""
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
    """And nothing of a load is left for the next one to stumble upon."""
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


class Storage:
    """Pickled as a persistent id."""

    def __init__(self, *identity: Any) -> None:
        self.identity = identity


class Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.identity if type(obj) is Storage else None


class Call:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


def forge(path: Path, obj: Any, **records: bytes) -> Path:
    out = io.BytesIO()
    Pickler(out, 2).dump(obj)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", out.getvalue())
        for name, data in {"byteorder": b"little", "version": b"3\n", **records}.items():
            archive.writestr(f"archive/{name.replace('__', '/')}", data)
    return path


def tensor(storage: Any, *, size: Any = (4,), stride: Any = (1,), offset: Any = 0) -> Call:
    return Call(torch._utils._rebuild_tensor_v2, storage, offset, size, stride, False, OrderedDict())


GOOD = Storage("storage", torch.FloatStorage, "0", "cpu", 4)
DATA = {"data__0": b"\0\0\x80?" * 4}
LIES: dict[str, Any] = {
    "a storage that is not there": tensor(Storage("storage", torch.FloatStorage, "7", "cpu", 4)),
    "a longer storage": tensor(Storage("storage", torch.FloatStorage, "0", "cpu", 5)),
    "a storage of minus four": tensor(Storage("storage", torch.FloatStorage, "0", "cpu", -4)),
    "a huge storage": tensor(Storage("storage", torch.FloatStorage, "0", "cpu", 1 << 60)),
    "another element size": tensor(Storage("storage", torch.DoubleStorage, "0", "cpu", 4)),
    "a record outside data/": tensor(Storage("storage", torch.ByteStorage, "../version", "cpu", 2)),
    "a key that is a number": tensor(Storage("storage", torch.FloatStorage, 7, "cpu", 4)),
    "a size that is text": tensor(Storage("storage", torch.FloatStorage, "0", "cpu", "4")),
    "another kind of id": tensor(Storage("module", torch.FloatStorage, "0", "cpu", 4)),
    "a shorter id": tensor(Storage("storage", "0")),
    "a type that is none": tensor(Storage("storage", torch.Size, "0", "cpu", 4)),
    "a view past the end": tensor(GOOD, size=(5,)),
    "a stride past the end": tensor(GOOD, stride=(2,)),
    "an offset past the end": tensor(GOOD, offset=1),
    "a huge view": tensor(GOOD, size=(1 << 40,)),
    "an overflowing view": tensor(GOOD, size=(1 << 40, 1 << 40), stride=(1 << 40, 1)),
    "a negative stride": tensor(GOOD, stride=(-1,)),
    "a negative size": tensor(GOOD, size=(-4,)),
    "a negative offset": tensor(GOOD, offset=-1),
}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("lands", [False, True])
@pytest.mark.parametrize("lie", LIES)
def test_a_pickle_that_lies_about_its_storages(lie: str, lands: bool, weights_only: bool, tmp_path: Path) -> None:
    path = forge(tmp_path / "a.pt", {"x": LIES[lie]}, **DATA)
    with pytest.raises(LoadError, match=r"a\.pt"):
        archive_of(path, lands=lands, weights_only=weights_only)


def test_the_forger_can_also_tell_the_truth(tmp_path: Path) -> None:
    path = forge(tmp_path / "a.pt", {"x": tensor(GOOD)}, **DATA)
    assert torch.equal(lazyckpt.load(path)["x"], torch.ones(4)) and torch.equal(torch.load(path)["x"], torch.ones(4))


def test_a_device_that_nobody_knows(tmp_path: Path) -> None:
    nowhere = Storage("storage", torch.FloatStorage, "0", "nowhere", 4)
    path = forge(tmp_path / "a.pt", {"x": tensor(nowhere)}, **DATA)
    with pytest.raises(LoadError, match="nowhere"):
        lazyckpt.load(path)
    assert torch.equal(lazyckpt.load(path, "cpu")["x"], torch.ones(4))


def test_storages_of_two_types_in_one_archive(tmp_path: Path) -> None:
    """Not written by torch.save; each tensor gets what it asks for, or it is an error. Never another's dtype."""
    other = Storage("storage", torch.IntStorage, "0", "cpu", 4)
    path = forge(tmp_path / "a.pt", [tensor(GOOD), tensor(other)], **DATA)
    a, b = lazyckpt.load(path)
    assert a.dtype == torch.float32 and b.dtype == torch.int32 and torch.equal(a.view(torch.int32), b)


def test_another_byte_order_is_left_to_torch(tmp_path: Path) -> None:
    path = forge(tmp_path / "a.pt", {"x": tensor(GOOD)}, **{**DATA, "byteorder": b"big"})
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
    """A read that is given up gives its part of the ring back, also while its exception is alive."""
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
