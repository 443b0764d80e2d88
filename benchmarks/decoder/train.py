"""The training script that benchmarks/preflight.py measures; it notes what it has used after every step.

    python -m benchmarks.decoder.train SIZE --readings FILE [--steps 5] [--batch 1] [--length 2048]

As one rank of many (torchrun's environment) every layer is sharded by FSDP2.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from benchmarks.decoder.model import Decoder, built, step
from benchmarks.decoder.shapes import SHAPES, Shape


def reading(parameters: int) -> str:
    """CPU seconds of this process so far, its resident bytes, and the allocator's peaks."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return json.dumps({
        "wall": time.time(),
        "cpu": time.process_time(),
        "resident": pages * 4096,
        "parameters": parameters,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    })  # fmt: skip


def sharded(shape: Shape) -> Decoder:
    """The decoder without values, each layer sharded over all ranks."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = built(shape, "meta")
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cuda")
    return model


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("--readings", type=Path, required=True, metavar="FILE")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    arguments = parser.parse_args()
    shape = SHAPES[arguments.size]
    model = sharded(shape) if "WORLD_SIZE" in os.environ else built(shape, "cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    parameters = sum(weight.numel() for weight in model.parameters())
    with arguments.readings.open("a", buffering=1) as file:
        print(reading(parameters), file=file)
        for _ in range(arguments.steps):
            step(model, optimizer, arguments.batch, arguments.length)
            print(reading(parameters), file=file)


if __name__ == "__main__":
    main()
