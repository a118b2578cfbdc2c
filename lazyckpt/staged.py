"""``StagedFolder``: a folder of several files, some saved lazily, that appears whole under its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from lazyckpt.errors import ConfigError, described
from lazyckpt.pipeline.handle import SaveHandle
from lazyckpt.pipeline.launch import Launcher
from lazyckpt.pipeline.plan import ArchiveCache, FilePlan, plan_for
from lazyckpt.pipeline.reentry import alone
from lazyckpt.pipeline.replicated.together import TogetherFolderRequest
from lazyckpt.pipeline.request import Request
from lazyckpt.pipeline.sharded.request import SharedRequest
from lazyckpt.providers.global_state import StateDict


class StagedFolder:
    """A folder on its way; made by ``Saver.stage``. As a context manager it discards the folder unless it was saved.

    If several ranks fill it, it is discarded on all of them as soon as one does not save it."""

    def __init__(self, launcher: Launcher, request: Request, archives: dict[str, ArchiveCache]) -> None:
        """``archives``: the caches of archives in earlier folders, by name."""
        self._launcher = launcher
        self._callers = launcher.callers
        self._request: Request | None = request
        self._archives = archives
        self._files: dict[str, tuple[Any, Mapping[str, str] | None]] = {}
        self._compact: set[str] = set()  # names of files
        self._shards: dict[str, Mapping[str, Any]] = {}
        self._together: list[str] = []
        self.path = request.where()
        """Where any library may write small files, on every rank. They become durable, too."""

    def add(self, name: str, obj: Any, metadata: Mapping[str, str] | None = None, *, compact: bool = False) -> None:
        """Add a file, captured at ``save``. ``name`` is relative to the folder. A ``.safetensors`` file takes a dict of
        tensors and ``metadata``; any other name gives ``torch.save``'s format. The file is this rank's own.

        ``torch.save`` writes the whole storage below a view. With ``compact``, a tensor that shows a part of its
        storage is written as a storage of its own: the bytes from its first to its last element. Tensors that have a
        byte in common stay one storage. So the file is as small as one of clones, and a storage that an optimizer owns
        is still copied lazily. Only plain tensors and parameters are cut: a storage that is seen in another way is
        written whole, as those of sparse tensors, of subclasses, and of tensors with attributes or hooks.

        Raises ConfigError for a name outside the folder or one that was added before, and after ``save``.
        """
        self._check_name("add", name)
        if not Path(name).parts:
            raise ConfigError(f"add: {name!r} is not a new name inside the folder")
        self._files[name] = obj, metadata
        if compact:
            self._compact.add(name)

    def add_shards(self, name: str, state: Mapping[str, Any]) -> None:
        """Add a state dict that the ranks hold together, captured at ``save``, as a folder of
        torch.distributed.checkpoint: ``.metadata``, and a file of each rank. ``name`` is relative to the folder, "."
        the folder itself.

        Every rank adds the same names. Of a DTensor each rank writes its shard; of anything else, which should be equal
        everywhere, rank 0's is saved, unless only another rank has it. Raises ConfigError as ``add`` does, and for a
        folder that was staged without ``all_ranks``.
        """
        if self._request is not None and (
            isinstance(self._request, TogetherFolderRequest) or not isinstance(self._request, SharedRequest)
        ):
            raise ConfigError(f"add_shards: {name!r}: this takes a folder of stage(..., all_ranks=True)")
        self._check_name("add_shards", name)
        self._shards[name] = state

    @property
    def names(self) -> list[str]:
        """Of the files that were added, in this order."""
        return list(self._files)

    def write_together(self, names: Iterable[str]) -> None:
        """For the trainers: the ranks write these files together. Every rank has added them, with equal contents, and
        calls this with the same names in the same order, for a folder that was staged with ``writers``. Rank 0 writes
        its other files; those of other ranks are not saved. Raises ConfigError for a compact file."""
        self._together = list(names)
        if not self._compact.isdisjoint(self._together):
            raise ConfigError(f"write_together: {sorted(self._compact)} are compact; only one rank writes such a file")
        if isinstance(self._request, TogetherFolderRequest) and not self._request.is_first:
            self._files = {name: self._files[name] for name in self._together}

    def _check_name(self, call: str, name: str) -> None:
        if self._request is None:
            raise ConfigError(f"{call}: {name!r} comes too late: the folder was saved or discarded")
        outside = Path(name).is_absolute() or ".." in Path(name).parts
        if outside or name in self._files or name in self._shards:
            raise ConfigError(f"{call}: {name!r} is not a new name inside the folder")

    @alone("save()")
    def save(self, *, blocking: bool = False, hold_back: bool = False) -> SaveHandle:
        """Snapshot the added objects; the folder gets its name when everything in it is durable. See ``Saver.save``.

        ``hold_back``: the mirrors take it when ``Saver.mirror`` is called, after other code has added files."""
        request, self._request = self._request, None
        if request is None:
            raise ConfigError("a staged folder is saved once")
        if request.arrivals is not None:
            request.arrivals.is_held_back = hold_back
        plans: dict[str, FilePlan] = {
            name: plan_for(
                name,
                obj,
                metadata,
                cache=self._archives.setdefault(name, ArchiveCache()),
                prefix=name,
                compact=name in self._compact,
            )
            for name, (obj, metadata) in self._files.items()
            if name not in self._together
        }
        if isinstance(request, TogetherFolderRequest):
            plans = {**request.write_together({name: self._files[name] for name in self._together}, plans)}
        elif isinstance(request, SharedRequest):
            plans.update(
                request.plan("" if name == "." else name, StateDict(state)) for name, state in self._shards.items()
            )
        return self._launcher.launch(request, plans, blocking=blocking, training_step=request.step)

    def discard(self, why: str = "") -> None:
        """Remove the staged folder, unless it was saved. ``why`` is told to the other ranks."""
        request, self._request = self._request, None
        if request is not None:
            request.abandon(why)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the staged folder {self.path} cannot be copied or pickled, since it belongs to a Saver of this process; "
            "save it here, and pass on the path that result() of the handle returns"
        )

    def __enter__(self) -> StagedFolder:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.discard("" if error is None else described(error))
