"""The components of the peak: from the half of a step in which it was, and from a recorded step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.set_clock import SetClock

from torchmem.allocator.backend import T, TraceEntry
from torchmem.sdk.components.component_peaks import ComponentPeaks
from torchmem.sdk.components.step_trace import Counts, StepPeak, StepTrace, step_peak
from torchmem.sdk.safety.cost import MAX_TRACE_ENTRIES, MIN_TRACE_ENTRIES
from torchmem.simulator.backend import SimulatedBackend

LASTING = {"parameters": 100, "optimizer_state": 200, "held": 50}
AT_STEP = {0: {**LASTING, "gradients": 100, "rounding": 9}}


def peaks_after_a_step() -> ComponentPeaks:
    """Return the state after a first step with a peak of 500 bytes."""
    peaks = ComponentPeaks()
    peaks.at_step({0: 500}, AT_STEP)
    return peaks


def test_a_peak_before_anything_is_known_is_unknown() -> None:
    """The peak of the first step has no components."""
    assert peaks_after_a_step().values(0, 500, 510) == ({}, None)


def test_a_peak_in_the_optimizer_has_all_gradients() -> None:
    """If the peak rises between the two reads around the optimizer, all gradients exist."""
    peaks = peaks_after_a_step()
    peaks.before_optimizer({0: 500}, {0: 100})
    peaks.at_step({0: 700}, AT_STEP)

    found, timestamp = peaks.values(0, 700, 720)

    assert found == LASTING | {"gradients": 100, "step": 250, "rounding": 20}
    assert timestamp is not None
    assert peaks.is_exact(0)


@pytest.mark.parametrize("gradients", [{0: 100}, None])
def test_a_peak_before_the_optimizer_leaves_gradients_open(gradients: Any) -> None:
    """Gradients and what the step allocated are one component, and all add up."""
    peaks = peaks_after_a_step()
    peaks.before_optimizer({0: 700}, gradients)
    peaks.at_step({0: 700}, AT_STEP)

    assert peaks.values(0, 700, 720)[0] == LASTING | {"gradients_or_step": 350, "rounding": 20}
    assert not peaks.is_exact(0)


def test_a_peak_in_a_step_that_was_not_watched_is_open() -> None:
    """Without a read before the optimizer it is unknown in which half the peak was."""
    peaks = peaks_after_a_step()
    peaks.at_step({0: 700}, AT_STEP)

    assert peaks.values(0, 700, 720)[0] == LASTING | {"gradients_or_step": 350, "rounding": 20}


def test_a_peak_while_states_appear_is_unknown() -> None:
    """If the components differ before and after the step, those at its peak are not known."""
    peaks = peaks_after_a_step()
    peaks.before_optimizer({0: 500}, {0: 100})
    peaks.at_step({0: 700}, {0: AT_STEP[0] | {"optimizer_state": 400}})

    assert peaks.values(0, 700, 720) == ({}, None)


@pytest.mark.parametrize(("recorded", "exact"), [(699, False), (700, True)])
def test_a_recorded_step_counts_if_it_has_the_peak(recorded: int, exact: bool) -> None:
    """A recorded step tells gradients and step apart, unless another step had a higher peak."""
    peaks = peaks_after_a_step()
    peaks.at_step({0: 700}, AT_STEP)
    peaks.in_recorded_step(0, StepPeak(recorded, 30), AT_STEP[0])
    peaks.at_step({0: 700}, AT_STEP)

    split = {"gradients": 30, "step": 320} if exact else {"gradients_or_step": 350}
    assert LASTING | split | {"rounding": 0} == peaks.values(0, 700, 700)[0]


def test_what_a_recorded_step_had_freed_is_not_held() -> None:
    """At its peak `held` is less what lived before the step and was freed by then."""
    peaks = peaks_after_a_step()
    peaks.in_recorded_step(0, StepPeak(700, 30, released=20), AT_STEP[0])

    expected = LASTING | {"held": 30, "gradients": 30, "step": 340, "rounding": 0}
    assert peaks.values(0, 700, 700)[0] == expected


def test_a_leak_does_not_hide_the_peak() -> None:
    """What a step leaves behind counts as allocated within it; the peak stays known."""
    peaks = peaks_after_a_step()
    peaks.at_step({0: 700}, {0: AT_STEP[0] | {"held": 60}})

    assert peaks.values(0, 700, 700)[0] == LASTING | {"gradients_or_step": 350, "rounding": 0}


def test_a_peak_that_is_newer_than_the_latest_step_is_unknown() -> None:
    """Both peaks are of one read: an older requested one is not subtracted from a newer active one.

    As at an OutOfMemoryError, or in a read between steps.
    """
    peaks = peaks_after_a_step()
    peaks.at_step({0: 700}, AT_STEP)

    assert peaks.values(0, 700, 720)[0]["rounding"] == 20
    assert peaks.values(0, 6_500_000_700, 6_500_000_720) == ({}, None)


def test_what_waited_for_a_stream_was_not_held() -> None:
    """Pending memory that a recorded step has released is not missing in `held` at its peak."""
    peaks = ComponentPeaks()
    peaks.at_step({0: 500}, {0: AT_STEP[0] | {"pending": 80}})
    peaks.in_recorded_step(0, StepPeak(700, 30, released=90), AT_STEP[0])

    expected = LASTING | {"held": 40, "gradients": 30, "step": 330, "rounding": 0}
    assert peaks.values(0, 700, 700)[0] == expected


def test_without_optimizers_the_rest_is_the_step() -> None:
    """In inference with tracked parts no gradients are in question."""
    peaks = ComponentPeaks()
    peaks.at_step({0: 500}, {0: {"kv_cache": 300, "held": 100}})
    peaks.at_step({0: 900}, {0: {"kv_cache": 300, "held": 100}})

    expected = {"kv_cache": 300, "held": 100, "step": 500, "rounding": 0}
    assert peaks.values(0, 900, 900)[0] == expected


def entry(action: str, address: int, size: int) -> dict[str, Any]:
    """Return one entry of PyTorch's history."""
    return {"action": action, "addr": address, "size": size}


operations = st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.integers(1, 9)), max_size=60)


addresses = st.sets(st.integers(0, 7))


@given(operations, addresses, addresses, addresses)
def test_the_peak_of_any_step_is_that_of_its_moments(
    steps: list[tuple[bool, int, int]], old: set[int], held: set[int], chosen: set[int]
) -> None:
    """Peak and gradients are those that following every address through the step gives."""
    alive = {address: (address + 1, "held") for address in held}
    alive |= {address: (address + 1, "old") for address in old}
    before = sum(size for size, _ in alive.values())
    lasting = sum(size for size, kind in alive.values() if kind == "held")
    entries, moments, number = [], [(before, dict(alive))], 0
    for make, address, size in steps:
        if make and address not in alive:
            number += 1
            alive[address] = (size, f"made {number}")
            entries.append(entry("alloc", address, size))
        elif not make and address in alive:
            entries.append(entry("free_completed", address, alive.pop(address)[0]))
        moments.append((sum(size for size, _ in alive.values()), dict(alive)))
    new = {a: alive[a][0] for a in chosen & alive.keys() if alive[a][1] != "held"}
    gradients = {alive[address] for address in new} | {(a + 1, "old") for a in old}
    highest = max(level for level, _ in moments)
    at_peak = next(living for level, living in moments if level == highest)

    found = step_peak(entries, before, {address: address + 1 for address in old}, new)

    expected = sum(block[0] for block in at_peak.values() if block in gradients)
    still_held = sum(size for size, kind in at_peak.values() if kind == "held")
    assert StepPeak(highest, expected, lasting - still_held) == found


class Recording(SimulatedBackend):
    """A backend whose history a test writes."""

    entries: Sequence[TraceEntry] = ()
    started = entries_asked = 0
    is_free = True

    def start_trace(self, max_entries: int, *, complete: bool = False) -> bool:
        """Count the call."""
        self.started, self.entries_asked = self.started + 1, max_entries
        return self.is_free

    def end_trace(self, use: Callable[[Sequence[Sequence[TraceEntry]]], T]) -> T | None:
        """Return the entries."""
        return use([self.entries])


def record(backend: Recording, trace: StepTrace, after: int) -> dict[int, StepPeak]:
    """Record a step that begins with 100 requested bytes and ends with `after`."""
    trace.begin(Counts({0: 100}), lambda found: None)
    assert trace.is_recording
    return trace.end(Counts({0: after}))


def test_a_recorded_step_must_add_up() -> None:
    """A recording whose entries do not explain the bytes at the end of the step is dropped."""
    backend = Recording([])
    backend.entries = [entry("alloc", 1, 50), entry("free_completed", 1, 50)]

    assert {0: StepPeak(150, 0)} == record(backend, StepTrace(backend), 100)
    assert record(backend, StepTrace(backend), 101) == {}


def test_a_full_ring_is_no_recording() -> None:
    """The first entries of the step are lost then."""
    backend = Recording([])
    backend.entries = [entry("alloc", 1, 0)] * MIN_TRACE_ENTRIES

    assert record(backend, StepTrace(backend), 100) == {}


def test_the_ring_fits_the_next_step() -> None:
    """A step with more events than the ring has entries makes it larger, up to a limit."""
    clock = SetClock()
    backend = Recording([])
    trace = StepTrace(backend, clock)
    sizes = []
    for events in (9, 40_000, 30_000, 10**6, 9):
        clock.now += 1000.0
        trace.begin(Counts({0: 100}, {0: 500, 1: 0}), lambda found: None)
        backend.entries = [entry("alloc", 1, 0)] * min(events, backend.entries_asked)
        sizes.append((backend.entries_asked, bool(trace.end(Counts({0: 100}, {0: 500 + events})))))

    least, most = MIN_TRACE_ENTRIES, MAX_TRACE_ENTRIES
    assert [(least, True), (least, False), (50_000, True), (50_000, False), (most, True)] == sizes


def test_recordings_are_rare() -> None:
    """One minute lies between two of them, and ten once the peak is known."""
    clock = SetClock()
    backend = Recording([])
    trace = StepTrace(backend, clock)
    begun = []
    for second in range(3000):
        clock.now = 1000.0 + second
        trace.begin(Counts({0: 100}), lambda found: None)
        if trace.is_recording:
            begun.append(second)
            trace.end(Counts({0: 100}))
            trace.wait(is_known=second > 100)

    assert begun == [0, 60, 120, 720, 1320, 1920, 2520]


def test_nothing_is_recorded_while_the_script_records() -> None:
    """A refused recording is not tried again for ten minutes."""
    clock = SetClock()
    backend = Recording([])
    backend.is_free = False
    trace = StepTrace(backend, clock)
    for second in range(601):
        clock.now = 1000.0 + second
        trace.begin(Counts({0: 100}), lambda found: None)

    assert (backend.started, trace.is_recording) == (2, False)
