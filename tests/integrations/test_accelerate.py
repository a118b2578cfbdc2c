"""save_state and load_state under lazyckpt: what accelerate would have written, later, whole, or not at all."""

from __future__ import annotations

import copy
import gc
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

accelerate = pytest.importorskip("accelerate", "1.0")

from accelerate import checkpointing  # noqa: E402
from accelerate.utils import ProjectConfiguration  # noqa: E402

import lazyckpt  # noqa: E402
from accelerate_training import TINY_RING, Run, automatic, names  # noqa: E402
from lazyckpt.integrations.accelerate import enable  # noqa: E402
from trainers import contents  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


SLOW = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no compiler"),
]


@pytest.mark.parametrize(
    ("kind", "safe_serialization"),
    [
        ("", True),
        ("", False),
        ("frozen", True),
        ("gradient checkpointing", True),
        ("compiled step", True),
        ("aot_eager", True),
        pytest.param("inductor", True, marks=SLOW),
    ],
)
def test_saved_is_what_accelerate_saves_at_that_step_bit_for_bit(
    tmp_path: Path, graph: Any, safe_serialization: bool, kind: str
) -> None:
    """Training goes on at once, through a ring that holds a twentieth of the state: lazy is what follows."""
    # The scaler puts a method of its own in the place of the step.
    run = Run(kind, scaler=torch.amp.GradScaler("cpu", enabled=kind != "compiled step"))
    enable(run.accelerator, **TINY_RING)
    # The second save uses what the first has cached; in the third, frozen parameters are lazy.
    saves = range(3 if kind == "frozen" else 2)
    for at in saves:
        run.step(3)
        run.plain_save_state(tmp_path / f"plain-{at}", safe_serialization=safe_serialization)
        path = run.accelerator.save_state(tmp_path / f"lazy-{at}", safe_serialization=safe_serialization)
        assert path == tmp_path / f"lazy-{at}"
        run.step(3)
    run.accelerator.end_training()
    for at in saves:
        plain, lazy = contents(tmp_path / f"plain-{at}", graph), contents(tmp_path / f"lazy-{at}", graph)
        model = "model.safetensors" if safe_serialization else "pytorch_model.bin"
        assert {model, "optimizer.bin", "scheduler.bin", "scaler.pt", "custom_checkpoint_0.pkl"} <= set(plain)
        assert lazy.keys() == plain.keys()
        for name in plain:
            assert lazy[name] == plain[name], name


@pytest.mark.usefixtures("slow_folders")
def test_a_state_that_is_not_being_trained_is_there_when_save_state_returns(tmp_path: Path) -> None:
    """There is nothing to overlap with, so a script that saves before training, or after it, may look at once."""
    another = Run()
    enable(another.accelerator)
    another.step()  # other optimizers of the process do not count
    run = Run(**automatic(tmp_path, total_limit=1))
    enable(run.accelerator)
    for at in range(3):
        run.accelerator.save_state()
        assert names(tmp_path) == ["checkpoints"] and names(tmp_path / "checkpoints") == [f"checkpoint_{at}"]
    run.step()
    run.accelerator.save_state()
    assert names(tmp_path) != ["checkpoints"]  # lazily
    run.accelerator.end_training()


@pytest.mark.usefixtures("slow_folders")
def test_another_accelerator_of_the_process_waits_for_what_it_loads(tmp_path: Path) -> None:
    run = Run()
    enable(run.accelerator)
    run.step()
    saved = run.model.layers[0].weight.detach().clone()
    run.accelerator.save_state(tmp_path / "state")
    other = Run()
    enable(other.accelerator)
    other.accelerator.load_state(tmp_path / "state")
    assert torch.equal(other.model.layers[0].weight, saved)


def test_a_hook_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    run = Run(**automatic(tmp_path))
    enable(run.accelerator)
    accelerates_own = checkpointing.save

    def fail(models: list[Any], weights: list[Any], output_dir: str) -> None:
        raise RuntimeError("no")

    hook = run.accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        run.accelerator.save_state()
    assert checkpointing.save is accelerates_own
    assert names(tmp_path) == ["checkpoints"] and names(tmp_path / "checkpoints") == []
    hook.remove()
    run.accelerator.save_state()
    run.accelerator.end_training()
    assert names(tmp_path / "checkpoints") == ["checkpoint_0"]


class Unet(nn.Module):
    """With a ``save_pretrained`` as in diffusers: the library's ``save_file`` by its module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x).square().mean()
        return out

    def save_pretrained(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        Path(folder, "config.json").write_text("{}")
        safetensors.torch.save_file(self.state_dict(), os.path.join(folder, "unet.safetensors"), {"format": "pt"})


class WithHooks:
    """A training whose hooks save what they like, as in the scripts of diffusers."""

    def __init__(self, seed: int = 0, **project: Any) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True, project_config=ProjectConfiguration(**project))
        torch.manual_seed(seed)
        model = Unet()
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        self.accelerator.register_save_state_pre_hook(self.save)
        self.accelerator.register_load_state_pre_hook(self.load)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.accelerator.backward(self.model(torch.rand(8, 256)))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.average.update_parameters(self.model)

    def save(self, models: list[Any], weights: list[Any], output_dir: str) -> None:
        weights.clear()
        self.model.save_pretrained(os.path.join(output_dir, "unet"))
        path = os.path.join(output_dir, "average.safetensors")
        save_file(self.average.state_dict(), path)  # imported into this module

    def load(self, models: list[Any], input_dir: str) -> None:
        models.pop().load_state_dict(safetensors.torch.load_file(os.path.join(input_dir, "unet", "unet.safetensors")))
        self.average.load_state_dict(safetensors.torch.load_file(os.path.join(input_dir, "average.safetensors")))

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "average": self.average, "optimizer": self.optimizer}
        return {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}


def test_what_hooks_write_with_safetensors_is_lazy_and_in_the_metrics(tmp_path: Path, graph: Any) -> None:
    """Regression: it was written inside save_state, and no metric told of it."""
    run = WithHooks(**automatic(tmp_path / "lazy"))
    saver = enable(run.accelerator)
    assert saver is not None
    original = safetensors.torch.save_file
    for _ in range(3):
        run.step()
        run.accelerator.save_state()
    run.step(2)
    metrics = saver.last_save.metrics  # type: ignore[union-attr]
    assert metrics.bytes > 4 * 4 * 256 * 256 * 4, "the model, its average and the optimizer's two"
    assert metrics.eager_bytes < metrics.bytes / 20
    assert safetensors.torch.save_file is original and globals()["save_file"] is original
    random = torch.get_rng_state()
    run.step(2)
    expected = run.state()
    other = WithHooks(seed=1, **automatic(tmp_path / "lazy", iteration=3))
    enable(other.accelerator)
    other.accelerator.load_state(str(tmp_path / "lazy" / "checkpoints" / "checkpoint_2"))
    other.step(2)
    torch.set_rng_state(random)
    other.step(2)
    assert graph(other.state()) == graph(expected)


# failures, and the end


def test_a_failure_in_the_background_is_raised_by_the_next_save_state(tmp_path: Path, full_disk: list[bool]) -> None:
    run = Run(**automatic(tmp_path))
    saver = enable(run.accelerator)
    full_disk.append(True)
    run.step()
    run.accelerator.save_state()
    while saver.pending():
        run.step()
    full_disk.clear()
    with pytest.raises(lazyckpt.NoSpaceError, match="checkpoint_0"):
        run.accelerator.save_state()
    run.accelerator.save_state()
    run.accelerator.end_training()
    assert names(tmp_path) == ["checkpoints"]
    assert names(tmp_path / "checkpoints") == ["checkpoint_1"]  # the call that raised took no number


def test_a_failure_in_the_background_is_raised_by_end_training(tmp_path: Path, full_disk: list[bool]) -> None:
    run = Run()
    enable(run.accelerator)
    full_disk.append(True)
    run.step()
    run.accelerator.save_state(tmp_path / "a")
    with pytest.raises(lazyckpt.NoSpaceError):
        run.accelerator.end_training()


def test_on_error_warn_lets_training_go_on(tmp_path: Path, full_disk: list[bool]) -> None:
    run = Run()
    saver = enable(run.accelerator, on_error="warn")
    full_disk.append(True)
    with pytest.warns(UserWarning, match="No space left"):
        run.accelerator.save_state(tmp_path / "a")
        run.accelerator.end_training()
    assert saver.last_save.exception() is not None and names(tmp_path) == []


def test_free_memory_lets_go_of_the_model_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    run = Run()
    enable(run.accelerator)
    run.step()
    run.accelerator.save_state(tmp_path / "state")
    gone = weakref.ref(run.accelerator.unwrap_model(run.model))
    run.model, run.optimizer, run.scheduler = run.accelerator.free_memory(run.model, run.optimizer, run.scheduler)
    run.average = None
    gc.collect()
    assert gone() is None
    assert "model.safetensors" in names(tmp_path / "state")
    run.accelerator.save_state(tmp_path / "next")  # saves the remaining state
    run.accelerator.end_training()
    assert "random_states_0.pkl" in names(tmp_path / "next")


def test_an_accelerator_that_is_let_go_is_not_kept(tmp_path: Path) -> None:
    """The Accelerator and its StateSaver refer to each other, and the end of the program waits for pending saves."""
    run = Run()
    enable(run.accelerator)
    run.accelerator.save_state(tmp_path / "state")
    gone = weakref.ref(run.accelerator)
    del run
    gc.collect()
    assert gone() is None
    assert "model.safetensors" in names(tmp_path / "state")
