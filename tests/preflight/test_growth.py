"""Memory that grows from step to step: what it is, when the GPU is full, and when it decides."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.preflight_figures import gpu_of_steps

from torchmem.allocator.sizes import GIB, MIB
from torchmem.explain.growth import MAX_HORIZON
from torchmem.preflight.growth import first_growth, growth, kept_per_step
from torchmem.preflight.result import GpuMemory, RunResult

STEPS = 20
GPU, OUTSIDE = 8 * GIB, GIB // 2
TOTAL = GPU + OUTSIDE


def device(kept: list[int], activations: list[int]) -> GpuMemory:
    """Return a GPU's figures; each step keeps and needs so many bytes beside a model of 1 GiB."""
    return gpu_of_steps([GIB + size for size in kept], activations, TOTAL, OUTSIDE)


def leaking(per_step: int, steps: int = STEPS) -> GpuMemory:
    """Return a GPU of a run that keeps so many bytes in each step."""
    return device([per_step * step for step in range(1, steps + 1)], [GIB] * steps)


@given(st.integers(1 * MIB, 200 * MIB), st.integers(8, 30))
def test_the_steps_left_of_a_leak_are_exact(leak: int, steps: int) -> None:
    """So many more steps fit, and one more does not."""
    found = growth(leaking(leak, steps), TOTAL, OUTSIDE)

    assert found
    assert ("kept", leak) == (found.kind, found.bytes_per_step)
    peak = 2 * GIB + leak * steps
    assert peak + leak * found.steps_left <= GPU < peak + leak * (found.steps_left + 1) + 1


def test_steps_that_need_more_and_more_grow() -> None:
    """Nothing is kept, and the peaks rise: the GPU is full when a step needs all of it."""
    found = growth(device([0] * STEPS, [100 * MIB * step for step in range(1, 21)]), TOTAL, OUTSIDE)

    assert found
    assert (found.kind, found.bytes_per_step) == ("larger_step", 100 * MIB)
    assert found.steps_left == (GPU - GIB - 2000 * MIB) // (100 * MIB)


@pytest.mark.parametrize("seed", range(200))
def test_batches_of_varying_lengths_are_no_growth(seed: int) -> None:
    """Neither their peaks nor what they leave allocated is a trend."""
    draw = random.Random(seed)
    lengths = [draw.randint(256, 1024) * MIB for _ in range(STEPS)]

    assert growth(device([size // 100 for size in lengths], lengths), TOTAL, OUTSIDE) is None


@given(st.integers(0, STEPS - 1))
def test_what_is_allocated_once_is_no_growth(when: int) -> None:
    """An EMA copy, or a buffer of a library, may come in any step."""
    kept = [GIB * (step >= when) for step in range(STEPS)]

    assert growth(device(kept, [GIB] * STEPS), TOTAL, OUTSIDE) is None


@pytest.mark.parametrize("steps", range(1, 7))
def test_a_short_run_does_not_tell(steps: int) -> None:
    """With fewer than seven steps the growth is unknown, and nothing is decided by it."""
    found = leaking(100 * MIB, steps)

    assert kept_per_step(found.steps) is None
    assert growth(found, TOTAL, OUTSIDE) is None


def test_a_run_that_ended_by_itself_has_no_further_steps() -> None:
    """Its growth is told, and does not decide."""
    stopped = RunResult("steps", 0, STEPS, 1.0, 0, (leaking(100 * MIB),))
    finished = replace(stopped, ended="finished")

    assert [found.decides for found in map(first_growth, (stopped, finished)) if found] == [
        True,
        False,
    ]


def test_slow_growth_does_not_decide() -> None:
    """A list of losses takes 512 bytes a step, and fills a GPU in millions of steps."""
    slow, fast = growth(leaking(512), TOTAL, OUTSIDE), growth(leaking(20 * MIB), TOTAL, OUTSIDE)

    assert slow
    assert fast
    assert (slow.decides, fast.decides) == (False, True)
    assert fast.steps_left <= MAX_HORIZON * STEPS < slow.steps_left


def test_what_is_cached_is_taken() -> None:
    """A leak finds little room in the cache, which lies in pieces."""
    cached = replace(leaking(50 * MIB), peak_reserved=GPU - 500 * MIB)
    found = first_growth(RunResult("steps", 0, STEPS, 1.0, 0, (cached,)))

    assert found
    assert found.steps_left == 10


def test_a_few_bytes_a_step_never_decide() -> None:
    """A list of losses in a run that has cached nearly all memory does not fill the GPU."""
    cached = replace(leaking(512), peak_reserved=GPU)
    found = first_growth(RunResult("steps", 0, STEPS, 1.0, 0, (cached,)))

    assert found
    assert not found.decides


def test_the_gpu_that_is_full_first_is_told() -> None:
    """Of two GPUs whose memory grows, the one with fewer steps left."""
    slow, fast = leaking(10 * MIB), replace(leaking(90 * MIB), device=1)
    found = first_growth(RunResult("steps", 0, STEPS, 1.0, 0, (slow, fast)))

    assert found
    assert found.device == 1
