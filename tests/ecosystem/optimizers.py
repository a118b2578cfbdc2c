"""Optimizers in a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ecosystem.parts import WIDTH, Net, backward, loss_of, stepping
from ecosystem.rows import Recipe, Row, Train, loop
from writers.registry import SharpnessAware

Parameters = list[nn.Parameter]


NARROW = WIDTH // 2  # for Muon: it multiplies in bfloat16, in which some processors take a hundred times as long


def with_optimizer(make: Callable[[Parameters], Any], width: int = WIDTH) -> Train:
    """A loop with the optimizer that ``make`` makes."""

    def build() -> Recipe:
        model = Net(width)
        optimizer = make(list(model.parameters()))
        return Recipe({"model": model, "optimizer": optimizer}, stepping(model, optimizer))

    return loop(build)


def pytorch_optimizer(name: str, **knobs: Any) -> Row:
    def make(parameters: Parameters) -> Any:
        import pytorch_optimizer

        return getattr(pytorch_optimizer, name)(parameters, **knobs)

    return Row(f"pytorch_optimizer {name}", ("pytorch-optimizer",), with_optimizer(make))


def _matrices(parameters: Parameters) -> tuple[Parameters, Parameters]:
    """Weights of hidden layers, which Muon trains, and all others."""
    return [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]


def _muon_and_adamw() -> Recipe:
    model = Net(NARROW)
    matrices, others = _matrices(list(model.parameters()))
    muon, adamw = torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others)

    def step(number: int) -> None:
        muon.zero_grad()
        backward(model, adamw, number)
        muon.step()
        adamw.step()

    return Recipe({"model": model, "muon": muon, "adamw": adamw}, step)


def _lion(parameters: Parameters) -> Any:
    from lion_pytorch import Lion

    return Lion(parameters, lr=1e-4)


def _pytorch_optimizer_muon(parameters: Parameters) -> Any:
    from pytorch_optimizer import Muon

    matrices, others = _matrices(parameters)
    return Muon([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}])


def _lookahead(parameters: Parameters) -> Any:
    from pytorch_optimizer import Lookahead

    return Lookahead(torch.optim.AdamW(parameters))


def _galore(parameters: Parameters) -> Any:
    from pytorch_optimizer import GaLore
    from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector

    torch.serialization.add_safe_globals([GaLoreProjector])
    matrices, others = _matrices(parameters)
    projected = {"rank": 64, "update_proj_gap": 4, "scale": 0.25, "projection_type": "std"}
    return GaLore([{"params": matrices, **projected}, {"params": others}])


def _schedule_free() -> Recipe:
    import schedulefree

    model = Net()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01, warmup_steps=2)

    def step(number: int) -> None:
        model.train()
        optimizer.train()
        backward(model, optimizer, number)
        optimizer.step()

    def evaluate(number: int) -> None:
        model.eval()
        optimizer.eval()
        with torch.no_grad():
            loss_of(model, number)

    return Recipe({"model": model, "optimizer": optimizer}, step, after_save=evaluate)


class SAM(SharpnessAware):
    """With what its most copied repository adds (davda54/sam)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


def _sam(make: Callable[[Parameters], Any], closure: bool = False, base: bool = False) -> Train:
    def build() -> Recipe:
        model = Net()
        optimizer = make(list(model.parameters()))

        def step(number: int) -> None:
            backward(model, optimizer, number)
            if closure:
                optimizer.step(lambda: backward(model, optimizer, number))
            else:
                optimizer.first_step(zero_grad=True)
                loss_of(model, number).backward()
                optimizer.second_step(zero_grad=True)

        tracked = {"model": model, "optimizer": optimizer}
        if base:
            tracked["base"] = optimizer.base_optimizer
        return Recipe(tracked, step)

    return loop(build)


def _sam_by_hand(parameters: Parameters) -> Any:
    return SAM(parameters, torch.optim.SGD, lr=0.05, momentum=0.9)


def _pytorch_optimizer_sam(parameters: Parameters) -> Any:
    from pytorch_optimizer import SAM

    return SAM(parameters, base_optimizer=torch.optim.AdamW, lr=0.001)


_GALORE_NOTE = (
    "Its state holds objects of its own, whose tensors are copied inside `save()`. Allow them before the first "
    "`save()`, and before `restore()`: `torch.serialization.add_safe_globals([GaLoreProjector])`."
)
_SAM_NOTE = "Track `base_optimizer` as well: SAM's `state_dict()` does not have its momentum."

ROWS = [
    Row("torch Muon + AdamW", ("torch",), loop(_muon_and_adamw), 0.05),
    Row("lion-pytorch Lion", ("lion-pytorch",), with_optimizer(_lion)),
    *(
        pytorch_optimizer(name)
        for name in ("AdEMAMix", "SOAP", "Adan", "Prodigy", "CAME", "Shampoo", "StableAdamW", "LaProp", "SM3")
    ),
    pytorch_optimizer("ScheduleFreeAdamW"),
    pytorch_optimizer("Ranger21", num_iterations=100),
    Row("pytorch_optimizer Muon", ("pytorch-optimizer",), with_optimizer(_pytorch_optimizer_muon, NARROW), 0.05),
    Row("pytorch_optimizer GaLore", ("pytorch-optimizer",), with_optimizer(_galore), 0.12, note=_GALORE_NOTE),
    Row("pytorch_optimizer Lookahead", ("pytorch-optimizer",), with_optimizer(_lookahead)),
    Row("pytorch_optimizer SAM", ("pytorch-optimizer",), _sam(_pytorch_optimizer_sam)),
    Row("SAM, two steps", ("torch",), _sam(_sam_by_hand, base=True), note=_SAM_NOTE),
    Row("SAM with a closure", ("torch",), _sam(_sam_by_hand, closure=True, base=True), note=_SAM_NOTE),
    Row("schedulefree, plain loop", ("schedulefree",), loop(_schedule_free)),
]
