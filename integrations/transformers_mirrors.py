"""Copies the checkpoint that a Trainer resumes from out of a mirror."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

_CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


def fetched(
    args: TrainingArguments,
    places: str | Iterable[Any],
    on_all_ranks: Callable[[str, bool], AbstractContextManager[None]],
) -> str | bool:
    """Copies the newest checkpoint of these mirrors, or the one that a URL means, to ``output_dir``, on every node.

    Returns its folder; of mirrors, True if none is newer than those of ``output_dir``. Raises LoadError."""
    folder, several, found = Path(str(args.output_dir)), args.world_size > 1, None
    with on_all_ranks(str(folder), several):
        if args.process_index == 0:
            found = _fetch(places, folder)
    (found,) = broadcast_object_list([found])
    if found is None:
        return True
    with on_all_ranks(found, several):
        if args.local_process_index == 0 and not os.path.isdir(found):  # it is on the disk of another node
            _fetch(places, folder)
    return str(found)


def _fetch(places: str | Iterable[Any], folder: Path) -> str | None:
    from lazyckpt.tiers.mirror import mirrors_of
    from lazyckpt.tools.remote import pull, pull_newest

    if isinstance(places, str):
        return str(pull(places, folder))
    copy = pull_newest(mirrors_of(places), folder, above=_highest_step(folder))
    return None if copy is None else str(copy)


def _highest_step(folder: Path) -> int:
    """The step of the newest checkpoint in ``folder``; -1 if there is none."""
    named = (_CHECKPOINT.fullmatch(path.name) for path in folder.glob("*"))
    return max((int(name[1]) for name in named if name is not None), default=-1)
