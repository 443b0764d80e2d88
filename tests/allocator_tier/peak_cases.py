"""A training loop whose peak is at a known place, where the script itself counts its memory.

    python -m torchmem.phantom -- python peak_cases.py PLACE ZERO

PLACE: forward, backward (in its middle), or optimizer. ZERO: none, in_place, or late (between
forward and backward). The last line printed is JSON: the SDK's components of the peak, those that
the script counted at the peak, and PyTorch's peak.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from component_cases import (  # type: ignore[import-not-found]  # beside this file
    WIDTH,
    Case,
    independent_components,
    layers,
    served,
)
from torch import nn

from torchmem import sdk

STEPS = 6
PEAK_BYTES = 256 << 20


class Place(torch.autograd.Function):  # type: ignore[misc]  # torch is skipped
    """An identity that calls `visit` in its forward and in its backward pass."""

    @staticmethod
    def forward(context: Any, value: Any) -> Any:
        """Visit the forward pass."""
        visit("forward")
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        """Visit the backward pass."""
        visit("backward")
        return gradient


class Visiting(torch.optim.SGD):  # type: ignore[misc]  # torch is skipped
    """SGD that visits its own step."""

    def step(self, closure: Any = None) -> Any:
        """Visit the step."""
        super().step(closure)
        visit("optimizer")


truth: dict[str, int] = {}
place, zero = sys.argv[1:]
model = nn.ModuleList([layers(2), layers(2)])
optimizer = Visiting(model.parameters(), lr=0.1, momentum=0.9)
case = Case([optimizer], lambda: None, {})


def visit(here: str) -> None:
    """Allocate more than any other moment has, and count."""
    if here == place:
        spike = torch.empty(PEAK_BYTES, dtype=torch.uint8, device="cuda")
        truth.update(independent_components(case))
        del spike


def step() -> None:
    """Run one step, which zeroes the gradients where the case says."""
    if zero != "late":
        optimizer.zero_grad(set_to_none=zero == "none")
    first, second = model
    loss = second(Place.apply(first(torch.randn(64, WIDTH, device="cuda")))).mean()
    if zero == "late":
        optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main() -> None:
    """Train, and print both counts."""
    session = sdk.instrument(interval=1e-6)
    for _ in range(STEPS):
        step()
    peaks = served(session, "torchmem_component_peak_bytes")
    errors = session.errors.counts
    print(json.dumps([peaks, truth, torch.cuda.max_memory_allocated(), errors]))
    session.close()


if __name__ == "__main__":
    main()
