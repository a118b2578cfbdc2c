"""What DeepSpeed calls, in which order, and what lazyckpt adds: nothing to training's group."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from processes import Ranks

import lazyckpt

_CALLS = ("create", "makedirs", "save", "is_decoupled", "get_commit_info", "commit", "load")
_COLLECTIVES = ("barrier", "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor")


def noted(patch: pytest.MonkeyPatch, owner: Any, names: tuple[str, ...], told: list[str]) -> None:
    """Adds each call of these methods to ``told``; of a path, its last part."""

    def note(name: str) -> Any:
        original = getattr(owner, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            paths = [value for value in (*args, *kwargs.values()) if isinstance(value, str | os.PathLike)]
            told.append(" ".join([name, *(Path(path).name for path in paths)]))
            return original(*args, **kwargs)

        return method

    for name in names:
        patch.setattr(owner, name, note(name))


def one_save_and_step(folder: str, stage: int, lazily: bool) -> tuple[list[str], list[str]]:
    """The calls of one save, and those of the micro-batch after it."""
    from deepspeed_training import built, config, train

    import lazyckpt.integrations.deepspeed  # it makes DeepSpeed understand the key

    engine = built({**config(stage), "lazyckpt": lazily})
    train(engine, 0, 2)
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        noted(patch, dist, _COLLECTIVES, told)
        if lazily:
            noted(patch, engine.checkpoint_engine, _CALLS, told)  # no engine that a garbage collection destroys
            noted(patch, lazyckpt.Saver, ("stage",), told)
        engine.save_checkpoint(folder)
        saved = told.copy()
        told.clear()
        train(engine, 2, 3)
    engine.destroy()
    return saved, told


MODEL, SHARD = "save mp_rank_00_model_states.pt", "save zero_pp_rank_{}_mp_rank_00_optim_states.pt"
BEGIN = ["barrier", "create", "all_reduce", "all_reduce"]
TAG, END = "makedirs global_step2", ["is_decoupled", "barrier", "stage global_step2 latest"]
FILES = {
    0: [[MODEL], []],
    2: [[MODEL, TAG, SHARD.format(0)], [TAG, SHARD.format(1)]],
    3: [
        ["save zero_pp_rank_0_mp_rank_00_model_states.pt", TAG, SHARD.format(0)],
        ["save zero_pp_rank_1_mp_rank_00_model_states.pt", TAG, SHARD.format(1)],
    ],
}


@pytest.mark.long(first=1)
@pytest.mark.parametrize("stage", FILES)
def test_the_order_of_calls_is_that_on_which_the_engine_relies(
    deepspeed_ranks: Ranks, tmp_path: Path, stage: int
) -> None:
    """A version of DeepSpeed with another order fails here, and not in a training run."""
    lazy = deepspeed_ranks.run(2, one_save_and_step, str(tmp_path / "lazy"), stage, True)
    plain = deepspeed_ranks.run(2, one_save_and_step, str(tmp_path / "plain"), stage, False)
    for rank, (saved, stepped) in enumerate(lazy):
        begin = ["makedirs lazy", *BEGIN] if rank == 0 else BEGIN
        assert saved == [*begin, TAG, *FILES[stage][rank], *END]
        ours = [call for call in stepped if call in ("is_decoupled", "get_commit_info")]
        assert ours == ["is_decoupled", "is_decoupled", "get_commit_info"]
        assert [call for call in stepped if call not in ours] == plain[rank][1]
        assert [call for call in saved if call in _COLLECTIVES] == plain[rank][0]


def waited(folder: str) -> list[str]:
    """What ``latest`` names each time that ``result()`` has returned, and what a load right after a save finds."""
    from deepspeed_training import built, config, train

    from lazyckpt.integrations.deepspeed import enable

    engine = built(config(2))
    ours = enable(engine, max_in_flight=2)
    assert ours is not None
    named = []
    for step in range(3):
        train(engine, step, step + 1)
        engine.save_checkpoint(folder)
        assert ours.last_save is not None
        ours.last_save.result()
        named.append(Path(folder, "latest").read_text())
    train(engine, 3, 4)
    engine.save_checkpoint(folder, client_state={"seen": 4})
    train(engine, 4, 5)
    path, client = engine.load_checkpoint(folder)
    named.append(f"{Path(path).parent.name} {client['seen']} {engine.global_steps}")
    engine.save_checkpoint(folder, tag="mine", save_latest=False)
    ours.wait()
    named.append(Path(folder, "latest").read_text())
    engine.destroy()
    return named


def test_every_rank_that_waits_finds_the_latest(deepspeed_ranks: Ranks, tmp_path: Path) -> None:
    expected = ["global_step1", "global_step2", "global_step3", "global_step4 4 4", "global_step4"]
    assert deepspeed_ranks.run(2, waited, str(tmp_path)) == [expected, expected]
    assert (tmp_path / "mine").is_dir() and (tmp_path / "zero_to_fp32.py").is_file()


def weights(folder: str) -> list[bool]:
    """Whether ``save_16bit_model`` has written a whole file when it returns."""
    from deepspeed_training import built, config, train

    engine = built({**config(3, "bf16", zero={"stage3_gather_16bit_weights_on_model_save": True}), "lazyckpt": {}})
    train(engine, 0, 1)
    done = engine.save_16bit_model(folder)
    dist.barrier()
    found = lazyckpt.load(Path(folder, "pytorch_model.bin"))
    engine.save_checkpoint(folder)  # goes on as before
    engine.destroy()
    return [done, set(found) >= {"hidden.weight", "seen"}, Path(folder, "latest").read_text() == "global_step1"]


def test_consolidated_weights_are_durable_on_return(deepspeed_ranks: Ranks, tmp_path: Path) -> None:
    assert deepspeed_ranks.run(2, weights, str(tmp_path)) == [[True, True, True]] * 2


def asked(settings: dict[str, Any], variables: dict[str, str], config_of: dict[str, Any]) -> str:
    """The engine that a config gives, or the error."""
    from deepspeed_training import built, config

    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        try:
            engine = built({**config(config_of.pop("stage", 1), **config_of), **settings})
        except lazyckpt.ConfigError as error:
            return str(error)
    ours = engine.checkpoint_engine
    told = type(ours).__name__
    if told == "LazyCheckpointEngine":
        told += f" {ours._saver.config.max_in_flight}"
    engine.destroy()
    return told


@pytest.mark.parametrize(
    ("settings", "variables", "config", "told"),
    [
        ({}, {}, {}, "TorchCheckpointEngine"),
        ({"lazyckpt": {}}, {}, {}, "LazyCheckpointEngine"),
        ({"lazyckpt": True}, {"LAZYCKPT_MAX_IN_FLIGHT": "3"}, {}, "LazyCheckpointEngine 3"),
        ({"lazyckpt": {"max_in_flight": 1}}, {"LAZYCKPT_MAX_IN_FLIGHT": "3"}, {}, "LazyCheckpointEngine 1"),
        ({"lazyckpt": False}, {}, {}, "TorchCheckpointEngine"),
        ({"lazyckpt": {"enabled": False}}, {}, {}, "TorchCheckpointEngine"),
        ({"lazyckpt": {}}, {"LAZYCKPT_ENABLED": "false"}, {}, "TorchCheckpointEngine"),
        ({"lazyckpt": {"max_inflight": 1}}, {}, {}, "did you mean 'max_in_flight'"),
        ({"lazyckpt": {"keep_last": 3}}, {}, {}, "config: keep_last: DeepSpeed keeps all checkpoints"),
        ({"lazyckpt": {"writers": "all"}}, {}, {}, "each rank writes its own files"),
        ({"lazyckpt": 3}, {}, {}, "an object of settings, not 3"),
        ({"lazyckpt": {}, "checkpoint": {"use_node_local_storage": True}}, {}, {}, "use_node_local_storage"),
    ],
)
def test_what_the_config_asks_for(
    deepspeed_ranks: Ranks, settings: Any, variables: Any, config: Any, told: str
) -> None:
    for found in deepspeed_ranks.run(2, asked, settings, variables, config):
        assert told in found


def tagged(folder: str) -> list[str]:
    """Tags that are no folder of their own, and one that is saved again beside files of the user's."""
    from deepspeed_training import built, config, train

    from lazyckpt.integrations.deepspeed import enable

    engine = built(config(2))
    ours = enable(engine)
    assert ours is not None
    train(engine, 0, 1)
    told = []
    for tag in ("", ".", "..", "a/../.."):
        with pytest.raises(lazyckpt.ConfigError, match="no folder inside") as caught:
            engine.save_checkpoint(folder, tag=tag)
        told.append(type(caught.value).__name__)
    for number in range(2):
        engine.save_checkpoint(folder, tag="runs/mine")
        ours.wait()
        dist.barrier()
        if dist.get_rank() == 0 and number == 0:
            Path(folder, "runs/mine/notes.txt").write_text("the user's")
            Path(folder, "runs/mine/zero_pp_rank_7_mp_rank_00_optim_states.pt").touch()  # of more ranks
        dist.barrier()
        train(engine, 1, 2)
    engine.destroy()
    return [*told, Path(folder, "latest").read_text()]


def test_a_tag_is_a_folder_of_its_own_in_which_other_files_stay(deepspeed_ranks: Ranks, tmp_path: Path) -> None:
    expected = [*["ConfigError"] * 4, "runs/mine"]
    assert deepspeed_ranks.run(2, tagged, str(tmp_path / "run")) == [expected, expected]
    assert sorted(os.listdir(tmp_path / "run/runs/mine")) == [
        ".lazyckpt-lock",
        "mp_rank_00_model_states.pt",
        "notes.txt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    ]
