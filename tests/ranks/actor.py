"""Ranks as processes. They save checkpoints of plain files, as the pipeline would, and log what the saves came to."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from lazyckpt.errors import RankError
from lazyckpt.ranks.group import RankGroup, join
from lazyckpt.storage import removal
from lazyckpt.storage.manifest import folder_name
from ranks.jobs import Job

STEPS = 3  # a run saves these again and again


@dataclass(frozen=True)
class Orders(Job):
    """What the ranks of a job do."""

    saves: int
    timeout_s: float = 1.5
    linger: bool = True  # False: ends as soon as the last save is settled, without close()

    def run(self, rank: int) -> None:
        with open(self.log(rank), "x", buffering=1) as log:
            os.dup2(os.open(f"{self.log(rank)}.err", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
            group = join(self.store(rank), rank, self.world_size, self.folder, self.timeout_s)
            print("joined", file=log)
            for ordinal in range(1, self.saves + 1):
                try:
                    save(group, ordinal, ordinal % STEPS)
                    print(f"{ordinal} committed", file=log)
                except RankError as error:
                    print(f"{ordinal} aborted {error}", file=log)
                    break
            if self.linger:
                group.close()
            print("closed", file=log)
        os._exit(0)


def save(group: RankGroup, ordinal: int, step: int) -> None:
    """One save, as the pipeline does it. Raises RankError."""
    target = group.directory / folder_name(step)
    ballot = group.ballot(ordinal, step, "layout", target)
    group.reach(ordinal)
    name = f"rank-{group.rank}"
    try:
        if group.rank == 0:
            staging = group.stage(target)
            ballot.begin(staging.path.name)
        else:
            staging = group.attach(target, ballot.staged_name()[0])
        with open(staging.path / name, "x") as file:
            file.write(f"{step} {ordinal} {group.generation} {group.world_size}\n" * 500)
            file.flush()
            os.fsync(file.fileno())
        if group.rank > 0:
            staging.describe(None, [name])
        ballot.vote(name.encode())
        if group.rank > 0:
            ballot.outcome()
            return
        names = [receipt.decode() for receipt in ballot.receipts()]
        (staging.path / "names").write_text(" ".join(names))
        staging.describe(None, names)
        ballot.decide()
        replaced = staging.publish()
        if replaced is not None:
            removal.remove(replaced)
    except OSError as error:
        if (refused := ballot.refuse(f"{error.strerror} ({error.filename})")) is not None:
            raise refused from error
