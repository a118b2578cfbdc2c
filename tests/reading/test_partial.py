"""A part of a checkpoint into something else: what fits is taken, the rest is told, and nothing is guessed."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lazyckpt
from lazyckpt.errors import ConfigError, LoadError, RestoreError
from lazyckpt.reading.ranges import ParallelRead


def make(*, out: int = 3, seed: int = 0, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, out))
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    model(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, torch.Tensor]:
    model, optimizer = make()
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model, optimizer=optimizer, extra={"best": 1.5})
        ckpt.track_loader(torch.utils.data.DataLoader(range(10)))  # type: ignore[arg-type]
        ckpt.save(3).result()
    return copy.deepcopy(model.state_dict())


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes of every read of storages."""
    counts: list[int] = []
    begin = ParallelRead.__init__

    def count(self: Any, path: Any, records: Any, engine: Any) -> None:
        counts.append(sum(record.nbytes for record in records))
        begin(self, path, records, engine)

    monkeypatch.setattr(ParallelRead, "__init__", count)
    yield counts


def into(folder: Path, state: dict[str, Any], **how: Any) -> Any:
    with lazyckpt.Checkpointer(folder, read_only=True) as ckpt:
        ckpt.track(**state)
        return ckpt.restore(**how)


def nbytes(state: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# parts


def test_only_what_is_asked_for_is_restored_and_read(saved: Any, tmp_path: Path, read_bytes: list[int]) -> None:
    model, optimizer = make(seed=1)
    before = copy.deepcopy(optimizer.state_dict())
    assert into(tmp_path, {"model": model, "optimizer": optimizer}, only=["model"]) == 3
    assert equal(model.state_dict(), saved) and str(optimizer.state_dict()) == str(before)
    assert read_bytes == [nbytes(saved)]


def test_strict_false_takes_what_both_have_and_tells_the_rest(saved: Any, tmp_path: Path) -> None:
    model, _ = make(seed=1)
    model.append(nn.Linear(3, 2))
    model[0] = nn.Linear(64, 64, bias=False)
    ema = torch.full((2,), 7.0)
    new = model[3].weight.detach().clone()
    with pytest.raises(RestoreError, match=r"\n  restore\(strict=False\) takes what fits$"):
        into(tmp_path, {"model": model, "ema": ema})
    restored = into(tmp_path, {"model": model, "ema": ema}, strict=False)
    assert (restored.step, restored.path) == (3, tmp_path / "step-00000003") and restored.parts == ("model", "rng")
    assert restored.missing == ("ema", "model.3.weight", "model.3.bias")
    assert restored.unexpected == ("optimizer", "extra", "loader", "model.0.bias")
    assert torch.equal(model[0].weight, saved["0.weight"]) and torch.equal(model[3].weight, new)
    assert torch.equal(ema, torch.full((2,), 7.0))


def test_a_loader_may_be_left_out(saved: Any, tmp_path: Path) -> None:
    model, optimizer = make(seed=1)
    state = {"model": model, "optimizer": optimizer, "extra": {}}
    with pytest.raises(RestoreError, match="loader: in the checkpoint, but not tracked"):
        into(tmp_path, state)
    restored = into(tmp_path, state, loader=False, strict=False)
    assert restored.parts == ("model", "optimizer", "extra", "rng") and restored.missing == restored.unexpected == ()
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(**state)
        ckpt.track_loader(torch.utils.data.DataLoader(range(4), batch_size=2))  # type: ignore[arg-type]
        assert ckpt.restore(loader=False) == 3


@pytest.mark.parametrize(
    "how, message",
    [
        ({"only": ["modl"]}, "'modl': nothing of that name is tracked; there is: model, rng"),
        ({"only": []}, "restores nothing"),
        ({"rename": 3}, "rename=3"),
        ({"only": "model", "rename": lambda name: "same"}, "both '0.weight' and '0.bias' become 'same'"),
        ({"step": 3, "best": True}, "one of step, path and best"),
    ],
)
def test_arguments_that_make_no_sense(saved: Any, tmp_path: Path, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        into(tmp_path, {"model": make()[0]}, **how)


# names, shapes, dtypes


def test_names_that_differ_by_a_prefix_are_one_line(saved: Any, tmp_path: Path) -> None:
    model, _ = make(seed=1)
    wrapped = nn.ModuleDict({"module": model})
    with pytest.raises(RestoreError) as caught:
        into(tmp_path, {"model": wrapped}, only="model")
    line, cure = str(caught.value).splitlines()[1:]
    assert "differ by a prefix alone" in line
    assert cure == '  restore(only=["model"], rename={"": "module."}) takes what fits'
    into(tmp_path, {"model": wrapped}, only="model", rename={"": "module."})
    assert equal(model.state_dict(), saved)


def test_a_compiled_model_takes_a_plain_checkpoint(saved: Any, tmp_path: Path) -> None:
    model, _ = make(seed=1)
    compiled = torch.compile(model)
    with pytest.raises(RestoreError, match=r'rename=\{"": "_orig_mod."\}\) takes'):
        into(tmp_path, {"model": compiled}, only="model")
    into(tmp_path, {"model": compiled}, only="model", rename={"": "_orig_mod."})
    assert equal(model.state_dict(), saved)


def test_another_shape_is_an_error_unless_it_is_left_out(saved: Any, tmp_path: Path) -> None:
    model, _ = make(out=5, seed=1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RestoreError) as caught:
        into(tmp_path, {"model": model}, only="model", strict=False)
    assert equal(model.state_dict(), before)
    line = 'restore(only=["model"], strict=False, rename={"2.weight": None, "2.bias": None}) takes what fits'
    assert line in str(caught.value)
    rename = {"2.weight": None, "2.bias": None}
    restored = into(tmp_path, {"model": model}, only="model", strict=False, rename=rename)
    assert restored.missing == ("model.2.weight", "model.2.bias")
    assert torch.equal(model[0].weight, saved["0.weight"]) and torch.equal(model[2].weight, before["2.weight"])


def test_another_dtype_is_converted_when_asked(saved: Any, tmp_path: Path) -> None:
    model = make(seed=1)[0].bfloat16()
    with pytest.raises(RestoreError) as caught:
        into(tmp_path, {"model": model}, only="model")
    lines = str(caught.value).splitlines()[1:]
    assert lines == [
        "  model: 8 of 9 entries are float32 in the checkpoint and bfloat16 in the model",
        '  restore(only=["model"], cast=True) takes what fits',
    ]
    into(tmp_path, {"model": model}, only="model", cast=True)
    assert equal(model.state_dict(), {k: v.to(model.state_dict()[k].dtype) for k, v in saved.items()})


def test_renamed_modules_keep_their_versions(tmp_path: Path) -> None:
    """torch gives a batch norm of an old version a counter, and expects it of a new one."""
    norm = nn.ModuleDict({"norm": nn.BatchNorm1d(2)})
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=norm)
        ckpt.save(1).result()
    with pytest.raises(RestoreError, match="num_batches_tracked: not in the checkpoint"):
        into(
            tmp_path,
            {"model": nn.ModuleDict({"bn": nn.BatchNorm1d(2)})},
            only="model",
            rename=lambda name: None if name.endswith("tracked") else name.replace("norm.", "bn."),
        )


# another kind


@pytest.mark.parametrize(
    "was, now",
    [(torch.optim.SGD, torch.optim.AdamW), (torch.optim.AdamW, torch.optim.SGD), (torch.optim.Adam, torch.optim.AdamW)],
)
def test_another_optimizer_is_told_before_anything_is_touched(tmp_path: Path, was: Any, now: Any) -> None:
    model, optimizer = make(kind=was)
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        ckpt.save(1).result()
    model, optimizer = make(kind=now, seed=1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RestoreError) as caught:
        into(tmp_path, {"model": model, "optimizer": optimizer})
    assert f"optimizer: {was.__name__} in the checkpoint, {now.__name__} here" in str(caught.value)
    assert 'restore(only=["model", "rng"])' in str(caught.value)
    assert equal(model.state_dict(), before)
    assert into(tmp_path, {"model": model, "optimizer": optimizer}, only=["model", "rng"]) == 1


def test_not_strictly_another_optimizer_gets_the_state_with_a_warning(tmp_path: Path) -> None:
    model, optimizer = make(kind=torch.optim.Adam)
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        ckpt.save(1).result()
    model, optimizer = make()
    state = {"model": model, "optimizer": optimizer}
    with pytest.warns(UserWarning, match="another class: optimizer: Adam in the checkpoint, AdamW here"):
        assert into(tmp_path, state, strict=False).parts == ("model", "optimizer", "rng")
    assert into(tmp_path, state, strict=False, only=["model"]).parts == ("model",)


def test_a_loader_that_was_built_otherwise_has_one_cure(tmp_path: Path) -> None:
    """The error used to propose ``only=``, too, which leaves out the random state."""
    data = list(range(8))
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=nn.Linear(2, 2))
        for _ in ckpt.track_loader(torch.utils.data.DataLoader(data, batch_size=2)):
            ckpt.save(1).result()
            break
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=nn.Linear(2, 2))
        ckpt.track_loader(torch.utils.data.DataLoader(data, batch_size=4))
        with pytest.raises(
            RestoreError, match=r"\(batch size: 2 then, 4 now(?s:.*)\n  restore\(loader=False\) takes what fits$"
        ):
            ckpt.restore()
        assert ckpt.restore(loader=False) == 1


def test_the_folder_of_a_run_is_no_checkpoint(saved: Any, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"the folder of a run: name a checkpoint in it, such as .*/step-00000003"):
        lazyckpt.load(tmp_path)


def test_another_scheduler_is_told(tmp_path: Path) -> None:
    _, optimizer = make()
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3))
        ckpt.save(1).result()
    other = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    with pytest.raises(RestoreError, match="scheduler: StepLR in the checkpoint, CosineAnnealingLR here"):
        into(tmp_path, {"scheduler": other})


def test_a_class_of_the_users_is_what_it_derives_from(tmp_path: Path) -> None:
    class Mine(torch.optim.AdamW):
        pass

    for number, (was, now) in enumerate([(Mine, torch.optim.AdamW), (torch.optim.AdamW, Mine)]):
        model, optimizer = make(kind=was)
        with lazyckpt.Checkpointer(tmp_path / str(number)) as ckpt:
            ckpt.track(model=model, optimizer=optimizer)
            ckpt.save(1).result()
        model, optimizer = make(kind=now)
        assert into(tmp_path / str(number), {"model": model, "optimizer": optimizer}) == 1


# load


def test_a_key_is_loaded_alone(saved: Any, tmp_path: Path, read_bytes: list[int]) -> None:
    step = tmp_path / "step-00000003"
    assert equal(lazyckpt.load(step, key="model"), saved) and read_bytes == [nbytes(saved)]
    assert torch.equal(lazyckpt.load(step, key="model.0.weight"), saved["0.weight"])
    assert read_bytes[1:] == [saved["0.weight"].nbytes]
    assert lazyckpt.load(step, key="extra.best") == 1.5 and read_bytes[2:] == [0]
    assert equal(lazyckpt.load(step, "cpu", weights_only=False, key="model"), saved)
    with pytest.raises(LoadError, match="there is no 'modl'; there is: model, optimizer, extra, loader, rng"):
        lazyckpt.load(step, key="modl")


def test_a_damaged_optimizer_does_not_keep_the_model_from_being_loaded(saved: Any, tmp_path: Path) -> None:
    file = tmp_path / "step-00000003" / "state.pt"
    everything = torch.load(file)
    moment = everything["optimizer"]["state"][0]["exp_avg"].numpy().tobytes()
    data = bytearray(file.read_bytes())
    data[data.index(moment) + 8] ^= 1
    file.write_bytes(data)
    assert equal(lazyckpt.load(file, key="model"), saved)
    with pytest.raises(lazyckpt.CorruptFileError):
        lazyckpt.load(file, key="optimizer")


def test_a_pickle_that_needs_bytes_is_read_whole(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    lazyckpt.save({"a": nested, "b": torch.arange(3.0)}, tmp_path / "x.pt")
    with torch.serialization.safe_globals([torch._utils._rebuild_nested_tensor]):  # torch 2.15 no longer trusts it
        assert torch.equal(lazyckpt.load(tmp_path / "x.pt", key="b"), torch.arange(3.0))


def test_load_renames_and_converts(saved: Any, tmp_path: Path) -> None:
    step = tmp_path / "step-00000003"
    state = lazyckpt.load(step, key="model", rename={"0.": "first.", "1.": None}, dtype=torch.bfloat16)
    assert list(state) == ["first.weight", "first.bias", "2.weight", "2.bias"]
    assert torch.equal(state["first.weight"], saved["0.weight"].bfloat16())
    assert lazyckpt.load(step, key="model", dtype=torch.float16)["1.num_batches_tracked"].dtype is torch.int64
    with pytest.raises(ConfigError, match="rename is for a dict with names as keys, not Tensor; give a key"):
        lazyckpt.load(step, key="model.0.weight", rename={"a": "b"})
    with pytest.raises(ConfigError, match=r"dtype=torch\.int8"):
        lazyckpt.load(step, dtype=torch.int8)


def test_what_was_one_tensor_stays_one_when_it_is_converted(tmp_path: Path) -> None:
    tied = torch.ones(3)
    lazyckpt.save({"a": [tied, (tied, 1)], "b": tied}, tmp_path / "x.pt")
    loaded = lazyckpt.load(tmp_path / "x.pt", dtype=torch.float64)
    assert loaded["a"][0] is loaded["a"][1][0] is loaded["b"] and loaded["b"].dtype is torch.float64


def test_a_safetensors_file_gives_a_tensor_by_key(tmp_path: Path, read_bytes: list[int]) -> None:
    state = {"a.w": torch.arange(3.0), "b": torch.zeros(100)}
    lazyckpt.save(state, tmp_path / "x.safetensors")
    assert torch.equal(lazyckpt.load(tmp_path / "x.safetensors", key="a.w"), state["a.w"]) and read_bytes == [12]
    assert list(lazyckpt.load(tmp_path / "x.safetensors", rename={"a.": ""}, dtype=torch.float16)) == ["w", "b"]
    with pytest.raises(LoadError, match=r"there is no 'c'; there is: a\.w, b"):
        lazyckpt.load(tmp_path / "x.safetensors", key="c")


# what a key reaches


def test_a_storage_under_a_key_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    storage = torch.arange(5000.0).untyped_storage()
    torch.save({"storage": storage, "more": {"typed": storage}, "other": torch.ones(5000)}, file)
    for found in (lazyckpt.load(file, key="storage"), lazyckpt.load(file, key="more")["typed"]):
        assert bytes(found.untyped()) == bytes(storage)


def test_tensors_beside_the_entries_of_a_dict_are_read(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    state = OrderedDict(weight=torch.ones(3))
    vars(state)["hidden"] = torch.full((5000,), 5.0)
    torch.save({"model": state, "by tensor": {torch.full((5000,), 6.0): 1}}, file)
    assert lazyckpt.load(file, key="model").hidden.eq(5.0).all()
    assert next(iter(lazyckpt.load(file, key="by tensor"))).eq(6.0).all()


def test_a_key_with_a_dot_comes_before_a_part_of_a_part(tmp_path: Path) -> None:
    torch.save({"a": {"x": 1}, "a.b": {"c": 2}}, tmp_path / "file.pt")
    assert lazyckpt.load(tmp_path / "file.pt", key="a.b.c") == 2 and lazyckpt.load(tmp_path / "file.pt", key="a.x") == 1


@pytest.mark.parametrize("of", ["load", "restore"])
def test_a_rename_with_a_memory_is_asked_once(saved: Any, tmp_path: Path, of: str) -> None:
    names = iter(saved)
    folder = tmp_path / "step-00000003"
    if of == "load":
        found = lazyckpt.load(folder, key="model", rename=lambda name: next(names))
    else:
        model, _ = make(seed=1)
        into(tmp_path, {"model": model}, only=["model"], rename=lambda name: next(names))
        found = model.state_dict()
    assert equal(found, saved)


def test_a_lazy_module_that_was_added_stays_as_it_is(saved: Any, tmp_path: Path) -> None:
    model = nn.Sequential(*make(seed=1)[0], nn.LazyLinear(5))
    restored = into(tmp_path, {"model": model}, only=["model"], strict=False)
    assert restored.missing == ("model.3.weight", "model.3.bias")
    assert equal({key: value for key, value in model.state_dict().items() if key in saved}, saved)


@pytest.mark.parametrize("only", [5, [["model"]], [5, "model"]])
def test_only_takes_names(saved: Any, tmp_path: Path, only: Any) -> None:
    with pytest.raises(ConfigError, match="only"):
        into(tmp_path, {"model": make()[0]}, only=only)


def test_only_the_loader_without_the_loader_is_nothing(saved: Any, tmp_path: Path) -> None:
    with lazyckpt.Checkpointer(tmp_path, read_only=True) as ckpt:
        ckpt.track_loader(torch.utils.data.DataLoader(range(10)))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="restores nothing"):
            ckpt.restore(only=["loader"], loader=False)


def test_a_key_is_text(tmp_path: Path) -> None:
    torch.save({3: torch.ones(1)}, tmp_path / "file.pt")
    with pytest.raises(ConfigError, match="key=3"):
        lazyckpt.load(tmp_path / "file.pt", key=3)  # type: ignore[arg-type]
