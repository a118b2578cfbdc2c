"""Several providers as one: a dict by name, errors by name, and restore in the order of tracking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.errors import RestoreError
from lazyckpt.providers.base import StorageTable
from lazyckpt.providers.composite import CompositeProvider, UnpicklableError
from lazyckpt.providers.training import provider_for


def composite(**state: Any) -> CompositeProvider:
    provider = CompositeProvider()
    provider.parts = {name: provider_for(name, obj) for name, obj in state.items()}
    return provider


def test_an_error_names_the_part() -> None:
    provider = composite(good=[1], bad=[lambda: None])
    with pytest.raises(UnpicklableError, match=r"'bad' cannot be pickled.*lambda") as caught:
        provider.opcodes(StorageTable(map(str, range(9))))
    assert caught.value.__cause__ is not None


def test_all_problems_of_all_parts_are_listed_at_once() -> None:
    provider = composite(
        a=torch.nn.Linear(2, 3), b=torch.nn.Linear(4, 1, bias=False), c={"x": 1}, t=torch.zeros(2, dtype=torch.int8)
    )
    saved = {
        "a": {"weight": torch.zeros(5, 2), "extra": torch.zeros(1)},
        "b": {"weight": torch.zeros(1, 4, dtype=torch.float16)},
        "t": torch.zeros(3),
        "d": 1,
    }
    with pytest.raises(RestoreError) as caught:
        provider.landings(saved)
    lines = str(caught.value).splitlines()
    assert lines == [
        "c: not in the checkpoint",
        "d: in the checkpoint, but not tracked",
        "a: bias: not in the checkpoint",
        "a: extra: in the checkpoint, but not in the model",
        "a: weight: (5, 2) float32 in the checkpoint, (3, 2) float32 in the model",
        "b: 1 of 1 entries are float16 in the checkpoint and float32 in the model",
        "t: saved (3,) float32, tracked (2,) int8",
    ]


def test_something_that_is_no_checkpoint_at_all() -> None:
    with pytest.raises(RestoreError, match="expected a dict of a, found list"):
        composite(a=[1]).landings([1])


def test_names_may_be_any_identifier(tmp_path: Path) -> None:
    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(**{"größe": {"x": 1}, "a.b/c": [2], "": [3]})
        state = torch.load(ckpt.save(1).result() / "state.pt")
        assert state["größe"] == {"x": 1} and state["a.b/c"] == [2] and state[""] == [3]


def test_names_of_storages() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    deep = torch.ones(3)
    provider = composite(model=model, optimizer=optimizer, extra={"list": [0, (deep,)]})
    assert provider.name_of(model[1].bias.untyped_storage()) == "model.1.bias"
    state = optimizer.state[model[1].bias]["exp_avg_sq"]
    assert provider.name_of(state.untyped_storage()) == "optimizer.state.3.exp_avg_sq"
    assert provider.name_of(deep.untyped_storage()) == "extra.list.1.0"
    assert provider.name_of(torch.ones(1).untyped_storage()) is None


def test_the_rng_is_restored_last(tmp_path: Path) -> None:
    """Loading something else may draw random numbers; the run continues as if it had not."""

    class Drawing(lazyckpt.StateProvider):
        def state(self) -> Any:
            return 1

        def load_state(self, state: Any) -> None:
            torch.rand(100)

    with lazyckpt.Checkpointer(tmp_path) as ckpt:
        ckpt.track(drawing=Drawing())
        ckpt.save(1).result()
        expected = torch.rand(3)
        ckpt.restore()
        assert torch.equal(torch.rand(3), expected)
