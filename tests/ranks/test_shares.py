"""Each rank decides alone what it writes, and the ranks' shares form a partition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lazyckpt.ranks.shares import Held, writes

_shard = st.tuples(st.text(min_size=1, max_size=3), st.integers(0, 1 << 20), st.integers(0, 2))


@given(st.lists(_shard, max_size=40, unique_by=lambda shard: shard[0]), st.integers(1, 5))
def test_each_shard_is_written_by_exactly_one_replica(shards, replicas):
    answers = [
        writes([Held(name, nbytes, group, rank, replicas) for name, nbytes, group in shards])
        for rank in range(replicas)
    ]
    assert all(sum(column) == 1 for column in zip(*answers, strict=True))


@given(st.lists(_shard, max_size=40, unique_by=lambda shard: shard[0]), st.integers(2, 5))
def test_replicas_write_equal_bytes_up_to_one_shard(shards, replicas):
    for group in range(3):
        here = [(name, nbytes) for name, nbytes, of in shards if of == group]
        loads = []
        for rank in range(replicas):
            mine = writes([Held(name, nbytes, group, rank, replicas) for name, nbytes in here])
            loads.append(sum(nbytes for (_, nbytes), does in zip(here, mine, strict=True) if does))
        assert max(loads) - min(loads) <= max((nbytes for _, nbytes in here), default=0)


@given(st.lists(_shard, max_size=40, unique_by=lambda shard: shard[0]), st.randoms())
def test_the_order_of_the_shards_does_not_matter(shards, random):
    held = [Held(name, nbytes, group, 1, 3) for name, nbytes, group in shards]
    shuffled = random.sample(held, len(held))
    assert dict(zip(held, writes(held), strict=True)) == dict(zip(shuffled, writes(shuffled), strict=True))


def test_a_shard_without_replicas_is_its_own_ranks():
    assert writes([Held("a", 5, "mesh", 0, 1), Held("b", 0, "mesh", 0, 1)]) == [True, True]
