"""``save()`` refuses a state that ``restore()`` would refuse, and a restore that fails says what it has changed."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import json
import re
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lazyckpt
from lazyckpt.errors import RestoreError, SerializationError, UnsupportedFormatError
from lazyckpt.providers import module as modules
from lazyckpt.providers import restorable
from lazyckpt.providers.data_loader import track_loader
from lazyckpt.storage.manifest import checksum


class Phase(enum.Enum):
    WARMUP = "w"


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


class Point(collections.namedtuple("Point", "x y")):
    pass


class Names(list):  # type: ignore[type-arg]
    pass


class Own:
    pass


def function() -> None:
    pass


# A tracked object, its name in the error, and the state that the error tells to keep instead.
REFUSED: dict[str, tuple[Any, str, str]] = {
    "namespace": (argparse.Namespace(a=1), "an argparse.Namespace", "vars(args)"),
    "simple namespace": (types.SimpleNamespace(a=1), "a types.SimpleNamespace", "vars(args)"),
    "enum": (Phase.WARMUP, "a .*test_restorable.Phase", "args.value"),
    "dataclass": (Settings(), "a .*test_restorable.Settings", "dataclasses.asdict(args)"),
    "named tuple": (Point(1, 2), "a .*test_restorable.Point", "args._asdict()"),
    "defaultdict": (collections.defaultdict(int, a=1), "a collections.defaultdict", "dict(args)"),
    "deque": (collections.deque([1]), "a collections.deque", "list(args)"),
    "list of one's own": (Names("ab"), "a .*test_restorable.Names", "list(args)"),
    "array of objects": (np.array([None]), "a numpy.ndarray of dtype object", "args.tolist()"),
    "array of times": (np.zeros(2, "M8[s]"), r"a numpy.ndarray of dtype datetime64\[s\]", "args.tolist()"),
    "function": (function, "the function .*test_restorable.function", "its name"),
    "class": (Own, "the class .*test_restorable.Own", "its name"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name_and_with_the_cure(name: str, tmp_path: Path) -> None:
    obj, what, instead = REFUSED[name]
    match = rf"'run\.of\.0\.args' is {what}, which restore\(\) could not read: keep {re.escape(instead)} instead"
    run: dict[str, Any] = {"best": 0.5, "of": [{"args": obj}]}
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(run=run)
        for step in (1, 2):
            with pytest.raises(SerializationError, match=match) as caught:
                ckpt.save(step)
            assert caught.value.step == step
        run["of"] = "plain"
        ckpt.save(3).result()
        assert [c.step for c in ckpt._catalog.scan()] == [3] and ckpt.restore() == 3
    lazyckpt.save({"x": obj}, tmp_path / "a.pt")  # who loads it decides
    with lazyckpt.Saver() as saver:
        saver.save({"x": obj}, tmp_path / "b.pt").result()


def test_what_has_a_state_of_its_own_belongs_under_a_name_of_its_own(tmp_path: Path) -> None:
    loader = track_loader(torch.utils.data.DataLoader(torch.arange(4)))  # type: ignore[arg-type]
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(loaders={"train": loader})
        match = (
            r"'loaders\.train' is .*TrackedLoader.*: track it under a name of its own, a loader with track_loader\(\)"
        )
        with pytest.raises(SerializationError, match=match):
            ckpt.save(1)


def test_a_type_of_ones_own_may_be_allowed(tmp_path: Path) -> None:
    target: dict[str, Any] = {"own": Own()}
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(x=target)
        with pytest.raises(SerializationError, match=r"'x\.own'.*keep what you need of it.*add_safe_globals"):
            ckpt.save(1)
        with torch.serialization.safe_globals([Own]):
            ckpt.save(2).result()
            target.clear()
            assert ckpt.restore() == 2
    assert type(target["own"]) is Own


class Emptying:
    """Writes to the tensors that it is made of."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        assert self.tensors[0].sum() == 3  # small ones have their values
        for tensor in self.tensors:
            tensor.zero_()


def test_looking_whether_it_can_be_read_changes_nothing(tmp_path: Path) -> None:
    """Regression: the unpickler was given the live storages, and __setstate__ wrote to the model."""
    small, large = torch.ones(3), torch.ones(100_000)
    with torch.serialization.safe_globals([Emptying]), lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(x={"own": Emptying(small, large)})
        ckpt.save(1).result()
    assert small.sum() == 3 and large.sum() == 100_000


def test_keys_are_looked_at_too(tmp_path: Path) -> None:
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(x={Phase.WARMUP: 1})
        with pytest.raises(SerializationError, match=r"'x\.a key, Phase\.WARMUP' is a .*Phase.*\.value instead"):
            ckpt.save(1)


def test_what_comes_later_is_found_then(tmp_path: Path) -> None:
    run: dict[str, Any] = {"best": np.float64(1), "array": np.zeros(3)}
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(run=run)
        ckpt.save(1).result()
        run["array"] = np.array([None])  # the same class
        with pytest.raises(SerializationError, match=r"'run\.array' is a numpy\.ndarray of dtype object"):
            ckpt.save(2)


def test_a_dtype_with_metadata_is_refused_after_a_plain_one(tmp_path: Path) -> None:
    """Regression: it has the class of the plain one, which had been accepted."""
    run: dict[str, Any] = {"a": np.zeros(3)}
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(run=run)
        ckpt.save(1).result()
        run["b"] = np.zeros(3, np.dtype("f8", metadata={"unit": "m"}))
        for step in (2, 3):
            with pytest.raises(SerializationError, match=r"'run\.b' is a numpy\.ndarray of dtype float64"):
                ckpt.save(step)


def nested(depth: int) -> tuple[Any, ...]:
    key: tuple[Any, ...] = ()
    for _ in range(depth):
        key = (key,)
    return key


@pytest.mark.parametrize("state", [{"seed": 1 << 3000}, {nested(150): 1}], ids=["integer", "key"])
def test_what_names_no_class_is_not_taken_for_damage(state: Any, tmp_path: Path) -> None:
    """Regression: restore() went back to an older checkpoint, with a warning."""
    run: dict[Any, Any] = {}
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(run=run)
        ckpt.save(1).result()
        run.update(state)
        path = ckpt.save(2).result()
        with pytest.raises(UnsupportedFormatError, match=r"more than 255 bytes.*weights_only=False"):
            ckpt.restore()
    assert lazyckpt.load(path / "state.pt", weights_only=False)["run"] == state


def test_a_save_that_names_nothing_new_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = restorable.unreadable
    monkeypatch.setattr(restorable, "unreadable", lambda *args: (read.append(1), real(*args))[1])
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    claimed: list[int] = []
    claims = modules._claimed
    monkeypatch.setattr(modules, "_claimed", lambda module: (claimed.append(1), claims(module))[1])
    run: dict[str, Any] = {"best": 1.0, "history": []}
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model, optimizer=optimizer, run=run)
        for step in range(3):
            optimizer.param_groups[0]["lr"] = 0.1 * step
            model(torch.randn(4, 4)).sum().backward()
            optimizer.step()
            run["history"].append(step)
            ckpt.save(step).result()
        assert read == [] and claimed == [1]
        for step in range(3, 6):
            run["best"] = np.float64(step)
            run["history"].append(np.float32(step))
            ckpt.save(step).result()
        assert 1 <= len(read) <= 2 and claimed == [1]


# keys of a module


class Quantised(nn.Linear):
    """Saves, as Linear4bit of bitsandbytes, more than torch's ``load_state_dict`` takes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.absmax = [torch.ones(3)]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.absmax[0]
        destination[f"{prefix}weight.quant_map"] = self.absmax[0]


class Reading(Quantised):
    """And takes it back by itself."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.absmax[0] = state_dict.pop(f"{prefix}weight.absmax")
        state_dict.pop(f"{prefix}weight.quant_map")
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_keys_that_nothing_loads_are_refused_at_the_first_save(tmp_path: Path) -> None:
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=nn.Sequential(nn.Linear(2, 2), Quantised(2, 2)))
        what = r"'model\.1\.weight\.absmax' is in state_dict\(\), but load_state_dict\(\) would refuse it.*1 more"
        with pytest.raises(SerializationError, match=what + ".*Track only what trains.*get_peft_model_state_dict"):
            ckpt.save(1)


def with_pre_hook() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), Quantised(2, 2))

    def take(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        for key in [key for key in state if "weight." in key]:
            del state[key]

    model.register_load_state_dict_pre_hook(take)
    return model


class Loading(nn.Sequential):
    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({k: v for k, v in state_dict.items() if "weight." not in k}, *args, **kwargs)


class Renaming(nn.Linear):
    """Saves its weight under another name; restore() reads it in place."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"core.{key}": value for key, value in super().state_dict(*args, **kwargs).items()}


READING = {
    "own loader": lambda: nn.Sequential(nn.Linear(2, 2), Reading(2, 2)),
    "hook of a parent": with_pre_hook,
    "load_state_dict": lambda: Loading(nn.Linear(2, 2), Quantised(2, 2)),
    "other names": lambda: Renaming(2, 2),
}


@pytest.mark.parametrize("name", READING)
def test_keys_that_something_takes_are_saved_and_restored(name: str, tmp_path: Path) -> None:
    model = READING[name]()
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model)
        ckpt.save(1).result()
    fresh = READING[name]()
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=fresh)
        assert ckpt.restore() == 1
    assert all(map(torch.equal, model.parameters(), fresh.parameters()))


def test_keys_that_are_no_text_are_read_in_place(tmp_path: Path) -> None:
    """Regression: save() failed, since an integer has no dots."""

    class Numbering(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return dict(enumerate(super().state_dict(*args, **kwargs).values()))

    model, fresh = Numbering(2, 2), Numbering(2, 2)
    for each in (model, fresh):
        with lazyckpt.Checkpointer(tmp_path) as ckpt:
            ckpt.track(model=each)
            assert ckpt.save(1).result() if each is model else ckpt.restore() == 1
    assert torch.equal(model.weight, fresh.weight)


def with_buffer(make: Any) -> nn.Module:
    model = nn.Linear(20, 20)
    model.register_buffer("table", make())
    return model


@pytest.mark.filterwarnings("ignore:.*(CSR|beta state)")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_buffers_come_back(layout: Any, tmp_path: Path) -> None:
    """Regression: they were saved, and restore() raised for want of a storage."""
    model = with_buffer(lambda: torch.eye(3).to_sparse(layout=layout))
    fresh = with_buffer(lambda: (torch.eye(3) * 2).to_sparse(layout=layout))
    dense = with_buffer(lambda: torch.zeros(3, 3))
    empty = with_buffer(lambda: torch.zeros(3, 3).to_sparse_csr())
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model)
        ckpt.save(1).result()
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=fresh)
        assert ckpt.restore() == 1
    assert torch.equal(fresh.table.to_dense(), torch.eye(3)) and torch.equal(fresh.weight, model.weight)
    refused(tmp_path, r"table: \(3, 3\) float32 sparse_.* in the checkpoint, .* of 0 elements in", model=empty)
    refused(tmp_path, r"table: \(3, 3\) float32 sparse_.* in the checkpoint, \(3, 3\) float32 in", model=dense)


@pytest.mark.filterwarnings("ignore:.*prototype")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_buffers_are_refused(layout: Any, tmp_path: Path) -> None:
    """torch's load_state_dict() cannot fill them."""
    parts = [torch.ones(2), torch.ones(3)]
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=with_buffer(lambda: torch.nested.nested_tensor(parts, layout=layout)))
        with pytest.raises(SerializationError, match=r"'model.*nested.tensor"):
            ckpt.save(1)


def test_extra_state_that_cannot_be_set_is_refused(tmp_path: Path) -> None:
    class Telling(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"a": 1}

    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=Telling(2, 2))
        with pytest.raises(SerializationError, match=r"'model\._extra_state' is in state_dict\(\)"):
            ckpt.save(1)


def test_keys_that_nothing_loads_touch_nothing_when_an_old_checkpoint_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: parameters were read in place, and then load_state_dict() raised."""
    with monkeypatch.context() as patch, lazyckpt.Checkpointer(tmp_path) as ckpt:
        patch.setattr(modules.ModuleProvider, "_unclaimed", lambda *_: [])
        ckpt.track(model=Quantised(20, 20))
        ckpt.save(1).result()
    model = Quantised(20, 20)
    before = model.weight.clone()
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model)
        with pytest.raises(RestoreError, match=r"nothing was restored:\n +model: weight\.absmax: is in state_dict\(\)"):
            ckpt.restore()
    assert torch.equal(model.weight, before)


# restore() checks everything before it touches anything


def trained(kind: Any = torch.optim.SGD, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(20, 20)
    optimizer = kind(model.parameters(), **options)
    model(torch.randn(4, 20)).sum().backward()
    optimizer.step()
    return model, optimizer


def refused(folder: Path, match: str, **tracked: Any) -> None:
    """``restore()`` raises what matches, and ``tracked["model"]`` and the generators are as they were."""
    before, rng = tracked["model"].weight.clone(), torch.get_rng_state()
    with lazyckpt.Checkpointer(folder) as ckpt:
        ckpt.track(**tracked)
        with pytest.raises(RestoreError, match=match) as caught:
            ckpt.restore()
    assert "nothing was restored" in str(caught.value)
    assert torch.equal(tracked["model"].weight, before) and torch.equal(torch.get_rng_state(), rng)


def forget_kinds(checkpoint: Path) -> None:
    """Makes it one of a version that did not note the classes of optimizers."""
    file = checkpoint / "manifest.json"
    told = json.loads(file.read_text())
    del told["kinds"]
    file.write_text(json.dumps(told | {"crc32": checksum(told)}))


def test_the_state_of_another_optimizer_touches_nothing(tmp_path: Path) -> None:
    """Regression: the model was read before the optimizer's load_state_dict() raised KeyError."""
    model, optimizer = trained(momentum=0.9, lr=0.1)
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        ckpt.save(1).result()
    model, other = trained(torch.optim.AdamW)
    state = [t.clone() for s in other.state.values() for t in s.values()]
    refused(tmp_path, "optimizer: SGD in the checkpoint, AdamW here", model=model, optimizer=other)
    forget_kinds(tmp_path / "step-00000001")
    refused(tmp_path, r"optimizer: load_state_dict\(\) would refuse it.*KeyError: 'step'", model=model, optimizer=other)
    assert all(map(torch.equal, state, [t for s in other.state.values() for t in s.values()]))


@pytest.mark.parametrize("lacking", ["step", "a number"])
def test_the_state_of_one_parameter_that_does_not_load_touches_nothing(lacking: str, tmp_path: Path) -> None:
    """States alike are tried once, and this one is like no other."""
    model, optimizer = trained(torch.optim.AdamW)
    spoiled = [*optimizer.state.values()][-1]
    if lacking == "step":
        del spoiled["step"]
    else:
        spoiled["step"] = "none"
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        ckpt.save(1).result()
    why = "KeyError: 'step'" if lacking == "step" else "ValueError: could not convert string to float"
    model, optimizer = trained(torch.optim.AdamW)
    refused(tmp_path, rf"optimizer: load_state_dict\(\) would refuse it.*{why}", model=model, optimizer=optimizer)


@pytest.mark.parametrize("wrapped", [False, True])
def test_moments_of_other_parameters_touch_nothing(wrapped: bool, tmp_path: Path) -> None:
    """Regression: with a subclass of torch's optimizers this was restored, and the next step() raised."""

    class OwnAdamW(torch.optim.AdamW):
        pass

    class Wrapping(torch.optim.Optimizer):
        __module__ = "accelerate.optimizer"

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            self.param_groups = optimizer.param_groups

        def state_dict(self) -> Any:
            return self.optimizer.state_dict()

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.optimizer.step()

    def tracked(order: int) -> dict[str, Any]:
        model = nn.Linear(20, 30)
        optimizer = OwnAdamW([*model.parameters()][::order])
        model(torch.randn(4, 20)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": Wrapping(optimizer) if wrapped else optimizer}

    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(**tracked(1))
        ckpt.save(1).result()
    refused(tmp_path, r"optimizer: state\[0\]\['exp_avg'\]: \(30, 20\).*the parameter is \(30,\)", **tracked(-1))


@pytest.mark.parametrize("hook", ["before", "instead"])
def test_an_optimizer_with_load_hooks_is_not_tried(hook: str, tmp_path: Path) -> None:
    """Regression: restore() refused a state that a hook makes readable."""

    def rename(state: Any, before: str, after: str) -> Any:
        for of_parameter in state["state"].values():
            if before in of_parameter:
                of_parameter[after] = of_parameter.pop(before)
        return state

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = trained(torch.optim.AdamW)
        optimizer.register_state_dict_post_hook(lambda _, state: rename(state, "step", "count"))
        if hook == "before":
            optimizer.register_load_state_dict_pre_hook(lambda _, state: rename(state, "count", "step"))
        else:
            load = optimizer.load_state_dict
            optimizer.load_state_dict = lambda state: load(rename(state, "count", "step"))  # type: ignore[method-assign]
        return model, optimizer

    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        model, optimizer = make()
        ckpt.track(model=model, optimizer=optimizer)
        ckpt.save(1).result()
    model, optimizer = make()
    optimizer.step()
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        assert ckpt.restore() == 1
    assert [state["step"].item() for state in optimizer.state.values()] == [1, 1]


def test_a_position_beyond_the_end_of_a_loader_touches_nothing(tmp_path: Path) -> None:
    """Regression: the model was overwritten, and the first next() raised."""

    def tracked(size: int) -> dict[str, Any]:
        loader = lazyckpt.providers.data_loader.track_loader(
            torch.utils.data.DataLoader(list(range(size)), batch_size=2)
        )
        return {"model": nn.Linear(20, 20), "loader": loader}

    saved = tracked(40)
    batches = iter(saved["loader"])
    for _ in range(15):
        next(batches)
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(**saved)
        ckpt.save(1).result()
    refused(tmp_path, "loader: .*batches of an epoch: 20 then, 5 now", **tracked(10))


def test_a_load_that_raises_midway_says_what_is_overwritten(tmp_path: Path) -> None:
    class Refusing:
        def state_dict(self) -> Any:
            return {"x": 1}

        def load_state_dict(self, state: Any) -> None:
            raise ValueError("not today")

    def track(ckpt: lazyckpt.Checkpointer) -> nn.Module:
        model = nn.Linear(20, 20)
        ckpt.track(notes={"x": 1}, own=Refusing(), later={"y": 1}, model=model)
        return model

    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        saved = track(ckpt)
        ckpt.save(1).result()
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        model = track(ckpt)
        fates = r"overwritten: notes, model; perhaps overwritten in part: own; as before: later, rng"
        with pytest.raises(RestoreError, match=rf"undefined now: own: ValueError: not today \({fates}\)"):
            ckpt.restore()
    assert torch.equal(model.weight, saved.weight)
