"""``lazyckpt convert``: converts between standard formats, and prints what it wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from lazyckpt.cli.output import print_json, progress, say
from lazyckpt.cli.parameters import AsJson, Found, completed_from, path_argument, quantity
from lazyckpt.errors import ConfigError
from lazyckpt.tools.contents import document_in, read
from lazyckpt.tools.units import count, plain, size

_MAX_PARTS = 100  # to look into for the shell


def _parts(src: Path) -> Found:
    """Finds the dicts that --key can name."""
    todo = [("", read(document_in(src)).obj)]
    for prefix, obj in todo:
        for key, value in obj.items() if isinstance(obj, Mapping) else ():
            if isinstance(key, str) and isinstance(value, Mapping):
                yield f"{prefix}{key}", count(len(value), "entry", "entries")
                if len(todo) < _MAX_PARTS:
                    todo.append((f"{prefix}{key}.", value))


def _renaming(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r}: expected OLD=NEW", param_hint="--rename")
    return old, new


def convert(
    src: Annotated[Path, path_argument("SRC", "A file, an index of shards, a checkpoint or a folder.")],
    dst: Annotated[Path, path_argument("DST", "A new .safetensors or .pt file, or a new folder.")],
    key: Annotated[
        str | None,
        typer.Option(help="Take only this part of the file, e.g. model.", autocompletion=completed_from("src", _parts)),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Take only entries that match, e.g. 'encoder.*'; repeat."),
    ] = None,
    strip_prefix: Annotated[
        str | None, typer.Option(metavar="PREFIX", help="Take a prefix off all names, e.g. module.")
    ] = None,
    rename: Annotated[
        list[str] | None, typer.Option(metavar="OLD=NEW", help="Replace a prefix of names; repeat.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Convert floating-point tensors, e.g. to bfloat16.")
    ] = None,
    max_shard_size: Annotated[
        Any, quantity("SIZE", "Write a folder of files of at most this size, e.g. 5GB, and their index.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert between torch.save archives, safetensors files, one or several of either, and folders of
    torch.distributed.checkpoint (DCP).

    Streams the tensors, so that memory holds only the largest one, and compares every checksum in SRC. DST appears when
    it is whole and durable. Runs no code from SRC, and refuses anything but tensors and plain values.

    safetensors holds only named tensors; --key takes them out of a checkpoint. A tied weight is written once. Its other
    names go into the metadata, as safetensors' own save_model writes them, and are tied again on the way back.

    With --max-shard-size, DST is a new folder of safetensors files; archives go to DIR/pytorch_model.bin. Otherwise a
    DST without a suffix is a new folder of DCP.
    """
    import torch  # which takes seconds

    from lazyckpt.tools import convert as tool

    prefixes = dict(map(_renaming, rename or ())) | ({} if strip_prefix is None else {strip_prefix: ""})
    target = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not isinstance(target, torch.dtype):
        raise typer.BadParameter(f"{dtype!r} is no dtype of torch, such as bfloat16", param_hint="--dtype")
    max_shard_bytes = None if max_shard_size is None else int(max_shard_size)
    if max_shard_bytes == 0:
        raise ConfigError("--max-shard-size: expected at least one byte")
    with progress() as report:
        found = tool.convert(
            src,
            dst,
            key=key,
            only=only or None,
            rename=prefixes or None,
            dtype=target,
            max_shard_bytes=max_shard_bytes,
            progress=report,
        )
    if as_json:
        print_json(asdict(found))
        return
    facts = f"  {count(found.records, 'storage')}, {size(found.bytes)}"
    if max_shard_size is not None:
        facts += f" in {count(len(found.files), 'file')}"
    parts: list[str | tuple[str, str]] = [("written", "green"), "  ", (plain(found.path), "bold"), facts]
    if found.without_checksum:
        missing = count(found.without_checksum, "record")
        parts.append((f"\n    {missing} without a checksum: not compared", "yellow"))
    if found.tied:
        parts.append(f"\n    tied: {plain(', '.join(f'{name} = {kept}' for name, kept in found.tied.items()))}")
    if found.metadata_left_out:
        names = plain(", ".join(found.metadata_left_out))
        parts.append((f"\n    left out, since torch.save has no place for it: {names}", "yellow"))
    say(*parts)
