"""Mixtures of experts and pipelines, which DeepSpeed saves in many small files: parts of larger storages."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_files import different
from processes import Ranks

WIDTH = 64


def experts(settings: dict[str, Any], ep_size: int) -> tuple[Any, Callable[[int, int], list[float]]]:
    """An engine with four experts, on ``ep_size`` ranks, and a function that trains it."""
    import deepspeed
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from deepspeed_training import forget, train

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Linear(WIDTH, WIDTH)
            expert = torch.nn.Sequential(
                torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.ReLU(), torch.nn.Linear(4 * WIDTH, WIDTH)
            )
            self.moe = MoE(WIDTH, expert, num_experts=4, ep_size=ep_size, k=1, min_capacity=4)
            self.out = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.moe(torch.relu(self.embed(x)))[0])

    forget()
    torch.manual_seed(3)
    model = Model()
    parameters: Any = model.parameters()
    if settings["zero_optimization"]["stage"] > 0:
        groups = {"params": list(model.parameters()), "name": "parameters"}
        parameters = split_params_into_different_moe_groups_for_optimizer(groups)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=settings)

    def trained(begin: int, end: int) -> list[float]:
        torch.manual_seed(begin)  # experts choose among tokens at random
        return train(engine, begin, end, WIDTH)

    return engine, trained


def pipeline(settings: dict[str, Any], stages: int) -> tuple[Any, Callable[[int, int], list[float]]]:
    """An engine with a pipeline of so many stages, and a function that trains it."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed_training import forget

    forget()
    torch.manual_seed(3)
    sizes = [(WIDTH, 4 * WIDTH), (4 * WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    layers = [LayerSpec(torch.nn.Linear, *size) for size in sizes]
    model = PipelineModule([*layers[:1], torch.nn.ReLU(), *layers[1:]], num_stages=stages, loss_fn=torch.nn.MSELoss())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=[*model.parameters()], config=settings)
    dtype = torch.bfloat16 if "bf16" in settings else torch.float32

    def trained(begin: int, end: int) -> list[float]:
        losses = []
        for number in range(begin, end):
            generator = torch.Generator().manual_seed(number)
            batches = (torch.randn(8, WIDTH, generator=generator).to(dtype) for _ in range(100))
            losses.append(engine.train_batch((batch, batch) for batch in batches).item())
        return losses

    return engine, trained


KINDS = {"experts": experts, "pipeline": pipeline}


def resumed(folder: str, kind: str, how: int, settings: dict[str, Any]) -> Any:
    """As in test_deepspeed.py."""
    from deepspeed_training import config

    from lazyckpt.integrations.deepspeed import enable

    engine, train = KINDS[kind](config(**settings, gas=2 if kind == "pipeline" else 1), how)
    ours = enable(engine)
    assert ours is not None
    train(0, 2)
    engine.save_checkpoint(f"{folder}/ours")
    train(2, 4)
    engine.save_checkpoint(f"{folder}/ours")
    expected = train(4, 6)  # while it is copied
    assert ours.last_save is not None
    ours.last_save.result()
    metrics = ours.last_save.metrics
    enable(engine, enabled=False)
    engine.destroy()

    plain, train = KINDS[kind](config(**settings, gas=2 if kind == "pipeline" else 1), how)
    plain.load_checkpoint(f"{folder}/ours")
    plain.save_checkpoint(f"{folder}/plain")
    found = train(4, 6)
    plain.destroy()
    return expected, found, metrics.bytes, metrics.eager_bytes


@pytest.mark.parametrize(
    ("kind", "how", "settings"),
    [
        ("experts", 1, {"stage": 1, "dtype": "bf16"}),
        ("experts", 2, {"stage": 1, "dtype": "bf16"}),
        ("experts", 2, {"stage": 2}),
        ("experts", 2, {"stage": 0}),
        ("pipeline", 2, {"stage": 0}),
        ("pipeline", 2, {"stage": 1, "dtype": "bf16"}),
        ("pipeline", 1, {"stage": 1, "dtype": "bf16"}),
    ],
)
def test_deepspeed_resumes_bit_for_bit_from_many_files(
    deepspeed_ranks: Ranks, tmp_path: Path, kind: str, how: int, settings: dict[str, Any]
) -> None:
    told = deepspeed_ranks.run(2, resumed, str(tmp_path), kind, how, settings)
    for expected, found, nbytes, eager in told:
        assert found == expected
        # Without ZeRO, each small tensor has a storage of its own, which is copied sooner than watched.
        assert eager <= (64 << 10 if settings["stage"] > 0 else nbytes / 5), (eager, nbytes)
    assert deepspeed_ranks.run(1, different, str(tmp_path), "global_step4") == [[]]
    sizes = {}
    for whose in ("ours", "plain"):
        files = (tmp_path / whose / "global_step4").glob("*.pt")
        sizes[whose] = {path.name: os.path.getsize(path) for path in files}
    assert all(sizes["ours"][name] < 1.1 * size + 8192 for name, size in sizes["plain"].items()), sizes
