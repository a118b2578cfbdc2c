"""``load_checkpoint`` takes a whole tag, the same on all ranks, and says which damaged one it passes over."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from processes import Ranks

import lazyckpt


def flip(path: Path) -> None:
    """Flips a bit of a tensor."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage(folder: Path, how: str) -> None:
    newest = folder / "global_step3"
    shard = newest / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    if how == "a flipped bit":
        flip(shard)
    elif how == "a truncated model":
        model = newest / "mp_rank_00_model_states.pt"
        model.write_bytes(model.read_bytes()[:-100])
    elif how == "a shard of zeros":  # as after a power cut
        shard.write_bytes(bytes(shard.stat().st_size))
    elif how == "a missing shard":
        shard.unlink()
    elif how == "a missing tag":
        shutil.rmtree(newest)
    elif how == "an empty tag":
        shutil.rmtree(newest)
        newest.mkdir()
    elif how == "a latest that names nothing":
        (folder / "latest").write_text("")
    elif how == "a latest outside":
        (folder / "latest").write_text("../elsewhere")


def passed_over(folder: str, stage: int, how: str, lazily: bool) -> Any:
    """Saves three tags, damages the newest, and loads."""
    import torch.distributed as dist
    from deepspeed_training import built, config, train

    import lazyckpt.integrations.deepspeed  # noqa: F401  # it makes DeepSpeed understand the key

    engine = built({**config(stage), "lazyckpt": lazily})
    losses = {}
    for step in range(1, 4):
        train(engine, step - 1, step)
        engine.save_checkpoint(folder, client_state={"step": step})
        losses[step] = train(engine, 10 + step, 11 + step)
        engine.load_checkpoint(folder)  # back to where it was
    engine.destroy()
    dist.barrier()
    if dist.get_rank() == 0:
        damage(Path(folder), how)
    dist.barrier()

    engine = built({**config(stage), "lazyckpt": {}})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, client = engine.load_checkpoint(folder)
    step = client["step"]
    found = train(engine, 10 + step, 11 + step)
    engine.destroy()
    told = [str(warning.message) for warning in caught if "damaged" in str(warning.message)]
    return step, found == losses[step], told


@pytest.mark.long
@pytest.mark.parametrize("lazily", [True, False])
@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("a flipped bit", "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("a truncated model", "global_step3/mp_rank_00_model_states.pt"),
        ("a shard of zeros", "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("a missing shard", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("a missing tag", "global_step3"),
        ("an empty tag", "global_step3"),
        ("a latest that names nothing", "latest"),
        ("a latest outside", "latest"),
    ],
)
def test_a_damaged_latest_is_passed_over_by_name(
    deepspeed_ranks: Ranks, tmp_path: Path, how: str, named: str, lazily: bool
) -> None:
    """Also for what DeepSpeed's own engine has saved."""
    stage = 2 if lazily else 1
    for rank, (step, same, told) in enumerate(
        deepspeed_ranks.run(2, passed_over, str(tmp_path / "run"), stage, how, lazily)
    ):
        assert step == (3 if "latest" in how else 2) and same
        assert len(told) == (1 if rank == 0 else 0)  # one warning for all ranks
        assert all(named in line for line in told)


def refused(folder: str) -> list[str]:
    """A load of a damaged tag by name, of a folder without a whole tag, and of one without any."""
    import torch.distributed as dist
    from deepspeed_training import built, config, train

    from lazyckpt.integrations.deepspeed import enable

    engine = built(config(3))
    enable(engine)
    train(engine, 0, 3)
    engine.save_checkpoint(folder)
    engine.checkpoint_engine.wait()
    dist.barrier()
    if dist.get_rank() == 0:
        flip(Path(folder, "global_step3", "zero_pp_rank_0_mp_rank_00_optim_states.pt"))
        Path(folder, "empty").mkdir()
    dist.barrier()
    told = []
    for options in ({"tag": "global_step3"}, {}, {"tag": "other"}):
        with pytest.raises(lazyckpt.LoadError) as caught:
            engine.load_checkpoint(folder, **options)
        told.append(str(caught.value))
    before = train(engine, 3, 4)
    told.append(str(engine.load_checkpoint(f"{folder}/empty")))
    engine.destroy()
    return [*told, str(before[0] > 0)]


def test_a_load_that_cannot_succeed_raises_on_all_ranks_before_it_changes_anything(
    deepspeed_ranks: Ranks, tmp_path: Path
) -> None:
    for damaged, none, missing, empty, goes_on in deepspeed_ranks.run(2, refused, str(tmp_path)):
        assert "zero_pp_rank_0_mp_rank_00_optim_states.pt" in damaged
        assert "zero_pp_rank_0_mp_rank_00_optim_states.pt" in none
        assert "other" in missing
        assert empty == "(None, None)" and goes_on == "True"


def failed_before(folder: str) -> list[str]:
    """A load after a save that failed in the background, and another one."""
    import torch.distributed as dist
    from deepspeed_training import built, config, train

    from lazyckpt.integrations.deepspeed import enable
    from lazyckpt.storage import commit

    engine = built(config(2))
    enable(engine)
    told = []
    for step in (1, 2):
        train(engine, step, step + 1)
        with pytest.MonkeyPatch.context() as patch:
            if step == 2 and dist.get_rank() == 0:
                patch.setattr(commit.Staging, "describe", lambda *args: 1 / 0)
            engine.save_checkpoint(folder)
            engine.checkpoint_engine._saver.drain()
    for _ in range(2):
        try:
            told.append(Path(engine.load_checkpoint(folder)[0]).parent.name)
        except lazyckpt.SaveError as error:
            told.append(type(error).__name__)
    engine.destroy()
    return told


def test_a_save_that_failed_is_told_before_an_older_tag_is_loaded(deepspeed_ranks: Ranks, tmp_path: Path) -> None:
    first, second = deepspeed_ranks.run(2, failed_before, str(tmp_path))
    assert first == ["SaveError", "global_step1"] and second == ["RankError", "global_step1"]
