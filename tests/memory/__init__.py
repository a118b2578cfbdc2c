"""Memory that runs out at the n-th allocation: ``scarce.cc`` is asked before malloc, ``saves.py`` saves."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("scarce.cc")
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared")


def build(folder: Path) -> Path | None:
    """The library for LD_PRELOAD, made once for this source; None without a compiler."""
    command = shutil.which(os.environ.get("CXX", "c++"))
    if command is None:
        return None
    target = folder / f"libscarce-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(f".{os.getpid()}")
        subprocess.run([command, *FLAGS, SOURCE, "-o", fresh], check=True)
        fresh.replace(target)
    return target
