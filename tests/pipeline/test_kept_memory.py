"""Between two saves, lazyckpt keeps at most 1 KiB for each tensor of the state, and none of the tensors."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import kept_memory
import pytest
import torch

import lazyckpt
from memory import allocated_bytes

MOST_BYTES = 1024  # for each tensor
PARAMETERS = 2500  # each has three tensors of AdamW


@pytest.mark.long
@pytest.mark.skipif(not allocated_bytes(), reason="the C library does not count what malloc gives")
@pytest.mark.parametrize("witness", ["auto"])
def test_a_tensor_costs_at_most_so_much_memory_between_saves(witness: str, tmp_path: Path) -> None:
    command = [sys.executable, kept_memory.__file__, str(tmp_path), str(PARAMETERS), witness]
    environment = {**os.environ, "PYTHONMALLOC": "malloc"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    nbytes, tensors = json.loads(done.stdout.splitlines()[-1])
    assert tensors == 4 * PARAMETERS
    assert nbytes <= MOST_BYTES * tensors, f"{nbytes / tensors:.0f} bytes a tensor"


@pytest.mark.parametrize("witness", ["auto", "versions"])
def test_no_storage_outlives_its_tensors_between_saves(witness: str, tmp_path: Path) -> None:
    _, _, tensors = kept_memory.trained(3)
    refs = [torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
    with lazyckpt.Saver(witness=witness) as saver:
        for _ in range(2):
            saver.save({"tensors": tensors}, tmp_path / "state.pt", blocking=True)
        del tensors, _
        gc.collect()
        assert all(ref.expired() for ref in refs)


def test_a_save_makes_no_dict_for_a_tensor(tmp_path: Path) -> None:
    """Regression: each save asked for ``__dict__``, which Python then kept with the tensor, in 3.13 344 bytes."""
    model, optimizer, tensors = kept_memory.trained(3)
    kept_memory.saves(tmp_path, model, optimizer, "auto").close()
    assert not [found for tensor in tensors for found in gc.get_referents(tensor) if isinstance(found, dict)]
