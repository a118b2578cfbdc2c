"""What fails on one rank of a DeepSpeed job is told on all, and no rank waits in vain."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import Ranks

import lazyckpt
from lazyckpt.storage import commit
from lazyckpt.storage.shared import AttachedStaging


def told(call: Callable[[], Any]) -> str:
    try:
        call()
    except (lazyckpt.SaveError, lazyckpt.LoadError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def faulty(folder: str, fault: str, on: int) -> list[str]:
    """A good save, one with a fault on rank ``on``, a good one that raises that failure, and another good one."""
    import torch.distributed as dist
    from deepspeed_training import built, config, train

    import lazyckpt.integrations.deepspeed  # noqa: F401  # it makes DeepSpeed understand the key

    engine = built({**config(2), "lazyckpt": {"rank_timeout_s": 10}})
    heard = []
    for step in range(1, 5):
        train(engine, step, step + 1)
        with pytest.MonkeyPatch.context() as patch:
            state: dict[str, Any] = {}
            if step == 2 and dist.get_rank() == on:
                break_it(patch, fault, Path(folder), state)
            heard.append(told(lambda state=state: engine.save_checkpoint(folder, client_state=state)))
            engine.checkpoint_engine._saver.drain()  # a failure in the background is left to the next save
    engine.destroy()
    return [*heard, Path(folder, "latest").read_text()]


def break_it(patch: pytest.MonkeyPatch, fault: str, folder: Path, state: dict[str, Any]) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    if fault == "unpicklable":
        state["lambda"] = lambda: None
    elif fault == "full":
        patch.setattr(AttachedStaging, "sync", full)
        patch.setattr(commit, "sync_all", full)
    elif fault == "script":
        from deepspeed.runtime import engine

        patch.setattr(engine, "copyfile", full)
    elif fault == "latest":
        patch.setattr(commit, "publish_pointer", full)


@pytest.mark.parametrize(
    ("fault", "on", "why"),
    [
        ("unpicklable", 0, "lambda"),  # rank 0 writes the client state
        ("full", 1, "No space left"),
        ("full", 0, "No space left"),
        ("script", 0, "No space left"),
        ("latest", 0, "No space left"),
    ],
)
def test_a_failure_on_one_rank_is_raised_on_all_and_training_goes_on(
    deepspeed_ranks: Ranks, tmp_path: Path, fault: str, on: int, why: str
) -> None:
    for rank, heard in enumerate(deepspeed_ranks.run(2, faulty, str(tmp_path / "run"), fault, on)):
        assert heard[0] == heard[3] == "fine" and heard[4] == "global_step4", heard
        failures = [line for line in heard[1:3] if line != "fine"]
        assert len(failures) == 1 and why in failures[0], heard
        assert rank == on or f"rank {on} " in failures[0], heard
    assert {"global_step1", "global_step3", "global_step4"} <= set(os.listdir(tmp_path / "run"))
