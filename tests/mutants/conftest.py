"""Prints which test noticed each mutant, and fails the run if a mutant has no answer."""

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
    """Fails the run if a mutant was skipped: a skip alone would pass."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or session.config.option.collectonly:  # the first process of pytest-xdist reports
        return
    reports = reporter.getreports("passed") + reporter.getreports("failed") + reporter.getreports("error")
    answered = {r.nodeid for r in reports if r.outcome == "failed" or "mutant" in dict(r.user_properties)}
    missing = sorted(test for test in _asked - answered if "::test_a_mutant_is_noticed[" in test)
    for test in missing:
        reporter.write_line(f"\nno answer: {test}", red=True)
    if missing and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    passed = [dict(report.user_properties) for report in terminalreporter.getreports("passed")]
    noticed = {found["mutant"]: found for found in passed if "mutant" in found}
    rows = [(m, found) for m in MUTANTS if (found := noticed.get(m.what))]
    if rows:
        terminalreporter.write_line("\n| promise | mutant | caught by | seconds |\n|---|---|---|--:|")
    for mutant, found in rows:
        terminalreporter.write_line(
            f"| {mutant.promise.text} | {mutant.what} | {found['caught_by']} | {found['seconds']:.0f} |"
        )
    if len(rows) == len(MUTANTS):
        native = sum(mutant.edit.is_native for mutant in MUTANTS)
        _trials.report(
            "mutants (a sync, a rename, a wait, a check removed), each noticed",
            len(MUTANTS),
            Path.cwd(),
            **{"in_C++": native, "in_Python": len(MUTANTS) - native},
        )
