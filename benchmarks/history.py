"""Measure the cost of Python stacks, at an OutOfMemoryError and with the setting `history`.

    python -m torchmem.phantom -- python -m benchmarks.history    # or without the phantom, on a GPU

CPU time in turns with and without, in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from benchmarks.overhead import tools
from benchmarks.overhead.reads import cpu_seconds
from benchmarks.overhead.report import microseconds, ratio, table
from benchmarks.overhead.steps import WARM_UP_STEPS, interval, training_step, turn

from torchmem import sdk
from torchmem.sdk.pytorch.call_stack import calling_origin

DEPTHS = (5, 20, 40, 80)
ALLOCATIONS = 5_000
TURNS = 9


class Recording(tools.Torchmem):
    """`sdk.instrument(history=True)`."""

    def start(self) -> None:
        """Call `instrument` with the setting."""
        self._session = sdk.instrument(run_dir=self.run_dir, history=True)


def allocation_seconds(depth: int) -> float:
    """Return the CPU seconds of an allocation that is freed at once, under `depth` functions."""
    import torch

    if depth:
        return allocation_seconds(depth - 1)
    started = time.thread_time()
    for _ in range(ALLOCATIONS):
        torch.empty(1000, device="cuda")
    return (time.thread_time() - started) / ALLOCATIONS


def origin_seconds(depth: int) -> float:
    """Return the CPU seconds to read the stack for an OOM report under `depth` functions."""
    if depth:
        return origin_seconds(depth - 1)
    return cpu_seconds(lambda: calling_origin(None, None))


def by_depth(depth: int, start: Callable[[], object], stop: Callable[[], None]) -> list[str]:
    """Return a row: the depth, an allocation without and with, and the median difference."""
    without, with_stacks = [], []
    for _ in range(TURNS):
        without.append(allocation_seconds(depth))
        start()
        with_stacks.append(allocation_seconds(depth))
        stop()
    more = [there - here for here, there in zip(without, with_stacks, strict=True)]
    figures = map(statistics.median, (without, with_stacks, more))
    return [str(depth), *map(microseconds, figures)]


def by_step(seconds: float, turns: int) -> list[str]:
    """Return a row: the ratio of a step's CPU time with `history=True` to that with defaults."""
    step = training_step()
    for _ in range(WARM_UP_STEPS):
        step()
    ratios = []
    for number in range(turns):
        pair: list[tools.Tool] = [tools.make("torchmem"), Recording()]
        cpu = {type(tool): turn(tool, step, seconds)[1] for tool in pair[:: 1 - 2 * (number % 2)]}
        ratios.append(cpu[Recording] / cpu[tools.Torchmem])
    return ["a step of 96 layers", ratio(interval(ratios))]


def main() -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turn", type=float, default=4.0, help="seconds of one turn of steps")
    parser.add_argument("--turns", type=int, default=8, help="pairs of turns")
    arguments = parser.parse_args()
    import torch

    from torchmem.sdk.pytorch.backend import TorchBackend

    torch.cuda.init()
    backend = TorchBackend()
    rows = [by_depth(depth, backend.start_stacks, backend.stop_history) for depth in DEPTHS]
    stacks = [[str(depth), microseconds(origin_seconds(depth))] for depth in (*DEPTHS, 900)]
    print(table(("frames", "stack at an OOM"), stacks))
    print()
    print(table(("frames", "without", "with stacks", "difference"), rows))
    print()
    print(table(("work", "CPU time with history=True"), [by_step(arguments.turn, arguments.turns)]))


if __name__ == "__main__":
    main()
