"""Measure what the integrations of training frameworks add to a batch:

    python -m torchmem.phantom -- python -m benchmarks.passes

CPU microseconds of the training thread for each way to mark a pass of a loop, in one process with
PyTorch's allocator and default settings. At most once a second, a pass also reads the statistics
when it begins and ends, which is included.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from torchmem import sdk

PASSES, ROUNDS = 20_000, 5


def loop(session: sdk.Session) -> dict[str, Callable[[], None]]:
    """Return the ways to make many passes."""
    batch = [torch.empty(32, 8)] * PASSES

    def iterations() -> None:
        for _ in range(PASSES):
            with session.iteration(samples=32):
                pass

    def batches() -> None:
        for _ in session.batches(batch):
            pass

    def framework() -> None:
        for _ in range(PASSES):
            session.iteration("train", 32, made_step=lambda: True).begin().end()

    return {
        "with session.iteration()": iterations,
        "for … in session.batches()": batches,
        "a callback's pass and step": framework,
    }


def main() -> None:
    """Print the figures."""
    torch.ones(1 << 20, device="cuda")
    with sdk.instrument() as session:
        ways = loop(session)
        seconds = dict.fromkeys(ways, 0.0)
        for _ in range(ROUNDS):
            for name, run in ways.items():
                started = time.thread_time()
                run()
                seconds[name] += time.thread_time() - started
        for name, spent in seconds.items():
            print(f"{name:<28}{1e6 * spent / PASSES / ROUNDS:6.1f} µs")


if __name__ == "__main__":
    main()
