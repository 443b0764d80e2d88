"""What to do about NCCL's communicators, where they hold much of a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.sizes import format_size
from torchmem.explain.oom_report import OomReport, format_seconds
from torchmem.explain.remedy import Remedy
from torchmem.sample.libraries import Communicator, held_bytes, joined

SUBSTANTIAL = 0.05
"""The share of the device's memory from which communicators are worth a remedy."""
IDLE_SECONDS = 300.0
"""Communicators without a collective for this long are idle."""


def communicator_remedies(report: OomReport) -> Iterator[Remedy]:
    """Yield how the communicators of a rank hold less; nothing if they hold little."""
    groups, total = report.device.communicators, report.device.total_bytes
    if not total:
        return
    idle = {
        name: each
        for name, each in groups.items()
        if each.idle_since is not None and report.timestamp - each.idle_since >= IDLE_SECONDS
    }
    if sum(each.suspendable_bytes for each in idle.values()) >= SUBSTANTIAL * total:
        yield _suspend(report, idle)
    if held_bytes(groups.values()) >= SUBSTANTIAL * total:
        yield _fewer(groups)


def _suspend(report: OomReport, idle: dict[str, Communicator]) -> Remedy:
    all_idle = joined(idle.values())
    size, since = all_idle.suspendable_bytes, report.timestamp - (all_idle.idle_since or 0.0)
    beyond = size - (report.oom.requested_bytes or 0)
    groups = f"process group{'s' * (len(idle) > 1)} {', '.join(sorted(idle))}"
    return Remedy(
        "suspend_communicators",
        f"Suspend the NCCL communicators of {groups}, which have begun no collective for "
        f"{format_seconds(since)} and hold {format_size(size)} that NCCL can give back meanwhile. "
        "All ranks must call it, and resume before the next collective.",
        ("session.suspend_communicators()", "session.resume_communicators()"),
        gain_bytes=beyond if beyond > 0 else None,
    )


def _fewer(groups: dict[str, Communicator]) -> Remedy:
    size, count = format_size(held_bytes(groups.values())), len(groups)
    name = max(groups, key=lambda group: groups[group].held_bytes)
    if count > 1:
        most = format_size(groups[name].held_bytes)
        text = (
            f"NCCL's communicators hold {size}: {count} process groups, the largest {name} with "
            f"{most}. Create fewer groups, or give each of them smaller buffers and fewer channels"
        )
    else:
        text = (
            f"NCCL's communicators of the process group {name} hold {size}. Give them smaller "
            "buffers and fewer channels"
        )
    return Remedy(
        "fewer_communicators",
        f"{text}, which costs bandwidth.",
        ("export NCCL_BUFFSIZE=1048576  # 4194304 by default", "export NCCL_MAX_NCHANNELS=8"),
    )
