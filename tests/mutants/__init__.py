"""A copy of the package and of its tests, in which one safety at a time is taken out."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pybind11

from lazyckpt import _engine
from mutants.anchors import ROOT, Native, Python

_LIBRARIES = ("-luring", "-ldeflate", "-lz", "-lpthread", "-ldl")
# An editable installation is found before sys.path, also by the processes that tests start.
_SITECUSTOMIZE = """
import sys
sys.meta_path = [f for f in sys.meta_path if "ditable" not in type(f).__name__ + type(f).__module__]
"""

# Imports the slow packages once, then forks a child for each run of pytest. It reads a line for each run (number,
# arguments, output file, seconds) and answers with the number and the exit code.
_NURSERY = """
import json, os, signal, sys, time
import hypothesis, numpy, pytest, torch
for line in sys.stdin:
    number, arguments, output, seconds = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        for fd, name in ((0, os.devnull), (1, output), (2, output)):
            os.dup2(os.open(name, os.O_RDWR | os.O_APPEND), fd)
        os._exit(pytest.main(arguments))
    end = time.monotonic() + seconds
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    try:
        os.killpg(child, signal.SIGKILL)  # it, or what it left behind
    except ProcessLookupError:
        pass
    status = done[1] if done[0] else os.waitpid(child, 0)[1]
    print(number, os.waitstatus_to_exitcode(status), flush=True)
"""


class Mutant(NamedTuple):
    """One safety taken out: what goes wrong then, where and how it is taken out, and the tests that must notice."""

    promise: Promise
    what: str
    edit: Python | Native
    tests: str  # as pytest takes them, a file by its name: it may move


class Promise(NamedTuple):
    """A sentence that users rely on, and the document that says it."""

    text: str
    document: str


class Outcome(NamedTuple):
    caught_by: str | None
    seconds: float


def located(test: str) -> str:
    """A test with the path of its file, seen from tests/."""
    file, *name = test.split("::", 1)
    (path,) = (ROOT / "tests").rglob(file)
    return "::".join([str(path.relative_to(ROOT / "tests")), *name])


class Copy:
    """The package and its tests in a folder, until it is closed."""

    def __init__(self, folder: Path, objects: Path) -> None:
        """``objects``: a folder for those of C++, which all copies of a run share. The first that needs them compiles
        them."""
        self._folder = folder
        self._objects = objects
        self.output = folder / "output"  # of the last run of pytest
        self._runs = 0
        skip = ["_engine*.so", "__pycache__"]
        shutil.copytree(ROOT / "lazyckpt", folder / "lazyckpt", ignore=shutil.ignore_patterns(*skip, "integrations"))
        copied = {"tests": "tests", "csrc": "csrc", "examples": "examples", "integrations": "lazyckpt/integrations"}
        for name, copy in copied.items():
            shutil.copytree(ROOT / name, folder / copy, ignore=shutil.ignore_patterns(*skip))
        shutil.copy(ROOT / "pyproject.toml", folder)
        (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
        (folder / "build").mkdir()
        driver = ROOT / "build" / "fake_cuda"
        driver.mkdir(parents=True, exist_ok=True)
        (folder / "build" / "fake_cuda").symlink_to(driver)
        self._engine = folder / "lazyckpt" / f"_engine{sysconfig.get_config_var('EXT_SUFFIX')}"
        self._install()
        environment = {k: v for k, v in os.environ.items() if k != "LAZYCKPT_TORTURE"}
        environment |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        self._nursery = subprocess.Popen(
            [sys.executable, "-c", _NURSERY],
            cwd=folder / "tests",
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        self._nursery.communicate()

    def run(self, tests: str, mutant: Mutant | None = None, *, limit_s: float = 600) -> Outcome:
        """Runs the tests, with the mutant if there is one, and says which of them failed."""
        begin = time.monotonic()
        if mutant is None:
            return Outcome(self._failing(tests, limit_s), time.monotonic() - begin)
        file, changed = mutant.edit.apply()
        path = self._folder / ("lazyckpt" / file if file.parts[0] == "integrations" else file)
        text = path.read_text()
        if mutant.edit.is_native:
            self._build()
        path.write_text(changed)
        try:
            if mutant.edit.is_native:
                self._link(path)
            return Outcome(self._failing(tests, limit_s), time.monotonic() - begin)
        finally:
            path.write_text(text)
            if mutant.edit.is_native:
                self._install()

    def _failing(self, tests: str, limit_s: float) -> str | None:
        timeout = f"--timeout={limit_s / 10:g}"  # of one test
        options = ["-x", "-v", "-rN", "--no-header", "--tb=line", timeout, "--timeout-method=thread"]
        output = self.output
        output.write_text("")
        self._runs += 1
        arguments = [*options, "-p", "no:cacheprovider", *map(located, tests.split())]
        told = self._runs, arguments, str(output), limit_s
        assert self._nursery.stdin is not None and self._nursery.stdout is not None
        print(json.dumps(told), file=self._nursery.stdin, flush=True)
        number = code = 0
        while number != self._runs:  # skip answers to abandoned runs
            number, code = map(int, self._nursery.stdout.readline().split())
        text = output.read_text(errors="replace")
        if code == 0:
            return None
        failed = re.search(r"^(.+?::.+?) (?:FAILED|ERROR)", text, re.MULTILINE)
        if failed is not None:
            return failed[1]
        if code < 0 or "Timeout" in text:
            last = re.findall(r"^(.+?::\S+)", text, re.MULTILINE)
            return f"{last[-1] if last else 'a test'} ({'crashes' if code < 0 else 'hangs'})"
        raise RuntimeError(f"pytest {tests} ends with {code}:\n{text[-3000:]}")

    # The engine

    def _install(self) -> None:
        """Puts the engine of this process into the copy."""
        self._engine.unlink(missing_ok=True)  # a process may have it mapped
        shutil.copy(_engine.__file__, self._engine)

    def _build(self) -> None:
        """Compiles every source once: a changed one is linked with the objects of the others."""
        with open(self._objects.with_suffix(".lock"), "w") as lock, ThreadPoolExecutor(os.cpu_count()) as pool:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._objects.exists():
                with tempfile.TemporaryDirectory(dir=self._objects.parent) as folder:
                    (building := Path(folder, "objects")).mkdir()
                    sources = list((self._folder / "csrc").rglob("*.cc"))
                    list(pool.map(self._compile, sources, [building / f"{source.stem}.o" for source in sources]))
                    building.rename(self._objects)

    def _compile(self, source: Path, target: Path) -> None:
        flags = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w", f"-I{self._folder / 'csrc'}"]
        flags += [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
        flags += [f"-DLAZYCKPT_{name}" for name in ("FAULTS", "HAVE_LIBURING", "HAVE_LIBDEFLATE")]
        subprocess.run(["c++", *flags, "-c", source, "-o", target], check=True)

    def _link(self, changed: Path) -> None:
        mutant = self._folder / "mutant.o"
        self._compile(changed, mutant)
        objects = [o for o in self._objects.glob("*.o") if o.stem != changed.stem]
        self._engine.unlink()
        subprocess.run(["c++", "-shared", *objects, mutant, "-o", self._engine, *_LIBRARIES], check=True)
