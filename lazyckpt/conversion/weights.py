"""Publishes the weights of a tracked module: a folder that ``from_pretrained`` of transformers reads."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lazyckpt.conversion import stream
from lazyckpt.conversion.hollow import Hollow
from lazyckpt.conversion.inert import read_inert
from lazyckpt.conversion.inert_folder import read_inert_folder
from lazyckpt.conversion.shards import distributed
from lazyckpt.errors import ConfigError, SaveError
from lazyckpt.formats.torch_zip_reader import read_directory
from lazyckpt.pipeline.plan import plan_for
from lazyckpt.reading.sharded.folder import open_folder
from lazyckpt.storage import commit
from lazyckpt.storage.manifest import Checkpoint

MODEL = "model.safetensors"
_SHARD_BYTES = 5_000_000_000  # as huggingface_hub cuts models
_WRAPPERS = {"DistributedDataParallel": "module", "FullyShardedDataParallel": "module", "OptimizedModule": "_orig_mod"}


class Weights:
    """Makes such folders of the checkpoints in a run's folder. A mirror's thread calls."""

    def __init__(self, tracked: Mapping[str, Any], directory: Path) -> None:
        """``tracked``: the objects of a Checkpointer by name, which change while it tracks more."""
        self._tracked = tracked
        self._directory = directory

    def is_ready(self) -> bool:
        """Whether a module is tracked."""
        return bool(self._modules())

    @contextlib.contextmanager
    def of(self, checkpoint: Checkpoint, model: str | None) -> Iterator[Path]:
        """Yields a temporary folder with the weights of the module ``model``; None: of the only one. It has the name
        that it should have elsewhere, and is removed afterwards, also by the next Checkpointer if this process dies.

        Raises ConfigError if it is not clear which module, or it has no plain weights, LoadError, and OSError."""
        name = self._chosen(model)
        module, prefix = _unwrapped(self._tracked[name])
        if type(module).__module__.startswith("peft.") or getattr(module, "_hf_peft_config_loaded", False):
            raise ConfigError(
                f"{name!r} has adapters of PEFT, so from_pretrained would not find its weights; what='model' is for "
                "models without them. model.save_pretrained() writes the adapters"
            )
        target = self._directory / f"model-{checkpoint.step:08d}"
        staging = commit.Staging(target)
        try:
            folder = staging.path / target.name
            folder.mkdir()
            _write(checkpoint, name, prefix, folder)
            for file, text in _settings(module).items():
                (folder / file).write_text(text, encoding="utf-8")
            yield folder
        finally:
            staging.discard()

    def _modules(self) -> dict[str, torch.nn.Module]:
        return {name: obj for name, obj in dict(self._tracked).items() if isinstance(obj, torch.nn.Module)}

    def _chosen(self, model: str | None) -> str:
        known = self._modules()
        if model is not None and model not in known:
            raise ConfigError(f"no module is tracked as {model!r}; there is: {', '.join(known) or 'none'}")
        if model is None and len(known) != 1:
            what = f"several modules are tracked: {', '.join(known)}" if known else "no module is tracked"
            raise ConfigError(f"{what}; say which to publish: Mirror(…, what='model', model='name')")
        return model or next(iter(known))


def _unwrapped(module: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """The module inside wrappers, and what these put before the names of its weights."""
    prefix = ""
    while (inside := _WRAPPERS.get(type(module).__name__)) is not None:
        module = getattr(module, inside)
        prefix += f"{inside}."
    return module, prefix


def _write(checkpoint: Checkpoint, name: str, prefix: str, folder: Path) -> None:
    """Writes the safetensors files, with a few megabytes of the weights in memory at a time."""
    file = checkpoint.folder / checkpoint.state.name
    if checkpoint.is_sharded:
        state = read_inert_folder(open_folder(checkpoint.folder))
    else:
        state = read_inert(file, read_directory(file))
    if not isinstance(found := state.get(name), Mapping):
        raise ConfigError(f"{file}: it holds no weights of {name!r}")
    named = {str(key).removeprefix(prefix): value for key, value in found.items()}
    loader = Hollow(file, dense=True)
    tensors, ties = loader.tensors(named)
    files, index = distributed(tensors, MODEL, _SHARD_BYTES)
    plans = {folder / each: plan_for(each, part, {"format": "pt"} | ties) for each, part in files.items()}
    try:
        stream.write(plans, loader.origins, lambda nbytes: None)
    except SaveError as error:
        cause = error.__cause__
        number = (cause.errno if isinstance(cause, OSError) else None) or errno.EIO
        raise OSError(number, f"its weights could not be written to {folder.parent}: {error.what}") from error
    for each, text in index.items():
        (folder / each).write_bytes(text)


def _settings(module: torch.nn.Module) -> dict[str, str]:
    """The files that tell transformers how to build a model; none for other modules."""
    texts: dict[str, str] = {}
    if callable(told := getattr(getattr(module, "config", None), "to_json_string", None)):
        settings = json.loads(told())
        name = type(module).__name__.removeprefix("FSDP")  # FSDP2 makes a subclass of the class of a model
        texts["config.json"] = json.dumps({**settings, "architectures": [name]}, indent=2, sort_keys=True) + "\n"
    can_generate = getattr(module, "can_generate", None)
    if callable(can_generate) and can_generate():
        generation: Any = getattr(module, "generation_config", None)
        if callable(told := getattr(generation, "to_json_string", None)):
            texts["generation_config.json"] = told()
    return texts
