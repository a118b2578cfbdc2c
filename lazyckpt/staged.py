"""``StagedFolder``: a folder of several files, some saved lazily, that appears whole under its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from lazyckpt.errors import ConfigError
from lazyckpt.pipeline.handle import SaveHandle
from lazyckpt.pipeline.launch import Launcher
from lazyckpt.pipeline.plan import ArchiveCache, plan_for
from lazyckpt.pipeline.reentry import alone
from lazyckpt.pipeline.request import Request
from lazyckpt.storage import commit


class StagedFolder:
    """A folder on its way; made by ``Saver.stage``. As a context manager it discards what is not saved."""

    def __init__(
        self, launcher: Launcher, staging: commit.Staging, step: int | None, archives: dict[str, ArchiveCache]
    ) -> None:
        """``archives``: what the archives of earlier folders left behind, by name."""
        self._launcher = launcher
        self._callers = launcher.callers
        self._staging: commit.Staging | None = staging
        self._step = step
        self._archives = archives
        self._files: dict[str, tuple[Any, Mapping[str, str] | None]] = {}
        self.path = staging.path
        """Where any library may write small files. They become durable, too."""

    def add(self, name: str, obj: Any, metadata: Mapping[str, str] | None = None) -> None:
        """Add a file, captured at ``save``. ``name`` is relative to the folder. A ``.safetensors`` file takes a dict of
        tensors and ``metadata``; any other name gives what ``torch.save`` writes.

        Raises ConfigError for a name outside the folder or one that was added before, and after ``save``.
        """
        if self._staging is None:
            raise ConfigError(f"add: {name!r} comes too late: the folder was saved or discarded")
        parts = Path(name).parts
        if not parts or Path(name).is_absolute() or ".." in parts or name in self._files:
            raise ConfigError(f"add: {name!r} is not a new name inside the folder")
        self._files[name] = obj, metadata

    @alone("save()")
    def save(self, *, blocking: bool = False) -> SaveHandle:
        """Snapshot what was added; the folder gets its name when all in it is durable. See ``Saver.save``."""
        staging, self._staging = self._staging, None
        if staging is None:
            raise ConfigError("a staged folder is saved once")
        plans = {
            name: plan_for(name, obj, metadata, cache=self._archives.setdefault(name, ArchiveCache()), prefix=name)
            for name, (obj, metadata) in self._files.items()
        }
        request = Request(staging.target, self._step, staging)
        return self._launcher.launch(request, plans, blocking=blocking, training_step=self._step)

    def discard(self) -> None:
        """Remove what was staged, unless it was saved."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.discard()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the staged folder {self.path} cannot be copied or pickled, since it belongs to a Saver of this process; "
            "save it here, and pass on the path that result() of the handle returns"
        )

    def __enter__(self) -> StagedFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()
