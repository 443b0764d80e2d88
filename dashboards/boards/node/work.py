"""Whether the GPUs work, and with which of their parts."""

from __future__ import annotations

from dashboards import common
from dashboards.panels import Panel, Query, Text, lines
from dashboards.panels.units import RATIO
from dashboards.queries import node

NO_GPU = "No GPU: NVML does not answer"
NO_GPM = "Only data center GPUs from Hopper on tell this"

PARTS = {
    "sm_active_ratio": "SMs busy",
    "sm_occupancy_ratio": "SMs' warps",
    "tensor_active_ratio": "Tensor cores",
    "dram_active_ratio": "Memory bus",
}


def panels() -> list[Panel]:
    """Coarse, fine, and the engines beside the SMs."""
    return [
        lines(
            Text("Busy", "Does each GPU have something to do? Share of time in which at least one kernel ran; 100 % "
                 "says nothing of how much of the GPU that kernel used.", NO_GPU),
            [Query(node.value("utilization_ratio", engine="gpu"), common.GPU)], RATIO).max(1),
        lines(
            Text("Memory traffic", "Is memory read or written? Share of time in which it was. High with a low Busy "
                 "of the tensor cores means that the job waits for memory.", NO_GPU),
            [Query(node.value("utilization_ratio", engine="memory"), common.GPU)], RATIO).max(1),
        lines(
            Text("Parts of the GPU at work", "How well is the hardware really used? Shares of the time or of the "
                 "places, by part. Matrix work that does not show at the tensor cores runs in 32 bits.", NO_GPM),
            [Query(node.value(name), f"{common.GPU}: {words}") for name, words in PARTS.items()], RATIO).max(1),
        lines(
            Text("Video and image engines", "Do decoders or encoders limit a data pipeline?", "This GPU has none"),
            [
                Query(node.value("utilization_ratio", engine=engine), f"{common.GPU}: {engine}")
                for engine in ("encoder", "decoder", "jpeg", "ofa")
            ], RATIO).max(1),
    ]  # fmt: skip
