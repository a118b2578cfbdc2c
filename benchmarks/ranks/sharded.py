"""The training job of many ranks: the GPT of the other parts, under FSDP2 and AdamW."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.ranks.member import Member
from benchmarks.ranks.phases import Phases
from benchmarks.workload import Gpt, Training


@dataclass
class ShardedTraining(Training):
    """`state_bytes` are those of all ranks together. What the ranks wait for each other counts for no arm: they meet
    after every backward and after every step."""

    member: Member = field(kw_only=True)
    phases: Phases = field(kw_only=True)

    def build(self) -> Gpt:
        model = super().build()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return model

    def synchronize(self) -> None:
        self.member.barrier()

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's part of each tensor."""
        return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in super().tensors().items()}

    def _compute_seconds(self) -> float:
        return max(self.member.gather(super()._compute_seconds()))


def phases_of(training: Training) -> Phases:
    """Where an arm of many ranks notes its saves."""
    assert isinstance(training, ShardedTraining)
    return training.phases
