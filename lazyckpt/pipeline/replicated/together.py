"""The ranks that write files of a Saver together, as one of them sees them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from pathlib import Path
from typing import Any

from lazyckpt import private_names
from lazyckpt.config import Config
from lazyckpt.errors import RankError, SaveError
from lazyckpt.pipeline.plan import FilePlan
from lazyckpt.pipeline.replicated.file import ReplicaFile
from lazyckpt.pipeline.replicated.plan import ReplicaCache, Writers
from lazyckpt.pipeline.replicated.request import TogetherRequest
from lazyckpt.pipeline.replicated.whole import WholeFile, WholeObject, WholeTensors
from lazyckpt.pipeline.sharded.crew import Crew
from lazyckpt.storage.commit import FileStaging, Staging

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

    def folder(
        self,
        path: Path,
        step: int | None,
        prepare: Callable[[Path], None],
        *,
        keep_others: bool,
        latest: Path | None = None,
    ) -> TogetherFolderRequest:
        """Begins the folder ``path``: rank 0 makes it under a temporary name; the others learn that when it saves. Rank
        0 calls ``prepare`` with the folder above. Raises SaveError as ``lone_file``, and OSError."""
        if step is not None and (why := self.crew.numbers.find(step, path)) is not None:
            raise SaveError(why, path=path, step=step)
        request = TogetherFolderRequest(path, step, self, prepare, keep_others=keep_others, latest=latest)
        try:
            if self.crew.rank == 0:
                request.stage()
        except BaseException as error:
            request.failed(error)
            raise
        request.reached()  # the caller may have large files to write before it saves
        return request


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


class TogetherFolderRequest(TogetherRequest):
    """A folder that all ranks fill, with files that they write together."""

    def __init__(
        self,
        path: Path,
        step: int | None,
        together: Together,
        prepare: Callable[[Path], None],
        *,
        keep_others: bool,
        latest: Path | None,
    ) -> None:
        super().__init__(
            path,
            step,
            crew=together.crew,
            layout=path.name,
            alone=lambda: Staging(path),
            prepare=prepare,
            keep_others=keep_others,
            latest=latest,
        )
        self._together = together

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self._rank == 0

    def write_together(
        self, files: Mapping[str, tuple[Any, Mapping[str, str] | None]], own: Mapping[str, FilePlan]
    ) -> Mapping[str, FilePlan]:
        """The plans of all files of this rank. ``files``: contents and metadata of those that all ranks have."""
        replicas = []
        for name, (obj, metadata) in files.items():
            cache = self._together.cache(name, self._ordinal)
            whole: WholeFile
            if name.endswith(".safetensors"):
                whole = WholeTensors(obj, metadata, name, cache.archive.safetensors)
            else:
                whole = WholeObject(obj, None, cache.archive, name)
            replicas.append(ReplicaFile(name, whole, cache, self._ordinal))
        self._replicas = replicas
        return self.plans(own)


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

    def lost_rank(self, path: Path) -> RankError | None:
        """See ``Saver.lost_rank``."""
        group = next((crew.group for crew in self._crews.values() if crew.group is not None), None)
        return None if group is None else group.lost_rank(path)

    def close(self) -> None:
        for crew in self._crews.values():
            crew.close()
