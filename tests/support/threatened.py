"""Living ranks on an 80 GB GPU, each with one threat, by the kind of the threat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from support.samples import full_sample

from torchmem.explain.thresholds import defaults
from torchmem.sample.run_history import Growth
from torchmem.sample.sample import DeviceSample, Sample

GIB = 1 << 30
LIMITS = defaults().limits("night", "node1")
LEAK = Growth("kept", 8.0 * (1 << 20), 40, GIB, "held", is_leak=True)
GROWS = replace(LEAK, is_leak=False)


def _rank(headroom: int, flushed: int, stranded: int, free: int, **changes: Any) -> Sample:
    """Return a rank with room for requests of these sizes, without and with a flush."""
    sample = full_sample()
    (device,) = sample.devices
    assert device.layout is not None
    layout = replace(
        device.layout,
        headroom_bytes=headroom,
        headroom_flush_bytes=flushed,
        stranded_bytes=stranded,
    )
    counters = replace(device.counters, alloc_retries=0, ooms={})
    known = {"growth": None, "last_oom": None} | changes
    device = replace(device, layout=layout, driver_free_bytes=free, counters=counters, **known)
    return replace(sample, devices=(device,), oom_pending=False, settings_ignored={})


LIVING: Mapping[str, Sample] = {
    "fragmentation": _rank(2 * GIB, 9 * GIB, 12 * GIB, 5 * GIB),
    "leak": _rank(20 * GIB, 20 * GIB, 0, 20 * GIB, growth=LEAK),
    "kept": _rank(20 * GIB, 20 * GIB, 0, 20 * GIB, growth=GROWS),
    "larger_step": _rank(
        20 * GIB, 20 * GIB, 0, 20 * GIB, growth=replace(GROWS, kind="larger_step")
    ),
    "outside": _rank(20 * GIB, 20 * GIB, 0, 20 * GIB, growth=replace(GROWS, kind="outside")),
    "capacity": _rank(GIB, GIB, 0, 20 * GIB),
    "external": _rank(GIB, GIB, 0, GIB),
    "library": _rank(9 * GIB, 9 * GIB, 0, GIB // 4),
}


def device_of(sample: Sample) -> DeviceSample:
    """Return the only device of a rank."""
    (device,) = sample.devices
    return device
