"""What threatens a rank: the thresholds of the alerts, and what to set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from support.samples import full_sample, samples

from torchmem.allocator import threats as module
from torchmem.allocator.memory_use import device_parts
from torchmem.allocator.sizes import GIB
from torchmem.allocator.threats import MAX_REMEDIES, advice, threats
from torchmem.rules.thresholds import defaults
from torchmem.sample.sample import DeviceSample, HostMemory, Sample

FULL = full_sample()
(DEVICE,) = FULL.devices
SHARED = (
    "stranded_ratio",
    "stranded_bytes",
    "headroom_ratio",
    "near_capacity_ratio",
    "gpu_library_bytes",
    "library_releasable_bytes",
    "host_available_ratio",
)


def _device(headroom: int, flushed: int, stranded: int, **changes: Any) -> DeviceSample:
    assert DEVICE.layout is not None
    layout = replace(
        DEVICE.layout,
        headroom_bytes=headroom,
        headroom_flush_bytes=flushed,
        stranded_bytes=stranded,
    )
    counters = replace(DEVICE.counters, alloc_retries=0)
    return replace(DEVICE, layout=layout, counters=counters, **changes)


CALM = replace(FULL, settings_ignored={}, oom_pending=False)


@pytest.mark.parametrize("name", SHARED)
def test_the_thresholds_are_those_of_the_alerts(name: str) -> None:
    """Each threshold has the value of rules/thresholds.yml."""
    assert float(defaults().values[name]) == getattr(module, name.upper())


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
    assert causes == [threat.cause for threat in threats(CALM, device)]


def test_threats_without_a_cause() -> None:
    """Flushes, ignored settings and host memory are named, after what ends the run."""
    sample = replace(FULL, host=HostMemory(1, 100 * GIB, GIB), oom_pending=True)
    texts = [threat.text for threat in threats(sample, DEVICE)]

    assert ["torchmem oom", "flush", "emptied", "Host memory", "expandable_segments"] == [
        next(word for word in words if word in text)
        for text in texts
        for words in (["torchmem oom", "Host memory", "expandable_segments", "emptied", "flush"],)
    ]


@given(samples)
def test_there_is_always_advice_for_a_cause(sample: Sample) -> None:
    """A threat with a cause has advice; without one there is none, and never too much."""
    for device in sample.devices:
        causes = [threat.cause for threat in threats(sample, device) if threat.cause]
        assert bool(causes) == bool(advice(sample, device))
        assert len(advice(sample, device)) <= MAX_REMEDIES


def test_the_parts_of_a_device_add_up() -> None:
    """With components of the same moment, the parts are the whole device."""
    parts = dict(device_parts(DEVICE, DEVICE.driver_free_bytes))

    assert DEVICE.total_bytes == sum(parts.values())
    assert {"kv_cache", "parameters", "rounding of tensors"} <= set(parts)


def test_components_of_another_moment() -> None:
    """Components that are not the allocated bytes are not shown."""
    parts = dict(device_parts(replace(DEVICE, components={"held": 5}), DEVICE.driver_free_bytes))

    assert 40 * GIB + (1 << 20) == parts["tensors"]
