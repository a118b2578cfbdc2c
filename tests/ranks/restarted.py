"""Run by torchrun: the ranks save, and rank 1 ends in the middle of the first save of the first attempt."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers the backend, which connects to no process
from torch import distributed

from lazyckpt.ranks.group import RankGroup
from ranks.actor import save


def main() -> None:
    store, rank, world_size = next(distributed.rendezvous("env://"))
    distributed.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    group = RankGroup.join(Path(sys.argv[1]), timeout_s=10)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    assert group.generation == attempt + 1
    if attempt == 0 and group.rank == 1:
        group.ballot(1, 1, "layout", group.directory / "step-00000001").staged_name()
        os._exit(1)
    save(group, 1, 1)
    Path(sys.argv[2], f"{attempt}-{group.rank}").write_text(str(sorted(os.listdir(group.directory))))
    distributed.destroy_process_group()  # rank 0 may be the one that serves the store
    group.close()


if __name__ == "__main__":
    main()
