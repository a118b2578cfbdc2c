"""Restoring into live state: whole or not at all, in place, and the newest checkpoint that is whole."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lazyckpt
from endings import in_a_child
from lazyckpt import waits
from lazyckpt.errors import LoadError, RestoreError, UnsupportedFormatError
from lazyckpt.reading import restore
from lazyckpt.reading.archive import Archive
from lazyckpt.storage import catalog
from lazyckpt.storage.manifest import checksum
from memory import growth_bytes
from trials import Trials

pytestmark = pytest.mark.usefixtures("small_tensors_are_lazy")

STEPS = (1, 2, 3)


def make(seed: int = 0, width: int = 40) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, model[0].in_features)).square().sum().backward()  # type: ignore[index]
        optimizer.step()


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [t.clone() for s in optimizer.state.values() for t in s.values()]
    return [t.clone() for t in model.state_dict().values()] + state


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[torch.Tensor]]]:
    folder = tmp_path_factory.mktemp("saved")
    model, optimizer = make()
    states = {}
    with lazyckpt.Checkpointer(folder) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        for step in STEPS:
            train(model, optimizer)
            states[step] = bits(model, optimizer)
            ckpt.save(step).result()
    return folder, states


@pytest.fixture
def saved(saved_run: tuple[Path, dict[int, list[torch.Tensor]]], tmp_path: Path) -> dict[int, list[torch.Tensor]]:
    """Checkpoints of the steps 1, 2 and 3 in tmp_path, and what they hold."""
    shutil.copytree(saved_run[0], tmp_path, dirs_exist_ok=True)
    return saved_run[1]


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Any]:
    """A model and an optimizer of another seed, trained a little, and a Checkpointer that tracks them."""
    model, optimizer = make(seed=9)
    train(model, optimizer, 5)
    ckpt = lazyckpt.Checkpointer(tmp_path)
    ckpt.track(model=model, optimizer=optimizer)
    yield model, optimizer, ckpt
    ckpt.close()


def carry(source: Any, target: Any, folder: Path) -> None:
    """Saves ``source`` and restores that checkpoint into ``target``."""
    with lazyckpt.Checkpointer(folder) as ckpt:
        ckpt.track(x=source)
        ckpt.save(1).result()
    with lazyckpt.Checkpointer(folder) as ckpt:
        ckpt.track(x=target)
        assert ckpt.restore() == 1


def flip(file: Path, at: int) -> None:
    with open(file, "r+b") as f:
        f.seek(at)
        byte = f.read(1)
        f.seek(at)
        f.write(bytes([byte[0] ^ 1]))


# which one


def test_the_newest_a_given_step_and_a_given_path(saved: Any, fresh: Any, tmp_path: Path) -> None:
    model, optimizer, ckpt = fresh
    assert ckpt.restore() == 3 and same(bits(model, optimizer), saved[3])
    assert ckpt.restore(step=1) == 1 and same(bits(model, optimizer), saved[1])
    assert ckpt.restore(path=tmp_path / "step-00000002") == 2 and same(bits(model, optimizer), saved[2])
    assert ckpt.restore(path=str(tmp_path / "step-00000003")) == 3 and same(bits(model, optimizer), saved[3])


def test_an_empty_folder_is_none_and_nothing_else_is(tmp_path: Path, fresh: Any) -> None:
    model, optimizer, ckpt = fresh
    before = bits(model, optimizer)
    assert ckpt.restore() is None and same(bits(model, optimizer), before)
    for missing in ({"step": 5}, {"path": tmp_path / "nowhere"}, {"path": tmp_path}):
        with pytest.raises(LoadError, match=r"manifest\.json|no checkpoint of step 5; there is: none"):
            ckpt.restore(**missing)
    assert same(bits(model, optimizer), before)


@pytest.mark.parametrize("times", [2, 1000])
def test_another_process_removes_what_is_about_to_be_restored(
    times: int, saved: Any, fresh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: an evaluation beside a training with keep_last could restore no checkpoint. restore() still gives up
    if every scan is overtaken."""
    model, optimizer, ckpt = fresh
    theirs = make(seed=5)
    steps = iter(range(4, 4 + times))

    def save(step: int) -> None:
        train(*theirs)
        training.save(step).result()
        training._saver.drain()

    def overtaken(*args: Any) -> Any:
        if (step := next(steps, None)) is not None:
            elsewhere.submit(save, step).result()  # on this thread it would be inside restore()
        return opened(*args)

    opened = restore._open
    monkeypatch.setattr(restore, "_open", overtaken)
    with ThreadPoolExecutor(1) as elsewhere, lazyckpt.Checkpointer(tmp_path, keep_last=1) as training:
        training.track(model=theirs[0], optimizer=theirs[1])
        if times == 2:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert ckpt.restore() == 5
            assert same(bits(model, optimizer), bits(*theirs))
        else:
            with pytest.warns(UserWarning, match="No such file"), pytest.raises(RestoreError, match="not touched"):
                ckpt.restore()


def test_a_folder_that_somebody_removed_is_named(saved: Any, fresh: Any, tmp_path: Path) -> None:
    """Regression: a bare FileNotFoundError."""
    model, optimizer, ckpt = fresh
    before = bits(model, optimizer)
    tmp_path.rename(moved := tmp_path.with_name("moved"))
    with pytest.raises(LoadError, match=f"^{tmp_path}: cannot be read: No such file"):
        ckpt.restore()
    moved.rename(tmp_path)
    assert same(bits(model, optimizer), before)


def test_restore_waits_for_saves_in_flight(make_run: Any, disk: Any) -> None:
    run = make_run()
    before = run.state()["model"]["0.weight"]
    disk.hold()
    run.ckpt.save(7)
    disk.release(after_s=0.05)
    run.step()
    assert run.ckpt.restore() == 7
    assert torch.equal(run.model[0].weight, before)


def test_a_checkpoint_of_another_folder_is_restored_and_is_nobodys_parent(saved: Any, tmp_path: Path) -> None:
    model, optimizer = make(seed=3)
    with lazyckpt.Checkpointer(tmp_path / "own") as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        assert ckpt.restore(path=tmp_path / "step-00000002") == 2
        path = ckpt.save(3).result()
    assert json.loads((path / "manifest.json").read_text())["parent"] is None


def test_parents_follow_what_was_restored(saved: Any, fresh: Any, tmp_path: Path) -> None:
    _, _, ckpt = fresh
    ckpt.restore(step=1)
    manifest = json.loads((ckpt.save(9).result() / "manifest.json").read_text())
    assert (manifest["sequence"], manifest["parent"]) == (4, 1)
    manifest = json.loads((ckpt.save(10).result() / "manifest.json").read_text())
    assert (manifest["sequence"], manifest["parent"]) == (5, 4)


# damage


def truncate(folder: Path) -> None:
    os.truncate(folder / "state.pt", (folder / "state.pt").stat().st_size // 2)


def cut_and_lie(folder: Path) -> None:
    """Truncated, and the manifest says so: only the zip directory tells."""
    truncate(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][0]["bytes"] = (folder / "state.pt").stat().st_size
    manifest["crc32"] = checksum(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


DAMAGE: dict[str, tuple[Any, str]] = {
    "truncated": (truncate, r"step-00000003: state\.pt has \d+ bytes, the manifest says"),
    "truncated with the manifest": (cut_and_lie, r"step-00000003.*truncated"),
    "a bit of a tensor": (lambda f: flip(f / "state.pt", 10_000), r"step-00000003.*checksum does not match: data/"),
    "a bit of the pickle": (
        lambda f: flip(f / "state.pt", (f / "state.pt").read_bytes().index(b"_rebuild_tensor_v2")),
        r"step-00000003.*data\.pkl",
    ),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), r"step-00000003.*no manifest"),
    "an empty manifest": (lambda f: os.truncate(f / "manifest.json", 0), r"manifest\.json.*empty"),
    "no state": (lambda f: (f / "state.pt").unlink(), r"step-00000003: state\.pt is missing"),
    "an empty state": (lambda f: os.truncate(f / "state.pt", 0), r"state\.pt has 0 bytes"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_newest_is_passed_over_with_a_warning_that_names_the_reason(
    name: str, saved: Any, fresh: Any, tmp_path: Path
) -> None:
    model, optimizer, ckpt = fresh
    damage, reason = DAMAGE[name]
    damage(tmp_path / "step-00000003")
    with pytest.warns(UserWarning, match=reason):
        assert ckpt.restore() == 2
    assert same(bits(model, optimizer), saved[2])
    with pytest.raises((LoadError, RestoreError), match=r"step-00000003"):
        ckpt.restore(step=3)


def test_training_goes_on_from_the_one_before_and_is_the_newest_then(saved: Any, fresh: Any, tmp_path: Path) -> None:
    model, optimizer, ckpt = fresh
    truncate(tmp_path / "step-00000003")
    with pytest.warns(UserWarning):
        ckpt.restore()
    ckpt.save(3).result()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ckpt.restore() == 3
    assert same(bits(model, optimizer), saved[2])


def test_if_none_is_whole_the_error_lists_every_reason(saved: Any, fresh: Any, tmp_path: Path) -> None:
    model, optimizer, ckpt = fresh
    before = bits(model, optimizer)
    for step in STEPS:
        truncate(tmp_path / f"step-0000000{step}")
    with pytest.warns(UserWarning), pytest.raises(RestoreError, match="not touched") as caught:
        ckpt.restore()
    assert all(f"step-0000000{step}" in str(caught.value) for step in STEPS)
    assert same(bits(model, optimizer), before)


def test_if_bytes_may_have_landed_the_error_says_so(saved: Any, fresh: Any, tmp_path: Path) -> None:
    _, _, ckpt = fresh
    for step in STEPS:
        flip(tmp_path / f"step-0000000{step}" / "state.pt", 10_000)
    with pytest.warns(UserWarning), pytest.raises(RestoreError, match="undefined now"):
        ckpt.restore()
    with pytest.raises(RestoreError, match="undefined now"):
        ckpt.restore(step=2)


def test_an_io_error_while_bytes_land_says_so_too(saved: Any, fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the error did not say that tensors might have been overwritten."""

    def fill(self: Archive, elsewhere: Any) -> None:
        raise lazyckpt.ReadError("cannot be read: Input/output error", path=self.path, errno=errno.EIO)

    monkeypatch.setattr(Archive, "fill", fill)
    monkeypatch.setattr(waits, "READ_RETRIES_S", (0,))
    with (
        pytest.warns(UserWarning, match="tried again"),
        pytest.raises(lazyckpt.ReadError, match=r"error; .*undefined now"),
    ):
        fresh[2].restore(step=2)


REFUSALS = [errno.ETIMEDOUT, errno.EMFILE, errno.ENOMEM, errno.EIO, errno.EACCES, errno.EAGAIN, errno.ESTALE]


class Refusing:
    """A call of the operating system that fails a number of times for one path."""

    def __init__(self, call: Callable[..., Any], path: str, code: int, times: int) -> None:
        self.call, self.path, self.code, self.times = call, path, code, times

    def __call__(self, path: Any, *rest: Any, **named: Any) -> Any:
        if str(path).endswith(self.path) and self.times > 0:
            self.times -= 1
            raise OSError(self.code, os.strerror(self.code), str(path))
        return self.call(path, *rest, **named)


@pytest.mark.parametrize("times", [1, 1000])
@pytest.mark.parametrize(
    ("code", "file", "call"),
    [(code, "manifest.json", "open") for code in REFUSALS]
    + [(errno.EIO, "manifest.json", "lstat"), (errno.EIO, "state.pt", "open"), (errno.EIO, "state.pt", "lstat")],
)
def test_a_checkpoint_that_cannot_be_read_just_now_is_not_damaged(
    code: int, file: str, call: str, times: int, saved: Any, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: after one failed open() of the newest checkpoint, restore() took the one before, and the next save
    replaced the newest."""
    model, optimizer, ckpt = fresh
    before = bits(model, optimizer)
    monkeypatch.setattr(waits, "READ_RETRIES_S", (0.001,) * 3)
    refusing = Refusing(getattr(os, call), f"step-00000003/{file}", code, times)
    monkeypatch.setattr(os, call, refusing)
    if times == 1:
        with pytest.warns(UserWarning, match="tried again"):
            assert ckpt.restore() == 3
        assert same(bits(model, optimizer), saved[3])
    else:
        with pytest.warns(UserWarning, match="tried again"), pytest.raises(lazyckpt.ReadError) as caught:
            ckpt.restore()
        assert caught.value.errno == code and f"step-00000003/{file}" in str(caught.value)
        assert refusing.times == 1000 - 4
        assert same(bits(model, optimizer), before)


@pytest.mark.parametrize("times", [1, 1000])
@pytest.mark.parametrize(
    "call, path", [("open", "step-00000007/manifest.json"), ("lstat", "step-00000007/manifest.json"), ("scandir", "")]
)
def test_a_save_is_numbered_behind_what_cannot_be_read_just_now(
    call: str, path: str, times: int, saved: Any, fresh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: an unreadable manifest counted as sequence 0. The next checkpoint got a number that was taken, and
    restore() could go back to the older one."""
    ckpt = fresh[2]
    with lazyckpt.Checkpointer(tmp_path) as another:
        another.track(x={"x": 1})
        another.save(7)
    monkeypatch.setattr(waits, "READ_RETRIES_S", (0.001,) * 3)
    refusing = Refusing(getattr(os, call), path or tmp_path.name, errno.EIO, times)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refusing)
        if times == 1:
            with pytest.warns(UserWarning, match="tried again"):
                ckpt.save(8).result()
        else:
            handle = ckpt.save(8)
            with pytest.warns(UserWarning, match="tried again"), pytest.raises(lazyckpt.SaveError) as caught:
                handle.result()
            assert os.strerror(errno.EIO) in str(caught.value) and (path or tmp_path.name) in str(caught.value)
            assert refusing.times == 1000 - 4
    newest = catalog.Catalog(tmp_path).scan()[0]
    assert (newest.step, newest.sequence) == ((8, 5) if times == 1 else (7, 4))


def test_what_is_not_readable_or_damaged_is_left_alone_by_retention(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make()
    flip(tmp_path / "step-00000003/state.pt", 10_000)
    with lazyckpt.Checkpointer(tmp_path, keep_last=1) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        with pytest.warns(UserWarning, match="passed over"):
            assert ckpt.restore() == 2
        monkeypatch.setattr(os, "lstat", Refusing(os.lstat, "step-00000001/manifest.json", errno.EIO, 1000))
        for step in (4, 5):
            train(model, optimizer)
            ckpt.save(step, blocking=True)
    assert sorted(entry.name for entry in tmp_path.glob("step-*")) == [f"step-0000000{n}" for n in (1, 3, 5)]


def test_a_given_one_that_cannot_be_opened_touches_nothing(saved: Any, fresh: Any, tmp_path: Path) -> None:
    """Regression: the error said that the state was undefined."""
    model, optimizer, ckpt = fresh
    before = bits(model, optimizer)
    data = bytearray((tmp_path / "step-00000002/state.pt").read_bytes())
    data[-20:] = bytes(20)  # where the directory ends
    (tmp_path / "step-00000002/state.pt").write_bytes(data)
    with pytest.raises(LoadError, match=r"state\.pt") as caught:
        ckpt.restore(step=2)
    assert "undefined" not in str(caught.value) and same(bits(model, optimizer), before)


# a model that changed


def test_a_changed_model_is_one_error_that_lists_all_and_touches_nothing(saved: Any, tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Linear(40, 50, bias=False), nn.Linear(50, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    before = [t.clone() for t in model.state_dict().values()]
    rng = torch.get_rng_state()
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model, optimizer=optimizer, scheduler={"epoch": 1})
        with pytest.raises(RestoreError, match="does not fit the tracked state; nothing was restored") as caught:
            ckpt.restore()
    text = str(caught.value)
    for line in (
        "scheduler: not in the checkpoint",
        "model: 3.weight: not in the checkpoint",
        "model: 2.bias: in the checkpoint, but not in the model",
        "model: 2.weight: (40, 40) float32 in the checkpoint, (50, 40) float32 in the model",
        "optimizer: parameter group 0: 6 parameters in the checkpoint, 7 in the optimizer",
    ):
        assert line in text
    assert same([*model.state_dict().values()], before) and optimizer.state == {}
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_misfit_does_not_fall_back_to_an_older_checkpoint(saved: Any, tmp_path: Path) -> None:
    """An older one would hide the mistake and lose training."""
    model, _ = make()
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model)
        with warnings.catch_warnings(), pytest.raises(RestoreError, match="step-00000003") as caught:
            warnings.simplefilter("error")
            ckpt.restore()
    assert "optimizer: in the checkpoint, but not tracked" in str(caught.value)


class Tag:
    """A type that the user has not allowed."""


def test_a_type_that_is_not_allowed_does_not_fall_back_either(tmp_path: Path) -> None:
    history: list[Any] = [1]
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(x=history)
        ckpt.save(1).result()
        history.append(Tag())
        with torch.serialization.safe_globals([Tag]):  # save() asks, too
            ckpt.save(2).result()
        with pytest.raises(UnsupportedFormatError, match=r"step-00000002.*Tag.*add_safe_globals"):
            ckpt.restore()
        with torch.serialization.safe_globals([Tag]):
            assert ckpt.restore() == 2
    assert type(history[1]) is Tag


# in place


def test_live_tensors_keep_their_memory_and_their_graph(saved: Any, fresh: Any) -> None:
    model, optimizer, ckpt = fresh
    tensors = [*model.state_dict(keep_vars=True).values()]
    tensors += [t for s in optimizer.state.values() for t in s.values()]
    pointers, identities = [t.data_ptr() for t in tensors], [*map(id, model.parameters())]
    ckpt.restore()
    after = [*model.state_dict(keep_vars=True).values()]
    after += [t for s in optimizer.state.values() for t in s.values()]
    assert [t.data_ptr() for t in after] == pointers and [*map(id, model.parameters())] == identities
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    for step in (3, 3, 2):
        train(model, optimizer, 2)
        ckpt.restore(step=step)
        assert same(bits(model, optimizer), saved[step])


def test_an_optimizer_without_state_gets_it_and_restored_tensors_alias_nothing(saved: Any, tmp_path: Path) -> None:
    """Neither each other nor memory that a later save or restore uses."""
    model, optimizer = make(seed=4)
    assert optimizer.state == {}
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        ckpt.restore()
        assert same(bits(model, optimizer), saved[3])
        live = [*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]
        assert len({t.data_ptr() for t in live}) == len(live)
        for i, tensor in enumerate(live):
            tensor.fill_(i)
        ckpt.save(9).result()
        ckpt.restore(step=1)
        ckpt.restore(step=9)
        assert all(bool((t == i).all()) for i, t in enumerate(live))
    assert all(bool((t == i).all()) for i, t in enumerate(live))


def test_what_was_tied_when_saved_and_is_not_now(tmp_path: Path) -> None:
    """Each gets its bytes, in memory of its own."""
    t = torch.arange(2000.0)
    live: Any = {"a": torch.zeros(2000), "b": torch.zeros(2000)}
    kept = [*live.values()]
    carry({"a": t, "b": t}, live, tmp_path)
    assert torch.equal(live["a"], t) and torch.equal(live["b"], t)
    del kept


def test_what_is_tied_now_and_was_not_when_saved(tmp_path: Path) -> None:
    """Two saved tensors must not land on top of each other in a random order: the last wins, as in load_state_dict."""
    source, target = (nn.ModuleList([nn.Linear(50, 50), nn.Linear(50, 50)]) for _ in range(2))
    target[1].weight = target[0].weight
    for number in range(5):
        carry(source, target, tmp_path / str(number))
        assert torch.equal(target[0].weight, source[1].weight)


def test_a_parameter_that_is_tied_now_takes_the_last_of_its_values(tmp_path: Path) -> None:
    """As in load_state_dict, wherever it lies in the file: lazy storages are written last."""

    def pair() -> nn.ParameterDict:
        return nn.ParameterDict({name: nn.Parameter(torch.randn(64, 64)) for name in ("first", "last")})

    source, target = pair(), pair()
    target["last"] = target["first"]
    optimizer = torch.optim.SGD([source["first"]], lr=0.1)
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=source)
        source["first"].grad = torch.ones(64, 64)
        optimizer.step()
        handle = ckpt.save(1, blocking=True)
        assert handle.metrics.bytes - handle.metrics.eager_bytes >= source["first"].nbytes
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=target)
        ckpt.restore()
    assert torch.equal(target["first"], source["last"])


def test_a_weight_that_somebody_else_has_saved_too_reaches_both(tmp_path: Path) -> None:
    """It must not be read into the module's memory alone, or the other tensor would hold nothing."""

    class Best:
        def __init__(self, weight: torch.Tensor) -> None:
            self.weight = weight

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"weight": self.weight}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            self.weight = state["weight"]

    source, target = nn.Linear(70, 70), nn.Linear(70, 70)
    best = Best(torch.empty(0))
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=source, best=Best(source.weight.detach()))
        ckpt.save(1, blocking=True)
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=target, best=best)
        ckpt.restore()
    assert torch.equal(target.weight, source.weight) and torch.equal(best.weight, source.weight)


def test_views_of_a_flat_buffer(tmp_path: Path) -> None:
    flat = torch.zeros(6000)
    source = {"a": torch.rand(3000), "b": torch.rand(3000)}
    views = {"a": flat[:3000], "b": flat[3000:]}
    carry(source, views, tmp_path / "live")
    assert torch.equal(flat, torch.cat([source["a"], source["b"]]))
    target = {"a": torch.zeros(3000), "b": torch.zeros(3000)}
    carry(views, target, tmp_path / "saved")
    assert torch.equal(torch.cat([target["a"], target["b"]]), flat)


def _complex(size: int) -> torch.Tensor:
    return torch.rand(size, dtype=torch.complex64)


@pytest.mark.parametrize("which", ["saved", "live"])
@pytest.mark.parametrize(
    ("base", "view"),
    [
        (lambda: torch.rand(40, 50), torch.t),
        (lambda: _complex(3000), torch.conj),
        (lambda: torch.rand(3000), torch._neg_view),
    ],
    ids=["transposed", "conjugated", "negated"],
)
def test_views_that_show_other_values_than_their_bytes(base: Any, view: Any, which: str, tmp_path: Path) -> None:
    shown = view(base())
    plain = shown.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    source, target = (shown, torch.zeros_like(plain)) if which == "saved" else (plain, view(torch.zeros_like(base())))
    live = {"t": target}
    carry({"t": source}, live, tmp_path)
    assert torch.equal(live["t"], plain)


def test_a_part_of_a_saved_storage_lands_alone(tmp_path: Path) -> None:
    """torch saves the whole of it."""
    part, flat = torch.rand(6000)[:3000], torch.zeros(9000)
    live = {"t": flat[3000:6000]}
    carry({"t": part}, live, tmp_path)
    assert torch.equal(live["t"], part)
    assert not flat[:3000].any() and not flat[6000:].any()


def restoring_grows_by_mib(folder: Path, *, saves: bool, warm: bool) -> int:
    """``saves`` first; ``warm``: the moments are there before they are restored."""
    model = nn.Sequential(*(nn.Linear(1800, 1800) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    if warm:
        model(torch.ones(1, 1800)).sum().backward()
        optimizer.step()
    with lazyckpt.Checkpointer(folder, host_buffer_bytes=32 << 20) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        if saves:
            ckpt.save(1).result()
        return growth_bytes(ckpt.restore) >> 20


def test_no_second_copy_of_the_model_in_memory(tmp_path: Path) -> None:
    """148 MiB of state. State that exists is read in place; the rest is allocated once."""
    state = 3 * 4 * 4 * 1800 * 1800 >> 20
    warm, cold = (
        int(in_a_child(partial(restoring_grows_by_mib, tmp_path, saves=first, warm=first))) for first in (True, False)
    )
    assert warm < 72, "what the reader itself needs"
    assert cold < state * 2 / 3 + 72, "the moments, which were not there"


# the whole of a run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.Linear(64, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def run(folder: Path, until: int, *, save_at: int | None = None, seed: int = 0) -> tuple[list[float], nn.Module]:
    """Dropout, batch norm, a scheduler, a shuffled loader and augmentation that draws from the global generator."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=200)
    data = torch.randn(50, 17, generator=torch.Generator().manual_seed(1))
    losses: list[float] = []
    with lazyckpt.Checkpointer(folder) as ckpt:
        ckpt.track(model=model, optimizer=optimizer, scheduler=scheduler, losses=losses)
        loader = ckpt.track_loader(torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))
        step = ckpt.restore() or 0
        while True:
            for batch in loader:
                noisy = batch[:, :16] + 0.1 * torch.randn(len(batch), 16)
                loss = (model(noisy) - batch[:, 16:]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                losses.append(loss.item())
                step += 1
                if step == save_at:
                    ckpt.save(step)
                if step == until:
                    return losses, model


@pytest.mark.timeout(1800)  # with all trials
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(trials: Trials, tmp_path: Path) -> None:
    """Saved inside of an epoch, at its end and in the next one: an epoch has seven batches."""
    steps = trials.count(26, 100)
    starts = [7, 10, 14, *(trials.random.randint(1, 14) for _ in range(trials.count(0, 17)))]
    until = max(starts) + steps
    expected, model = run(tmp_path / "whole", until)
    for number, save_at in enumerate(starts):
        parts = tmp_path / f"parts-{number}"
        run(parts, save_at + 2, save_at=save_at)
        torch.manual_seed(trials.random.randrange(1 << 32))
        torch.rand(17)
        losses, resumed = run(parts, until, seed=5)
        assert losses == expected
        assert all(torch.equal(v, resumed.state_dict()[k]) for k, v in model.state_dict().items())
    trials.report("resume equals uninterrupted: losses, weights", len(starts), tmp_path, steps_at_least=steps)
