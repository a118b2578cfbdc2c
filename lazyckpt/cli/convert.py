"""``lazyckpt convert``: from one standard format to another, whatever the size."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from lazyckpt.cli.completion import Found, completed_from
from lazyckpt.cli.flags import path_argument
from lazyckpt.cli.output import count, plain, print_json, progress, size, stdout
from lazyckpt.errors import ConfigError, NoSpaceError, save_error
from lazyckpt.storage import commit, folders
from lazyckpt.tools.contents import SUFFIXES, document_in, read

if TYPE_CHECKING:
    import torch

    from lazyckpt.pipeline.plan import FilePlan
    from lazyckpt.tools.hollow import Hollow

_MAX_PARTS = 100  # that are looked into for the shell
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{i}B": (1024 if i else 1000) ** power for power, prefix in enumerate("KMGT", 1) for i in ("", "i")
}


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text)
    unit = match and {name.upper(): factor for name, factor in _UNITS.items()}.get(match[2].upper())
    if not match or not unit or (nbytes := int(float(match[1]) * unit)) < 1:
        raise typer.BadParameter(f"{text!r} is not a size: 5GB, 500MB, 2GiB")
    return nbytes


def _parts(src: Path) -> Found:
    """What ``--key`` may be: dicts in dicts."""
    todo = [("", read(document_in(src)).obj)]
    for prefix, obj in todo:
        for key, value in obj.items() if isinstance(obj, Mapping) else ():
            if isinstance(key, str) and isinstance(value, Mapping):
                yield f"{prefix}{key}", count(len(value), "entry", "entries")
                if len(todo) < _MAX_PARTS:
                    todo.append((f"{prefix}{key}.", value))


def convert(
    src: Annotated[Path, path_argument("SRC", "A file, an index of shards, a checkpoint or a folder.")],
    dst: Annotated[Path, path_argument("DST", "A new .safetensors or .pt file; for shards a new folder.")],
    key: Annotated[
        str | None,
        typer.Option(
            help="Take only this part of what is saved, e.g. model.", autocompletion=completed_from("src", _parts)
        ),
    ] = None,
    max_shard_size: Annotated[
        Any,
        typer.Option(
            metavar="SIZE",
            parser=_parse_size,
            help="Write a folder of files of at most this size, e.g. 5GB, and their index.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Convert between torch.save archives and safetensors files, one or several of either.

    Tensors are streamed, so the memory this takes is that of the largest one. Every checksum in SRC is compared on the
    way. DST appears under its name when it is whole and durable. Runs no code from SRC: what is neither a tensor nor a
    plain value is refused. safetensors holds named tensors and nothing else; --key takes them out of a checkpoint. A
    tensor with several names, a tied weight, is held once; the other names stand in the metadata, as safetensors' own
    save_model has it, and are tied again on the way back.

    With --max-shard-size, DST is a new folder of safetensors files; archives go to DIR/pytorch_model.bin.
    """
    from lazyckpt.pipeline.plan import plan_for
    from lazyckpt.tools.hollow import Hollow  # imports torch, which takes seconds

    sharded, name = max_shard_size is not None, dst.name
    if sharded:  # into a folder, in which DST may name what the model would be in one file
        dst, name = (dst.parent, dst.name) if dst.suffix in SUFFIXES else (dst, "model.safetensors")
    contents = read(document_in(src))
    if os.path.lexists(dst):
        hint = f"; shards are written into a new folder: DIR or DIR/{name}" if sharded else ""
        raise ConfigError(f"{dst}: exists already{hint}")
    obj = contents.obj if key is None else _part(contents.obj, key, contents.file)
    loader = Hollow(contents.file)
    if to_safetensors := name.endswith(".safetensors"):
        saved, ties = loader.tensors(obj)
    elif Path(name).suffix in SUFFIXES:
        ties = _ties_in(obj, contents.metadata or {}) if key is None else {}
        whole = obj | {tied: obj[kept] for tied, kept in ties.items()} if ties else obj
        if sharded:
            loader.check_named(whole, "a folder of shards")
        saved = loader.whole(whole)
    else:
        raise ConfigError(f"{dst}: give it a name that ends in .safetensors or .pt, or --max-shard-size for a folder")
    files, index = _shards(saved, name, max_shard_size) if sharded else ({name: saved}, {})
    metadata = (contents.metadata or {"format": "pt"}) | ties
    plans = {file: plan_for(file, part, metadata) for file, part in files.items()}
    _write(dst, plans, index, loader, folder=sharded)
    written = sorted(dst.iterdir()) if sharded else [dst]
    nbytes = sum(file.stat().st_size for file in written)
    unchecked = sum(record.crc32 is None for record in loader.records.values())
    left_out = [] if to_safetensors else sorted((contents.metadata or {}).keys() - {"format", *ties})
    if as_json:
        about = {"path": str(dst), "files": [file.name for file in written], "bytes": nbytes}
        print_json(
            about
            | {
                "records": len(loader.records),
                "without_checksum": unchecked,
                "metadata_left_out": left_out,
                "tied": ties,
            }
        )
        return
    facts = f"{count(len(loader.records), 'storage')}, {size(nbytes)}" + f" in {count(len(written), 'file')}" * sharded
    text = Text.assemble(("written", "green"), "  ", (plain(dst), "bold"), f"  {facts}")
    if unchecked:
        text.append(f"\n    {count(unchecked, 'record')} without a checksum: not compared", style="yellow")
    if ties:
        text.append(f"\n    tied: {plain(', '.join(f'{name} = {kept}' for name, kept in ties.items()))}")
    if left_out:
        text.append(
            f"\n    left out, since torch.save has no place for it: {plain(', '.join(left_out))}", style="yellow"
        )
    stdout().print(text, soft_wrap=True)


def _ties_in(obj: Any, metadata: Mapping[str, str]) -> dict[str, str]:
    """What a safetensors file says of tensors with several names: the one it has, by each that it has not."""
    return {name: kept for name, kept in metadata.items() if kept in obj and name not in obj}


def _part(obj: Any, key: str, file: Path) -> Any:
    """``obj["a"]["b"]`` for a.b; a key that holds the dot itself goes first."""
    if isinstance(obj, Mapping):
        for head, rest in [(key, "")] + [(key[:i], key[i + 1 :]) for i, c in enumerate(key) if c == "."]:
            if head in obj:
                return _part(obj[head], rest, file) if rest else obj[head]
        there = ", ".join(map(str, list(obj)[:10])) + (", …" if len(obj) > 10 else "")
        raise ConfigError(f"{file}: there is no {key!r}; there is: {there or 'nothing'}")
    raise ConfigError(f"{file}: there is no {key!r}: what would hold it is not a dict")


def _shards(
    tensors: dict[str, torch.Tensor], model: str, max_bytes: int
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, str]]:
    """The files of a folder, named and filled as Hugging Face does it; and the index, if there are several. Tensors
    that share a storage are in one file, which has it once."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    homes: dict[int, dict[str, torch.Tensor]] = {}  # of storages
    held = total = 0
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if (home := homes.get(storage._cdata)) is not None:
            home[name] = tensor
            continue
        total += storage.nbytes()
        if storage.nbytes() > max_bytes:  # by itself, without an end to the shard that is being filled
            shards.insert(len(shards) - 1, {})
            home = shards[-2]
        else:
            if held + storage.nbytes() > max_bytes:
                shards.append({})
                held = 0
            home = shards[-1]
            held += storage.nbytes()
        home[name] = tensor
        homes[storage._cdata] = home
    if len(shards) > 1 and not shards[-1]:
        shards.pop()
    if len(shards) == 1:
        return {model: shards[0]}, {}
    stem, suffix = os.path.splitext(model)
    files = {f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}": shard for number, shard in enumerate(shards, 1)}
    places = {name: file for file, shard in files.items() for name in shard}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    return files, {f"{model}.index.json": json.dumps(index, indent=2, sort_keys=True) + "\n"}


def _write(dst: Path, plans: dict[str, FilePlan], texts: dict[str, str], loader: Hollow, *, folder: bool) -> None:
    """``dst`` appears when all of it is durable. Raises SaveError."""
    from lazyckpt.tools import stream

    nbytes = sum(record.nbytes for record in loader.records.values())
    try:
        if (free := folders.free_bytes(dst.absolute().parent)) < nbytes:
            raise NoSpaceError(f"needs {nbytes} bytes, {free} are free", path=dst)
        staging = commit.Staging(dst) if folder else commit.FileStaging(dst)
        try:
            with progress() as bar:
                task = bar.add_task(plain(dst), total=nbytes)
                files = {staging.path / name: plan for name, plan in plans.items()}
                stream.write(files, loader.origins, lambda done: bar.advance(task, done))
            for name, text in texts.items():
                (staging.path / name).write_text(text)
            staging.describe(None, plans)
            staging.publish()
        except BaseException:
            staging.discard()
            raise
    except OSError as error:
        raise save_error(error, path=dst) from error
