"""Flips bits of checkpoints and truncates them. A reader must return what was saved, or raise an error.

:func:`lazyckpt.load` or ``lazyckpt verify`` finds a flip, unless it hits padding, which no reader looks at. No checksum
covers the headers and the directory of a lone archive, and some of their fields do not matter for the value: the test
reports these apart. It compares everything that loads in spite of damage bit by bit.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import lazyckpt
from lazyckpt.cli import app
from lazyckpt.formats import safetensors
from lazyckpt.formats.torch_zip_reader import read_directory
from trials import Trials

STATE = {"a": torch.arange(3000), "b": torch.linspace(0, 1, 501), "c": torch.zeros(0), "d": [torch.ones(7), "text"]}
TENSORS = {name: tensor for name, tensor in STATE.items() if isinstance(tensor, torch.Tensor)}


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() <= b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def regions(file: Path) -> list[tuple[str, int, int]]:
    """Names each range of bytes."""
    size = file.stat().st_size
    if file.name == "manifest.json":
        return [("manifest", 0, size)]
    found = []
    if file.name.endswith(".safetensors"):
        records = [info.record for info in safetensors.read_header(file).tensors.values()]
        length = int.from_bytes(file.read_bytes()[:8], "little")
        text = file.read_bytes()[8 : 8 + length]
        found = [("header", 0, 8 + len(text.rstrip())), ("padding", 8 + len(text.rstrip()), 8 + length)]
    else:
        content = file.read_bytes()
        records = sorted(read_directory(file).records.values(), key=lambda r: r.offset)
        at = 0
        for record in records:
            # Between two records: a descriptor maybe, a local header, and its extra field, which is padding.
            name = content.rindex(b"PK\3\4", at, record.offset)
            fixed = name + 30 + int.from_bytes(content[name + 26 : name + 28], "little") + 4
            found += [("local header", at, fixed), ("padding", fixed, record.offset)]
            at = record.offset + record.nbytes
        found.append(("directory", at, size))
    found += [("record", r.offset, r.offset + r.nbytes) for r in records]
    return [region for region in found if region[1] < region[2]]


def damaged(content: bytes, file: Path, chance: random.Random) -> tuple[str, bytes]:
    """Damages a file, mostly by one bit, and says where. Each region is hit as often as the others."""
    known = regions(file)
    if chance.random() < 0.2:
        edges = [edge for _, first, end in known for edge in (first, end) if edge < len(content)]
        length = chance.choice(edges) + chance.choice((-1, 0, 1)) if chance.random() < 0.5 else -1
        return "truncated", content[: length if 0 <= length < len(content) else chance.randrange(len(content))]
    name = chance.choice(sorted({region for region, _, _ in known}))
    _, first, end = chance.choice([region for region in known if region[0] == name])
    at = chance.randrange(first, end)
    return name, content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]


@pytest.mark.timeout(60 * 60)
def test_damage_anywhere(tmp_path: Path, trials: Trials) -> None:
    with lazyckpt.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.track(x=STATE)
        folder = checkpointer.save(12345678).result()
    lazyckpt.save(STATE, tmp_path / "lone.pt")
    lazyckpt.save(TENSORS, tmp_path / "lone.safetensors")
    targets = [
        (folder / "state.pt", folder),
        (folder / "manifest.json", folder),
        (tmp_path / "lone.pt", tmp_path / "lone.pt"),
        (tmp_path / "lone.safetensors", tmp_path / "lone.safetensors"),
    ]
    contents = {file: file.read_bytes() for file, _ in targets}
    kinds: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    count = trials.count(150, 10_000)
    for _ in range(count):
        file, target = trials.random.choice(targets)
        kind, changed = damaged(contents[file], file, trials.random)
        file.unlink()
        file.write_bytes(changed)
        try:
            tree = lazyckpt.load(target)
            if target == folder:
                tree = tree["x"]
            expected = TENSORS if file.suffix == ".safetensors" else STATE
            assert same(expected, tree), f"{file.name}: {kind}: a wrong value was loaded"
            loaded = True
        except lazyckpt.LoadError:
            loaded = False
        code = CliRunner().invoke(app, ["verify", str(target)]).exit_code
        assert code in (0, 1, 2)
        assert loaded or code != 0, f"{file.name}: {kind}: verify finds nothing, and it cannot be loaded"
        end = "found by load" if not loaded else "found by verify" if code != 0 else "harmless"
        if end == "harmless" and kind != "padding":
            end = "read as it was saved"  # in bytes that say what others say too, or nothing of the value
        # load() skips the records that only torch reads; verify does not. In what the manifest covers it finds all.
        if end == "read as it was saved" and file.name == "manifest.json":
            assert json.loads(changed) == json.loads(contents[file]), "another manifest"  # only its spaces
        else:
            assert end != "read as it was saved" or kind in ("local header", "directory"), f"{file.name}: {kind}"
            assert end.startswith("found") or file.name != "state.pt", f"{file.name}: {kind}: not found"
        kinds[kind] += 1
        ends[end] += 1
        file.unlink()
        file.write_bytes(contents[file])
    trials.report("bit flips over all regions, truncations", count, tmp_path, **kinds, **ends)
