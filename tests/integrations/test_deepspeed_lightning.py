"""LazyDeepSpeedStrategy on two gloo ranks. Lightning runs DeepSpeed on CUDA only; ``on_cpu`` leaves that check out.

The cases import DeepSpeed, and this module does not: lightning would find it in this process, too.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Ranks

import lazyckpt
from lazyckpt.pipeline import background, persist


def on_cpu(stage: int, *, lazily: bool = True) -> Any:
    import deepspeed_training

    deepspeed_training.forget()
    from lightning.pytorch.strategies import DeepSpeedStrategy

    from lazyckpt.integrations.lightning_deepspeed import LazyDeepSpeedStrategy

    base = LazyDeepSpeedStrategy if lazily else DeepSpeedStrategy

    class OnCPU(base):  # type: ignore[misc,valid-type]
        def setup_environment(self) -> None:
            self.set_world_ranks()
            self.accelerator.setup_device(self.root_device)

        @property
        def root_device(self) -> torch.device:
            return torch.device("cpu", 0)

    return OnCPU(stage=stage, zero_allow_untested_optimizer=True, logging_batch_size_per_gpu=2)


def fit(folder: Path, strategy: Any, *plugins: Any, resume: Any = None, **options: Any) -> list[float]:
    """Trains 6 steps, or the rest of them, and saves every second one. Returns the losses."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from trainers import lightning_trainer

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
            self.losses: list[float] = []

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            torch.manual_seed(100 * dist.get_rank() + self.trainer.global_step)
            loss = self.layers(torch.randn(2, 32)).square().sum()
            self.losses.append(loss.item())
            return loss

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(range(12))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    settings = {"save_top_k": -1, "filename": "{step}", "every_n_train_steps": 2, **options}
    newest = ModelCheckpoint(folder, auto_insert_metric_name=False, **settings)
    more = {"devices": 2, "use_distributed_sampler": False, "max_steps": 6, "plugins": list(plugins)}
    model = Net()
    lightning_trainer(folder, None, newest, strategy=strategy, **more).fit(model, ckpt_path=resume)
    dist.barrier()
    return model.losses


def resumed(folder: Path, stage: int) -> Any:
    """Saves with and without lazyckpt, and goes on from either, with and without it."""
    plain = fit(folder / "plain", on_cpu(stage, lazily=False))
    from lazyckpt.integrations.lightning import LazyCheckpointIO

    assert fit(folder / "ours", on_cpu(stage), LazyCheckpointIO(max_in_flight=2), save_last=True) == plain
    for source, lazily in (("ours/4.ckpt", False), ("ours/4.ckpt", True), ("plain/4.ckpt", True)):
        strategy = on_cpu(stage, lazily=lazily)
        assert fit(folder / "again", strategy, resume=folder / source, save_top_k=0) == plain[4:]
    return sorted(os.listdir(folder / "ours"))


def compared(folder: Path) -> Any:
    import deepspeed_training  # noqa: F401  # the classes in the files
    from deepspeed_files import described

    from trainers import contents

    def graph(obj: Any) -> Any:  # a ModelCheckpoint saves its folder
        return described({key: value for key, value in obj.items() if key != "callbacks"})

    plain, ours = (contents(folder / name / "4.ckpt", graph) for name in ("plain", "ours"))
    ours.pop(".lazyckpt-lock")
    assert list(plain) == list(ours)
    return list(ours), [name for name in ours if ours[name] != plain[name]]


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_the_folder_is_lightnings_and_resumes_bit_for_bit(deepspeed_ranks: Ranks, tmp_path: Path, stage: int) -> None:
    saved = ["2.ckpt", "4.ckpt", "6.ckpt", "last.ckpt"]
    assert deepspeed_ranks.run(2, resumed, tmp_path, stage, timeout_s=240) == [saved] * 2
    ((names, different),) = deepspeed_ranks.run(1, compared, tmp_path)
    assert different == []
    assert {"latest", "checkpoint/zero_pp_rank_1_mp_rank_00_optim_states.pt"} <= set(names)


def held(folder: Path) -> Any:
    """Looks at the folder when the first checkpoint is replaced, but the second one not yet durable."""
    free, first, real = threading.Event(), threading.Event(), background.Background._persist
    seen: list[Any] = []

    def late(self: Any, flight: Any) -> None:
        assert flight.handle.path.name != "4.ckpt" or free.wait(60)
        real(self, flight)
        if flight.handle.path.name == "2.ckpt":
            first.set()

    strategy = on_cpu(2)
    save = strategy.save_checkpoint

    def look(checkpoint: Any, path: Any, **options: Any) -> None:
        if os.path.basename(path) == "6.ckpt":
            assert first.wait(60)
            seen.append(sorted(name for name in os.listdir(folder) if name.endswith(".ckpt")))
            dist.barrier()
            free.set()
        save(checkpoint, path, **options)

    strategy.save_checkpoint = look
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background.Background, "_persist", late)
        fit(folder, strategy, save_top_k=1)
    return seen, os.listdir(folder)


def test_the_last_durable_checkpoint_stays_until_the_next_one_is(deepspeed_ranks: Ranks, tmp_path: Path) -> None:
    assert deepspeed_ranks.run(2, held, tmp_path, timeout_s=240) == [([["2.ckpt"]], ["6.ckpt"])] * 2


def failing(folder: Path) -> Any:
    """The save of step 4 fails on rank 1, in the background."""
    real = persist.prepare

    def prepare(flight: Any, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1 and flight.handle.path.name == "4.ckpt":
            raise OSError(28, "No space left on device")
        return real(flight, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(lazyckpt.SaveError) as caught:
        patch.setattr(persist, "prepare", prepare)
        fit(folder, on_cpu(3), save_top_k=1)
    dist.barrier()
    return type(caught.value).__name__, os.listdir(folder)


def test_a_failed_save_raises_on_every_rank_and_keeps_the_older_checkpoint(
    deepspeed_ranks: Ranks, tmp_path: Path
) -> None:
    told = deepspeed_ranks.run(2, failing, tmp_path, timeout_s=240)
    assert told == [("RankError", ["2.ckpt"]), ("NoSpaceError", ["2.ckpt"])]
