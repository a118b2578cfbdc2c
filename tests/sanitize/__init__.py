"""Builds the engine with sanitizers, alone and as the extension, and runs Python with it."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fake_cuda import build

ROOT = Path(__file__).parent.parent.parent
SOURCES = sorted((ROOT / "csrc").glob("*/*.cc"))
THREAD, ADDRESS = "thread", "address,undefined"
_LIBRARIES = ("-luring", "-ldeflate", "-lz", "-lpthread", "-ldl")
# liburing maps and unmaps its queues by bare system calls, so a new queue at the address of an old one looks like it.
_THREAD_SUPPRESSIONS = "race:/usr/include/liburing.h\nrace:/usr/include/liburing/*\nrace_top:csrc/io/uring.cc\n"
# Python finds an editable installation before sys.path, also in processes that tests start.
_SITECUSTOMIZE = """
import sys
sys.meta_path = [f for f in sys.meta_path if "ditable" not in type(f).__name__ + type(f).__module__]
"""


def compiler() -> str | None:
    return shutil.which("c++")


class Sanitized:
    """The engine compiled with one sanitizer, in a folder of its own."""

    def __init__(self, sanitizer: str, folder: Path) -> None:
        self.sanitizer = sanitizer
        self._folder = folder
        self.reports = folder / "reports"
        self.reports.mkdir(parents=True)
        self._flags = ["-std=c++20", "-g1", "-O1", "-fPIC", "-fno-omit-frame-pointer", "-fvisibility=hidden"]
        self._flags += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-D_GLIBCXX_ASSERTIONS"]
        # The check of vptrs opens pipes to test addresses, and reports an error when stress.cc leaves no descriptors.
        self._flags += ["-fno-sanitize=vptr"]
        self._flags += [f"-DLAZYCKPT_{name}" for name in ("FAULTS", "HAVE_LIBURING", "HAVE_LIBDEFLATE")]
        headers = (ROOT / "csrc", importlib.import_module("pybind11").get_include(), sysconfig.get_path("include"))
        self._flags += [f"-I{path}" for path in headers]

    def _compile(self, source: Path) -> Path:
        target = self._folder / f"{source.parent.name}-{source.stem}.o"
        if not target.exists():
            # The templates of pybind11 take ten times as long to compile as the engine.
            flags = ["-O0", "-fno-sanitize=undefined"] if source.parent.name == "python" else []
            subprocess.run([compiler(), *self._flags, *flags, "-c", source, "-o", target], check=True)
        return target

    def _build(self, target: Path, sources: list[Path], *options: str) -> Path:
        """Compiles and links; the largest sources first."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(self._compile, sorted(sources, key=lambda s: -s.stat().st_size)))
        subprocess.run([compiler(), *self._flags, *options, *objects, "-o", target, *_LIBRARIES], check=True)
        return target

    def stress(self) -> Path:
        """Builds the program of stress.cc. It needs nothing of Python, which takes longest to compile."""
        engine = [source for source in SOURCES if source.parent.name != "python"]
        return self._build(self._folder / "stress", [ROOT / "tests" / "sanitize" / "stress.cc", *engine])

    def package(self) -> Path:
        """Returns a folder with the installed package, for PYTHONPATH."""
        package = self._folder / "lazyckpt"
        skip = shutil.ignore_patterns("_engine*.so", "__pycache__", "integrations")
        shutil.copytree(ROOT / "lazyckpt", package, ignore=skip)
        shutil.copytree(ROOT / "integrations", package / "integrations")
        (self._folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
        self._build(package / f"_engine{sysconfig.get_config_var('EXT_SUFFIX')}", SOURCES, "-shared")
        return self._folder

    def environment(self, **options: int) -> dict[str, str]:
        """Returns an environment in which every process, also those that tests start, reports into ``reports``."""
        suppressions = self._folder / "suppressions"
        suppressions.write_text(_THREAD_SUPPRESSIONS if self.sanitizer == THREAD else "")
        told = {"log_path": self.reports / "report", "suppressions": suppressions, **options}
        text = ":".join(f"{key}={value}" for key, value in told.items())
        return {
            **os.environ,
            "LAZYCKPT_CUDA_LIBRARY": str(build()),
            "ASAN_OPTIONS": text,
            "TSAN_OPTIONS": text,
            "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={self.reports / 'report'}",
        }

    def said(self) -> str:
        """Returns all reports."""
        return "\n".join(report.read_text(errors="replace") for report in sorted(self.reports.iterdir()))


def for_python(sanitized: Sanitized) -> dict[str, str]:
    """Returns the environment of a Python whose lazyckpt has the engine built with AddressSanitizer. Each object of
    Python has its own allocation, so it is watched, too. Leaks at the end of Python are ignored."""
    runtime = [runtime_library("libasan.so"), runtime_library("libstdc++.so")]  # exceptions pass through it
    # Tests ask for more memory than there is, and expect an error.
    environment = sanitized.environment(detect_leaks=0, allocator_may_return_null=1, handle_segv=2)
    folder = sanitized.package()
    environment.pop("LAZYCKPT_TORTURE", None)
    return environment | {
        "LD_PRELOAD": " ".join(runtime),
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }


def runtime_library(name: str) -> str:
    found = subprocess.run([compiler(), f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    return os.path.realpath(found.stdout.strip())


def run_python(environment: dict[str, str], *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=cwd)
