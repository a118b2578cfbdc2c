"""Parameters of commands, where typer's own would mislead."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


def path_argument(metavar: str, help: str) -> Any:
    """A path argument. The command says why the user may not read it; typer would call that a usage error."""
    return typer.Argument(metavar=metavar, help=help, readable=False)


class Flags:
    """Of a command, or a group of them. typer puts <bool> behind every flag, since some version."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Those of the command itself, and ``--help``."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(Flags, TyperCommand):
    """One command."""


class Group(Flags, TyperGroup):
    """Of commands."""
