"""The state that each rank has of its own, where all of them wrote one file: random states, loaders, samplers and
datasets.

Rank 0's is in that file, and every other rank has a small file beside it.
"""

from __future__ import annotations

from typing import Any

from torch import distributed

from lazyckpt import _engine
from lazyckpt.formats.reader import FileReader
from lazyckpt.providers.global_state import is_own
from lazyckpt.providers.training import LoaderProvider
from lazyckpt.ranks.team import ALONE, Team
from lazyckpt.reading.archive import Archive
from lazyckpt.reading.fit import Fitting
from lazyckpt.storage.manifest import Checkpoint, own_file
from lazyckpt.warn import warn


def own_state(checkpoint: Checkpoint, fitting: Fitting, team: Team, engine: _engine.Engine) -> dict[str, Any]:
    """The saved state of the parts that this rank has of its own, by their names in the checkpoint; empty on rank 0.

    If as many ranks restore as saved, each takes its own. Otherwise random states go to the ranks that existed then,
    and the others keep theirs: equal states would give equal dropout masks. Loaders stay as they are, since another
    number of ranks hands out other batches. Raises LoadError for a damaged file."""
    rank, world_size, saved_by = team.rank, team.world_size, checkpoint.world_size
    if team is ALONE and distributed.is_available() and distributed.is_initialized():
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
    own = {name: part for name, part in fitting.selected().items() if is_own(part)}
    found: dict[str, Any] = {}
    if 0 < rank < saved_by and own:
        with FileReader(checkpoint.path / own_file(rank)) as file:
            found = Archive(file, "cpu", weights_only=True, engine=engine).tree
    sources = {name: fitting.sources.get(name, name) for name in own}
    left = [
        name
        for name, part in own.items()
        if (saved_by != world_size and (rank >= saved_by or isinstance(part, LoaderProvider)))
        or (rank != 0 and sources[name] not in found)
    ]
    if saved_by != world_size and own:
        stays = f"; {', '.join(left)} of rank {rank} stays as it is" if left else ""
        warn(
            f"{checkpoint.path} was saved by {saved_by} ranks, and {world_size} restore it, so training will not go on "
            f"exactly as before: random states go to the ranks that were there, loaders begin a new epoch{stays}"
        )
    fitting.leave(left)
    return {sources[name]: found[sources[name]] for name in own if name not in left and rank != 0}
