"""``enable(accelerator)`` under FSDP2, on two ranks: one snapshot of all shards, which plain accelerate loads.

Accelerate shards on accelerators only. ``accelerator_on_cpu`` tells it that the processes have some."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType, ProjectConfiguration
from processes import Ranks
from torch.distributed.tensor import DTensor

import lazyckpt
from lazyckpt.integrations.accelerate import enable
from trainers import forget_accelerators


def accelerator_on_cpu(project: ProjectConfiguration | None = None, **plugin: Any) -> Accelerator:
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    forget_accelerators()
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    options = {"fsdp_version": 2, "cpu_ram_efficient_loading": False, "reshard_after_forward": True, **plugin}
    return Accelerator(
        cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**options), project_config=project, mixed_precision="no"
    )


def prepared(accelerator: Accelerator, width: int = 65) -> Any:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(dist.get_rank())
    return model, optimizer


def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 32)).square().sum()  # random states are a part of the checkpoint
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


FOLDERS = ("optimizer_0", "pytorch_model_fsdp_0")
FILES = [".metadata", "__0_0.distcp", "__1_0.distcp"]


def save_and_go_on(folder: Path, offload: bool) -> Any:
    accelerator = accelerator_on_cpu()
    model, optimizer = prepared(accelerator)
    assert isinstance(next(model.parameters()), DTensor)
    accelerator.state.fsdp_plugin.state_dict_config.offload_to_cpu = offload
    saver = enable(accelerator)
    train(accelerator, model, optimizer, 3)
    accelerator.save_state(folder / "state")
    losses = train(accelerator, model, optimizer, 3)
    saver.wait()
    found = sorted(os.listdir(folder / "state"))
    saver.close()
    accelerator.end_training()
    return losses, found


def load_and_go_on(folder: Path, lazy: bool) -> Any:
    accelerator = accelerator_on_cpu()
    model, optimizer = prepared(accelerator)
    saver = enable(accelerator) if lazy else None
    accelerator.load_state(str(folder / "state"))
    losses = train(accelerator, model, optimizer, 3)
    if saver is not None:
        saver.close()
    return losses


@pytest.mark.parametrize("offload", [False, True])
def test_plain_accelerate_resumes_bit_for_bit_from_one_snapshot(ranks: Ranks, tmp_path: Path, offload: bool) -> None:
    saved = ranks.run(2, save_and_go_on, tmp_path, offload)
    for folder in FOLDERS:
        assert sorted(os.listdir(tmp_path / "state" / folder)) == FILES
    for (_, found), rank in zip(saved, (0, 1), strict=True):
        assert {*FOLDERS, f"random_states_{rank}.pkl"} <= set(found)
    for lazy in (False, True):
        assert ranks.run(2, load_and_go_on, tmp_path, lazy) == [losses for losses, _ in saved]
    assert os.listdir(tmp_path) == ["state"]


def other_kinds(folder: Path, kind: str) -> Any:
    accelerator = accelerator_on_cpu(state_dict_type=kind)
    model, optimizer = prepared(accelerator)
    saver = enable(accelerator)
    train(accelerator, model, optimizer, 2)
    accelerator.save_state(folder / "state")
    losses = train(accelerator, model, optimizer, 2)
    saver.close()
    accelerator = accelerator_on_cpu(state_dict_type=kind)
    model, optimizer = prepared(accelerator)
    accelerator.load_state(str(folder / "state"))
    return losses == train(accelerator, model, optimizer, 2)


def test_a_full_state_dict_is_written_by_accelerate_into_the_staged_folder(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, other_kinds, tmp_path, "FULL_STATE_DICT") == [True, True]
    found = os.listdir(tmp_path / "state")
    assert {"pytorch_model_fsdp.bin", "optimizer.bin", ".lazyckpt-lock"} <= set(found)


def costs(folder: Path) -> Any:
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = accelerator_on_cpu(project)
    model, optimizer = prepared(accelerator, 1 << 14)
    accelerator.state.fsdp_plugin.state_dict_config.offload_to_cpu = True  # which we do without
    saver = enable(accelerator)
    told = []
    for _ in range(5):
        train(accelerator, model, optimizer, 1)
        accelerator.save_state()
        told.append(saver.last_save.metrics)
    saver.wait()
    dist.barrier()
    found = sorted(os.listdir(folder / "checkpoints"))
    accelerator.end_training()
    return [(m.eager_bytes / m.bytes, m.save_blocked_s) for m in told], found, sorted(os.listdir(folder))


def test_saves_are_lazy_and_the_limit_holds(ranks: Ranks, tmp_path: Path) -> None:
    for told, found, above in ranks.run(2, costs, tmp_path):
        assert max(eager for eager, _ in told[1:]) < 0.03
        assert sorted(blocked for _, blocked in told[1:])[1] < 0.1
        assert found == ["checkpoint_3", "checkpoint_4"]
        assert set(above) <= {"checkpoints", ".lazyckpt"}


def failing(folder: Path) -> Any:
    """The second of three saves fails on rank 1, in the background."""
    accelerator = accelerator_on_cpu()
    model, optimizer = prepared(accelerator)
    saver = enable(accelerator)
    told = []
    for step in (1, 2, 3, 4):
        train(accelerator, model, optimizer, 1)
        hook = None
        if step == 2 and dist.get_rank() == 1:

            def occupy(models: Any, weights: Any, output_dir: str) -> None:
                Path(output_dir, FOLDERS[0]).mkdir(exist_ok=True)
                Path(output_dir, FOLDERS[0], "__1_0.distcp").write_text("")

            hook = accelerator.register_save_state_pre_hook(occupy)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                accelerator.save_state(folder / f"state{step}")
            told.append("")
        except lazyckpt.SaveError as error:
            told.append(str(error))
        if hook is not None:
            hook.remove()
    saver.close()
    accelerator.end_training()
    return told


def test_a_failed_save_raises_on_every_rank_once_and_the_next_one_works(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks.run(2, failing, tmp_path):
        assert [bool(text) for text in told] in ([False, False, True, False], [False, True, False, False])
        assert re.search(r"state2.*File exists", "".join(told))
    assert "state2" not in os.listdir(tmp_path) and "state4" in os.listdir(tmp_path)
