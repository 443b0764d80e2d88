"""One subject per file. The NVML collectors run in the driver's thread, in this order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import Metric

from torchmem.exporter.collectors import memory, power, processes, temperature, utilization
from torchmem.exporter.reading import Reading

NVML_COLLECTORS: Mapping[str, Callable[[Reading], Iterable[Metric]]] = {
    "memory": memory.collect,
    "processes": processes.collect,
    "utilization": utilization.collect,
    "power": power.collect,
    "temperature": temperature.collect,
}
