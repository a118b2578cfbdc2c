"""What the oldest releases that lazyckpt supports cannot do yet. Tests that need it are skipped there."""

from __future__ import annotations

import importlib.metadata
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

OFFSETS = pytest.mark.skipif(
    not hasattr(torch.UntypedStorage, "_checkpoint_offset"), reason="torch does not tell offsets yet"
)
MODES = pytest.mark.skipif(
    not hasattr(TorchDispatchMode, "supports_higher_order_operators"),
    reason="torch runs operators of higher order under no mode that it does not know yet",
)
TRAINS_FSDP2 = hasattr(torch.cpu.Stream, "record_event")

# How an old release says that it cannot; the first release that can. A mark would have to know of every test whether
# its ranks, its torchrun or its fixture trains so.
_SINCE = {
    "'Stream' object has no attribute 'record_event'": ("torch", (2, 7), "trains FSDP2 on CPUs"),
    "FSDP+TP sharding does not support uneven sharding for now": ("torch", (2, 8), "shards unevenly over FSDP2 and TP"),
    "When using FSDP2, a model and optimizer must be passed together to `Accelerator.prepare()`": (
        *("transformers", (4, 51), "passes the optimizer to FSDP2 with the model"),
    ),
    "don't know how to restore data location of torch.storage.UntypedStorage (tagged with cpu:0)": (
        *("transformers", (5, 18), "resumes on the CPUs of several ranks"),
    ),
}


def lacking(failure: str) -> str | None:
    """Returns the release that can do what the text of ``failure`` says the installed one cannot."""
    for says, (package, since, what) in _SINCE.items():
        if says in failure and _installed(package) < since:
            return f"{package} {'.'.join(map(str, since))}, which {what}"
    return None


def _installed(package: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", importlib.metadata.version(package))[:2]))
