"""What ``restore()`` returns is the step; parts may have other names; and weights are never left out in silence."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lazyckpt
from lazyckpt import ConfigError, Restored, RestoreError


def make(seed: int, shards: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if shards:
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(folder: Path, step: int = 3, shards: bool = False) -> None:
    model, optimizer = make(0, shards)
    with lazyckpt.Checkpointer(folder) as ckpt:
        ckpt.track(model=model, ema=make(5, shards)[0], optimizer=optimizer, notes={"a": 1})
        ckpt.save(step).result()


def into(folder: Path, tracked: dict[str, Any], **how: Any) -> Any:
    with lazyckpt.Checkpointer(folder, read_only=True) as ckpt:
        ckpt.track(**tracked)
        return ckpt.restore(**how)


def values(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return getattr(tree, "full_tensor", lambda: tree)().tolist()
    if isinstance(tree, dict):
        return {key: values(value) for key, value in tree.items()}
    return [values(value) for value in tree] if isinstance(tree, list) else tree


# the step


@pytest.mark.parametrize("how", [{}, {"strict": False}, {"step": 3}, {"only": ["model"]}])
def test_the_step_comes_back_as_a_number_that_tells_more(how: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path)
    model, optimizer = make(1)
    tracked = {"model": model, "ema": make(1)[0], "optimizer": optimizer, "notes": {}}
    restored = into(tmp_path, tracked, **how)
    assert type(restored) is Restored and restored == 3 == restored.step and (restored or 0) + 1 == 4
    assert type(restored + 1) is type(restored.step) is type(next(iter(range(restored, 5)))) is int
    assert restored.path == tmp_path / "step-00000003" and "model" in restored.parts
    assert f"{restored}" == str(restored) == "3" and f"{restored:04d}" == "0003" and json.dumps(restored) == "3"
    assert repr(restored).startswith("Restored(3, path=") and "parts=('model'" in repr(restored)
    assert {3: "a"}[restored] == "a" and hash(restored) == hash(3)


def test_step_0_is_false_and_nothing_is_none(tmp_path: Path) -> None:
    model = make(1)[0]
    assert into(tmp_path, {"model": model}) is None
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(model=model)
        ckpt.save(0).result()
        restored = ckpt.restore()
    assert restored is not None and restored.parts == ("model", "rng") and (restored or 0) == 0


def test_a_copy_is_a_plain_int_and_may_be_tracked(tmp_path: Path) -> None:
    save(tmp_path / "a")
    restored = into(tmp_path / "a", {"model": make(1)[0]}, only=["model"])
    for found in (copy.copy(restored), copy.deepcopy(restored), pickle.loads(pickle.dumps(restored))):
        assert type(found) is int and found == 3
    with lazyckpt.Checkpointer(tmp_path / "b") as ckpt:
        ckpt.track(notes={"resumed": restored, "all": [restored]})
        path = ckpt.save(4).result()
    notes = lazyckpt.load(path)["notes"]
    assert notes == {"resumed": 3, "all": [3]} and type(notes["resumed"]) is type(notes["all"][0]) is int


def test_rollback_returns_the_same(tmp_path: Path) -> None:
    save(tmp_path)
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        net, _ = make(1)
        ckpt.track(net=net)
        restored = ckpt.rollback(3, only=["net"], parts={"net": "ema"})
    assert restored == 3 and restored.parts == ("net",)
    assert values(net.state_dict()) == values(make(5)[0].state_dict())


# other names


def under_other_names(folder: Path, shards: bool) -> None:
    model, optimizer = make(0, shards)
    average = make(5, shards)[0]
    expected = values([model.state_dict(), average.state_dict(), optimizer.state_dict()])
    names = {"net": "model", "average": "ema", "adam": "optimizer", "words": "notes"}
    for how in ({}, {"strict": False}, {"only": ["net", "average", "adam"]}):
        net, adam = make(1, shards)
        tracked = {"net": net, "average": make(2, shards)[0], "adam": adam, "words": {}}
        restored = into(folder, tracked, parts=names, **how)
        assert set(tracked) - set(restored.parts) <= {"words"} and restored.missing == restored.unexpected == ()
        assert values([tracked[name].state_dict() for name in ("net", "average", "adam")]) == expected
    net, other = make(1, shards)[0], make(2, shards)[0]
    into(folder, {"model": net, "ema": other}, parts={"model": "ema", "ema": "model"}, only=["model", "ema"])
    assert values([other.state_dict(), net.state_dict()]) == expected[:2]
    # What another part has been taken for is not taken by its own name.
    net, ema = make(1, shards)[0], make(2, shards)[0]
    restored = into(folder, {"net": net, "ema": ema}, parts={"net": "ema", "ema": "average"}, strict=False)
    assert restored.missing == ("ema",) and set(restored.unexpected) == {"model", "optimizer", "notes"}


def test_a_part_is_taken_under_another_name(tmp_path: Path) -> None:
    save(tmp_path)
    under_other_names(tmp_path, False)


def saved_and_under_other_names(folder: Path) -> None:
    save(folder, shards=True)
    under_other_names(folder, True)


def test_a_part_is_taken_under_another_name_on_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks.run(2, saved_and_under_other_names, tmp_path)


def test_a_part_is_taken_under_another_name_from_a_folder_into_a_plain_model(ranks: Any, tmp_path: Path) -> None:
    ranks.run(2, save, tmp_path, 3, True)
    under_other_names(tmp_path, False)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"nte": "model"}, "nothing is tracked as 'nte'; there is: net, more, rng"),
        ({"net": 3}, "expected tracked names"),
        ("net", "expected tracked names"),
        ({"net": "model", "more": "model"}, "'net' and 'more' would both take 'model'"),
    ],
)
def test_names_that_make_no_sense(parts: Any, why: str, tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(ConfigError, match=why):
        into(tmp_path, {"net": make(1)[0], "more": make(2)[0]}, parts=parts)


def test_a_name_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(RestoreError, match="net: not in the checkpoint"):
        into(tmp_path, {"net": make(1)[0]}, parts={"net": "modle"})


# no weights


def test_a_restore_that_would_take_no_weights_is_refused_and_lists_both_sides(tmp_path: Path) -> None:
    """Regression: it returned ``parts=("rng",)``, and training went on with random weights."""
    save(tmp_path)
    net = make(1)[0]
    before = values(net.state_dict())
    random = torch.get_rng_state()
    with pytest.raises(RestoreError) as caught:
        into(tmp_path, {"net": net}, strict=False)
    assert "net (0.weight, 0.bias, …)" in str(caught.value) and "model (0.weight, 0.bias, …)" in str(caught.value)
    assert str(tmp_path / "step-00000003") in str(caught.value) and "nothing was restored" in str(caught.value)
    assert values(net.state_dict()) == before and torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("how", [{}, {"only": ["model"]}, {"rename": {"0.": None, "1.": None}}])
def test_so_is_one_that_takes_no_entry_of_a_module(how: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path)
    model = nn.ModuleDict({"first": nn.Linear(4, 4)}) if "rename" not in how else make(1)[0]
    with pytest.raises(RestoreError, match=r"no weights for the tracked state.*model \("):
        into(tmp_path, {"model": model}, strict=False, **how)


def refused_on_ranks(folder: Path) -> None:
    save(folder, shards=True)
    with pytest.raises(RestoreError, match="no weights for the tracked state: tracked is net"):
        into(folder, {"net": make(1, True)[0]}, strict=False)


def test_so_is_it_on_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks.run(2, refused_on_ranks, tmp_path)


def test_one_of_two_modules_is_enough_and_none_need_be_tracked(tmp_path: Path) -> None:
    save(tmp_path)
    model, optimizer = make(1)
    assert "model" in into(tmp_path, {"model": model, "more": make(2)[0]}, strict=False).parts
    assert into(tmp_path, {"notes": {}}, strict=False).parts == ("notes", "rng")
    assert into(tmp_path, {"net": model, "optimizer": optimizer}, strict=False, only=["optimizer"]) == 3
    assert into(tmp_path, {"act": nn.ReLU(), "notes": {}}, strict=False).missing == ("act",)
