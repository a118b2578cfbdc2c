"""The training under accelerate that its tests share, and the checkpoints that it leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.checkpoint import checkpoint

TINY_RING = {"chunk_bytes": 64 << 10, "host_buffer_bytes": 128 << 10}


class Net(nn.Module):
    """Tied weights, buffers that change in forward, dropout; 2.6 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 256)
        self.norm = nn.BatchNorm1d(256)
        self.layers = nn.Sequential(nn.Linear(256, 1024), nn.Dropout(0.1), nn.Linear(1024, 256))
        self.head = nn.Linear(256, 300, bias=False)
        self.head.weight = self.embed.weight
        self.recomputes = False  # gradient checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens))
        hidden = checkpoint(self.layers, hidden, use_reentrant=False) if self.recomputes else self.layers(hidden)
        return nn.functional.cross_entropy(self.head(hidden), tokens)


class Average:
    """An exponential moving average, updated behind every optimizer's back."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.shadow

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.shadow = state


class Run:
    """A training run under accelerate, with everything that save_state saves."""

    def __init__(self, kind: str = "", scaler: Any = None, fused: bool = True, **project: Any) -> None:
        options = {"dynamo_backend": kind} if kind in ("aot_eager", "inductor") else {}
        self.accelerator = accelerate.Accelerator(cpu=True, project_config=ProjectConfiguration(**project), **options)
        self.accelerator.scaler = scaler
        torch.manual_seed(3)
        model = Net()
        model.layers[0].requires_grad_(kind != "frozen")
        model.recomputes = kind == "gradient checkpointing"
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=0.01, fused=fused)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        if kind == "compiled step":
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        self.average = Average(self.model)
        self.accelerator.register_for_checkpointing(self.average)

    def step(self, times: int = 1, factor: float = 1.0) -> None:
        for _ in range(times):
            loss = self.model(torch.randint(300, (8,))) * factor
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.average.update(self.model)

    def plain_save_state(self, path: Path, **kwargs: Any) -> None:
        """What accelerate does, blocking."""
        accelerate.Accelerator.save_state(self.accelerator, str(path), **kwargs)


def automatic(folder: Path, **more: Any) -> dict[str, Any]:
    return {"project_dir": str(folder), "automatic_checkpoint_naming": True, **more}


def number(checkpoint: Path) -> int:
    return int(checkpoint.name.split("_")[1])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []
