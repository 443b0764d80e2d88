"""When `history="oom"` begins to record, and what the details of an OOM report cost.

    python -m torchmem.phantom -- python -m benchmarks.oom_details    # or on a GPU

The first table is simulated: jobs whose memory is known at each step's end.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.overhead.report import microseconds, table

from torchmem.explain.growth import live_growth
from torchmem.sdk.capture.pressure import StepPressure
from torchmem.sdk.oom.module_names import ModuleNames
from torchmem.sdk.pytorch.all_tensors import TensorWalk
from torchmem.sdk.reading.run_history import RunHistoryRecorder

JOBS = 1000
STEPS = 300
MIB = 1 << 20
TOTAL = 80 << 30
BASE = 20 << 30
SECONDS_PER_STEP = 0.1
STEPS_PER_JUDGMENT = 10
"""By the history of the run, once a second."""
ROUNDS = 5

Extra = Callable[[random.Random, int], float]
JOBS_BY_NAME: Mapping[str, Extra] = {
    "batches of one size": lambda _random, _step: 4096,
    "lengths from 1 to 4096": lambda generator, _: 4 * generator.randint(1, 4096),
    "lognormal lengths": lambda generator, _: min(40000.0, generator.lognormvariate(6, 1)),
    "5 lengths": lambda generator, _: generator.choice([512, 1024, 2048, 4096, 8192]),
    "a leak of 100 MiB a step": lambda _, step: 100 * step,
    "the same, lengths ±200 MiB": lambda generator, step: 100 * step + generator.randint(0, 400),
    "the same, lengths ±800 MiB": lambda generator, step: 100 * step + generator.randint(0, 1600),
}


def sizes(extra: Extra, seed: int) -> Iterator[int]:
    """Return what is allocated at each step's end."""
    generator = random.Random(seed)  # noqa: S311 - a simulation
    return (BASE + int(extra(generator, step) * MIB) for step in range(STEPS))


def start(extra: Extra, seed: int) -> int | None:
    """Return the step after which stacks are recorded; None if they are not."""
    growth, history, peak = StepPressure(), RunHistoryRecorder(clock=lambda: 0.0), 0
    for step, size in enumerate(sizes(extra, seed), 1):
        peak = max(peak, size)
        left = max(0, TOTAL - peak)
        history.add(step, size, peak)
        points = None if step % STEPS_PER_JUDGMENT else history.published()
        judged = points and live_growth(points, TOTAL, left)
        if growth.update(step, step * SECONDS_PER_STEP, size, peak, left, TOTAL) or judged:
            return step
    return None


def starts(name: str) -> list[str]:
    """Return a row: the job, the share of jobs that are recorded, and the median step."""
    found = [start(JOBS_BY_NAME[name], seed) for seed in range(JOBS)]
    steps = [step for step in found if step is not None]
    middle = f"{statistics.median(steps):.0f}" if len(steps) > JOBS / 2 else "–"
    return [name, f"{len(steps) / JOBS:.2%}", middle]


def update_seconds() -> float:
    """Return the CPU seconds of one judgment."""
    growth, count = StepPressure(), 20_000
    started = time.thread_time()
    for step in range(count):
        growth.update(step, step * 1.0, BASE + step, BASE + step, TOTAL, TOTAL)
    return (time.thread_time() - started) / count


def median_seconds(call: Callable[[], object]) -> float:
    """Return the median CPU seconds of a call."""

    def once() -> float:
        started = time.thread_time()
        call()
        return time.thread_time() - started

    return statistics.median(once() for _ in range(ROUNDS))


def walk_seconds(objects: int, tensors: int) -> float:
    """Return the CPU seconds that a walk takes to find the tensors among the objects."""
    import torch

    kept: Any = (
        [[] for _ in range(objects)],
        [torch.empty(8, device="cuda") for _ in range(tensors)],
    )
    seconds = median_seconds(lambda: TensorWalk(torch).groups(0))
    assert kept
    return seconds


def naming_seconds(layers: int) -> float:
    """Return the CPU seconds that it takes to name the modules of a transformer."""
    import torch

    from torchmem.sdk.pytorch.backend import TorchBackend

    layer = torch.nn.TransformerEncoderLayer(8, 1, 8)
    model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    seconds = median_seconds(lambda: ModuleNames(TorchBackend().modules()))
    assert model
    return seconds


def main() -> None:
    """Measure and print both tables."""
    import torch

    torch.cuda.init()
    print(table(("memory at steps' ends", "recorded", "from step"), map(starts, JOBS_BY_NAME)))
    rows = [["judgment of growth, at a read", microseconds(update_seconds())]]
    for objects, tensors in ((100_000, 1_000), (1_000_000, 10_000)):
        what = f"walk of {objects:,} objects with {tensors:,} tensors"
        rows.append([what, microseconds(walk_seconds(objects, tensors))])
    rows += [
        [f"modules of {layers} layers", microseconds(naming_seconds(layers))] for layers in (24, 96)
    ]
    print()
    print(table(("work", "CPU time"), rows))


if __name__ == "__main__":
    main()
