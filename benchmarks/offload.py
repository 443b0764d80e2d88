"""Measure a round trip to pinned host memory, of an optimizer's state and of an idle module.

Each round trip moves everything to the host after a step and back before the next one: the worst
case. The first one allocates the pinned memory.

    # On the phantom GPU nothing is computed or copied by a device: counts and CPU time matter.
    python -m torchmem.phantom --memory 16GB -- python -m benchmarks.offload
    python -m benchmarks.offload    # on a GPU: steps per second too
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from examples.offload import ModuleOffload, OptimizerOffload

EVERYTHING = 1 << 50


@dataclass
class Result:
    """What one row measured. `cpu_ms` is host CPU time of a round trip, step included."""

    moved_mib: float = 0.0
    tensors: int = 0
    first_ms: float = 0.0
    cpu_ms: float = 0.0
    pinned_mib: float = 0.0
    host_allocs: int = 0
    device_allocs: int = 0
    steps_per_second: float = 0.0


def network(arguments: argparse.Namespace) -> torch.nn.Module:
    """Return linear layers on the GPU."""
    width = arguments.width
    layers = (torch.nn.Linear(width, width) for _ in range(arguments.layers))
    return torch.nn.Sequential(*layers).cuda()


def measure(arguments: argparse.Namespace, name: str) -> Result:
    """Train with one kind of round trip after each step, or none."""
    model, reference = network(arguments), network(arguments)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    gives: dict[str, Callable[[int], Any]] = {
        "none": lambda _: 0,
        "optimizer": OptimizerOffload(optimizer),
        "module": ModuleOffload(reference),
    }
    give = gives[name]
    inputs = torch.randn(arguments.batch, arguments.width, device="cuda")

    def step() -> None:
        with torch.no_grad():
            reference(inputs)
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    step()
    allocs, result = host_stats(), Result()
    started = time.process_time()
    result.moved_mib = give(EVERYTHING) / 2**20
    step()
    result.first_ms = 1000 * (time.process_time() - started)
    result.host_allocs = host_stats()[0] - allocs[0]
    result.pinned_mib = (host_stats()[1] - allocs[1]) / 2**20
    moved = {"none": 0, "optimizer": 2, "module": 1}[name]
    result.tensors = moved * sum(1 for _ in model.parameters())
    device_allocs = torch.cuda.memory_stats()["num_device_alloc"]
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(arguments.steps):
        give(EVERYTHING)
        step()
    result.cpu_ms = 1000 * (time.process_time() - cpu) / arguments.steps
    result.steps_per_second = arguments.steps / (time.perf_counter() - wall)
    result.device_allocs = torch.cuda.memory_stats()["num_device_alloc"] - device_allocs
    return result


def host_stats() -> tuple[int, int]:
    """Return the number of cudaHostAlloc calls so far, and the pinned bytes."""
    stats = torch.cuda.host_memory_stats()
    return stats["num_host_alloc"], stats["allocated_bytes.current"]


def main() -> None:
    """Parse the flags and print one line per kind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    print(f"{'moved':10}" + "".join(f"{field.name:>18}" for field in fields(Result)))
    context = multiprocessing.get_context("spawn")
    for name in ("none", "optimizer", "module"):  # PyTorch keeps pinned memory for later rows
        child = context.Process(target=show, args=(arguments, name))
        child.start()
        child.join()


def show(arguments: argparse.Namespace, name: str) -> None:
    """Measure and print one row."""
    result = measure(arguments, name)
    values = (getattr(result, field.name) for field in fields(Result))
    print(f"{name:10}" + "".join(f"{value:18,.1f}" for value in values), flush=True)


if __name__ == "__main__":
    main()
