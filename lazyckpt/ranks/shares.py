"""Decides which rank writes which shard: a pure function of facts that every rank knows, so ranks agree without
talking.

A shard that one rank holds is written by that rank. Replicas of a shard share the work by bytes (FastPersist, 4.2).
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Held(NamedTuple):
    """A shard that this rank holds."""

    name: str
    nbytes: int
    group: Hashable  # the ranks that hold the same shards hold equal groups in equal order
    replica: int  # which of them this rank is, from 0
    replicas: int  # how many there are


def writes(held: Sequence[Held]) -> list[bool]:
    """Whether this rank writes each shard: exactly one of its replicas does, and their bytes differ by at most the
    largest shard."""
    answer = [shard.replicas == 1 for shard in held]
    groups: dict[Hashable, list[int]] = {}
    for at, shard in enumerate(held):
        if shard.replicas > 1:
            groups.setdefault((shard.group, shard.replicas), []).append(at)
    for members in groups.values():
        members.sort(key=lambda at: (-held[at].nbytes, held[at].name))
        loads = [(0, replica) for replica in range(held[members[0]].replicas)]
        for at in members:
            nbytes, replica = loads[0]
            heapq.heapreplace(loads, (nbytes + held[at].nbytes, replica))
            answer[at] = replica == held[at].replica
    return answer
