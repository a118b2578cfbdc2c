"""The plugin that runs torch's tests with our storage: it replaces torch's everywhere, and checks its list."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import tempfile
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, skip_if_lt_x_gpu, with_comms
from torch.testing._internal.distributed.checkpoint_utils import with_temp_dir

class TestOne(TestCase):
    def save(self, path, value, **options):
        dcp.save({"w": torch.full((3,), value)}, storage_writer=FileSystemWriter(path, **options))

    def loaded(self, path):
        state = {"w": torch.zeros(3)}
        dcp.load(state, storage_reader=FileSystemReader(path))
        return state["w"][0].item()

    def test_by_name(self):
        with tempfile.TemporaryDirectory() as path:
            self.save(path, 1.0, thread_count=2)
            self.assertEqual(1.0, self.loaded(path))

    def test_twice(self):
        with tempfile.TemporaryDirectory() as path:
            self.save(path, 1.0)
            self.save(path, 2.0)
            self.assertEqual(2.0, self.loaded(path))

    def test_twice_without_overwriting(self):
        with tempfile.TemporaryDirectory() as path:
            self.save(path, 1.0)
            with self.assertRaises(dcp.api.CheckpointException):
                self.save(path, 2.0, overwrite=False)
            self.assertEqual(1.0, self.loaded(path))

    def test_threads(self):
        with tempfile.TemporaryDirectory() as path:
            self.save(path, 1.0, thread_count=2)
            self.assertEqual(2, FileSystemWriter(path, thread_count=2).thread_count)

    def test_without_storage(self):
        pass

    def test_broken(self):
        self.fail("everywhere")

class TestRanks(DTensorTestBase):
    @property
    def world_size(self):
        return 2

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_by_id(self):
        dcp.save({"w": torch.ones(3)}, checkpoint_id=self.temp_dir)
        state = {"w": torch.zeros(3)}
        dcp.load(state, checkpoint_id=self.temp_dir)
        self.assertEqual(torch.ones(3), state["w"])
"""
LIST = "from outside.cannot import Reason\nCANNOT = ({})"
THREADS = 'Reason("why", "thread_count", ("test_small.py::TestOne::test_threads",)),'

# With torch's storage.
_PASSED = ("test_by_name", "test_twice", "test_twice_without_overwriting", "test_threads", "test_without_storage")
CONTROL = {f"test_small.py::TestOne::{test}": "passed" for test in _PASSED}
CONTROL |= {"test_small.py::TestOne::test_broken": "failed", "test_small.py::TestRanks::test_by_id": "passed"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_small.py").write_text(TESTS)
    return tmp_path


def run(folder: Path, *options: str, cannot: str = "") -> tuple[int, str]:
    (folder / "known.py").write_text(LIST.format(cannot))
    ours = Path(__file__).parents[1]
    paths = os.pathsep.join((str(ours), str(folder)))
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(folder), "-W", "ignore", "-rA"]
    command += ["-p", "outside.plugin", "-p", "no:cacheprovider", "--outside-control", str(folder / "control.json")]
    command += ["--outside-list", "known", *options, str(folder)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_with_torchs_storage_records_what_passes(folder: Path) -> None:
    code, out = run(folder, "--outside-storage", "torch", "-k", "TestOne")
    assert code == 1, out
    control = json.loads((folder / "control.json").read_text())
    assert [test for test, outcome in control.items() if outcome != "passed"] == ["test_small.py::TestOne::test_broken"]
    assert {*control} == {*CONTROL} - {"test_small.py::TestRanks::test_by_id"}


@pytest.mark.long
def test_storage_is_replaced_on_every_rank_and_a_true_list_passes(folder: Path) -> None:
    (folder / "control.json").write_text(json.dumps(CONTROL))
    code, out = run(folder, cannot=THREADS)
    assert code == 0, out
    assert "4 saved or loaded    1 without storage    1 cannot    0 failed    1 skipped" in out
    assert "1 of these passed after a checkpoint of their own was moved out of their way" in out


@pytest.mark.long
def test_an_untrue_list_fails(folder: Path) -> None:
    control = ("test_threads", "test_by_name", "test_without_storage", "test_broken")
    (folder / "control.json").write_text(json.dumps({f"test_small.py::TestOne::{test}": "passed" for test in control}))
    listed = {"test_threads": "another error", "test_by_name": ".", "test_gone": "."}
    cannot = "".join(f'Reason("", "{error}", ("test_small.py::TestOne::{test}",)),' for test, error in listed.items())
    code, out = run(folder, cannot=cannot)
    assert code == 1 and "0 cannot    3 failed" in out, out
    assert "The list expects another error: another error" in out  # test_threads
    assert "XPASS(strict)" in out  # test_by_name
    assert "AssertionError: everywhere" in out  # test_broken, which is not listed
    assert "listed, and gone: test_small.py::TestOne::test_gone" in out
