"""What was tried to get in: each attempt is a function that makes one hostile file or folder and says in one sentence
what it hopes for. ``test_attacks.py`` gives each to everything that reads.

Modules by what they attack: ``zips``, ``pickles``, ``headers`` (safetensors), ``folders``. To add one, write the
function; nothing else needs to know.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Make = Callable[[Path], Path]
CANARY = "canary"  # what a gadget creates in the folder that its attack was made in


@dataclass(frozen=True)
class Attack:
    """``make(folder)`` writes into the empty ``folder`` and returns what the victim is to open.

    ``harmless``: why it may be read, if it may; what is read is then what the format's own library reads.
    ``large``: why it may ask for more memory than there is, if it may.
    ``trap``: an unpickler that is not restricted leaves a CANARY.
    """

    name: str
    make: Make
    harmless: str
    large: str
    trap: bool


ATTACKS: dict[str, Attack] = {}


def attack(
    make: Make | None = None, *, harmless: str = "", large: str = "", trap: bool = False
) -> Callable[[Make], Make]:
    """Registers an attempt, under its function's name."""

    def register(make: Make) -> Make:
        name = f"{make.__module__.rpartition('.')[2]}.{make.__name__}"
        assert make.__doc__ and name not in ATTACKS
        ATTACKS[name] = Attack(name, make, harmless, large, trap)
        return make

    return register(make) if make is not None else register  # type: ignore[return-value]


def victim() -> dict[str, Any]:
    """What is tracked when a folder is restored."""
    model = torch.nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "x": {}}


for _module in ("zips", "pickles", "headers", "folders"):
    importlib.import_module(f"attacks.{_module}")
