"""Folders of torch.distributed.checkpoint whose ``.metadata`` is not what its writer would make of the files."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lazyckpt
from attacks import attack, register
from attacks.folders import becomes_a_fifo, becomes_a_folder, leads_to_a_device, leads_to_the_secret, outside
from attacks.pickles import PROTO, STOP, archive, call
from lazyckpt.storage.manifest import checksum

FILE = "__0_0.distcp"


def folder_of(folder: Path) -> Path:
    """A folder of DCP as a checkpoint of a run, and the same without a manifest beside it."""
    path = folder / "run" / "step-00000001"
    path.parent.mkdir()
    state = {"model": {"weight": torch.ones(2, 2), "bias": torch.ones(2)}, "x": {"t": torch.arange(6), "n": (1, 2)}}
    torch.save(state, folder / "made.pt")
    lazyckpt.convert(folder / "made.pt", path)
    (folder / "made.pt").unlink()
    return path


def published(path: Path) -> Path:
    """Writes the manifest that fits the files, and copies the folder to where no manifest is."""
    files = []
    for file in sorted(path.iterdir()):
        data = file.read_bytes() if file.is_file() and not file.is_symlink() else b""
        files.append({"name": file.name, "bytes": len(data), "crc32": f"{zlib.crc32(data):08x}", "writers": [0]})
    told = {"format": 1, "sequence": 1, "parent": None, "step": 1, "created": "2025-01-31T12:00:00", "files": files}
    plain = path.parent / "plain"
    shutil.copytree(path, plain, symlinks=True, copy_function=shutil.copy2, ignore=_pipes)
    (path / "manifest.json").write_text(json.dumps({**told, "crc32": checksum(told)}))
    return path.parent


def _pipes(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if os.path.exists(f"{folder}/{name}") and not _is_plain(f"{folder}/{name}")]


def _is_plain(path: str) -> bool:
    return os.path.isfile(path) or os.path.isdir(path)


def hostile(name: str, sentence: str, change: Callable[[Any], None]) -> None:
    """``change`` alters the metadata, which is then pickled as DCP does."""

    def make(folder: Path) -> Path:
        path = folder_of(folder)
        metadata = pickle.loads((path / ".metadata").read_bytes())
        change(metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        return published(path)

    register(make, f"sharded.{name}", sentence)


def item(metadata: Any, name: str = "x.t") -> Any:
    (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == name)
    return info


def placed(**facts: Any) -> Callable[[Any], None]:
    return lambda metadata: vars(item(metadata)).update(facts)


def tensor(change: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda metadata: change(metadata.state_dict_metadata["x.t"])


def at(path: Any, name: str = "x.t") -> Callable[[Any], None]:
    return lambda metadata: metadata.planner_data.update({name: path})


def overlap(metadata: Any) -> None:
    one, other = item(metadata, "model.weight"), item(metadata)
    other.offset, other.length = one.offset + 8, one.length


def cut(*chunks: tuple[Any, Any], size: Any = (6,)) -> Callable[[Any], None]:
    """Describes the tensor by other chunks, each of which has an item."""

    def change(metadata: Any) -> None:
        described = metadata.state_dict_metadata["x.t"]
        first, info = next((index, info) for index, info in metadata.storage_data.items() if index.fqn == "x.t")
        like = described.chunks[0]
        described.size, described.chunks = torch.Size(size), []
        for offsets, sizes in chunks:
            described.chunks.append(type(like)(offsets, sizes))
            metadata.storage_data[type(first)("x.t", torch.Size(offsets))] = info

    return change


hostile("names_parent", "A file above the folder.", placed(relative_path="../../outside/secret"))
hostile("names_absolute", "A file with an absolute name.", placed(relative_path="/etc/hostname"))
hostile("names_dots", "The folder above, as a file.", placed(relative_path=".."))
hostile("names_itself", "The folder itself, as a file.", placed(relative_path="."))
hostile("names_nul", "A name that ends early for readers in C.", placed(relative_path=f"{FILE}\0x"))
hostile("names_a_number", "A name that is a number.", placed(relative_path=0))
hostile("names_nothing", "No name.", placed(relative_path=None))
hostile("names_the_metadata", "The index itself as a file of items.", placed(relative_path=".metadata"))
hostile("names_long", "A name that no file system takes.", placed(relative_path="a" * 5000))
hostile("names_escapes", "A name that clears the screen.", placed(relative_path="\x1b[2J\x1b]0;owned\x07"))
hostile("offset_negative", "An item before the file.", placed(offset=-4096))
hostile("offset_huge", "An item behind all files.", placed(offset=1 << 62))
hostile("offset_of_64_bits", "An offset that overflows.", placed(offset=(1 << 64) - 4096))
hostile("offset_true", "An offset that is true, which is 1.", placed(offset=True))
hostile("length_negative", "An item of negative length.", placed(length=-1))
hostile("length_huge", "An item longer than the file.", placed(length=1 << 62))
hostile("length_zero", "An item without bytes.", placed(length=0))
hostile("items_overlap", "An item that reaches into another one.", overlap)
hostile("size_huge", "A tensor of petabytes.", tensor(lambda t: setattr(t, "size", torch.Size([1 << 50]))))
hostile(
    "size_overflows", "More elements than 63 bits.", tensor(lambda t: setattr(t, "size", torch.Size([1 << 40] * 3)))
)
hostile("size_of_texts", "Sizes that are texts.", tensor(lambda t: setattr(t, "size", ("6",))))
hostile("size_of_many", "A tensor of 100,000 dimensions.", tensor(lambda t: setattr(t, "size", (1,) * 100_000)))
hostile("no_chunks", "A tensor whose memory no chunk fills.", tensor(lambda t: t.chunks.clear()))
hostile("chunks_none", "Chunks that are none.", tensor(lambda t: setattr(t, "chunks", None)))
hostile("dtype_none", "A tensor without a dtype.", tensor(lambda t: setattr(t.properties, "dtype", torch.Size([1]))))
hostile("chunks_overlap", "Two chunks that share elements, so others are in none.", cut(((0,), (4,)), ((2,), (2,))))
hostile("chunks_twice", "One chunk twice, so the others are in none.", cut(((0,), (3,)), ((0,), (3,))))
hostile("chunks_outside", "A chunk behind the tensor.", cut(((6,), (6,))))
hostile("chunks_negative", "A chunk before the tensor.", cut(((-6,), (12,))))
hostile("chunks_huge", "A chunk that no item of this length holds.", cut(((0,), (1 << 40,)), size=(1 << 40,)))
hostile("chunks_many", "One item as thousands of chunks.", cut(*(((i,), (1,)) for i in range(5_000)), size=(5_000,)))
hostile("paths_empty", "An entry that is the whole state.", at(()))
hostile("paths_text", "A path that is a text.", at("x.t"))
hostile("paths_deep", "A path of a hundred thousand steps.", at(("x",) * 100_000))
hostile("paths_far", "A list of a trillion entries.", at(("x", 1 << 40)))
hostile("paths_negative", "A list that begins before its begin.", at(("x", -1)))
hostile("paths_inside", "An entry inside another one.", at(("x", "n", "t")))
hostile("paths_twice", "Two entries in one place.", at(("x", "n")))
hostile("names_of_entries", "A name that clears the screen.", at(("x", "\x1b[2J\x1b]0;owned\x07")))


@attack
def metadata_is_a_gadget(folder: Path) -> Path:
    """The index calls os.system."""
    path = folder_of(folder)
    (path / ".metadata").write_bytes(PROTO + call("os.system", f"touch '{folder / 'canary'}'") + STOP)
    return published(path)


@attack
def an_object_is_a_gadget(folder: Path) -> Path:
    """An item whose pickle calls os.system."""
    path = folder_of(folder)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    made = archive(folder, PROTO + call("os.system", f"touch '{folder / 'canary'}'") + STOP)
    data = made.read_bytes()
    made.unlink()
    info = item(metadata, "x.n")
    with open(path / FILE, "ab") as file:
        info.offset, info.length = file.tell(), len(data)
        file.write(data)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return published(path)


def table_of(nbytes: int, crcs: bytes | None = None, end: int = 0) -> Callable[[Path], Path]:
    """Behind a tensor of two segments, a table of segments of ``nbytes``. ``end``: bytes that are cut off behind it."""

    def make(folder: Path) -> Path:
        path = folder / "run" / "step-00000001"
        path.parent.mkdir()
        torch.save({"model": {"weight": torch.ones(300_000)}}, folder / "made.pt")
        lazyckpt.convert(folder / "made.pt", path)
        (folder / "made.pt").unlink()
        data = (path / FILE).read_bytes()
        at = data.index(b"lazyckpt crc32s ") + 16
        table = crcs or data[at + 8 : at + 16]
        (path / FILE).write_bytes(data[:at] + struct.pack("<Q", nbytes) + table[: len(table) - end])
        return published(path)

    return make


register(table_of(0), "sharded.table_of_nothing", "A table of segments of no bytes.")
register(table_of(1 << 63), "sharded.table_of_all", "A table of segments of exabytes.")
register(table_of(4096), "sharded.table_of_many", "A table of more segments than the file has bytes for.")
register(table_of(1 << 20, bytes(8)), "sharded.table_of_lies", "A table of other checksums than the record's.")
register(table_of(1 << 20, end=1), "sharded.table_cut_off", "A table that the end of the file cuts.")


@attack
def metadata_is_nested(folder: Path) -> Path:
    """A key nested a million times: to hash it ends the process."""
    path = folder_of(folder)
    (path / ".metadata").write_bytes(b"\x80\x04})" + b"\x85" * 1_000_000 + b"K\1s.")
    return published(path)


@attack
def metadata_hashes_for_ever(folder: Path) -> Path:
    """A key of pairs of pairs, each of one object twice."""
    path = folder_of(folder)
    (path / ".metadata").write_bytes(b"\x80\x04})" + b"2\x86" * 90 + b"K\1s.")
    return published(path)


@attack
def metadata_has_a_large_memo(folder: Path) -> Path:
    """An index of a few bytes that makes room for a billion objects."""
    path = folder_of(folder)
    (path / ".metadata").write_bytes(b"\x80\x04Nr" + struct.pack("<I", 1 << 30) + b".")
    return published(path)


@attack
def metadata_copies_a_list(folder: Path) -> Path:
    """Ten thousand sizes made of one long list."""
    path = folder_of(folder)
    numbers = b"(" + b"K\1" * 100_000 + b"t\x94"
    (path / ".metadata").write_bytes(b"\x80\x04" + numbers + b"0ctorch\nSize\n\x94" + b"h\1h\0\x85R" * 10_000 + b".")
    return published(path)


for _name, _sentence, _change in (
    ("fifo", "is a pipe without a writer", becomes_a_fifo),
    ("folder", "is a folder", becomes_a_folder),
    ("device", "leads to /dev/zero, which has no end", leads_to_a_device),
    ("secret", "leads to a file outside, which a message may tell", leads_to_the_secret),
):
    for _file in (".metadata", FILE):

        def _make(folder: Path, file: str = _file, change: Callable[[Path], None] = _change) -> Path:
            path = folder_of(folder)
            outside(folder)
            change(path / file)
            return published(path)

        register(_make, f"sharded.{_file.strip('._')}_is_a_{_name}", f"{_file} {_sentence}.")
