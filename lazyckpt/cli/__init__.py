"""The command line: what is in a folder, what is in a file, whether it is whole, what this machine offers.

One module per command; ``tree`` turns a saved object into what ``inspect`` shows, ``output`` is how anything is
shown. Nothing here runs code from a file. Only this package imports typer and rich.
"""

from __future__ import annotations

import os
import platform
import sys
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperGroup

import lazyckpt
from lazyckpt.cli import accelerate, advise, doctor, inspect, ls, trace, verify
from lazyckpt.cli.output import print_error
from lazyckpt.errors import LazyCkptError

_EXIT_UNREADABLE = 2
_EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE, what a shell reports of a program that ignored nothing


class _OneLineErrors(TyperGroup):
    """Expected failures are one line on stderr, and a reader that went away ends the program quietly."""

    def invoke(self, ctx: Any) -> Any:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? instead of failing
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # What is still buffered goes nowhere, or the interpreter would complain when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(_EXIT_BROKEN_PIPE) from None
        except LazyCkptError as error:
            print_error(str(error))
            raise typer.Exit(_EXIT_UNREADABLE) from error
        except OSError as error:
            where = f"{error.filename}: " if error.filename is not None else ""
            print_error(f"{where}{error.strerror or error}")
            raise typer.Exit(_EXIT_UNREADABLE) from error


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lazyckpt {lazyckpt.__version__} (torch {torch.__version__}, Python {platform.python_version()})")
        raise typer.Exit


app = typer.Typer(
    cls=_OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Look into checkpoints: torch.save archives, safetensors files, and the folders that lazyckpt writes."""


app.command("ls")(ls.ls)
app.command("inspect")(inspect.inspect)
app.command("verify")(verify.verify)
app.command("advise")(advise.advise)
app.command("trace")(trace.trace)
app.command("doctor")(doctor.doctor)
app.add_typer(accelerate.app, name="accelerate")
