"""One rank of a job, as a process: saves checkpoints of plain files, and reports what they came to.

    python -m ranks.actor PORT RANK WORLD_SIZE FOLDER SAVES TIMEOUT_S

Writes a line for each save to standard output: the step and "committed", or "aborted" with the error.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

from torch import distributed

from lazyckpt.errors import RankError
from lazyckpt.ranks.job import Job, _join
from lazyckpt.storage.manifest import folder_name


def save(job: Job, ordinal: int, step: int, directory: Path) -> None:
    """One save, as the pipeline does it. Raises RankError."""
    target = directory / folder_name(step)
    ballot = job.ballot(ordinal, step, "layout", target)
    name = f"rank-{job.rank}"
    if job.rank == 0:
        staging = job.stage(target)
        ballot.begin(staging.path.name)
    else:
        staging = job.attach(target, ballot.staged_name()[0])
    try:
        try:
            with open(staging.path / name, "x") as file:
                file.write(f"{step}.{ordinal}.{job.generation}\n" * 1000)
                file.flush()
                os.fsync(file.fileno())
            if job.rank > 0:
                staging.describe(None, [name])
            ballot.vote(name.encode())
            if job.rank == 0:
                names = [receipt.decode() for receipt in ballot.receipts()]
                (staging.path / "manifest").write_text(" ".join(names))
                staging.describe(None, [name, *names])
                ballot.decide()
                replaced = staging.publish()
                if replaced is not None:
                    from lazyckpt.storage import removal

                    removal.remove(replaced)
            else:
                ballot.outcome()
        except OSError as error:
            if (refused := ballot.refuse(str(error))) is not None:
                raise refused from error
    except RankError:
        staging.discard()
        raise


def main() -> None:
    port, rank, world_size, folder, saves, timeout_s = sys.argv[1:]
    store = distributed.TCPStore(
        "127.0.0.1", int(port), is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False
    )
    prefix = os.environ.get("PREFIX", "a")
    job = _join(distributed.PrefixStore(prefix, store), int(rank), int(world_size), Path(folder), float(timeout_s))
    print("joined", job.generation, flush=True)
    for ordinal in range(1, int(saves) + 1):
        try:
            save(job, ordinal, 100 + ordinal % 3, Path(folder))
            print(ordinal, "committed", flush=True)
        except RankError as error:
            print(ordinal, "aborted", error, flush=True)
    job.close()
    print("closed", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
