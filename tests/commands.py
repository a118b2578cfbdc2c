"""Runs the commands of ``lazyckpt`` in this process, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from lazyckpt.cli import app


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def run_json(*arguments: str | Path, code: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def fails(code: int, *arguments: str | Path) -> str:
    """The one line on stderr of a command that exits with ``code``."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit)
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def commands() -> list[str]:
    """The names of all."""
    return [str(info.name) for info in app.registered_commands] + [str(group.name) for group in app.registered_groups]
