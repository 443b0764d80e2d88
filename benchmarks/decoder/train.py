"""The training script that benchmarks/preflight.py measures.

    python -m benchmarks.decoder.train SIZE --readings FILE [--steps 5] [--batch 1] [--length 2048]

Writes a reading of time and memory after each step. With torchrun's environment, every layer is
sharded with FSDP2.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from benchmarks.decoder.model import Decoder, new_decoder, step
from benchmarks.decoder.shapes import SHAPES, Shape


def reading(parameters: int) -> str:
    """Return time, resident bytes and the allocator's peaks of this process as JSON."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return json.dumps(
        {
            "wall": time.time(),
            "cpu": time.process_time(),
            "resident": pages * 4096,
            "parameters": parameters,
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
    )


def sharded_decoder(shape: Shape) -> Decoder:
    """Return the decoder, uninitialized, with each layer sharded over all ranks."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = new_decoder(shape, "meta")
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cuda")
    return model


def main() -> None:
    """Parse the flags, train, and write the readings."""
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
    model = sharded_decoder(shape) if "WORLD_SIZE" in os.environ else new_decoder(shape, "cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    parameters = sum(weight.numel() for weight in model.parameters())
    with arguments.readings.open("a", buffering=1) as file:
        print(reading(parameters), file=file)
        for _ in range(arguments.steps):
            step(model, optimizer, arguments.batch, arguments.length)
            print(reading(parameters), file=file)


if __name__ == "__main__":
    main()
