"""Each rank decides alone what it writes, and the ranks' shares form a partition."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lazyckpt.ranks.shares import BLOCK_BYTES, Held, cut, cut_around, spread, writes

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


_MANY = st.lists(st.integers(1, 300_000) | st.integers(1, 9000), min_size=1, max_size=12)


@pytest.mark.parametrize("writers", [2, 3, 7])
def test_bytes_are_cut_around_those_of_the_first_writer(writers: int) -> None:
    random = Random(writers)
    for _ in range(300):
        begin, length = 4096 * random.randrange(1, 4), random.choice([1, 4096, 5000, 100_000, 3_000_000])
        edges = sorted(random.randrange(length + 1) for _ in range(2 * random.randrange(4)))
        kept = [(begin + a, begin + b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
        region = cut_around(begin, begin + length, kept, writers)
        assert region.end == (begin + length) // 4096 * 4096
        pieces = sorted(piece for ranges in region.ranges for piece in ranges)
        assert [a for a, _ in pieces] == [begin, *(b for _, b in pieces[:-1])][: len(pieces)]
        assert (pieces[-1][1] if pieces else begin) == max(region.end, begin)
        assert len(region.ranges) == writers and all(a < b and a % 4096 == b % 4096 == 0 for a, b in pieces)
        for ranges in region.ranges[1:]:
            assert not [1 for a, b in ranges for c, d in kept if a < d and c < b]
        taken = [sum(b - a for a, b in ranges) for ranges in region.ranges]
        assert max(taken[1:]) - min(taken[1:]) <= 4096 and max(taken[1:]) <= sum(taken) / writers + 4096


def laid_out(sizes: list[int], first: int) -> list[int]:
    """Offsets as an archive has them: descriptor and header between two storages, each at the begin of a block."""
    begins, offset = [], first * BLOCK_BYTES
    for nbytes in sizes:
        begins.append(offset)
        offset = -(-(offset + nbytes + 16 + 60) // BLOCK_BYTES) * BLOCK_BYTES
    return begins


@given(_MANY, st.integers(0, 5), st.integers(0, 500_000), st.integers(1, 6))
def test_the_ranges_of_a_file_are_a_partition_into_blocks(sizes, first, before, writers):
    begins = laid_out(sizes, first)
    region = cut(begins, sizes, before, writers)
    assert len(region.ranges) == writers
    everything = sorted(piece for of_one in region.ranges for piece in of_one)
    assert [begin for begin, _ in everything] == [region.begin, *(end for _, end in everything[:-1])][: len(everything)]
    assert everything == [] or everything[-1][1] == region.end
    assert all(begin % BLOCK_BYTES == end % BLOCK_BYTES == 0 and begin < end for begin, end in everything)
    assert region.begin == begins[0] and 0 <= begins[-1] + sizes[-1] - region.end < BLOCK_BYTES


def bytes_in(ranges: list[tuple[int, int]], begins: list[int], sizes: list[int]) -> list[int]:
    """How many bytes of each storage lie in the ranges."""
    return [
        sum(max(0, min(end, at + nbytes) - max(begin, at)) for begin, end in ranges)
        for at, nbytes in zip(begins, sizes, strict=True)
    ]


@example(sizes=[1, 1, 1, 2049, 4096], before=2045, writers=4)  # a cut near the end of a storage below a block
@given(_MANY, st.integers(0, 500_000), st.integers(1, 6))
def test_the_writers_of_a_file_write_equal_bytes(sizes, before, writers):
    begins = laid_out(sizes, 1)
    region = cut(begins, sizes, before, writers)
    loads = [sum(bytes_in(ranges, begins, sizes)) for ranges in region.ranges]
    loads[0] += begins[-1] + sizes[-1] - region.end  # it writes the rest of the file, too
    assert sum(loads) == sum(sizes)
    mean = max(sum(sizes) + before, 0) / writers
    others = mean if before <= mean else sum(sizes) / max(writers - 1, 1)
    assert all(load >= others - 2 * BLOCK_BYTES for load in loads[1:-1])
    assert all(load <= others + BLOCK_BYTES for load in loads[1:])
    # half a block is the rounding; then a block of each storage that is cut, and the rest of the file
    assert loads[0] <= max(mean - before, 0) + BLOCK_BYTES * (writers + 0.5)


@given(_MANY, st.integers(1, 6))
def test_the_checksum_of_a_storage_is_with_the_writer_of_all_of_it_or_with_the_first(sizes, writers):
    begins = laid_out(sizes, 1)
    region = cut(begins, sizes, 0, writers)
    for at, (begin, nbytes) in enumerate(zip(begins, sizes, strict=True)):
        place = range(begin + nbytes, begin + nbytes + 16)
        if place[-1] >= region.end:
            continue  # rank 0's
        having = {w for w in range(writers) for b, e in region.ranges[w] if b < place[-1] + 1 and place[0] < e}
        parts = [bytes_in(ranges, begins, sizes)[at] for ranges in region.ranges]
        assert having == {parts.index(nbytes) if nbytes in parts else 0}, (parts, having)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=16), st.integers(1, 16))
def test_writers_are_spread_over_the_nodes(nodes, count):
    chosen = spread(nodes, count)
    assert chosen[0] == 0 and sorted(set(chosen)) == chosen and len(chosen) == min(count, len(nodes))
    counts = [sum(nodes[rank] == node for rank in chosen) for node in set(nodes)]
    full = [sum(other == node for other in nodes) for node in set(nodes)]
    assert all(have == of or max(counts) - have <= 1 for have, of in zip(counts, full, strict=True))
