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
from torchmem.explain.remedies import remedies
from torchmem.explain.remedy import Remedy
from torchmem.explain.threats import advice
from torchmem.explain.thresholds import defaults
from torchmem.explain.verdict import Gain, OnsetEvidence, Verdict
from torchmem.sample.run_history import Growth
from torchmem.sample.sample import DeviceSample, Onset, OomCause, Sample, Steps

UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": GIB}
SIZE = r"([\d.]+) (bytes|[KMG]iB)"
STEPS = r"([\d,]+) steps?"
PRODUCTS: dict[Onset, str] = {
    "leak": rf"grew by {SIZE} a step for {STEPS} \({SIZE}\)",
    "larger_step": rf"{SIZE} more in each of {STEPS}, {SIZE} in all",
    "outside": rf"grew by {SIZE} \({SIZE} a step for {STEPS}\)",
}
"""Headlines with a rate, a number of steps, and their product."""
LIMITS = defaults().limits("night", "node1")
SAMPLE = replace(full_sample(), settings_ignored={})
(DEVICE,) = SAMPLE.devices
"""A device that would be fragmented with much stranded memory, see _living."""


@given(
    st.sampled_from(sorted(PRODUCTS)),
    st.integers(1, 80 * GIB),
    st.floats(1, 1e10),
    st.integers(1, 10**6),
    st.integers(0, 10**6),
)
def test_the_rate_times_the_steps_is_the_total(
    onset: Onset, grown: int, rate: float, steps: int, since: int
) -> None:
    """The printed numbers agree to the last digit of the total, whatever the slope was."""
    why = OnsetEvidence(onset, grown, rate, since, "held")
    cause: OomCause = "external" if onset == "outside" else "capacity"
    report = replace(
        LEAK,
        oom=replace(LEAK.oom, cause=cause),
        verdict=Verdict(cause, None, why),
        steps=replace(LEAK.steps, count=since + steps),
    )
    found = re.search(PRODUCTS[onset], headline(report))

    assert found
    numbers = list(found.groups())
    if onset == "outside":
        numbers = [*numbers[2:], *numbers[:2]]
    each, unit, number, total, total_unit = numbers
    printed = float(each) * UNITS[unit] * int(number.replace(",", ""))
    last_digit = UNITS[total_unit] * (1 if total_unit == "bytes" else 0.01)
    assert abs(printed - float(total) * UNITS[total_unit]) <= last_digit


def test_a_rate_has_the_decimals_that_its_product_needs() -> None:
    """Two decimals where these are enough."""
    why = OnsetEvidence("leak", 17_039 * MIB, 49.25 * MIB, 10, "held")
    verdict = Verdict("capacity", None, why)
    few, many = (
        headline(replace(LEAK, verdict=verdict, steps=Steps(10 + steps))) for steps in (330, 21_333)
    )

    assert "grew by 51.63 MiB a step for 330 steps (16.64 GiB)" in few
    assert "grew by 817.88 KiB a step for 21,333 steps (16.64 GiB)" in many


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
