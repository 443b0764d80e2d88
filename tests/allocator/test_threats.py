"""What threatens a rank: the thresholds of the alerts, and what to set."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.samples import full_sample, samples

from torchmem.allocator.sizes import GIB, MIB
from torchmem.explain.growth import steps_left
from torchmem.explain.oom_report import format_seconds
from torchmem.explain.parts import device_parts, part_words
from torchmem.explain.threat_series import judgment
from torchmem.explain.threats import MAX_REMEDIES, advice, threats
from torchmem.explain.thresholds import changed, defaults
from torchmem.sample.run_history import Growth
from torchmem.sample.sample import DeviceSample, HostMemory, Sample

FULL = full_sample()
(DEVICE,) = FULL.devices
SHIPPED = defaults().limits("night", "node1")


def _device(headroom: int, flushed: int, stranded: int, **changes: Any) -> DeviceSample:
    assert DEVICE.layout is not None
    layout = replace(
        DEVICE.layout,
        headroom_bytes=headroom,
        headroom_flush_bytes=flushed,
        stranded_bytes=stranded,
    )
    counters = replace(DEVICE.counters, alloc_retries=0)
    return replace(DEVICE, layout=layout, counters=counters, **{"growth": None, **changes})


CALM = replace(FULL, settings_ignored={}, oom_pending=False)


@pytest.mark.parametrize(
    ("device", "causes"),
    [
        (_device(10 * GIB, 12 * GIB, 12 * GIB), []),
        (_device(2 * GIB, 9 * GIB, 12 * GIB), ["fragmentation"]),
        (_device(2 * GIB, 9 * GIB, GIB // 2), []),
        (_device(GIB, GIB, 0, driver_free_bytes=20 * GIB), ["capacity"]),
        (_device(GIB, GIB, 0, driver_free_bytes=GIB), ["external"]),
        (_device(9 * GIB, 9 * GIB, 0, driver_free_bytes=GIB // 4), ["library"]),
    ],
)
def test_the_cause_to_expect(device: DeviceSample, causes: list[str]) -> None:
    """Stranded memory, a full device, a neighbor, and libraries are told apart."""
    assert causes == [threat.cause for threat in threats(CALM, device, SHIPPED)]


def test_managed_memory_is_no_neighbor() -> None:
    """What a paged optimizer has on the GPU is the process's own, and moves if room is needed."""
    device = _device(GIB, GIB, 0, driver_free_bytes=GIB, managed_bytes=70 * GIB)
    (threat,) = threats(CALM, device, SHIPPED)
    assert threat.cause == "capacity"


@pytest.mark.parametrize(
    ("content", "causes"),
    [
        ({"headroom_ratio": 0.02}, []),
        ({"stranded_bytes": "13GiB"}, []),
        ({"overrides": [{"match": {"run": "ni.*"}, "headroom_ratio": 0.02}]}, []),
        ({"overrides": [{"match": {"run": "day"}, "headroom_ratio": 0.02}]}, ["fragmentation"]),
        ({"near_capacity_ratio": 0.2}, ["fragmentation"]),
        ({"near_capacity_ratio": 0.2, "stranded_bytes": "13GiB"}, ["capacity"]),
    ],
)
def test_the_thresholds_of_the_user(content: dict[str, Any], causes: list[str]) -> None:
    """Changed thresholds, also those of the rank's run alone, decide what threatens it."""
    limits = changed(content, "a file").limits("night", "node1")
    device = _device(2 * GIB, 9 * GIB, 12 * GIB, driver_free_bytes=20 * GIB)

    assert causes == [threat.cause for threat in threats(CALM, device, limits)]


LEAK = Growth("kept", 8 * MIB, 40, GIB, "held", is_leak=True)


@pytest.mark.parametrize(
    ("growth", "words", "remedy"),
    [
        (LEAK, "leak: tensors kept between steps grow by 8.00 MiB a step", "keeps tensors"),
        (replace(LEAK, kind="larger_step"), "Steps need 8.00 MiB more", "more and more"),
        (replace(LEAK, kind="outside"), "outside PyTorch's allocator grows", "nvidia-smi"),
    ],
)
def test_what_grows_is_a_threat(growth: Growth, words: str, remedy: str) -> None:
    """A rank with much left says what grows, when it is full, and what to look for, first."""
    device = _device(10 * GIB, 12 * GIB, 0, driver_free_bytes=20 * GIB, growth=growth)
    sample = replace(CALM, steps=replace(CALM.steps, count=101, duration_sum_seconds=200.0))
    (threat,) = threats(sample, device, SHIPPED)
    (left,) = [steps_left(device)]

    assert words in threat.text
    assert "since step 40" in threat.text
    assert left is not None
    assert f"full in about {int(left):,} steps ({format_seconds(2 * left)})." in threat.text
    assert growth.onset == threat.onset
    assert remedy in advice(sample, device, SHIPPED)[0].text


def test_a_leak_comes_before_what_is_full() -> None:
    """In a rank that leaks and is nearly full, the advice begins with the leak."""
    device = _device(GIB, GIB, 0, driver_free_bytes=20 * GIB, growth=LEAK)

    assert [threat.onset for threat in threats(CALM, device, SHIPPED)] == ["leak", None]
    assert "keeps tensors" in advice(CALM, device, SHIPPED)[0].text


def _stranded(stranded: int, growth: Growth | None, retries: int) -> DeviceSample:
    """Return a device with 20 GiB left after a flush."""
    device = _device(18 * GIB, 20 * GIB, stranded, driver_free_bytes=18 * GIB, growth=growth)
    assert device.layout is not None
    layout = replace(device.layout, releasable_bytes=2 * GIB)
    counters = replace(device.counters, alloc_retries=retries)
    return replace(device, layout=layout, counters=counters)


@pytest.mark.parametrize(
    ("stranded", "growth", "retries", "first"),
    [
        (26 * GIB, None, 0, None),
        (26 * GIB, None, 4, "fragmentation"),
        (26 * GIB, replace(LEAK, kind="larger_step"), 0, "fragmentation"),
        (26 * GIB, replace(LEAK, grown_bytes=30 * GIB), 4, "capacity"),
        (8 * GIB, LEAK, 4, "capacity"),
    ],
    ids=["nothing asks", "retries", "grows", "a larger leak", "little is stranded"],
)
def test_what_makes_the_most_room_comes_first(
    stranded: int, growth: Growth | None, retries: int, first: str | None
) -> None:
    """Fragmentation is said first where compaction would make more room than an end of growth."""
    device = _stranded(stranded, growth, retries)
    causes = [threat.cause for threat in threats(CALM, device, SHIPPED)]

    assert first == (causes[0] if causes else None)
    assert bool(first) == bool(advice(CALM, device, SHIPPED))


def test_the_end_of_a_growth_that_cannot_use_what_is_free() -> None:
    """Larger steps cannot use stranded memory, so nothing is said about when the GPU is full."""
    growth = replace(LEAK, kind="larger_step")
    for stranded, is_known in ((0, True), (10 * GIB, False)):
        told = [item.text for item in threats(CALM, _stranded(stranded, growth, 0), SHIPPED)]
        (text,) = [text for text in told if "Steps need" in text]
        assert ("full in" in text) == is_known


@pytest.mark.parametrize(("ratio", "is_known"), [(0.029, False), (0.031, True)])
def test_the_end_of_a_leak_with_little_room(ratio: float, is_known: bool) -> None:
    """With less than 3% of the GPU left, pieces of the cache are too large a share of it."""
    allocator, total = DEVICE.allocator, DEVICE.total_bytes
    assert allocator is not None
    assert total is not None
    peak = allocator.reserved_bytes.total - int(ratio * total)
    device = replace(
        DEVICE,
        growth=LEAK,
        driver_free_bytes=0,
        limit_bytes=None,
        run_history=None,
        allocator=replace(allocator, active_peak_bytes=peak),
    )

    assert (steps_left(device) is not None) == is_known


def test_the_end_of_a_leak_below_an_older_peak() -> None:
    """If the highest peak is older than the leak, that of a step and the end are unknown."""
    history = DEVICE.run_history
    assert history is not None
    steps = tuple(range(40, 50))
    unknown = (None,) * len(steps)
    for peaks, is_known in (((50 * GIB,) * 10, False), (tuple(range(10)), True)):
        run = replace(
            history,
            steps=steps,
            seconds=tuple(map(float, steps)),
            allocated_bytes=steps,
            peak_bytes=peaks,
            stranded_bytes=unknown,
            outside_bytes=unknown,
            kept_bytes=unknown,
        )
        device = replace(_stranded(0, LEAK, 0), run_history=run)
        assert (steps_left(device) is not None) == is_known


def test_an_override_of_an_instance_applies_to_its_host() -> None:
    """The override for a node matches the name of the host."""
    override = {"match": {"instance": "big.*"}, "gpu_library_bytes": "2GiB"}
    thresholds = changed({"overrides": [override]}, "a file")

    assert thresholds.limits("night", "big-1").gpu_library_bytes == 2 * GIB
    assert thresholds.limits("night", "small-1") == SHIPPED


def test_threats_without_a_cause() -> None:
    """Flushes, ignored settings and host memory are named, after what ends the run."""
    sample = replace(FULL, host=HostMemory(1, 100 * GIB, GIB), oom_pending=True)
    device = replace(DEVICE, growth=None)
    texts = [threat.text for threat in threats(sample, device, SHIPPED)]

    assert [
        next(word for word in words if word in text)
        for text in texts
        for words in (["torchmem why", "Host memory", "expandable_segments", "emptied", "flush"],)
    ] == ["torchmem why", "flush", "emptied", "Host memory", "expandable_segments"]


@given(samples)
def test_there_is_always_advice_for_a_cause(sample: Sample) -> None:
    """A threat with a cause has advice; without one there is none, and never too much."""
    for device in sample.devices:
        causes = [threat.cause for threat in threats(sample, device, SHIPPED) if threat.cause]
        assert bool(causes) == bool(advice(sample, device, SHIPPED))
        assert len(advice(sample, device, SHIPPED)) <= MAX_REMEDIES


@given(samples)
def test_the_first_advice_is_about_the_first_threat(sample: Sample) -> None:
    """The exporter finds it without the others, and its words are those of the page."""
    for device in sample.devices:
        judged = judgment(sample, device, SHIPPED)
        first = next(iter(advice(sample, device, SHIPPED)), None)
        assert (judged.remedy if judged else None) == (first.kind if first else None)


def _parts(device: DeviceSample) -> dict[str, int]:
    return {part_words(part): part.bytes for part in device_parts(device, device.driver_free_bytes)}


def test_the_parts_of_a_device_add_up() -> None:
    """With components of the same moment, the parts are the whole device."""
    parts = _parts(DEVICE)

    assert DEVICE.total_bytes == sum(parts.values())
    assert {"kv_cache", "parameters", "rounding of tensors"} <= set(parts)


def test_components_of_another_moment() -> None:
    """Components that are not the allocated bytes are not shown."""
    parts = _parts(replace(DEVICE, components={"held": 5}))

    assert parts["tensors"] == 40 * GIB + (1 << 20)


@given(st.floats(0, 1e7))
def test_a_duration_has_no_sixty_seconds(seconds: float) -> None:
    """A duration just below a minute or an hour is not rounded up to "60 s" or "60 min"."""
    assert not re.search(r"\b60 (s|min)\b", format_seconds(seconds))
