"""The ranks that save the state of a Checkpointer together, and what one of them saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from lazyckpt import private_names
from lazyckpt.config import Config
from lazyckpt.pipeline.plan import ArchiveCache, FilePlan, StatePlan
from lazyckpt.pipeline.replicated.plan import ReplicaCache, Writers
from lazyckpt.pipeline.replicated.request import replicated_checkpoint
from lazyckpt.pipeline.request import About, CheckpointRequest, Lineage, Request
from lazyckpt.pipeline.sharded.crew import Crew
from lazyckpt.pipeline.sharded.request import shared_checkpoint
from lazyckpt.providers.composite import CompositeProvider
from lazyckpt.providers.global_state import holds_shards
from lazyckpt.providers.module import ModuleProvider
from lazyckpt.providers.objects import StateProvider
from lazyckpt.providers.optimizer import OptimizerProvider
from lazyckpt.ranks.rank_claims import RankClaims
from lazyckpt.ranks.team import has_ranks
from lazyckpt.storage.manifest import STATE


class Joining:
    """Joins the other ranks at the first call that needs them."""

    directory: Path
    config: Config
    _crew: Crew | None
    _provider: CompositeProvider
    _lineage: Lineage
    _read_only: bool
    _claims: RankClaims
    _archive: ArchiveCache
    _leaving: list[Callable[[], None]]
    _tracks_shards: bool
    _writers: str | int | None
    _replicas: ReplicaCache | None

    def _join_if_shared(self) -> Crew | None:
        """The ranks that save the tracked state together; None if this process saves by itself. The first call that
        finds sharded state, or has ``writers``, waits for the other ranks."""
        replicated = self._writers is not None and not self._read_only and has_ranks()
        if self._crew is None and ((sharded := self._is_sharded()) or replicated):
            if sharded:
                private_names.check("torch.distributed.checkpoint")
            if not self._read_only:
                self._claims.announce()
            waiting = (lambda: None) if self._read_only else self._claims.await_all
            self._crew = Crew.join(self.directory, timeout_s=self.config.rank_timeout_s, waiting=waiting)
            self._leaving.insert(1, self._crew.close)  # the last one runs first: mirrors, which ask the other ranks
            if replicated and self._writers is not None and self._crew.group is not None:
                writers = Writers.meet(self._crew.group, self._writers, self.config.max_in_flight)
                self._replicas = ReplicaCache(writers)
        return self._crew

    def _is_sharded(self) -> bool:
        return self._tracks_shards or any(map(holds_shards, self._trained()))

    def _trained(self) -> list[StateProvider]:
        """The parts that may be sharded after they were tracked."""
        return [part for part in self._provider.parts.values() if isinstance(part, ModuleProvider | OptimizerProvider)]

    def _request(
        self, crew: Crew | None, path: Path, step: int, about: About
    ) -> tuple[Request, Mapping[str, FilePlan]]:
        """Returns a save of the tracked state as checkpoint ``path``, and the plans of this rank's files. Raises
        ConfigError if other ranks save there, too."""
        if crew is None:
            self._claims.enter()
            request: Request = CheckpointRequest(path, step, self._lineage, about, self._claims.look)
            return request, {STATE: StatePlan(self._provider, self._archive)}
        if self._replicas is None or self._is_sharded():
            private_names.check("torch.distributed.checkpoint")
            return shared_checkpoint(crew, path, step, self._lineage, about, self._provider)
        return replicated_checkpoint(crew, self._replicas, path, step, self._lineage, about, self._provider)
