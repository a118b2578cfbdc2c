"""Who owns the Saver of a DeepSpeed engine: the engine, or a trainer, for whole folders.

The Trainer of transformers, Accelerate and Lightning write a folder of several files, and call ``save_checkpoint`` of
the engine for some of them. All of them appear together. So while a trainer writes, its engines only hand their files
over (``Files``), and the trainer saves those with its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lazyckpt
from lazyckpt.integrations import close_and_warn
from lazyckpt.warn import warn_once

# Files of pipelines and experts, for which DeepSpeed would clone parts of larger storages. The weights of ZeRO's other
# files are all of a storage: whole, it is lazy however small the weights are.
_PARTS = ("layer_", "expert_")
_WEIGHTS = "model_states.pt"


class Files:
    """The files under ``root`` that the engines of this rank have handed over, until ``add_to``."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(root)
        self._states: dict[str, Any] = {}  # by name
        self._failure: OSError | None = None

    def take(self, info: Any, states: dict[str, Any], failure: OSError | None, *, first: bool) -> bool:
        """Takes the files of one ``save_checkpoint``, by their names in the folder of the tag. They replace files of
        an earlier call. ``info``: DeepSpeed's. ``first``: on rank 0, which writes ``latest`` now.

        Returns False for a checkpoint outside ``root``."""
        tag = os.path.relpath(os.path.join(info.save_dir, info.tag), self._root)
        if Path(tag).parts[:1] == (os.pardir,):
            return False
        self._failure = self._failure or failure
        self._states.update((os.path.join(tag, name), state) for name, state in states.items())
        if first and info.save_latest:
            try:
                Path(info.save_dir, "latest").write_text(info.tag)
            except OSError as error:
                self._failure = self._failure or error
        return True

    def add_to(self, staged: lazyckpt.StagedFolder) -> None:
        """Adds the files to ``staged``. Raises SaveError if DeepSpeed failed to write a small file."""
        add(self._states, self._failure, staged, self._root)


def add(
    states: dict[str, Any], failure: OSError | None, staged: lazyckpt.StagedFolder, path: str | os.PathLike[str]
) -> None:
    """Adds files, by name, to ``staged``. Raises ``failure`` as a SaveError of ``path``."""
    if failure is not None:
        raise lazyckpt.SaveError(str(failure), path=path) from failure
    # The trainer's files hold the same weights one by one. The engine watches a page for several files only if all have
    # the same part of the storage.
    parted = any(name.endswith(".safetensors") for name in staged.names)
    for name, state in states.items():
        compact = os.path.basename(name).startswith(_PARTS) or (parted and name.endswith(_WEIGHTS))
        staged.add(name, state, compact=compact)


# The Trainer and accelerate remove older folders of these names once a save has returned.
_ROTATED = re.compile(r"checkpoint[-_]\d+")


def may_be_rotated(tag: Path) -> bool:
    """Whether a trainer that does not host may remove older checkpoints as soon as this one is saved. Warns of that."""
    rotated = next(filter(_ROTATED.fullmatch, tag.parts[-2::-1]), None)
    if rotated is not None:
        warn_once(
            f"training waits until each checkpoint is durable, since a trainer that makes {rotated} may remove older "
            "ones at once. LazyCheckpointCallback, and enable(accelerator), make the whole folder lazy"
        )
    return rotated is not None


@dataclass(eq=False)
class Host:
    """The owner of the Saver that saves what an engine hands over."""

    open: Callable[[], lazyckpt.Saver]
    opened: Callable[[], lazyckpt.Saver | None]  # None: there is nothing to wait for
    close: Callable[[], object] | None = None  # with the engine; None: the owner closes it
    files: Files | None = None  # while it writes a folder

    @contextlib.contextmanager
    def collecting(self, root: str | os.PathLike[str]) -> Iterator[Files]:
        """A context in which the engines hand over what they would save under ``root``."""
        self.files = files = Files(root)
        try:
            yield files
        finally:
            self.files = None

    def took(self, info: Any, states: dict[str, Any], failure: OSError | None, *, first: bool) -> bool:
        """Hands over the files of one ``save_checkpoint`` (``Files.take``). Returns False if the engine is to save
        them."""
        return self.files is not None and self.files.take(info, states, failure, first=first)

    def pending(self) -> list[lazyckpt.SaveHandle]:
        saver = self.opened()
        return saver.pending() if saver is not None else []

    def wait(self) -> None:
        if (saver := self.opened()) is not None:
            saver.wait()

    def leave(self) -> None:
        """Waits for the saves of an engine that ends. A failed one becomes a warning, or the owner's next save raises
        it."""
        if self.close is not None:
            self.close()
        elif (saver := self.opened()) is not None:
            saver.drain()


def alone(saver: lazyckpt.Saver, engine: Any) -> Host:
    """Returns the host of an engine with a Saver of its own."""
    close = weakref.finalize(engine, close_and_warn, saver)  # also if no one calls destroy()
    return Host(lambda: saver, lambda: saver, close)


joining: list[Callable[[Any], None]] = []
"""The last one is called for every new engine, instead of what its JSON says (deepspeed_trainer.py)."""
