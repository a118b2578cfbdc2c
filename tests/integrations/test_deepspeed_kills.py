"""Kills a rank of a DeepSpeed job in the midst of a save: ``latest`` names a whole checkpoint, and the others hear."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from processes import Died, Ranks

import lazyckpt
from lazyckpt.storage import commit
from lazyckpt.storage.shared import SharedFolder
from trials import Trials

TIMEOUT_S = 4.0  # of the signs of life


def struck(folder: str, stage: int, victim: int, at: float | str) -> Any:
    """Saves once in peace, then again: ``victim`` dies ``at`` seconds after the save has begun, or before a call of
    that name. Returns what the other rank is told, and how long it took since."""
    import torch.distributed as dist
    from deepspeed_training import built, config, train

    from lazyckpt.integrations.deepspeed import LazyCheckpointEngine, enable

    engine = built(config(stage, "bf16"))
    ours = enable(engine, rank_timeout_s=TIMEOUT_S)
    assert ours is not None
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    assert ours.last_save is not None
    ours.last_save.result()
    train(engine, 2, 4)
    dist.barrier()
    begin = time.monotonic()

    def die(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_later() -> None:
        time.sleep(max(0.0, begin + float(at) - time.monotonic()))
        die()

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == victim and isinstance(at, str):
            owners = {"save": LazyCheckpointEngine, "to_final": SharedFolder, "publish_pointer": commit}
            patch.setattr(owners[at], at, die)
        elif dist.get_rank() == victim:
            threading.Thread(target=die_later, daemon=True).start()
        try:
            engine.save_checkpoint(folder)
            train(engine, 4, 5)
            told = ours.last_save.exception()
            if dist.get_rank() == victim:
                time.sleep(60)  # it dies in the end
        except (RuntimeError, lazyckpt.SaveError) as error:
            told = error
    if not isinstance(told, lazyckpt.SaveError) and ours.last_save.step == 4:
        told = ours.last_save.exception()  # whatever gloo says of a collective of training
    return f"{type(told).__name__}: {told}", time.monotonic() - begin


def loaded(folder: str, stage: int) -> Any:
    """What plain DeepSpeed resumes from, and how training goes on."""
    from deepspeed_training import built, config, train

    engine = built(config(stage, "bf16"))
    path, _ = engine.load_checkpoint(folder)
    losses = train(engine, engine.global_steps, engine.global_steps + 1)
    engine.destroy()
    return Path(path).parent.name, losses


def undisturbed(stage: int) -> dict[str, Any]:
    """The loss behind each tag."""
    from deepspeed_training import built, config, train

    engine = built(config(stage, "bf16"))
    losses = train(engine, 0, 5)
    engine.destroy()
    return {"global_step2": losses[2:3], "global_step4": losses[4:5]}


def check(ranks: Ranks, folder: Path, stage: int, victim: int, at: float | str, expected: list[dict[str, Any]]) -> str:
    """Kills once and checks everything. Returns the tag that was left."""
    told = ranks.run(2, struck, str(folder), stage, victim, at, timeout_s=120)
    assert isinstance(told[victim], Died), told
    error, seconds = told[1 - victim]
    assert error == "NoneType: None" or f"rank {victim} " in error, error
    ranks.close()  # ZeRO 3 compares the numbers of modules, and a new rank would begin at 0
    found = ranks.run(2, loaded, str(folder), stage)
    (tag,) = {tag for tag, _ in found}
    for rank, (_, losses) in enumerate(found):
        assert losses == expected[rank][tag], "a mixture of two checkpoints"
    assert tag == "global_step4" or error != "NoneType: None", "it was told to be durable"
    assert seconds < 60
    return tag


@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "at", "tag"),
    [
        (1, "save", "global_step2"),  # inside DeepSpeed's own part
        (0, "to_final", "global_step2"),  # all files are durable, the folder has no name yet
        (0, "publish_pointer", "global_step4"),  # it has, but is not the latest yet: rank 1 stands in
    ],
)
def test_a_rank_that_is_killed_leaves_a_whole_checkpoint(
    deepspeed_ranks: Ranks, tmp_path: Path, victim: int, at: str, tag: str
) -> None:
    expected = deepspeed_ranks.run(2, undisturbed, 2)
    assert check(deepspeed_ranks, tmp_path, 2, victim, at, expected) == tag


@pytest.mark.long
@pytest.mark.timeout(3600)  # with all trials
def test_kills_at_every_instant_of_a_save(deepspeed_ranks: Ranks, tmp_path: Path, trials: Trials) -> None:
    """Every 2 ms, on either rank, with ZeRO 1 and 3."""
    left: dict[str, int] = {}
    count = trials.count(1, 80)
    for stage in (1, 3) if count > 1 else (3,):
        expected = deepspeed_ranks.run(2, undisturbed, stage)
        for number in range(count):
            folder = tmp_path / f"{stage}-{number}"
            tag = check(deepspeed_ranks, folder, stage, number % 2, 0.002 * (number // 2), expected)
            left[tag] = left.get(tag, 0) + 1
    trials.report("SIGKILL of a DeepSpeed rank while it saves", sum(left.values()), tmp_path, **left)
