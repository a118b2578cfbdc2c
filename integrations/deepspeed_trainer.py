"""DeepSpeed under the Trainer of transformers, Accelerate and Lightning, which import this only if they use it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

import lazyckpt
from lazyckpt.integrations import deepspeed_host
from lazyckpt.integrations.deepspeed import enable, unsupported
from lazyckpt.integrations.deepspeed_engine import LazyCheckpointEngine


def check_writers(writers: str | int | None) -> None:
    """Raises ConfigError for ``writers``."""
    if writers is not None:
        raise lazyckpt.ConfigError(
            f"writers={writers!r} is for DistributedDataParallel; under DeepSpeed each rank writes its own files"
        )


@contextlib.contextmanager
def joined(host: deepspeed_host.Host, models: Iterable[Any]) -> Iterator[None]:
    """A context in which engines of DeepSpeed, those among ``models`` and new ones, save what they hand over with the
    Saver and in the folders of ``host``. They stay joined.

    Raises ConfigError for an engine that lazyckpt cannot save."""
    for model in models:
        if isinstance(model, DeepSpeedEngine):
            _join(host, model)
    deepspeed_host.joining.append(functools.partial(_join, host))
    try:
        yield
    finally:
        deepspeed_host.joining.pop()


def leave(host: deepspeed_host.Host, models: Iterable[Any]) -> None:
    """Gives those that have joined ``host`` the checkpoint engines of DeepSpeed back."""
    for model in models:
        if isinstance(model, DeepSpeedEngine) and getattr(model.checkpoint_engine, "host", None) is host:
            enable(model, enabled=False)


def _join(host: deepspeed_host.Host, engine: DeepSpeedEngine) -> None:
    before = engine.checkpoint_engine
    if isinstance(before, LazyCheckpointEngine):
        if before.host is host:
            return
        before.cleanup()
    if (why := unsupported(engine)) is not None:
        raise lazyckpt.ConfigError(f"lazyckpt cannot save this DeepSpeed engine: {why}")
    engine.checkpoint_engine = LazyCheckpointEngine(engine, host=host)
