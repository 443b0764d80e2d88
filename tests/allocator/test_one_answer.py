"""One question has one answer: the words, the order of advice, the variable, and the numbers."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from support.reports import LEAK, STRANDED
from support.samples import full_sample

from torchmem.allocator.sizes import GIB, MIB
from torchmem.explain.headline import headline
from torchmem.explain.oom_report import OomReport
from torchmem.explain.remedies import Remedy, remedies
from torchmem.explain.threats import advice
from torchmem.explain.thresholds import defaults
from torchmem.explain.verdict import Gain, OnsetEvidence, Verdict
from torchmem.sample.run_history import Growth
from torchmem.sample.sample import DeviceSample, Sample, Steps

UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": GIB}
GREW = re.compile(r"grew by ([\d.]+) (\w+) a step for ([\d,]+) steps? \(([\d.]+) (\w+)\)")
LIMITS = defaults().limits("night", "node1")
SAMPLE = replace(full_sample(), settings_ignored={})
(DEVICE,) = SAMPLE.devices
"""A device that would be fragmented with much stranded memory, see _living."""


@given(st.integers(1, 80 * GIB), st.floats(1, 1e10), st.integers(1, 10**6), st.integers(0, 10**6))
def test_the_rate_times_the_steps_is_the_total(
    grown: int, rate: float, steps: int, since: int
) -> None:
    """Within the precision of what is printed, whatever the slope of the trend was."""
    why = OnsetEvidence("leak", grown, rate, since, "held")
    report = replace(
        LEAK,
        verdict=Verdict("capacity", None, why),
        steps=replace(LEAK.steps, count=since + steps),
    )
    found = GREW.search(headline(report))

    assert found
    each, unit, number, total, total_unit = found.groups()
    printed = float(each) * UNITS[unit] * int(number.replace(",", ""))
    precision = 0.5 if unit == "bytes" else 0.006 * UNITS[unit]
    allowed = precision * steps + 0.006 * UNITS[total_unit]
    assert abs(printed - float(total) * UNITS[total_unit]) <= allowed


ADVICE_ON_LEAKS = "Find what keeps tensors"
ADVICE_ON_FRAGMENTATION = "Enable expandable segments"
STEPS_BEFORE = 40


def _dead(grown: int, gain: int) -> OomReport:
    """Return the report of a rank that leaked and was fragmented, as the SDK judges it."""
    why = OnsetEvidence("leak", grown, grown / 350, STEPS_BEFORE, "held")
    gained = Gain("compaction", gain, gain / (grown / 350), matters=True)
    verdict = Verdict("fragmentation", "stranded", why, (gained,))
    return replace(STRANDED, steps=Steps(STEPS_BEFORE + 350), verdict=verdict)


def _living(grown: int, gain: int, *, has_failed: bool) -> tuple[Sample, DeviceSample]:
    """Return a rank in the same situation: it may have caught the error."""
    assert DEVICE.layout is not None
    layout = replace(
        DEVICE.layout,
        headroom_bytes=GIB,
        headroom_flush_bytes=GIB,
        stranded_bytes=gain,
        releasable_bytes=0,
    )
    oom = replace(STRANDED.oom, onset="leak") if has_failed else None
    growth = Growth("kept", grown / 350, STEPS_BEFORE, grown, "held", is_leak=True)
    device = replace(DEVICE, layout=layout, growth=growth, driver_free_bytes=GIB, last_oom=oom)
    steps = replace(SAMPLE.steps, count=STEPS_BEFORE + 350)
    sample = replace(SAMPLE, steps=steps, oom_pending=has_failed, allocator_settings={})
    return replace(sample, devices=(device,)), device


def _order(found: tuple[Remedy, ...]) -> list[str]:
    starts = (ADVICE_ON_LEAKS, ADVICE_ON_FRAGMENTATION)
    return [start for remedy in found for start in starts if remedy.text.startswith(start)]


@given(st.integers(2, 40), st.integers(5, 40), st.booleans())
def test_the_living_and_the_dead_get_one_order_of_advice(
    grown: int, gain: int, has_failed: bool
) -> None:
    """What makes the most room comes first, for a rank that runs as for one that ran out."""
    sizes = (grown * GIB, gain * GIB + MIB)
    told = remedies(_dead(*sizes))
    sample, device = _living(*sizes, has_failed=has_failed)

    assert len(_order(told)) == 2
    told_living = advice(sample, device, LIMITS)
    assert _order(told) == _order(told_living)
    assert [each.gain_steps for each in told[:2]] == [each.gain_steps for each in told_living[:2]]
    assert gain >= grown or _order(told)[0] == ADVICE_ON_LEAKS


def test_a_caught_leak_is_advised_as_a_leak() -> None:
    """While the error of a leak is pending, the advice is that of its report alone."""
    device = replace(DEVICE, growth=None, layout=None, last_oom=replace(LEAK.oom))
    sample = replace(SAMPLE, oom_pending=True, allocator_settings={})

    assert [each.text for each in remedies(LEAK)] == [
        each.text for each in advice(sample, device, LIMITS)
    ]
