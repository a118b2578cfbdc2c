"""save_state and load_state under lazyckpt: what accelerate would have written, later, whole, or not at all."""

from __future__ import annotations

import copy
import gc
import importlib
import json
import os
import pickle
import runpy
import shutil
import signal
import subprocess
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

accelerate = pytest.importorskip("accelerate", "1.0")

from accelerate import checkpointing  # noqa: E402
from accelerate.commands.config import config_args  # noqa: E402
from accelerate.state import DistributedType  # noqa: E402
from accelerate.utils import ProjectConfiguration  # noqa: E402
from duplicates import DUPLICATES  # noqa: E402

import lazyckpt  # noqa: E402
import lazyckpt.run  # noqa: E402
from lazyckpt.integrations.accelerate import StateSaver, enable  # noqa: E402
from lazyckpt.storage import commit, folders, hidden, in_place, removal  # noqa: E402
from trainers import Forked, contents, forget_accelerators, ranks  # noqa: E402

SCRIPT = Path(__file__).with_name("plain_accelerate.py")
TINY_RING = {"chunk_bytes": 64 << 10, "host_buffer_bytes": 128 << 10}


class Net(nn.Module):
    """Tied weights, buffers that change in forward, dropout; 2.6 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 256)
        self.norm = nn.BatchNorm1d(256)
        self.layers = nn.Sequential(nn.Linear(256, 1024), nn.Dropout(0.1), nn.Linear(1024, 256))
        self.head = nn.Linear(256, 300, bias=False)
        self.head.weight = self.embed.weight
        self.recomputes = False  # gradient checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens))
        hidden = checkpoint(self.layers, hidden, use_reentrant=False) if self.recomputes else self.layers(hidden)
        return nn.functional.cross_entropy(self.head(hidden), tokens)


class Average:
    """An exponential moving average, updated behind every optimizer's back."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.shadow

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.shadow = state


class Run:
    """A training run under accelerate, with everything that save_state saves."""

    def __init__(self, kind: str = "", scaler: Any = None, fused: bool = True, **project: Any) -> None:
        options = {"dynamo_backend": kind} if kind in ("aot_eager", "inductor") else {}
        self.accelerator = accelerate.Accelerator(cpu=True, project_config=ProjectConfiguration(**project), **options)
        self.accelerator.scaler = scaler
        torch.manual_seed(3)
        model = Net()
        model.layers[0].requires_grad_(kind != "frozen")
        model.recomputes = kind == "gradient checkpointing"
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=0.01, fused=fused)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        if kind == "compiled step":
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        self.average = Average(self.model)
        self.accelerator.register_for_checkpointing(self.average)

    def step(self, times: int = 1, factor: float = 1.0) -> None:
        for _ in range(times):
            loss = self.model(torch.randint(300, (8,))) * factor
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.average.update(self.model)

    def plain_save_state(self, path: Path, **kwargs: Any) -> None:
        """What accelerate does, blocking."""
        accelerate.Accelerator.save_state(self.accelerator, str(path), **kwargs)


def automatic(folder: Path, **more: Any) -> dict[str, Any]:
    return {"project_dir": str(folder), "automatic_checkpoint_naming": True, **more}


@pytest.fixture(autouse=True)
def fresh_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate keeps its state for the whole process; and this machine's settings are no part of a test."""
    monkeypatch.setattr(config_args, "cache_dir", str(tmp_path / "no settings here"))
    for name in list(os.environ):
        if name.startswith("LAZYCKPT_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    yield
    forget_accelerators()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Appending to it fills the disk for saves that are published later."""
    full: list[bool] = []
    publish = commit.Staging.publish

    def fail(self: commit.Staging) -> Path | None:
        if full:
            raise OSError(28, "No space left on device")
        return publish(self)

    monkeypatch.setattr(commit.Staging, "publish", fail)
    return full


def number(checkpoint: Path) -> int:
    return int(checkpoint.name.split("_")[1])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


# contents of a save


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


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder gets its name a while after its bytes are there."""
    publish = commit.Staging.publish

    def late(self: commit.Staging) -> Path | None:
        time.sleep(0.1)
        return publish(self)

    monkeypatch.setattr(commit.Staging, "publish", late)


@pytest.mark.usefixtures("slow_disk")
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


@pytest.mark.usefixtures("slow_disk")
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


# names and limits


def test_only_whole_checkpoints_are_ever_seen_among_the_checkpoints(tmp_path: Path) -> None:
    """load_state takes the highest number, whole or not, and fails on a name without one."""
    run = Run(**automatic(tmp_path))
    enable(run.accelerator)
    staged_in: list[Path] = []
    run.accelerator.register_save_state_pre_hook(
        lambda models, weights, output_dir: staged_in.append(Path(output_dir).parent)
    )
    weights = []
    for at in range(3):
        run.step()
        weights.append(run.model.layers[0].weight.detach().clone())
        run.accelerator.save_state()
        assert set(names(tmp_path / "checkpoints")) <= {f"checkpoint_{n}" for n in range(at + 1)}
    run.step()
    run.accelerator.load_state()  # waits until the newest is there
    assert torch.equal(run.model.layers[0].weight, weights[-1])
    assert staged_in == [hidden.place(tmp_path)] * 3
    assert names(tmp_path) == ["checkpoints"]


def test_total_limit_keeps_the_newest(tmp_path: Path) -> None:
    run = Run(**automatic(tmp_path, total_limit=2, iteration=8))
    enable(run.accelerator)
    for _ in range(4):
        run.step()
        run.accelerator.save_state()
    run.accelerator.end_training()
    assert names(tmp_path / "checkpoints") == ["checkpoint_10", "checkpoint_11"]


def test_total_limit_removes_the_old_one_only_when_the_new_one_is_durable(
    tmp_path: Path, full_disk: list[bool]
) -> None:
    """Accelerate removes first: with a limit of one, a failed save would leave nothing at all."""
    run = Run(**automatic(tmp_path, total_limit=1))
    saver = enable(run.accelerator)
    run.step()
    run.accelerator.save_state()
    saver.wait()
    kept = run.model.layers[0].weight.detach().clone()
    full_disk.append(True)
    run.step()
    with pytest.warns(UserWarning, match="checkpoint_0 is kept"):
        run.accelerator.save_state()
        with pytest.raises(lazyckpt.NoSpaceError):
            saver.wait()
    assert names(tmp_path / "checkpoints") == ["checkpoint_0"]
    run.accelerator.load_state()
    assert torch.equal(run.model.layers[0].weight, kept)
    full_disk.clear()
    run.accelerator.save_state()
    run.accelerator.end_training()
    assert names(tmp_path / "checkpoints") == ["checkpoint_2"]


def test_the_folder_of_the_checkpoints_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = ProjectConfiguration(str(tmp_path / "project"), automatic_checkpoint_naming=True)
    synced: list[str] = []
    sync_path = folders.sync_path
    monkeypatch.setattr(folders, "sync_path", lambda path: (synced.append(str(path)), sync_path(path)))
    with closing(enable(accelerate.Accelerator(cpu=True, project_config=project))) as saver:
        saver._stage(tmp_path / "project" / "some" / "checkpoints" / "checkpoint_0", saver._saver).discard()
    assert {str(tmp_path), str(tmp_path / "project"), str(tmp_path / "project" / "some")} <= set(synced)


def test_what_another_node_wrote_is_synced_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main process syncs what its own node has cached."""
    (tmp_path / "sampler").mkdir()
    files = [tmp_path / "random_states_1.pkl", tmp_path / "sampler" / "x.bin"]
    for file in files:
        file.touch()
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    lazyckpt.integrations.accelerate._sync(tmp_path)
    assert sorted(synced) == sorted(map(str, [*files, tmp_path, tmp_path / "sampler"]))


def test_a_number_that_exists_is_refused_as_accelerate_does(tmp_path: Path) -> None:
    run = Run(**automatic(tmp_path))
    enable(run.accelerator)
    (tmp_path / "checkpoints" / "checkpoint_0").mkdir(parents=True)
    with pytest.raises(ValueError, match="exists already"):
        run.accelerator.save_state()


def test_an_existing_folder_is_replaced_whole_and_keeps_other_files(tmp_path: Path, graph: Any) -> None:
    """Accelerate writes into a folder that exists; scripts put their own files there, before and after."""
    run = Run()
    saver = enable(run.accelerator)
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "arguments.json").write_text("{}")
    for at in range(2):
        run.step()
        run.accelerator.save_state(folder)
        folder.mkdir(exist_ok=True)
        (folder / f"lora-{at}.json").write_text(str(at))
        saver.wait()
    run.plain_save_state(tmp_path / "plain")
    others = {"arguments.json": b"{}", "lora-0.json": b"0", "lora-1.json": b"1"}
    assert contents(folder, graph) == {**contents(tmp_path / "plain", graph), **others}


# folders that must stay where they are


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A mount point, as a container has."""
    if os.geteuid() != 0:
        pytest.skip("mounting takes root")
    folder = tmp_path / "volume"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "none", str(folder)], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_load_state_finishes_what_was_cut_off_in_a_volume(tmp_path: Path, volume: Path, graph: Any) -> None:
    """Without lazyckpt it is refused: no two checkpoints are mixed."""
    run = Run()
    enable(run.accelerator)
    run.accelerator.save_state(volume)
    run.step()
    run.plain_save_state(tmp_path / "plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_place, "_link", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        run.accelerator.save_state(volume)
        with pytest.raises(lazyckpt.SaveError, match="the next save into the folder finishes"):
            run.accelerator.end_training()
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin"):
        accelerate.Accelerator.load_state(run.accelerator, str(volume))
    enable(run.accelerator)
    run.accelerator.load_state(volume)
    assert contents(volume, graph) == contents(tmp_path / "plain", graph)
    assert not list(volume.glob(".*"))


def test_a_resumed_run_does_not_run_into_what_total_limit_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: "checkpoint_1 exists already", since accelerate counts from 0 again, and the removal is late."""
    run = Run(**automatic(tmp_path, total_limit=2))
    enable(run.accelerator)
    for _ in range(3):
        run.step()
        run.accelerator.save_state()
    run.accelerator.end_training()
    hide = removal.hide
    monkeypatch.setattr(removal, "hide", lambda path, **where: (time.sleep(0.3), hide(path, **where))[1])
    resumed = Run(**automatic(tmp_path, total_limit=2))
    enable(resumed.accelerator)
    resumed.accelerator.load_state()
    for _ in range(2):
        resumed.step()
        resumed.accelerator.save_state()
    resumed.accelerator.end_training()
    assert names(tmp_path / "checkpoints") == ["checkpoint_1", "checkpoint_2"]


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


# switching it on


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
    with pytest.raises(ImportError, match=r"^lazyckpt needs accelerate 1.9 or newer: pip install .*$"):
        importlib.import_module("lazyckpt.integrations.accelerate")


# whole runs, in processes of their own


@pytest.fixture
def run_main(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``python -m lazyckpt.run`` in this process."""

    def run_main(*arguments: object) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(accelerate.Accelerator, "__init__", accelerate.Accelerator.__init__)
            patch.setattr(sys, "argv", ["run.py", *map(str, arguments)])
            patch.setattr(sys, "path", [os.getcwd(), *sys.path])
            lazyckpt.run.main()

    return run_main


@pytest.fixture
def run_here(run_main: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[int, str]]:
    """Runs the script in this process: the loss by step."""

    def run_here(*arguments: object) -> dict[int, str]:
        run_main(SCRIPT, *arguments)
        return losses(capsys.readouterr().out)

    return run_here


def losses(printed: str) -> dict[int, str]:
    entries = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return {entry["step"]: entry["loss"] for entry in entries}


def launch(*arguments: object, folder: Path) -> list[tuple[int, dict[int, str], str]]:
    """Runs the script with lazyckpt on two ranks: the exit code, the loss by step and the output of each."""
    children = ranks(lambda: main(*arguments), folder)
    codes = [child.wait() for child in children]
    printed = [child.output.read_text() for child in children]
    return [(code, losses(text), text) for code, text in zip(codes, printed, strict=True)]


def main(*arguments: object) -> None:
    sys.argv = ["run.py", str(SCRIPT), *map(str, arguments)]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    lazyckpt.run.main()


def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, graph: Any, run_here: Any) -> None:
    """Dropout, shuffling, a scheduler and accumulation; killed while a folder has its temporary name."""
    whole = run_here(tmp_path / "whole", 14, 2)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "-m", "lazyckpt.run", str(SCRIPT)]
    done = subprocess.run(
        [*command, str(tmp_path / "killed"), "14", "2", "kill-at=5"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    killed = losses(done.stdout)
    assert done.returncode != 0 and "died with <Signals.SIGKILL" in done.stderr, done.stderr
    assert list((tmp_path / "killed" / ".lazyckpt" / "staged").glob(".tmp-*"))
    resumed = run_here(tmp_path / "killed", 14, 2)
    assert sorted(whole) == list(range(1, 15)) and 1 < min(resumed) <= max(killed) + 1 <= 14
    assert {**killed, **resumed} == whole == {**resumed, **killed}
    # Later checkpoints are the same, too; the numbers go on where the killed run stopped.
    newest = [sorted((tmp_path / run / "checkpoints").iterdir(), key=number)[-1] for run in ("whole", "killed")]
    assert contents(newest[0], graph) == contents(newest[1], graph)
    assert names(tmp_path / "killed") == ["checkpoints"] and len(names(newest[1].parent)) == 2


def save_until_killed(folder: Path) -> None:
    """Saves step_1, step_2, … into the working folder, and is killed before step_3 has its name."""
    os.chdir(folder)
    publish = commit.Staging.publish

    def deadly(self: commit.Staging) -> Any:
        if self.target.name == "step_3":
            os.kill(os.getpid(), signal.SIGKILL)
        return publish(self)

    commit.Staging.publish = deadly  # type: ignore[method-assign]
    run = Run()
    enable(run.accelerator)
    for step in (1, 2, 3, 4):
        run.step()
        run.accelerator.save_state(f"step_{step}")
    run.accelerator.end_training()


@pytest.mark.parametrize("time_of", [os.path.getctime, os.path.getmtime])
def test_the_idiom_of_accelerates_examples_resumes_after_a_kill(
    time_of: Callable[[str], float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the newest folder was .tmp-step_3-…, and stayed it at every start."""
    folder = tmp_path / "run"
    (folder / "step_0").mkdir(parents=True)  # of a run without lazyckpt
    died = Forked(lambda: save_until_killed(folder), tmp_path / "output")
    assert died.wait() == -signal.SIGKILL, died.output.read_text()
    monkeypatch.chdir(folder)
    dirs = [f.name for f in os.scandir(os.getcwd()) if f.is_dir()]
    dirs.sort(key=time_of)
    assert (dirs[-1], sorted(dirs)) == ("step_2", [".lazyckpt", "step_0", "step_1", "step_2"])
    run = Run()
    enable(run.accelerator)
    run.accelerator.load_state(dirs[-1])
    run.step()
    run.accelerator.save_state("step_3")
    run.accelerator.end_training()
    assert names(folder) == ["step_0", "step_1", "step_2", "step_3"]


def test_enable_removes_what_a_killed_run_of_an_older_version_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the script would find it, before the first save, and stay stuck."""
    for root in (tmp_path, tmp_path / "project"):
        for prefix in (folders.TEMPORARY, folders.TRASH):
            folders.fresh_name(prefix, root / "step_3").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    enable(accelerate.Accelerator(cpu=True, project_dir="project"))
    assert names(tmp_path) == ["project"] and names(tmp_path / "project") == []


@pytest.mark.parametrize("left", [".lazyckpt", ".lazyckpt/staged/.tmp-step_3-*", ".tmp-step_3-*", ".trash-step_1-*"])
def test_load_state_of_a_temporary_name_says_which_checkpoint_is_whole(left: str, tmp_path: Path) -> None:
    run = Run()
    enable(run.accelerator)
    run.accelerator.save_state(tmp_path / "step_2")
    run.accelerator.end_training()
    unfinished = tmp_path / left.replace("*", "0" * 32)
    unfinished.mkdir(parents=True)
    with pytest.raises(lazyckpt.LoadError, match=f"the newest whole one is {tmp_path}/step_2"):
        run.accelerator.load_state(str(unfinished))


def test_two_ranks_save_one_folder(tmp_path: Path, graph: Any) -> None:
    whole = launch(tmp_path / "whole", 6, 2, folder=tmp_path)
    assert [code for code, _, _ in whole] == [0, 0], whole
    newest = tmp_path / "whole" / "checkpoints" / "checkpoint_2"
    states = [torch.load(newest / f"random_states_{rank}.pkl", weights_only=False) for rank in range(2)]
    assert not torch.equal(states[0]["torch_manual_seed"], states[1]["torch_manual_seed"])
    assert names(tmp_path / "whole" / "checkpoints") == ["checkpoint_1", "checkpoint_2"]
    # Once more from the middle, as if the machine had failed before the last one was durable.
    shutil.copytree(newest.with_name("checkpoint_1"), tmp_path / "again" / "checkpoints" / "checkpoint_1")
    again = launch(tmp_path / "again", 6, 2, folder=tmp_path)
    for rank in range(2):
        assert again[rank][1] == {step: whole[rank][1][step] for step in (5, 6)}, again
    assert contents(tmp_path / "again" / "checkpoints" / "checkpoint_2", graph) == contents(newest, graph)
    assert whole[0][1] != whole[1][1] and names(tmp_path / "again") == ["checkpoints"]


@pytest.mark.parametrize("how", ["raise", pytest.param("die", marks=pytest.mark.slow)])
def test_a_rank_that_fails_fails_the_save_on_all_ranks(tmp_path: Path, how: str) -> None:
    run = tmp_path / "run"
    (main, _, told), (other, _, _) = launch(run, 4, 2, f"hook={how}", folder=tmp_path)
    assert main not in (0, -signal.SIGKILL) and other != 0
    if how == "raise":
        assert "SaveError" in told and "the hook of rank 1 failed" in told
    assert names(run / "checkpoints") == []
    assert names(run) == ["checkpoints"]


def test_run_gives_a_script_what_it_would_have_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_main: Callable[..., None], capsys: Any
) -> None:
    (tmp_path / "beside.py").write_text("value = 42")
    (tmp_path / "train.py").write_text(
        "import pickle, sys\n"
        "from accelerate import Accelerator\n"
        "import beside\n"
        "class Own: pass\n"
        "pickle.loads(pickle.dumps(Own()))\n"
        "accelerator = Accelerator(cpu=True)\n"
        "print(__name__, sys.argv[1:], beside.value, type(accelerator.save_state.__self__).__name__)\n"
    )
    run_main(tmp_path / "train.py", "--lr", "1")
    monkeypatch.chdir(tmp_path)
    run_main("-m", "train", "--lr", "1")
    assert capsys.readouterr().out.splitlines() == ["__main__ ['--lr', '1'] 42 StateSaver"] * 2
    with pytest.raises(SystemExit, match="usage"):
        run_main("--lr", "1")


def test_the_example_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    example = str(Path(__file__).parents[2] / "examples" / "accelerate_loop.py")
    arguments = ["--folder", str(tmp_path), "--steps", "6", "--every", "2", "--width", "32"]
    monkeypatch.setattr(sys, "argv", [example, *arguments])
    runpy.run_path(example, run_name="__main__")
    assert "save_state took" in capsys.readouterr().out
    checkpoints = tmp_path / "checkpoints"
    assert names(checkpoints) == ["checkpoint_1", "checkpoint_2"]
    train = runpy.run_path(example)["train"]
    whole = train(tmp_path / "whole", 6, 2, 32)
    shutil.rmtree(checkpoints / "checkpoint_2")
    rest = train(tmp_path, 6, 2, 32)
    assert rest == {5: whole[5], 6: whole[6]} and len(whole) == 6
    assert "resumed after step 4" in capsys.readouterr().out
