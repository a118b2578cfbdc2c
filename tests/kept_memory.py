"""What lazyckpt keeps between two saves, in a process of its own: the bytes and the tensors of the state, as JSON.

With PYTHONMALLOC=malloc, all memory of Python, torch and the engine comes from malloc, which counts it to the byte.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import lazyckpt
from lazyckpt.capture.snapshot import Snapshot
from lazyckpt.pipeline.persist import Flight
from memory import allocated_bytes

NBYTES = 8192  # of a tensor: eager with a page witness, lazy without


def trained(parameters: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, list[torch.Tensor]]:
    """A model, its optimizer, and all tensors of both."""
    model = torch.nn.ParameterList(torch.zeros(NBYTES // 4) for _ in range(parameters))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.step()
    tensors = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
    return model, optimizer, tensors


def references(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """How many there are to each tensor, and to its storage."""
    gc.collect()
    storage_uses = torch._C._storage_Use_Count
    return [(sys.getrefcount(tensor), storage_uses(tensor.untyped_storage()._cdata)) for tensor in tensors]


def is_over() -> bool:
    """Whether nothing is left of any save; a background thread lets go of it after its handle is done."""
    gc.collect()
    return not any(type(found) in (Snapshot, Flight) for found in gc.get_objects())


def kept(folder: Path, parameters: int, witness: Any) -> tuple[int, int]:
    """Returns the bytes that are kept, and the number of tensors in the state."""
    model, optimizer, tensors = trained(parameters)
    before = references(tensors)  # torch makes an object for each storage, and keeps it as long as that
    small, its_optimizer, _ = trained(1)
    saves(folder / "small", small, its_optimizer, witness)  # now all is imported
    del small, its_optimizer, _
    while not is_over():
        time.sleep(0.01)
    bytes_before = allocated_bytes()
    ckpt = saves(folder / "state", model, optimizer, witness)
    while not is_over():
        time.sleep(0.01)
    assert references(tensors) == before
    found = allocated_bytes() - bytes_before
    ckpt.close()
    return found, len(tensors)


def saves(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, witness: Any
) -> lazyckpt.Checkpointer:
    """Saves after each of some steps; one more step follows."""
    ckpt = lazyckpt.Checkpointer(folder, keep_last=1, witness=witness)
    ckpt.track(model=model, optimizer=optimizer)
    optimizer.step()
    for step in range(4):
        ckpt.save(step).result()
        optimizer.step()
    return ckpt


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(kept(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
