"""Small models and data that several rows train. Most storages have a MiB: the page witness leaves little ones, and the
ends of all, to the eager copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WIDTH = 512
BATCH = 16


def without_kernels_of_torchvision() -> None:
    """The registry's torchvision is built for CUDA. Beside a torch for CPUs it can be imported if these operators are
    known; no row calls them."""
    global _torchvision
    _torchvision = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _torchvision.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class Net(nn.Module):
    """Handwritten digits to their class; 2.2 MiB. Dropout draws random numbers, and the norm has buffers."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )

    def forward(self, digits: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(digits)
        return logits


_digits: tuple[torch.Tensor, torch.Tensor] | None = None


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The 1,797 images that scikit-learn ships, and their classes."""
    global _digits
    if _digits is None:
        from sklearn.datasets import load_digits

        images, classes = load_digits(return_X_y=True)
        _digits = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(classes)
    return _digits


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """That of a step, from 1 on."""
    images, classes = digits()
    begin = (step - 1) * BATCH
    return images[begin : begin + BATCH], classes[begin : begin + BATCH]


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    images, classes = batch(step)
    return nn.functional.cross_entropy(model(images), classes)


def backward(model: nn.Module, optimizer: Any, step: int) -> torch.Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, step)
    loss.backward()
    return loss


def stepping(model: nn.Module, optimizer: Any, after: Callable[[], Any] = lambda: None) -> Callable[[int], None]:
    """Makes the step of a plain loop; ``after`` ends it."""

    def step(number: int) -> None:
        model.train()
        backward(model, optimizer, number)
        optimizer.step()
        after()

    return step
