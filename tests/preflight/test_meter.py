"""What is kept of the statistics of one card."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from torchmem.preflight.child.watcher import DeviceMeter
from torchmem.preflight.result import Phase

WINDOWS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=20)


def stats(allocated: int, reserved: int) -> dict[str, Any]:
    values = {"allocated_bytes": allocated, "reserved_bytes": reserved}
    nested: dict[str, Any] = {
        name: {"all": {"peak": peak, "current": 0}} for name, peak in values.items()
    }
    return nested | {"num_alloc_retries": 3, "num_ooms": 1, "num_device_alloc": 9}


@given(WINDOWS)
def test_the_peak_is_the_highest_window(windows: list[tuple[int, int]]) -> None:
    """Peaks over all are the highest of the windows, and the highest step's and phase's too."""
    meter = DeviceMeter(0)
    for step, (allocated, reserved) in enumerate(windows, start=1):
        phase: Phase = "backward" if step % 2 else "forward"
        meter.phase_ended(phase, step, stats(allocated, reserved))
        meter.step_ended(step, 1, stranded=step)
    memory = meter.memory(stats(0, 0), total=10**9, outside=10)
    assert (
        memory.peak_allocated
        == max(a for a, _ in windows)
        == max(dict(memory.phase_peaks).values())
    )
    assert (
        memory.peak_reserved
        == max(r for _, r in windows)
        == max(step.peak_reserved for step in memory.steps)
    )
    assert memory.headroom == 10**9 - 10 - memory.peak_reserved
    assert memory.stranded == len(windows)


def test_a_step_that_ends_twice_is_one_step() -> None:
    """Where a second optimizer steps, the step's peak is that of both its parts and what is left is the newest."""
    meter = DeviceMeter(0)
    meter.phase_ended("backward", 1, stats(500, 600))
    meter.step_ended(1, 40, 0)
    meter.phase_ended("backward", 1, stats(300, 700))
    meter.step_ended(1, 50, 0)
    (step,) = meter.memory(stats(0, 0), 1000, 0).steps
    assert (step.peak_allocated, step.peak_reserved, step.allocated) == (500, 700, 50)
