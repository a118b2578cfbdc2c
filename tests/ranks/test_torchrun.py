"""A job under torchrun, with training's own store, that starts again after a rank has died."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lazyckpt.storage.claim import CLAIM

TESTS = Path(__file__).parent.parent


@pytest.mark.long
def test_a_job_that_torchrun_starts_again_removes_what_it_had_staged_and_saves_on(tmp_path: Path) -> None:
    (told := tmp_path / "told").mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command += [str(TESTS / "ranks" / "restarted.py"), str(tmp_path / "run"), str(told)]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert (told / f"1-{rank}").read_text() == str([CLAIM, "step-00000001"])
    assert sorted(os.listdir(told)) == ["1-0", "1-1"]
    assert os.listdir(tmp_path / "run") == ["step-00000001"]
