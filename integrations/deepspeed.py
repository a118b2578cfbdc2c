"""DeepSpeed: ``save_checkpoint()`` returns in milliseconds, and its tag appears when all of its files are durable.

    import lazyckpt.integrations.deepspeed          # then the JSON alone: {"lazyckpt": {"max_in_flight": 2}}
    enable(engine, max_in_flight=2)                 # or by hand, after deepspeed.initialize()

DeepSpeed still decides what to save. It hands each file to its checkpoint engine, here ``LazyCheckpointEngine``, which
collects the files of one ``save_checkpoint`` and, behind DeepSpeed's last barrier, saves them as one snapshot of all
ranks: copied lazily, committed together, and then named by ``latest``. The files, their names and their contents are
DeepSpeed's own; ``load_checkpoint`` needs no lazyckpt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import lazyckpt
from lazyckpt import private_names, settings
from lazyckpt.config import Settings, spells_out
from lazyckpt.integrations import wrap
from lazyckpt.warn import warn

with private_names.needed("deepspeed"):
    import deepspeed
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.engine import DeepSpeedEngine

    from lazyckpt.integrations import deepspeed_host, deepspeed_state
    from lazyckpt.integrations.deepspeed_engine import LazyCheckpointEngine

    if tuple(map(int, deepspeed.__version__.split("+")[0].split(".")[:3])) < (0, 18, 9):
        raise ImportError("its checkpoint engines are called in another order")

if TYPE_CHECKING:
    from typing_extensions import Unpack

KEY = "lazyckpt"  # in the JSON
_RETENTION = "DeepSpeed keeps all checkpoints; `lazyckpt prune` removes old ones"


@spells_out(Settings)
def enable(
    engine: DeepSpeedEngine, *, enabled: bool | None = None, **knobs: Unpack[Settings]
) -> LazyCheckpointEngine | None:
    """Make ``save_checkpoint`` of this engine lazy and durable. Every rank must call it, before training.

    Keyword arguments are ``enabled`` and the fields of ``Config``, except retention: DeepSpeed keeps all checkpoints.
    They override ``LAZYCKPT_*`` variables, and these override the file that ``LAZYCKPT_CONFIG_FILE`` names. A second
    call replaces the settings of the first.

    Returns None and changes nothing if ``enabled`` is false. Raises ConfigError for an invalid setting, and by name for
    what lazyckpt cannot save: NVMe offload, ZenFlow, node-local storage, and an engine with a ``checkpoint.writer`` or
    ``datastates_ckpt`` of its own.
    """
    return _enable(engine, knobs if enabled is None else {**knobs, "enabled": enabled}, "the code")


def _enable(engine: DeepSpeedEngine, given: Mapping[str, Any], source: str) -> LazyCheckpointEngine | None:
    gathered = settings.gather(None, given, _RETENTION, source)
    before = engine.checkpoint_engine
    if not gathered.pop("enabled", True):
        if isinstance(before, LazyCheckpointEngine):
            engine.checkpoint_engine = TorchCheckpointEngine(engine._config)
            before.cleanup()
        return None
    if "writers" in gathered:
        raise lazyckpt.ConfigError(f"writers={gathered['writers']!r}: under DeepSpeed each rank writes its own files")
    if (why := unsupported(engine)) is not None:
        raise lazyckpt.ConfigError(f"lazyckpt cannot save this DeepSpeed engine: {why}")
    if isinstance(before, LazyCheckpointEngine):
        before.cleanup()
    engine.checkpoint_engine = ours = LazyCheckpointEngine(engine, **gathered)
    return ours


def unsupported(engine: DeepSpeedEngine) -> str | None:
    """Returns why lazyckpt cannot save this engine; None if it can."""
    zero = engine._config.zero_config
    offloads = [getattr(zero, name) for name in ("offload_optimizer", "offload_param")]
    if any(offload is not None and str(offload.device).endswith("nvme") for offload in offloads):
        return "DeepSpeed copies what it has offloaded to NVMe past its checkpoint engine; offload to the CPU"
    if getattr(engine, "zenflow", False):
        return "ZenFlow's optimizer also writes outside of step(), while training goes on"
    if engine.use_node_local_storage():
        return "use_node_local_storage gives each node a folder of its own, and all ranks commit one together"
    if not isinstance(engine.checkpoint_engine, TorchCheckpointEngine | LazyCheckpointEngine):
        return f"the config asks for another checkpoint engine ({type(engine.checkpoint_engine).__name__})"
    return None


_all = False  # engines without the key are enabled, too


def enable_all() -> None:
    """Enables every engine that is made from now on (lazyckpt/run.py). Warns of one that lazyckpt cannot save."""
    global _all
    _all = True


def _ours(engine: DeepSpeedEngine, *_: Any) -> LazyCheckpointEngine | None:
    found = engine.checkpoint_engine
    return found if isinstance(found, LazyCheckpointEngine) else None


def _settings_in(engine: DeepSpeedEngine, *_: Any) -> dict[str, Any] | None:
    """The settings in the JSON; None for an engine that is not to be enabled."""
    if deepspeed_host.joining:
        return {}
    found = engine._config._param_dict.get(KEY, {} if _all else None)
    if isinstance(found, bool):
        return {"enabled": found}
    if not isinstance(found, dict | None):
        raise lazyckpt.ConfigError(f'"{KEY}" in the DeepSpeed config: expected an object of settings, not {found!r}')
    return found


@wrap(DeepSpeedEngine, "_configure_checkpointing", _settings_in)
def _configure(found: dict[str, Any], original: Callable[[], None], engine: DeepSpeedEngine) -> None:
    original()
    if deepspeed_host.joining:
        deepspeed_host.joining[-1](engine)
        return
    why = unsupported(engine)
    if _all and why is not None and KEY not in engine._config._param_dict:
        warn(f"lazyckpt leaves save_checkpoint to DeepSpeed: {why}")
    else:
        _enable(engine, found, f'"{KEY}" in the DeepSpeed config')


@wrap(DeepSpeedEngine, "save_checkpoint", _ours)
def _save(ours: LazyCheckpointEngine, original: Any, engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
    return ours.save_checkpoint(lambda: original(*args, **kwargs))


@wrap(DeepSpeedEngine, "load_checkpoint", _ours)
def _load(
    ours: LazyCheckpointEngine,
    original: Any,
    engine: DeepSpeedEngine,
    load_dir: str,
    tag: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if engine.load_universal_checkpoint():
        ours.wait()
        return original(load_dir, tag, *args, **kwargs)
    return ours.load_checkpoint(lambda found: original(load_dir, found, *args, **kwargs), load_dir, tag)


@wrap(DeepSpeedEngine, "_copy_recovery_script", _ours)
def _copy_script(ours: LazyCheckpointEngine, original: Any, engine: DeepSpeedEngine, save_path: str) -> None:
    ours.copy_recovery_script(lambda: original(save_path))


@wrap(DeepSpeedEngine, "_save_moe_checkpoint", _ours)
def _save_experts(ours: LazyCheckpointEngine, original: Any, engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
    with deepspeed_state.parameters_not_cloned(engine):
        return original(*args, **kwargs)


def _wait_captured(
    ours: LazyCheckpointEngine, original: Any, engine: DeepSpeedEngine, *args: Any, **kwargs: Any
) -> Any:
    """Tensors are about to move."""
    lazyckpt.wait_captured()
    return original(*args, **kwargs)


wrap(DeepSpeedEngine, "offload_states", _ours)(_wait_captured)
wrap(DeepSpeedEngine, "reload_states", _ours)(_wait_captured)
