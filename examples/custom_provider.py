"""Save an object of your own with a StateProvider: a replay buffer, besides a network.

    python examples/custom_provider.py [FOLDER]    # default runs/custom_provider; takes a second

The script saves, changes the buffer at once, and restores into new objects. The restored buffer has the contents, the
position and the random samples of the moment of save().
"""

import sys

import torch
from torch import nn

import lazyckpt

CAPACITY, WIDTH, BATCH = 1000, 32, 64


class ReplayBuffer:
    """Holds the last `capacity` pairs of an observation and its worth."""

    def __init__(self, capacity, seed):
        self.seen, self.worth = torch.zeros(capacity, WIDTH), torch.zeros(capacity)
        self.added = 0  # in total; the next pair goes to added % capacity
        self.random = torch.Generator().manual_seed(seed)

    def add(self, seen, worth):
        at = self.added % len(self.worth)
        self.seen[at], self.worth[at] = seen, worth
        self.added += 1

    def sample(self, n):
        chosen = torch.randint(min(self.added, len(self.worth)), (n,), generator=self.random)
        return self.seen[chosen], self.worth[chosen]


class ReplayBufferProvider(lazyckpt.StateProvider):
    def __init__(self, buffer):
        super().__init__()
        self.buffer = buffer

    def state(self):  # live tensors: save() copies them before it returns, since no optimizer owns them
        b = self.buffer
        return {"seen": b.seen, "worth": b.worth, "added": b.added, "random": b.random.get_state()}

    def landings(self, saved):  # optional: refuses a checkpoint before anything is overwritten (no tensor is read yet)
        if saved["seen"].shape != self.buffer.seen.shape:
            raise lazyckpt.RestoreError(f"{len(saved['seen'])} pairs saved, {len(self.buffer.seen)} expected")
        return super().landings(saved)

    def load_state(self, state):
        b = self.buffer
        b.seen, b.worth, b.added = state["seen"], state["worth"], state["added"]
        b.random.set_state(state["random"])


def main(folder):
    buffer, network = ReplayBuffer(CAPACITY, seed=1), nn.Linear(WIDTH, 1)
    optimizer = torch.optim.AdamW(network.parameters())
    with lazyckpt.Checkpointer(folder, keep_last=1) as ckpt:
        ckpt.track(network=network, optimizer=optimizer, replay=ReplayBufferProvider(buffer))
        for step in range(1, CAPACITY + 200):  # overwrites the oldest pairs
            buffer.add(torch.randn(WIDTH), step)
        handle = ckpt.save(step)
        expected, buffer.seen[:] = buffer.sample(BATCH), -1  # the checkpoint already has its copy
        path = handle.result()
    print(f"saved step {step} to {path}: {handle.metrics.eager_bytes:,} bytes copied before save() returned")
    print(f"plain torch.load finds {', '.join(torch.load(path / 'state.pt')['replay'])}")

    buffer, network = ReplayBuffer(CAPACITY, seed=2), nn.Linear(WIDTH, 1)
    with lazyckpt.Checkpointer(folder) as ckpt:
        optimizer = torch.optim.AdamW(network.parameters())
        ckpt.track(network=network, optimizer=optimizer, replay=ReplayBufferProvider(buffer))
        assert ckpt.restore() == step
    assert all(map(torch.equal, buffer.sample(BATCH), expected)), "the restored buffer draws other samples"
    print(f"restored {len(buffer.worth)} of {buffer.added} pairs; the next {BATCH} samples are the same")


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["runs/custom_provider"])
