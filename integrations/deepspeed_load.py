"""Chooses the tag that a DeepSpeed engine loads: on all ranks the same, whole, and verified before anything is loaded.

DeepSpeed loads rank by rank, with collectives in between. A rank that finds a damaged file there leaves the others
waiting, with half of their state replaced.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import lazyckpt
from lazyckpt.formats import sniff
from lazyckpt.ranks.team import Team
from lazyckpt.storage import removal
from lazyckpt.tools import deepspeed
from lazyckpt.tools.checksums import verify_file
from lazyckpt.warn import warn


def whole_tag(team: Team, folder: Path, tag: str | None) -> str | None:
    """Returns the tag to load from ``folder``: ``tag``; without one, the tag that ``latest`` names, or the newest whole
    one if that is damaged. None if there is no ``latest``: DeepSpeed says so.

    Each file is read by one rank. A file without checksums, of DeepSpeed's older serialization, passes. Raises
    LoadError, on all ranks, if ``tag`` is damaged, and if no tag is whole."""
    candidates, faults = team.follow(lambda: ([tag], []) if tag is not None else _candidates(folder))
    for candidate in candidates:
        found = _faults(team, folder / candidate)
        if not found:
            if faults and team.rank == 0:
                warn(f"{folder / candidate} is loaded, since a newer checkpoint is damaged: {'; '.join(faults)}")
            return candidate
        faults += [f"{candidate}/{fault}" for fault in found]
    if faults:
        raise lazyckpt.CorruptFileError("; ".join(faults), path=folder)
    return None


def _candidates(folder: Path) -> tuple[list[str], list[str]]:
    """The tags to try, and why that of ``latest`` is not the first of them."""
    with contextlib.suppress(OSError):  # a crash may have left a tag without its name
        removal.sweep(folder)
    try:
        named = deepspeed.latest(folder)
    except lazyckpt.LoadError as error:
        first, faults = [], [f"{deepspeed.LATEST} {error.what}"]
    else:
        if named is None:
            return [], []
        first, faults = [named], []
    others = [tag.path.name for tag in deepspeed.tags(folder)]
    return list(dict.fromkeys([*first, *others])), faults


def _faults(team: Team, folder: Path) -> list[str]:
    """Verifies a tag, each file on one rank. Returns its faults, on all."""
    files, missing = team.follow(lambda: _files(folder))
    mine = [fault for name in files[team.rank :: team.world_size] for fault in _faults_in(folder, name)]
    return [*missing, *(fault for of_rank in team.gather(lambda: mine) for fault in of_rank)]


def _files(folder: Path) -> tuple[tuple[str, ...], list[str]]:
    """The files of a tag, and those that are missing."""
    try:
        tag = deepspeed.open_tag(folder)
    except lazyckpt.LoadError as error:
        return (), [error.what]
    return tag.files, [f"{name}: missing" for name in tag.missing]


def _faults_in(folder: Path, name: str) -> tuple[str, ...]:
    try:
        if sniff(folder / name) == "torch_legacy":  # without checksums
            return ()
        return tuple(f"{name}: {line}" for line in verify_file(folder / name, lambda *_: None).damage)
    except lazyckpt.LoadError as error:
        return (f"{name}: {error.what}",)
