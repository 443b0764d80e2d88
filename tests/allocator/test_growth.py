"""What grows over a run, judged by its history."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.samples import full_sample

from torchmem.explain.growth import (
    FLAT_STEPS,
    JUDGED_ONCE,
    growth_of_steps,
    judge_growth,
    lasting_jump,
    live_growth,
    room_left,
    theil_sen,
)
from torchmem.explain.rank_report import memory_facts
from torchmem.sample.run_history import RunHistory
from torchmem.sdk.reading.run_history import EARLY_STEPS, RunHistoryRecorder

GIB = 1 << 30
MIB = 1 << 20
TOTAL = 80 * GIB
Points = list[tuple[float, float]]


def _history(allocated: list[int], peaks: list[int] | None = None) -> RunHistory:
    """Return a history with a point for every fourth step."""
    number = len(allocated)
    peaks = peaks or [size + 4 * GIB for size in allocated]
    return RunHistory(
        steps=tuple(4 * index + 4 for index in range(number)),
        seconds=tuple(float(index) for index in range(number)),
        allocated_bytes=tuple(allocated),
        peak_bytes=tuple(accumulate(peaks, max)),
        stranded_bytes=(None,) * number,
        outside_bytes=(None,) * number,
        kept_bytes=(None,) * number,
    )


def _line(number: int, slope: int) -> list[int]:
    return [20 * GIB + index * 4 * slope for index in range(number)]


@given(st.floats(1, 1e9), st.integers(4, 64), st.floats(0, 1e12))
def test_a_straight_line_has_its_slope(slope: float, number: int, start: float) -> None:
    """A growth by the same number of bytes in each step is found exactly."""
    points: Points = [(step, start + slope * step) for step in range(number)]
    growth = judge_growth("kept", points, JUDGED_ONCE)
    assert growth is not None
    assert growth.bytes_per_step == pytest.approx(slope, rel=1e-3)


def test_a_leak_in_a_rank_that_runs() -> None:
    """Fifty steps of a leak that will fill the GPU are told, with its bytes a step."""
    growth = live_growth(_history(_line(13, 64 * MIB)), TOTAL, 40 * GIB)
    assert growth is not None
    assert (growth.kind, growth.bytes_per_step) == ("kept", 64 * MIB)


@pytest.mark.parametrize("most", [2, 8, 30])
def test_batches_of_random_lengths_are_no_growth(most: int) -> None:
    """In 500 healthy jobs whose steps end with random bytes, hardly one seems to grow."""
    found = 0
    for seed in range(500):
        generator = random.Random(seed)
        sizes = [20 * GIB + generator.randint(0, most * GIB) for _ in range(64)]
        looks = (live_growth(_history(sizes[:n]), TOTAL, 40 * GIB) for n in range(8, 65, 8))
        found += any(looks)

    assert found <= 5


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_under_noise_is_growth(seed: int) -> None:
    """A leak is found although batches differ by many times what a step leaks."""
    generator = random.Random(seed)
    sizes = [size + generator.randint(0, 2 * GIB) for size in _line(40, 64 * MIB)]

    assert live_growth(_history(sizes), TOTAL, 40 * GIB) is not None


@pytest.mark.parametrize(
    "history",
    [
        _history([20 * GIB] * 60),
        _history([20 * GIB + index % 5 * GIB for index in range(60)]),
        _history([*_line(12, 256 * MIB), *[32 * GIB] * 48]),
        _history([20 * GIB] * 30 + [30 * GIB] * 30),
        _history([56 * GIB] * 20 + [64 * GIB] * 20 + [65 * GIB] * 7),
        _history([30 * GIB] * 30 + [20 * GIB] * 30),
        _history(_line(3, GIB)),
        _history(_line(60, 16 << 10)),
        RunHistory(),
    ],
    ids=["flat", "noise", "settled", "jump", "levels", "falls", "few points", "slow", "empty"],
)
def test_what_is_no_growth(history: RunHistory) -> None:
    """Noise, a single jump, what settles, and what would take forever do not count as growth."""
    assert live_growth(history, TOTAL, 40 * GIB) is None


def test_what_has_stopped_is_no_leak() -> None:
    """A buffer that fills over 300 steps and stays full grows until then, and not afterwards.

    As in a real run, each of the first 100 steps is read, and then every fifth.
    """
    recorder = RunHistoryRecorder(lambda: 0.0)
    told = set()
    for step in range(1, 1501):
        if step > EARLY_STEPS and step % 5:
            continue
        kept = 20 * GIB + min(step, 300) * 12 * MIB
        recorder.add(step, kept, kept + 20 * GIB)
        history = recorder.published()
        assert history is not None
        growth = live_growth(history, TOTAL, 30 * GIB)
        told |= {step} if growth else set()

    assert max(told) <= 300 + FLAT_STEPS
    assert {200, 250, 300} <= told


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_under_noise(seed: int) -> None:
    """A leak is found where the last batch, which stays allocated, differs from step to step."""
    generator = random.Random(seed)
    sizes = [size + generator.randrange(GIB) for size in _line(60, 64 * MIB)]
    growth = live_growth(_history(sizes), TOTAL, 40 * GIB)
    assert growth is not None
    assert growth.bytes_per_step == pytest.approx(64 * MIB, rel=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_steps_of_random_lengths_do_not_grow(seed: int) -> None:
    """The record peaks of steps of random lengths settle, and are not called growth."""
    generator = random.Random(seed)
    peaks = [generator.randrange(30 * GIB, 50 * GIB) for _ in range(60)]
    assert live_growth(_history([20 * GIB] * 60, peaks), TOTAL, 20 * GIB) is None


def test_steps_that_need_more_and_more() -> None:
    """Peaks that grow steadily above a flat floor are larger steps."""
    history = _history([20 * GIB] * 30, _line(30, 128 * MIB))
    growth = live_growth(history, TOTAL, 20 * GIB)
    assert growth is not None
    assert (growth.kind, growth.bytes_per_step) == ("larger_step", 128 * MIB)


@pytest.mark.parametrize("factor", [1.0, 1.25, 1.5])
def test_steps_that_need_more_in_stages(factor: float) -> None:
    """A curriculum needs more in each stage, by a size or by a factor: not by one step alone."""
    needs = [int(GIB * (1 + stage if factor == 1.0 else factor**stage)) for stage in range(8)]
    history = _history([GIB] * 64, [GIB + need for need in needs for _ in range(8)])
    growth = growth_of_steps(history, JUDGED_ONCE)

    assert growth
    assert (growth.kind, growth.onset) == ("larger_step", "larger_step")
    assert (
        growth_of_steps(_history([GIB] * 64, [GIB, 2 * GIB, 3 * GIB, *[4 * GIB] * 61]), JUDGED_ONCE)
        is None
    )


def test_without_two_steps_there_is_no_slope() -> None:
    """Points of one step have no slope."""
    assert theil_sen([(3, 5), (3, 9)]) is None
    assert judge_growth("kept", [(0, 5)] * 9, JUDGED_ONCE) is None


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([5, 5, 5, 9, 9, 9], (4.0, 3)),
        ([5, 6, 5, 9, 8, 9], (2.0, 3)),
        ([1, 3, 5, 7, 9, 9], (0.0, 0)),
        ([5, 5, 9, 5, 5, 5], (0.0, 0)),
        ([5], (0.0, 0)),
    ],
    ids=["jump", "noise beside it", "a buffer that fills", "a spike", "one point"],
)
def test_a_jump_that_lasts(sizes: list[float], expected: tuple[float, int]) -> None:
    """Only a growth at one point that is most of all growth, and that lasts, is a jump."""
    assert lasting_jump(list(enumerate(sizes))) == pytest.approx(expected)


def test_what_is_left_at_the_peak_ends_at_the_memory_fraction() -> None:
    """What a report calls left and what growth can still take are one number, within the limit."""
    (device,) = full_sample().devices
    peak = 51 * GIB
    device = replace(device, driver_free_bytes=18 * GIB, limit_bytes=60 * GIB)

    assert 60 * GIB - peak == room_left(device)
    assert "left at the peak" in {fact.subject for fact in memory_facts(device)}
    assert any(fact.text.startswith("9.00 GiB") for fact in memory_facts(device))


def test_a_rank_that_is_asleep_has_no_known_room() -> None:
    """Where reserved memory is not on the GPU, what is left is unknown, and is not shown."""
    (device,) = full_sample().devices
    asleep = replace(device, driver_free_bytes=70 * GIB)

    assert room_left(asleep) is None
    assert "left at the peak" not in {fact.subject for fact in memory_facts(asleep)}
