"""Trains with DeepSpeed on gloo ranks, for cases that tests/processes.py runs.

DeepSpeed lies in a folder of its own (tests/requirements-deepspeed.txt); importing this module puts it on the path.
"""

from __future__ import annotations

import os
import sys
from typing import Any

sys.path.append(os.path.join(sys.prefix, "deepspeed"))
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups, logger

WIDTH = 48

logger.setLevel("ERROR")
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # DeepSpeed would compile it


class Model(torch.nn.Module):
    """Larger than a page of the gate in each layer, with a buffer that forward writes to."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(width, 4 * width)
        self.norm = torch.nn.LayerNorm(4 * width)
        self.register_buffer("seen", torch.zeros(1))
        self.hidden = torch.nn.Linear(4 * width, 4 * width)
        self.out = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.out(torch.relu(self.hidden(self.norm(torch.relu(self.embed(x))))))


def config(stage: int, dtype: str = "fp32", **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, **more.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": more.pop("gas", 1),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        **({"bf16": {"enabled": True}} if dtype == "bf16" else {}),
        **more,
    }


def built(
    settings: dict[str, Any], *, param_groups: int = 1, frozen: bool = False, width: int = WIDTH
) -> deepspeed.DeepSpeedEngine:
    forget()
    torch.manual_seed(7)
    model = Model(width)
    if frozen:
        model.embed.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    parameters: Any = trained
    if param_groups > 1:
        parts = [trained[at::param_groups] for at in range(param_groups)]
        parameters = [{"params": part, "weight_decay": 0.01 * at} for at, part in enumerate(parts)]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=settings)
    return engine


def forget() -> None:
    """Lets DeepSpeed take the process group of this case: it keeps that of the last one."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    deepspeed.comm.comm.cdb = None
    groups.mesh_device = groups.mpu = None
    for name in vars(groups):
        if name.startswith("_") and name.endswith(("_GROUP", "_GROUPS")) and not isinstance(vars(groups)[name], type):
            setattr(groups, name, {} if isinstance(vars(groups)[name], dict) else None)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def train(engine: deepspeed.DeepSpeedEngine, begin: int, end: int, width: int = WIDTH) -> list[float]:
    """Takes micro-batches ``begin`` to ``end``; returns their losses."""
    losses = []
    for number in range(begin, end):
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        x = torch.randn(8, width, generator=generator).to(next(engine.module.parameters()).dtype)
        loss = (engine(x).float() - x.float()).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def as_accelerator() -> None:
    """Lets accelerate make DeepSpeed's engines on the CPU, without ``cpu=True``, which would mean DDP: it looks for
    DeepSpeed on accelerators only."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    from trainers import forget_accelerators

    forget()
    forget_accelerators()
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "OMP_NUM_THREADS": "1"}
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)
