"""Help that does not say of a flag that it takes a value."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


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
