"""What the programs share: a GPU, sizes drawn by seed, a model, and steps of some length."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchmem import sdk
from torchmem.sdk import Session

PAUSES = (0.0, 0.0, 0.004, 0.01, 0.02, 0.045)
"""Seconds that a step takes besides PyTorch's own work, which is 1 to 3 ms."""
SHARDS, SMALLER = 4, 8
"""GPUs over which a model is sharded, and how much smaller batches are, where that is advised."""
MOST_STEPS = {0.0: 400, 0.004: 300, 0.01: 200, 0.02: 120, 0.045: 80}


@dataclass(frozen=True, slots=True)
class Network:
    """A model of equal layers, its optimizer, and the bytes of activations for each row."""

    module: nn.Sequential
    optimizer: torch.optim.Optimizer
    width: int
    row_bytes: int

    def rows(self, size: float) -> int:
        """Return the rows of a batch whose activations take this many bytes."""
        return max(1, int(size / self.row_bytes))

    def batch(self, rows: int) -> Tensor:
        """Return a batch."""
        return torch.rand(rows, self.width, device="cuda")


class Done(Exception):  # noqa: N818
    """The job has lasted as long as it had to."""


class Job:
    """One job: its kind and seed decide every size.

    Its cured twin is the same script with some advice followed, which VERDICT_CURE names. It ends
    after VERDICT_STEPS steps at the latest, as some jobs would go on for ever.
    """

    def __init__(self, kind: str, seed: int) -> None:
        self.session: Session = sdk.instrument(run=f"{kind}-{seed}")
        self.draw = random.Random(f"{kind} {seed}")  # noqa: S311
        self.pause = self.draw.choice(PAUSES)
        self.most = self.draw.randint(40, MOST_STEPS[self.pause])
        """Steps after which a job ends that does not run out of memory."""
        self.free = torch.cuda.mem_get_info()[0]
        self.progress = 0
        """Steps, evaluation batches or tokens, since the job did something new."""
        self.total = 0
        """The same, since it began."""
        self._cure = os.environ.get("VERDICT_CURE", "")
        self._last = int(os.environ.get("VERDICT_STEPS", "0"))

    def cured(self, *advice: str) -> bool:
        """Return whether this is the twin that follows one of these pieces of advice."""
        return self._cure in advice

    def share(self, low: float, high: float) -> int:
        """Return bytes: a share of the free memory, drawn between two."""
        return int(self.draw.uniform(low, high) * self.free)

    def network(self, size: int, optimizer: str = "AdamW", layers: int | None = None) -> Network:
        """Return a model whose parameters, gradients and optimizer state take `size` bytes."""
        module, width = self.module(size, 4 if optimizer == "AdamW" else 2, layers)
        options = {"foreach": False} if self.cured("foreach") else {}
        made = getattr(torch.optim, optimizer)(module.parameters(), lr=1e-3, **options)
        return Network(module, made, width, len(module) * width * 4)

    def module(
        self, size: int, copies: int, layers: int | None = None
    ) -> tuple[nn.Sequential, int]:
        """Return a model and its width; `copies` of its parameters take `size` bytes."""
        layers = layers or self.draw.randint(3, 6)
        if self.cured("shard"):
            layers, size = max(1, layers // SHARDS), size // SHARDS
        width = max(64, int((size / (4 * copies * layers)) ** 0.5) // 64 * 64)
        module = nn.Sequential()
        for _ in range(layers):
            module.append(nn.Linear(width, width, device="cuda"))
            module.append(nn.GELU())
        return module, width

    def steps(self, count: int | None = None) -> Iterator[int]:
        """Yield the number of each step."""
        for step in range(self.most if count is None else count):
            yield step
            self.progress += 1
            self.total += 1
            if self.total == self._last:
                raise Done
            time.sleep(self.pause)


def train(network: Network, loss: Tensor) -> None:
    """Take an optimizer step."""
    loss.backward()
    network.optimizer.step()
    network.optimizer.zero_grad(set_to_none=True)


def take(size: float) -> Tensor:
    """Return a tensor of some bytes."""
    return torch.empty(int(size), dtype=torch.uint8, device="cuda")


def fraction() -> float | None:
    """Return the memory fraction to set instead of the job's own: what the advice said."""
    text = os.environ.get("VERDICT_FRACTION")
    return float(text) if text else None
