"""Declares the parameters that commands share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lazyckpt.errors import ConfigError
from lazyckpt.stores.store import AnyPath
from lazyckpt.stores.urls import is_url, located
from lazyckpt.tools.units import parse_duration, parse_size


def path_argument(metavar: str, help: str) -> Any:
    """A path argument. typer would report an unreadable path as a usage error; commands explain it better."""
    return typer.Argument(metavar=metavar, help=help, readable=False)


def placed(path: Path) -> AnyPath:
    """The path that was typed, or the place of the URL: typer's paths, as all of pathlib, have one slash less.

    Raises ConfigError for a URL that lazyckpt cannot read."""
    if is_url(text := str(path)) and not path.exists():
        return located(text.replace(":/", "://", 1))
    return path


def flag(*names: str, **rest: Any) -> Any:
    """An option without a value; typer would show ``<bool>`` behind it."""
    return typer.Option(*names, metavar="", **rest)


AsJson = Annotated[bool, flag("--json", help="Print JSON.")]
RunFolder = Annotated[Path, path_argument("DIR", "A run's folder, or its URL.")]
Depth = Annotated[int | None, typer.Option(min=0, help="Show only this many levels; sums still include all.")]


def quantity(metavar: Literal["SIZE", "TIME"], help: str) -> Any:
    """An option with a unit: bytes or seconds."""

    def parse(text: str) -> float:
        try:
            return parse_size(text) if metavar == "SIZE" else parse_duration(text)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from error

    return typer.Option(metavar=metavar, help=help, parser=parse)


Found = Iterable[tuple[str, str]]  # completions, and a text that some shells show beside each


def completed_from(
    argument: str, find: Callable[[Path], Found]
) -> Callable[[typer.Context, str], list[tuple[str, str]]]:
    """Makes a shell completion from the names that ``find`` returns for the path in the parameter ``argument``."""

    def complete(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        # If an option still lacks its value, typer does not tell the arguments apart.
        typed = context.params.get(argument) or next(iter(context.args), None)
        try:
            found = list(find(Path(os.path.expandvars(typed)).expanduser())) if typed else []
        except (OSError, RuntimeError):  # LazyCkptError included; expanduser of an unknown home
            return []
        return [item for item in found if item[0].startswith(incomplete)]

    return complete
