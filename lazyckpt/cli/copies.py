"""``lazyckpt push`` and ``pull``: copy a checkpoint from a run's folder to a URL, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lazyckpt.cli.output import print_json, progress, say
from lazyckpt.cli.parameters import AsJson, RunFolder, path_argument, placed
from lazyckpt.errors import ConfigError
from lazyckpt.stores.store import AnyPath
from lazyckpt.tools import remote
from lazyckpt.tools.units import plain

Step = Annotated[int | None, typer.Option(metavar="STEP", min=0, help="The step; without it, the newest.")]


def push(
    directory: RunFolder,
    url: Annotated[Path, path_argument("URL", "s3://bucket/run, gs://…, az://…, or a folder.")],
    step: Step = None,
    as_json: AsJson = False,
) -> None:
    """Upload the newest checkpoint of a run's folder, or that of a step.

    The copy appears when all its files are there. Each is compared with its checksum on the way.
    """
    if not isinstance(placed(directory), Path):
        raise ConfigError("push copies from a folder; pull copies from a URL")
    with progress() as report:
        _tell(remote.push(directory, placed(url), step=step, progress=report), as_json)


def pull(
    url: Annotated[Path, path_argument("URL", "s3://bucket/run, gs://…, az://…, or a folder.")],
    directory: RunFolder,
    step: Step = None,
    as_json: AsJson = False,
) -> None:
    """Download the newest checkpoint of a run, or that of a step, into a run's folder.

    It appears there when it is durable and every checksum has matched.
    """
    if not isinstance(placed(directory), Path):
        raise ConfigError("pull copies into a folder; push copies to a URL")
    with progress() as report:
        _tell(remote.pull(placed(url), directory, step=step, progress=report), as_json)


def _tell(copy: AnyPath, as_json: bool) -> None:
    if as_json:
        print_json({"path": copy})
    else:
        say(f"{plain(copy)} is there")
