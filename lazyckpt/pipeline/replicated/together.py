"""The ranks that write files of a Saver together, as one of them sees them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from pathlib import Path
from typing import Any

from lazyckpt import private_names
from lazyckpt.config import Config
from lazyckpt.errors import SaveError
from lazyckpt.pipeline.plan import FilePlan
from lazyckpt.pipeline.replicated.file import ReplicaFile
from lazyckpt.pipeline.replicated.plan import ReplicaCache, Writers
from lazyckpt.pipeline.replicated.request import TogetherRequest
from lazyckpt.pipeline.replicated.whole import WholeObject
from lazyckpt.pipeline.sharded.crew import Crew
from lazyckpt.storage.commit import FileStaging

_MAX_CREWS = 8  # each has a thread and connections of its own


class Together:
    """This rank's place among those that write together, and the data that its successive saves share."""

    def __init__(self, crew: Crew, setting: str | int, in_flight: int) -> None:
        """Every rank calls it, once. Raises ConfigError, on all ranks, if they have other settings."""
        assert crew.group is not None
        self.crew = crew
        self._writers = Writers.meet(crew.group, setting, in_flight)
        self._caches: dict[Hashable, ReplicaCache] = {}

    def cache(self, key: Hashable, ordinal: int) -> ReplicaCache:
        """That of the files with this key, of which the save with this number may be the first."""
        if key not in self._caches:
            self._caches[key] = ReplicaCache(self._writers, ordinal)
        return self._caches[key]

    def lone_file(
        self,
        path: Path,
        step: int | None,
        obj: dict[str, Any],
        everyones: Collection[str],
        prepare: Callable[[Path], None],
    ) -> tuple[LoneFileRequest, Mapping[str, FilePlan]]:
        """Returns a save of ``obj`` as the file ``path``, and the plans of this rank's files. ``everyones``: the names
        of the values that all ranks hold; the others are rank 0's. Rank 0 calls ``prepare`` with the folder.

        Raises SaveError if this rank has made other calls than rank 0."""
        if step is not None and (why := self.crew.numbers.find(step, path)) is not None:
            raise SaveError(why, path=path, step=step)
        request = LoneFileRequest(path, step, self.crew)
        try:
            if self.crew.rank == 0:
                prepare(path.parent)
            return request, request.write_together(self, obj, everyones)
        except BaseException as error:
            request.failed(error)
            raise


class LoneFileRequest(TogetherRequest):
    """A lone file that all ranks write together."""

    def __init__(self, path: Path, step: int | None, crew: Crew) -> None:
        super().__init__(path, step, crew=crew, layout=path.name, alone=lambda: FileStaging(path), lone=True)

    def write_together(
        self, together: Together, obj: dict[str, Any], everyones: Collection[str]
    ) -> Mapping[str, FilePlan]:
        mine = obj if self._rank == 0 else {name: value for name, value in obj.items() if name in everyones}
        cache = together.cache(tuple(name for name in obj if name in everyones), self._ordinal)
        whole = WholeObject(mine, everyones, cache.archive)
        self._replicas = [ReplicaFile(self.path.name, whole, cache, self._ordinal)]
        return self.plans({})


class Teams:
    """The ranks with which a Saver saves."""

    def __init__(self, config: Config, drain: Callable[[], None]) -> None:
        """``drain`` waits until nothing is in flight."""
        self._config = config
        self._drain = drain
        self._crews: dict[Path, Crew] = {}  # by the folder in which the ranks stage
        self._together: dict[Path, Together] = {}

    def crew(self, folder: Path) -> Crew:
        """The ranks that stage in a folder together. The first call for it waits for the other ranks."""
        if folder not in self._crews:
            if len(self._crews) == _MAX_CREWS:
                self._drain()
                oldest = next(iter(self._crews))
                self._together.pop(oldest, None)
                self._crews.pop(oldest).close()
            private_names.check("torch.distributed.checkpoint")
            self._crews[folder] = Crew.join(folder, timeout_s=self._config.rank_timeout_s)
        return self._crews[folder]

    def together(self, folder: Path, writers: str | int) -> Together:
        """The same, for files that they write together. Raises ConfigError as ``Together``."""
        crew = self.crew(folder)
        if folder not in self._together:
            self._together[folder] = Together(crew, writers, self._config.max_in_flight)
        return self._together[folder]

    def close(self) -> None:
        for crew in self._crews.values():
            crew.close()
