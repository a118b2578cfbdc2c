"""What the Trainer does after a save: numbers for its loggers, the push, and the old checkpoints that must go.

The Trainer does these at once. Here they wait until the checkpoint is durable.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from transformers import Trainer, TrainerState

import lazyckpt
from lazyckpt.integrations.transformers_staging import oldest_first


@dataclass
class Save:
    """A checkpoint from ``_save_checkpoint`` until it is durable and announced."""

    trainer: Trainer
    state: TrainerState  # as it was then
    target: str  # the folder's final name, as the Trainer spells it
    handle: lazyckpt.SaveHandle
    blocked_s: float  # in _save_checkpoint

    def metrics(self) -> dict[str, float]:
        return {
            "checkpoint/step": self.state.global_step,
            "checkpoint/blocked_ms": (self.blocked_s + self.handle.metrics.gate_blocked_s) * 1e3,
            "checkpoint/durable_s": self.handle.metrics.durable_s,
        }

    def push(self) -> None:
        """Pushes the folder if ``push_to_hub`` is set, with the state of its step."""
        now, self.trainer.state = self.trainer.state, self.state
        try:
            if self.trainer.args.push_to_hub:
                self.trainer._push_from_checkpoint(self.target)
        finally:
            self.trainer.state = now

    def best(self) -> list[str]:
        """The name of the best checkpoint, if it is known."""
        best = self.state.best_model_checkpoint
        return [] if best is None else [os.path.basename(best)]

    def outdated(self, later: Iterable[Save]) -> list[Path]:
        """Returns the checkpoints that transformers.trainer_utils.rotate_checkpoints would remove after this save.

        Leaves out those of ``later`` saves, which may be durable, but are not announced yet.
        """
        limit = self.trainer.args.save_total_limit
        if not limit or limit < 0:
            return []
        kept = {str(Path(save.target)) for save in later}
        checkpoints = [path for path in oldest_first(os.path.dirname(self.target)) if path not in kept]
        protected = set(checkpoints[-1:])
        if self.state.best_model_checkpoint is not None:
            protected.add(str(Path(self.state.best_model_checkpoint)))
        surplus = len(checkpoints) - max(limit, len(protected))
        return [Path(path).absolute() for path in checkpoints if path not in protected][: max(surplus, 0)]
