"""Runs the commands of ``lazyckpt`` in this process, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from lazyckpt.cli import app
from memory import growth_bytes


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def run_json(*arguments: str | Path, code: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def fails(code: int, *arguments: str | Path) -> str:
    """Runs a command that must exit with ``code``; returns its one line on stderr."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit)
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def peak_bytes(*arguments: str | Path) -> int:
    """Returns by how much the memory of this process grows, at most, while it runs a command."""

    def work() -> None:
        assert run(*arguments).exit_code in (0, 1)

    return growth_bytes(work)


def commands() -> list[str]:
    """Returns the names of all commands."""
    return [str(info.name) for info in app.registered_commands]


def complete(*words: str | Path, shell: str = "bash") -> list[str]:
    """Returns the completions that a shell gets for these words, of which the last may be empty."""
    line = " ".join(["lazyckpt", *map(str, words)])
    asked = {"_LAZYCKPT_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line}
    asked |= {"COMP_WORDS": line, "COMP_CWORD": str(len(words)), "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    result = CliRunner(env=asked).invoke(app, [], prog_name="lazyckpt")
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()
