"""The Trainer with DeepSpeed on two gloo ranks: its folder and DeepSpeed's files in it are one snapshot.

The cases import DeepSpeed, and this module does not: transformers would find it in this process, too.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from processes import Died, Ranks, die

import lazyckpt
from lazyckpt.pipeline import background, persist
from lazyckpt.pipeline.sharded import request

GATHERED = {"stage3_gather_16bit_weights_on_model_save": True}


def trainer_on_cpu(folder: Path, settings: dict[str, Any], *callbacks: Any, **options: Any) -> Any:
    """A Trainer that saves steps 2, 4 and 6."""
    import deepspeed_training

    deepspeed_training.as_accelerator()
    from small_trainers import trainer_of

    options = {"max_steps": 6, "learning_rate": 1e-3, "gradient_accumulation_steps": 1, "use_cpu": False, **options}
    json = {**deepspeed_training.config(**settings), "train_micro_batch_size_per_gpu": 2}
    return trainer_of(folder, *callbacks, deepspeed=json, **options)


def lazy(**knobs: Any) -> Any:
    import deepspeed_training  # noqa: F401  # first: transformers looks for DeepSpeed

    from lazyckpt.integrations.transformers import LazyCheckpointCallback

    return LazyCheckpointCallback(**knobs)


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def run(folder: Path, settings: dict[str, Any], is_lazy: bool, **options: Any) -> Any:
    resume = options.pop("resume", None)
    trainer = trainer_on_cpu(folder, settings, **options)
    if is_lazy:
        trainer.add_callback(lazy())
    trainer.train(resume_from_checkpoint=resume)
    engine = type(trainer.model_wrapped.checkpoint_engine).__name__
    assert engine == ("LazyCheckpointEngine" if is_lazy else "TorchCheckpointEngine")
    dist.barrier()
    return losses(trainer)


def both(folder: Path, settings: dict[str, Any]) -> Any:
    """Saves with and without lazyckpt, and goes on from either, with and without it. The callback counts, not the key
    in the JSON."""
    plain, ours = (run(folder / name, settings, name == "ours", save_total_limit=2) for name in ("plain", "ours"))
    assert plain == ours
    for source, is_lazy in (("ours", False), ("ours", True), ("plain", True)):
        resume = str(folder / source / "checkpoint-4")
        assert run(folder / "again", settings, is_lazy, save_strategy="no", resume=resume) == ours
    return sorted(os.listdir(folder / "ours"))


def found(folder: Path) -> Any:
    import deepspeed_training  # noqa: F401  # the classes in the files
    from deepspeed_files import described

    from trainers import contents

    files = contents(folder, described)
    files.pop(".lazyckpt-lock", None)
    return files


def compared(folder: Path) -> Any:
    plain, ours = found(folder / "plain" / "checkpoint-4"), found(folder / "ours" / "checkpoint-4")
    assert list(plain) == list(ours)
    return list(ours), [name for name in ours if ours[name] != plain[name]]


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"stage": 2, "lazyckpt": False}, {"stage": 3}, {"stage": 3, "zero": GATHERED}])
def test_the_folder_is_the_trainers_and_resumes_bit_for_bit(
    deepspeed_ranks: Ranks, tmp_path: Path, settings: dict[str, Any]
) -> None:
    assert deepspeed_ranks.run(2, both, tmp_path, settings, timeout_s=240) == [["checkpoint-4", "checkpoint-6"]] * 2
    ((names, different),) = deepspeed_ranks.run(1, compared, tmp_path)
    assert different == []
    assert {"latest", "zero_to_fp32.py", "trainer_state.json", "rng_state_1.pth"} <= set(names)
    assert ("model.safetensors" in names) == (settings != {"stage": 3})
    assert "global_step4/zero_pp_rank_1_mp_rank_00_optim_states.pt" in names


def wide(*, tied: bool = False, shard: str = "1GB") -> Any:
    """A model whose small tensors are a small part. ``shard``: the most that a file of its weights may hold."""
    import transformers

    transformers.set_seed(1)
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 512}
    config = transformers.BertConfig(vocab_size=512, max_position_embeddings=64, tie_word_embeddings=tied, **sizes)
    model = transformers.BertForMaskedLM(config)
    model.save_pretrained = functools.partial(model.save_pretrained, max_shard_size=shard)
    return model


def in_shards() -> Any:
    return wide(tied=True, shard="1MB")


def numbers_of_saves(folder: Path, settings: dict[str, Any], options: dict[str, Any]) -> list[tuple[int, int]]:
    """Bytes that the saves of a run have copied before they returned, and all."""
    import deepspeed_training  # noqa: F401  # first: transformers looks for DeepSpeed
    import transformers.training_args

    callback, handles = lazy(), []
    save = lazyckpt.StagedFolder.save

    def noted(self: Any, **knobs: Any) -> Any:
        handles.append(save(self, **knobs))
        return handles[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.training_args, "is_torch_bf16_gpu_available", lambda: True)
        patch.setattr(lazyckpt.StagedFolder, "save", noted)
        trainer_on_cpu(folder / "ours", settings, callback, bf16=settings["dtype"] == "bf16", **options).train()
        trainer_on_cpu(folder / "plain", settings, bf16=settings["dtype"] == "bf16", **options).train()
    dist.barrier()
    return [(handle.metrics.eager_bytes, handle.metrics.copied_bytes) for handle in handles]


@pytest.mark.long(first=2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2])
def test_weights_in_a_flat_buffer_are_lazy_in_both_files(
    deepspeed_ranks: Ranks, tmp_path: Path, stage: int, dtype: str
) -> None:
    """Regression: accelerate, transformers and lazyckpt each cloned them inside the save."""
    settings = {"stage": stage, "dtype": dtype}
    numbers = deepspeed_ranks.run(2, numbers_of_saves, tmp_path, settings, {"model": wide}, timeout_s=240)
    assert all(eager < 64 << 10 and copied > 4 << 20 for eager, copied in numbers[0]), numbers[0]
    ((names, different),) = deepspeed_ranks.run(1, compared, tmp_path)
    assert different == [] and "model.safetensors" in names


def test_tied_weights_and_shards_are_those_of_clones(deepspeed_ranks: Ranks, tmp_path: Path) -> None:
    """Files are cut by the sizes of storages, and weights of one storage stay together."""
    settings = {"stage": 2, "dtype": "fp32"}
    numbers = deepspeed_ranks.run(2, numbers_of_saves, tmp_path, settings, {"model": in_shards}, timeout_s=240)
    tied = 512 * 256 * 4
    assert all(eager < tied + (64 << 10) for eager, _ in numbers[0]), numbers[0]
    ((names, different),) = deepspeed_ranks.run(1, compared, tmp_path)
    assert different == [] and "model.safetensors.index.json" in names
    assert sum(name.endswith(".safetensors") for name in names) > 2, names


def with_a_save_of_its_own(folder: Path) -> Any:
    """It writes to what it is given."""
    import deepspeed_training  # noqa: F401  # first: transformers looks for DeepSpeed
    from transformers import Trainer

    class Zeroing(Trainer):  # type: ignore[misc]
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            for tensor in state_dict.values():
                tensor.zero_()
            super()._save(output_dir, state_dict)

    plain, ours = (run(folder / name, {"stage": 2}, name == "ours", cls=Zeroing) for name in ("plain", "ours"))
    return plain == ours


def test_a_trainer_that_writes_to_its_state_dict_trains_on(deepspeed_ranks: Ranks, tmp_path: Path) -> None:
    """DeepSpeed gives it clones."""
    assert deepspeed_ranks.run(2, with_a_save_of_its_own, tmp_path, timeout_s=240) == [True] * 2


def held(folder: Path) -> Any:
    """Looks at the folder while the disk holds the first save back, and after it."""
    import deepspeed_training  # noqa: F401  # first: transformers looks for DeepSpeed
    from small_trainers import At
    from transformers.trainer_utils import get_last_checkpoint

    free, real, seen = threading.Event(), background.Background._persist, []

    def late(self: Any, flight: Any) -> None:
        assert free.wait(60)
        real(self, flight)

    def look() -> None:
        seen.append((sorted(os.listdir(folder)), get_last_checkpoint(str(folder))))
        dist.barrier()
        free.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background.Background, "_persist", late)
        settings = {"stage": 2}
        trainer_on_cpu(folder, settings, lazy(), At("on_step_end", 3, look), max_steps=3).train()
    dist.barrier()
    return seen, sorted(os.listdir(folder)), get_last_checkpoint(str(folder))


def test_nothing_has_the_name_before_it_is_durable(deepspeed_ranks: Ranks, tmp_path: Path) -> None:
    end = ["checkpoint-2", "checkpoint-3"], str(tmp_path / "checkpoint-3")
    assert deepspeed_ranks.run(2, held, tmp_path, timeout_s=240) == [([(["_lazyckpt"], None)], *end)] * 2


def failing(folder: Path) -> Any:
    """The save of step 4 fails on rank 1, in the background."""
    real = persist.prepare

    def prepare(flight: Any, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1 and flight.handle.path.name == "checkpoint-4":
            raise OSError(28, "No space left on device")
        return real(flight, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(lazyckpt.SaveError) as caught:
        patch.setattr(persist, "prepare", prepare)
        trainer_on_cpu(folder, {"stage": 3}, lazy(), save_total_limit=1).train()
    dist.barrier()
    return type(caught.value).__name__, sorted(os.listdir(folder))


def test_a_failed_save_raises_on_every_rank_and_keeps_the_older_checkpoint(
    deepspeed_ranks: Ranks, tmp_path: Path
) -> None:
    told = deepspeed_ranks.run(2, failing, tmp_path, timeout_s=240)
    assert told == [("RankError", ["checkpoint-2"]), ("NoSpaceError", ["checkpoint-2"])]


def with_best(folder: Path) -> Any:
    """The best model is that of step 2."""
    import deepspeed_training  # noqa: F401  # first: transformers looks for DeepSpeed
    from transformers import Trainer

    class Worsening(Trainer):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, eval_dataset=kwargs["train_dataset"], **kwargs)

        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            return {"eval_score": -self.state.global_step}

    best = {"load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True}
    options = {"cls": Worsening, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1}
    trainer = trainer_on_cpu(folder, {"stage": 2}, lazy(), **best, **options)
    trainer.train()
    dist.barrier()
    return sorted(os.listdir(folder)), trainer.state.best_model_checkpoint, trainer.deepspeed.global_steps


def test_the_best_model_is_kept_and_loaded(deepspeed_ranks: Ranks, tmp_path: Path) -> None:
    best = str(tmp_path / "checkpoint-2")
    assert deepspeed_ranks.run(2, with_best, tmp_path, timeout_s=240) == [(["checkpoint-2"], best, 2)] * 2


def killed(folder: Path, victim: int) -> None:
    """A rank is killed when its files of checkpoint-4 are on the disk, but not yet those of all ranks. The other one
    ends, too: ZeRO-3 compares numbers that a new rank would not have."""
    real = request.SharedRequest.agree

    def agree(self: request.SharedRequest, files: Any) -> None:
        if dist.get_rank() == victim and self.path.name == "checkpoint-4":
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, files)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(request.SharedRequest, "agree", agree)
        with pytest.raises((RuntimeError, lazyckpt.SaveError)):  # gloo's, or ours
            trainer_on_cpu(folder, {"stage": 3}, lazy(rank_timeout_s=4), save_total_limit=1).train()
    die()


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_leaves_the_older_checkpoint(deepspeed_ranks: Ranks, tmp_path: Path, victim: int) -> None:
    ended = deepspeed_ranks.run(2, killed, tmp_path, victim, timeout_s=240)
    assert (ended[victim], ended[1 - victim]) == (Died(-signal.SIGKILL), Died(9))
    from transformers.trainer_utils import get_last_checkpoint

    last = get_last_checkpoint(str(tmp_path))
    assert last == str(tmp_path / "checkpoint-2") and lazyckpt.verify(last).ok
    assert Path(last, "latest").read_text() == "global_step2"
    assert len(list(Path(last, "global_step2").iterdir())) == 4
