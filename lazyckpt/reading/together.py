"""Fills the state of all ranks from one file: each byte is read by one rank, which sends it to the others in place.

On one machine the bytes travel through shared memory, between machines by broadcasts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch

from lazyckpt import _engine
from lazyckpt.devices import HOST
from lazyckpt.errors import CorruptFileError
from lazyckpt.formats.reader import Record
from lazyckpt.ranks.broadcast import Broadcasts, bytes_at, served
from lazyckpt.ranks.shared_memory import Segment, SharedMemory, found
from lazyckpt.ranks.shares import Piece, runs
from lazyckpt.ranks.team import GroupTeam, Team
from lazyckpt.reading.archive import Archive, Place
from lazyckpt.reading.ranges import ParallelRead, compare
from lazyckpt.reading.relay import Way, readers_of, relay, rounds_of

NOWHERE: Mapping[str, Place] = MappingProxyType({})


class Described(NamedTuple):
    """What one rank wants, and the ways on which it can get it."""

    wanted: str = ""  # the storages; equal on ranks that want the same; empty: to read for itself
    device: str = ""  # of the process group, if that serves all places
    offer: str = ""  # its shared memory


class Part(NamedTuple):
    """What one rank has read of a storage that several have."""

    number: int  # of the storage
    begin: int  # bytes
    nbytes: int
    crc32: int


class Filling:
    """An archive on its way into memory, on this rank."""

    def __init__(self, archive: Archive, live: Mapping[str, Place] = NOWHERE, own: Container[str] = ()) -> None:
        """``live``: where storages go that the state takes in place, by key. ``own``: the parts of the tree, a dict,
        that differ from rank to rank, which each rank reads itself."""
        self._archive = archive
        self._live = live
        self._own = own
        self._keys: list[str] = []  # of what all ranks read together, in the order of the file
        self._records: list[Record] = []
        self._places: list[Place] = []
        self._crcs: dict[int, Part] = {}  # of what this rank has read
        self._segment: Segment | None = None

    def described(self, team: Team) -> Described:
        """What all ranks may read together."""
        archive = self._archive
        if not isinstance(team, GroupTeam) or archive.filled:
            return Described()
        shared = archive.tree
        if type(shared) is dict:
            shared = [part for name, part in shared.items() if name not in self._own]
        keys = archive.keys_in(shared)
        for _, key, record in sorted((record.offset, key, record) for key, record in archive.wanted.items()):
            place = self._live.get(key) or archive.place(key)
            if key in keys and record.nbytes and place is not None:
                self._keys.append(key)
                self._records.append(record)
                self._places.append(place)
        if not readers_of(self._nbytes(), team.world_size):
            return Described()
        self._segment, offer = Segment.make()
        device = self._device()
        told = json.dumps([(record.name, record.offset, record.nbytes, record.crc32) for record in self._records])
        return Described(hashlib.blake2b(told.encode()).hexdigest(), "" if device is None else device.type, offer)

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()

    def _nbytes(self) -> int:
        return sum(record.nbytes for record in self._records)

    def _device(self) -> torch.device | None:
        return served(place.memory.device for place in self._places)

    def fill(self, team: Team, described: list[Described]) -> None:
        """Reads every storage that is wanted, and verifies it. ``described``: by each rank.

        Raises LoadError, on all ranks if one of them cannot read its share or finds damage, and RankError if one is
        lost. Bytes that were read before the error stay where they landed."""
        if isinstance(team, GroupTeam) and described[0].wanted and len({each.wanted for each in described}) == 1:
            way = self._way(team, described)
            if way is not None:
                self._check(self._together(team, way))
                return
        team.agree(lambda: self._archive.fill(self._live))

    def _way(self, team: GroupTeam, described: list[Described]) -> Way | None:
        """How bytes come to the other ranks: the same way on all. None if every rank reads for itself."""
        segments = found({rank: each.offer for rank, each in enumerate(described)}, team.rank, self._segment)
        if all(team.gather(lambda: segments is not None)) and segments is not None:
            return SharedMemory(team.lookout(), team.rank, segments)
        device = self._device()
        if device is None or {each.device for each in described} != {device.type}:
            return None
        return Broadcasts(team.lookout(), device)

    def _together(self, team: GroupTeam, way: Way) -> list[list[Part]]:
        """Returns what each rank has read of storages that it has not read whole."""
        readers = readers_of(self._nbytes(), team.world_size)
        streams = [torch.cuda.current_stream(on) for on in {place.device for place in self._places} - {HOST}]
        sizes = [record.nbytes for record in self._records]
        rounds = rounds_of(sum(sizes), len(readers))
        cut = runs([record.offset for record in self._records], sizes, rounds * len(readers))
        shares = {reader: cut[rounds * at : rounds * (at + 1)] for at, reader in enumerate(readers)}
        failure = relay(way, team.rank, shares, partial(self._read, streams), self._place)

        def outcome() -> list[Part]:
            if failure is not None:
                raise failure
            whole = [part for part in self._crcs.values() if part.nbytes == sizes[part.number]]
            compare(self._archive.path, [self._records[part.number] for part in whole], [part.crc32 for part in whole])
            self._archive.skip(self._keys)
            self._archive.fill(self._live)  # the others
            return [part for part in self._crcs.values() if part.nbytes < sizes[part.number]]

        return team.gather(outcome)

    def _place(self, piece: Piece) -> torch.Tensor:
        place = self._places[piece.number]
        return bytes_at(place.memory, place.offset + piece.begin, piece.nbytes)

    def _read(self, streams: Iterable[torch.cuda.Stream], pieces: Sequence[Piece]) -> None:
        """Reads into place, and notes the checksums. A rank's pieces of a storage come one after the other.

        ``streams``: those that are current where restore() was called."""
        records, pointers, ordinals = [], [], []
        for number, begin, nbytes in pieces:
            record, place = self._records[number], self._places[number]
            records.append(Record(record.name, record.offset + begin, nbytes, None))
            pointers.append(place.pointer + begin)
            ordinals.append(place.device)
        read = ParallelRead(self._archive.path, records, self._archive.engine)
        with contextlib.closing(read), contextlib.ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            crcs = read.read_into(pointers, ordinals)
        for piece, crc in zip(pieces, crcs, strict=True):
            part = self._crcs.get(piece.number)
            if part is not None:  # the piece before
                crc = _engine.crc32_combine(part.crc32, crc, piece.nbytes)
                piece = Piece(piece.number, part.begin, part.nbytes + piece.nbytes)
            self._crcs[piece.number] = Part(*piece, crc)

    def _check(self, parts: list[list[Part]]) -> None:
        """Verifies the storages that several ranks have read; ``parts``: by each. Raises CorruptFileError, the same on
        all ranks."""
        shared: dict[int, list[tuple[Part, int]]] = defaultdict(list)
        for rank, of_rank in enumerate(parts):
            for part in of_rank:
                shared[part.number].append((part, rank))
        bad = []
        for number, of_one in sorted(shared.items()):
            record, nbytes, crc = self._records[number], 0, 0
            for part, _ in sorted(of_one):
                nbytes = nbytes + part.nbytes if part.begin == nbytes else -1
                crc = _engine.crc32_combine(crc, part.crc32, part.nbytes)
            if nbytes != record.nbytes or record.crc32 not in (None, crc):
                bad.append(f"{record.name}, which ranks {', '.join(str(rank) for _, rank in of_one)} have read")
        if bad:
            raise CorruptFileError(f"checksum does not match: {'; '.join(bad[:5])}", path=self._archive.path)
