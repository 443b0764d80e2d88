"""Train a small network on batches of varying length, on streams that take turns: quick to run."""

from __future__ import annotations

import argparse
import random

import torch
from torch import nn


def main() -> None:
    """Train for `--steps` optimizer steps."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--steps", type=int, default=60)
    flags.add_argument("--width", type=int, default=1024)
    flags.add_argument("--seed", type=int, default=0)
    arguments = flags.parse_args()
    chance, width = random.Random(arguments.seed), arguments.width  # noqa: S311
    layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(arguments.steps):
        batch = torch.empty(8 * chance.randrange(50, 600), width, device="cuda")
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
