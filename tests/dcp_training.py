"""The training on several ranks that the tests of DCP share, and what they ask of its checkpoints."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from lazyckpt.integrations.dcp import LazyStorageWriter


class Net(torch.nn.Module):
    """37 and 61 divide by no number of ranks here: shards are uneven."""

    def __init__(self, width: int, norm: Callable[[int], torch.nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Linear(37, width)
        self.norm = norm(width)
        self.down = torch.nn.Linear(width, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)).relu())


class Training:
    """A sharded model and its AdamW."""

    def __init__(
        self, kind: str, width: int = 61, norm: Callable[[int], torch.nn.Module] = torch.nn.BatchNorm1d
    ) -> None:
        world = dist.get_world_size()
        self.net = Net(width, norm)
        if kind == "fsdp":
            fully_shard(self.net, mesh=init_device_mesh("cpu", (world,)))
        elif kind == "tp":
            self._tensor_parallel(init_device_mesh("cpu", (world,)))
        elif kind == "2d":
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
            self._tensor_parallel(mesh["tp"])
            fully_shard(self.net, mesh=mesh["dp"])
        elif kind == "hsdp":
            fully_shard(self.net, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("r", "s")))
        else:
            assert kind == "replicated"
        self.optimizer = torch.optim.AdamW(
            self.net.parameters(), lr=0.01, foreach=kind == "fsdp"
        )  # foreach takes no mixture
        self.steps = 0

    def _tensor_parallel(self, mesh: Any) -> None:
        parallelize_module(
            self.net,
            mesh,
            {"up": ColwiseParallel(output_layouts=Replicate()), "down": RowwiseParallel(input_layouts=Replicate())},
        )

    def step(self) -> None:
        self.steps += 1
        x = torch.randn(8, 37, generator=torch.Generator().manual_seed(self.steps))
        self.net(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer, "progress": {"steps": self.steps, "note": "a"}}

    def load(self, state: dict[str, Any]) -> None:
        set_state_dict(self.net, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.steps = state["progress"]["steps"]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict | list):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from leaves(value, f"{name}.{key}")
    else:
        yield name, state


def content(state: Any) -> dict[str, Any]:
    """The bytes of what this rank holds, and everything else."""
    return {
        name: (str(v.dtype), tuple(v.shape), local(v).detach().contiguous().clone().view(torch.uint8).numpy().tobytes())
        if isinstance(v, torch.Tensor) and v.dim()
        else (v.item() if isinstance(v, torch.Tensor) else v)
        for name, v in leaves(state)
    }


def blank(state: Any) -> Any:
    """The same state with other values."""
    if isinstance(state, torch.Tensor):
        return torch.full_like(state, 7)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return type(state)() if isinstance(state, int | str) else state


def load(path: str, like: Any, reader: Callable[..., Any] | None = None) -> dict[str, Any]:
    state = blank(like)
    dcp.load(state, storage_reader=(reader or dcp.FileSystemReader)(path))
    return content(state)


def save(engine: str, state: Any, path: str, **others: Any) -> None:
    if engine == "plain":
        dcp.save(state, checkpoint_id=path, **others)
    elif engine == "sync":
        dcp.save(state, storage_writer=LazyStorageWriter(path), **others)
    else:
        save_async(state, path, **others).result()


def save_async(state: Any, to: str | LazyStorageWriter, **others: Any) -> Any:
    """Saves on a group of its own, so that training may communicate meanwhile."""
    writer = LazyStorageWriter(to) if isinstance(to, str) else to
    return dcp.async_save(state, storage_writer=writer, process_group=dist.new_group(backend="gloo"), **others)


def why(call: Callable[[], Any]) -> str:
    """What a call raised on this rank; DCP's exception is no Exception."""
    text = ""
    try:
        call()
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    gc.collect()  # the exception is in a circle with the frames of the save
    return text


def names(folder: str) -> list[str]:
    dist.barrier()
    found = sorted(os.listdir(folder))
    dist.barrier()
    return found
