"""Folders of checkpoints that are not what their names and manifests say."""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lazyckpt
from attacks import attack, register, victim
from attacks.pickles import PROTO, STOP, archive, call, opcodes, tensor
from lazyckpt.storage.manifest import checksum

SECRET = "the secret outside"


def step(folder: Path, number: int = 1, *, text: bytes | None = None, tree: Any = None, **changes: Any) -> Path:
    """A checkpoint in ``folder/run``, with changes to its manifest or another text instead of it."""
    path = folder / "run" / f"step-{number:08d}"
    path.mkdir(parents=True)
    made = archive(path, tree if tree is not None else {"x": {"t": tensor()}})
    made.rename(path / "state.pt")
    data = (path / "state.pt").read_bytes()
    manifest = {
        "format": 1,
        "lazyckpt": "0.1.0",
        "sequence": number,
        "parent": number - 1 or None,
        "step": number,
        "world_size": 1,
        "created": "2025-01-31T12:00:00+00:00",
        "files": [{"name": "state.pt", "bytes": len(data), "crc32": f"{zlib.crc32(data):08x}", "writers": [0]}],
    }
    more = changes.pop("more_files", [])
    manifest.update(changes)
    manifest["files"] = [*manifest["files"], *more] if isinstance(manifest["files"], list) else manifest["files"]  # type: ignore[misc]
    manifest.setdefault("crc32", checksum(manifest))
    (path / "manifest.json").write_bytes(json.dumps(manifest).encode() if text is None else text)
    return path


def outside(folder: Path) -> Path:
    """A folder beside the run, with a file that no call may read, change or remove."""
    path = folder / "outside"
    path.mkdir(exist_ok=True)
    (path / "secret").write_text(SECRET)
    return path


# Not a regular file


def moved_outside(path: Path) -> None:
    away = outside(path.parent.parent.parent) / path.name
    shutil.move(path, away)
    path.symlink_to(away)


def leads_to_a_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def becomes_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def becomes_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def leads_to_the_secret(path: Path) -> None:
    path.unlink()
    path.symlink_to(outside(path.parent.parent.parent) / "secret")


def not_a_file(name: str, sentence: str, file: str, change: Callable[[Path], None]) -> None:
    def make(folder: Path) -> Path:
        change(step(folder) / file)
        return folder / "run"

    register(make, f"folders.{name}", sentence)


for _kind, _sentence, _change in (
    ("symlink", "leads to a file outside", moved_outside),
    ("device", "leads to /dev/zero, which has no end", leads_to_a_device),
    ("fifo", "is a pipe without a writer: opening it never returns", becomes_a_fifo),
    ("folder", "is a folder", becomes_a_folder),
):
    not_a_file(f"state_is_a_{_kind}", f"state.pt {_sentence}.", "state.pt", _change)
    not_a_file(f"manifest_is_a_{_kind}", f"manifest.json {_sentence}.", "manifest.json", _change)
not_a_file(
    "manifest_is_a_secret",
    "manifest.json leads to a file whose contents an error message may tell.",
    "manifest.json",
    leads_to_the_secret,
)


@attack
def step_is_a_symlink(folder: Path) -> Path:
    """A whole checkpoint leads outside."""
    path = step(folder)
    shutil.move(path, outside(folder))
    path.symlink_to(folder / "outside" / path.name)
    return folder / "run"


@attack
def leftovers_lead_outside(folder: Path) -> Path:
    """The start of a run sweeps links to folders outside, and folders with such links."""
    away = outside(folder)
    run = folder / "run"
    run.mkdir()
    for name in (".tmp-step-00000001", ".trash-step-00000001"):
        (run / f"{name}-{0:032x}").symlink_to(away)
        left = run / f"{name}-{1:032x}"
        left.mkdir()
        (left / "link").symlink_to(away)
        (left / "file").symlink_to(away / "secret")
    return run


@attack
def leftovers_with_escapes(folder: Path) -> Path:
    """Names of leftovers that clear the screen, and one that is no text."""
    step(folder)
    for name in (b".tmp-\x1b[2J\x1b]0;owned\x07\n", b".trash-\xff\xfe\x9b31m"):
        os.mkdir(os.fsencode(folder / "run") + b"/" + name + b"-%032x" % 0)
    return folder / "run"


@attack
def a_trainers_folder(folder: Path) -> Path:
    """A folder without a manifest whose files are links, pipes, folders and gadgets with strange names."""
    run = folder / "run"
    run.mkdir()
    archive(run, PROTO + call("os.system", f"touch '{folder / 'canary'}'") + STOP).rename(run / "pytorch_model.bin")
    os.mkfifo(run / "optimizer.pt")
    (run / "scheduler.pt").mkdir()
    (run / "random_states_0.pkl").symlink_to(outside(folder) / "secret")
    (run / "\x1b[2Jmodel.safetensors").write_bytes(b"\xff" * 8 + b"{")
    (run / os.fsdecode(b"\xff\xfe.ckpt")).write_bytes(b"PK\3\4")
    (run / "trainer_state.json").write_text('{"a":' * 100_000)
    return run


@attack
def names_in_other_digits(folder: Path) -> Path:
    """A folder whose step is written in digits that int() takes and no program writes."""
    path = step(folder, 12)
    path.rename(path.with_name("step-٠٠٠٠٠٠١٢"))
    return folder / "run"


@attack
def a_long_number_in_a_name(folder: Path) -> Path:
    """A step of two hundred digits."""
    path = step(folder, 12)
    path.rename(path.with_name("step-" + "9" * 200))
    return folder / "run"


# Manifests


def hostile(name: str, sentence: str, **changes: Any) -> None:
    def make(folder: Path) -> Path:
        step(folder, **changes)
        return folder / "run"

    register(make, f"folders.manifest_{name}", sentence)


def other(**changes: Any) -> list[dict[str, Any]]:
    return [{"name": "other", "bytes": 0, "crc32": "00000000", **changes}]


hostile("step_text", "A step that is text.", step="1")
hostile("step_negative", "A negative step.", step=-1)
hostile("step_true", "A step that is true, which is 1.", step=True)
hostile("step_fraction", "A step that equals a whole number.", step=1.0)
hostile("sequence_nan", "A sequence that is not a number, and compares with none.", sequence=math.nan)
hostile("sequence_infinite", "A sequence that is newer than all others, for ever.", sequence=math.inf)
hostile("sequence_negative", "A negative sequence.", sequence=-5)
hostile("sequence_huge", "A sequence of four thousand digits, to which one is added.", sequence=10**4000)
hostile("sequence_of_64_bits", "A sequence after which there is none in 64 bits.", sequence=2**64)
hostile("parent_text", "A parent that is text.", parent="1")
hostile("parent_list", "A parent that is a list.", parent=[[]])
hostile("format_list", "A format that is a list.", format=[1])
hostile("format_true", "A format that is true, which is 1.", format=True)
hostile("created_nothing", "No time.", created=None)
hostile("created_escapes", "A time that clears the screen.", created="\x1b[2J")
hostile("files_text", "Files that are text.", files="state.pt")
hostile("files_nested", "Files that are lists of lists.", files=[[["state.pt"]]])
hostile("files_none", "No files.", files=[])
hostile("names_parent", "A file above the folder.", more_files=other(name="../../outside/secret", bytes=18))
hostile("names_absolute", "A file with an absolute name.", more_files=other(name="/etc/hostname"))
hostile("names_dots", "The folder itself, as a file.", more_files=other(name=".."))
hostile("names_nul", "A name that ends early for readers in C.", more_files=other(name="state.pt\0x"))
hostile("names_long", "A name that no file system takes.", more_files=other(name="a" * 5000))
hostile("names_escapes", "A name that clears the screen.", more_files=other(name="\x1b[2J\x1b]0;owned\x07"))
hostile("names_half_a_character", "A name with a lone surrogate.", more_files=other(name="a\ud800"))
hostile("names_a_number", "A name that is a number.", more_files=other(name=5))
hostile("names_a_list", "A name that is a list.", more_files=other(name=["state.pt"]))
hostile("names_the_manifest", "The manifest itself.", more_files=other(name="manifest.json"))
hostile("names_state_twice", "state.pt under two names that are one file.", more_files=other(name="./state.pt"))
hostile("bytes_text", "A length that is text.", more_files=other(bytes="0"))
hostile("bytes_nan", "A length that is not a number.", more_files=other(bytes=math.nan))
hostile("crc_negative", "A checksum with a sign.", more_files=other(crc32="-0000001"))
hostile("crc_underscore", "A checksum with what Python takes in numbers.", more_files=other(crc32="0x_0_0_0"))
hostile("crc_long", "A checksum of a megabyte.", more_files=other(crc32="f" * 1_000_000))
hostile("text_utf_16", "A manifest in another encoding.", text='{"format": 1}'.encode("utf-16"))
hostile("text_not_utf_8", "A manifest that is no text.", text=b'{"format": 1, "\xff": 0}')
hostile("text_nested", "A manifest of a million brackets.", text=b'{"a":' + b"[" * 1_000_000)
hostile("text_nested_well", "The same, well-formed.", text=b'{"a":' + b"[" * 500_000 + b"]" * 500_000 + b"}")
hostile("text_digits", "A number of a hundred thousand digits.", text=b'{"format": ' + b"1" * 100_000 + b"}")
hostile("text_null", "A manifest that is null.", text=b"null")
hostile("text_escapes", "A manifest that is an escape sequence.", text=b"\x1b[2J\x1b]0;owned\x07")


@attack
def manifest_key_twice(folder: Path) -> Path:
    """A manifest that says two things of one field: tools in other languages take the first."""
    path = step(folder)
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"step": 1', '"step": 99, "step": 1'))
    return folder / "run"


@attack
def manifest_of_a_gigabyte(folder: Path) -> Path:
    """A manifest of a gigabyte of brackets, nearly all of it a hole."""
    path = step(folder, text=b"[" * 4096)
    os.truncate(path / "manifest.json", 1 << 30)
    return folder / "run"


@attack
def manifest_with_a_file_ten_thousand_times(folder: Path) -> Path:
    """One file is listed ten thousand times, to be read as often."""
    path = step(folder, more_files=other(name="other", bytes=1 << 20) * 10_000)
    (path / "other").write_bytes(bytes(1 << 20))
    return folder / "run"


@attack
def manifest_lies_about_lengths(folder: Path) -> Path:
    """A length that overflows to the true one in 64 bits."""
    path = step(folder)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][0]["bytes"] += 1 << 64
    manifest["crc32"] = checksum(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    return folder / "run"


@attack(harmless="a chain ends where it began, or at a parent that is gone")
def parents_in_a_circle(folder: Path) -> Path:
    """Three checkpoints, each the parent of another."""
    return genuine(folder, [{"parent": 3}, {"parent": 1}, {"parent": 2}])


@attack(harmless="the order of equal sequences is not defined, but it ends")
def sequences_all_the_same(folder: Path) -> Path:
    """Three checkpoints with one sequence, which is their own parent."""
    return genuine(folder, [{"sequence": 7, "parent": 7}] * 3)


@attack(harmless="times are shown, nothing else")
def created_at_the_edges(folder: Path) -> Path:
    """Times before the first year and behind the last, in zones that push them over."""
    return genuine(folder, [{"created": "0001-01-01T00:00:00+23:59"}, {"created": "9999-12-31T23:59:59-23:59"}])


def genuine(folder: Path, changes: list[dict[str, Any]]) -> Path:
    """A run of the victim's own, with changes to its manifests."""
    with lazyckpt.Checkpointer(folder / "run", chunk_bytes=64 << 10, host_buffer_bytes=128 << 10) as ckpt:
        ckpt.track(**victim())
        for number, change in enumerate(changes, 1):
            file = ckpt.save(number).result() / "manifest.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    return folder / "run"


# States that fit no training


def state(name: str, sentence: str, **parts: Any) -> None:
    def make(folder: Path) -> Path:
        tree = {"model": {}, "optimizer": {}, "x": {}, "rng": {}, **parts}
        step(folder, tree=PROTO + opcodes(tree) + STOP)
        return folder / "run"

    harmless = "an object like any other for load; restore() must refuse it"
    register(make, f"folders.state_{name}", sentence, harmless=harmless)


state("of_nothing", "Empty states.")
state("of_numbers", "Numbers instead of states.", model=1, optimizer=2, x=3, rng=4)
state("of_lists", "Lists instead of states.", model=[], optimizer=[], x=[], rng=[])
state("optimizer_of_numbers", "Parameter groups that are numbers.", optimizer={"state": {}, "param_groups": [1, 2]})
state(
    "optimizer_without_params", "A parameter group without parameters.", optimizer={"state": {}, "param_groups": [{}]}
)
state("optimizer_of_text", "State that is text.", optimizer={"state": "x", "param_groups": []})
state(
    "optimizer_of_unhashable",
    "Parameters that cannot be hashed.",
    optimizer={"state": {}, "param_groups": [{"params": [[], {}]}]},
)
