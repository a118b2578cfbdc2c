"""Many ranks and their mirrors: rank 0 uploads the files of all, and all of them restore from there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from object_store import CREDENTIALS, S3
from processes import Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lazyckpt


def net(sharded: bool) -> torch.nn.Module:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(600, 701), torch.nn.Linear(701, 300))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def case(folder: Path, url: str, environment: dict[str, str], sharded: bool) -> Any:
    os.environ.update(environment)
    writers = None if sharded else "all"
    with lazyckpt.Checkpointer(folder / "a", mirrors=[url], writers=writers) as ckpt:
        model = net(sharded)
        ckpt.track(model=model)
        handle = ckpt.save(1)
        handle.result(60)
        said = ""
        try:
            handle.mirrored().result(60)
        except lazyckpt.MirrorError as error:
            said = error.what
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "a")
    dist.barrier()
    with lazyckpt.Checkpointer(folder / "b", mirrors=[url], writers=writers) as ckpt:
        again = net(sharded)
        with torch.no_grad():
            for p in again.parameters():
                p.zero_()
        ckpt.track(model=again)
        restored = ckpt.restore()
    same = all(torch.equal(a, b) for a, b in zip(values(again), values(model), strict=True))
    return str(restored.path) if restored is not None else None, same, said


@pytest.mark.parametrize("sharded", [True, False])
def test_rank_0_uploads_and_all_restore(ranks: Ranks, s3: S3, tmp_path: Path, sharded: bool) -> None:
    environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": s3.proxy.endpoint}
    found = ranks.run(2, case, tmp_path, s3.url(), environment, sharded)
    where = f"{s3.url()}/step-00000001"
    assert found == [(where, True, ""), (where, True, "rank 0 uploads for all ranks; wait there")]
    assert lazyckpt.verify(s3.url()).ok
