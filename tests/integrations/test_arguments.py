"""The settings as arguments of each public class: listed for help(), for a command line and in the reference."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import lazyckpt
from lazyckpt.config import RETENTION, Config, RunSettings, Settings
from lazyckpt.metrics import CheckpointMetrics
from lazyckpt.settings import config_of

ROOT = Path(__file__).parents[2]
INTEGRATIONS = (
    ("lightning", "lightning.LazyCheckpointIO"),
    ("lightning", "lightning_sharded.LazyModelParallelStrategy"),
    ("transformers", "transformers.LazyCheckpointCallback"),
    ("accelerate", "accelerate.enable"),
    ("accelerate", "accelerate.StateSaver"),
    ("torchtitan", "torchtitan.lazy"),
)
done: list[CheckpointMetrics] = []


def note(metrics: CheckpointMetrics, error: lazyckpt.SaveError | None) -> None:
    done.append(metrics)


def settings_of(taker: Any) -> dict[str, inspect.Parameter]:
    named = inspect.signature(taker).parameters
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in named.values())
    return {name: parameter for name, parameter in named.items() if name in Config.__dataclass_fields__}


def is_as_in_config(shown: dict[str, inspect.Parameter]) -> bool:
    of_config = inspect.signature(Config).parameters
    return all(of_config[name].default == shown[name].default for name in shown)


@pytest.mark.parametrize("taker", [lazyckpt.Checkpointer, lazyckpt.Saver])
def test_a_checkpointer_lists_every_field_of_config(taker: type) -> None:
    shown = settings_of(taker)
    assert list(shown) == list(Config.__dataclass_fields__) and is_as_in_config(shown)


def test_only_track_takes_any_name() -> None:
    """Regression: `rollback(step, **how)` showed none of its arguments."""
    public = [getattr(lazyckpt, name) for name in lazyckpt.__all__]
    methods = [getattr(kind, name) for kind in filter(inspect.isclass, public) for name in vars(kind) if name[0] != "_"]
    methods += [getattr(lazyckpt.Checkpointer, name) for name in dir(lazyckpt.Checkpointer) if name[0] != "_"]
    any_name = {
        called.__qualname__
        for called in filter(inspect.isfunction, [*public, *methods])
        for parameter in inspect.signature(called).parameters.values()
        if parameter.kind is parameter.VAR_KEYWORD
    }
    assert any_name <= {"Checkpointer.track", "CUDAGraph.capture_begin"}  # the latter has torch's arguments


@pytest.mark.parametrize(("package", "name"), INTEGRATIONS, ids=str)
def test_an_integration_lists_every_field_but_retention(package: str, name: str) -> None:
    pytest.importorskip(package)
    module, _, called = name.rpartition(".")
    shown = settings_of(getattr(importlib.import_module(f"lazyckpt.integrations.{module}"), called))
    assert [*shown] == [n for n in Config.__dataclass_fields__ if n not in RETENTION] and is_as_in_config(shown)


def test_the_types_are_those_of_config() -> None:
    """One list is for type checkers, the other makes the defaults."""
    # Command lines make texts, of which Config tells them; code also gives a Mirror or a dict.
    assert get_type_hints(RunSettings) == {**get_type_hints(Config), "mirrors": Sequence[Any]}
    assert set(Settings.__annotations__) == set(Config.__annotations__) - set(RETENTION)


def test_a_setting_of_retention_is_refused_with_what_to_use() -> None:
    """Regression: `keep_every=10` was answered with "give keep_last, too", and `mode="max"` was taken."""
    for name, value in {"keep_every": 10, "keep_best": 1, "mode": "max"}.items():
        with pytest.raises(lazyckpt.ConfigError, match=f"{name}: keep fewer"):
            config_of(lazyckpt.Saver, {name: value}, "keep fewer")


def test_the_reference_lists_what_the_signatures_list(tmp_path: Path) -> None:
    griffe = pytest.importorskip("griffe")
    (tmp_path / "lazyckpt").mkdir()
    for name in ("__init__.py", "config.py", "checkpointer.py", "saver.py"):
        (tmp_path / "lazyckpt" / name).symlink_to(ROOT / "lazyckpt" / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
        extensions = griffe.load_extensions("settings_in_reference")
    package = griffe.load("lazyckpt", search_paths=[tmp_path], extensions=extensions)
    for name in ("Checkpointer", "Saver"):
        documented = package[f"{name.lower()}.{name}"].parameters
        assert [p.name for p in documented] == ["self", *inspect.signature(getattr(lazyckpt, name)).parameters]
        assert documented["max_in_flight"].default == "2"


# A real LightningCLI

TRAINER = {
    "accelerator": "cpu",
    "logger": False,
    "max_steps": 2,
    "limit_val_batches": 0,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def run_cli(folder: Path, **trainer: Any) -> Any:
    yaml = pytest.importorskip("yaml")
    pytest.importorskip("jsonargparse")
    cli = pytest.importorskip("lightning.pytorch.cli")
    from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({"trainer": {**TRAINER, "default_root_dir": str(folder), **trainer}}))
    options = {"args": ["fit", "--config", str(config)], "save_config_callback": None}
    return cli.LightningCLI(BoringModel, BoringDataModule, **options)


def plugin(**settings: Any) -> list[dict[str, Any]]:
    return [{"class_path": "lazyckpt.integrations.lightning.LazyCheckpointIO", "init_args": settings}]


def test_lightning_cli_configures_the_plugin_from_yaml(tmp_path: Path) -> None:
    """Regression: `Key 'durability' is not expected`, since the constructor took `**knobs: Any`."""
    done.clear()
    settings = {"durability": "before_step", "host_buffer_bytes": 1 << 26, "on_done": f"{__name__}.note", "writers": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, __name__, sys.modules[note.__module__])
        run = run_cli(tmp_path, plugins=plugin(**settings))
    assert run.trainer.global_step == 2
    io = run.trainer.strategy.checkpoint_io
    made = io._config
    assert (made.durability, made.host_buffer_bytes, made.on_error) == ("before_step", 1 << 26, "raise")
    assert io.writers == 2
    assert [metrics.step for metrics in done] == [2]


def test_lightning_cli_configures_the_sharded_strategy(tmp_path: Path) -> None:
    class_path = "lazyckpt.integrations.lightning_sharded.LazyModelParallelStrategy"
    given = {"data_parallel_size": 1, "timeout": "0:01:00", "on_error": "warn", "max_in_flight": 3}
    jsonargparse = pytest.importorskip("jsonargparse")
    strategies = pytest.importorskip("lightning.pytorch.strategies")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(strategies.Strategy, "strategy")
    parsed = parser.parse_object({"strategy": {"class_path": class_path, "init_args": given}})
    made = parser.instantiate(parsed).strategy
    assert (made._data_parallel_size, made._tensor_parallel_size, made._timeout.seconds) == (1, "auto", 60)
    assert (made.checkpoint_io._config.on_error, made.checkpoint_io._config.max_in_flight) == ("warn", 3)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"durability": "sometimes"}, "Literal['async', 'before_step']. Got value: sometimes"),
        ({"host_bufer_bytes": 1}, "'host_bufer_bytes' is not accepted"),
        ({"keep_last": 3}, "'keep_last' is not accepted"),
    ],
    ids=str,
)
def test_lightning_cli_names_a_wrong_setting(
    wrong: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_cli(tmp_path, plugins=plugin(**wrong))
    assert said in capsys.readouterr().err
