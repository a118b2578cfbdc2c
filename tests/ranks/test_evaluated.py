"""After an evaluation, a forward without backward, FSDP2 modules show whole parameters: nothing depends on that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lazyckpt
from lazyckpt.integrations.dcp import LazyStorageReader, LazyStorageWriter
from ranks.test_crew import Net, equal, state_of, trained, whole


def root(model: Net) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def nested(model: Net, **how: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh, **how)


def kept(model: Net) -> None:
    nested(model, reshard_after_forward=False)


def in_pairs(model: Net) -> None:
    nested(model, reshard_after_forward=2)


def without_root(model: Net) -> None:
    fully_shard(model.down, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=False)


def with_tensor_parallelism(model: Net) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"down": ColwiseParallel(), "out": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])


def built(shard: Callable[[Net], None]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Net()
    shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def evaluate(model: torch.nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.ones(8, 33))
    model.train()


def after_evaluations(folder: Path, shard: Callable[[Net], None]) -> None:
    model, optimizer = built(shard)
    trained(model, optimizer, 2)
    evaluate(model)
    with lazyckpt.Checkpointer(folder, best="loss") as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        evaluate(model)
        saved = ckpt.save(2, metrics={"loss": 1.0})
        evaluate(model)
        expected = state_of(model, optimizer)
        assert Path(saved.result(), ".metadata").exists()
        for again in (
            lambda: ckpt.restore(best=True),
            lambda: ckpt.restore(step=2, strict=False),
            lambda: ckpt.rollback(2),
        ):
            trained(model, optimizer, 1)
            evaluate(model)
            assert again() is not None
            assert equal(state_of(model, optimizer), expected)
            for parameter in model.parameters():
                assert isinstance(optimizer.state[parameter]["exp_avg"], DTensor) == isinstance(parameter, DTensor)
    trained(model, optimizer, 1)


def after_a_forward_that_raised(folder: Path, shard: Callable[[Net], None]) -> None:
    model, optimizer = built(shard)
    trained(model, optimizer, 2)
    expected = state_of(model, optimizer)
    with lazyckpt.Checkpointer(folder) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        ckpt.save(2).result()
        trained(model, optimizer, 1)
        with pytest.raises(RuntimeError, match="shape"):
            model(torch.ones(8, 32))
        assert ckpt.restore() == 2
    assert equal(state_of(model, optimizer), expected)
    for parameter in model.parameters():
        assert isinstance(optimizer.state[parameter]["exp_avg"], DTensor) == isinstance(parameter, DTensor)


def the_model_alone(folder: Path, shard: Callable[[Net], None]) -> None:
    """No optimizer tells that the model is sharded."""
    model, optimizer = built(shard)
    trained(model, optimizer, 1)
    evaluate(model)
    expected = whole(dict(model.state_dict()))
    with lazyckpt.Checkpointer(folder) as ckpt:
        evaluate(model)
        with pytest.raises(lazyckpt.ConfigError, match="not sharded"):
            ckpt.track(model=model, save_dtype=torch.bfloat16)
        ckpt.track(model=model)
        evaluate(model)
        path = ckpt.save(1).result()
        evaluate(model)
        with pytest.raises(lazyckpt.ConfigError, match="DTensor"):
            ckpt.save_part("model", folder / f"part-{dist.get_rank()}.pt")
        trained(model, optimizer, 1)
        evaluate(model)
        assert ckpt.restore() == 1
        assert equal(whole(dict(model.state_dict())), expected)
    trained(model, optimizer, 1)
    evaluate(model)
    fresh, _ = built(shard)
    evaluate(fresh)
    state = {"model": get_model_state_dict(fresh)}
    dist.checkpoint.load(state, storage_reader=LazyStorageReader(path))
    assert equal(whole(state["model"]), expected)
    evaluate(model)
    now = {"model": get_model_state_dict(model)}
    dist.checkpoint.save(now, storage_writer=LazyStorageWriter(folder / "dcp"))
    dist.checkpoint.load(state, storage_reader=LazyStorageReader(folder / "dcp"))
    assert equal(whole(state["model"]), whole(now["model"]))


@pytest.mark.long(first=4)
@pytest.mark.parametrize("case", [after_evaluations, the_model_alone])
@pytest.mark.parametrize(
    ("shard", "world"),
    [(root, 2), (nested, 2), (kept, 2), (without_root, 2), (in_pairs, 4), (with_tensor_parallelism, 4)],
)
def test_an_evaluation_before_changes_nothing(ranks: Any, tmp_path: Path, case: Any, shard: Any, world: int) -> None:
    """Regression: "got mixed torch.Tensor and DTensor", or moments became plain tensors and the next step failed."""
    ranks.run(world, case, tmp_path / "run", shard)


@pytest.mark.parametrize("shard", [root, kept, without_root])
def test_a_forward_that_raised_before_changes_nothing(ranks: Any, tmp_path: Path, shard: Any) -> None:
    """Regression: moments became plain tensors of whole parameters, such as after an evaluation without memory."""
    ranks.run(2, after_a_forward_that_raised, tmp_path / "run", shard)
