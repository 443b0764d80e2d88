"""How long a preflight says that the rest takes, by recorded times of steps."""

from __future__ import annotations

import pytest

from torchmem.output.terminal import Pace

# Seconds at which the examples' steps were reported; before the first is the start of the script.
RECORDED = {
    "gpt": (
        *(12.41, 12.41, 12.47, 12.52, 12.52, 12.57, 12.62, 12.62, 12.67, 12.67),
        *(12.72, 12.77, 12.77, 12.82, 12.87, 12.87, 12.92, 12.92, 12.97, 12.97),
    ),
    "resnet50": (
        *(7.57, 7.78, 7.88, 7.93, 7.98, 8.08, 8.18, 8.23, 8.29, 8.39),
        *(8.44, 8.54, 8.59, 8.69, 8.74, 8.84, 8.89, 9.00, 9.05, 9.15),
    ),
    "huggingface": (
        *(17.89, 17.95, 18.00, 18.00, 18.05, 18.10, 18.15, 18.20, 18.25, 18.25),
        *(18.30, 18.36, 18.41, 18.46, 18.51, 18.56, 18.61, 18.61, 18.66, 18.71),
    ),
    "long_steps": (95.0, 122.0, 141.0, 160.5, 179.0, 198.5, 217.0, 236.0, 255.5, 274.0),
}

POLL_SECONDS = 0.05
"""Steps are reported at most this much later than they end."""


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_what_is_left_is_within_a_factor_of_two(name: str) -> None:
    """From the third step on, the time that is told is at most twice or half of what it takes."""
    times, pace = RECORDED[name], Pace()
    told = []
    for done, now in enumerate(times, 1):
        pace.add(now, done)
        told.append(pace.seconds_left(now, len(times)))

    for now, left in zip(times[2:-1], told[2:-1], strict=True):
        assert left is not None
        true = times[-1] - now
        assert true / 2 - POLL_SECONDS <= left <= 2 * true + POLL_SECONDS


def test_nothing_is_told_before_the_pace_is_known() -> None:
    """The start of the script and its first two steps say nothing about the others."""
    pace = Pace()
    assert pace.seconds_left(1.0, 10) is None
    for done, now in enumerate(RECORDED["long_steps"][:2], 1):
        pace.add(now, done)
        assert pace.seconds_left(now, 10) is None


def test_a_step_that_takes_longer_leaves_no_negative_time() -> None:
    """While a step lasts, less and less is left, and never less than nothing."""
    pace = Pace()
    for done in range(1, 6):
        pace.add(float(done), done)

    left = [pace.seconds_left(5.0 + late, 7) for late in (0.0, 1.5, 60.0)]
    assert left == [2.0, 0.5, 0.0]
