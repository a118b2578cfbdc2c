"""From 8 to 16,384 ranks that fail: how often to save, how many in flight, what a failure costs, and what remains."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist

from benchmarks.pictures import Picture
from benchmarks.scale.constants import Constants
from benchmarks.scale.failures import Saving, goodput, simulate
from benchmarks.scale.model import (
    Job,
    best_in_flight,
    engines,
    load_s,
    mtbf_s,
    plan,
    recovery_s,
    shortest_interval_s,
    slowest,
    useful_steps_an_hour,
)

RANKS = (8, 64, 512, 4096, 16_384)
STATE_GB = 10.0  # of each rank, up to
LARGEST_GB = 5670.0  # 405 billion parameters
ITERATION_S = 5.0
SAVES = 50_000  # that a simulation goes through, about
TWO_CORES = {"lazy_slowdown": 0.39, "dcp_slowdown": 0.70}  # "step over none", docs/benchmarks.md, Many ranks


def job(ranks: int) -> Job:
    """Sharded over all ranks; the state grows with them."""
    return Job(ranks, min(STATE_GB * ranks, LARGEST_GB), ITERATION_S, ranks)


def simulated(saving: Saving, ranks: int, c: Constants) -> float:
    """Goodput where the slowest node is drawn anew for each checkpoint."""
    mean_s = mtbf_s(job(ranks), c)
    failures = min(max(int(SAVES * saving.interval_s / mean_s), 8), 1000)
    nodes = -(-ranks // int(c.gpus_per_node))
    return simulate(saving, mean_s, failures, durable_s=straggling(saving.durable_s, nodes, c))


def straggling(typical_s: float, nodes: int, c: Constants) -> Callable[[random.Random], float]:
    """Draws the time of the slowest of ``nodes``; ``typical_s`` has ``slowest(nodes)`` in it."""
    normal = NormalDist(0.0, c.straggler)

    def draw(source: random.Random) -> float:
        most = (1.0 - source.random()) ** (1 / nodes)  # the largest of so many uniform numbers
        factor = math.exp(normal.inv_cdf(min(most, 1 - 1e-12))) if c.straggler else 1.0
        return typical_s * factor / slowest(nodes, c)

    return draw


def table(c: Constants) -> str:
    heads = (
        "ranks, state, fails every",
        "engine",
        "save every, s",
        "cost, s",
        "durable after, s",
        "a failure costs, s",
        "lost",
        "simulated",
        "useful steps an hour",
    )
    lines = ["| " + " | ".join(heads) + " |", "|---|---|" + "--:|" * (len(heads) - 2)]
    for ranks in RANKS:
        one = job(ranks)
        mean_s = mtbf_s(one, c)
        for engine in engines(c):
            saving = plan(one, engine, c)
            cells = (
                f"{ranks:,}, {one.state_gb:,.0f} GB, {mean_s / 3600:,.0f} h",
                engine.name,
                f"{saving.interval_s:,.0f}",
                f"{saving.cost_s:.2f}",
                f"{saving.durable_s:.1f}",
                f"{recovery_s(saving):,.0f}",
                f"{1 - goodput(saving, mean_s):.2%}",
                f"{1 - simulated(saving, ranks, c):.2%}",
                f"{useful_steps_an_hour(one, engine, c):.1f}",
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def in_flight(c: Constants) -> str:
    """If the storage sets the pace: how many checkpoints to write at once, and how often one can be saved."""
    _, *asynchronous = engines(c)
    heads = [f"{engine.name}: {about}" for engine in asynchronous for about in ("one, every s", "N", "N, every s")]
    lines = ["| ranks | " + " | ".join(heads) + " |", "|--:|" + "--:|" * len(heads)]
    for ranks in RANKS:
        cells = [f"{ranks:,}"]
        for engine in asynchronous:
            number = best_in_flight(job(ranks), engine, c)
            one, many = (shortest_interval_s(job(ranks), engine, c, n) for n in (1, number))
            cells += [f"{one:.2f}", str(number), f"{many:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def loads(c: Constants) -> str:
    """Seconds that replicas of one state take to load it."""
    names = {"torch.save": "torch.load on every rank", "DCP async_save": "dcp.load", "lazyckpt": "lazyckpt, together"}
    lines = ["| replicas | " + " | ".join(names.values()) + " |", "|--:|" + "--:|" * len(names)]
    for ranks in RANKS:
        one = Job(ranks, STATE_GB, ITERATION_S, 1)
        lines.append(f"| {ranks:,} | " + " | ".join(f"{load_s(one, engine, c):.1f}" for engine in engines(c)) + " |")
    return "\n".join(lines)


def sensitivity(c: Constants) -> str:
    """What the largest job loses if other assumptions hold."""
    ranks = RANKS[-1]
    cases = {
        "as above": c,
        "training slows down as on two cores (0.39 and 0.70 instead of 0.01)": replace(c, **TWO_CORES),
        "storage ten times as fast": replace(c, node_gbps=10 * c.node_gbps, shared_gbps=10 * c.shared_gbps),
        "storage a tenth as fast": replace(c, node_gbps=c.node_gbps / 10, shared_gbps=c.shared_gbps / 10),
        "a restart in 20 s": replace(c, restart_s=20.0),
        "ten times as many failures": replace(c, rank_mtbf_h=c.rank_mtbf_h / 10),
    }
    names = [engine.name for engine in engines(c)]
    lines = [f"| {ranks:,} ranks | " + " | ".join(names) + " |", "|---|" + "--:|" * len(names)]
    for about, case in cases.items():
        one = job(ranks)
        lost = [1 - goodput(plan(one, engine, case), mtbf_s(one, case)) for engine in engines(case)]
        lines.append(f"| {about} | " + " | ".join(f"{part:.2%}" for part in lost) + " |")
    return "\n".join(lines)


def picture(c: Constants) -> Picture:
    drawn = Picture("ranks", "lost, percent of the time", log_x=True)
    for engine in engines(c):
        for ranks in RANKS:
            lost = 1 - goodput(plan(job(ranks), engine, c), mtbf_s(job(ranks), c))
            drawn.add(engine.name, ranks, [100 * lost])
    return drawn
