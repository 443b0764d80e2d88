"""A rank on a GPU that shares the host's memory: what threatens it, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.samples import full_sample
from support.threatened import GIB, LEAK, LIMITS, LIVING, device_of

from torchmem.explain.growth import room_left, steps_left
from torchmem.explain.parts import device_parts
from torchmem.explain.rank_report import rank_facts
from torchmem.explain.run_summary import headroom_at_peak
from torchmem.explain.threats import threats
from torchmem.metrics.families import ProcessView, families
from torchmem.sample.sample import DeviceSample, HostMemory


def shared(kind: str, **changes: Any) -> DeviceSample:
    """Return the device of a threatened rank, as if it shared the host's memory."""
    return replace(device_of(LIVING[kind]), shares_host_memory=True, **changes)


@pytest.mark.parametrize("kind", ["capacity", "external", "library"])
def test_little_left_of_the_hosts_memory_is_no_threat_of_the_gpu(kind: str) -> None:
    """Memory of the host is not another process; what is left is judged once."""
    assert threats(LIVING[kind], shared(kind), LIMITS) == ()


@pytest.mark.parametrize(("kind", "told"), [("leak", "leak"), ("fragmentation", "fragmentation")])
def test_what_the_allocator_knows_is_still_told(kind: str, told: str) -> None:
    """A leak and stranded memory do not depend on whose memory it is."""
    assert [threat.kind for threat in threats(LIVING[kind], shared(kind), LIMITS)] == [told]


def test_no_prediction_is_made_from_the_hosts_memory() -> None:
    """When memory will be full is not known: other programs take and give of it."""
    device = shared("leak")
    (threat,) = threats(LIVING["leak"], device, LIMITS)

    assert device.growth == LEAK
    assert (room_left(device), steps_left(device), headroom_at_peak(device)) == (None, None, None)
    assert "full in" not in threat.text


def test_low_host_memory_is_the_threat_that_matters() -> None:
    """It says that the GPU shares it."""
    sample = replace(LIVING["capacity"], host=HostMemory(GIB, 120 * GIB, GIB))
    (threat,) = threats(sample, shared("capacity"), LIMITS)
    assert threat.text == (
        "Host memory, which the GPU shares, is almost full: 1.00 GiB of 120.00 GiB is left."
    )


def test_nothing_is_said_of_memory_outside_the_allocator() -> None:
    """What is outside is mostly the host's: neither its size nor its change means anything."""
    sample = full_sample()
    device = replace(sample.devices[0], shares_host_memory=True)
    subjects = {fact.subject for fact in rank_facts(sample, device, sample.timestamp)}
    assert not subjects & {"outside PyTorch", "returned", "left at the peak"}
    assert "largest request" in subjects


def test_the_parts_add_up_with_what_the_host_uses() -> None:
    """What is available is free; the rest, beside PyTorch, is one part."""
    device = shared("leak", total_bytes=120 * GIB)
    parts = {part.name: part.bytes for part in device_parts(device, 20 * GIB)}
    assert sum(parts.values()) == device.total_bytes
    assert (parts["free"], "not_pytorch" in parts) == (20 * GIB, True)
    assert device_parts(device, None) == ()


def test_no_rule_reads_the_hosts_memory_as_the_drivers() -> None:
    """All margins and predictions of the rules need torchmem_driver_free_bytes."""
    sample = LIVING["leak"]
    view = ProcessView(replace(sample, devices=(shared("leak"),)), 1, "running", {})
    samples = {each.name: each.samples for each in families([view])}
    assert samples["torchmem_device_total_bytes"]
    assert samples["torchmem_headroom_bytes"]
    assert not samples.get("torchmem_driver_free_bytes")
