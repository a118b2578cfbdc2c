"""Chooses the tag that a DeepSpeed engine loads: on all ranks the same, whole, and verified before anything is loaded.

DeepSpeed loads rank by rank, with collectives in between. A rank that finds a damaged file there leaves the others
waiting, with half of their state replaced.
"""

from __future__ import annotations

from pathlib import Path

import lazyckpt
from lazyckpt.ranks.team import Team
from lazyckpt.storage import removal
from lazyckpt.tools.verify import verify
from lazyckpt.warn import warn

LATEST = "latest"


def whole_tag(team: Team, folder: Path, tag: str | None) -> str | None:
    """Returns the tag to load from ``folder``: ``tag``, or the one that ``latest`` names, or the newest whole one if
    that is damaged. None if nothing is named: DeepSpeed says so.

    Raises LoadError, on all ranks, for a ``tag`` that is damaged, and if no tag is whole."""
    candidates = team.follow(lambda: [tag] if tag is not None else _candidates(folder))
    damage: list[str] = []
    for candidate in candidates:
        if not (found := _damage(team, folder / candidate)):
            if damage and team.rank == 0:
                warn(f"{folder / candidate} is loaded instead of a damaged checkpoint: {'; '.join(damage)}")
            return candidate
        damage += found
    if damage:
        raise lazyckpt.LoadError("; ".join(damage), path=folder)
    return tag


def _candidates(folder: Path) -> list[str]:
    """The tag that ``latest`` names, then the others, newest first."""
    removal.sweep(folder)
    latest = (folder / LATEST).read_text().strip()
    return [latest]


def _damage(team: Team, folder: Path) -> list[str]:
    """Verifies each file on one of the ranks. Returns the damage that they found, on all."""
    files = sorted(folder.glob("*.pt"))
    mine = [str(verify(file).findings[0].damage) for file in files[team.rank :: team.world_size]]
    return [what for of_rank in team.gather(lambda: mine) for what in of_rank if what != "()"]
