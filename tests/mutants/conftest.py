"""Which test noticed each mutant, as a table behind all of them, whichever process ran them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mutants.table import MUTANTS
from trials import Trials

_trials = Trials("tests/mutants")


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
