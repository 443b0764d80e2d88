"""XID errors of NVIDIA GPUs: NVIDIA's name, what happened, what to do, and how severe it is.

The exporter, the alert rules, the dashboards and the runbook read this table. Source: NVIDIA, "XID
Errors", docs.nvidia.com/deploy/xid-errors, driver 580. Drivers can report other codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["application", "warning", "critical"]
"""application: usually caused by the program, not by the GPU; warning: the GPU still works, service
it when convenient; critical: the GPU or its driver needs attention now."""


@dataclass(frozen=True, slots=True)
class Xid:
    """One XID: `name` is NVIDIA's, `meaning` and `action` (may be empty) are short phrases."""

    number: int
    name: str
    meaning: str
    action: str
    severity: Severity

    @property
    def summary(self) -> str:
        """Number, meaning and action in one line, as the dashboards show it."""
        action = f"; {self.action}" if self.action else ""
        return f"{self.number}: {self.meaning}{action}"


_TABLE = (
    Xid(
        13,
        "Graphics Engine Exception",
        "a kernel failed, usually because of a bug in the program",
        "",
        "application",
    ),
    Xid(
        31,
        "GPU memory page fault",
        "a kernel accessed an invalid address, usually because of a bug in the program",
        "",
        "application",
    ),
    Xid(
        43,
        "GPU stopped processing",
        "the work of a program was stopped, often after another error",
        "",
        "application",
    ),
    Xid(
        45,
        "Preemptive cleanup, due to previous errors",
        "work was removed, often because the program ended",
        "",
        "application",
    ),
    Xid(
        48,
        "Double Bit ECC Error",
        "memory error that ECC could not correct",
        "reset the GPU",
        "critical",
    ),
    Xid(
        63,
        "Row remapping or page retirement recorded",
        "a faulty memory row was remapped",
        "reset the GPU when it is idle",
        "warning",
    ),
    Xid(
        64,
        "Row remapping or page retirement failed",
        "a faulty memory row could not be remapped",
        "reset the GPU, then have it replaced",
        "critical",
    ),
    Xid(74, "NVLink Error", "NVLink error", "check the NVLink error counters", "critical"),
    Xid(
        79,
        "GPU has fallen off the bus",
        "the GPU fell off the bus",
        "reboot, then check power and seating",
        "critical",
    ),
    Xid(
        92,
        "High single-bit ECC error rate",
        "many corrected memory errors",
        "watch the GPU",
        "warning",
    ),
    Xid(
        94,
        "Contained ECC error",
        "uncorrectable memory error, contained to one program",
        "restart that program",
        "critical",
    ),
    Xid(
        95,
        "Uncontained ECC error",
        "uncorrectable memory error, not contained",
        "reset the GPU",
        "critical",
    ),
    Xid(
        119,
        "GSP RPC Timeout",
        "the GPU System Processor (GSP) does not respond",
        "reset the GPU and update the driver",
        "critical",
    ),
    Xid(
        120,
        "GSP Error",
        "error of the GPU System Processor (GSP)",
        "reset the GPU and update the driver",
        "critical",
    ),
)

XIDS: dict[int, Xid] = {xid.number: xid for xid in _TABLE}

APPLICATION_XIDS = tuple(xid.number for xid in _TABLE if xid.severity == "application")
"""XIDs that the alert on hardware errors ignores by default."""
