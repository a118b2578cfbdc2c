"""What the golden files hold, and how they were made: ``python -m golden.make FOLDER`` from ``tests``.

Values come from arithmetic, not from a random generator: any version of torch computes the same.
"""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import lazyckpt

SEED = 20250131
LOADER_BATCHES = 2  # taken before the checkpoint
DTYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "complex64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip


def pattern(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Bytes of all kinds; as floats also NaNs with payloads, infinities, denormals."""
    nbytes = math.prod(shape) * dtype.itemsize
    limit = 2 if dtype is torch.bool else 256
    data = bytes((i * i * 31 + i * 7 + seed * 101 + i // 256) % limit for i in range(nbytes))
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone().view(dtype).reshape(shape)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Finite ones, for what trains."""
    return torch.tensor([((i * 37 + seed * 11) % 201 - 100) / 64 for i in range(math.prod(shape))]).reshape(shape)


def dtypes() -> dict[str, torch.Tensor]:
    return {name: pattern(getattr(torch, name), 3, 4, seed=i) for i, name in enumerate(DTYPES)}


def tensors() -> dict[str, Any]:
    """Every kind of tensor that an archive can hold, and what stands beside them."""
    base = pattern(torch.float32, 6, 8, seed=99)
    tied = torch.nn.Parameter(numbers(4, 3, seed=1))
    return {
        "dtypes": dtypes(),
        "complex128": pattern(torch.complex128, 5),
        "base": base,
        "strided": base[1:5, ::2],
        "transposed": base.t(),
        "expanded": pattern(torch.int16, 1, 4).expand(3, 4),
        "tied": [tied, tied],
        "scalar": torch.tensor(7, dtype=torch.int32),
        "empty": torch.empty(0, 3),
        "sparse": torch.sparse_coo_tensor(torch.tensor([[0, 2], [1, 0]]), torch.tensor([1.5, -2.0]), (3, 3)).coalesce(),
        "values": [None, True, -(2**70), 0.1, float("inf"), "text ü \U0001f600", b"\0\xff", (1, ("two",)), {3: {4, 5}}],
    }


class Tied(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        with torch.no_grad():
            for number, tensor in enumerate((*self.parameters(), *self.buffers())):
                tensor.copy_(numbers(*tensor.shape, seed=seed + number).to(tensor.dtype))


def training(seed: int) -> dict[str, Any]:
    """Makes the tracked objects. Another ``seed`` gives another state of the same shape."""
    model = Tied(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 / (1 + seed))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = {
            "step": torch.tensor(float(seed + 1)),
            "exp_avg": numbers(*parameter.shape, seed=seed + 10 + number),
            "exp_avg_sq": numbers(*parameter.shape, seed=seed + 20 + number).abs(),
        }
    scheduler.last_epoch = seed
    extra = {"step": seed, "text": f"seed {seed}", "t": numbers(3, seed=seed)}
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "extra": extra}


def loader() -> Any:
    generator = torch.Generator()
    generator.manual_seed(SEED)
    return torch.utils.data.DataLoader(torch.arange(20), batch_size=2, shuffle=True, generator=generator)


def pair(seed: int, shard: Callable[[torch.nn.Module], object] = lambda model: None) -> dict[str, Any]:
    """Makes a model that several ranks may shard, and its optimizer, after a step."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=seed + number))
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)  # exact in binary
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.empty_like(parameter)
        whole = numbers(*parameter.shape, seed=seed + 10 + number)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        parameter.grad.copy_(whole)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def save_sharded(rank: int, folder: Path, ranks: int) -> None:
    """Saves, as one of several ranks."""
    torch.distributed.init_process_group("gloo", f"file://{folder}.store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    with lazyckpt.Checkpointer(folder) as ckpt:
        ckpt.track(**pair(1, lambda model: fully_shard(model, mesh=mesh)))
        ckpt.save(1)
    torch.distributed.destroy_process_group()


def seed_all() -> None:
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)


def lightning_checkpoint() -> dict[str, Any]:
    """In the shape in which Lightning's Trainer saves."""
    parts = training(2)
    return {
        "epoch": 1,
        "global_step": 2,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": parts["model"].state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"completed": 1}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_path": "x.ckpt"}},
        "optimizer_states": [parts["optimizer"].state_dict()],
        "lr_schedulers": [parts["scheduler"].state_dict()],
    }


def main(folder: Path) -> None:
    from accelerate import Accelerator

    from lazyckpt.integrations.accelerate import enable
    from lazyckpt.integrations.lightning import LazyCheckpointIO

    folder.mkdir(parents=True)
    lazyckpt.save(tensors(), folder / "tensors.pt")
    lazyckpt.save(dtypes() | {"scalar": torch.tensor(7), "empty": torch.empty(0, 3)}, folder / "tensors.safetensors")
    with lazyckpt.Checkpointer(folder / "run") as ckpt:
        ckpt.track(**training(1))
        tracked = ckpt.track_loader(loader())
        batches = iter(tracked)
        for _ in range(LOADER_BATCHES):
            next(batches)
        seed_all()
        ckpt.save(1)
    io = LazyCheckpointIO()
    io.save_checkpoint(lightning_checkpoint(), folder / "lightning.ckpt")
    io.teardown()
    parts = training(3)
    accelerator = Accelerator(cpu=True)
    enable(accelerator)
    accelerator.prepare(parts["model"], parts["optimizer"], parts["scheduler"])
    seed_all()
    accelerator.save_state(str(folder / "accelerate"))
    accelerator.end_training()
    torch.multiprocessing.spawn(save_sharded, (folder / "sharded", 2), nprocs=2)
    (folder / "sharded.store").unlink(missing_ok=True)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    sums = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in files]
    (folder / "SHA256SUMS").write_text("".join(sums))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
