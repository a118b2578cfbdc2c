"""The command line. It parses arguments, calls ``lazyckpt.tools``, prints the result and picks the exit code.

Each command has its own module; ``parameters`` and ``output`` are shared. Only this package imports typer and rich.
"""

from __future__ import annotations

import os
import platform
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from lazyckpt._version import __version__
from lazyckpt.cli import advise, bench, convert, copies, diff, doctor, inspect, ls, prune, trace, verify
from lazyckpt.cli.output import print_error, print_json
from lazyckpt.cli.parameters import flag
from lazyckpt.errors import ConfigError, LazyCkptError
from lazyckpt.storage import paths

_EXIT_TROUBLE = 2
_EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE, as a shell reports it
_REMOVED = {
    "accelerate": "its questions were dropped, since the file that it wrote has one 'setting: value' per line. Write "
    "lazyckpt.yaml beside accelerate's default_config.yaml, or set LAZYCKPT_* variables: see docs/accelerate.md",
}
_TAKE_URLS = ("ls", "inspect", "verify", "diff", "prune", "pin", "unpin", "push", "pull", "doctor")
_DEBUG = "--debug"
_JSON = "--json"
# click's class, which typer has kept in different places
_USAGE_ERROR = cast(type[Exception], typer.BadParameter.__mro__[1])


class _Program(TyperGroup):
    """Reports an error as one line on stderr, and with --json as an object on stdout. Ends quietly if the reader of
    its output has gone away."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if why := _REMOVED.get(args[0]):
            raise ConfigError(f"lazyckpt {args[0]}: {why}")
        for arg in args if args[0] not in _TAKE_URLS else ():
            paths.refuse_url(arg)
        return super().resolve_command(ctx, args)

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        """Accepts ``--debug`` before the command and behind it."""
        options = args[: args.index("--")] if "--" in args else args
        self._debug = _DEBUG in options
        self._json = _JSON in options
        kept = [word for word in options if word != _DEBUG] + args[len(options) :]
        return super().make_context(info_name, kept, *rest, **extra)

    def invoke(self, ctx: Any) -> Any:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # show ? where a terminal has no UTF-8
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            _discard_output()
            raise typer.Exit(_EXIT_BROKEN_PIPE) from None
        except typer.Exit:
            raise
        except _USAGE_ERROR as error:
            if self._json:
                print_json({"error": cast(Any, error).format_message()})
            raise
        except Exception as error:
            if self._debug:
                traceback.print_exc()
            print_error(_in_words(error))
            try:
                if self._json:
                    print_json({"error": _in_words(error)})
                sys.stdout.flush()
            except OSError:  # most likely the cause of the error
                _discard_output()
            raise typer.Exit(_EXIT_TROUBLE) from error


def _discard_output() -> None:
    """Discards buffered output, or the interpreter would complain when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _in_words(error: Exception) -> str:
    if isinstance(error, LazyCkptError | ImportError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        if error.errno is not None and error.strerror == os.strerror(error.errno):
            return f"{where}{error.strerror} ({error.errno})"
        return f"{where}{error.strerror or error}"
    return f"{type(error).__name__}: {error} (a bug in lazyckpt; {_DEBUG} shows where)"


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # importing torch takes seconds

        typer.echo(f"lazyckpt {__version__} (torch {version('torch')}, Python {platform.python_version()})")
        raise typer.Exit


app = typer.Typer(
    cls=_Program,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _main(
    version: Annotated[
        bool, flag("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, flag(_DEBUG, help="Show where an error comes from. Also works behind the command.")] = False,
) -> None:
    """Inspect, verify, compare, convert and prune checkpoints: torch.save archives, safetensors files and runs."""


_commands: list[Callable[..., None]] = [ls.ls, inspect.inspect, verify.verify, diff.diff, convert.convert]
_commands += [
    prune.prune,
    prune.pin,
    prune.unpin,
    copies.push,
    copies.pull,
    advise.advise,
    trace.trace,
    doctor.doctor,
    bench.bench,
]
for _command in _commands:
    app.command(_command.__name__)(_command)
