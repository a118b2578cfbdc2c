"""``enable(accelerator, writers=…)`` on two ranks with DistributedDataParallel: both write accelerate's large files."""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from counted_reads import counted_reads
from processes import Ranks

import lazyckpt
from lazyckpt.integrations.accelerate import StateSaver, enable
from trainers import forget_accelerators


def accelerator_on_cpu(project: ProjectConfiguration | None = None) -> Accelerator:
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    forget_accelerators()
    return Accelerator(cpu=True, project_config=project, mixed_precision="no")


def prepared(accelerator: Accelerator, width: int = 3000) -> Any:
    torch.manual_seed(1)
    up, down = torch.nn.Linear(64, width), torch.nn.Linear(width, 64)
    model = torch.nn.Sequential(up, torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.2), down)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    prepared = accelerator.prepare(model, optimizer, scheduler)
    torch.manual_seed(dist.get_rank())
    return prepared


def train(accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 64)).square().mean()  # random states are a part of the checkpoint
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()


def plain(tree: Any) -> Any:
    """The same with a checksum in the place of each tensor."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(value) for value in tree]
    return zlib.crc32(tree.numpy().tobytes()) if isinstance(tree, torch.Tensor) else tree


def end_of(model: Any, optimizer: Any) -> Any:
    return plain((model.state_dict(), optimizer.state_dict(), torch.rand(2)))


def whole_run(folder: Path, writers: Any, safe: bool) -> Any:
    accelerator = accelerator_on_cpu()
    objects = prepared(accelerator)
    saver = enable(accelerator, writers=writers)
    assert saver is not None
    copied = []
    for at in range(3):
        train(accelerator, *objects)
        accelerator.save_state(folder / str(at), safe_serialization=safe)
        if saver.last_save is not None:
            copied.append((saver.last_save.metrics.copied_bytes, saver.last_save.metrics.eager_bytes))
    train(accelerator, *objects)
    accelerator.end_training()
    return end_of(*objects[:2]), copied


def resumed_run(folder: Path, writers: Any) -> Any:
    accelerator = accelerator_on_cpu()
    objects = prepared(accelerator)
    enable(accelerator, writers=writers)
    train(accelerator, *objects)  # changes everything
    with counted_reads(least_bytes=100_000) as reads:
        accelerator.load_state(folder)
    train(accelerator, *objects)
    return end_of(*objects[:2]), reads.nbytes


@pytest.mark.parametrize("safe", [True, False])
def test_both_ranks_write_the_files_and_a_resumed_run_ends_in_the_same_bits(
    ranks: Ranks, tmp_path: Path, safe: bool
) -> None:
    together = ranks.run(2, whole_run, tmp_path / "all", "all", safe)
    alone = ranks.run(2, whole_run, tmp_path / "one", "rank0", safe)
    assert [end for end, _ in together] == [end for end, _ in alone]
    weights = "model.safetensors" if safe else "pytorch_model.bin"
    for writers in ("all", None):
        (end, read), (end_1, read_1) = ranks.run(2, resumed_run, tmp_path / "all/2", writers)
        assert [end, end_1] == [end for end, _ in together]
        loaded = ["optimizer.bin"] if safe else ["optimizer.bin", weights]
        nbytes = sum(os.path.getsize(tmp_path / "all/2" / name) for name in loaded)
        assert 0.95 * nbytes < read + read_1 < nbytes and min(read, read_1) > 0.4 * nbytes
    small = ["random_states_0.pkl", "random_states_1.pkl", "scheduler.bin"]
    for at in "012":
        folders = [tmp_path / of / at for of in ("all", "one")]
        found, expected = ({name.name for name in folder.iterdir()} for folder in folders)
        assert expected == {weights, "optimizer.bin", *small} and found - expected == {".lazyckpt-lock"}
        for name in expected:
            assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
        for name in (weights, "optimizer.bin"):
            assert lazyckpt.verify(folders[0] / name).ok
    (_, first), (_, second) = together
    assert alone[1][1] == []
    whole = first[0][0]  # at first rank 0 writes all
    assert second[0][0] < 0.1 * whole
    for (copied, eager), (copied_1, eager_1) in zip(first[1:], second[1:], strict=True):
        assert abs(copied - copied_1) < 0.1 * whole and copied + copied_1 < 1.05 * whole
        assert max(eager, eager_1) < 0.1 * whole


def hooked(folder: Path) -> Any:
    """A hook of the main process writes the weights under another name, as those of diffusers do."""
    accelerator = accelerator_on_cpu()
    objects = prepared(accelerator)
    enable(accelerator, writers=2)

    def hook(models: Any, weights: Any, output_dir: str) -> None:
        if accelerator.is_main_process:
            torch.save(weights.pop(), Path(output_dir) / "own.pt")

    accelerator.register_save_state_pre_hook(hook)
    for at in range(2):
        train(accelerator, *objects)
        accelerator.save_state(folder / str(at))
    accelerator.end_training()
    return sorted(name.name for name in (folder / "1").iterdir() if name.suffix in (".pt", ".bin", ".safetensors"))


def test_files_that_hooks_write_or_leave_out_are_those_of_the_main_process(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, hooked, tmp_path) == [["optimizer.bin", "own.pt", "scheduler.bin"]] * 2
    assert lazyckpt.verify(tmp_path / "1/optimizer.bin").ok


def numbered(folder: Path) -> Any:
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = accelerator_on_cpu(project)
    objects = prepared(accelerator)
    saver = enable(accelerator, writers="all")
    for _ in range(4):
        train(accelerator, *objects)
        accelerator.save_state()
    assert saver is not None
    saver.wait()
    dist.barrier()
    return sorted(os.listdir(folder / "checkpoints"))


def test_names_and_total_limit_are_accelerates(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, numbered, tmp_path) == [["checkpoint_2", "checkpoint_3"]] * 2


def diverging(folder: Path) -> str:
    accelerator = accelerator_on_cpu()
    objects = prepared(accelerator)
    saver = enable(accelerator, writers="all")
    assert saver is not None
    if dist.get_rank():
        more = torch.nn.Parameter(torch.ones(30_000))
        objects[1].optimizer.add_param_group({"params": [more]})
        objects[0].module[0].register_forward_hook(lambda module, inputs, output: output + 0 * more.sum())
    train(accelerator, *objects)
    with pytest.raises(lazyckpt.SaveError) as caught:
        accelerator.save_state(folder / "0")
        saver.wait()
    return str(caught.value)


def test_a_rank_with_other_files_is_named(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks.run(2, diverging, tmp_path):
        assert "this rank has" in told and "rank 0" in told
    assert not (tmp_path / "0").exists()


def with_variables(values: list[str | None]) -> tuple[Any, str]:
    """``values``: LAZYCKPT_WRITERS of each rank. Returns the setting, and the error."""
    accelerator = accelerator_on_cpu()
    with pytest.MonkeyPatch.context() as patch:
        if (value := values[dist.get_rank()]) is not None:
            patch.setenv("LAZYCKPT_WRITERS", value)
        try:
            saver = enable(accelerator)
        except lazyckpt.ConfigError as error:
            assert not isinstance(getattr(accelerator.save_state, "__self__", None), StateSaver)
            return None, str(error)
        assert saver is not None
        chosen = saver._writers
        saver.close()
        own = enable(accelerator, writers="rank0")
        assert own is not None and own._writers is None, "code goes before the environment"
        own.close()
        return chosen, ""


def test_writers_are_a_setting_of_the_environment_that_all_ranks_share(ranks: Ranks) -> None:
    assert ranks.run(2, with_variables, ["all", "all"]) == [("all", "")] * 2
    assert ranks.run(2, with_variables, ["2", "2"]) == [(2, "")] * 2
    for _, error in ranks.run(2, with_variables, ["all", None]):
        assert "rank 0 has writers='all'; rank 1 has writers=None. Give all the same" in error


def enabled_here(values: list[str | None]) -> str:
    accelerator = accelerator_on_cpu()
    with pytest.MonkeyPatch.context() as patch:
        if (value := values[dist.get_rank()]) is not None:
            patch.setenv("LAZYCKPT_ENABLED", value)
        try:
            return type(enable(accelerator)).__name__
        except lazyckpt.ConfigError as error:
            return str(error)


def test_one_machine_without_lazyckpt_is_named(ranks: Ranks) -> None:
    """Regression: the others waited for it for ever."""
    assert ranks.run(2, enabled_here, ["false", "false"]) == ["NoneType"] * 2
    for values in (["false", None], [None, "false"]):
        for error in ranks.run(2, enabled_here, values):
            assert re.search("rank 0 has enabled=.*; rank 1 has enabled=.*LAZYCKPT_ENABLED", error), error
