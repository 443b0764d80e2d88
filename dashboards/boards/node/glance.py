"""Numbers, and one row per GPU as nvidia-smi prints it."""

from __future__ import annotations

from dashboards.panels import Column, Panel, Query, Text, joined_table, stat_panel
from dashboards.panels.units import BYTES, CELSIUS, COUNT, RATIO, WATTS
from dashboards.queries import node

NO_GPU = "No GPU: NVML does not answer"


def panels() -> list[Panel]:
    """Five numbers and the table of GPUs."""
    return [*_numbers(), _gpus()]


def _numbers() -> list[Panel]:
    return [
        stat_panel(
            Text("GPUs that answer", "How many GPUs does the driver reach?", NO_GPU), Query(node.answering()), COUNT),
        stat_panel(
            Text("GPUs lost", "How many GPUs stopped answering? The table shows which: they have a name, but no "
                 "values. A lost GPU usually needs a reset or a reboot.", NO_GPU),
            Query(node.lost()), COUNT, warn_above=1),
        stat_panel(
            Text("XID errors in range", "How many errors did the driver report in the chosen time range? The row "
                 "Errors says which and what they mean.", NO_GPU),
            Query(node.xids()), COUNT, warn_above=1),
        stat_panel(
            Text("Power of all", "How much do the chosen GPUs draw together?", NO_GPU), Query(node.power()), WATTS),
        stat_panel(
            Text("Driver", "Which versions of driver and CUDA are installed, on how many nodes? More than one may be "
                 "an update half done.", NO_GPU),
            Query(node.drivers(), "driver {{driver_version}}, CUDA {{cuda_version}}"), COUNT).span(8),
    ]  # fmt: skip


def _gpus() -> Panel:
    text = Text(
        "GPUs",
        "What would nvidia-smi show now? Uncorrected: memory errors that ECC could not correct since the driver "
        "started. State: P0 is full speed, P8 is idle.",
        NO_GPU,
    )
    columns = [
        Column("Node", label="instance"),
        Column("GPU", label="gpu", width=60),
        Column("Name", node.column("gpu_info", "name", "pci_bus_id"), label="name"),
        Column("Bus id", node.column("gpu_info", "name", "pci_bus_id"), label="pci_bus_id"),
        Column("Fan", node.column("fan_speed_ratio"), unit=RATIO),
        Column("Temperature", node.column("temperature_celsius", sensor="gpu"), unit=CELSIUS),
        Column("State", node.column("performance_state")),
        Column("Power", node.column("power_watts"), unit=WATTS),
        Column("Limit", node.column("power_limit_watts"), unit=WATTS),
        Column("Memory used", node.column("memory_used_bytes"), unit=BYTES),
        Column("Memory", node.column("memory_total_bytes"), unit=BYTES),
        Column("Used", node.memory_share(), unit=RATIO, bar=True),
        Column("Busy", node.column("utilization_ratio", engine="gpu"), unit=RATIO, bar=True),
        Column("Processes", node.column("processes")),
        Column(
            "Uncorrected", node.column("ecc_errors_total", kind="uncorrected", scope="volatile")
        ),
        Column("MIG", node.column("mig_enabled"), words={"0": "off", "1": "on"}),
    ]
    return joined_table(text, columns)
