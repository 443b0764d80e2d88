"""Train the transformer of examples/fsdp2.py on sequences of varying length."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from fsdp2 import materialize, shard
from transformer import VOCABULARY, Transformer, next_token_loss, own_device

WIDTH, LAYERS, LONGEST = 512, 4, 1024


def main() -> None:
    """Train for `--steps` optimizer steps."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--steps", type=int, default=60)
    arguments = flags.parse_args()
    device = own_device()
    dist.init_process_group("nccl", device_id=device)
    chance = random.Random(dist.get_rank())  # noqa: S311
    with torch.device("meta"):
        model = Transformer(WIDTH, LAYERS, LONGEST)
    shard(model)
    materialize(model, device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(arguments.steps):
        length = chance.randrange(100, LONGEST)
        tokens = torch.randint(VOCABULARY, (4, length + 1)).to(device)
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
