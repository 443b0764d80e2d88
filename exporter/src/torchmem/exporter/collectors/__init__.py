"""One subject per file. The NVML collectors run in the driver's thread, in this order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from prometheus_client.core import Metric

from torchmem.exporter.collectors import (
    clocks,
    ecc,
    fans,
    gpm,
    memory,
    mig,
    nvlink,
    pcie,
    power,
    processes,
    temperature,
    utilization,
)
from torchmem.exporter.reading import Reading

Collect = Callable[[Reading], Iterable[Metric]]


def nvml_collectors(processes_per_gpu: int, *, pcie_throughput: bool) -> Mapping[str, Collect]:
    """The collectors by name, those first that matter most when the deadline comes."""
    found: dict[str, Collect] = {
        "memory": memory.collect,
        "mig": mig.collect,
        "processes": partial(processes.collect, processes_per_gpu=processes_per_gpu),
        "utilization": utilization.collect,
        "power": power.collect,
        "temperature": temperature.collect,
        "clocks": clocks.collect,
        "ecc": ecc.collect,
        "repairs": ecc.collect_repairs,
        "fans": fans.collect,
        "pcie": pcie.collect,
        "nvlink": nvlink.collect,
        "gpm": gpm.collect,
    }
    return found | ({"pcie_throughput": pcie.collect_throughput} if pcie_throughput else {})
