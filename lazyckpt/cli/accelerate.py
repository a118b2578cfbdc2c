"""``lazyckpt accelerate config``: asks a few questions and writes what training under accelerate then does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from lazyckpt import settings
from lazyckpt.cli.flags import Command, Group
from lazyckpt.cli.output import plain, print_error, prose, stdout
from lazyckpt.errors import ConfigError

app = typer.Typer(cls=Group, no_args_is_help=True, help="Settings for training with Hugging Face Accelerate.")

_QUESTIONS = {
    "enabled": "Save checkpoints lazily and durably?",
    "host_buffer_bytes": 'Bytes of host memory for staging, or "auto" (what a checkpoint needs, at most a quarter)?',
    "max_in_flight": "How many checkpoints may be on their way to the disk at once?",
    "durability": 'Return while the disk still writes ("async"), or let the next step wait for it ("before_step")?',
    "on_error": 'When a checkpoint fails in the background: "raise" at the next save_state, or "warn" and go on?',
}


@app.callback()
def _group() -> None:
    """Settings for training with Hugging Face Accelerate."""


def config(
    default: Annotated[bool, typer.Option("--default", help="Ask nothing; write the defaults to a new file.")] = False,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config-file",
            "--config_file",
            metavar="FILE",
            help="Instead of lazyckpt.yaml beside accelerate's default_config.yaml.",
        ),
    ] = None,
) -> None:
    """Ask how checkpoints are to be saved, and write it down for 'accelerate launch -m lazyckpt.run'.

    An existing file gives the defaults of the questions; settings in it that are not asked for stay. If it is
    elsewhere, LAZYCKPT_CONFIG_FILE names it to the launcher.
    """
    try:
        path = config_file or _default_file()
        known = settings.read_file(path)
    except ImportError as error:
        print_error(str(error))
        raise typer.Exit(2) from error
    if default and path.exists():
        raise ConfigError(f"{path}: exists already; remove it, or leave out --default to change it")
    settings.check(known, dict.fromkeys(known, str(path)))
    for name, question in _QUESTIONS.items():
        current = known.get(name, settings.DEFAULTS[name])
        known[name] = current if default else _ask(name, question, current, known)
    settings.write_file(path, known)
    stdout().print(Text(f"lazyckpt configuration saved at {plain(path)}"), soft_wrap=True)


app.command(help=prose(config.__doc__), cls=Command)(config)


def _default_file() -> Path:
    from lazyckpt.integrations.accelerate import default_settings_file  # imports accelerate, which takes seconds

    return default_settings_file()


def _ask(name: str, question: str, current: Any, known: dict[str, Any]) -> Any:
    """Again until the answer makes sense."""

    def convert(text: str) -> Any:
        value = settings.parse(name, str(text))
        try:
            settings.check({**known, name: value}, dict.fromkeys([*known, name], "the answer"))
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from error
        return value

    shown = {True: "yes", False: "no"}.get(current, current) if isinstance(current, bool) else current
    return typer.prompt(question, default=str(shown), value_proc=convert)
