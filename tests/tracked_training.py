"""A small training of every kind of object that a Checkpointer tracks. moves.py changes it."""

from __future__ import annotations

import contextlib
import gc
import random
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW
from torch.optim.swa_utils import AveragedModel

import lazyckpt
from lazyckpt.gate.gate import gate


class Block(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(size, size)
        self.norm = torch.nn.BatchNorm1d(size)
        self.table = torch.nn.Embedding(7, size)
        self.register_buffer("unsaved", torch.zeros(3), persistent=False)
        self.register_buffer("mean", torch.zeros(3000))


class Tagged(torch.Tensor):
    """A subclass with memory of its own."""


class Foreign:
    """An optimizer of no class of torch."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.param_groups = [{"params": parameters, "lr": 0.1}]
        self.state = {p: {"sum": torch.zeros_like(p)} for p in parameters}

    def step(self) -> None:
        with torch.no_grad():
            for state in self.state.values():
                state["sum"].add_(1)

    def state_dict(self) -> dict[str, Any]:
        return {"state": dict(enumerate(self.state.values())), "lr": self.param_groups[0]["lr"]}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Training:
    """A training, and the Checkpointers that track all of it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.model = torch.nn.ModuleList(Block(size) for size in (64, 64, 8))
        self.extra: dict[str, Any] = {"name": "run", "like a weight": torch.zeros(64, 64)}
        self.foreign = Foreign([torch.nn.Parameter(torch.zeros(50, 100))])
        self.others: list[Any] = []  # optimizers and averages that are not tracked
        self.checkpointers: list[lazyckpt.Checkpointer] = []
        self.new_optimizer()
        self.average = AveragedModel(self.model)

    def tracked(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "average", "foreign", "extra")
        return {name: vars(self)[name] for name in names}

    def track(self) -> None:
        for ckpt in self.checkpointers:
            ckpt.track(replace=True, **self.tracked())

    def new_optimizer(self) -> None:
        kind = self.random.choice([AdamW, Adam, SGD])
        options: dict[str, Any] = {"momentum": self.random.choice([0, 0.9])} if kind is SGD else {}
        self.optimizer = kind(self.model.parameters(), lr=1e-3, **options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.track()

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3) if parameter.requires_grad else None
        try:
            self.optimizer.step()
        except (RuntimeError, KeyError):  # the state fits the parameters no longer
            self.new_optimizer()
        if gate.inside_step():
            gc.collect()  # the step that raised
        with contextlib.suppress(RuntimeError, ValueError):  # an average whose model has other parameters now
            self.average.update_parameters(self.model)
        self.scheduler.step()
        self.foreign.step()

    def block(self) -> Any:
        return self.random.choice([block for block in self.model if isinstance(block, Block)])

    def parameter(self) -> torch.nn.Parameter:
        return self.random.choice([p for p in self.model.parameters() if p.numel()])

    def state(self) -> dict[str, Any]:
        """The state of one parameter in the optimizer."""
        states = [state for state in self.optimizer.state.values() if "step" in state]
        return self.random.choice(states) if states else {}

    def moments(self, state: dict[str, Any]) -> list[str]:
        return [name for name, value in state.items() if isinstance(value, torch.Tensor) and name != "step"]
