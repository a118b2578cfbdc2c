"""What a checkpoint of many ranks costs, how often to save, and how many to have in flight.

A checkpoint takes three ways at once: over the PCIe link of each writer, through the writer itself, and into the
storage of its node, behind which a file system may limit all nodes together. The narrowest one gives the rate. The
slowest node decides when all is written; then the ranks commit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from benchmarks.scale.constants import Constants
from benchmarks.scale.failures import Saving, goodput
from lazyckpt.tools.advice import optimal_interval_s

FAN_IN = 8  # of the tree of votes
ENOUGH = 1.05  # no more checkpoints in flight if the disk is this close to its limit
MOST_IN_FLIGHT = 16


@dataclass(frozen=True)
class Engine:
    """How an engine saves; rates in GB/s."""

    name: str
    blocks: bool  # the call returns when the checkpoint is durable
    all_write: bool  # replicas share the work
    writer_gbps: float
    reader_gbps: float
    blocked_s: float = 0.0
    slowdown: float = 0.0  # the part by which training is slower while a write runs
    file_s: float = 0.0  # of each writer, whatever it writes


def engines(c: Constants) -> list[Engine]:
    """The three that the model compares."""
    return [
        Engine("torch.save", True, False, c.torch_writer_gbps, c.torch_reader_gbps),
        Engine(
            "DCP async_save",
            False,
            True,
            c.dcp_writer_gbps,
            c.dcp_reader_gbps,
            c.dcp_blocked_s,
            c.dcp_slowdown,
            c.dcp_agree_s,
        ),
        Engine(
            "lazyckpt",
            False,
            True,
            c.lazy_writer_gbps,
            c.lazy_reader_gbps,
            c.lazy_blocked_s,
            c.lazy_slowdown,
            c.lazy_file_s,
        ),
    ]


@dataclass(frozen=True)
class Job:
    """A training. Of ``ranks``, each ``copy_ranks`` hold one copy of the state together; the others are replicas."""

    ranks: int
    state_gb: float
    iteration_s: float
    copy_ranks: int


def commit_s(ranks: int, c: Constants) -> float:
    """The time of lazyckpt's commit, as benchmarks/ranks_simulation.py finds it. The store serves all messages."""
    levels = math.ceil(math.log(max(ranks, 2), FAN_IN) - 1e-9)
    round_trips = 9 + 4 * levels
    return (ranks * c.messages * c.message_us + round_trips * c.round_trip_us + 3 * c.folder_us) / 1e6


def slowest(nodes: int, c: Constants) -> float:
    """How many times as long as a typical one the slowest of ``nodes`` takes: the median of the slowest."""
    return math.exp(c.straggler * NormalDist().inv_cdf(0.5 ** (1 / nodes)))


def rate_gbps(job: Job, engine: Engine, c: Constants, *, in_flight: int = 1, writers: int | None = None) -> float:
    """GB/s of one checkpoint while ``in_flight`` are written, without stragglers. Writers are spread over all nodes."""
    writers = writers or (job.ranks if engine.all_write else job.copy_ranks)
    nodes = min(_nodes(job, c), writers)
    own = writers * min(engine.writer_gbps, c.link_gbps)
    return min(own, min(nodes * c.node_gbps, c.shared_gbps) / in_flight)


def durable_s(job: Job, engine: Engine, c: Constants, *, in_flight: int = 1, writers: int | None = None) -> float:
    """From the call until a restart would find the checkpoint."""
    count = writers or (job.ranks if engine.all_write else job.copy_ranks)
    write_s = job.state_gb / rate_gbps(job, engine, c, in_flight=in_flight, writers=writers)
    votes_s = commit_s(job.ranks, c) if engine.name == "lazyckpt" else 0.0
    return write_s * slowest(min(_nodes(job, c), count), c) + engine.file_s + votes_s


def cost_s(job: Job, engine: Engine, c: Constants, in_flight: int = 1) -> float:
    """Training time that a checkpoint costs, if no save waits for an earlier one."""
    if engine.blocks:
        return durable_s(job, engine, c)
    copy_s = job.state_gb / (job.ranks * c.link_gbps)
    gate_s = max(0.0, copy_s - job.iteration_s)  # the next optimizer step waits for the copies
    return engine.blocked_s + gate_s + engine.slowdown * durable_s(job, engine, c, in_flight=in_flight)


def shortest_interval_s(job: Job, engine: Engine, c: Constants, in_flight: int) -> float:
    """Time between two checkpoints that the storage keeps up with (PCcheck: T_w / N)."""
    return durable_s(job, engine, c, in_flight=in_flight) / in_flight


def best_in_flight(job: Job, engine: Engine, c: Constants) -> int:
    """How many checkpoints to write at once: the fewest that keep the storage busy.

    PCcheck takes the N for which T_w(N) / N is least. More of them need memory, and each takes longer.
    """
    if engine.blocks:
        return 1
    least = shortest_interval_s(job, engine, c, 1000)
    numbers = range(1, MOST_IN_FLIGHT)
    return next((n for n in numbers if shortest_interval_s(job, engine, c, n) <= ENOUGH * least), MOST_IN_FLIGHT)


def iteration_with_save_s(job: Job, engine: Engine, c: Constants, every: int = 1, in_flight: int = 2) -> float:
    """Mean time of an iteration with a checkpoint at every ``every``-th."""
    period_s = every * job.iteration_s + cost_s(job, engine, c)
    if not engine.blocks:
        period_s = max(period_s, min(shortest_interval_s(job, engine, c, n) for n in range(1, in_flight + 1)))
    return period_s / every


def throughput_gbps(job: Job, engine: Engine, c: Constants, every: int = 1) -> float:
    """Bytes of a checkpoint over the time that it blocks training, as DataStates-LLM has it."""
    lost_s = every * (iteration_with_save_s(job, engine, c, every) - job.iteration_s)
    return job.state_gb / lost_s


def load_s(job: Job, engine: Engine, c: Constants) -> float:
    """Every rank takes its part of a copy, and a node reads what several of its ranks hold once, by its page cache.

    Replicas under lazyckpt read each byte once in the whole job, and then each node receives what its ranks hold.
    """
    nodes, reader_gbps = _nodes(job, c), min(engine.reader_gbps, c.link_gbps)
    share = job.state_gb / job.copy_ranks
    of_node = share * min(job.ranks, c.gpus_per_node, job.copy_ranks)
    if engine.name == "lazyckpt" and job.copy_ranks < job.ranks:
        together = min(job.ranks * reader_gbps, nodes * c.node_gbps, c.shared_gbps)
        return job.state_gb / together + of_node / c.network_gbps
    return max(share / reader_gbps, of_node / c.node_gbps, nodes * of_node / c.shared_gbps)


def mtbf_s(job: Job, c: Constants) -> float:
    """Of the whole job: any rank that fails stops all."""
    return c.rank_mtbf_h * 3600 / job.ranks


def plan(job: Job, engine: Engine, c: Constants) -> Saving:
    """How often to save, and all that follows: Young and Daly, but no more often than the storage keeps up with.

    If Young and Daly ask for less than one write at a time can do, one is in flight; otherwise PCcheck's number.
    """
    wanted_s = max(optimal_interval_s(cost_s(job, engine, c), mtbf_s(job, c)), job.iteration_s)
    number = 1 if shortest_interval_s(job, engine, c, 1) <= wanted_s else best_in_flight(job, engine, c)
    cost = cost_s(job, engine, c, number)
    wanted_s = max(optimal_interval_s(cost, mtbf_s(job, c)), job.iteration_s)
    interval_s = wanted_s if engine.blocks else max(wanted_s, shortest_interval_s(job, engine, c, number))
    restart_s = c.restart_s + load_s(job, engine, c)
    return Saving(interval_s, cost, durable_s(job, engine, c, in_flight=number), restart_s, number)


def recovery_s(saving: Saving) -> float:
    """What a failure costs on the mean: the restart, half a period, and the checkpoint that was not durable yet."""
    behind_s = saving.durable_s - saving.cost_s  # training went on meanwhile
    return saving.restart_s + (saving.interval_s + saving.cost_s) / 2 + behind_s


def useful_steps_an_hour(job: Job, engine: Engine, c: Constants) -> float:
    return 3600 / job.iteration_s * goodput(plan(job, engine, c), mtbf_s(job, c))


def _nodes(job: Job, c: Constants) -> int:
    return math.ceil(job.ranks / c.gpus_per_node)
