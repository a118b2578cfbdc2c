"""Loads a file on all ranks at once."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from lazyckpt.ranks.team import Team
from lazyckpt.reading.archive import Archive, MapLocation
from lazyckpt.reading.load import read_saved
from lazyckpt.reading.part import EVERYTHING, Choice
from lazyckpt.reading.together import Filling


def load_together(
    path: str | os.PathLike[str],
    map_location: MapLocation,
    weights_only: bool | None,
    team: Team,
    choice: Choice = EVERYTHING,
) -> Any:
    """As ``load_saved``, on all ranks of the team at once: of an archive, each byte is read by one of them.

    If one rank fails, all do: with its own error, or one that names the first that failed. Also raises RankError."""
    found = team.agree(lambda: read_saved(path, map_location, weights_only, choice, together=True))
    if not isinstance(found, Archive):
        return found
    with contextlib.closing(Filling(found)) as filling:
        filling.fill(team, team.gather(lambda: filling.described(team)))
    return found.tree
