"""The training job every arm shares: a small GPT under AdamW on random tokens; forward, backward, step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

VOCABULARY = 4096
CONTEXT = 128  # tokens in a sequence
LAYERS = 8
HEAD_WIDTH = 64
HOST = torch.device("cpu")
COPIES = 3  # weight, exp_avg and exp_avg_sq: what a checkpoint holds of every parameter


class Gpt(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // HEAD_WIDTH, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, time) token ids -> (batch, time, vocabulary) logits."""
        mask = nn.Transformer.generate_square_subsequent_mask(
            tokens.shape[1], device=tokens.device, dtype=self.head.weight.dtype
        )
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, time + 1) token ids -> how badly each was predicted from those before it, on the mean."""
        logits = self(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def width_for(state_bytes: int, dtype: torch.dtype) -> int:
    """The model width, a multiple of the head width, whose AdamW state comes closest to `state_bytes`."""

    def state(width: int) -> int:
        return COPIES * dtype.itemsize * (12 * LAYERS * width**2 + 2 * VOCABULARY * width)

    return min(range(HEAD_WIDTH, 8192, HEAD_WIDTH), key=lambda width: abs(state(width) - state_bytes))


Mark = float | torch.cuda.Event


def seconds_between(begin: Mark, end: Mark) -> float:
    """Of two marks that have passed."""
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(begin.elapsed_time(end)) / 1e3
    assert isinstance(begin, float) and isinstance(end, float)
    return end - begin


@dataclass
class Training:
    """A model and its optimizer, stepped once, so that the optimizer's state exists."""

    state_bytes: int
    sequences: int = 2
    device: torch.device = HOST
    micro_batches: int = 1
    dtype: torch.dtype = torch.float32
    model: Gpt = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = self.build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.compute()
        self.optimizer.step()

    def build(self) -> Gpt:
        with self.device:  # on the host one thread would draw billions of random numbers
            return Gpt(width_for(self.state_bytes, self.dtype)).to(self.dtype)

    def compute(self) -> None:
        """Forward and backward, until they are done: what a checkpoint may hide behind. In bfloat16 on a GPU."""
        self.optimizer.zero_grad(set_to_none=False)
        for _ in range(self.micro_batches):
            tokens = torch.randint(VOCABULARY, (self.sequences, CONTEXT + 1), device=self.device)
            with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
                loss = self.model.loss(tokens)
            torch.autograd.backward(loss)
        self.synchronize()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def mark(self) -> Mark:
        """A moment of the training: of its thread on the host, of its stream on a GPU, which may be made to wait where
        the thread is not."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def calibrate(self, compute_s: float) -> float:
        """Choose the batch so that `compute` takes at least `compute_s`; returns the seconds it now takes."""
        while (seconds := self._compute_seconds()) < compute_s:
            self.sequences = max(self.sequences + 1, int(self.sequences * min(4.0, compute_s / seconds)))
        return seconds

    def _compute_seconds(self) -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            self.compute()
            times.append(time.perf_counter() - start)
        return sorted(times)[1]

    def state(self) -> dict[str, dict[str, object]]:
        """What a checkpoint holds, as `torch.save` would be given it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the same state under flat names: what `safetensors` and the floor arm write."""
        return dict(named_tensors("", self.state()))


def named_tensors(prefix: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in nested dicts, named by their path; whatever is not a tensor is left out."""
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from named_tensors(f"{prefix}.{key}" if prefix else str(key), inner)
