"""The ways in and out of a GPU."""

from __future__ import annotations

from dashboards import common
from dashboards.panels import Column, Panel, Query, Text, joined_table, lines
from dashboards.panels.units import BYTES_PER_SECOND, COUNT
from dashboards.queries import node

NO_NVLINK = "This GPU has no NVLink"


def panels() -> list[Panel]:
    """PCIe, then NVLink."""
    return [_pcie(), _pcie_traffic(), _nvlink_traffic(), _nvlinks()]


def _pcie() -> Panel:
    text = Text(
        "PCIe links",
        "Does each GPU have the connection that it could have? Fewer lanes than the most is a bad seat or slot. A "
        "lower generation while idle saves power and is no fault.",
        "No GPU: NVML does not answer",
    )
    columns = [
        Column("Node", label="instance"),
        Column("GPU", label="gpu"),
        Column("Generation", node.column("pcie_link_generation")),
        Column("At most", node.column("pcie_link_max_generation")),
        Column("Lanes", node.column("pcie_link_width")),
        Column("Lanes at most", node.column("pcie_link_max_width")),
    ]
    return joined_table(text, columns).span(12)


def _pcie_traffic() -> Panel:
    text = Text(
        "PCIe traffic",
        "How much goes between host and GPU? rx: to the GPU. A loader that copies pageable memory, or offloading, "
        "shows here. The exporter reads it where that is switched on, or GPM tells it.",
        "Not read: switch it on in the exporter's configuration",
    )
    queries = [
        Query(node.value("pcie_throughput_bytes_per_second"), f"{common.GPU}, {{{{direction}}}}"),
        Query(node.value("gpm_pcie_bytes_per_second"), f"{common.GPU}, {{{{direction}}}} (GPM)"),
    ]
    return lines(text, queries, BYTES_PER_SECOND).height(9)


def _nvlink_traffic() -> Panel:
    text = Text(
        "NVLink traffic",
        "How much goes between GPUs? Collectives of data and tensor parallel training show here.",
        NO_NVLINK,
    )
    queries = [
        Query(node.per_second("nvlink_bytes_total"), f"{common.GPU}, {{{{direction}}}}"),
        Query(node.value("gpm_nvlink_bytes_per_second"), f"{common.GPU}, {{{{direction}}}} (GPM)"),
    ]
    return lines(text, queries, BYTES_PER_SECOND)


def _nvlinks() -> Panel:
    text = Text(
        "NVLinks up",
        "How many links of each GPU work? All GPUs of one kind have equally many; one with fewer slows the whole ring.",
        NO_NVLINK,
    )
    return lines(text, [Query(node.links_up(), common.GPU)], COUNT)
