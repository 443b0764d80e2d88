"""Step time with and without a tool, in turns.

Usage: `python -m benchmarks.overhead.steps 4 8`. Arguments: seconds of each turn, number of turns.
Every turn with a tool follows one without, in the same process; each pair gives one ratio. Needs
PyTorch with a GPU or the phantom; prints one line of JSON.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.overhead import tools

LAYERS, WIDTH, BATCH = 96, 256, 64
WARM_UP_STEPS = 50
RESAMPLES = 2000


def training_step() -> Callable[[], None]:
    """Return the step of a small model with AdamW, which waits for the GPU at its end."""
    import torch

    layers = [
        layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())
    ]
    model: Any = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(BATCH, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    return step


def turn(tool: tools.Tool, step: Callable[[], None], seconds: float) -> tuple[float, float]:
    """Return the mean wall and CPU seconds of a step in a turn, over all threads."""
    tool.start()
    count, wall, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < seconds:
        tool.begin()
        step()
        tool.end()
        count += 1
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    tool.stop()
    return wall / count, cpu / count


def compare(name: str, step: Callable[[], None], seconds: float, turns: int) -> dict[str, object]:
    """Return the ratios of step time with and without the tool, and the time without."""
    nothing, tool = tools.make("nothing"), tools.make(name)
    pairs = []
    for number in range(turns):
        if (
            number % 2
        ):  # every other pair the other way round, so that a drift of the machine cancels
            with_tool = turn(tool, step, seconds)
            pairs.append((turn(nothing, step, seconds), with_tool))
        else:
            pairs.append((turn(nothing, step, seconds), turn(tool, step, seconds)))
    return {
        "step_seconds": statistics.median(without[0] for without, _ in pairs),
        "wall": interval([with_it[0] / without[0] for without, with_it in pairs]),
        "cpu": interval([with_it[1] / without[1] for without, with_it in pairs]),
    }


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Median of the ratios with the bootstrap's 2.5% and 97.5% quantiles."""
    chance = random.Random(0)  # noqa: S311 - a resampling, not a secret
    medians = sorted(
        statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
    )
    return (
        statistics.median(ratios),
        medians[int(0.025 * RESAMPLES)],
        medians[int(0.975 * RESAMPLES)],
    )


def main(seconds: str, turns: str) -> None:
    """Measure every tool that can run here; "nothing" against itself shows the noise."""
    step = training_step()
    for _ in range(WARM_UP_STEPS):
        step()
    able = [name for name in tools.TOOLS if tools.missing(name) is None]
    print(json.dumps({name: compare(name, step, float(seconds), int(turns)) for name in able}))


if __name__ == "__main__":
    main(*sys.argv[1:])
