"""A rank's report as plain text, for terminals of at least 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.memory_use import device_parts
from torchmem.allocator.rank_report import facts, heading
from torchmem.allocator.threats import advice, threats
from torchmem.oom.text import advice_lines, fact_lines, memory_lines, wrapped
from torchmem.sample.sample import DeviceSample, Sample

WIDTH = 80


def page(sample: Sample, now: float) -> str:
    """Return the report of a process: one part for each of its devices."""
    return "\n".join(_part(sample, device, now) for device in sample.devices)


def _part(sample: Sample, device: DeviceSample, now: float) -> str:
    parts = device_parts(device, device.driver_free_bytes)
    sections = [
        [*heading(sample, device, now)],
        [*memory_lines(device.total_bytes, parts)],
        [*fact_lines(facts(sample, device, now), WIDTH)],
        [*_threats(sample, device)],
        [*advice_lines(advice(sample, device), WIDTH)],
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _threats(sample: Sample, device: DeviceSample) -> Iterator[str]:
    yield "Threats"
    found = threats(sample, device)
    for threat in found:
        yield from wrapped(threat.text, "    ", "  - ", WIDTH)
    if not found:
        yield "  Nothing at the moment."
