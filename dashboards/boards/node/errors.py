"""What went wrong in the hardware or its driver."""

from __future__ import annotations

from dashboards import common
from dashboards.panels import Column, Panel, Query, Text, joined_table, lines
from dashboards.panels.units import AGO, COUNT
from dashboards.queries import node

# In the words of this project, after NVIDIA's list of XID errors (docs.nvidia.com/deploy/xid-errors).
XIDS = {
    "13": "13: a kernel failed, most often a fault of the program",
    "31": "31: a kernel read or wrote a wrong address, most often a fault of the program",
    "43": "43: a program's work was stopped, often after another error",
    "45": "45: work was removed, often because the program ended",
    "48": "48: memory error that ECC could not correct; reset the GPU",
    "63": "63: a broken row of memory was replaced; reset the GPU at the next chance",
    "64": "64: a broken row of memory could not be replaced; reset, then exchange the GPU",
    "74": "74: NVLink error; look at the links below",
    "79": "79: the GPU fell off the bus; reboot, then check power and seat",
    "92": "92: many corrected memory errors; watch it",
    "94": "94: uncorrected memory error, contained: only the program that met it must restart",
    "95": "95: uncorrected memory error, not contained; reset the GPU",
    "119": "119: the GPU's own processor does not answer; reset the GPU",
    "120": "120: error of the GPU's own processor; reset the GPU",
}


def panels() -> list[Panel]:
    """XIDs, then what memory and links count."""
    return [_xids(), _ecc(), _rows(), _link_errors(), _replays()]


def _xids() -> Panel:
    text = Text(
        "XID errors",
        "What did the driver report, and what does it mean? Since the exporter started; errors of a program are seen "
        "here too.",
        "No XID error since the exporter started",
    )
    columns = [
        Column("Node", label="instance"),
        Column("GPU", label="gpu"),
        Column("XID", label="xid", words=XIDS),
        Column("Times", node.xid_counts()),
        Column("Newest", node.xid_times(), unit=AGO),
    ]
    return joined_table(text, columns, sort="Newest", descending=True).height(7)


def _ecc() -> Panel:
    text = Text(
        "Memory errors (ECC)",
        "Does the memory fail? Since the driver started. Corrected errors cost nothing; an uncorrected one ends the "
        "program that met it.",
        "This GPU has no ECC",
    )
    return lines(
        text,
        [Query(node.value("ecc_errors_total", scope="volatile"), f"{common.GPU}, {{{{kind}}}}")],
        COUNT,
    )


def _rows() -> Panel:
    text = Text(
        "Replaced rows and pages",
        "How much of the memory has been replaced for good? Rows on GPUs from Ampere on, pages on older ones. A "
        "replacement that is pending waits for a reset.",
        "This GPU does not replace memory",
    )
    queries = [
        Query(node.value("remapped_rows"), f"{common.GPU}, rows {{{{kind}}}}"),
        Query(node.value("row_remap_pending"), f"{common.GPU}, rows pending"),
        Query(node.value("row_remap_failed"), f"{common.GPU}, rows failed"),
        Query(node.value("retired_pages"), f"{common.GPU}, pages {{{{cause}}}}"),
        Query(node.value("retired_pages_pending"), f"{common.GPU}, pages pending"),
    ]
    return lines(text, queries, COUNT)


def _link_errors() -> Panel:
    text = Text(
        "NVLink errors per minute",
        "Is a link between GPUs bad? Replays and recoveries slow collectives down. All links of a GPU in sum: which "
        "one it is tells `nvidia-smi nvlink -e` on the node.",
        "This GPU has no NVLink",
    )
    query = Query(node.per_minute("nvlink_errors_total"), f"{common.GPU}, {{{{kind}}}}")
    return lines(text, [query], COUNT)


def _replays() -> Panel:
    text = Text(
        "PCIe replays per minute",
        "Is the connection to the host bad? Packets sent again; a few are harmless, a steady stream is a bad slot, "
        "riser or cable.",
        "This GPU does not tell",
    )
    return lines(text, [Query(node.per_minute("pcie_replays_total"), common.GPU)], COUNT)
