"""Checks what `torchmem capture` adds to a snapshot (`torchmem.sdk.capture.recorded_history`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchmem.trace.checked_values import LIMIT, damaged
from torchmem.trace.content import MAX_DEVICES, check_segments
from torchmem.trace.recording import CaptureFacts
from torchmem.trace.stacks import StackTable

MAX_VERSION_LENGTH = 100
SIZES = ("total_bytes", "limit_bytes", "free_bytes", "reserved_bytes", "allocated_peak_bytes")


def check_facts(value: object, trace_lengths: Mapping[int, int]) -> dict[int, CaptureFacts]:
    """Return the facts of each device with a trace; `trace_lengths` are numbers of its entries.

    `value` is None for a snapshot that `torchmem capture` did not write.

    Raises:
        InvalidSnapshotError: they are not those of a capture.
    """
    if value is None:
        return {}
    facts = _mapping(value)
    version = _mapping(facts.get("versions")).get("torch", "")
    if type(version) is not str or len(version) > MAX_VERSION_LENGTH:
        raise damaged("its version of PyTorch is invalid")
    devices, sizes = _mapping(facts.get("devices")), _block_sizes(facts.get("segments"))
    max_entries = _size(facts, "max_entries") or 0
    return {
        device: CaptureFacts(
            version,
            sizes.get(device, {}) if entries < max_entries else {},
            **_sizes(_mapping(devices.get(device, {}))),
        )
        for device, entries in trace_lengths.items()
    }


def _block_sizes(segments: object) -> dict[int, dict[int, int]]:
    """Return the size of each block in use by device and address."""
    return {
        device: {
            block.address: block.size
            for segment in of_device.segments
            for block in segment.blocks
            if block.state != "inactive"
        }
        for device, of_device in check_segments(segments, StackTable()).items()
    }


def _sizes(device: Mapping[Any, Any]) -> dict[str, int | None]:
    return {name: _size(device, name) for name in SIZES}


def _size(values: Mapping[Any, Any], name: str) -> int | None:
    size = values.get(name)
    if size is not None and (type(size) is not int or not 0 <= size < LIMIT):
        raise damaged(f"its {name} is invalid")
    return size


def _mapping(value: object) -> Mapping[Any, Any]:
    if type(value) is not dict or len(value) > MAX_DEVICES:
        raise damaged("what torchmem capture added to it was changed")
    return value
