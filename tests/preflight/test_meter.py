"""The peaks of one device."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from torchmem.preflight.child.meter import DeviceMeter
from torchmem.preflight.result import Phase

PEAKS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=20)


def stats(allocated: int, reserved: int) -> dict[str, Any]:
    values = {
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "inactive_split_bytes": reserved // 2,
    }
    nested: dict[str, Any] = {
        name: {"all": {"peak": peak, "current": 0}} for name, peak in values.items()
    }
    return nested | {"num_alloc_retries": 3, "num_ooms": 1, "num_device_alloc": 9}


@given(PEAKS)
def test_the_peak_is_that_of_the_highest_phase(peaks: list[tuple[int, int]]) -> None:
    """The run's peaks equal the highest peak of its phases and of its steps."""
    meter = DeviceMeter(0)
    for step, (allocated, reserved) in enumerate(peaks, start=1):
        phase: Phase = "backward" if step % 2 else "forward"
        meter.phase_ended(phase, step, stats(allocated, reserved))
        meter.step_ended(step, 1, stranded=7)
    memory = meter.memory(stats(0, 0), total=10**9, outside=10)

    highest = max(allocated for allocated, _ in peaks), max(reserved for _, reserved in peaks)
    assert highest == (memory.peak_allocated, memory.peak_reserved)
    assert memory.peak_allocated == max(dict(memory.phase_peaks).values())
    assert memory.peak_reserved == max(step.peak_reserved for step in memory.steps)
    assert memory.headroom == 10**9 - 10 - memory.peak_reserved
    assert memory.stranded == max(7, highest[1] // 2)


def test_a_step_can_end_twice() -> None:
    """With a second optimizer, a step has the peak of both parts and the newest allocated bytes."""
    meter = DeviceMeter(0)
    meter.phase_ended("backward", 1, stats(500, 600))
    meter.step_ended(1, 40, 0)
    meter.phase_ended("backward", 1, stats(300, 700))
    meter.step_ended(1, 50, 0)
    (step,) = meter.memory(stats(0, 0), 1000, 0).steps
    assert (step.peak_allocated, step.peak_reserved, step.allocated) == (500, 700, 50)
