"""The experiments of FastPersist (003) and DataStates-LLM (001), in the model."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.pictures import Picture
from benchmarks.scale.constants import Constants
from benchmarks.scale.model import (
    Job,
    durable_s,
    engines,
    iteration_with_save_s,
    throughput_gbps,
)

BYTES_OF_A_PARAMETER = 14  # fp16 weights, and fp32 weights and moments of Adam
WRITERS = tuple(2**n for n in range(11))
DEGREES = tuple(2**n for n in range(8))  # of data parallelism
FREQUENCIES = (1, 2, 5, 10)
ITERATIONS = 15


@dataclass(frozen=True)
class Gpt3:
    """A row of table 2 of FastPersist. The batch is the same with any number of GPUs."""

    name: str
    parameters: float
    slices: int  # GPUs of one replica
    sequences: int  # in a batch
    state_gb: float

    def job(self, replicas: int) -> Job:
        gpus = self.slices * replicas
        flops = 6 * self.parameters * self.sequences * 2048
        return Job(gpus, self.state_gb, flops / (gpus * 125e12 * 0.3), self.slices)  # V100 at 30 % of its peak


GPT3 = (
    Gpt3("0.7B", 0.7e9, 1, 256, 10),
    Gpt3("1.3B", 1.3e9, 2, 512, 17),
    Gpt3("2.7B", 2.7e9, 4, 512, 35),
    Gpt3("6.7B", 6.7e9, 8, 1024, 88),
    Gpt3("13B", 13e9, 16, 1024, 173),
)

LLAMA = {3: 1, 7: 2, 13: 4, 33: 8, 70: 20}  # billions of parameters, and nodes of one replica (001, table II)


def llama(billions: int, replicas: int = 1) -> Job:
    """16 sequences of each replica, so that an iteration takes as long with more of them; optimizers are sharded."""
    gpus = 4 * LLAMA[billions]
    flops = 6 * billions * 1e9 * 16 * 2048
    iteration_s = flops / (gpus * 312e12 * 0.3)  # A100 at 30 % of its peak
    return Job(gpus * replicas, billions * BYTES_OF_A_PARAMETER, iteration_s, gpus * replicas)


def written_gbps(nodes: int, writers: int, c: Constants) -> float:
    """A state of 10 GB on all replicas, until it is durable."""
    job = Job(nodes * int(c.gpus_per_node), 10.0, 1.0, 1)
    return job.state_gb / durable_s(job, engines(c)[-1], c, writers=writers)


def checkpoint_speedup(job: Job, c: Constants) -> float:
    """Of lazyckpt, over torch.save, without training."""
    base, *_, ours = engines(c)
    return durable_s(job, base, c) / durable_s(job, ours, c)


def training_speedup(job: Job, c: Constants) -> float:
    """With a checkpoint at every iteration."""
    base, *_, ours = engines(c)
    return iteration_with_save_s(job, base, c) / iteration_with_save_s(job, ours, c)


def compared(c: Constants) -> str:
    """The papers' figures that their text states, beside those of the model."""
    small, large, six = GPT3[0], GPT3[-1], GPT3[-2]
    best = {nodes: max(written_gbps(nodes, n, c) for n in WRITERS if n <= 16 * nodes) for nodes in (2, 8)}
    whole = large.job(8)
    rows = [
        ("10 GB from 2 nodes, best number of writers, GB/s", "8", "41.8", f"{best[2]:.1f}"),
        ("10 GB from 8 nodes, best number of writers, GB/s", "8", "129.8", f"{best[8]:.1f}"),
        (
            "checkpoint of 0.7B, 128 GPUs, over torch.save",
            "9(a)",
            "116",
            f"{checkpoint_speedup(small.job(128), c):.0f}",
        ),
        ("checkpoint of 13B, 128 GPUs, over torch.save", "9(a)", "28", f"{checkpoint_speedup(whole, c):.0f}"),
        ("13B, 128 GPUs, GB/s", "9(b)", "146", f"{whole.state_gb / durable_s(whole, engines(c)[-1], c):.0f}"),
        ("training of 0.7B, 128 GPUs", "9(c)", "21.8", f"{training_speedup(small.job(128), c):.1f}"),
        ("training of 13B, 128 GPUs", "9(c)", "1.6", f"{training_speedup(whole, c):.1f}"),
        ("training of 6.7B, 1,024 GPUs", "12", "10.2", f"{training_speedup(six.job(128), c):.1f}"),
        (
            "training of 13B, 2,048 GPUs",
            "12",
            "3.6 with pipelines, 11.3 without",
            f"{training_speedup(large.job(128), c):.1f}",
        ),
    ]
    lines = [f"| {about} | {figure} | {paper} | {model} |" for about, figure, paper, model in rows]
    return "\n".join(["| FastPersist | figure | paper | model |", "|---|---|--:|--:|", *lines])


def throughput(c: Constants) -> str:
    """By model size, by how often is saved, and by engine."""
    head = [f"every {n}" if n > 1 else "every iteration" for n in FREQUENCIES]
    lines = ["| model | engine | " + " | ".join(head) + " |", "|---|---|" + "--:|" * len(head)]
    for billions in LLAMA:
        job = llama(billions)
        for engine in engines(c):
            cells = [f"{throughput_gbps(job, engine, c, every):,.0f}" for every in FREQUENCIES]
            about = f"{billions}B, {job.state_gb:.0f} GB, {job.ranks} GPUs"
            lines.append(f"| {about} | {engine.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def by_writers(c: Constants) -> Picture:
    picture = Picture("writers", "GB/s until durable", log_x=True, log_y=True)
    for nodes in (2, 8, 64):
        for writers in WRITERS:
            if writers <= nodes * c.gpus_per_node:
                picture.add(f"{nodes} nodes", writers, [written_gbps(nodes, writers, c)])
    return picture


def by_replicas(c: Constants) -> Picture:
    picture = Picture("replicas (degree of data parallelism)", "times as fast", log_x=True, log_y=True)
    for model in GPT3:
        for replicas in DEGREES:
            picture.add(model.name, replicas, [training_speedup(model.job(replicas), c)])
    return picture


def by_time(c: Constants) -> Picture:
    picture = Picture("replicas", "seconds, end to end", log_x=True)
    for engine in engines(c):
        for replicas in DEGREES[:5]:
            job = llama(13, replicas)
            last_s = 0.0 if engine.blocks else durable_s(job, engine, c)
            picture.add(engine.name, replicas, [ITERATIONS * iteration_with_save_s(job, engine, c) + last_s])
    return picture


def by_throughput(c: Constants) -> Picture:
    picture = Picture("replicas", "GB/s, over blocked time", log_x=True, log_y=True)
    for engine in engines(c):
        for replicas in DEGREES[:5]:
            picture.add(engine.name, replicas, [throughput_gbps(llama(13, replicas), engine, c)])
    return picture
