"""Switching lazyckpt on for accelerate: settings, copies of an accelerator, and refusals."""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

accelerate = pytest.importorskip("accelerate", "1.0")

from accelerate.commands.config import config_args  # noqa: E402
from accelerate.state import DistributedType  # noqa: E402
from duplicates import DUPLICATES  # noqa: E402

import lazyckpt  # noqa: E402
from accelerate_training import TINY_RING, Net, Run, names  # noqa: E402
from lazyckpt.integrations.accelerate import StateSaver, enable  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.mark.parametrize("early", [False, True])
def test_the_first_step_prepares_the_staging_buffer(early: bool, tmp_path: Path) -> None:
    """Whether enable() comes before prepare() or after it; in the main process, which saves."""
    accelerator = accelerate.Accelerator(cpu=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    if early:
        saver = enable(accelerator, chunk_bytes=4096)
    model, optimizer = accelerator.prepare(model, optimizer)
    if not early:
        saver = enable(accelerator, chunk_bytes=4096)
    assert saver is not None and saver._saver is not None
    before = saver._saver.engine.ring_bytes
    model(torch.randint(300, (8,))).backward()
    optimizer.step()
    assert before <= 2 * 4096
    assert saver._saver.engine.ring_bytes > 3 * sum(p.nbytes for p in model.parameters())
    saver.close()
    assert "prepare" not in vars(accelerator) or accelerator.prepare.__func__ is accelerate.Accelerator.prepare


def test_enabling_again_replaces_and_closing_gives_back(tmp_path: Path) -> None:
    run = Run()
    first = enable(run.accelerator, max_in_flight=3)
    second = enable(run.accelerator, max_in_flight=1)
    assert run.accelerator.save_state.__self__ is second and first is not second
    second.close()
    assert run.accelerator.save_state.__func__ is accelerate.Accelerator.save_state
    enable(run.accelerator)
    assert enable(run.accelerator, enabled=False) is None
    assert run.accelerator.save_state.__func__ is accelerate.Accelerator.save_state


def test_code_goes_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_args, "cache_dir", str(tmp_path))
    (tmp_path / "lazyckpt.yaml").write_text("max_in_flight: 5\nio_depth: 5\n")
    monkeypatch.setenv("LAZYCKPT_IO_DEPTH", "4")
    run = Run()
    assert enable(run.accelerator)._saver.config.max_in_flight == 5
    assert enable(run.accelerator, max_in_flight=3)._saver.config.max_in_flight == 3
    assert enable(run.accelerator)._saver.config.io_depth == 4
    monkeypatch.setenv("LAZYCKPT_ENABLED", "no")
    assert enable(run.accelerator) is None


@pytest.mark.parametrize("kind", ["protocol 0", "cloudpickle"])
def test_an_unpickled_accelerator_trains_saves_and_resumes(tmp_path: Path, kind: str, full_disk: list[bool]) -> None:
    """Regression: TypeError: cannot pickle '_queue.SimpleQueue' object."""
    run = Run()
    saver = enable(run.accelerator, max_in_flight=3, **TINY_RING)
    run.step(2)
    run.accelerator.save_state(tmp_path / "original")
    there = Run.__new__(Run)
    parts = run.accelerator, run.average, run.optimizer, run.scheduler
    there.accelerator, there.average, there.optimizer, there.scheduler = DUPLICATES[kind](parts)
    own = there.accelerator.save_state.__self__
    assert type(own) is StateSaver and own is not saver and own._accelerator is there.accelerator
    assert own._saver is None and own.last_save is None and own.pending() == []
    (there.model,) = there.accelerator._models
    before = [p.detach().clone() for p in run.model.parameters()]
    there.step()
    there.accelerator.save_state(tmp_path / "copy")
    assert own.last_save.metrics.eager_bytes < own.last_save.metrics.bytes / 2, "it is copied lazily"
    assert own._saver.config.max_in_flight == 3
    saved = [p.detach().clone() for p in there.model.parameters()]
    there.step()
    there.accelerator.load_state(tmp_path / "copy")
    assert all(map(torch.equal, saved, there.model.parameters())), "the copy resumes"
    assert all(map(torch.equal, before, run.model.parameters())), "and the original is as it was"
    full_disk.append(True)
    there.step()
    there.accelerator.save_state(tmp_path / "failed")
    with pytest.raises(lazyckpt.SaveError, match="No space left"):
        there.accelerator.end_training()
    assert names(tmp_path) == ["copy", "original"]
    assert enable(there.accelerator, enabled=False) is None
    assert there.accelerator.save_state.__func__ is accelerate.Accelerator.save_state


@pytest.mark.long
def test_in_a_new_process_an_unpickled_accelerator_saves_and_its_last_failure_is_told(tmp_path: Path) -> None:
    """At the end of the program everything is durable, although nothing waits for it there."""
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(300, 300)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    enable(accelerator, **TINY_RING)
    accelerator.step = 5
    (tmp_path / "accelerator.pkl").write_bytes(pickle.dumps(accelerator))
    script = (
        "import pickle, sys, torch\n"
        "accelerator = pickle.load(open(sys.argv[1], 'rb'))\n"
        "(model,), (optimizer,) = accelerator._models, accelerator._optimizers\n"
        "accelerator.backward(model(torch.ones(1, 300)).sum())\n"
        "optimizer.step()\n"
        "accelerator.save_state(sys.argv[2])\n"
        "metrics = accelerator.save_state.__self__.last_save.metrics\n"
        "assert metrics.eager_bytes < metrics.bytes / 2, metrics\n"
        "print(model.weight.double().sum().item())\n"
        "optimizer.step()\n"
        "from lazyckpt.storage import commit\n"
        "publish = commit.Staging.publish\n"
        "def fail(self):\n"
        "    if self.target.name == 'failed': raise OSError(28, 'No space left on device')\n"
        "    return publish(self)\n"
        "commit.Staging.publish = fail\n"
        "accelerator.save_state('failed')\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "accelerator.pkl"), str(tmp_path / "state")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stderr and not (tmp_path / "failed").exists()
    accelerator.load_state(tmp_path / "state")
    assert model.weight.double().sum().item() == float(done.stdout)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_is_the_same_as_that_of_the_accelerator(duplicate: Any) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    saver = enable(accelerator)
    assert copy.deepcopy(accelerator) is accelerator
    assert duplicate(saver) is saver


@pytest.mark.parametrize("wrong", [{"max_in_flight": 0}, {"keep_last": 3}, {"colour": "red"}, {"audit": "maybe"}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    run = Run()
    with pytest.raises(lazyckpt.ConfigError, match=next(iter(wrong))):
        enable(run.accelerator, **wrong)


def test_sharded_checkpoints_of_fsdp_1_are_left_to_accelerate() -> None:
    run = Run()
    run.accelerator.state.distributed_type = DistributedType.FSDP
    run.accelerator.state.fsdp_plugin = types.SimpleNamespace(fsdp_version=1)
    with pytest.warns(UserWarning, match="FSDP"):
        assert enable(run.accelerator) is None
    assert not isinstance(getattr(run.accelerator.save_state, "__self__", None), StateSaver)


@pytest.mark.parametrize("framework", ["accelerate", "lightning", "transformers"])
def test_a_missing_framework_is_told_in_one_line(framework: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, f"lazyckpt.integrations.{framework}", raising=False)
        for module in [name for name in sys.modules if name.partition(".")[0] == framework]:
            patch.delitem(sys.modules, module)
        patch.setitem(sys.modules, framework, None)
        with pytest.raises(ImportError, match=r"^lazyckpt.* needs .*: pip install .*$"):
            importlib.import_module(f"lazyckpt.integrations.{framework}")


def test_an_old_accelerate_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lazyckpt.integrations.accelerate")
    monkeypatch.setattr(accelerate, "__version__", "1.8.1")
    with pytest.raises(
        ImportError, match=r"^lazyckpt .* needs another accelerate .*accelerate>=1\.9\): pip install .*$"
    ):
        importlib.import_module("lazyckpt.integrations.accelerate")
