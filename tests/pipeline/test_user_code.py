"""Code of the user's raises wherever we call it: the caller hears of it, and nothing else has happened."""

from __future__ import annotations

import gc
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import lazyckpt
from lazyckpt.errors import RestoreError, SerializationError
from lazyckpt.gate.gate import gate
from lazyckpt.pipeline.handle import in_flight
from lazyckpt.providers.base import StorageTable
from lazyckpt.providers.data_loader import track_loader

pytestmark = pytest.mark.usefixtures("small_tensors_are_lazy")

TINY = {"chunk_bytes": 16 << 10, "host_buffer_bytes": 64 << 10, "copy_threads": 1, "io_depth": 2}
ERRORS = (ValueError, MemoryError, SystemExit, KeyboardInterrupt, GeneratorExit)


class Trap:
    """Called by the user's code of these tests, at the place that is ``set``."""

    def __init__(self) -> None:
        self.place = ""
        self.error: BaseException = RuntimeError()

    def set(self, place: str, error: BaseException) -> None:
        self.place, self.error = place, error

    def __call__(self, place: str) -> None:
        if place == self.place:
            raise self.error


trap = Trap()


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    trap.set("", RuntimeError())


class Own(lazyckpt.StateProvider):
    """A provider whose every method may fail, the stream of its segments in the middle, too."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor = torch.zeros(3000)

    def state(self) -> Any:
        trap("StateProvider.state")
        return {"tensor": self.tensor}

    def opcodes(self, table: StorageTable) -> bytes:
        trap("StateProvider.opcodes")
        opcodes = super().opcodes(table)
        trap("StateProvider.opcodes, behind its storages")
        return opcodes

    def landings(self, saved: Any) -> list[Any]:
        trap("StateProvider.landings")
        return super().landings(saved)

    def load(self, saved: Any, landed: dict[int, torch.Tensor]) -> None:
        trap("StateProvider.load")
        super().load(saved, landed)

    def load_state(self, state: Any) -> None:
        trap("StateProvider.load_state")
        self.tensor = state["tensor"]


class Stateful:
    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, Any]:
        trap("state_dict")
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trap("load_state_dict")
        self.number = state["number"]


class Pickled:
    """Something else once it is unpickled."""

    def __reduce__(self) -> Any:
        trap("__reduce__")
        return OrderedDict, ([("a", 1)],)


class Net(torch.nn.Sequential):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        trap("Module.state_dict")
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        trap("Module.load_state_dict")
        return super().load_state_dict(*args, **kwargs)


class Training:
    def __init__(self, folder: Path, **knobs: Any) -> None:
        self.model = Net(torch.nn.Linear(80, 80), torch.nn.Linear(80, 80))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.optimizer.register_state_dict_pre_hook(lambda _: trap("Optimizer.state_dict"))
        self.optimizer.register_load_state_dict_post_hook(lambda _: trap("Optimizer.load_state_dict"))
        self.own, self.stateful = Own(), Stateful()
        self.ckpt = lazyckpt.Checkpointer(folder, **{**TINY, **knobs})
        self.ckpt.track(model=self.model, optimizer=self.optimizer, own=self.own, stateful=self.stateful)
        self.ckpt.track(things={"pickled": Pickled()})
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 80)).square().sum().backward()
        self.optimizer.step()

    def check(self, number: int) -> None:
        """Nothing is held on to, and the next save is right although training goes on."""
        __tracebackhide__ = True
        saver = self.ckpt._saver
        saver.drain()
        assert saver.engine.ring_used_bytes == 0
        assert gate._pending == () and not gate._open and not in_flight()
        self.own.tensor.fill_(number)
        before = self.model[0].weight.detach().clone()
        handle = self.ckpt.save(number)
        self.step()
        saved = lazyckpt.load(handle.result(timeout=30), weights_only=False)
        assert torch.equal(saved["model"]["0.weight"], before)
        assert torch.equal(saved["own"]["tensor"], torch.full((3000,), float(number)))
        assert saved["things"] == {"pickled": {"a": 1}}


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def error_of(kind: type[BaseException]) -> BaseException:
    return kind() if kind is MemoryError else kind("mine")


SAVING = (
    "StateProvider.state",
    "StateProvider.opcodes",
    "StateProvider.opcodes, behind its storages",
    "state_dict",
    "__reduce__",
    "Module.state_dict",
    "Optimizer.state_dict",
)


@pytest.mark.parametrize("place", SAVING)
def test_an_error_in_save(place: str, tmp_path: Path) -> None:
    """What pickle and providers raise is a SerializationError with theirs as its cause; what ends programs passes."""
    training = Training(tmp_path)
    training.ckpt.save(1).result(timeout=30)
    committed = (tmp_path / "step-00000001/state.pt").read_bytes()
    for number, kind in enumerate(ERRORS):
        gc.disable() if number % 2 else gc.enable()
        training.step()
        trap.set(place, error := error_of(kind))
        with pytest.raises((kind, SerializationError)) as caught:
            training.ckpt.save(2)
        trap.set("", error)
        assert gc.isenabled() is not bool(number % 2), "as it was before"
        gc.enable()
        if isinstance(error, Exception):
            assert type(caught.value) is SerializationError and caught.value.__cause__ is error
            assert caught.value.step == 2 and caught.value.path == tmp_path / "step-00000002"
            for part in ("step 2", str(tmp_path / "step-00000002"), kind.__name__, str(error)):
                assert part in str(caught.value)
        else:
            assert caught.value is error
        assert names(tmp_path) == ["step-00000001", *(f"step-0000001{n}" for n in range(number))]
        training.check(10 + number)
    assert (tmp_path / "step-00000001/state.pt").read_bytes() == committed
    training.ckpt.close()


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_while_a_lone_file_or_a_staged_folder_is_saved(kind: type[BaseException], tmp_path: Path) -> None:
    with lazyckpt.Saver(**TINY) as saver:
        saver.save(1, tmp_path / "a.pt", blocking=True)
        obj = {"t": torch.ones(9999), "x": Pickled()}
        expected = SerializationError if issubclass(kind, Exception) else kind
        trap.set("__reduce__", error := error_of(kind))
        with pytest.raises(expected):
            saver.save(obj, tmp_path / "a.pt", step=3)
        with pytest.raises(expected), saver.stage(tmp_path / "folder") as staged:
            staged.add("first.pt", torch.ones(9999))
            staged.add("second.pt", obj)
            staged.save()
        with pytest.raises(expected):
            lazyckpt.save(obj, tmp_path / "a.pt")
        trap.set("", error)
        assert names(tmp_path) == ["a.pt"] and lazyckpt.load(tmp_path / "a.pt") == 1
        assert saver.engine.ring_used_bytes == 0 and gate._pending == () and gc.isenabled()
        saver.save(obj, tmp_path / "a.pt").result(timeout=30)
        assert lazyckpt.load(tmp_path / "a.pt")["x"] == {"a": 1}


def test_an_error_of_the_system_between_layout_and_background_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: save() returned as if all were well, and only the handle knew."""
    training = Training(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(
            lazyckpt.pipeline.background.Background, "launch", lambda *_: (_ for _ in ()).throw(OSError(12, "none"))
        )
        with pytest.raises(lazyckpt.SaveError, match=r"step 1.*none"):
            training.ckpt.save(1)
    training.check(2)
    training.ckpt.close()


# on the way back

LOADING = (
    "StateProvider.landings",
    "StateProvider.load",
    "StateProvider.load_state",
    "load_state_dict",
    "Module.state_dict",
    "Module.load_state_dict",
    "Optimizer.load_state_dict",
)


@pytest.mark.parametrize("place", LOADING)
def test_an_error_in_restore(place: str, tmp_path: Path) -> None:
    """Regression: what a load_state_dict raised came without a word of which checkpoint and which name it was about."""
    training = Training(tmp_path)
    training.own.tensor.fill_(5)
    training.ckpt.save(1).result(timeout=30)
    training.ckpt.save(2).result(timeout=30)
    for number, kind in enumerate(ERRORS):
        trap.set(place, error := error_of(kind))
        with pytest.raises((kind, RestoreError)) as caught, warnings.catch_warnings():
            warnings.simplefilter("error")  # the checkpoint is not at fault: no older one is tried
            training.ckpt.restore()
        trap.set("", error)
        if isinstance(error, Exception):
            assert type(caught.value) is RestoreError and caught.value.__cause__ is error
            for part in (str(tmp_path / "step-00000002"), kind.__name__, str(error)):
                assert part in str(caught.value)
        else:
            assert caught.value is error
        assert names(tmp_path) == ["step-00000001", "step-00000002"]
        assert training.ckpt._saver.engine.ring_used_bytes == 0 and gc.isenabled()
        training.own.tensor.fill_(number)
        assert training.ckpt.restore() == 2
        assert bool((training.own.tensor == 5).all())
    training.check(3)
    training.ckpt.close()


class Rebuilt:
    def __setstate__(self, state: Any) -> None:
        trap("__setstate__")


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_in_load(kind: type[BaseException], tmp_path: Path) -> None:
    rebuilt = Rebuilt()
    rebuilt.__dict__["x"] = torch.ones(9999)
    lazyckpt.save(rebuilt, tmp_path / "a.pt")
    trap.set("__setstate__", error := error_of(kind))
    expected = lazyckpt.LoadError if issubclass(kind, Exception) else kind
    with pytest.raises(expected) as caught:
        lazyckpt.load(tmp_path / "a.pt", weights_only=False)
    assert (caught.value.__cause__ if issubclass(kind, Exception) else caught.value) is error
    trap.set("", error)
    assert lazyckpt.functional.process_engine().ring_used_bytes == 0
    assert isinstance(lazyckpt.load(tmp_path / "a.pt", weights_only=False), Rebuilt)


# in the background


@pytest.mark.parametrize("durability", ["async", "before_step"])
@pytest.mark.parametrize("place", ["on_done", "a done-callback"])
def test_an_error_in_the_background(place: str, durability: str, tmp_path: Path, disk: Any) -> None:
    """Regression: after SystemExit in on_done, the handle was never done. After one in a done-callback, replaced
    checkpoints stayed, and steps waited for a durable checkpoint."""
    training = Training(
        tmp_path, on_done=lambda metrics, error: trap("on_done"), keep_last=1, max_in_flight=1, durability=durability
    )
    training.ckpt.save(1).result(timeout=30)
    for kind in ERRORS:
        trap.set(place, error_of(kind))
        training.step()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            disk.hold()
            handle = training.ckpt.save(1)
            handle.add_done_callback(lambda _: trap("a done-callback"))
            disk.release()
            assert handle.result(timeout=30) == tmp_path / "step-00000001"
            training.step()
            training.ckpt._saver.drain()
        silent = place == "a done-callback" and issubclass(kind, Exception)  # a Future logs it
        assert [kind.__name__ in str(w.message) for w in heard] == ([] if silent else [True])
        trap.set("", error_of(kind))
        assert names(tmp_path) == ["step-00000001"], "what was replaced is gone"
        training.check(1)
    training.ckpt.close()


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_in_on_done_of_a_save_that_fails_at_once(kind: type[BaseException], tmp_path: Path) -> None:
    training = Training(tmp_path, on_done=lambda metrics, error: trap("on_done"))
    training.ckpt.track(bad={"x": (bad := [lambda: 0])})
    trap.set("on_done", error := error_of(kind))
    if issubclass(kind, Exception):
        with pytest.warns(UserWarning, match=kind.__name__), pytest.raises(SerializationError, match="lambda"):
            training.ckpt.save(1)
    else:
        with pytest.raises(kind) as caught:
            training.ckpt.save(1)
        assert caught.value is error
        with pytest.raises(SerializationError, match="lambda"):  # it was interrupted before it could tell
            training.ckpt._saver.check()
    trap.set("", error)
    bad.clear()
    training.check(2)
    training.ckpt.close()


@pytest.mark.parametrize("kind", [ValueError, MemoryError])
def test_a_state_that_fails_while_a_torn_snapshot_is_named(
    kind: type[BaseException], tmp_path: Path, disk: Any
) -> None:
    """Regression: the step raised that error, the storages counted as looked at, and the snapshot was published."""
    training = Training(tmp_path, host_buffer_bytes=32 << 10)
    training.step()
    disk.hold()
    handle = training.ckpt.save(1)
    with torch.no_grad():
        training.model[1].weight.add_(1)
    trap.set("Module.state_dict", error_of(kind))
    disk.release(after_s=0.05)
    training.step()
    with pytest.raises(lazyckpt.TornSnapshotError, match=r"data/\d+ was written to"):
        handle.result(timeout=30)
    trap.set("", error_of(kind))
    training.check(2)
    training.ckpt.close()


# in a data loader


class Data(Dataset[int]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        trap(f"item {index}")
        return index


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_in_a_dataset(kind: type[BaseException], tmp_path: Path) -> None:
    """The error reaches the caller unchanged; a later save continues with the batch that failed."""
    training = Training(tmp_path)
    loader = training.ckpt.track_loader(DataLoader(Data(), batch_size=2))
    trap.set("item 5", error := error_of(kind))
    seen = []
    with pytest.raises(kind) as caught:
        for batch in loader:
            seen.append(batch.tolist())
    assert caught.value is error
    trap.set("", error)
    assert seen == [[0, 1], [2, 3]]
    training.check(1)
    again = track_loader(DataLoader(Data(), batch_size=2))
    again.load_state_dict(torch.load(tmp_path / "step-00000001/state.pt", weights_only=False)["loader"])
    assert [batch.tolist() for batch in again] == [[4, 5], [6, 7], [8, 9], [10, 11]]
    trap.set("item 1", error)  # among those that are fetched again
    again.load_state_dict(torch.load(tmp_path / "step-00000001/state.pt", weights_only=False)["loader"])
    drawn = torch.get_rng_state()
    with pytest.raises(kind):
        next(iter(again))
    assert torch.equal(torch.get_rng_state(), drawn), "as before the epoch was begun again"
    training.ckpt.close()
