"""A driver that is up returns every code and garbage: it costs that value, or that GPU, only."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest
from support.exposition import Exposition, scrape
from support.fake_nvml import FakeNode

from torchmem.exporter.collect import Exporter

OpenExporter = Callable[..., Exporter]
Scrape = Callable[[], Exposition]
CODES = {
    name.removeprefix("NVML_ERROR_"): code
    for name, code in vars(pynvml).items()
    if name.startswith("NVML_ERROR_")
}
LOST = {
    "TIMEOUT",
    "IRQ_ISSUE",
    "GPU_IS_LOST",
    "RESET_REQUIRED",
    "OPERATING_SYSTEM",
    "GPU_NOT_FOUND",
}
NEEDED = ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID")
OPTIONAL = (
    "nvmlDeviceGetName",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetSupportedEventTypes",
    "nvmlGpmQueryDeviceSupport",
)
OF_THE_SYSTEM = (
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetNVMLVersion",
    "nvmlSystemGetCudaDriverVersion_v2",
    "nvmlEventSetCreate",
)


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    """Two H100."""
    node = FakeNode(tmp_path / "node", "h100_busy")
    for index in range(2, 8):
        node.remove(f"gpu {index}")
    node.change("gpu *", SupportedEventTypes="not_supported")  # no thread that waits for events
    return node


@pytest.fixture
def scrape_node(open_exporter: OpenExporter, node: FakeNode) -> Scrape:
    """Return a function that scrapes the node with a new exporter."""
    return lambda: scrape(open_exporter(node.nvml(clock=lambda: 1e9, monotonic=lambda: 1.0)))


def series_of(
    exposition: Exposition, gpu: str
) -> set[tuple[str, frozenset[tuple[str, str]], float]]:
    """Return everything about one GPU, except the version of the driver."""
    rows = (
        (name, labels, value)
        for name in exposition.series
        for labels, value in exposition.series[name].items()
    )
    return {
        (name, frozenset((key, text) for key, text in labels if key != "driver_version"), value)
        for name, labels, value in rows
        if ("gpu", gpu) in labels
    }


@pytest.mark.parametrize("code", CODES)
def test_code_costs_one_value_or_one_gpu(node: FakeNode, scrape_node: Scrape, code: str) -> None:
    """Whatever function returns it, NVML is up and the other GPU complete."""
    before, text = series_of(scrape_node(), "1"), node.text
    for function in (*NEEDED, *OPTIONAL):
        node.write(f"{text}\n[gpu 0]\n{function} = #{CODES[code]}\n")
        exposition = scrape_node()

        assert exposition.by("reason", "nvml_up") == {"": 1.0}, function
        assert before == series_of(exposition, "1"), function
        is_up = function in OPTIONAL and (code not in LOST or "Event" in function)
        assert float(is_up) == exposition.value("nvml_gpu_up", gpu="0"), function


@pytest.mark.parametrize("code", CODES)
def test_code_of_a_function_of_the_system_costs_one_value(
    node: FakeNode, scrape_node: Scrape, code: str
) -> None:
    """A version that cannot be read, or events without a subscription, cost nothing else."""
    text = node.text
    for function in OF_THE_SYSTEM:
        node.write(f"{text}\n[node]\n{function} = #{CODES[code]}\n")
        exposition = scrape_node()

        assert exposition.by("reason", "nvml_up") == {"": 1.0}, function
        assert exposition.by("gpu", "nvml_gpu_up") == {"0": 1.0, "1": 1.0}, function


@pytest.mark.parametrize(
    "key", ["Name", "VbiosVersion", "UUID", "PciInfo", "SystemGetDriverVersion"]
)
def test_text_that_is_not_utf_8_is_escaped(node: FakeNode, scrape_node: Scrape, key: str) -> None:
    """A name with invalid bytes costs nothing."""
    before = series_of(scrape_node(), "1")
    node.change("node" if key.startswith("System") else "gpu 0", **{key: "a\udcff\udcfeb"})
    exposition = scrape_node()

    assert exposition.by("reason", "nvml_up") == {"": 1.0}
    assert exposition.by("gpu", "nvml_gpu_up") == {"0": 1.0, "1": 1.0}
    assert before == series_of(exposition, "1")
    texts = {
        text for series in exposition.series.values() for labels in series for _, text in labels
    }
    assert key == "PciInfo" or "a\\xff\\xfeb" in texts


LIMITS = {"_ratio": 2, "_celsius": 300, "_watts": 1e5, "_hertz": 1e12, "_bytes": 1 << 50}


@pytest.mark.parametrize(
    "number", [0, 1, (1 << 31), (1 << 32) - 2, (1 << 32) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1]
)
def test_garbage_is_absent(node: FakeNode, scrape_node: Scrape, number: int) -> None:
    """Numbers that no GPU has are left out, and none is negative or not a number."""
    before, text = series_of(scrape_node(), "1"), node.text
    values = re.findall(r"^(\w+) = ([\d ]+)$", text, re.MULTILINE)
    keys = {key: len(numbers.split()) for key, numbers in values if not key.startswith("System")}
    fields = re.findall(r"^(FieldValue[\w.]+) = (\w+) \d+$", text, re.MULTILINE)
    garbage = "".join(f"{key} = {kind} {number}\n" for key, kind in fields)
    garbage += "".join(f"{key} = {f'{number} ' * count}\n" for key, count in keys.items())
    node.write(f"{text}\n[gpu 0]\n{garbage}")
    exposition = scrape_node()

    assert fields
    assert {"PowerUsage", "MemoryInfo", "NumFans", "Temperature"} <= keys.keys()
    assert exposition.by("reason", "nvml_up") == {"": 1.0}
    assert before == series_of(exposition, "1")
    for name, _, value in series_of(exposition, "0"):
        limits = [limit for unit, limit in LIMITS.items() if name.endswith(unit)]
        assert 0 <= value <= min(limits, default=math.inf), name
