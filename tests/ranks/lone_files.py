"""A rank of training.py that saves lone files, as trainers do: the ranks write each together (Saver.save_together)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import lazyckpt
from lazyckpt.storage import manifest
from ranks.training import PROBE, Rank, tick_of

EVERYONES = ("model", "optimizer")


class LoneFileRank(Rank):
    """With ``laps=1`` all files have one name. Without ``laps``, rank 0 removes all but the newest."""

    @contextlib.contextmanager
    def opened(self, knobs: dict[str, Any]) -> Iterator[None]:
        with lazyckpt.Saver(**knobs) as self.saver:
            yield

    def restore(self) -> None:
        step = torch.tensor(-1)
        if self.training.rank == 0 and (found := self.orders.checkpoints()):
            step.fill_(manifest.step_of(max(found, key=tick_of).stem))
        dist.broadcast(step, 0)
        if step >= 0:
            path = self.orders.path_of(int(step))
            tree = lazyckpt.load(path)
            self.training.model.load_state_dict(tree["model"])
            self.training.optimizer.load_state_dict(tree["optimizer"])
            self.training.clock.update(tree["clock"])
            torch.set_rng_state(tree["rng"]["torch"])
            self.restored(path, saved_by=1)
        self.note("restored", self.training.tick)

    def launch(self, step: int) -> lazyckpt.SaveHandle:
        """The probe has the name of another file."""
        training = self.training
        state = {
            "model": training.model.state_dict(),
            "optimizer": training.optimizer.state_dict(),
            "clock": dict(training.clock),
            "rng": {"torch": torch.get_rng_state()},
        }
        path = self.orders.path_of(self.orders.saved_as(step))
        number = PROBE if step == PROBE else training.tick
        old = [] if training.rank or self.orders.laps or step == PROBE else self.orders.checkpoints()[:-1]
        handle = self.saver.save_together(state, path, writers=self.orders.writers, everyones=EVERYONES, step=number)
        for file in old:
            self.saver.remove(file)
        return handle
