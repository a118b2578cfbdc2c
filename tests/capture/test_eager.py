"""A warning names, once, state that could be lazy; there is none if little can be gained."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.capture import eager

pytestmark = pytest.mark.usefixtures("small_tensors_are_lazy")


@pytest.fixture(autouse=True)
def small_states_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of these runs has 3 MB."""
    monkeypatch.setattr(eager, "MIN_BYTES", 64 << 10)


class Ema(torch.nn.Module):
    """An average as it is commonly written."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)
        self.module.requires_grad_(False)

    @torch.no_grad()
    def update(self, model: torch.nn.Module) -> None:
        for average, p in zip(self.parameters(), model.parameters(), strict=True):
            average.lerp_(p, 0.1)


def saves(run: Any, *writes: Callable[[], Any], steps: int = 5, between: int = 1) -> list[lazyckpt.SaveHandle]:
    handles = []
    for step in range(steps):
        for _ in range(between):
            run.step()
        for write in writes:
            write()
        handles.append(run.ckpt.save(step))
        handles[-1].result()
    return handles


def saves_untold(run: Any, *writes: Callable[[], Any], **options: int) -> list[lazyckpt.SaveHandle]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handles = saves(run, *writes, **options)
    assert [str(w.message) for w in caught if "lazyckpt.guard" in str(w.message)] == []
    return handles


@pytest.mark.parametrize("trains", [False, True])
def test_an_average_of_ones_own_is_told_once_and_lazy_under_guard(trains: bool, make_run: Any) -> None:
    run = make_run()
    average = Ema(run.model)
    average.requires_grad_(trains)
    run.ckpt.track(ema=average)
    with pytest.warns(UserWarning, match="lazyckpt.guard") as caught:
        saves(run, lambda: average.update(run.model), steps=3)
        saves(run, lambda: average.update(run.model))
    (message,) = [str(w.message) for w in caught if "lazyckpt.guard" in str(w.message)]
    assert message.startswith("25% of the checkpoint (0 MiB) is copied inside save() each time, since no optimizer")
    assert all(f"ema.module.{layer}.weight" in message for layer in range(3)) and "and 0 more" not in message
    lazyckpt.guard(average, "update")
    handle = saves(run, lambda: average.update(run.model))[-1]
    assert handle.metrics.eager_bytes < handle.metrics.bytes / 20


def test_not_of_small_states(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "MIN_BYTES", 1 << 20)
    run = make_run()
    average = Ema(run.model)
    run.ckpt.track(ema=average)
    saves_untold(run, lambda: average.update(run.model))


def constants(run: Any) -> Callable[[], None]:
    run.ckpt.track(data={"rows": torch.ones(1 << 20)})
    return lambda: None


def frozen_parameters(run: Any) -> Callable[[], None]:
    run.ckpt.track(teacher=torch.nn.Linear(1 << 10, 1 << 10).requires_grad_(False))
    return lambda: None


def buffers(run: Any) -> Callable[[], None]:
    """As of a memory bank: ``guard`` would leave it eager."""
    bank = torch.nn.Module()
    bank.register_buffer("queue", torch.ones(1 << 20))
    run.ckpt.track(bank=bank)
    return lambda: bank.queue.add_(1)  # type: ignore[no-any-return, operator, union-attr]


def fresh_tensors(run: Any) -> Callable[[], None]:
    """Made for each save, as by a state_dict() that copies; some at the address of those before."""
    state: dict[str, Any] = {}
    run.ckpt.track(state=state)

    def make() -> None:
        value = int(state.pop("rows", torch.zeros(1))[0]) + 1
        gc.collect()
        state["rows"] = torch.full((1 << 20,), float(value))

    return make


def a_momentum_encoder(run: Any) -> Callable[[], None]:
    """A member of the optimizer's groups: that is why it is eager."""
    encoder = copy.deepcopy(run.model).requires_grad_(False)
    run.optimizer.add_param_group({"params": list(encoder.parameters())})
    run.ckpt.track(encoder=encoder)
    return lambda: torch._foreach_mul_(list(encoder.parameters()), 0.9)


@pytest.mark.parametrize("make", [constants, frozen_parameters, buffers, fresh_tensors, a_momentum_encoder])
def test_not_of_what_no_guard_would_help(make: Callable[[Any], Callable[[], None]], make_run: Any) -> None:
    run = make_run()
    handles = saves_untold(run, make(run))
    assert handles[1].metrics.eager_bytes > handles[1].metrics.bytes / 5, "it is eager"


def test_not_where_no_step_was_taken_between_the_saves(make_run: Any) -> None:
    """Then all of it is eager, whatever is guarded."""
    run = make_run()
    average = Ema(run.model)
    run.ckpt.track(ema=average)
    run.ckpt.save(0).result()
    saves_untold(run, lambda: torch._foreach_mul_(list(average.parameters()), 0.9), between=0)


def test_not_of_what_was_torn(make_run: Any) -> None:
    """It stays eager, and the error has named it and the cure."""
    run = make_run()
    average = Ema(run.model)
    run.ckpt.track(ema=average)
    lazy = {p.untyped_storage() for p in average.parameters()}
    lazyckpt.capture.torn.TornStorages().add(lazy)
    saves_untold(run, lambda: average.update(run.model))


def test_a_filter_that_makes_errors_of_warnings_fails_no_save(make_run: Any) -> None:
    run = make_run()
    average = Ema(run.model)
    run.ckpt.track(ema=average)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saves(run, lambda: average.update(run.model))


def test_it_keeps_no_memory_alive(make_run: Any) -> None:
    run = make_run()
    state = {"rows": torch.ones(1 << 20)}
    run.ckpt.track(state=state)
    saves_untold(run, steps=2)
    gone = torch.multiprocessing.reductions.StorageWeakRef(state.pop("rows").untyped_storage())
    gc.collect()
    assert gone.expired()
