"""Ranks of one machine that hold the same shards, or the same whole tensors, read each byte of them once.

The ranks form groups: those whose shards are the same, as replicas in HSDP, and those whose whole tensors are. In each
group every rank reads some of the tensors, and the others get them through shared memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import json
from collections.abc import Sequence
from typing import NamedTuple

from lazyckpt import _engine
from lazyckpt.ranks.rank_claims import machine
from lazyckpt.ranks.shared_memory import Segment, SharedMemory, found
from lazyckpt.ranks.team import GroupTeam, Team
from lazyckpt.reading import relay
from lazyckpt.reading.sharded.folder import ShardedFolder, Target


class Wanted(NamedTuple):
    """What one rank wants, and its shared memory."""

    targets: str  # equal on ranks that want the same
    machine: str
    offer: str


def fill(
    folder: ShardedFolder, targets: Sequence[Target], is_shard: Sequence[bool], team: Team, engine: _engine.Engine
) -> None:
    """Reads parts of tensors into place, and checks every byte. Raises LoadError, on all ranks if it is raised on one,
    and RankError if one is lost. The targets may hold some of the new bytes then."""
    kinds = [[t for t, shard in zip(targets, is_shard, strict=True) if shard is kind] for kind in (True, False)]
    if not isinstance(team, GroupTeam):
        for kind in kinds:
            folder.read(kind, engine)
        return
    with contextlib.ExitStack() as stack:
        for kind in kinds:  # on all ranks in this order
            _fill(folder, kind, team, engine, stack)


def _fill(
    folder: ShardedFolder,
    targets: Sequence[Target],
    team: GroupTeam,
    engine: _engine.Engine,
    stack: contextlib.ExitStack,
) -> None:
    own: Segment | None = None
    offer = ""
    if sum(target.local.nbytes for target in targets) >= relay.LEAST_BYTES:
        own, offer = Segment.make()
        if own is not None:
            stack.callback(own.close)
    told = json.dumps([(t.name, t.offsets, tuple(t.local.shape), str(t.local.dtype)) for t in targets])
    wanted = Wanted(hashlib.blake2b(told.encode()).hexdigest(), machine(), offer)
    answers = team.gather(lambda: wanted)
    group = [rank for rank, other in enumerate(answers) if other.offer and other[:2] == wanted[:2]]
    segments = found({rank: answers[rank].offer for rank in group}, team.rank, own)
    together = any(other.offer for other in answers) and all(team.gather(lambda: own is None or segments is not None))
    failure: BaseException | None = None
    if together and segments is not None and len(group) > 1:
        way = SharedMemory(team.lookout(), team.rank, segments)

        def read(some: Sequence[Target]) -> None:
            folder.read(some, engine)

        failure = relay.relay(way, team.rank, shares_of(targets, group), read, lambda target: target.local)

    def outcome() -> None:
        if failure is not None:
            raise failure
        if not together or segments is None or len(group) < 2:
            folder.read(targets, engine)

    team.agree(outcome)


def shares_of(targets: Sequence[Target], group: Sequence[int]) -> dict[int, list[list[Target]]]:
    """What each reader of a group reads in each round: about equal bytes, in whole tensors."""
    sizes = [target.local.nbytes for target in targets]
    shares: dict[int, list[list[Target]]] = {group[at]: [[]] for at in relay.readers_of(sum(sizes), len(group))}
    loads = [(0, rank) for rank in shares]
    in_round = dict.fromkeys(shares, 0)
    for at in sorted(range(len(targets)), key=lambda at: (-sizes[at], at)):
        nbytes, rank = loads[0]
        heapq.heapreplace(loads, (nbytes + sizes[at], rank))
        if in_round[rank] + sizes[at] > relay.ROUND_BYTES and shares[rank][-1]:
            shares[rank].append([])
            in_round[rank] = 0
        shares[rank][-1].append(targets[at])
        in_round[rank] += sizes[at]
    rounds = max(map(len, shares.values()))
    return {rank: share + [[]] * (rounds - len(share)) for rank, share in shares.items()}
