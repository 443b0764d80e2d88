"""The exporter's series beside PyTorch's statistics, the driver's free memory, and nvidia-smi."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from experiments.real_gpu.figures import Figures, Unit
from experiments.real_gpu.processes_on_gpu import MIB, scraped_once
from support.exposition import Exposition

from torchmem import sdk
from torchmem.exporter.driver import Driver, PyNvml

NVIDIA_SMI = "nvidia-smi"
FREE_TOLERANCE = 32 * MIB
"""What the exporter tolerates between CUDA and NVML when it joins a process with its GPU."""
BATCHES = (64, 512, 128, 1024)


@dataclass(frozen=True, slots=True)
class Field:
    """A field of `nvidia-smi --query-gpu`, and the series that has the same value.

    scale: units of the series in one of the field. absolute: how far apart two readings may be.
    """

    name: str
    series: str
    unit: Unit
    scale: float = 1.0
    absolute: float = 0.0
    labels: Mapping[str, str] | None = None


FIELDS = (
    Field("memory.total", "nvml_memory_total_bytes", "bytes", MIB, MIB),
    Field("memory.used", "nvml_memory_used_bytes", "bytes", MIB, FREE_TOLERANCE),
    Field("memory.free", "nvml_memory_free_bytes", "bytes", MIB, FREE_TOLERANCE),
    Field("memory.reserved", "nvml_memory_reserved_bytes", "bytes", MIB, MIB),
    Field("temperature.gpu", "nvml_temperature_celsius", "°C", 1, 5, {"sensor": "gpu"}),
    Field("enforced.power.limit", "nvml_power_limit_watts", "W", 1, 0.01),
    Field("clocks.max.sm", "nvml_clock_max_hertz", "count", 1e6, 0, {"domain": "sm"}),
    Field("pcie.link.gen.gpumax", "nvml_pcie_link_max_generation", "count"),
    Field("pcie.link.width.max", "nvml_pcie_link_max_width", "count"),
)


def series(figures: Figures) -> None:
    """Train for a few steps, export once, and compare."""
    session = sdk.instrument(interval=1e-6)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in BATCHES:
        model(torch.randn(batch, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    session.close()
    page = scraped_once()
    _of_pytorch(figures, page)
    _of_nvml(figures, page)
    if shutil.which(NVIDIA_SMI) and not figures.is_phantom:
        _of_nvidia_smi(figures, page)
    else:
        figures.missing(NVIDIA_SMI, "it is not there for this GPU")


def _of_pytorch(figures: Figures, page: Exposition) -> None:
    """Bytes and peaks are those of `memory_stats()`, and no step is missed."""
    stats = torch.cuda.memory_stats()
    for name in ("allocated", "active", "reserved"):
        current = sum(page.matching(f"torchmem_{name}_bytes").values())
        figures.close(f"torchmem_{name}_bytes", current, stats[f"{name}_bytes.all.current"])
        peak = page.value(f"torchmem_{name}_peak_bytes")
        figures.close(f"torchmem_{name}_peak_bytes", peak, stats[f"{name}_bytes.all.peak"])
    steps = page.value("torchmem_steps_total")
    figures.close("torchmem_steps_total", steps, len(BATCHES), "count")


def _of_nvml(figures: Figures, page: Exposition) -> None:
    """NVML's parts add up, it agrees with CUDA, and the process is joined with its GPU."""
    figures.close("nvml_up", page.value("nvml_up"), 1, "count")
    parts = [_of_gpu(page, f"nvml_memory_{part}_bytes") for part in ("used", "free", "reserved")]
    total = _of_gpu(page, "nvml_memory_total_bytes")
    known = sum(part for part in parts if part is not None)
    figures.close("used + free + reserved, by nvml_memory_*", known, total)
    free, _ = torch.cuda.mem_get_info()
    figures.close(
        "nvml_memory_free_bytes, beside cudaMemGetInfo",
        _of_gpu(page, "nvml_memory_free_bytes"),
        free,
        absolute=FREE_TOLERANCE,
    )
    joined = [dict(labels).get("gpu") for labels in page.matching("torchmem_reserved_peak_bytes")]
    figures.add(
        "GPU of the process", str(joined[0] if joined else None), "text", right=joined != [None]
    )


def _of_nvidia_smi(figures: Figures, page: Exposition) -> None:
    """Fields of the GPU, and the memory of this process."""
    for field in FIELDS:
        answer = _query("--query-gpu=" + field.name).split(",")[0]
        series = _of_gpu(page, field.series, **(field.labels or {}))
        try:
            there = float(answer) * field.scale
        except ValueError:
            right = series is None  # nvidia-smi says [N/A]
            figures.add(field.series, str(series), "text", answer, right=right)
            continue
        figures.close(field.series, series, there, field.unit, absolute=field.absolute)
    apps = [line.split(", ") for line in _query("--query-compute-apps=pid,used_memory").split("\n")]
    own = [float(app[1]) for app in apps if app[0] == str(os.getpid())]
    process = page.value("nvml_process_memory_bytes", pid=str(os.getpid()))
    if own:
        figures.close("nvml_process_memory_bytes", process, own[0] * MIB, absolute=FREE_TOLERANCE)
    else:
        figures.missing("nvml_process_memory_bytes", "nvidia-smi does not list this process")


def _query(query: str) -> str:
    """Return the answer, which for a field that nvidia-smi lacks is a sentence."""
    command = [NVIDIA_SMI, "--id=0", query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _of_gpu(page: Exposition, name: str, **labels: str) -> float | None:
    """Return the value of the first GPU."""
    values = page.by("gpu", name, **labels)
    return values.get("0")


def events(figures: Figures) -> None:
    """Wait for events of the driver as the exporter does; none comes, and waiting costs nothing."""
    driver = Driver(PyNvml())
    try:
        uuids = [gpu.uuid for gpu in driver.list_gpus().present]
        found = driver.nvml.subscribe(uuids)
        if found is None:
            figures.missing("events", "the driver reports no events of this GPU")
            return
        for uuid, kinds in found.kinds.items():
            figures.add(f"events of {uuid}", ", ".join(sorted(kinds)), "text", right="xid" in kinds)
        cpu = time.process_time()
        event = found.wait(2.0)
        figures.add("event within 2 s", str(event), "text", right=event is None)
        figures.add("CPU of that wait", time.process_time() - cpu, "seconds")
        found.close()
    finally:
        driver.close()
    page = scraped_once()
    values = page.matching("nvml_xid_errors_total").values()
    figures.add("nvml_xid_errors_total", sum(values), "count")
