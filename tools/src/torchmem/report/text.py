"""A rank's report as plain text, for terminals of at least 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torchmem.cli.terminal import joined, wrapped
from torchmem.explain.memory_use import device_uses
from torchmem.explain.rank_report import heading, rank_facts
from torchmem.explain.run_chart import run_chart
from torchmem.explain.threats import advice, threats
from torchmem.explain.thresholds import Limits
from torchmem.oom.text import advice_lines, fact_lines, memory_lines, run_lines
from torchmem.sample.sample import DeviceSample, Sample

WIDTH = 80


def page(sample: Sample, now: float, gpus: Mapping[str, int], limits: Limits) -> str:
    """Return the report of a process: one part for each of its devices.

    `gpus` are NVML's indices by UUID, as far as they are known.
    """
    return "\n".join(_part(sample, device, now, gpus, limits) for device in sample.devices)


def _part(
    sample: Sample, device: DeviceSample, now: float, gpus: Mapping[str, int], limits: Limits
) -> str:
    read = device.stats_timestamp
    age = None if read is None else max(0.0, now - read)
    uses = device_uses(device, device.driver_free_bytes, unread_steps=sample.steps.unread)
    sections = [
        [*heading(sample, device, now, gpus.get(device.uuid or ""))],
        [*memory_lines(device.total_bytes, uses, age)],
        [*fact_lines(rank_facts(sample, device, now), WIDTH)],
        [*run_lines(run_chart(device.run_history, device.total_bytes))],
        [*_threats(sample, device, limits)],
        [*advice_lines(advice(sample, device, limits), WIDTH)],
    ]
    return joined(sections)


def _threats(sample: Sample, device: DeviceSample, limits: Limits) -> Iterator[str]:
    yield "Threats"
    found = threats(sample, device, limits)
    for threat in found:
        yield from wrapped(threat.text, "  - ", WIDTH)
    if not found:
        yield "  Nothing at the moment."
