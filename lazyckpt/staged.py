"""A folder of several files, some saved lazily, that appears whole under its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lazyckpt.errors import ConfigError
from lazyckpt.pipeline.background import Target
from lazyckpt.pipeline.handle import SaveHandle
from lazyckpt.pipeline.plan import FilePlan, ObjectProvider, ZipPlan, plan_for
from lazyckpt.pipeline.reentry import alone
from lazyckpt.providers.naming import name_in
from lazyckpt.storage import commit

if TYPE_CHECKING:
    from lazyckpt.saver import Saver


class StagedFolder:
    """A folder on its way; made by ``Saver.stage``. As a context manager it discards what is not saved."""

    def __init__(self, saver: Saver, staging: commit.Staging, step: int | None) -> None:
        self._saver = saver
        self._callers = saver._callers
        self._staging: commit.Staging | None = staging
        self._step = step
        self._files: dict[str, tuple[Any, Mapping[str, str] | None]] = {}
        self.path = staging.path
        """Where small files can be written with any library; they are made durable, too."""

    def add(self, name: str, obj: Any, metadata: Mapping[str, str] | None = None) -> None:
        """A file of the folder, captured at ``save``: ``name`` is relative to the folder. ``.safetensors`` takes a
        dict of tensors and ``metadata``, any other name gives what ``torch.save`` writes.

        Raises ConfigError for a name outside the folder, or one that was added before, and after ``save``.
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
        staging, saver = self._staging, self._saver
        if staging is None:
            raise ConfigError("a staged folder is saved once")
        self._staging = None
        files: dict[str, FilePlan] = {}
        for name, (obj, metadata) in self._files.items():
            if name.endswith(".safetensors"):
                files[name] = plan_for(name, obj, metadata)
                continue
            if name not in saver._folder_plans:
                provider = ObjectProvider(None)
                saver._folder_plans[name] = provider, ZipPlan(provider)
            provider, files[name] = saver._folder_plans[name]
            provider.obj = obj
        objects = {name: obj for name, (obj, _) in self._files.items()}
        handle = SaveHandle(self._step, staging.target)
        try:
            return saver.submit(
                handle,
                Target(files=files, stage=lambda: staging),
                blocking=blocking,
                name_of=lambda view: name_in(objects, "", view.storage),
                training_step=self._step,
            )
        finally:
            if handle._snapshot is None:  # it never reached the background
                staging.discard()
            for provider, _ in saver._folder_plans.values():
                provider.obj = None

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
