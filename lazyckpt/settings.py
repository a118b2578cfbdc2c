"""Settings of the integrations: keyword arguments, ``LAZYCKPT_*`` variables and a YAML file.

Code goes before the environment, the environment before the file, the file before the defaults. Settings are the fields
of config.py, without retention, which belongs to the framework, and arguments of ``enable``.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lazyckpt.config import RETENTION, Config, check_writers, hint
from lazyckpt.errors import ConfigError

PREFIX = "LAZYCKPT_"
FILE_VARIABLE = "LAZYCKPT_CONFIG_FILE"
_OF_ENABLE: dict[str, Any] = {"enabled": True, "writers": None}
DEFAULTS: dict[str, Any] = {
    **_OF_ENABLE,
    **{f.name: f.default for f in dataclasses.fields(Config) if f.name not in RETENTION},
}

_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def gather(file: Path | None, code: Mapping[str, Any], retention: str = "", source: str = "the code") -> dict[str, Any]:
    """Returns the settings that differ from the defaults, from all sources, checked.

    ``LAZYCKPT_CONFIG_FILE`` names another file than ``file``, which may be missing. Raises ConfigError, which says
    where a wrong value comes from (``source`` is that of ``code``) and proposes ``retention`` instead of ``keep_last``;
    ImportError if there is a file and no PyYAML to read it.
    """
    if elsewhere := os.environ.get(FILE_VARIABLE):
        file = Path(elsewhere)
        if _read_text(file) is None:
            raise ConfigError(f"{FILE_VARIABLE}={elsewhere}: there is no such file")
    from_file, environment = {} if file is None else _read_file(file), _read_environment()
    origins = dict.fromkeys(from_file, str(file)) | {name: PREFIX + name.upper() for name in environment}
    settings = from_file | environment | dict(code)
    _check(settings, origins | dict.fromkeys(code, source), retention)
    return settings


def config_of(owner: type, knobs: Mapping[str, Any], retention: str) -> Config:
    """Returns the Config of the keyword arguments of ``owner``, a class whose framework keeps and removes checkpoints.

    Raises ConfigError, which proposes ``retention`` instead of ``keep_last``."""
    for field in dataclasses.fields(Config):
        if field.name in RETENTION and knobs.get(field.name, field.default) != field.default:
            raise ConfigError(f"{field.name}: {retention}")
    config = Config.of(knobs, owner.__name__)
    check_mirrors(config.mirrors)
    return config


def check_mirrors(given: Any) -> None:
    """Raises ConfigError."""
    if given:
        from lazyckpt.tiers.mirror import mirrors_of  # here: nothing is imported without mirrors

        mirrors_of(given)


def _check(settings: Mapping[str, Any], origins: Mapping[str, str], retention: str) -> None:
    """Raises ConfigError unless these settings can be used together; ``origins`` says where each was found."""
    for name, value in settings.items():
        if name in RETENTION:
            raise ConfigError(f"{origins[name]}: {name}: {retention}")
        if name not in DEFAULTS:
            raise ConfigError(f"{origins[name]}: {name!r} is not a setting; {hint(name, DEFAULTS)}")
        if isinstance(DEFAULTS[name], bool) and not isinstance(value, bool):
            raise ConfigError(f"{origins[name]}: {name}={value!r}: expected true or false")
    try:
        check_mirrors(settings.get("mirrors"))
    except ConfigError as error:
        raise ConfigError(f"{error} (set in {origins['mirrors']})") from None
    try:
        check_writers(settings.get("writers"))
        Config(**{name: value for name, value in settings.items() if name not in _OF_ENABLE})
    except ConfigError as error:
        wrong = [origins[name] for name in settings if name in str(error)]
        raise ConfigError(f"{error} (set in {', '.join(dict.fromkeys(wrong))})") from None


def _parse(name: str, text: str) -> Any:
    """Converts the text of a variable to the type of its setting, if it can; ``_check`` complains otherwise."""
    text = text.strip()
    if isinstance(DEFAULTS[name], bool) or name == "direct_io":
        return _WORDS.get(text.lower(), text)
    if name == "mirrors":
        from lazyckpt.tiers.mirror import spelled

        try:
            return spelled(text)
        except ConfigError as error:
            raise ConfigError(f"{error} (set in {PREFIX}MIRRORS)") from None
    kind = float if isinstance(DEFAULTS[name], float) else int
    try:
        return kind(text)
    except ValueError:
        return text


def _read_file(path: Path) -> dict[str, Any]:
    """The contents of a settings file, unchecked; empty if there is none. Raises ConfigError if it cannot be read."""
    text = _read_text(path)
    if text is None:
        return {}
    yaml = _yaml()
    try:
        contents = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if contents is None:
        return {}
    if not isinstance(contents, dict) or not all(isinstance(name, str) for name in contents):
        raise ConfigError(f"{path}: expected one 'setting: value' per line")
    return contents


def _read_text(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        what = f"cannot be read: {error.strerror} ({error.errno}); {FILE_VARIABLE} names another file"
        raise ConfigError(f"{path}: {what}") from error


def _read_environment() -> dict[str, Any]:
    variables = {PREFIX + name.upper(): name for name in DEFAULTS}
    for variable in os.environ:
        if variable.startswith(PREFIX) and variable not in (*variables, FILE_VARIABLE):
            # Other programs may use the prefix, too; but a typing error must not go unnoticed.
            for meant in difflib.get_close_matches(variable, variables, n=1, cutoff=0.85):
                raise ConfigError(f"{variable} is not a setting; did you mean {meant}?")
    return {name: _parse(name, os.environ[variable]) for variable, name in variables.items() if variable in os.environ}


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError("a settings file needs PyYAML: pip install pyyaml") from error
    return yaml
