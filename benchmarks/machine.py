"""What the figures were measured on."""

from __future__ import annotations

import importlib
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path


def describe(directory: Path, packages: Iterable[str]) -> dict[str, str]:
    """The machine, the disk under `directory` and the versions of `packages`."""
    versions = [f"{name} {_version(name)}" for name in dict.fromkeys(packages) if name]
    return {
        "CPU": f"{_cpu_model()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "kernel": platform.release(),
        "load": f"{os.getloadavg()[0]:.1f} tasks in the minute before (others' work spoils the figures)",
        "disk": _disk(directory),
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "commit": _commit(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        try:  # lazyckpt may be imported from the source tree
            return str(getattr(importlib.import_module(package), "__version__", "of unknown version"))
        except ImportError:
            return "not installed"


def _cpu_model() -> str:
    match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return match[1] if match else platform.machine()


def _disk(directory: Path) -> str:
    """The device and file system of the longest mount point above `directory`."""
    best = ("", "unknown", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        device, mount, kind = line.split()[:3]
        if directory.resolve().is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, device, kind)
    return f"{best[2]} on {best[1]}"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return "unknown"
    return found.stdout.strip() or "unknown"
