"""``lazyckpt accelerate config``: asks a few questions, and writes the settings for training under accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lazyckpt import settings
from lazyckpt.cli.output import say
from lazyckpt.cli.parameters import flag
from lazyckpt.errors import ConfigError
from lazyckpt.tools.units import plain

app = typer.Typer(no_args_is_help=True)

_QUESTIONS = {
    "enabled": "Save checkpoints lazily and durably?",
    "host_buffer_bytes": 'Bytes of the staging buffer in host memory, or "auto" (at most a quarter of what is free)?',
    "max_in_flight": "How many checkpoints may be on their way to the disk at once?",
    "durability": 'Return while the disk still writes ("async"), or make the next step wait for it ("before_step")?',
    "on_error": 'When a checkpoint fails in the background: "raise" at the next save_state, or "warn" and go on?',
}


@app.callback()
def _group() -> None:
    """Settings for training with Hugging Face Accelerate."""


@app.command()
def config(
    default: Annotated[bool, flag("--default", help="Ask nothing; write the defaults to a new file.")] = False,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config-file",
            "--config_file",
            metavar="FILE",
            help="Write this file instead of lazyckpt.yaml beside accelerate's own.",
        ),
    ] = None,
) -> None:
    """Ask how to save checkpoints, and write the answers for 'accelerate launch -m lazyckpt.run'.

    An existing file supplies the defaults, and keeps its other settings. LAZYCKPT_CONFIG_FILE tells the launcher where
    the file is, if not in its default place.
    """
    if config_file is None:
        from lazyckpt.integrations.accelerate import default_settings_file  # imports accelerate, which takes seconds

        config_file = default_settings_file()
    known = settings.read_file(config_file)
    if default and config_file.exists():
        raise ConfigError(f"{config_file}: exists already; remove it, or leave out --default to change it")
    settings.check(known, dict.fromkeys(known, str(config_file)))
    for name, question in _QUESTIONS.items():
        current = known.get(name, settings.DEFAULTS[name])
        known[name] = current if default else _ask(name, question, current, known)
    settings.write_file(config_file, known)
    say(f"lazyckpt configuration saved at {plain(config_file)}")


def _ask(name: str, question: str, current: Any, known: dict[str, Any]) -> Any:
    """Asks until the answer is valid."""

    def convert(text: str) -> Any:
        value = settings.parse(name, str(text))
        try:
            settings.check({**known, name: value}, dict.fromkeys([*known, name], "the answer"))
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from error
        return value

    shown = ("yes" if current else "no") if isinstance(current, bool) else str(current)
    return typer.prompt(question, default=shown, value_proc=convert)
