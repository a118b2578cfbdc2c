"""The names of a DCP folder: those of torch's own planner, and nothing of the state is lost under them."""

from __future__ import annotations

import collections

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from lazyckpt.providers.global_state import by_number, global_state, name_of, parameter_names, unflatten
from lazyckpt.providers.objects import StateProvider
from lazyckpt.providers.training import RngProvider, provider_for


class Held(StateProvider):
    def __init__(self, state):
        super().__init__()
        self._state = state

    def state(self):
        return self._state

    def load_state(self, state):
        self._state = state


def trained(**kwargs):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(
        [{"params": model[2].parameters(), "lr": 0.5}, {"params": model[:2].parameters()}], **kwargs
    )
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_names_are_those_of_torch():
    model, optimizer = trained()
    parts = {"model": provider_for("model", model), "optimizer": provider_for("optimizer", optimizer)}
    theirs, _ = flatten_state_dict(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    )
    ours = {name_of(path): value for path, value in global_state(parts, 0).items()}
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert ours[name].data_ptr() == value.data_ptr()  # the live tensor, not a copy
        else:
            assert ours[name] == value


def test_an_optimizer_gets_its_numbers_back():
    model, optimizer = trained(amsgrad=True)
    parts = {"net": provider_for("net", model), "opt": provider_for("opt", optimizer)}
    state = unflatten(global_state(parts, 0))["opt"]
    back = by_number(state, optimizer, parameter_names(parts))
    assert back["param_groups"] == optimizer.state_dict()["param_groups"]
    assert back["state"].keys() == optimizer.state_dict()["state"].keys()
    assert back["state"][1]["exp_avg"] is optimizer.state_dict()["state"][1]["exp_avg"]


def test_a_parameter_outside_of_all_modules_keeps_its_number():
    lone = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([lone], lr=0.1, momentum=0.9)
    lone.sum().backward()
    optimizer.step()
    names = map(name_of, global_state({"optimizer": provider_for("optimizer", optimizer)}, 0))
    assert "optimizer.state.0.momentum_buffer" in names


def test_equal_names_in_two_modules_stay_apart():
    one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1, momentum=0.9)
    (one(torch.ones(2)) + two(torch.ones(2))).sum().backward()
    optimizer.step()
    parts = {"g": provider_for("g", one), "d": provider_for("d", two), "opt": provider_for("opt", optimizer)}
    names = list(map(name_of, global_state(parts, 0)))
    assert "opt.state.g.weight.momentum_buffer" in names
    assert "opt.state.d.weight.momentum_buffer" in names


def test_what_each_rank_has_of_its_own_bears_its_rank():
    assert list(global_state({"rng": RngProvider()}, 3)) == [("rng", "3")]


keys = st.text(alphabet="ab.", min_size=1, max_size=3) | st.integers(0, 3)
leaves = st.none() | st.integers() | st.text(max_size=3) | st.tuples(st.integers())
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=12
)


@given(st.dictionaries(st.sampled_from("xyz"), trees, min_size=1))
def test_nothing_is_lost(state):
    found = global_state({name: Held(value) for name, value in state.items()}, 0)
    assert unflatten(found) == state


def test_counters_with_numbers_as_keys_come_back():
    """torch's own flattening makes texts of the numbers, and MultiStepLR then never steps again."""
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 5])
    back = unflatten(global_state({"scheduler": provider_for("scheduler", scheduler)}, 0))["scheduler"]
    assert back["milestones"] == collections.Counter({2: 1, 5: 1})


@pytest.mark.parametrize(
    "paths", [[("a", 1)], [("a",), ("a", "b")], [("a", "b"), ("a", 0)], [("a", -1)], [("a", 1 << 40)]]
)
def test_paths_that_nobody_wrote_are_refused(paths):
    with pytest.raises(ValueError):
        unflatten({path: None for path in paths})
