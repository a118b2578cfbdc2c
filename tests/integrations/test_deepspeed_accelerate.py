"""``enable(accelerator)`` with DeepSpeed on two gloo ranks: accelerate's folder and DeepSpeed's files are one snapshot.

The cases import DeepSpeed, and this module does not: accelerate would find it in this process, too.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Died, Ranks, die

import lazyckpt
from lazyckpt.pipeline import background, persist
from lazyckpt.pipeline.sharded import request

FILES = {
    2: ["mp_rank_00_model_states.pt"],
    3: [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (0, 1)],
}


class Run:
    """A training under accelerate; with ``folder``, checkpoints get automatic names there."""

    def __init__(self, stage: int, lazily: bool = True, folder: Path | None = None, **json: Any) -> None:
        import deepspeed_training
        from accelerate import Accelerator, DeepSpeedPlugin
        from accelerate.utils import ProjectConfiguration

        from lazyckpt.integrations.accelerate import enable

        deepspeed_training.as_accelerator()
        settings = deepspeed_training.config(stage, **json)
        del settings["optimizer"]
        project = folder and ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=1)
        plugin = DeepSpeedPlugin(hf_ds_config=settings)
        self.accelerator = Accelerator(deepspeed_plugin=plugin, project_config=project)
        self.saver = enable(self.accelerator) if lazily else None
        torch.manual_seed(7)
        model = deepspeed_training.Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        engine = type(self.model.checkpoint_engine).__name__
        assert engine == ("LazyCheckpointEngine" if lazily else "TorchCheckpointEngine")
        torch.manual_seed(dist.get_rank())

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            x = torch.randn(8, 48)  # random states are a part of the checkpoint
            loss = (self.model(x) - x).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def end(self) -> None:
        self.accelerator.free_memory()  # end_training() would end the group, too


def both(folder: Path, stage: int) -> Any:
    """Saves with and without lazyckpt, and goes on from either, with and without it."""
    told = []
    for name in ("plain", "ours"):
        run = Run(stage, name == "ours")
        run.train(2)
        run.accelerator.save_state(str(folder / name))
        told.append(run.train(2))
        eager = run.saver and run.saver.last_save.metrics.eager_bytes
        run.end()
    for name, lazily in (("ours", False), ("ours", True), ("plain", True)):
        run = Run(stage, lazily)
        run.accelerator.load_state(str(folder / name))
        told.append(run.train(2))
        run.end()
    assert told == [told[0]] * 5
    return eager


def compared(folder: Path) -> Any:
    import deepspeed_training  # noqa: F401  # the classes in the files
    from deepspeed_files import described

    from trainers import contents

    plain, ours = (contents(folder / name, described) for name in ("plain", "ours"))
    ours.pop(".lazyckpt-lock")
    assert list(plain) == list(ours)
    return list(ours), [name for name in ours if ours[name] != plain[name]]


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_the_folder_is_accelerates_and_resumes_bit_for_bit(deepspeed_ranks: Ranks, tmp_path: Path, stage: int) -> None:
    assert (
        max(deepspeed_ranks.run(2, both, tmp_path, stage, timeout_s=240)) < 64 << 10
    )  # copied before save_state returned
    ((names, different),) = deepspeed_ranks.run(1, compared, tmp_path)
    assert different == []
    optimizers = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
    assert [name for name in names if name.startswith("pytorch_model/")] == [
        f"pytorch_model/{name}" for name in sorted(FILES[stage] + optimizers)
    ]
    assert {"latest", "scheduler.bin", "random_states_1.pkl", "zero_to_fp32.py"} <= set(names)


def held(folder: Path) -> Any:
    """Looks at the folder while the disk holds the save back."""
    free, real = threading.Event(), background.Background._persist

    def late(self: Any, flight: Any) -> None:
        assert free.wait(60)
        real(self, flight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background.Background, "_persist", late)
        run = Run(2)
        run.train(2)
        run.accelerator.save_state(str(folder / "state"))
        run.train(2)
        dist.barrier()
        seen = os.listdir(folder)
        dist.barrier()
        free.set()
        run.end()
    dist.barrier()
    return [name for name in seen if not name.startswith(".")], os.listdir(folder)


def test_nothing_has_the_name_before_it_is_durable(deepspeed_ranks: Ranks, tmp_path: Path) -> None:
    assert deepspeed_ranks.run(2, held, tmp_path, timeout_s=240) == [([], ["state"])] * 2


def failing(folder: Path) -> Any:
    """The second save fails on rank 1, in the background."""
    real = persist.prepare

    def prepare(flight: Any, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1 and flight.handle.path.name == "checkpoint_1":
            raise OSError(28, "No space left on device")
        return real(flight, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(persist, "prepare", prepare)
        run = Run(3, folder=folder)
        for _ in range(2):
            run.train(1)
            run.accelerator.save_state()
        run.train(1)
        with pytest.raises(lazyckpt.SaveError) as caught:
            run.accelerator.save_state()
        run.end()
    dist.barrier()
    return type(caught.value).__name__, os.listdir(folder / "checkpoints")


def test_a_failed_save_raises_on_every_rank_and_keeps_the_older_one(deepspeed_ranks: Ranks, tmp_path: Path) -> None:
    told = deepspeed_ranks.run(2, failing, tmp_path, timeout_s=240)
    assert told == [("RankError", ["checkpoint_0"]), ("NoSpaceError", ["checkpoint_0"])]


def killed(folder: Path) -> None:
    """Rank 1 is killed when its files of the second save are on the disk, but not yet those of all ranks. Rank 0 ends,
    too: ZeRO-3 compares numbers that a new rank 1 would not have."""
    real = request.SharedRequest.agree

    def agree(self: request.SharedRequest, files: Any) -> None:
        if dist.get_rank() == 1 and self.path.name == "checkpoint_1":
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, files)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(request.SharedRequest, "agree", agree)
        with pytest.raises((RuntimeError, lazyckpt.SaveError)):  # gloo's, or ours
            run = Run(2, folder=folder)
            for _ in range(10):
                run.train(1)
                run.accelerator.save_state()
    die()


def test_a_killed_rank_leaves_the_older_folder(deepspeed_ranks: Ranks, tmp_path: Path) -> None:
    assert deepspeed_ranks.run(2, killed, tmp_path, timeout_s=240) == [Died(9), Died(-signal.SIGKILL)]
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_0"]
    assert (tmp_path / "checkpoints" / "checkpoint_0" / "latest").read_text() == "pytorch_model"
