"""Saves small trainings with plain DeepSpeed, one folder each: `RANK=0 … python tests/deepspeed_saves.py FOLDER`.

All stages of ZeRO, a pipeline, experts, a universal checkpoint, and torch's format before 1.6, without lazyckpt.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import deepspeed  # noqa: E402
import torch  # noqa: E402
from deepspeed.checkpoint import ds_to_universal  # noqa: E402
from deepspeed.moe.layer import MoE  # noqa: E402
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule  # noqa: E402

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise DeepSpeed compiles it, for minutes
RANK = int(os.environ["RANK"])
BF16 = {"bf16": {"enabled": True}}


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = torch.nn.Linear(16, 16)
        self.experts = MoE(16, torch.nn.Linear(16, 16), num_experts=4, ep_size=2, k=1, min_capacity=0)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.experts(self.inside(batch))[0]
        return found


def config(stage: int, **more: Any) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": optimizer,
        "zero_optimization": {"stage": stage},
        **more,
    }


def train(folder: Path, model: torch.nn.Module, steps: int, config: dict[str, Any], parameters: Any = None) -> None:
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    dtype = torch.bfloat16 if "bf16" in config else torch.float32
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 16, dtype=dtype)).float().square().sum())
        engine.step()
        engine.save_checkpoint(str(folder))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", init_method=f"file://{folder}/meeting", verbose=False, rank=RANK, world_size=2)
    torch.manual_seed(0)
    for name, steps, settings in (
        ("fp32-0", 1, config(0)),
        ("fp32-1", 1, config(1)),
        ("bf16-2", 3, config(2, **BF16)),
        ("bf16-3", 1, config(3, **BF16)),
        ("fp32-3", 2, config(3)),
        ("legacy", 1, config(1, checkpoint={"checkpoint_serialization": False})),
    ):
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
        train(folder / name, model, steps, settings)
    for stage in (0, 1):
        experts = Experts()
        groups = split_params_into_different_moe_groups_for_optimizer({"params": [*experts.parameters()], "name": "x"})
        train(folder / f"experts-{stage}", experts, 1, config(stage), groups)
    for name, settings in (("pipeline-0", config(0, **BF16)), ("pipeline-1", config(1))):
        layers = [LayerSpec(torch.nn.Linear, 16, 16), torch.nn.functional.relu, LayerSpec(torch.nn.Linear, 16, 3)]
        stages = PipelineModule(layers, num_stages=2, loss_fn=lambda found, wanted: found.float().square().sum())
        engine, *_ = deepspeed.initialize(model=stages, config=settings)
        batch = torch.ones(2, 16, dtype=torch.bfloat16 if "bf16" in settings else torch.float32)
        engine.train_batch(iter([(batch, torch.ones(2, 3))]))
        engine.save_checkpoint(str(folder / name))
    if RANK == 0:
        given = ["--input_folder", f"{folder}/fp32-3/global_step2"]
        given += ["--output_folder", f"{folder}/fp32-3/global_step2_universal"]
        sys.argv[1:] = [*given, "--num_extract_workers", "1", "--num_merge_workers", "1"]
        ds_to_universal.main(ds_to_universal.parse_arguments())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
