"""Which checkpoints are committed, which one is newest, which may be removed, and false manifests."""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import lazyckpt
from lazyckpt.errors import CorruptFileError, LoadError, UnsupportedFormatError
from lazyckpt.storage import catalog, folders, manifest, removal
from lazyckpt.storage.catalog import Catalog
from lazyckpt.storage.manifest import Checkpoint, checksum, read_checkpoint
from lazyckpt.storage.retention import chain, pin, retention, unpin

NOW = datetime.now(timezone.utc)


def checkpoint(step: int, sequence: int, parent: int | None, *, pinned: bool = False) -> Checkpoint:
    return Checkpoint(Path(f"step-{step:08d}"), step, sequence, parent, NOW, (), pinned)


def steps(found: list[Checkpoint]) -> list[int]:
    return [c.step for c in found]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of step 12."""
    with lazyckpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.track(x={"t": torch.arange(3000)})
        return ckpt.save(12).result()


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    changed = {**manifest, **changes}
    file.write_text(json.dumps({**changed, "crc32": checksum(changed)}))


def test_what_is_removed_while_it_is_read_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with what was newer than the list of names, an evaluation beside a training found nothing whole."""
    read = manifest.read_checkpoint

    def late(path: Path) -> Checkpoint:
        monkeypatch.setattr(catalog, "read_checkpoint", read)
        with lazyckpt.Checkpointer(folder.parent) as ckpt:
            ckpt.save(13).result()
        removal.remove(folder)
        return read(path)

    found = Catalog(folder.parent)
    monkeypatch.setattr(catalog, "read_checkpoint", late)
    assert steps(found.scan()) == [13] and found.broken == []


# manifests


@pytest.mark.parametrize("change", [('"sequence": 1', '"sequence": 3'), ('"created": "20', '"created": "19')])
def test_a_manifest_that_was_changed_is_found(folder: Path, change: tuple[str, str]) -> None:
    """Regression: a flipped bit that left it well-formed could make another checkpoint the newest."""
    file = folder / "manifest.json"
    file.write_text(changed := file.read_text().replace(*change))
    assert change[1] in changed
    with pytest.raises(CorruptFileError, match="checksum"):
        read_checkpoint(folder)


def test_a_manifest_tells_what_is_there(folder: Path) -> None:
    found = read_checkpoint(folder)
    assert (found.step, found.sequence, found.parent) == (12, 1, None)
    assert [f.name for f in found.files] == ["state.pt"]
    assert found.nbytes == (folder / "state.pt").stat().st_size
    assert found.created.tzinfo is not None
    assert zlib.crc32((folder / "state.pt").read_bytes()) == found.files[0].crc32
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format"] == 1 and manifest["lazyckpt"] == lazyckpt.__version__ and manifest["world_size"] == 1
    assert manifest["files"][0]["writers"] == [0]


STATE = {"name": "state.pt", "bytes": 1, "crc32": "00000000"}
HOSTILE: dict[str, dict[str, Any]] = {
    "step infinite": {"step": math.inf},
    "step nan": {"step": math.nan},
    "step a string": {"step": "12"},
    "step a fraction": {"step": 12.5},
    "step negative": {"step": -1},
    "step true": {"step": True},
    "sequence huge float": {"sequence": 1e308},
    "sequence null": {"sequence": None},
    "parent a list": {"parent": [1]},
    "created nonsense": {"created": "yesterday"},
    "created a number": {"created": 5},
    "files a number": {"files": 5},
    "files a dict": {"files": {"a": 1}},
    "files of strings": {"files": ["state.pt"]},
    "no state.pt": {"files": []},
    "another file only": {"files": [{**STATE, "name": "other"}]},
    "state.pt twice": {"files": [STATE, STATE]},
    "bytes infinite": {"files": [{**STATE, "bytes": math.inf}]},
    "bytes negative": {"files": [{**STATE, "bytes": -1}]},
    "crc not hex": {"files": [{**STATE, "crc32": "zz"}]},
    "crc a number": {"files": [{**STATE, "crc32": 5}]},
    "crc signed": {"files": [{**STATE, "crc32": "-0000001"}]},
    "crc too long": {"files": [{**STATE, "crc32": "100000000"}]},
    "wrong length": {"files": [STATE]},
    "outside": {"files": [STATE, {**STATE, "name": "../other"}]},
    "absolute": {"files": [STATE, {**STATE, "name": "/etc/passwd"}]},
    "dot": {"files": [STATE, {**STATE, "name": "."}]},
    "empty name": {"files": [STATE, {**STATE, "name": ""}]},
    "nul": {"files": [STATE, {**STATE, "name": "a\0b"}]},
    "missing file": {"files": [STATE, {**STATE, "name": "more.pt"}]},
}


def test_a_hostile_manifest_is_refused_and_does_not_hide_the_others(folder: Path) -> None:
    with lazyckpt.Checkpointer(folder.parent) as ckpt:
        ckpt.track(x={})
        ckpt.save(13).result()
        (folder.parent / "other").write_text("x")  # is there, and as long as it is said to be
        manifest = (folder / "manifest.json").read_text()
        size = (folder / "state.pt").stat().st_size
        for case, changes in HOSTILE.items():
            files = json.loads(json.dumps(changes.get("files", [])))
            for entry in files if isinstance(files, list) else []:
                if case != "wrong length" and isinstance(entry, dict) and entry["name"] == "state.pt":
                    entry["bytes"] = size if entry["bytes"] == 1 else entry["bytes"]
            (folder / "manifest.json").write_text(manifest)
            edit(folder, **{**changes, **({"files": files} if "files" in changes else {})})
            with pytest.raises(CorruptFileError, match="step-00000012"):
                read_checkpoint(folder)
            found = Catalog(folder.parent)
            assert len(found.scan()) == 1 and len(found.broken) == 1, case
            with pytest.warns(UserWarning, match="step-00000012"):
                assert ckpt.restore() == 13, case


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "5", "{}", '{"format": 1}', "[" * 100_000, "\xff", "9" * 5000])
def test_what_is_no_manifest_is_refused(text: str, folder: Path) -> None:
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptFileError, match=r"manifest\.json"):
        read_checkpoint(folder)


@pytest.mark.parametrize("what", ["no manifest", "a pipe", "a folder", "huge", "a link", "a state that is a link"])
def test_what_is_no_plain_file_is_refused(what: str, folder: Path, tmp_path: Path) -> None:
    """And does not hang."""
    file = folder / ("state.pt" if "state" in what else "manifest.json")
    file.rename(tmp_path / "elsewhere")
    if what == "a pipe":
        os.mkfifo(file)
    elif what == "a folder":
        file.mkdir()
    elif what == "huge":
        with open(file, "wb") as opened:
            opened.truncate(1 << 40)
    elif "link" in what:
        file.symlink_to(tmp_path / "elsewhere")
    said = {"no manifest": "there is no manifest", "a pipe": "not a regular file", "huge": "too large"}
    with pytest.raises(LoadError, match=said.get(what, "symbolic link|missing|regular|Is a directory")):
        read_checkpoint(folder)


def test_a_copy_and_a_manifest_of_the_future_are_told(folder: Path) -> None:
    """A copy under another name is not another checkpoint."""
    shutil.copytree(folder, folder.with_name("step-00000013"))
    found = Catalog(folder.parent)
    assert steps(found.scan()) == [12] and "step-00000013" in str(found.broken[0])
    edit(folder, format=2)
    with pytest.raises(UnsupportedFormatError, match="manifest format 2; this version reads 1"):
        read_checkpoint(folder)


def test_pins_are_durable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[bool] = []
    sync_path = folders.sync_path

    def note(path: Path) -> None:
        assert path == folder.parent
        there.append(manifest.pin_of(folder).exists())
        sync_path(path)

    monkeypatch.setattr(folders, "sync_path", note)
    pin(folder)
    unpin(folder)
    assert there == [True, False]


def test_scan_ignores_what_is_no_checkpoint(folder: Path) -> None:
    root = folder.parent
    for name in ("step-1", "step-0000000x", f".tmp-step-00000003-{0:032x}", f".trash-step-00000004-{0:032x}", "logs"):
        (root / name).mkdir()
    (root / "step-00000099").write_text("a file")
    found = Catalog(root)
    assert steps(found.scan()) == [12] and found.broken == []


def test_a_checkpoint_that_was_moved_and_linked_is_told(folder: Path, tmp_path: Path) -> None:
    """Regression: restore() took an older one without a word, or none at all and began anew."""
    elsewhere = folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(elsewhere)
    found = Catalog(folder.parent)
    assert found.scan() == [] and [(e.path, "symbolic link" in str(e)) for e in found.broken] == [(folder, True)]


# the chain, and what may go


def newest_first(found: list[Checkpoint]) -> list[Checkpoint]:
    return sorted(found, key=lambda c: c.sequence, reverse=True)


def superfluous(found: list[Checkpoint], *rules: Any) -> list[Checkpoint]:
    fates = retention(newest_first(found), *rules)
    return [c for c in found if not fates[c].stays]


def test_newest_is_the_highest_sequence() -> None:
    rolled_back = [checkpoint(100, 1, None), checkpoint(200, 2, 1), checkpoint(120, 3, 1)]
    assert steps(chain(newest_first(rolled_back))) == [120, 100]
    assert steps(superfluous(rolled_back, 2, None)) == [200]
    assert steps(superfluous(rolled_back, 1, None)) == [100, 200]
    assert superfluous(rolled_back, None, None) == [] == superfluous(rolled_back, None, 1)


def test_a_parent_that_is_gone_is_stood_in_for_by_its_elder() -> None:
    found = [checkpoint(10, 1, None), checkpoint(30, 3, 2), checkpoint(40, 4, 3)]
    assert steps(chain(newest_first(found))) == [40, 30, 10]
    assert steps(superfluous(found, 2, None)) == [10]
    assert steps(superfluous(found, 2, 10)) == []


def test_a_line_that_is_too_short_is_made_up_for_by_the_newest_others() -> None:
    """Regression: a run that went on from a checkpoint of another folder removed all of its own with its next save."""
    found = [checkpoint(10, 1, None), checkpoint(20, 2, 1), checkpoint(30, 3, 2), checkpoint(15, 4, None)]
    assert steps(chain(newest_first(found))) == [15]
    assert steps(superfluous(found, 3, None)) == [10]
    assert steps(superfluous(found, 2, None)) == [10, 20]
    assert steps(superfluous(found, 1, None)) == [10, 20, 30]
    assert {c.step: tuple(v) for c, v in retention(newest_first(found), 3, 15).items()} == {
        10: (False, "off the line to step 15"),
        20: (True, "fills up keep_last=3, since the line to step 15 is shorter"),
        30: (True, "fills up keep_last=3, since the line to step 15 is shorter"),
        15: (True, "within keep_last=3"),
    }
    found.append(checkpoint(16, 5, 4, pinned=True))
    found[0] = checkpoint(10, 1, None, pinned=True)
    assert {c.step: tuple(v) for c, v in retention(newest_first(found), 1, 15).items()} == {
        10: (True, "pinned"),
        20: (False, "off the line to step 16"),
        30: (False, "off the line to step 16"),
        15: (True, "a multiple of keep_every=15"),
        16: (True, "within keep_last=1"),
    }
    assert {tuple(v) for v in retention(newest_first(found), None, None).values()} == {(True, "no keep_last")}
    assert retention(newest_first(found[3:]), 1, None)[found[3]] == (False, "beyond keep_last=1")


def test_what_is_damaged_does_not_count() -> None:
    line = [checkpoint(10 * s, s, s - 1 or None) for s in range(1, 6)]
    damaged = {(50, 5), (30, 3)}
    assert steps(superfluous(line, 2, None, damaged)) == [10]
    assert retention(newest_first(line), 2, None, damaged)[line[2]] == (True, "damaged: restore() passed it over")
    assert steps(superfluous(line, 3, None, damaged)) == []
    elsewhere = [*line, checkpoint(60, 6, None)]
    assert steps(superfluous(elsewhere, 2, None, damaged)) == [10, 20]


class Histories(RuleBasedStateMachine):
    """Whatever a run does, retention leaves ``keep_last`` whole checkpoints, if there were that many."""

    @initialize(keep_last=st.integers(1, 4), keep_every=st.none() | st.integers(2, 4))
    def open(self, keep_last: int, keep_every: int | None) -> None:
        self.rules = keep_last, keep_every
        self.found: list[Checkpoint] = []
        self.damaged: set[tuple[int, int]] = set()
        self.sequence = 0
        self.step = 0
        self.parent: int | None = None

    @rule(pinned=st.booleans(), steps=st.integers(1, 3))
    def save(self, pinned: bool, steps: int) -> None:
        self.sequence += 1
        self.step += steps
        newest = checkpoint(self.step, self.sequence, self.parent, pinned=pinned and steps == 3)
        self.parent = self.sequence
        self.found = [c for c in self.found if c.step != self.step]  # it is replaced
        before = [newest, *self.found]
        verdicts = retention(before, *self.rules, self.damaged)
        kept = [c for c in before if verdicts[c].stays]
        keep_last, keep_every = self.rules

        assert list(verdicts) == before and all(verdict.why for verdict in verdicts.values())
        assert newest in kept
        assert len(self._whole(kept)) >= min(keep_last, len(self._whole(before)))
        assert all(c in kept for c in before if c.pinned)
        line = self._whole(chain(before))
        assert all(c in kept for c in line[:keep_last])
        # And no more than that: every further one has a reason of its own.
        for c in self._whole(kept):
            beyond = c not in line[:keep_last] and not c.pinned
            if beyond and not (keep_every is not None and c in line and c.step % keep_every == 0):
                assert len(line) < keep_last and c not in line, verdicts[c]
        self.found = kept

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        """Or go on from another folder."""
        to = data.draw(st.sampled_from([None, *self.found]))
        self.parent, self.step = (None, self.step // 2) if to is None else (to.sequence, to.step)

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """Somebody removes one, or restore() finds it damaged."""
        one = data.draw(st.sampled_from([None, *self.found]))
        if one is not None and data.draw(st.booleans()):
            self.found.remove(one)
        elif one is not None:
            self.damaged.add((one.step, one.sequence))

    def _whole(self, found: list[Checkpoint]) -> list[Checkpoint]:
        return [c for c in found if (c.step, c.sequence) not in self.damaged]


TestHistories = Histories.TestCase
