"""A plugin of pytest that runs torch's own tests of ``torch.distributed.checkpoint`` with our storage.

    pytest -p outside.plugin --outside-storage torch --outside-control FILE TORCH_TESTS      first: as torch wrote them
    pytest -p outside.plugin --outside-control FILE TORCH_TESTS                              then: with our storage

TORCH_TESTS is ``test/distributed/checkpoint`` of a checkout of torch. The first run writes FILE. The second skips what
did not pass in the first. Of the rest, it expects exactly the tests in ``cannot.py`` to fail, and with the error that
the list gives: any other failure, and a listed test that passes or is gone, fails the run.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

from outside.cannot import Reason

_STORAGE, _FOLDER = "LAZYCKPT_OUTSIDE_STORAGE", "LAZYCKPT_OUTSIDE_FOLDER"  # process.py reads them


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("outside")
    group.addoption("--outside-storage", choices=["lazyckpt", "torch"], default="lazyckpt")
    group.addoption("--outside-control", metavar="FILE", required=True)
    group.addoption("--outside-list", metavar="MODULE", default="outside.cannot", help="whose CANNOT is the list")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[_STORAGE] = config.getoption("outside_storage")
    os.environ[_FOLDER] = tempfile.mkdtemp(prefix="outside-")
    config.add_cleanup(functools.partial(shutil.rmtree, os.environ[_FOLDER]))
    control = config.getoption("outside_storage") == "torch"
    config.pluginmanager.register((_Control if control else _Ours)(config), "outside-run")


class _Run:
    def __init__(self, config: pytest.Config) -> None:
        self._process = importlib.import_module("outside.process")  # only now, as it reads the environment
        self._control = Path(config.getoption("outside_control"))
        self._root = config.rootpath
        self.outcomes: dict[str, str] = {}

    def _name(self, item: pytest.Item) -> str:
        """As in ``cannot.py``: the path below TORCH_TESTS, the class, the test."""
        return "::".join((item.path.relative_to(self._root).as_posix(), *item.nodeid.split("::")[1:]))

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._process.begin(self._name(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "call" or not report.passed:
            self.outcomes[self._name(item)] = report.outcome
        return report


class _Control(_Run):
    """Notes what passes with torch's own storage."""

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        known = json.loads(self._control.read_text()) if self._control.exists() else {}
        self._control.write_text(json.dumps(known | self.outcomes, indent=1))


class _Ours(_Run):
    """Compares what passes with our storage with the list."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        cannot = importlib.import_module(config.getoption("outside_list")).CANNOT
        self._reasons: dict[str, Reason] = {test: reason for reason in cannot for test in reason.tests}
        self._gone: list[str] = []

    @pytest.hookimpl(tryfirst=True)  # before others deselect
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        names = {self._name(item): item for item in items}
        control = json.loads(self._control.read_text())
        for name, item in names.items():
            if control.get(name) != "passed":
                item.add_marker(pytest.mark.skip("it does not pass with torch's own storage"))
            elif reason := self._reasons.get(name):
                item.add_marker(pytest.mark.xfail(reason=reason.why, strict=True))
        files = {name.split("::")[0] for name in names}
        if not any("::" in arg for arg in config.args):
            self._gone = [test for test in self._reasons if test.split("::")[0] in files and test not in names]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._gone:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield from super().pytest_runtest_makereport(item)
        if report.skipped and hasattr(report, "wasxfail"):
            expected = self._reasons[self._name(item)].error
            if not re.search(expected, report.longreprtext + report.capstderr):
                del report.wasxfail
                report.outcome = self.outcomes[self._name(item)] = "failed"
                report.longrepr = f"{report.longreprtext}\nThe list expects another error: {expected}"
            else:
                self.outcomes[self._name(item)] = "cannot"
        return report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        used: dict[str, set[str]] = {}
        for line in self._process.log().read_text(encoding="utf-8").splitlines():
            test, what = line.split("\t")
            used.setdefault(test, set()).add(what)
        counts: dict[str, Counter[str]] = {}
        for test, outcome in self.outcomes.items():
            kind = outcome if outcome != "passed" else "saved or loaded" if test in used else "without storage"
            counts.setdefault(test.split("::")[0], Counter())[kind] += 1
        columns = ["saved or loaded", "without storage", "cannot", "failed", "skipped"]
        terminalreporter.section("torch's tests with our storage")
        for file, count in sorted(counts.items()):
            terminalreporter.write_line(f"{file:44}" + "  ".join(f"{count[kind]:3} {kind}" for kind in columns))
        total = sum(counts.values(), Counter[str]())
        terminalreporter.write_line(f"{'':44}" + "  ".join(f"{total[kind]:3} {kind}" for kind in columns))
        moved = sum(self._process.MOVED in what and self.outcomes.get(test) == "passed" for test, what in used.items())
        terminalreporter.write_line(
            f"{moved} of these passed after a checkpoint of their own was moved out of their way"
        )
        for test in self._gone:
            terminalreporter.write_line(f"listed, and gone: {test}")
