"""A snapshot with the keys that each version of PyTorch writes, from that of the newest."""

from __future__ import annotations

import copy
from typing import Any

LATER_KEYS = ("pool_id", "user_metadata", "compile_context", "time_us")
"""Keys of trace entries that PyTorch added after 2.1, the newest first."""


def older(snapshot: dict[str, Any], removed: int) -> dict[str, Any]:
    """Return the snapshot without the newest `removed` keys of entries, 0 to 4.

    Without times there are neither settings nor annotations.
    """
    result = copy.deepcopy(snapshot)
    for trace in result["device_traces"]:
        for entry in trace:
            for key in LATER_KEYS[:removed]:
                entry.pop(key, None)
    if removed == len(LATER_KEYS):
        del result["allocator_settings"], result["external_annotations"]
    return result


def as_20(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return the snapshot as PyTorch 2.0 writes it.

    Blocks have no address, and a list of the allocations that they have served; segments have
    neither a pool nor a mark of expandable ones. Stacks may have lines of C++ beside them.
    """
    result = older(snapshot, len(LATER_KEYS))
    for segment in result["segments"]:
        for key in ("segment_pool_id", "is_expandable", "frames"):
            segment.pop(key, None)
        for block in segment["blocks"]:
            _as_20(block)
    for trace in result["device_traces"]:
        for entry in trace:
            entry["cpp_frames"] = ["frame #0: c10::Allocator"]
    return result


def _as_20(block: dict[str, Any]) -> None:
    address, frames = block.pop("address"), block.pop("frames", [])
    requested = block.pop("requested_size")
    if block["state"] != "inactive":
        newest = {"addr": address, "real_size": requested, "frames": frames}
        block["history"] = [newest, {"addr": address, "real_size": 1}]
