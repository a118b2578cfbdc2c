"""Mounts for tests; these skip where this process may not mount."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


def mount(folder: Path, *arguments: object) -> Callable[[], object]:
    """Mounts over ``folder``, which is made. Returns what undoes it."""
    if os.geteuid() != 0:
        pytest.skip("mounting takes root")
    folder.mkdir(exist_ok=True, parents=True)
    mounted = subprocess.run(["mount", *map(str, arguments), str(folder)], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount: {mounted.stderr.strip()}")
    return lambda: subprocess.run(["umount", "--lazy", str(folder)], check=True)
