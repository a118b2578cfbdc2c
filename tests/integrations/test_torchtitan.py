"""LazyCheckpointManager on two ranks: lazy, whole or not at all, and torchtitan reads it without lazyckpt.

The trainer is the one of examples/torchtitan_gpt.py, since torchtitan's own needs a GPU; all other components are
torchtitan's."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import importlib.util
import os
import re
import threading
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Ranks
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import lazyckpt
from lazyckpt.pipeline import persist
from lazyckpt.ranks.votes import Ballot
from lazyckpt.storage import folders, hidden

pytest.importorskip("torchtitan", reason="it needs Python 3.11", exc_type=ImportError)
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config.override import OverrideConfig

from lazyckpt.integrations.torchtitan import STAGING, LazyCheckpointManager


def load_example() -> types.ModuleType:
    file = Path(__file__).parents[2] / "examples/torchtitan_gpt.py"
    spec = importlib.util.spec_from_file_location("torchtitan_gpt", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()
example.LAYERS, example.WIDTH = 1, 128

KINDS = {"lazy": LazyCheckpointManager, "plain": CheckpointManager}
FILES = [".lazyckpt-lock", ".metadata", "__0_0.distcp", "__1_0.distcp"]
OVERRIDE = "lazyckpt.integrations.torchtitan.lazy"


@contextlib.contextmanager
def trainer_in(dump: Path, steps: int, kind: str = "lazy", override: Any = None, **options: Any) -> Iterator[Any]:
    """A trainer, which ends as torchtitan/train.py ends it. It saves each third step, and all of the last one."""
    options = {"enable": True, "interval": 3, "last_save_model_only": False, "keep_latest_k": 0, **options}
    trainer = example.Trainer.Config(
        dump_folder=str(dump),
        steps=steps,
        checkpoint=KINDS[kind].Config(**options),
        override=OverrideConfig(imports=[] if override is None else [override]),
    ).build()
    try:
        yield trainer
    except Exception:
        trainer.checkpointer.close()
        raise
    else:
        trainer.checkpointer.close()


def state_of(trainer: Any) -> Any:
    tensors = {**trainer.checkpointer.states["model"].state_dict(), **trainer.optimizers.state_dict()}
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in tensors.items()}
    return whole, trainer.lr_schedulers.state_dict(), trainer.state_dict()


def run(folder: Path, steps: int, kind: str = "lazy", **options: Any) -> tuple[list[int], Any]:
    """Trains. Returns the steps that were taken, and the state at the end."""
    taken: list[int] = []
    with trainer_in(folder, steps, kind, **options) as trainer:
        own = trainer.train_step

        def train_step(text: Any) -> Any:
            taken.append(trainer.step)
            return own(text)

        trainer.train_step = train_step
        trainer.train()
        state = state_of(trainer)
    dist.barrier()
    return taken, state


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "checkpoint"))


def whole(checkpoint: Path) -> Any:
    """What torch alone puts together of a checkpoint."""
    file = checkpoint.parent.parent / f"{checkpoint.name}.pt"
    dcp_to_torch_save(checkpoint, file)
    return torch.load(file)


# contents of a save, and their readers


def saved_and_resumed(folder: Path, first: str, second: str) -> Any:
    expected = run(folder / "whole", 9, "plain")
    run(folder, 6, first)
    return expected[1], run(folder, 9, second)


@pytest.mark.long
@pytest.mark.parametrize(("first", "second"), [("lazy", "lazy"), ("lazy", "plain"), ("plain", "lazy")])
def test_a_resumed_run_equals_the_uninterrupted_one_whoever_saved_it(
    ranks: Ranks, tmp_path: Path, first: str, second: str
) -> None:
    for expected, (taken, found) in ranks.run(2, saved_and_resumed, tmp_path, first, second):
        assert taken == [7, 8, 9]
        same(found, expected)
    assert names(tmp_path) == names(tmp_path / "whole") == ["step-3", "step-6", "step-9"]
    if first == "lazy":
        assert sorted(os.listdir(tmp_path / "checkpoint/step-3")) == FILES


def test_torch_alone_puts_it_together(ranks: Ranks, tmp_path: Path) -> None:
    (_, (state, scheduler, trained)), _ = ranks.run(2, run, tmp_path, 3)
    found = whole(tmp_path / "checkpoint/step-3")
    assert (found.pop("lr_scheduler"), found.pop("train_state")) == (scheduler, trained)
    assert set(found.pop("dataloader")) == {"dp_rank_0", "dp_rank_1", "world_size"}
    optimizer = found.pop("optimizer")
    same({**found, **optimizer}, state)


# lazy


def costs(folder: Path) -> Any:
    example.WIDTH = 512
    told = []
    try:
        with trainer_in(folder, 6, interval=1) as trainer:
            own = trainer.train_step

            def train_step(text: Any) -> Any:
                if trainer.step > 1:
                    told.append(trainer.checkpointer.last_save.metrics)
                return own(text)

            trainer.train_step = train_step
            trainer.train()
    finally:
        example.WIDTH = 128
    return [(m.eager_bytes / m.bytes, m.save_blocked_s) for m in told]


def test_from_the_second_save_on_nearly_everything_is_copied_later(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks.run(2, costs, tmp_path):
        assert len(told) == 5
        assert max(eager for eager, _ in told[1:]) < 0.03
        assert sorted(blocked for _, blocked in told[1:])[1] < 0.1


def held(folder: Path) -> Any:
    """No checkpoint becomes durable before the step after it ends."""
    stepped = threading.Event()
    real = persist.agree

    def agree(*args: Any, **kwargs: Any) -> Any:
        assert stepped.wait(30), "the step after save() waits until the checkpoint is durable"
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, trainer_in(folder, 4) as trainer:
        patch.setattr(persist, "agree", agree)
        own = trainer.train_step

        def train_step(text: Any) -> Any:
            loss = own(text)
            if trainer.step == 4:
                assert not trainer.checkpointer.last_save.done()
                stepped.set()
            return loss

        trainer.train_step = train_step
        trainer.train()


def test_neither_save_nor_the_next_step_waits_until_the_checkpoint_is_durable(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, held, tmp_path)
    assert names(tmp_path) == ["step-3", "step-4"]


def waited(folder: Path, async_mode: str) -> Any:
    with trainer_in(folder, 4, async_mode=async_mode) as trainer:
        for step in (1, 2, 3):
            trainer.train_step(torch.zeros(4, example.CONTEXT + 1, dtype=torch.long))
            trainer.checkpointer.save(step)
        done = trainer.checkpointer.last_save.done()
        trainer.checkpointer.maybe_wait_for_saving()
        assert trainer.checkpointer.last_save.done() and os.path.exists(folder / "checkpoint/step-3")
        return done


@pytest.mark.parametrize("async_mode", ["disabled", "async_with_pinned_mem"])
def test_what_waits_until_a_save_is_durable(ranks: Ranks, tmp_path: Path, async_mode: str) -> None:
    done = ranks.run(2, waited, tmp_path, async_mode)
    assert all(done) or async_mode != "disabled"


# the names that torchtitan takes for checkpoints


def plainly_found(folder: Path) -> int:
    """The newest checkpoint that plain torchtitan finds now."""
    found: int = CheckpointManager._find_load_step(types.SimpleNamespace(), str(folder))
    return found


def looking(folder: Path) -> Any:
    """Looks at the moment when all files of a checkpoint, .metadata too, are there under its temporary name."""
    seen = []
    real = Ballot.decide

    def decide(ballot: Any) -> None:
        seen.append((plainly_found(folder / "checkpoint"), names(folder)))
        place = hidden.place(folder / "checkpoint", STAGING)
        assert any((staged / ".metadata").exists() for staged in place.glob(".tmp-*"))
        real(ballot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ballot, "decide", decide)
        run(folder, 9)
    return seen


def test_a_staged_folder_is_never_taken_for_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    seen, _ = ranks.run(2, looking, tmp_path)
    assert [step for step, _ in seen] == [-1, 3, 6]
    for step, there in seen:
        assert [name for name in there if re.search(r"step-(\d+)", name)] == [
            f"step-{n}" for n in range(3, step + 1, 3)
        ]


def left_over(folder: Path) -> Any:
    """A process died between the two renames that replace a checkpoint, and another one while it removed one."""
    run(folder, 6)
    unfinished = folder / "checkpoint"
    if dist.get_rank() == 0:
        os.rename(unfinished / "step-6", folders.fresh_name(folders.REPLACED, unfinished / "step-6"))
        os.mkdir(trash := folders.fresh_name(folders.TRASH, unfinished / "step-9"))
        (trash / ".metadata").touch()
    dist.barrier()
    with trainer_in(folder, 9, load_only=True) as trainer:
        assert trainer.checkpointer.load() and trainer.step == 3  # a reader changes nothing
    dist.barrier()
    with trainer_in(folder, 9) as trainer:
        assert trainer.checkpointer.load() and trainer.step == 6


def test_what_a_crash_left_is_put_back_before_it_loads(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, left_over, tmp_path)
    assert names(tmp_path) == ["step-3", "step-6"]


# retention


def keeping(folder: Path, kind: str) -> None:
    run(folder, 6, kind, interval=1, keep_latest_k=2)


@pytest.mark.parametrize("kind", ["plain", "lazy"])
def test_keep_latest_k(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    ranks.run(2, keeping, tmp_path, kind)
    assert names(tmp_path) == ["step-4", "step-5", "step-6"]  # torchtitan removes none at the last step


def after_a_rollback(folder: Path) -> None:
    """Training goes on from an older checkpoint, so it saves lower steps than the folder holds."""
    with trainer_in(folder, 9, interval=1, keep_latest_k=2) as trainer:
        if dist.get_rank() == 0:
            for step in (7, 8):
                os.makedirs(folder / f"checkpoint/step-{step}")
                (folder / f"checkpoint/step-{step}/.metadata").touch()
            os.mkdir(folder / "checkpoint/step-6")  # torchtitan was killed while it wrote this
        dist.barrier()
        for step in (1, 2):
            trainer.train_step(torch.zeros(4, example.CONTEXT + 1, dtype=torch.long))
            trainer.checkpointer.save(step)


def test_the_checkpoint_that_was_saved_last_stays(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, after_a_rollback, tmp_path)
    assert names(tmp_path) == ["step-2", "step-7", "step-8"]


# what goes wrong


def failing(folder: Path, at: int, on_error: str, ends_by: int = 0, **options: Any) -> Any:
    """The save of step ``at`` fails on rank 1; every save ends before the next step. Returns what was raised,
    the warnings, and the last step."""
    real = persist.prepare

    def prepare(flight: Any, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1 and flight.handle.path.name == f"step-{at}":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(flight, *args, **kwargs)

    told = "", ""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(persist, "prepare", prepare)
        settings = lazyckpt.Config(on_error=on_error)  # type: ignore[arg-type]
        try:
            with trainer_in(folder, 9, settings=settings, **options) as trainer:
                own = trainer.train_step

                def train_step(text: Any) -> Any:
                    concurrent.futures.wait(trainer.checkpointer._saver.pending())
                    if trainer.step == ends_by:
                        raise ZeroDivisionError
                    return own(text)

                trainer.train_step = train_step
                trainer.train()
        except (lazyckpt.SaveError, ZeroDivisionError) as error:
            told = type(error).__name__, str(error)
    dist.barrier()
    return told, [str(w.message) for w in warned], trainer.step


@pytest.mark.parametrize("at", [3, 9])
def test_a_failed_save_raises_on_every_rank_at_the_next_save_or_at_the_end(
    ranks: Ranks, tmp_path: Path, at: int
) -> None:
    for rank, ((kind, text), _, step) in enumerate(ranks.run(2, failing, tmp_path, at, "raise")):
        assert kind == ("RankError", "NoSpaceError")[rank]
        assert "rank 1 failed: No space left" in text or (rank == 1 and "No space left" in text)
        assert f"step {at}:" in text and str(tmp_path / f"checkpoint/step-{at}") in text
        assert step == min(at + 3, 9)
    assert names(tmp_path) == (["step-6"] if at == 3 else ["step-3", "step-6"])  # the call that raises saves


def failing_with(folder: Path, at: int, options: dict[str, Any]) -> Any:
    return failing(folder, at, "warn", **options)


def test_training_goes_on_with_a_warning_if_so_wished_and_the_older_checkpoints_stay(
    ranks: Ranks, tmp_path: Path
) -> None:
    options = {"interval": 2, "keep_latest_k": 2}
    for told, warned, step in ranks.run(2, failing_with, tmp_path, 8, options):
        assert (told, step) == (("", ""), 9)
        assert any("No space left" in text for text in warned)
    # At step 8, which failed, step 4 had its turn to go.
    assert names(tmp_path) == ["step-4", "step-6", "step-9"]


def test_a_failed_save_does_not_hide_what_ended_training(ranks: Ranks, tmp_path: Path) -> None:
    for (kind, _), warned, _ in ranks.run(2, failing, tmp_path, 3, "raise", 5):
        assert kind == "ZeroDivisionError"
        assert any("step-3" in text and "No space left" in text for text in warned)


# torchtitan's options


def exported(folder: Path, dtype: str) -> None:
    for kind in KINDS:
        run(folder / kind, 3, kind, last_save_model_only=True, export_dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_last_save_holds_the_model_alone(ranks: Ranks, tmp_path: Path, dtype: str) -> None:
    ranks.run(2, exported, tmp_path, dtype)
    lazy, plain = (whole(tmp_path / kind / "checkpoint/step-3") for kind in ("lazy", "plain"))
    same(lazy, plain)
    assert {value.dtype for value in lazy.values()} == {getattr(torch, dtype)}


class Adapter:
    """A model whose names in Hugging Face's format begin with another word."""

    fqn_to_index_mapping = None

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"hf.{name}": value for name, value in state.items()}


def exported_to_hf(folder: Path) -> None:
    run(folder / "lazy", 3)  # its .metadata would be found first
    for kind in KINDS:
        with trainer_in(folder / kind, 3, kind) as trainer:
            trainer.checkpointer.sd_adapter = Adapter()
            trainer.checkpointer.last_save_in_hf = trainer.checkpointer.last_save_model_only = True
            trainer.checkpointer.save(3, last_step=True)
        dist.barrier()


def test_the_last_save_in_the_format_of_hugging_face(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, exported_to_hf, tmp_path)
    lazy, plain = (tmp_path / kind / "checkpoint/step-3" for kind in ("lazy", "plain"))
    files = [str(path.relative_to(plain)) for path in plain.rglob("*") if path.is_file()]
    assert sorted([*files, ".lazyckpt-lock"]) == sorted(
        str(path.relative_to(lazy)) for path in lazy.rglob("*") if path.is_file()
    )
    for name in files:  # the order of the words in the header of a .safetensors file is a matter of chance
        if name.endswith(".safetensors"):
            same(load_file(lazy / name), load_file(plain / name))
        else:
            assert (lazy / name).read_bytes() == (plain / name).read_bytes()
    assert "model.safetensors.index.json" in files
    assert plainly_found(lazy.parent) == 3


def loaded(folder: Path) -> None:
    run(folder, 6, enable_first_step_checkpoint=True)
    newest = state_of_checkpoint(folder / "checkpoint/step-6")
    with trainer_in(folder, 9) as trainer:
        assert trainer.checkpointer.load(3) and trainer.step == 3
    with trainer_in(folder, 9) as trainer, pytest.raises(FileNotFoundError):
        trainer.checkpointer.load(4)
    with trainer_in(folder, 9, exclude_from_loading=["train_state"]) as trainer:
        assert trainer.checkpointer.load() and trainer.step == 0
    initial = {"initial_load_path": str(folder / "checkpoint/step-6")}
    with trainer_in(folder / "model", 9, **initial) as trainer:
        assert trainer.checkpointer.load() and trainer.step == 0
        same(trainer.model.head.weight.full_tensor(), newest)
        assert not trainer.optimizers.optimizers[0].state
    with trainer_in(folder / "all", 9, initial_load_model_only=False, **initial) as trainer:
        assert trainer.checkpointer.load() and trainer.step == 6
    run(folder / "none", 3, load_only=True)
    with trainer_in(folder / "off", 3, enable=False) as trainer:
        trainer.train()
        trainer.checkpointer.maybe_wait_for_saving()


def state_of_checkpoint(checkpoint: Path) -> torch.Tensor:
    state = {"head.weight": torch.empty(256, example.WIDTH)}
    dist.checkpoint.load(state, checkpoint_id=checkpoint)
    return state["head.weight"]


def test_options_of_loading(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, loaded, tmp_path)
    assert names(tmp_path) == ["step-1", "step-3", "step-6"]
    assert not (tmp_path / "none/checkpoint").exists() and not (tmp_path / "off").exists()


def damaged(folder: Path) -> None:
    run(folder, 3)
    if dist.get_rank() == 0:
        with open(folder / "checkpoint/step-3/__1_0.distcp", "r+b") as file:
            file.seek(os.path.getsize(file.name) // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
    dist.barrier()
    with trainer_in(folder, 9) as trainer, pytest.raises(BaseException, match=r"__1_0\.distcp"):
        trainer.checkpointer.load()


def test_damage_is_noticed_when_it_is_loaded(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, damaged, tmp_path)


# how it is switched on


def overridden(folder: Path) -> Any:
    override = OVERRIDE, {"max_in_flight": 3}
    with trainer_in(folder, 3, "plain", override, keep_latest_k=7) as trainer:
        trainer.train()
        manager, config = trainer.checkpointer, trainer.config.checkpoint
        assert type(manager) is LazyCheckpointManager and manager._saver.config.max_in_flight == 3
        assert (config.keep_latest_k, config.interval, config.async_mode) == (7, 3, "async")
    with (
        pytest.raises(lazyckpt.ConfigError, match="max_in_flight"),
        trainer_in(folder, 3, "plain", (OVERRIDE, {"max_in_fligt": 3})),
    ):
        pass


def test_an_override_switches_it_on_for_any_config(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, overridden, tmp_path)
    assert names(tmp_path) == ["step-3"]


def test_the_command_line_takes_its_settings() -> None:
    import tyro

    config = tyro.cli(
        LazyCheckpointManager.Config,
        args=["--enable", "--interval", "7", "--settings.max-in-flight", "3", "--settings.on-error", "warn"],
    )
    assert (config.enable, config.interval) == (True, 7)
    assert config.settings == lazyckpt.Config(max_in_flight=3, on_error="warn")
    assert config._owner is LazyCheckpointManager and config.to_dict()["settings"]["max_in_flight"] == 3


def refused(folder: Path) -> None:
    with (
        pytest.raises(lazyckpt.ConfigError, match=r"checkpoint\.folder=gs://b/c.*CheckpointManager"),
        trainer_in(folder, 3, folder="gs://b/c"),
    ):
        pass
    with (
        pytest.raises(lazyckpt.ConfigError, match="keep_latest_k"),
        trainer_in(folder, 3, settings=lazyckpt.Config(keep_last=2)),
    ):
        pass


def test_what_it_cannot_do_is_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(1, refused, tmp_path)


def mirrored(folder: Path) -> Any:
    settings = lazyckpt.Config(mirrors=[str(folder / "lustre")])
    run(folder, 4, settings=settings)
    run(folder, 6, settings=settings)  # goes on, in the same place


def test_checkpoints_go_to_mirrors_and_come_back(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, mirrored, tmp_path, timeout_s=180)
    there = sorted(path.parent.name for path in (tmp_path / "lustre").glob("*/manifest.json"))
    assert there == ["step-3", "step-4", "step-6"]
    copy = lazyckpt.pull(tmp_path / "lustre", tmp_path / "b")
    assert copy.name == "step-6"
    same(whole(copy), whole(tmp_path / "checkpoint" / "step-6"))
