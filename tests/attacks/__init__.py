"""Hostile files: written by hand, and found by mutating valid ones.

An attack is a function that makes one hostile file or folder and says in one sentence what it hopes for.
``test_attacks.py`` gives each one to everything that reads. The modules are named after what they attack: ``zips``,
``pickles``, ``headers`` (safetensors), ``folders``, ``sharded`` (folders of many ranks). To add an attack, write a row
(``hostile``), or a function if it takes more than one expression; nothing else needs to know.

``test_fuzz.py`` gives nearly valid files (``mutate.py``) to everything that reads, and ``judge.py`` says what must hold
for any bytes at all. ``make fuzz`` lets atheris look for inputs that reach new code (``explore.py``). Whatever it finds
becomes an attack.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Make = Callable[[Path], Path]
CANARY = "canary"  # the file that a gadget creates in the folder of its attack


@dataclass(frozen=True)
class Attack:
    """``make(folder)`` writes into the empty ``folder`` and returns the path that the victim opens.

    ``harmless``: why readers may accept it, if they may. They must then read what the format's own library reads.
    ``large``: why it may ask for more memory than there is, if it may.
    ``trap``: an unrestricted unpickler leaves a CANARY.
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
    """Registers an attack under the name of its function."""

    def decorate(make: Make) -> Make:
        name = f"{make.__module__.rpartition('.')[2]}.{make.__name__}"
        register(make, name, make.__doc__, harmless=harmless, large=large, trap=trap)
        return make

    return decorate(make) if make is not None else decorate  # type: ignore[return-value]


def register(
    make: Make, name: str, sentence: str | None, *, harmless: str = "", large: str = "", trap: bool = False
) -> None:
    assert sentence and name not in ATTACKS
    ATTACKS[name] = Attack(name, make, harmless, large, trap)


def victim() -> dict[str, Any]:
    """The state that is tracked when a folder is restored."""
    model = torch.nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "x": {}}


for _module in ("zips", "pickles", "headers", "folders", "sharded"):
    importlib.import_module(f"attacks.{_module}")
