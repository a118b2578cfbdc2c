"""Declares the parameters that commands share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup


def path_argument(metavar: str, help: str) -> Any:
    """A path argument. typer would report an unreadable path as a usage error; commands explain it better."""
    return typer.Argument(metavar=metavar, help=help, readable=False)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunFolder = Annotated[Path, path_argument("DIR", "A run's folder.")]
Depth = Annotated[int | None, typer.Option(min=0, help="Show only this many levels; sums still include all.")]


class PlainFlags:
    """Shows no <bool> behind the flags of a command or a group, as typer does since some version."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(PlainFlags, TyperCommand):
    """A command, whose help is its docstring without the ends of lines, so that it fills a terminal of any width."""

    def __init__(self, *args: Any, help: str | None = None, **rest: Any) -> None:
        paragraphs = (help or "").split("\n\n")
        super().__init__(*args, help="\n\n".join(" ".join(text.split()) for text in paragraphs), **rest)


class Group(PlainFlags, TyperGroup):
    """A group of commands."""


Found = Iterable[tuple[str, str]]  # completions, and what some shells show beside each


def completed_from(
    argument: str, find: Callable[[Path], Found]
) -> Callable[[typer.Context, str], list[tuple[str, str]]]:
    """Makes a shell completion from what ``find`` knows about the path given as ``argument``, the first one."""

    def complete(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        # If an option still lacks its value, typer does not tell the arguments apart.
        typed = context.params.get(argument) or next(iter(context.args), None)
        try:
            found = list(find(Path(os.path.expandvars(typed)).expanduser())) if typed else []
        except (OSError, RuntimeError):  # LazyCkptError included; expanduser of an unknown home
            return []
        return [item for item in found if item[0].startswith(incomplete)]

    return complete
