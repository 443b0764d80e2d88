"""Growth from step to step: found within a few steps, and not in a healthy job."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from torchmem.explain.growth import SOON_SECONDS, SOON_STEPS, SUSPICION, WARM_UP_STEPS
from torchmem.sdk.capture.pressure import NEWEST_READS, StepPressure

MIB = 1 << 20
TOTAL = 4000 * MIB
BASE = 1000 * MIB
Sizes = Callable[[random.Random], Iterator[int]]


def found_at(sizes: Iterator[int], *, total: int = TOTAL, seconds: float = 0.005) -> int | None:
    """Return the step at which growth of what is allocated between steps is found."""
    growth, peak = StepPressure(), 0
    for step, size in enumerate(sizes, 1):
        peak = max(peak, size + 100 * MIB)
        if growth.update(step, step * seconds, size, peak, max(0, total - peak), total):
            return step
    return None


def growing(by: int, steps: int) -> Iterator[int]:
    """Yield sizes that grow by as many bytes a step."""
    return (BASE + by * step for step in range(steps))


@pytest.mark.parametrize("mib", [8, 16, 85])
def test_steady_growth_is_found_at_once(mib: int) -> None:
    """Five rises after the first steps are enough, however fast the job."""
    assert found_at(growing(mib * MIB, 100)) == WARM_UP_STEPS + SUSPICION.points - 1


def test_growth_of_the_peaks_alone_is_found() -> None:
    """Steps that need more each time are recorded too, although nothing is kept."""
    growth = StepPressure()
    found = [
        growth.update(step, float(step), BASE, BASE + step * 50 * MIB, 2000 * MIB, TOTAL)
        for step in range(1, 10)
    ]

    assert any(found)


@pytest.mark.parametrize("seed", range(20))
def test_growth_under_noise(seed: int) -> None:
    """A leak under batches of random lengths is found while most of its room is left."""
    generator = random.Random(seed)
    sizes = (BASE + step * 16 * MIB + generator.randint(0, 60) * MIB for step in range(180))
    step = found_at(sizes)

    assert step is not None
    assert step < 80


def uniform(generator: random.Random) -> Iterator[int]:
    """Yield sizes of random lengths."""
    return (BASE + generator.randint(1, 1000) * MIB for _ in range(300))


def heavy_tailed(generator: random.Random) -> Iterator[int]:
    """Yield sizes of which few are very large."""
    lengths = (min(2000, generator.lognormvariate(5, 1)) for _ in range(300))
    return (BASE + int(length * MIB) for length in lengths)


def buckets(generator: random.Random) -> Iterator[int]:
    """Yield sizes of four lengths."""
    return (BASE + generator.choice([128, 256, 512, 1024]) * MIB for _ in range(300))


def settling(_: random.Random) -> Iterator[int]:
    """Yield sizes of a job whose first steps allocate buffers."""
    return (BASE + min(step, 4) * 200 * MIB for step in range(300))


@pytest.mark.parametrize("sizes", [uniform, heavy_tailed, buckets, settling])
def test_a_healthy_job_is_not_taken_for_a_growing_one(sizes: Sizes) -> None:
    """Of 500 jobs with random batches, at most 2 seem to grow."""
    found = [found_at(sizes(random.Random(seed))) for seed in range(500)]

    assert sum(step is not None for step in found) <= 2


def test_growth_that_takes_long_is_not_soon() -> None:
    """It counts if it fills the device within some steps, or within a time."""
    slow, rate = 2 * SOON_SECONDS / SOON_STEPS, TOTAL // (4 * SOON_STEPS)

    assert found_at(growing(rate, 20)) is not None
    assert found_at(growing(rate, 20), seconds=slow) is None
    assert found_at(growing(20 * MIB, 20), seconds=slow) is not None


def test_growth_that_has_ended_is_forgotten() -> None:
    """After as many reads without a rise nothing grows."""
    growth = StepPressure()
    sizes = [*growing(50 * MIB, 10), *[BASE + 450 * MIB] * NEWEST_READS]
    found = [
        growth.update(step, step * 0.1, size, size, TOTAL - size, TOTAL)
        for step, size in enumerate(sizes, 1)
    ]

    assert found[8]
    assert not found[-1]


def test_a_read_of_the_same_step_adds_nothing() -> None:
    """The read of an evaluation between two steps is not one of a step's end."""
    growth = StepPressure()

    assert not any(growth.update(3, 0.1 * n, n * MIB, n * MIB, 0, TOTAL) for n in range(50))
