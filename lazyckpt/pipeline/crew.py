"""The ranks that save and restore one sharded state together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lazyckpt.pipeline.job_request import Inventories, JobRequest
from lazyckpt.pipeline.plan import FilePlan
from lazyckpt.pipeline.rank_plan import Contents, RankCache, RankPlan
from lazyckpt.pipeline.request import About, Lineage
from lazyckpt.providers.composite import CompositeProvider
from lazyckpt.ranks.job import Job
from lazyckpt.reading.team import ALONE, JobTeam, Team


class Crew:
    """This rank's place among the ranks of its job, from save to save.

    Every rank saves the same steps in the same order. No call of this class but ``join`` and ``close`` communicates;
    a checkpoint's votes go over the background threads (ranks/)."""

    def __init__(self, job: Job | None) -> None:
        """``job``: None if this process is the only rank."""
        self._job = job
        self.rank = 0 if job is None else job.rank
        self.team: Team = ALONE if job is None else JobTeam(job)
        self._saves = 0
        self._cache = RankCache()
        self._inventories = Inventories()

    @classmethod
    def join(cls, directory: Path, *, timeout_s: float) -> Crew:
        """Waits for the other ranks. Raises ConfigError, which names the ranks, if they do not all see one folder, and
        RankError if one does not come."""
        import torch.distributed as dist

        alone = not dist.is_initialized() or dist.get_world_size() == 1
        return cls(None if alone else Job.join(directory, timeout_s=timeout_s))

    def request(
        self, path: Path, step: int, lineage: Lineage, about: About, state: CompositeProvider
    ) -> tuple[JobRequest, Mapping[str, FilePlan]]:
        """A save of ``state`` as checkpoint ``path``, and the plan of this rank's file."""
        self._saves += 1
        file, contents = f"__{self.rank}_0.distcp", Contents()
        request = JobRequest(
            path,
            step,
            lineage,
            about,
            rank=self.rank,
            contents={file: contents},
            cache=self._cache,
            inventories=self._inventories,
            job=self._job,
            number=self._saves,
            layout=", ".join(state.parts),
        )
        return request, {file: RankPlan(state, self.rank, self._cache, contents)}

    def close(self) -> None:
        if self._job is not None:
            self._job.close()
