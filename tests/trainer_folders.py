"""What a trainer left in a folder, so that two folders can be compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_TIMES = ("runtime", "per_second")
_PICKLES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")


def contents(folder: Path, graph: Callable[[Any], Any]) -> dict[str, Any]:
    """Every file by name, as its loader reads it, without clock times and without the checksums of lazyckpt."""
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
            found[name] = graph(torch.load(path, weights_only=False))
        else:
            found[name] = path.read_bytes()
    return found
