"""The ranks that save and restore one sharded state together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from lazyckpt.errors import SaveError, save_error
from lazyckpt.pipeline.plan import FilePlan, NoPlan
from lazyckpt.pipeline.request import About, Lineage, Request
from lazyckpt.pipeline.sharded.request import JobCheckpointRequest, JobRequest, Member
from lazyckpt.providers.composite import CompositeProvider
from lazyckpt.providers.global_state import NameCache, TrackedState
from lazyckpt.ranks.group import RankGroup
from lazyckpt.ranks.team import ALONE, GroupTeam, Team
from lazyckpt.storage.commit import Staging
from lazyckpt.storage.manifest import STATE
from lazyckpt.warn import warn


class Crew:
    """This rank's place among the ranks of its job, from save to save.

    Every rank saves the same steps in the same order. No call of this class but ``join``, ``stage`` and ``close``
    communicates, and ``request`` after a save that was refused; a checkpoint's votes go over the background threads
    (ranks/)."""

    def __init__(self, group: RankGroup | None) -> None:
        """``group``: None if this process is the only rank."""
        self._group = group
        self.rank = 0 if group is None else group.rank
        self.team: Team = ALONE if group is None else GroupTeam(group)
        self._member = Member(group)
        self._names = NameCache()
        self._refused: tuple[Path, int, str] | None = None  # the last call of ``save`` whose arguments made no sense

    @classmethod
    def join(cls, directory: Path, *, timeout_s: float, waiting: Callable[[], None] = lambda: None) -> Crew:
        """Waits for the other ranks, and warns if they do not come soon. Raises ConfigError, which names the ranks, if
        they do not all see one folder, and RankError if one does not come. ``waiting`` is called meanwhile, and may
        raise."""
        import torch.distributed as dist

        alone = not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1
        return cls(None if alone else RankGroup.join(directory, timeout_s=timeout_s, waiting=waiting))

    def request(
        self, path: Path, step: int, lineage: Lineage, about: About, state: CompositeProvider
    ) -> tuple[Request, Mapping[str, FilePlan]]:
        """A save of ``state`` as checkpoint ``path``, and the plan of this rank's file."""
        self._give_up_refused(step)
        if (why := self._member.turns.find(step, path)) is not None:
            return Request(path, step), {STATE: NoPlan(SaveError(why, path=path, step=step))}
        request = JobCheckpointRequest(path, step, lineage, about, member=self._member, layout=", ".join(state.parts))
        name, plan = request.plan("", TrackedState(state.parts, self.rank, self._names))
        return request, {name: plan}

    def refused(self, path: Path, step: int, why: str) -> None:
        """Notes that the arguments of a save were refused, before anything was counted. The caller may correct them and
        save this step. If it goes on to another one instead, the other ranks learn then that this one was given up."""
        self._give_up_refused(step)
        self._refused = path, step, why

    def _give_up_refused(self, step: int) -> None:
        refused, self._refused = self._refused, None
        if self._group is not None and refused is not None and refused[1] != step:
            path, given_up, why = refused
            self._group.ballot(self._member.turns.next(), given_up, "", path).refuse(why)

    def stage(
        self,
        target: Path,
        step: int | None,
        *,
        alone: Callable[[], Staging],
        prepare: Callable[[Path], None],
        keep_others: bool,
    ) -> JobRequest:
        """Makes the folder of a save that the ranks fill before they save it, and waits until this rank knows its name.
        ``alone`` makes it where this process is the only rank; ``prepare`` makes the folder above. ``keep_others``: see
        ``Saver.stage``.

        Raises SaveError, of rank 0 too; then all ranks raise."""
        if step is not None and (why := self._member.turns.find(step, target)) is not None:
            raise SaveError(why, path=target, step=step)
        request = JobRequest(
            target,
            step,
            member=self._member,
            layout=target.name,
            alone=alone,
            prepare=prepare,
            keep_others=keep_others,
        )
        try:
            request.stage()
        except BaseException as error:
            told = request.failed(error)
            raise save_error(told, path=target, step=step) if isinstance(told, OSError) else told from None
        request.reached()  # the caller may have large files to write before it saves
        return request

    def meet(self) -> Team:
        """Waits until all ranks restore. Their next saves have one number again, whatever calls each has made."""
        self._member.turns.meet()
        return self.team

    def close(self) -> None:
        if self._group is not None:
            self._group.close()


def rank_here() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def warn_if_alone() -> None:
    """Warns if a launcher has started several ranks, and they do not know each other."""
    import torch.distributed as dist

    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1" and dist.is_available() and not dist.is_initialized():
        warn(
            f"WORLD_SIZE is {ranks}, but torch.distributed is not initialized, so every rank saves for itself: if they "
            "have one folder, each replaces the checkpoints of the others. Call torch.distributed.init_process_group() "
            "before the first save()"
        )
