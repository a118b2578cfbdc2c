"""Ways to save a state, one for each container, behind the same four calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import lazyckpt
from writers.judge import Flat, clone, flat


class Way:
    """Saves the objects that ``track`` was told of."""

    def __init__(self, folder: Path, **knobs: Any) -> None:
        self._folder = folder
        self._tracked: dict[str, Any] = {}

    def track(self, tracked: dict[str, Any]) -> None:
        self._tracked = tracked

    def state(self) -> dict[str, Any]:
        """The live state that is saved."""
        return {n: o.state_dict() if hasattr(o, "state_dict") else o for n, o in self._tracked.items()}

    def leaves(self) -> Flat:
        """The live tensors that the file holds, by name."""
        return flat(self.state())

    def oracle(self) -> Flat:
        return clone(self.leaves())

    def save(self, step: int) -> lazyckpt.SaveHandle:
        raise NotImplementedError

    def read(self, path: Path) -> Flat:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class InCheckpointer(Way):
    """``state.pt`` in the folder of a checkpoint."""

    def __init__(self, folder: Path, **knobs: Any) -> None:
        super().__init__(folder)
        self.checkpointer = lazyckpt.Checkpointer(folder, **knobs)

    def track(self, tracked: dict[str, Any]) -> None:
        super().track(tracked)
        self.checkpointer.track(**tracked)

    def save(self, step: int) -> lazyckpt.SaveHandle:
        return self.checkpointer.save(step)

    def read(self, path: Path) -> Flat:
        saved = torch.load(path / "state.pt", weights_only=False)
        return flat({name: saved[name] for name in self._tracked})

    def close(self) -> None:
        self.checkpointer.close()


class InSaver(Way):
    def __init__(self, folder: Path, **knobs: Any) -> None:
        super().__init__(folder)
        self.saver = lazyckpt.Saver(**knobs)

    def close(self) -> None:
        self.saver.close()


class InArchive(InSaver):
    """A lone file in torch's format."""

    def save(self, step: int) -> lazyckpt.SaveHandle:
        return self.saver.save(self.state(), self._folder / f"{step}.pt", step=step)

    def read(self, path: Path) -> Flat:
        return flat(torch.load(path, weights_only=False))


class InSafetensors(InSaver):
    """A lone safetensors file: tensors only."""

    def leaves(self) -> Flat:
        return {name: leaf for name, leaf in super().leaves().items() if isinstance(leaf, torch.Tensor)}

    def save(self, step: int) -> lazyckpt.SaveHandle:
        return self.saver.save(self.leaves(), self._folder / f"{step}.safetensors", step=step)

    def read(self, path: Path) -> Flat:
        return dict(load_file(path))


class InFolder(InSaver):
    """A folder of several files: one for each object, the first of them a safetensors file."""

    def _files(self) -> dict[str, Any]:
        (first, state), *rest = self.state().items()
        tensors = {name: leaf for name, leaf in flat(state).items() if isinstance(leaf, torch.Tensor)}
        return {f"{first}.safetensors": tensors, **{f"{name}.pt": value for name, value in rest}}

    def leaves(self) -> Flat:
        # In a message, a tensor's name begins with its file's.
        return {f"{file}.{name}": leaf for file, obj in self._files().items() for name, leaf in flat(obj).items()}

    def save(self, step: int) -> lazyckpt.SaveHandle:
        folder = self.saver.stage(self._folder / f"folder-{step}", step=step)
        for name, obj in self._files().items():
            folder.add(name, obj)
        return folder.save()

    def read(self, path: Path) -> Flat:
        found: Flat = {}
        for file in self._files():
            here = load_file(path / file) if file.endswith(".safetensors") else torch.load(path / file)
            found |= {f"{file}.{name}": leaf for name, leaf in flat(here).items()}
        return found


WAYS: dict[str, type[Way]] = {
    "checkpointer": InCheckpointer,
    "archive": InArchive,
    "safetensors": InSafetensors,
    "folder": InFolder,
}
