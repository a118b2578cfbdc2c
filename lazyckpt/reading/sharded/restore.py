"""Restores the folder that many ranks wrote, on any number of ranks, into tensors that are sharded in any way.

``.metadata`` says where the parts of each tensor lie. The saved state is first built from it as a tree, with tensors
that have a shape and no memory, so every check and every argument of ``restore()`` works as for a single file. Then
each rank reads the parts that its own shards overlap with, in place.
"""

from __future__ import annotations

from typing import Any

from lazyckpt import _engine
from lazyckpt.errors import RestoreError
from lazyckpt.providers import global_state
from lazyckpt.providers.training import LoaderProvider
from lazyckpt.ranks.team import Team
from lazyckpt.reading.fit import Fitting, hand_over, misfit
from lazyckpt.reading.hint import hint
from lazyckpt.reading.sharded import replicas
from lazyckpt.reading.sharded.folder import ShardedFolder, Target, open_folder
from lazyckpt.reading.sharded.tensors import allocate
from lazyckpt.stores.store import AnyPath
from lazyckpt.warn import warn


class Shards:
    """A checkpoint that fits, on its way into the tracked state of this rank."""

    def __init__(self, path: AnyPath, fitting: Fitting, team: Team) -> None:
        """Checks everything, and touches nothing. Raises LoadError for a damaged checkpoint, RestoreError for one that
        does not fit."""
        self._folder = folder = open_folder(path)
        own = _own_state(folder, fitting, team)
        tree, self._names = folder.tree(own, folder.read_object)
        fitting.by_name = True
        try:
            self._tree = tree if fitting.choose is None else fitting.choose(tree)
            self._provider = fitting.provider
            landings = fitting.landings(self._tree)
            # Others, such as sparse ones, were read as objects, and entries that the checkpoint lacks are live ones.
            self._landed = {id(it.saved): it.live for it in landings if id(it.saved) in self._names}
        except Exception as error:
            raise misfit(path, error, hint(fitting, fitting.saved)) from (
                None if isinstance(error, RestoreError) else error
            )

    def restore(self, engine: _engine.Engine, team: Team) -> None:
        """Reads the parts that this rank needs, and hands them over. Raises LoadError, RestoreError, and RankError if a
        rank is lost. If one rank raises, all do."""
        places: dict[int, Any] = {}
        team.agree(lambda: places.update(self._landed | allocate(self._tree, self._provider.parts, self._landed)))
        targets = [_target(self._names[key][0], place) for key, place in places.items()]
        replicas.fill(self._folder, targets, list(map(global_state.is_dtensor, places.values())), team, engine)
        team.agree(lambda: hand_over(self._provider, self._tree, self._landed, self._folder.path))


def _own_state(folder: ShardedFolder, fitting: Fitting, team: Team) -> dict[str, int]:
    """The rank whose state this rank takes, by the names of the parts that every rank has of its own.

    If as many ranks restore as saved, each takes its own. Otherwise random states go to the ranks that existed then,
    and the others keep theirs: equal states would give equal dropout masks. Loaders stay as they are, since another
    number of ranks hands out other batches."""
    taken: dict[str, int] = {}
    left: list[str] = []
    saved_by = 0
    for name, part in fitting.provider.parts.items():
        source = fitting.sources.get(name, name)
        ranks = {str(e.path[1]) for e in folder.entries.values() if e.path[0] == source and global_state.is_own(part)}
        if not ranks:
            continue  # no rank's own; or not in the checkpoint, which is an error below
        if len(ranks) == team.world_size or (str(team.rank) in ranks and not isinstance(part, LoaderProvider)):
            taken[source] = team.rank
        else:
            left.append(name)
        saved_by = len(ranks)
    if saved_by not in (0, team.world_size):
        stays = f"; {', '.join(left)} of rank {team.rank} stays as it is" if left else ""
        warn(
            f"{folder.path} was saved by {saved_by} ranks, and {team.world_size} restore it, so training will not go "
            f"on exactly as before: random states go to the ranks that were there, loaders begin a new epoch{stays}"
        )
    fitting.leave(left)
    return taken


def _target(name: str, live: Any) -> Target:
    if global_state.is_dtensor(live):
        chunk = global_state.chunk_of(live)
        return Target(name, chunk.offsets, chunk.local)
    return Target(name, (0,) * live.dim(), live)
