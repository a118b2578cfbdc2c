"""Which test noticed each mutant, as a table behind all of them, whichever process ran them; and that none was left
out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mutants.table import MUTANTS
from trials import Trials

_trials = Trials("tests/mutants")
_asked: set[str] = set()  # the tests that were collected


def pytest_collection_finish(session: pytest.Session) -> None:
    _asked.update(item.nodeid for item in session.items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: list[str]) -> None:
    _asked.update(ids)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A mutant without an answer, for whatever reason, fails the run: a skip would not."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or session.config.option.collectonly:  # a process of pytest-xdist's tells the first one
        return
    reports = reporter.getreports("passed") + reporter.getreports("failed") + reporter.getreports("error")
    answered = {r.nodeid for r in reports if r.outcome == "failed" or "mutant" in dict(r.user_properties)}
    missing = sorted(test for test in _asked - answered if "::test_it_is_noticed[" in test)
    for test in missing:
        reporter.write_line(f"\nno answer: {test}", red=True)
    if missing and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    passed = [dict(report.user_properties) for report in terminalreporter.getreports("passed")]
    noticed = {found["mutant"]: found for found in passed if "mutant" in found}
    rows = [(m, found) for m in MUTANTS if (found := noticed.get(m.what))]
    if rows:
        terminalreporter.write_line("\n| file | mutant | caught by | seconds |\n|---|---|---|--:|")
    for mutant, found in rows:
        terminalreporter.write_line(
            f"| {mutant.file} | {mutant.what} | {found['caught_by']} | {found['seconds']:.0f} |"
        )
    if len(rows) == len(MUTANTS):
        native = sum(mutant.is_native for mutant in MUTANTS)
        _trials.report(
            "mutants (a sync, a rename, a wait, a check removed), each noticed",
            len(MUTANTS),
            Path.cwd(),
            **{"in_C++": native, "in_Python": len(MUTANTS) - native},
        )
