"""What the tests of the three trainers share: quiet trainers, a slow disk, what they left in a folder,
and forked processes."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

# Trainers that print nothing, on the CPU


def lightning_trainer(folder: Path, io: Any, *callbacks: Any, **options: Any) -> Any:
    """A Lightning Trainer of one epoch; ``io`` is a CheckpointIO or None."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    settings: dict[str, Any] = {
        **quiet,
        "default_root_dir": folder,
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "num_sanity_val_steps": 0,
        "plugins": [] if io is None else [io],
        "callbacks": list(callbacks),
    }
    return Trainer(**{**settings, **options})


class ScheduleFreeHooks:
    """For a LightningModule that trains ``net`` with a schedule-free optimizer: what schedulefree's README asks for."""

    net: torch.nn.Module
    optimizers: Callable[[], Any]

    def on_fit_start(self) -> None:
        self.optimizers().train()

    def on_validation_model_eval(self) -> None:
        self.net.eval()
        self.optimizers().eval()

    def on_validation_model_train(self) -> None:
        self.net.train()
        self.optimizers().train()


def hugging_face_arguments(folder: Path | str, **options: Any) -> Any:
    from transformers import TrainingArguments

    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    return TrainingArguments(str(folder), **{"per_device_train_batch_size": 2, **quiet, **options})


def forget_accelerators() -> None:
    """Accelerate keeps its state for the whole process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


# A disk that is slow, held back or broken

SLOW_S = 0.04


class FileDisk:
    """Opens files late, or not until ``free`` is set; fails for files whose name holds a word of ``broken``."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.late_s = 0.0
        self.broken: list[str] = []


class FolderDisk:
    """Begins to write folders when ``free`` is set; publishes them late, or not those whose names are in ``fails_at``.
    Notes which it published, and whether each existed before."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.publish_s = 0.0
        self.fails_at: set[str] = set()
        self.published: list[str] = []
        self.existed: list[bool] = []


# What a trainer left in a folder


_TIMES = ("runtime", "per_second")
_PICKLES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")


def contents(folder: Path, graph: Callable[[Any], Any]) -> dict[str, Any]:
    """Every file by name, as its loader reads it, without clock times and without what lazyckpt adds."""
    from safetensors import safe_open

    found: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".md"):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                metadata = {k: v for k, v in (file.metadata() or {}).items() if not k.startswith("lazyckpt.")}
                found[name] = metadata, graph({key: file.get_tensor(key) for key in sorted(file.keys())})
        elif path.name == "trainer_state.json":
            state = json.loads(path.read_text())
            log = [{k: v for k, v in entry.items() if not k.endswith(_TIMES)} for entry in state["log_history"]]
            found[name] = {**state, "log_history": log}
        elif path.name == "training_args.bin":
            found[name] = torch.load(path, weights_only=False).max_steps
        elif path.suffix in _PICKLES:
            loaded = torch.load(path, weights_only=False)
            if isinstance(loaded, dict):
                loaded.pop("lazyckpt", None)  # random states and positions of loaders, in Lightning's
            found[name] = graph(loaded)
        else:
            found[name] = path.read_bytes()
    return found


# Processes


class Forked:
    """Runs a function in a forked child, since a new process would take seconds to import the frameworks again.

    The child exits with 0, or with 1 after an exception; ``output`` gets what it prints.
    """

    def __init__(self, run: Callable[[], object], output: Path, environment: Mapping[str, str] | None = None) -> None:
        self.output = output
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.environ.update(environment or {})
                sys.stdout = sys.stderr = output.open("w", buffering=1)
                os.dup2(sys.stdout.fileno(), 1)
                os.dup2(sys.stdout.fileno(), 2)
                torch.set_num_threads(1)  # the pool of threads did not survive the fork
                run()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)

    def wait(self, timeout: float = 120) -> int:
        """Returns the exit code, or minus the number of the signal that ended the child."""
        end = time.monotonic() + timeout
        while (ended := os.waitpid(self.pid, os.WNOHANG))[0] == 0:
            assert time.monotonic() < end, f"the child does not end: {self.output.read_text()}"
            time.sleep(0.005)
        return os.waitstatus_to_exitcode(ended[1])


def ranks(run: Callable[[], object], folder: Path, number: int = 2) -> list[Forked]:
    """Runs a function on each rank of a process group of torch, as torchrun does on one machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return [
        Forked(run, folder / f"output-{rank}", {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(number)
    ]
