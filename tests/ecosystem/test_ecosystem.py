"""Every row in a process of its own: what lazyckpt does to a process, such as the gate in front of a class's methods,
must not help the next row."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ecosystem import table
from ecosystem.rows import read

TESTS = Path(__file__).parent.parent


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [row.name for row in table.rows()])
def test_it_works_with(name: str) -> None:
    result = table.result_of(name)
    result.unlink(missing_ok=True)
    ended = subprocess.run(
        [sys.executable, "-m", "ecosystem", name, str(result)],
        cwd=TESTS,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
    )
    assert result.exists(), ended.stdout[-2000:] + ended.stderr[-4000:]
    assert read(result).failures == []
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
