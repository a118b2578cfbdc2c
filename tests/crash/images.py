"""From the record of a save to every state in which a power cut may leave the disk (ALICE, OSDI'14).

The disk promises little here: what was not synced may be there or not, each block of a file and each entry of a folder
by itself and in any order. Only a sync that began after an operation was answered, and was answered itself, makes it
certain: that of a file its bytes and its length, that of a folder its entries. A rename within a folder is one change
of it; from one folder to another it is one change of each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 4096


@dataclass(eq=False)
class File:
    content: bytes = b""  # in the end; a range of it is written once
    where: str = ""  # it can be read afterwards
    links: int = 0


@dataclass(eq=False)
class Folder:
    entries: dict[str, File | Folder] = field(default_factory=dict)


@dataclass(eq=False)
class Change:
    """What may be on the disk or not, as a whole."""

    node: File | Folder
    begin: int  # line of the log
    end: int | None  # when it was answered
    number: str
    entries: dict[str, File | Folder | None] = field(default_factory=dict)  # of a folder; None: gone
    block: tuple[int, int] | None = None  # of a file: from, to
    size: tuple[str, int] | None = None  # of a file: "least" or "exactly"
    certain: int | None = None  # line from which on it is on the disk


class Image(tuple[tuple[str, Any], ...]):
    """A folder: names, and what each is, an ``Image`` or the bytes of a file."""

    def write(self, path: Path) -> None:
        path.mkdir()
        for name, content in self:
            if isinstance(content, Image):
                content.write(path / name)
            else:
                (path / name).write_bytes(content)


class Record:
    """The changes of a recorded run, and the lines at which it could have been cut off."""

    def __init__(self, log: Path, root: Path) -> None:
        self.root = root
        self.lines = [line.split() for line in log.read_text().splitlines()]
        self.top = Folder()
        self.changes: list[Change] = []
        self.armed = self.lines.index(["armed"])
        failed = {tuple(w[1:4]) for w in self.lines if w[0] == "failed"}
        ends = {tuple(w[1:4]): at for at, w in enumerate(self.lines) if w[0] == "end"}
        # Tags of the engine and numbers of Python are unique together with operation and path.
        live = Folder()
        self._live = live
        self._root = live
        for at, words in enumerate(self.lines):
            if words[0] == "begin" and tuple(words[1:4]) not in failed:
                self._operation(at, ends.get(tuple(words[1:4])), *words[1:])
        for name, node in _walk(live, root):
            if isinstance(node, File):
                node.where = str(name)
        for change in self.changes:
            if isinstance(change.node, File) and not change.node.content:
                change.node.content = Path(change.node.where).read_bytes()
        self.changes = [c for c in self.changes if c.block is None or c.block[0] < len(c.node.content)]  # type: ignore[union-attr]
        # All that came before is on the disk.
        for change in self.changes:
            if change.begin < self.armed:
                change.certain = min(self.armed, change.certain or self.armed)

    def cuts(self) -> range:
        return range(self.armed, len(self.lines))

    def _find(self, path: str) -> tuple[Folder, str]:
        parts = Path(path).relative_to(self.root).parts
        folder = self._root
        for part in parts[:-1]:
            child = folder.entries[part]
            assert isinstance(child, Folder)
            folder = child
        return folder, parts[-1]

    def _node(self, path: str) -> File | Folder:
        if Path(path) == self.root:
            return self._root
        folder, name = self._find(path)
        return folder.entries[name]

    def _operation(self, at: int, end: int | None, number: str, operation: str, path: str, *more: str) -> None:
        def change(node: File | Folder, **what: object) -> Change:
            made = Change(node, at, end, number, **what)  # type: ignore[arg-type]
            self.changes.append(made)
            return made

        def set_entries(*entries: tuple[Folder, str, File | Folder | None]) -> None:
            """In one change for each folder."""
            by_folder: dict[Folder, dict[str, File | Folder | None]] = {}
            for folder, name, node in entries:
                by_folder.setdefault(folder, {})[name] = node
            for folder, changed in by_folder.items():
                change(folder, entries=changed)
                for name, node in changed.items():
                    if node is None:
                        folder.entries.pop(name, None)
                    else:
                        folder.entries[name] = node

        def blocks(file: File, begin: int, stop: int) -> None:
            for first in range(begin - begin % BLOCK, stop, BLOCK):
                change(file, block=(max(first, begin), min(first + BLOCK, stop)))

        def is_kept(node: File | Folder | None, copy: str) -> None:
            if isinstance(node, File) and not node.where:
                node.where = copy

        if operation == "mkdir":
            set_entries((*self._find(path), Folder()))
        elif operation == "create":
            file = File()
            set_entries((*self._find(path), file))
            if number.startswith("py"):  # its writes are not recorded: from now on, up to the length at its sync
                size = max((int(w[4]) for w in self.lines if w[2:4] == ["fsync", path]), default=1 << 16)
                blocks(file, 0, size)
        elif operation in ("unlink", "rmdir"):
            folder, name = self._find(path)
            if more:
                is_kept(folder.entries[name], more[0])
            set_entries((folder, name, None))
        elif operation == "rename":
            (folder, name), (into, new) = self._find(path), self._find(more[0])
            if len(more) > 1:
                is_kept(into.entries.get(new), more[1])
            set_entries((folder, name, None), (into, new, folder.entries[name]))
        elif operation == "exchange":
            (a, x), (b, y) = self._find(path), self._find(more[0])
            set_entries((a, x, b.entries[y]), (b, y, a.entries[x]))
        elif operation == "link":
            set_entries((*self._find(more[0]), self._node(path)))
        elif operation in ("write", "allocate", "truncate"):
            file = self._node(path)  # type: ignore[assignment]
            offset, size = map(int, more)
            if operation == "write":
                blocks(file, offset, offset + size)
            else:
                change(file, size=("least" if operation == "allocate" else "exactly", size))
        elif operation in ("sync", "fsync"):
            node = self._node(path)
            for c in self.changes:
                whole = c.end is not None and c.end < at
                if operation == "fsync" and c.block is not None:
                    whole = whole and c.block[1] <= int(more[0])
                if c.node is node and whole and end is not None and c.certain is None:
                    c.certain = end
        else:
            raise AssertionError(f"an operation that the model does not know: {operation}")

    def at(self, cut: int) -> tuple[list[Change], list[Change]]:
        """The changes that are certainly on the disk then, and those that may be."""
        begun = [c for c in self.changes if c.begin <= cut]
        certain = [c for c in begun if c.certain is not None and c.certain <= cut]
        return certain, [c for c in begun if c.certain is None or c.certain > cut]

    def image(self, applied: Set[int]) -> Image:
        """What the folder holds if these changes (indices) are on the disk, and no others."""
        entries: dict[Folder, dict[str, File | Folder]] = {}
        contents: dict[File, bytearray] = {}
        for index, c in enumerate(self.changes):
            if index not in applied:
                continue
            if isinstance(c.node, Folder):
                folder = entries.setdefault(c.node, {})
                for name, node in c.entries.items():
                    folder.pop(name, None)
                    if node is not None:
                        folder[name] = node
                continue
            content = contents.setdefault(c.node, bytearray())
            least = c.block[1] if c.block is not None else c.size[1] if c.size is not None else 0
            content.extend(bytes(max(0, least - len(content))))
            if c.block is not None:
                first, stop = c.block
                content[first:stop] = c.node.content[first:stop].ljust(stop - first, b"\0")
            elif c.size is not None and c.size[0] == "exactly":
                del content[c.size[1] :]

        def made(folder: Folder) -> Image:
            found = entries.get(folder, {}).items()
            return Image(
                (name, made(node) if isinstance(node, Folder) else bytes(contents.get(node, b"")))
                for name, node in sorted(found)
            )

        return made(self._root)


def _walk(folder: Folder, path: Path) -> Iterator[tuple[Path, File | Folder]]:
    for name, node in folder.entries.items():
        yield path / name, node
        if isinstance(node, Folder):
            yield from _walk(node, path / name)


def subsets(changes: list[int], is_name: Callable[[int], bool], most: int, chance: random.Random) -> list[set[int]]:
    """All, if there are at most ``most``. Otherwise so many: none, all, all but one, only one, what came first, and
    some at random: names and blocks each with a probability of their own, since blocks outnumber names."""
    if 1 << len(changes) <= most:
        return [{c for bit, c in enumerate(changes) if number >> bit & 1} for number in range(1 << len(changes))]
    whole = set(changes)
    names = {c for c in changes if is_name(c)}
    found = [set(), whole, names, whole - names]
    systematic = [{c for c in changes if c <= last} for last in changes]
    systematic += [whole - {c} for c in changes] + [{c} for c in changes] + [names - {c} for c in names]
    found += chance.sample(systematic, min(len(systematic), max(1, most // 2)))
    while len(found) < most:
        p, q = (chance.choice((0, 0.5, 0.9, 1)) for _ in range(2))
        found.append({c for c in changes if chance.random() < (p if c in names else q)})
    return found


def is_name(change: Change) -> bool:
    return isinstance(change.node, Folder)
