"""What the shell is told when TAB is pressed behind something that only this program knows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import typer

Found = Iterable[tuple[str, str]]  # what may be there, and what the shells that can will say about it


def completed_from(
    argument: str, find: Callable[[Path], Found]
) -> Callable[[typer.Context, str], list[tuple[str, str]]]:
    """By what ``find`` tells of the path that the line has for the first ``argument``; by nothing where that is of no
    use."""

    def complete(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        # Behind an option that has no value yet, arguments are not told from each other.
        typed = context.params.get(argument) or next(iter(context.args), None)
        try:
            found = list(find(Path(os.path.expandvars(typed)).expanduser())) if typed else []
        except (OSError, RuntimeError):  # LazyCkptError, too; expanduser, of nobody's home
            return []
        return [item for item in found if item[0].startswith(incomplete)]

    return complete
