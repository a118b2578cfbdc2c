"""Prints the table "Works with" behind the tests; ``--write-docs`` puts it into docs/works-with.md."""

from __future__ import annotations

from typing import Any

import pytest

from ecosystem import table


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-docs", action="store_true", help="write the table into docs/works-with.md")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    found = table.results()
    terminalreporter.section("Works with")
    terminalreporter.write_line(table.text(found))
    if config.getoption("--write-docs"):
        table.write_docs(found)
        terminalreporter.write_line(f"written to {table.DOCS}")
