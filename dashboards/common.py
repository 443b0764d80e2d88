"""What several dashboards show alike: legends, the parts of a GPU's memory, where a click leads."""

from __future__ import annotations

from collections.abc import Callable

from dashboards.colors import PARTS
from dashboards.panels import Note, Query
from dashboards.queries import ranks

FLEET, TRAINING, NODE, OOM, ITSELF = (
    "torchmem-fleet",
    "torchmem-training-memory",
    "torchmem-node",
    "torchmem-oom",
    "torchmem-self",
)

RANK = "{{run}} rank {{rank}}"
GPU = "{{instance}} GPU {{gpu}}"

PART_NAMES = {
    "in_use": "In use by tensors",
    "stranded": "Stranded",
    "releasable": "Cached, releasable",
    "private_pools": "Free in private pools",
    "cached": "Cached, no snapshot yet",
    "outside_allocator": "Outside the allocator",
    "other_processes": "Other processes",
    "driver": "Driver",
    "not_pytorch": "Not PyTorch (no NVML)",
    "free": "Free",
}

PARTS_EXPLAINED = (
    "In use: tensors of the ranks. Stranded: cached by PyTorch, but pinned between live blocks. Cached, releasable: "
    "whole free segments, given back when needed. Outside the allocator: CUDA context, NCCL, cuBLAS. Only processes "
    "that are alive count."
)

OOM_NOTE = Note(
    "Out of memory", ranks.oom_moments(), "{{run}} rank {{rank}} on {{instance}} GPU {{gpu}}", "red"
)


def parts(query: Callable[[str], str]) -> list[Query]:
    """The areas that add up to a device; `query` gives the expression of a part."""
    return [Query(query(part), name, PARTS[part]) for part, name in PART_NAMES.items()]


def link(uid: str, title: str, **columns: str) -> tuple[str, str]:
    """Where a click on a cell leads: another dashboard, its variables set from columns of the same row."""
    chosen = "".join(
        f"&var-{name}=${{__data.fields[{column!r}]:percentencode}}"
        for name, column in columns.items()
    )
    return f"Open {title}", f"/d/{uid}?${{__url_time_range}}&${{datasource:queryparam}}{chosen}"
