"""The dashboard "GPU node": what nvidia-smi shows, over time, with the processes' names, users and ranks."""

from __future__ import annotations

from dashboards import choices, common
from dashboards.boards.node import errors, glance, heat, links, memory, work
from dashboards.panels import Board, Note
from dashboards.queries import node

XID_NOTE = Note("XID", node.xid_moments(), "XID {{xid}} on {{instance}} GPU {{gpu}}", "red")

BOARD = Board(
    common.NODE,
    "GPU node",
    "The GPUs of a node as the driver sees them: memory and who holds it, work, power and heat, errors, links, MIG.",
    choices.NODES,
    {
        "At a glance": glance.panels(),
        "Memory, and who holds it": memory.panels(),
        "Work": work.panels(),
        "Power, heat and clocks": heat.panels(),
        "Errors": errors.panels(),
        "PCIe and NVLink": links.panels(),
        "MIG": memory.mig(),
    },
    (XID_NOTE,),
)
