"""Averages of weights that are known by their class are lazy, and their methods wait, without ``lazyckpt.guard``."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import lazyckpt
from lazyckpt.gate import averages
from lazyckpt.gate.gate import gate

pytestmark = pytest.mark.usefixtures("small_tensors_are_lazy")

HELD_S = 0.05
SMALL_BYTES = 100_000  # of the biases and random numbers; an average has 789,504 bytes, the rest three times as many


class Shadow:
    """As torch_ema's and diffusers' averages are: no module, a list of tensors in ``state_dict()``."""

    def __init__(self, parameters: Any) -> None:
        self.shadow_params = [p.clone().detach() for p in parameters]
        self.stored: list[torch.Tensor] = []

    def update(self, parameters: Any) -> None:
        with torch.no_grad():
            for shadow, p in zip(self.shadow_params, parameters, strict=True):
                shadow.sub_(0.5 * (shadow - p))

    def store(self, parameters: Any) -> None:
        self.stored = [p.clone() for p in parameters]

    def copy_to(self, parameters: Any) -> None:
        for shadow, p in zip(self.shadow_params, parameters, strict=True):
            p.data.copy_(shadow.data)

    def restore(self, parameters: Any) -> None:
        for stored, p in zip(self.stored, parameters, strict=True):
            p.data.copy_(stored.data)

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.5, "shadow_params": self.shadow_params}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow_params = state["shadow_params"]


class Ema(torch.nn.Module):
    """As ema-pytorch's: it holds the model that trains, too, and the average takes no gradient."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.online_model = model
        self.ema_model = copy.deepcopy(model).requires_grad_(False)

    def update(self) -> None:
        for p, other in zip(self.ema_model.parameters(), self.online_model.parameters(), strict=True):
            p.data.lerp_(other.data, 0.5)  # moves no version

    def copy_params_from_ema_to_model(self) -> None:
        for p, other in zip(self.ema_model.parameters(), self.online_model.parameters(), strict=True):
            other.data.copy_(p.data)


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Puts a class where a library that is imported has it."""

    def put(module: str, name: str, stand_in: type) -> Any:
        kind = type(name, (stand_in,), dict(vars(stand_in)))
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
        setattr(sys.modules[module], name, kind)
        return kind

    return put


@pytest.fixture
def make(imported: Callable[..., Any]) -> dict[str, Callable[[torch.nn.Module], tuple[Any, Callable[[], None]]]]:
    """Makes an average and the function that updates it."""

    def averaged(model: torch.nn.Module) -> Any:
        average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        return average, lambda: average.update_parameters(model)

    def shadow(model: torch.nn.Module) -> Any:
        average = imported("torch_ema.ema", "ExponentialMovingAverage", Shadow)(model.parameters())
        return average, lambda: average.update(model.parameters())

    def ema(model: torch.nn.Module) -> Any:
        average = imported("ema_pytorch.ema_pytorch", "EMA", Ema)(model)
        return average, lambda: average.update()

    return {"AveragedModel": averaged, "Shadow": shadow, "Ema": ema}


def clones(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: clones(value) for name, value in state.items()}
    if isinstance(state, list):
        return [clones(value) for value in state]
    return state.clone() if isinstance(state, torch.Tensor) else state


@pytest.mark.parametrize("name", ["AveragedModel", "Shadow", "Ema"])
def test_a_known_average_is_lazy_and_its_update_waits(
    name: str, make: Any, make_run: Any, disk: Any, pending: Any, graph: Any
) -> None:
    run = make_run()
    average, update = make[name](run.model)
    run.ckpt.track(ema=average)
    run.ckpt.save(0)
    for step in range(1, 4):
        run.step()
        update()
        before = clones(average.state_dict())
        disk.hold()
        handle = run.ckpt.save(step)
        assert pending(handle) > 0
        disk.release(after_s=HELD_S)
        update()
        assert handle.metrics.gate_blocked_s > HELD_S / 2
        assert graph(dict(torch.load(handle.result() / "state.pt")["ema"])) == graph(dict(before))
        assert handle.metrics.eager_bytes < SMALL_BYTES


@pytest.mark.parametrize("name", ["AveragedModel", "Shadow", "Ema"])
def test_it_is_lazy_although_it_was_not_updated_since_the_save_before(
    name: str, make: Any, make_run: Any, graph: Any
) -> None:
    """Averages are updated every ten steps, or once an epoch. That of ``Ema`` is frozen, but does not rest."""
    run = make_run()
    average, update = make[name](run.model)
    run.ckpt.track(ema=average)
    run.ckpt.save(0)
    update()
    for step in range(1, 9):
        run.step()
        if step in (4, 7):
            update()
        before = clones(average.state_dict())
        handle = run.ckpt.save(step)
        update() if step == 5 else run.step()
        assert graph(dict(torch.load(handle.result() / "state.pt")["ema"])) == graph(dict(before))
        assert handle.metrics.eager_bytes < SMALL_BYTES, step


def test_without_pages_an_average_that_was_not_updated_is_eager(make: Any, make_run: Any) -> None:
    """Who writes to it past its methods, and moves no version, would not be found."""
    run = make_run(witness="versions")
    average, update = make["AveragedModel"](run.model)
    run.ckpt.track(ema=average)
    update()
    run.step()
    assert run.ckpt.save(1, blocking=True).metrics.eager_bytes < SMALL_BYTES
    run.step()
    handle = run.ckpt.save(2)
    for parameter in average.parameters():
        parameter.data.mul_(0)
    saved = lazyckpt.load(handle.result())["ema"]
    assert handle.metrics.eager_bytes > 700_000
    assert all(bool(value.any()) for name, value in saved.items() if name.endswith("weight"))


def test_an_average_that_is_made_by_its_first_update_is_watched_then(imported: Any, make_run: Any) -> None:
    class Late(Ema):
        def __init__(self, model: torch.nn.Module) -> None:
            torch.nn.Module.__init__(self)
            self.online_model = model
            self.ema_model = None  # type: ignore[assignment]

        def update(self) -> None:
            if self.ema_model is None:
                self.ema_model = copy.deepcopy(self.online_model)

    run = make_run()
    average = imported("ema_pytorch.ema_pytorch", "EMA", Late)(run.model)
    run.ckpt.track(ema=average)
    average.update()
    average.update()
    assert average.ema_model in gate.modules


def test_an_average_that_takes_no_gradient_does_not_rest(make_run: Any, graph: Any) -> None:
    """Regression: frozen by the look of it, and unchanged in two saves, it was lazy, and no update waited for that."""

    class Mine(Ema):
        pass

    run = make_run()
    average = Mine(run.model)
    run.ckpt.track(ema=average)
    lazyckpt.guard(average, "update")
    average.update()
    for step in range(9):
        if step % 4 == 3:
            average.update()
        before = clones(average.state_dict())
        handle = run.ckpt.save(step)
        average.update() if step % 4 == 2 else run.step()
        assert graph(dict(torch.load(handle.result() / "state.pt")["ema"])) == graph(dict(before))


@pytest.mark.parametrize("method", ["copy_to", "restore"])
def test_what_it_writes_to_the_model_waits_for_the_copies_of_the_model(
    method: str, make: Any, make_run: Any, disk: Any, pending: Any, graph: Any
) -> None:
    run = make_run()
    average, _ = make["Shadow"](run.model)
    run.ckpt.save(0).result()
    run.step()
    average.store(run.model.parameters())
    with torch.no_grad():
        torch._foreach_add_(average.stored, 1.0)
    before = run.state()
    disk.hold()
    handle = run.ckpt.save(1)
    assert pending(handle) > 0
    disk.release(after_s=HELD_S)
    getattr(average, method)(run.model.parameters())
    saved = torch.load(handle.result() / "state.pt")
    assert graph({name: saved[name] for name in ("model", "optimizer")}) == graph(before)


def test_the_model_that_it_holds_too_belongs_to_no_average(make: Any, make_run: Any, graph: Any) -> None:
    """Here something trains it whose steps pass no gate, such as an optimizer that is none of torch's."""
    run = make_run()
    trained = torch.nn.Linear(256, 256)
    average, update = make["Ema"](trained)
    run.ckpt.track(ema=average)
    for step in range(4):
        run.step()
        update()
        before = clones(average.state_dict())
        handle = run.ckpt.save(step)
        with torch.no_grad():
            trained.weight.data.add_(1.0)
        assert graph(dict(torch.load(handle.result() / "state.pt")["ema"])) == graph(dict(before))
    assert 2 * trained.weight.nbytes > handle.metrics.eager_bytes > trained.weight.nbytes


def test_a_class_derived_from_a_known_one_is_eager(make_run: Any) -> None:
    """It may have other methods that write."""

    class Mine(AveragedModel):
        def reset(self) -> None:
            for p in self.parameters():
                p.data.zero_()

    run = make_run()
    average = Mine(run.model)
    run.ckpt.track(ema=average)
    for step in range(3):
        run.step()
        average.update_parameters(run.model)
        before = clones(average.state_dict())
        handle = run.ckpt.save(step)
        average.reset()
        saved = torch.load(handle.result() / "state.pt")["ema"]
        assert all(torch.equal(saved[name], t) for name, t in before.items())
        assert handle.metrics.eager_bytes > handle.metrics.bytes / 5


def test_guarded_twice_is_guarded_once(make_run: Any) -> None:
    """And one object has one owner, whichever of its methods is called between two saves."""

    class Mine(torch.nn.Linear):
        def update(self) -> None:
            with torch.no_grad():
                self.weight.add_(1)

        reset = update

    run = make_run()
    mine = Mine(256, 256)
    for method in ("update", "update", "reset"):
        lazyckpt.guard(mine, method)
    run.ckpt.track(mine=mine)
    mine.reset()
    mine.update()
    assert len({method.owner for method in (mine.update, mine.reset)}) == 1  # type: ignore[attr-defined]
    assert gate.steps[mine.update.owner] == 2  # type: ignore[attr-defined]
    for step in range(3):
        run.step()
        mine.update()  # and reset() no more
        handle = run.ckpt.save(step)
        run.step()
        handle.result()
        assert handle.metrics.eager_bytes < SMALL_BYTES, step


@pytest.mark.parametrize("call", ["track", "save"])
def test_a_library_that_is_imported_later_is_found_then(call: str, imported: Any, make_run: Any) -> None:
    run = make_run()
    average = imported("timm.utils.model_ema", "ModelEmaV3", Ema)(run.model)
    run.ckpt.track(ema=average) if call == "track" else run.ckpt.save(0).result()
    average.update()
    assert average in gate.steps


def test_the_docs_have_the_same_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "providers.md").read_text()
    rows = text.partition("<!-- averages: begin -->\n")[2].partition("<!-- averages: end -->")[0].splitlines()[2:]
    assert rows == [
        f"| `{module}.{name}` | {', '.join(f'`{method}`' for method in (*average.updates, *average.swaps))} |"
        for (module, name), average in averages._AVERAGES.items()
    ]


def test_the_gate_takes_what_it_finds(imported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version may lack the class or one of the methods; ``None`` in sys.modules forbids an import."""
    monkeypatch.setitem(sys.modules, "timm.utils.model_ema", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch_ema.ema", types.ModuleType("torch_ema.ema"))

    class Other:
        step = 7

        def update(self) -> None: ...

    unknown = imported("diffusers.training_utils", "EMAModel", Other)
    known = imported("ema_pytorch.ema_pytorch", "EMA", Other)
    averages.guard_imported()
    assert unknown.step == 7 and not averages.is_known(unknown())
    assert averages.is_known(known()) and averages.is_update(known(), "update")
    assert not averages.is_update(known(), "update_moving_average")
