"""Averages of weights, tracked beside the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ecosystem.parts import Net, batch, stepping
from ecosystem.rows import Recipe, Row, Train, loop

Average = Callable[[nn.Module], tuple[Any, Callable[[], Any]]]  # the average of a model, and what updates it


def _with_average(make: Average, make_model: Callable[[], nn.Module] = Net) -> Train:
    def build() -> Recipe:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        ema, update = make(model)
        return Recipe({"model": model, "optimizer": optimizer, "ema": ema}, stepping(model, optimizer, update))

    return loop(build)


def torch_average(model: nn.Module) -> tuple[Any, Any]:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return ema, lambda: ema.update_parameters(model)


def _timm(model: nn.Module) -> tuple[Any, Any]:
    from timm.utils import ModelEmaV3

    ema = ModelEmaV3(model, decay=0.9)
    return ema, lambda: ema.update(model)


def _ema_pytorch(model: nn.Module) -> tuple[Any, Any]:
    from ema_pytorch import EMA

    ema = EMA(model, beta=0.9, update_after_step=0, update_every=1, include_online_model=False)
    return ema, lambda: ema.update()


def _torch_ema(model: nn.Module) -> tuple[Any, Any]:
    from torch_ema import ExponentialMovingAverage

    ema = ExponentialMovingAverage(model.parameters(), decay=0.9)
    return ema, lambda: ema.update()


def diffusers_average(model: nn.Module) -> tuple[Any, Any]:
    from diffusers.training_utils import EMAModel

    ema = EMAModel(model.parameters(), decay=0.9)
    return ema, lambda: ema.step(model.parameters())


class _Vision(nn.Module):
    """A vision transformer of timm's, for the digits."""

    def __init__(self) -> None:
        super().__init__()
        from timm.models.vision_transformer import VisionTransformer

        self.vit = VisionTransformer(
            img_size=8, patch_size=4, in_chans=1, num_classes=10, embed_dim=256, depth=2, num_heads=4, drop_rate=0.1
        )

    def forward(self, digits: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.vit(digits.unflatten(1, (1, 8, 8)))
        return logits


def _swaps() -> Recipe:
    """Evaluates with the averages, which go into the model and out again right behind the save."""
    from torch_ema import ExponentialMovingAverage

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    ema = ExponentialMovingAverage(model.parameters(), decay=0.9)

    def evaluate(number: int) -> None:
        model.eval()
        with ema.average_parameters(), torch.no_grad():
            model(batch(number)[0])

    tracked = {"model": model, "optimizer": optimizer, "ema": ema}
    # A lambda: a method that is bound before track() is the class's own, which does not wait.
    return Recipe(tracked, stepping(model, optimizer, lambda: ema.update()), after_save=evaluate)


ROWS = [
    Row("torch AveragedModel", ("torch",), _with_average(torch_average)),
    Row("timm ViT + ModelEmaV3", ("timm",), _with_average(_timm, _Vision)),
    Row("ema-pytorch EMA", ("ema-pytorch",), _with_average(_ema_pytorch)),
    Row("torch-ema", ("torch-ema",), _with_average(_torch_ema)),
    Row("torch-ema, evaluated after save()", ("torch-ema",), loop(_swaps)),
    Row("diffusers EMAModel", ("diffusers",), _with_average(diffusers_average)),
]
