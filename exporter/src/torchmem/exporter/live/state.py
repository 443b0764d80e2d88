"""Compute the state of a node from what one collection has found.

The page at `/` draws it, and `/api/v1/state` serves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torchmem.exporter.node_reading import NodeReading
from torchmem.exporter.nvml_reasons import next_step, reason_in_words
from torchmem.exporter.reading import Reading, V
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.exporter.subjects.power import Power
from torchmem.exporter.subjects.temperature import Temperatures
from torchmem.exporter.subjects.utilization import Utilization
from torchmem.node import node_state as ranks
from torchmem.node.state import GpuState, NodeState, NvmlState


def node_state(found: NodeReading) -> NodeState:
    """Return the state of the node."""
    reading = found.reading
    memory = _by_uuid(reading, MemoryInfo)
    unused = {uuid: (known.free, known.reserved or 0) for uuid, known in memory.items()}
    nvml = _nvml(reading.down_reason)
    gpus = tuple(_gpus(found, memory))
    return ranks.node_state(found, ranks.NvmlValues(nvml, gpus, unused))


def _nvml(reason: str) -> NvmlState:
    if not reason:
        return NvmlState(up=True)
    words = reason_in_words(reason)
    text = f"{words[0].upper()}{words[1:]}."
    return NvmlState(up=False, reason=reason, text=text, step=next_step(reason))


def _gpus(found: NodeReading, memory: Mapping[str, MemoryInfo]) -> Iterator[GpuState]:
    """Yield the GPUs by index, with what NVML tells of each."""
    reading = found.reading
    powers, sensors = _by_uuid(reading, Power), _by_uuid(reading, Temperatures)
    utilizations = _by_uuid(reading, Utilization)
    for gpu in sorted(found.identities, key=lambda gpu: gpu.index):
        power, known = powers.get(gpu.uuid, Power()), memory.get(gpu.uuid)
        utilization = utilizations.get(gpu.uuid, Utilization())
        yield GpuState(
            uuid=gpu.uuid,
            up=not reading.down_reason and gpu.labels not in reading.unresponsive,
            index=gpu.index,
            name=gpu.name,
            error_code=reading.lost.get(gpu.labels),
            total_bytes=known.total if known else None,
            temperature_celsius=sensors.get(gpu.uuid, Temperatures()).sensors.get("gpu"),
            power_watts=power.watts,
            power_limit_watts=power.limit_watts,
            utilization_ratio=utilization.gpu,
            memory_utilization_ratio=utilization.memory,
        )


def _by_uuid(reading: Reading, kind: type[V]) -> Mapping[str, V]:
    return {gpu.uuid: value for gpu, value in reading.values(kind)}
